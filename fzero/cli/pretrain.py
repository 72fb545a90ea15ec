"""`fzero pretrain`: train a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from fzero.cli.flags import FOLDER, SHORTHANDS, Number, add_flags, config_flags, config_of, refuse_idle, table_of
from fzero.cli.process import coordinated, end_run, escape_line, quiet, say, versions, without_reader
from fzero.core import packages
from fzero.core.config_tables import POSITIVE, SIZE
from fzero.core.torch_private import without_collection
from fzero.run.setup import warm_up

RUN_FLAGS = (
    click.option(
        "--stop-at",
        type=Number(int, SIZE),
        help="End after this step. The schedule remains that of all steps, so the run can be resumed.",
    ),
    click.option(
        "--out",
        type=FOLDER,
        metavar="RUN",
        help="Where to write. The run folder; default: the first free one of runs/PRESET-1, runs/PRESET-2, ...",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Resume the run in --out with its own config, on any mesh; with --steps, --lr ... from there on, with "
        "--seq-len, --rope-scaling ... in a new stage.",
    ),
    click.option("--auto-resume", is_flag=True, help="Resume the run in --out if there is one, else start it."),
    click.option(
        "--profile",
        is_flag=False,
        flag_value="3-5",
        metavar="FROM-TO",
        help="Write a Chrome trace of these steps. Default without a value: 3-5.",
    ),
    click.option(
        "--peak-tflops",
        type=Number(float, POSITIVE),
        help="The peak TFLOP/s of all processes, for MFU. Default: the measured rate.",
    ),
)


class Begin(NamedTuple):
    """The flags of a command besides those of its run's config."""

    out: Path | None
    resume: bool
    auto_resume: bool
    init: Path | None
    stop_at: int | None
    peak_tflops: float | None
    profile: str | None
    prompt: str | None


@click.command()
@config_flags
@partial(add_flags, options=RUN_FLAGS)
@click.option(
    "--init",
    type=FOLDER,
    metavar="RUN",
    help="Start from this model. A run, an import, or a folder of Hugging Face transformers.",
)
@click.option("--prompt", metavar="TEXT", help="The text to continue. It is shown at the end; '' shows none.")
def pretrain(config_file: Path | None, settings: tuple[str, ...], mesh: str | None, **arguments: Any) -> int:
    """Train a model; the run folder holds its config, metrics, checkpoints and pictures."""
    begin, flags = Begin(**{name: arguments.pop(name) for name in Begin._fields}), arguments
    refuse_flags(begin, {**flags, "config": config_file, "init": begin.init}, settings)
    table = table_of(config_file, settings, mesh, {**flags, "init": begin.init})
    warm_up.begin()

    with coordinated(hang_s_of(table, begin.out)) as coordinator, bar_or_lines() as (bar, line):
        with without_collection():
            from fzero.run.runner import loop
            from fzero.run.setup.watchdog import watch

        grow = "vocab_size" not in table.get("model", {}) and begin.init is None
        has_length = {"steps", "batch"} & set(table.get("train", {}))
        shortenable = not has_length and "schedule" not in table.get("optim", {})
        options = {"grow_vocabulary": grow, "may_shorten": shortenable}
        make = lambda: config_of(table, config_file, begin.init)  # noqa: E731
        with watch(coordinator):
            folder, ready = prepare(coordinator, begin, table, make, (bar, line), **options)
            stopped = loop.train(*ready) if ready is not None else 0
        return finish(coordinator, folder, stopped, line)


def hang_s_of(table: dict[str, Any], folder: Path | None) -> float | None:
    """`train.hang_s` before the ranks have met: as given, or of the run, or None."""
    from fzero.core.text_parsing import read_json

    value = table.get("train", {}).get("hang_s")
    if value is None and folder is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # which `prepare` tells, or there is none
            value = read_json(folder / "config.json").get("train", {}).get("hang_s")
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def prepare(
    coordinator: Any,
    begin: Begin,
    table: dict[str, Any],
    make: Callable[[], Any],
    output: tuple[bool, Callable[[str], None]],
    **start: bool,
) -> tuple[Path, Any]:
    """(the run folder, the run ready for `loop.train` or None), started or resumed as the flags say.

    table: the values that were given. make: makes the RunConfig of a new run. output: (whether to show a progress bar,
    the function that prints a line). start: options of `fzero.run.runner.pretrain.start`.
    """
    from fzero.run.measure.step_records import steps_of
    from fzero.run.runner import auto_resume as earlier
    from fzero.run.runner import pretrain as run
    from fzero.run.setup import run_folder
    from fzero.run.setup.build import Options

    out, init = begin.out, begin.init
    steps_of(begin.profile or "3-5", 0)  # raises ValueError for an invalid value
    # If an earlier attempt of the same torchrun has taken a folder, resume that.
    recorded_folder = coordinator.share(coordinator.recorded)
    auto = begin.auto_resume or (recorded_folder != "" and (out is None or str(out.absolute()) == recorded_folder))
    is_resume = begin.resume or (auto and coordinator.share(lambda: earlier.run_exists(out or Path(recorded_folder))))
    config = None if is_resume else with_cost_layout(make(), coordinator)
    if config is not None:
        refuse_idle(config)
    flag_values = {f"--{name.replace('_', '-')}": value for name, value in begin._asdict().items()}
    flag_values |= {"--out": str(out), "--init": str(init)}
    coordinator.compare(
        {**versions(), **flag_values, **all_values(config or table)}, "start all ranks with the same command"
    )
    bar, line = output
    options = Options(
        begin.stop_at,
        1e12 * (begin.peak_tflops or 0.0),
        bar=bar and coordinator.first,
        say=line if coordinator.first else quiet,
    )
    texts = {"sample": begin.prompt, "profile": begin.profile}
    options = options._replace(**{name: value for name, value in texts.items() if value is not None})
    if config is None:
        folder = out or Path(recorded_folder)
        changes = table if begin.resume else earlier.allowed_changes(table, folder, init)
        return folder, run.resume(folder, coordinator, options, changes=changes, auto=auto)
    folder = Path(
        coordinator.share(lambda: str(out or recorded_folder or run_folder.free_folder(config.preset or "model")))
    )
    return folder, run.start(config, folder, coordinator, options, init=init, auto=auto, **start)


