"""`fzero report`: compare runs with their predictions, as JSON, Markdown and one page (report/report_writer.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER

SHOWN = ("summary", "figures", "scaling")  # width of the tables on a terminal


@click.command()
@click.argument("runs", nargs=-1, type=FOLDER, metavar="RUN...")
@click.option(
    "--out",
    type=FOLDER,
    metavar="FOLDER",
    help="Where to write. A folder; default: RUN/report, or report beside the first of several runs.",
)
@click.option("--title", default="", help="The heading of the report.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text. Files are written only with --out.")
@click.option("--no-plan", is_flag=True, help="Make no prediction for a run without one.")
@click.option("--public", is_flag=True, help="Remove the folders of this machine from paths.")
def report(
    runs: tuple[Path, ...],
    out: Path | None,
    title: str,
    as_json: bool,
    no_plan: bool,
    public: bool,
) -> int:
    """Write reports of runs, predicted beside measured: JSON, Markdown, and a page with pictures."""
    from fzero.report import report_writer
    from fzero.report.values import command_of
    from fzero.run.measure import attempts

    folder = out if out is not None else None if as_json or not runs else report_writer.default_folder(runs)
    if folder is not None:
        report_writer.expect_ours(folder)
    command, (commit, dirty) = command_of(sys.argv), attempts.commit_of(Path(attempts.__file__).parent)
    header = {"title": title, "command": command, "commit": commit + "+" * dirty, "public": public}
    report_data = report_writer.gather(runs, None if no_plan else predict_run, **header)
    files = report_writer.write(report_data, folder) if folder is not None else []
    if as_json:
        click.echo(report_writer.json_text(report_data), nl=False)
        return 0
    for line in lines(report_data):
        click.echo(line)
    click.echo(f"written: {folder}: {', '.join(path.name for path in files)}")
    return 0


def predict_run(folder: Path) -> dict[str, Any] | None:
    """The plan of the last attempt of the run in `folder`: its plan.json, or one made and kept now."""
    from fzero.core.storage import write_text
    from fzero.core.text_parsing import parse_json, read_json
    from fzero.planner.plan import plan
    from fzero.report.compare import planned_for
    from fzero.run.config.config_table import from_table
    from fzero.run.measure import attempts
    from fzero.run.setup import run_folder

    path, lines = folder / attempts.PLAN, run_folder.read_attempts(folder)
    saved_plan = read_json(path) if os.path.lexists(path) else None
    if not lines or (saved_plan is not None and planned_for(saved_plan, lines[-1])):
        return saved_plan
    last = lines[-1]
    text = plan(
        from_table(last["config"]), {axis: size for axis, size in last["mesh"].items() if size > 1}, gpu="here"
    ).to_json()
    write_text(folder, path.name, text)
    return parse_json(text, str(path))


def lines(report_data: Any) -> list[str]:
    """The outcome of the runs, and the short tables of a report, for a terminal."""
    from fzero.report.first_screen import opening
    from fzero.report.sections import chapters
    from fzero.report.values import ReportTable

    out = [*(item.replace("**", "") for item in opening(report_data).parts if isinstance(item, str)), ""]
    for chapter in chapters(report_data):
        prefix = f"{chapter.name}: " if chapter.run is not None else ""
        for item in (item for section in chapter.sections for item in section.parts):
            if isinstance(item, ReportTable) and item.name in SHOWN:
                out += [f"{prefix}{item.caption}", *in_columns(item), ""]
        out += [f"{prefix}{sentence}" for sentence in chapter.run.missing] if chapter.run is not None else []
    return out


def in_columns(table: Any) -> list[str]:
    """Format the rows of a table in columns."""
    from fzero.core.text_parsing import text_table

    rows = [[cell.replace("**", "") for cell in row] for row in table.rows]
    left = [i for i in range(len(table.head)) if i not in table.right]
    return ["  " + line for line in text_table(table.head, rows, text=left)]
