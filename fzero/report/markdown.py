"""A report as Markdown: the same first screen and sections as the page, with links to picture files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fzero.report.opening import opening
from fzero.report.parts import Code, Part, Picture, Section, Table
from fzero.report.sections_compare import sections
from fzero.report.values import Report, RunReport


def write(report: Report, *, runs: bool = True) -> str:
    """Format the report as one Markdown text. `runs`: with the sections of single runs, not only the comparison."""
    lines = [f"# {report.title}", *opening_lines(opening(report)), "", note(report)]
    for i, (run, found) in enumerate(sections(report)):
        several = report.compared is not None
        if run is not None and not runs:
            continue
        if several:
            lines += ["", f"## {'All runs' if run is None else run.name}"]
        prefix = prefix_of(report, i)
        for section in found:
            lines += ["", f"{'###' if several else '##'} {section.title}"]
            for part in section.parts:
                lines += ["", part_text(part, prefix)]
    return "\n".join(lines) + "\n"


def opening_lines(section: Section) -> list[str]:
    """The lines of the first screen, its small pictures in one row of a table."""
    pictures = [part for part in section.parts if isinstance(part, Picture)]
    lines = []
    for part in section.parts:
        if not isinstance(part, Picture):
            lines += ["", f"{part.caption}:", ""] if isinstance(part, Table) else [""]
            lines.append(part_text(part))
    if pictures:
        cells = tuple(part_text(picture) for picture in pictures)
        row = Table("pictures", "", tuple(picture.caption for picture in pictures), [cells], frozenset())
        lines += ["", table_text(row)]
    return lines


def note(report: Report) -> str:
    """Say which version wrote the report, and which command writes it again."""
    by = ", ".join(f"{name} {value}" for name, value in report.by.items() if value)
    return f"Written by {by}: `{report.command}`."


def prefix_of(report: Report, index: int) -> str:
    """The prefix of the picture names of the run at this index of `sections`; empty in a report of one run."""
    if report.compared is None or index == 0:
        return ""
    return f"{index}-"


def all_parts(report: Report) -> Iterator[tuple[RunReport | None, str, Part]]:
    """(the run or None, the prefix of its picture names, a part) of all parts of a report, in their order."""
    yield from ((None, "", part) for part in opening(report).parts)
    for i, (run, found) in enumerate(sections(report)):
        for section in found:
            yield from ((run, prefix_of(report, i), part) for part in section.parts)


def part_text(part: Part, prefix: str = "") -> str:
    """A part of a section as Markdown; prefix: of its picture's file name."""
    if isinstance(part, Table):
        return table_text(part)
    if isinstance(part, Picture):
        return picture_text(part, f"{prefix}{part.name}.svg")
    if isinstance(part, Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", part.text)), default=0))  # the text may have fences
        opened = " open" * part.open
        head = f"<details{opened}><summary>{part.caption}</summary>"
        return f"{head}\n\n{fence}{part.kind}\n{part.text}\n{fence}\n\n</details>"
    return part


def table_text(table: Table) -> str:
    """Format a table, with cells escaped."""
    rows = [table.head, tuple("---:" if i in table.right else "---" for i in range(len(table.head))), *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def picture_text(picture: Picture, path: str) -> str:
    """Format a picture with its alternative text."""
    alt = picture.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{alt}]({path})"


def find(report: Report, name: str) -> tuple[Table | Picture, str] | None:
    """Return (table or picture, prefix of its file) for a name as in `names`; None if there is none."""
    for _, prefix, part in all_parts(report):
        if isinstance(part, (Table, Picture)) and name_of(part, prefix) == name:
            return part, prefix
    return None


def name_of(part: Table | Picture, prefix: str) -> str:
    """The name by which a table or picture is pasted: for a picture that of its file."""
    return f"{prefix}{part.name}{'.svg' if isinstance(part, Picture) else ''}"


def names(report: Report) -> list[str]:
    """The names of all tables and pictures of a report."""
    return [name_of(part, prefix) for _, prefix, part in all_parts(report) if isinstance(part, (Table, Picture))]
