"""A report as one self-contained HTML page, in light or dark colours and printable, and as Markdown."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fzero.report import figures
from fzero.report.figures import Drawing
from fzero.report.first_screen import opening
from fzero.report.sections import chapters
from fzero.report.values import Code, Element, Picture, Report, ReportTable, RunReport

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def format_words(words: str) -> Markup:
    """Escape a text of a report, with `**strong**` and `code` as in Markdown."""
    from markupsafe import Markup, escape

    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(words)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


def fence(text: str) -> str:
    """The fence of a block of code in Markdown, longer than those in its text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


@functools.cache
def load_templates() -> Environment:
    """The templates of the page and the text; values are escaped in the page alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    templates = Environment(
        loader=PackageLoader("fzero.report"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=False,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    templates.filters |= {
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
        "fence": fence,
        "words": format_words,
    }
    kinds = {"table": ReportTable, "picture": Picture, "code": Code}
    templates.tests |= {name: lambda element, kind=kind: isinstance(element, kind) for name, kind in kinds.items()}
    return templates


def to_html(report: Report, pictures: Mapping[str, Drawing]) -> str:
    """The report as one HTML text. `pictures`: {name with prefix: drawn} of all in its sections."""

    def drawings(element: Element, prefix: str) -> list[Drawing]:
        if not isinstance(element, Picture):
            return []
        logarithmic = [figures.draw_svg(element.draw, log=True)] if element.log else []
        return [pictures[prefix + element.name], *logarithmic]

    return load_templates().get_template("page.html").render(page_values(report), drawings=drawings)


def to_markdown(report: Report, *, runs: bool = True) -> str:
    """The report as one Markdown text. `runs`: with the sections of single runs, not only the comparison."""
    return load_templates().get_template("report.md").render(page_values(report), runs=runs)


def page_values(report: Report) -> dict[str, Any]:
    """What both templates are filled with."""
    author = ", ".join(f"{name} {value}" for name, value in report.by.items() if value)
    note = f"Written by {author}: `{report.command}`."
    return {"report": report, "opening": opening(report), "chapters": chapters(report), "note": note}


def table_text(table: ReportTable) -> str:
    """A table as Markdown, with cells escaped."""
    return fill("elements.md", "table_of", table).rstrip("\n")


def picture_text(picture: Picture, path: str) -> str:
    """A picture as Markdown, with its alternative text."""
    return fill("elements.md", "picture_of", picture, path).rstrip("\n")


def fill(template: str, macro: str, *values: Any) -> str:
    """The text of one macro of a template."""
    return getattr(load_templates().get_template(template).module, macro)(*values)


def all_elements(report: Report) -> Iterator[tuple[RunReport | None, str, Element]]:
    """(the run or None, the prefix of its picture names, a part) of all parts."""
    yield from ((None, "", element) for element in opening(report).parts)
    for chapter in chapters(report):
        for section in chapter.sections:
            yield from ((chapter.run, chapter.prefix, element) for element in section.parts)


def by_name(report: Report) -> dict[str, tuple[ReportTable | Picture, str]]:
    """{name by which it is pasted: (table or picture, prefix of its file)}."""
    elements: dict[str, tuple[ReportTable | Picture, str]] = {}
    for _, prefix, element in all_elements(report):
        if isinstance(element, (ReportTable, Picture)):
            suffix = ".svg" if isinstance(element, Picture) else ""
            elements.setdefault(f"{prefix}{element.name}{suffix}", (element, prefix))
    return elements
