"""`fzero replay` and `fzero bisect`: repeat recorded steps, and find the first difference of two runs."""

from __future__ import annotations

from pathlib import Path

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

    from fzero.run.debug import replay as module
    from fzero.run.ranks.watchdog import watch

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
    from fzero.run.debug import bisect_runs as runs_beside

    result = runs_beside.bisect(run_a, run_b, device=device, nvme=nvme, say=say)
    for line in runs_beside.report(result):
        say(line)
    return 0 if result.equal else 1
