"""A report as Markdown: the same first screen and sections as the page, with links to picture files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fzero.report.elements import Code, Element, Picture, ReportTable, Section
from fzero.report.first_screen import opening
from fzero.report.sections_compare import sections
from fzero.report.values import Report, RunReport


def write(report: Report, *, runs: bool = True) -> str:
    """Format the report as one Markdown text. `runs`: with the sections of single runs, not only the comparison."""
    lines = [f"# {report.title}", *opening_lines(opening(report)), "", note(report)]
    for i, (run, run_sections) in enumerate(sections(report)):
        several = report.compared is not None
        if run is not None and not runs:
            continue
        if several:
            lines += ["", f"## {'All runs' if run is None else run.name}"]
        prefix = prefix_of(report, i)
        for section in run_sections:
            lines += ["", f"{'###' if several else '##'} {section.title}"]
            for element in section.parts:
                lines += ["", element_text(element, prefix)]
    return "\n".join(lines) + "\n"


def opening_lines(section: Section) -> list[str]:
    """The lines of the first screen, its small pictures in one row of a table."""
    pictures = [element for element in section.parts if isinstance(element, Picture)]
    lines = []
    for element in section.parts:
        if not isinstance(element, Picture):
            lines += ["", f"{element.caption}:", ""] if isinstance(element, ReportTable) else [""]
            lines.append(element_text(element))
    if pictures:
        cells = tuple(element_text(picture) for picture in pictures)
        row = ReportTable("pictures", "", tuple(picture.caption for picture in pictures), [cells], frozenset())
        lines += ["", table_text(row)]
    return lines


def note(report: Report) -> str:
    """Say which version wrote the report, and which command writes it again."""
    author = ", ".join(f"{name} {value}" for name, value in report.by.items() if value)
    return f"Written by {author}: `{report.command}`."


def prefix_of(report: Report, index: int) -> str:
    """The prefix of the picture names of the run at this index of `sections`; empty in a report of one run."""
    if report.compared is None or index == 0:
        return ""
    return f"{index}-"


def all_elements(report: Report) -> Iterator[tuple[RunReport | None, str, Element]]:
    """(the run or None, the prefix of its picture names, a part) of all parts of a report, in their order."""
    yield from ((None, "", element) for element in opening(report).parts)
    for i, (run, run_sections) in enumerate(sections(report)):
        for section in run_sections:
            yield from ((run, prefix_of(report, i), element) for element in section.parts)


def element_text(element: Element, prefix: str = "") -> str:
    """A part of a section as Markdown; prefix: of its picture's file name."""
    if isinstance(element, ReportTable):
        return table_text(element)
    if isinstance(element, Picture):
        return picture_text(element, f"{prefix}{element.name}.svg")
    if isinstance(element, Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", element.text)), default=0))  # the text may have fences
        opened = " open" * element.open
        head = f"<details{opened}><summary>{element.caption}</summary>"
        return f"{head}\n\n{fence}{element.kind}\n{element.text}\n{fence}\n\n</details>"
    return element


def table_text(table: ReportTable) -> str:
    """Format a table, with cells escaped."""
    rows = [table.head, tuple("---:" if i in table.right else "---" for i in range(len(table.head))), *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def picture_text(picture: Picture, path: str) -> str:
    """Format a picture with its alternative text."""
    alt = picture.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{alt}]({path})"


def find(report: Report, name: str) -> tuple[ReportTable | Picture, str] | None:
    """Return (table or picture, prefix of its file) for a name as in `names`; None if there is none."""
    for _, prefix, element in all_elements(report):
        if isinstance(element, (ReportTable, Picture)) and name_of(element, prefix) == name:
            return element, prefix
    return None


def name_of(element: ReportTable | Picture, prefix: str) -> str:
    """The name by which a table or picture is pasted: for a picture that of its file."""
    return f"{prefix}{element.name}{'.svg' if isinstance(element, Picture) else ''}"


def names(report: Report) -> list[str]:
    """The names of all tables and pictures of a report."""
    return [
        name_of(element, prefix)
        for _, prefix, element in all_elements(report)
        if isinstance(element, (ReportTable, Picture))
    ]
