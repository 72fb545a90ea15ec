"""A report as Markdown: the same sections as the page, its pictures as links to files beside it."""

from __future__ import annotations

from fzero.report.sections import Code, Picture, Section, Table
from fzero.report.sections_compare import sections
from fzero.report.values import Report


def write(report: Report, *, runs: bool = True) -> str:
    """The report as one Markdown text. `runs`: with the sections of single runs, not only of their comparison."""
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
    """Who wrote the report, and how it is written again."""
    by = ", ".join(f"{name} {value}" for name, value in report.by.items() if value)
    return f"Written by {by}: `{report.command}`."


def prefix_of(report: Report, index: int) -> str:
    """What stands before the names of the pictures of the run at this place of `sections`: nothing in a report of one run."""
    if report.compared is None or index == 0:
        return ""
    return f"{index}-"


def part_text(part: str | Table | Picture | Code, prefix: str = "") -> str:
    """A part of a section as Markdown."""
    if isinstance(part, Table):
        return table_text(part)
    if isinstance(part, Picture):
        return picture_text(part, f"{prefix}{part.name}.svg")
    if isinstance(part, Code):
        return f"<details><summary>{part.caption}</summary>\n\n```json\n{part.text}\n```\n\n</details>"
    return part


def table_text(table: Table) -> str:
    """A table; cells cannot break it."""
    rows = [table.head, tuple("---:" if i in table.right else "---" for i in range(len(table.head))), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows)


def picture_text(picture: Picture, path: str) -> str:
    """A picture with its words for those who do not see it."""
    alt = picture.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{alt}]({path})"


def find(report: Report, name: str) -> tuple[Section, Table | Picture, str] | None:
    """(section, table or picture, prefix of its file) of a name as in `names`; None where there is none."""
    for i, (_, found) in enumerate(sections(report)):
        prefix = prefix_of(report, i)
        for section in found:
            for part in section.parts:
                if isinstance(part, (Table, Picture)) and name_of(part, prefix) == name:
                    return section, part, prefix
    return None


def name_of(part: Table | Picture, prefix: str) -> str:
    """The name by which a table or picture is pasted: a picture's is its file's."""
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