def with_cost_layout(config: Any, coordinator: Any) -> Any:
    """The config of a new run, with the numbers of layers that its first rank finds for --layout cost."""
    if config.pipeline.layout != "cost":
        return config
    from dataclasses import replace

    def find_layout() -> str:
        from fzero.planner.pipeline_report import with_layout
        from fzero.planner.plan import device_for, resolve_for

        device = device_for("here")
        return with_layout(resolve_for(config, device), config.mesh, device).pipeline.layout

    return replace(config, pipeline=replace(config.pipeline, layout=coordinator.share(find_layout)))


def finish(coordinator: Any, folder: Path, stopped: int, line: Callable[[str], None]) -> int:
    """Write the pictures of a run and end with the other ranks; returns the exit code."""
    if coordinator.first:
        from fzero.report.curves import write_pictures

        try:
            packages.load("matplotlib", "they")
            if pictures := write_pictures(folder):
                line(f"pictures: {', '.join(map(str, pictures))}")
        except (OSError, ValueError, ImportError) as error:  # the run is complete without them
            line(f"pictures: none ({escape_line(str(error))}); then fzero report {folder} draws them")
    return end_run(coordinator, stopped)


def refuse_flags(begin: Begin, flags: dict[str, Any], settings: tuple[str, ...]) -> None:
    """Raise ValueError for flags that exclude each other. flags: the flags of the config."""
    if begin.resume:
        refuse_config({name: value for name, value in flags.items() if value is not None}, settings)
    if (begin.resume or begin.auto_resume) and begin.out is None:
        raise ValueError(f"--{'resume' if begin.resume else 'auto-resume'} needs the run folder: --out RUN")
    if begin.resume and begin.auto_resume:
        raise ValueError(
            "--resume and --auto-resume exclude each other: the first requires an existing run; give one of them"
        )


def refuse_config(flags: dict[str, Any], settings: tuple[str, ...]) -> None:
    """Raise ValueError for flags beside --resume that set a value that a resumed run may not change."""
    from fzero.core.config_tables import parse_setting
    from fzero.run.config.placement import KEYS, may_change
    from fzero.run.config.stages import STAGED

    free = {*KEYS, *STAGED}
    keys = {f"--{name.replace('_', '-')}": SHORTHANDS.get(name, name) for name in flags}
    named = [flag for flag, key in keys.items() if key not in free and not may_change(key)]
    keys = [parse_setting(setting)[0] for setting in settings]
    free.remove("precision.policy")  # decided once; the state is made of it
    named += [f"--set {key}" for key in keys if key not in free and not may_change(key)]
    if flags.get("layout") == "cost":
        raise ValueError("--resume has the layers of each stage that the run began with; give others, as 8,9,9,6")
    if named:
        raise ValueError(
            "--resume takes the run's own config, but for its steps, the numbers of its optimizer and schedule, its "
            f"intervals, place and stages; leave out {', '.join(named)}, or start a new run without --resume"
        )


def all_values(value: Any) -> dict[str, Any]:
    """The values of a RunConfig, or of a table, by their dotted names."""
    from fzero.core import config_tables
    from fzero.run.config import config_table

    return dict(config_tables.flat(value if isinstance(value, dict) else config_table.to_table(value)))


def bar_or_lines() -> Any:
    """A context of (whether to show a progress bar, a function that prints a line)."""
    if not (sys.stderr.isatty() and packages.installed("tqdm")):
        return contextlib.nullcontext((False, without_reader(say)))
    from tqdm import tqdm

    return contextlib.nullcontext((True, without_reader(lambda line: tqdm.write(line, file=sys.stdout))))
