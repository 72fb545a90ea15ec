"""`fzero report`: runs in, a folder with report.json, report.md, report.html and the pictures out.

The HTML page is self-contained, in light or dark colours and printable.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fzero
from fzero.core.files import make_folder
from fzero.core.storage import write_text
from fzero.core.text_parsing import in_form, read_json
from fzero.report import compare, figures, values
from fzero.report.figures import Drawing
from fzero.report.first_screen import opening
from fzero.report.run_reader import Predict, read_run, without_folders
from fzero.report.sections import chapters
from fzero.report.values import Code, Element, Picture, Report, ReportTable, RunReport
from fzero.run.setup.run_folder import CONFIG

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


JSON, MARKDOWN, PAGE = "report.json", "report.md", "report.html"


def gather(
    folders: Sequence[Path],
    predict: Predict | None = None,
    *,
    title: str = "",
    command: str = "",
    commit: str = "",
    public: bool = False,
) -> Report:
    """The report of the runs in `folders`; `public`: without this machine's folders; raises ValueError."""
    if not folders:
        raise ValueError("no run is given; name the folder of one: fzero report RUN")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"{', '.join(map(str, folders))}: a run is named twice; name each once")
    run_reports = []
    for folder in folders:
        with in_form(str(folder), "; its traceback (--traceback) shows where"):
            run_reports += runs_of(folder, predict)
    runs = distinct(run_reports)
    if public:
        runs = [RunReport(**{**without_folders(run._asdict()), "quantities": run.quantities}) for run in runs]
    author = {"fzero": fzero.__version__, "commit": commit}
    title = title or (
        f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    )
    return Report(title, author, command, runs, compare.compare(runs) if len(runs) > 1 else None)


def runs_of(folder: Path, predict: Predict | None = None) -> list[RunReport]:
    """The run in a folder, or the runs of an earlier report in it."""
    return (
        read(folder).runs
        if os.path.lexists(folder / JSON) and not os.path.lexists(folder / CONFIG)
        else [read_run(folder, predict)]
    )


def merge(reports: Sequence[Report], command: str = "") -> Report:
    """Merge reports into one that compares all their runs."""
    runs = distinct([run for report in reports for run in report.runs])
    return Report(
        f"{len(runs)} runs: {', '.join(run.name for run in runs)}", reports[0].by, command, runs, compare.compare(runs)
    )


def distinct(runs: list[RunReport]) -> list[RunReport]:
    """Number the runs whose names are not unique."""
    names = [run.name for run in runs]
    return [
        run._replace(name=f"{run.name} ({names[: i + 1].count(run.name)})") if names.count(run.name) > 1 else run
        for i, run in enumerate(runs)
    ]


def draw(report: Report, *, runs: bool = True) -> dict[str, Drawing]:
    """{name with prefix: drawn picture} of every picture of a report; `runs`: also of single runs."""
    pictures = {}
    for run, prefix, element in all_elements(report):
        if isinstance(element, Picture) and (runs or run is None):
            files = f"the files of run {run.name}" if run else "the files of the runs"
            with in_form(files, "; its traceback (--traceback) shows which value"):
                pictures[prefix + element.name] = figures.draw_svg(element.draw)
    return pictures


def json_text(report: Report) -> str:
    """The report as exact JSON, with lines that make diffs readable."""

    def lines(value: Any, depth: int) -> str:
        if depth and isinstance(value, dict) and value:
            inner = ",\n".join(f"{json.dumps(key)}: {lines(item, depth - 1)}" for key, item in value.items())
            return "{\n" + inner + "\n}"
        if depth and isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(lines(item, depth - 1) for item in value) + "\n]"
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    return lines(values.to_json(report), 4) + "\n"


def default_folder(folders: Sequence[Path]) -> Path:
    """The default folder of a report: inside its run, or beside the first of several."""
    return folders[0] / "report" if len(folders) == 1 else folders[0].absolute().parent / "report"


def expect_ours(folder: Path) -> None:
    """Raise ValueError if `folder` is a file, or holds files but no report."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; name a folder (--out)")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON).is_file():
        raise ValueError(
            f"{folder}: is not empty and holds no {JSON}; name a new folder, or one of an earlier report (--out)"
        )


def write(report: Report, folder: Path) -> list[Path]:
    """Write the report into `folder`, replacing an earlier one; the files; raises for something else."""
    expect_ours(folder)
    make_folder(folder.parent, folder.name)
    pictures = draw(report)
    for old in folder.glob("*.svg"):
        old.unlink()
    files = {JSON: json_text(report), **{f"{name}.svg": drawing.svg for name, drawing in pictures.items()}}
    files |= {MARKDOWN: to_markdown(report), PAGE: to_html(report, pictures)}
    for name, text in files.items():
        write_text(folder, name, text)
    return [folder / name for name in files]


def read(folder: Path) -> Report:
    """Read the report in a folder; raises ValueError naming the file if it is missing or damaged."""
    path = folder / JSON
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file; fzero report RUN --out {folder} writes it")
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; write it again by fzero report RUN") from None
    return values.from_json(value, str(path))
