"""The commands that compute: pretrain, sample, replay, bisect."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fzero import __version__
from fzero.cli.flags import SHORTHANDS, config_flags, config_of, table_of
from fzero.run.ranks import signals

FOLDER = click.Path(path_type=Path)


# What a resumed run may change, as its mesh.
PLACEMENT = ("zero", "reduce", "sequence", "accumulate", "prefetch", "offload", "nvme", "buffer_mb", "precision")


@contextlib.contextmanager
def joined() -> Iterator[Any]:
    """The Team of this process (fzero/run/ranks/coordinator.py).

    An exception that ends the context has it as its `team`, for the other ranks to hear of it.
    """
    from fzero.run.ranks import coordinator

    mine = coordinator.join()
    try:
        yield mine
    except BaseException as error:
        error.team = mine  # type: ignore[attr-defined]
        raise


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


@click.command()
@config_flags
@click.option("--stop-at", type=int, help="End after this step, resumably; the schedule is that of the whole run.")
@click.option("--out", type=FOLDER, metavar="RUN", help="The run folder; without it the first free runs/PRESET-N.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, by its own config, on any mesh.")
@click.option("--auto-resume", is_flag=True, help="Go on with the run in --out where there is one, else start it.")
@click.option("--init", type=FOLDER, metavar="RUN", help="Begin with the weights (and sizes) of this run or import.")
@click.option("--profile", is_flag=False, flag_value="3-5", metavar="FROM-TO", help="Write a Chrome trace of steps (without a value 3-5).")
@click.option("--peak-tflops", type=float, help="What MFU is a fraction of, for all processes; without it the measured rate.")
@click.option("--sample", metavar="TEXT", help="Prompt of the text written at the end ('' for none).")
def pretrain(
    config_file: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    resume: bool,
    auto_resume: bool,
    init: Path | None,
    stop_at: int | None,
    peak_tflops: float | None,
    profile: str | None,
    sample: str | None,
    mesh: str | None,
    **flags: Any,
) -> int:
    """Train a model; the run folder holds its config, metrics, checkpoints and pictures."""
    given = {name: value for name, value in {**flags, "mesh": mesh, "config": config_file, "init": init}.items() if value is not None}
    if stop_at is not None and stop_at < 1:
        raise ValueError(f"--stop-at is {stop_at}; it must be at least 1")
    if peak_tflops is not None and not peak_tflops > 0:
        raise ValueError(f"--peak-tflops is {peak_tflops}; it must be above 0")
    told = [name for name in given if name not in (*PLACEMENT, "mesh")]
    if resume and (told or settings):
        named = [f"--{name.replace('_', '-')}" for name in told] + ["--set"] * bool(settings)
        raise ValueError(f"--resume goes on with the run's own config; leave out {', '.join(named)}, or start a new run without --resume")
    if (resume or auto_resume) and out is None:
        raise ValueError(f"--{'resume' if resume else 'auto-resume'} needs the run folder: --out RUN")
    if resume and auto_resume:
        raise ValueError("--resume and --auto-resume: the first wants a run that is there; give one of them")
    table = table_of(config_file, settings, mesh, flags)

    text = {name: value for name, value in (("sample", sample), ("profile", profile)) if value is not None}
    with signals.ending(), joined() as team, bar_or_lines() as (bar, line):
        from fzero.run import loop, run_folder
        from fzero.run import pretrain as run
        from fzero.run.measure.profiler import steps_of
        from fzero.run.ranks import elastic
        from fzero.run.resume import auto_resume as again

        steps_of(profile or "3-5", 0)  # refuses what is none
        # An attempt of the same torchrun before this one has taken a folder: go on with that.
        before = team.share(team.recorded)
        auto = auto_resume or (before != "" and (out is None or str(out.absolute()) == before))
        there = resume or (auto and team.share(lambda: again.exists(out or Path(before))))
        config = None if there else config_of(table, init, from_json=config_file is not None and config_file.suffix == ".json")
        asked = {"--out": str(out), "--init": str(init), "--stop-at": stop_at, "--peak-tflops": peak_tflops, "--sample": sample}
        asked |= {"--resume": resume, "--auto-resume": auto_resume, "--profile": profile}
        team.compare({**versions(), **asked, **everything(config or table)}, "start all ranks with the same command")
        options = loop.Options(
            stop_at=stop_at, peak_flops=1e12 * (peak_tflops or 0.0), bar=bar and team.first, say=line if team.first else quiet, **text
        )
        if config is None:
            folder = out or Path(before)
            changes = table if resume else again.changes_of(table, folder, init)
            stopped = run.resume(folder, team=team, changes=changes, auto=auto, options=options)
        else:
            grow = "vocab_size" not in table.get("model", {}) and init is None
            folder = Path(team.share(lambda: str(out or before or run_folder.free_folder(config.preset or "model"))))
            stopped = run.start(config, folder, team=team, grow_vocabulary=grow, init=init, auto=auto, options=options)
        if team.first:
            from fzero.report.plots import write_pictures

            if pictures := write_pictures(folder):
                options.say(f"pictures: {', '.join(map(str, pictures))}")
        if team.spare:
            stopped = elastic.stand_by(team)
        else:
            team.close(stopped)
        code = team.code(stopped)
        if code == 2 and os.environ.get("LOCAL_RANK") == "0":
            print("fzero: stopped with another node; exit code 2, so that torchrun goes on with this one", file=sys.stderr, flush=True)
        return code


def quiet(line: str) -> None:
    """Say nothing: what a rank that is not the first does."""


def versions() -> dict[str, str]:
    """Versions that all ranks must have."""
    import platform

    import torch

    return {"fzero": __version__, "torch": torch.__version__, "python": platform.python_version()}


def everything(value: Any) -> dict[str, Any]:
    """{name: value} of every value of a RunConfig, or of a table."""
    from fzero.core import tables
    from fzero.run import config_table

    return dict(tables.flat(value if isinstance(value, dict) else config_table.to_table(value)))


def bar_or_lines() -> Any:
    """A context of (whether to show a progress bar, how to print a line): the bar where stderr is a terminal."""
    import contextlib

    if not sys.stderr.isatty():
        return contextlib.nullcontext((False, say))
    from tqdm import tqdm

    return contextlib.nullcontext((True, lambda line: tqdm.write(line, file=sys.stdout)))


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--prompt", required=True, help="The text to go on with.")
@click.option("--tokens", type=int, default=200, show_default=True, help="How many to write.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Choose among so many; 0: all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Choose among the likeliest that add up to this.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed writes the same text.")
@click.option("--ema", is_flag=True, help="Use the average of the weights.")
@click.option("--offload", metavar="params=nvme", help="Keep the parameters on a disk: for models larger than memory.")
@click.option("--nvme", metavar="DIR", help="The folder that they are put in; without it nvme-sample/ in the run folder.")
def sample(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ema: bool,
    offload: str | None,
    nvme: str | None,
) -> None:
    """Let the model of a run (or an import) write text."""
    import torch

    from fzero.core import prng
    from fzero.run import run_folder, weights
    from fzero.run.generate import generate

    if offload not in (None, "params=nvme"):
        raise ValueError(f"--offload {offload}: sampling has parameters alone to put on a disk; use params=nvme, or leave it out")
    if nvme is not None and offload is None:
        raise ValueError("--nvme names a folder for --offload params=nvme; give that too")
    trained = weights.load(run, ema=ema) if offload is None else weights.load_on_disk(run, nvme, ema=ema)
    tokenizer = run_folder.read_tokenizer(run)
    for line in trained.warnings:
        print(line, file=sys.stderr)
    ids = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None]
    out = generate(
        trained.model,
        trained.params,
        ids,
        tokens,
        prng.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
    )
    say(tokenizer.decode(out[0].tolist()))


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--step", type=int, required=True, help="The recorded step to make again.")
@click.option("--from", "start", type=int, help="The step of the checkpoint to begin with, 0 for the start; without it the nearest.")
@click.option("--mesh", help="As of pretrain; without it the run's own where it fits the processes, else dp over all of them.")
@click.option("--zero", type=int, help="ZeRO stage, 0 to 3; without it the run's own.")
@click.option("--tolerance", type=float, help="How far a loss may be off, relatively; without it 0 where the same bits are due.")
@click.option("--nvme", metavar="DIR", help="Where what the run keeps on a disk is put meanwhile; without it the system's folder.")
def replay(run: Path, step: int, start: int | None, mesh: str | None, zero: int | None, tolerance: float | None, nvme: str | None) -> int:
    """Make a recorded step again from the nearest checkpoint, and say whether it comes out as it was (exit code 0) or not (1)."""
    sizes = None if mesh is None else table_of(None, (), mesh, dict.fromkeys(SHORTHANDS)).get("mesh", {})

    from fzero.run.debug import replay as steps_again

    with signals.ending(), joined() as team:
        asked = {"RUN": str(run), "--step": step, "--from": start, "--mesh": mesh, "--zero": zero, "--tolerance": tolerance}
        team.compare({**versions(), **asked}, "start all ranks with the same command")
        tell = say if team.first else quiet
        result = steps_again.replay(run, step, sizes, zero=zero, start=start, tolerance=tolerance, nvme=nvme, team=team, say=tell)
        for line in steps_again.report(result):
            tell(line)
        team.close()
    return 0 if result.reproduces else 1


@click.command()
@click.argument("run_a", type=FOLDER)
@click.argument("run_b", type=FOLDER)
@click.option("--nvme", metavar="DIR", help="Where what the runs keep on a disk is put meanwhile; without it the system's folder.")
def bisect(run_a: Path, run_b: Path, nvme: str | None) -> int:
    """Find the first step and leaf in which two runs part: exit code 1 where they do, 0 where all that both recorded is equal."""
    from fzero.run.debug import bisect_runs as runs_beside

    result = runs_beside.bisect(run_a, run_b, nvme=nvme, say=say)
    for line in runs_beside.report(result):
        say(line)
    return 0 if result.equal else 1
