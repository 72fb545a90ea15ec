"""The commands about runs that were made: `fzero report` compares them with their predictions, as JSON, Markdown and
one page (report/report_writer.py); `fzero replay` and `fzero bisect` repeat recorded steps, and find the first
difference of two runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fzero.cli import process
from fzero.cli.flags import FOLDER, RUNS_DEVICE, SHORTHANDS, Number, table_of
from fzero.cli.process import quiet, say
from fzero.core.config_tables import COUNT, RATE, SIZE, STAGE


@click.command()
@click.argument("run", type=FOLDER)
@click.option(
    "--step",
    type=Number(int, SIZE),
    required=True,
    help="A step of the run. It is repeated from an earlier checkpoint.",
)
@click.option(
    "--from",
    "start",
    type=Number(int, COUNT),
    help="The step of the checkpoint to start from; 0 is the start of the run. Default: the nearest one.",
)
@click.option(
    "--mesh",
    help="The sizes of the axes dp, rp, tp, pp, cp, ep. Default: the run's own if it fits, else dp over all processes.",
)
@click.option("--zero", type=Number(int, STAGE), help="The ZeRO stage, 0 to 3. Default: the run's own.")
@RUNS_DEVICE
@click.option(
    "--rtol",
    type=Number(float, RATE),
    help="The allowed relative difference of a loss. Default: 0 if equal bits are expected.",
)
@click.option(
    "--nvme",
    metavar="DIR",
    help="The folder for state offloaded to a disk. Default: a temporary folder of the system, until the command ends.",
)
def replay(
    run: Path,
    step: int,
    start: int | None,
    mesh: str | None,
    zero: int | None,
    device: str | None,
    rtol: float | None,
    nvme: str | None,
) -> int:
    """Repeat a recorded step from the nearest checkpoint. The exit code is 0 if the results are as recorded, else 1."""
    sizes = None if mesh is None else table_of(None, (), mesh, dict.fromkeys(SHORTHANDS)).get("mesh", {})

    from fzero.run.runner import replay as module
    from fzero.run.setup.watchdog import watch

    with process.coordinated() as coordinator:
        flag_values = {
            "RUN": str(run),
            "--step": step,
            "--from": start,
            "--mesh": mesh,
            "--zero": zero,
            "--device": device,
            "--rtol": rtol,
        }
        coordinator.compare({**process.versions(), **flag_values}, "start all ranks with the same command")
        print_line = say if coordinator.first else quiet
        overrides = {"mesh": sizes, "zero": zero, "device": device}
        changes = {name: value for name, value in overrides.items() if value is not None}
        options = {"start": start, "tolerance": rtol, "nvme": nvme}
        with watch(coordinator):
            result = module.replay(run, step, changes, **options, coordinator=coordinator, say=print_line)
        for line in module.report(result):
            print_line(line)
        coordinator.close()
    return 0 if result.reproduces else 1


@click.command()
@click.argument("run_a", type=FOLDER)
@click.argument("run_b", type=FOLDER)
@RUNS_DEVICE
@click.option(
    "--nvme",
    metavar="DIR",
    help="The folder for state offloaded to a disk. Default: a temporary folder of the system, until the command ends.",
)
def bisect(run_a: Path, run_b: Path, device: str | None, nvme: str | None) -> int:
    """Find the first step and leaf in which two runs differ. The exit code is 1 if they do, 0 if all records are
    equal."""
    from fzero.run.runner import bisect_runs as runs_beside

    result = runs_beside.bisect(run_a, run_b, device=device, nvme=nvme, say=say)
    for line in runs_beside.report(result):
        say(line)
    return 0 if result.equal else 1


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
    from fzero.run.measure import flops

    folder = out if out is not None else None if as_json or not runs else report_writer.default_folder(runs)
    if folder is not None:
        report_writer.expect_ours(folder)
    command, (commit, dirty) = command_of(sys.argv), flops.commit_of(Path(flops.__file__).parent)
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
    from fzero.run.measure import flops
    from fzero.run.setup import run_folder

    path, lines = folder / flops.PLAN, run_folder.read_attempts(folder)
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
