"""A report as Markdown: the same sections as the page, with links to picture files beside it."""

from __future__ import annotations

import re

from fzero.report.parts import Code, Picture, Section, Table
from fzero.report.sections_compare import sections
from fzero.report.values import Report


def write(report: Report, *, runs: bool = True) -> str:
    """Format the report as one Markdown text. `runs`: with the sections of single runs, not only the comparison."""
    lines = [f"# {report.title}", "", note(report)]
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


def note(report: Report) -> str:
    """Say which version wrote the report, and which command writes it again."""
    by = ", ".join(f"{name} {value}" for name, value in report.by.items() if value)
    return f"Written by {by}: `{report.command}`."


def prefix_of(report: Report, index: int) -> str:
    """The prefix of the picture names of the run at this index of `sections`; empty in a report of one run."""
    if report.compared is None or index == 0:
        return ""
    return f"{index}-"


def part_text(part: str | Table | Picture | Code, prefix: str = "") -> str:
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


def find(report: Report, name: str) -> tuple[Section, Table | Picture, str] | None:
    """Return (section, table or picture, prefix of its file) for a name as in `names`; None if there is none."""
    for i, (_, found) in enumerate(sections(report)):
        prefix = prefix_of(report, i)
        for section in found:
            for part in section.parts:
                if isinstance(part, (Table, Picture)) and name_of(part, prefix) == name:
                    return section, part, prefix
    return None


def name_of(part: Table | Picture, prefix: str) -> str:
    """The name by which a table or picture is pasted: for a picture that of its file."""
    return f"{prefix}{part.name}{'.svg' if isinstance(part, Picture) else ''}"


def names(report: Report) -> list[str]:
    """The names of all tables and pictures of a report."""
    return [
        name_of(part, prefix_of(report, i))
        for i, (_, found) in enumerate(sections(report))
        for section in found
        for part in section.parts
        if isinstance(part, (Table, Picture))
    ]
