"""`fzero report`: compare runs with their predictions, as JSON, Markdown and one page (fzero/report/write.py)."""

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
    from fzero.report import write
    from fzero.report.parts import command_of
    from fzero.run.measure import attempts

    folder = out if out is not None else None if as_json or not runs else write.default_folder(runs)
    if folder is not None:
        write.expect_ours(folder)
    command, (commit, dirty) = command_of(sys.argv), attempts.commit_of(Path(attempts.__file__).parent)
    about = {"title": title, "command": command, "commit": commit + "+" * dirty, "public": public}
    found = write.gather(runs, None if no_plan else predict_run, **about)
    files = write.write(found, folder) if folder is not None else []
    if as_json:
        click.echo(write.json_text(found), nl=False)
        return 0
    for line in lines(found):
        click.echo(line)
    click.echo(f"written: {folder}: {', '.join(path.name for path in files)}")
    return 0


def predict_run(folder: Path) -> dict[str, Any] | None:
    """The plan of the last attempt of the run in `folder`: its plan.json, or one made now for this machine and kept
    there.

    The run itself does not make it, as that takes seconds and the run does not need it. None if no attempt is recorded.
    Raises ValueError if it cannot be planned.
    """
    from fzero.core.foreign import parse_json, read_json
    from fzero.core.storage import write_text
    from fzero.planner.plan import plan
    from fzero.report.attempts import planned_for
    from fzero.run import run_folder
    from fzero.run.config_table import from_table
    from fzero.run.measure import attempts

    path, lines = folder / attempts.PLAN, run_folder.read_attempts(folder)
    found = read_json(path) if os.path.lexists(path) else None
    if not lines or (found is not None and planned_for(found, lines[-1])):
        return found
    last = lines[-1]
    text = plan(
        from_table(last["config"]), {axis: size for axis, size in last["mesh"].items() if size > 1}, gpu="here"
    ).to_json()
    write_text(folder, path.name, text)
    return parse_json(text, str(path))


def lines(found: Any) -> list[str]:
    """The outcome of the runs, and the short tables of a report, for a terminal."""
    from fzero.report.opening import opening
    from fzero.report.parts import Table
    from fzero.report.sections_compare import sections

    out = [*(part.replace("**", "") for part in opening(found).parts if isinstance(part, str)), ""]
    for run, parts in sections(found):
        tables = [part for section in parts for part in section.parts if isinstance(part, Table) and part.name in SHOWN]
        for one in tables:
            out += [f"{run.name}: {one.caption}" if run is not None else one.caption, *in_columns(one), ""]
        out += [f"{run.name}: {sentence}" for sentence in run.missing] if run is not None else []
    return out


def in_columns(one: Any) -> list[str]:
    """Format the rows of a table in columns."""
    rows = [one.head, *one.rows]
    rows = [tuple(cell.replace("**", "") for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(one.head))]
    return [
        "  "
        + "  ".join(c.rjust(w) if i in one.right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
