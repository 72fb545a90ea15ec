"""The placement of a run: the values that a resumed run may change.

Those of its last attempt are the default of the next one, and the printed command that resumes it has them. A
config.json whose checksum was taken out is compared with the copy in attempts.jsonl or a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero import checkpoint
from fzero.checkpoint.manifest import MANIFEST
from fzero.comm.axes import DP, PP
from fzero.core.config_tables import Table, flat, metadata_of, set_nested
from fzero.core.text_parsing import short
from fzero.data.mixture import Mixture
from fzero.run.config.config_table import apply_table, differences, from_table, to_table
from fzero.run.config.config_versions import current_keys
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import STAGED, stage_of_step
from fzero.run.config.unused_keys import CHANGING, LOCATION, Placement, first_local, refuse_unused

MARKS = metadata_of(RunConfig)


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of a key of its config.

    >>> may_change("optim.schedule.name"), may_change("train.seed")
    (True, False)
    """
    return CHANGING in MARKS.get(key, ())


def split_values(changes: Table) -> tuple[Table, Table]:
    """(the values that may change while a run goes on, the rest) of a table of changes."""
    changing: Table = {}
    remainder: Table = {}
    for key, value in flat(changes):
        set_nested(changing if may_change(key) else remainder, key, value)
    return changing, remainder


def with_values(recorded: RunConfig, values: Table) -> tuple[RunConfig, list[str]]:
    """(the config of a run from now on, a line for each changed value); raises ValueError for wrong values."""
    optim, steps = recorded.optim, recorded.train.steps
    new = apply_table(recorded, values)
    refuse_unused(new, values)
    local = optim.name == "zero_one_adam" and optim.sum_every > 1
    if new.train.steps != steps and not optim.freeze_steps and (local or optim.name.startswith("onebit_")):
        freeze = first_local(optim, steps) if optim.name != "onebit_lamb" else max(1, steps // 2)
        new = replace(new, optim=replace(new.optim, freeze_steps=freeze))
    return new, differences(new, recorded)


# key of the config: the flag of `fzero pretrain` that sets it; "" for none
FLAGS = {
    key: f"--{key.rpartition('.')[2].replace('_', '-')}" if mark.flag is None else mark.flag
    for key, _ in flat(to_table(RunConfig()))
    for mark in MARKS.get(key, ())
    if isinstance(mark, Placement)
}
KEYS = ("mesh", *FLAGS)


def keep_placement(recorded: RunConfig, config: RunConfig, mesh: dict[str, int] | None) -> RunConfig:
    """`recorded` with the placement of the attempt's `config`; mesh: the sizes that were asked for, or None."""
    # A recorded mesh is fitted to the processes of each attempt (run/setup/elastic.py): fewer processes for a while do
    # not make the mesh smaller for good.
    parts = dict.fromkeys(key.partition(".")[0] for key in FLAGS)
    return replace(
        recorded,
        mesh=recorded.mesh if mesh is None else mesh,
        **{name: getattr(config, name) for name in parts},
    )


def fit_layout(recorded: RunConfig, config: RunConfig, changes: Table) -> tuple[RunConfig, list[str]]:
    """The config of an attempt, and lines about it: a layout of another number of stages is left out."""
    layout, pp = recorded.pipeline.layout, config.mesh.get(PP, 1)
    old, new = layout.count(",") + 1, pp * config.pipeline.chunks
    if layout == "auto" or "layout" in changes.get("pipeline", {}) or pp == 1 or old == new:
        return config, []
    line = f"layout {layout} is of {old} stages and there are {new} now: layers as even as they go"
    return replace(config, pipeline=replace(config.pipeline, layout="auto")), [line]


def pretrain_command(processes: int) -> str:
    """The command that starts `fzero pretrain` with this number of processes."""
    return "fzero pretrain" if processes == 1 else f"torchrun --nproc-per-node {processes} -m fzero pretrain"


def resume_command(folder: Path, config: RunConfig, processes: int) -> str:
    """The command that resumes the run in `folder` with `config`'s placement."""
    words, values = [], dict(flat(to_table(config)))
    if math.prod(config.mesh.values()) == processes and {DP: processes} != config.mesh and processes > 1:
        words += ["--mesh", ",".join(f"{axis}={size}" for axis, size in config.mesh.items())]
    usual = dict(flat(to_table(RunConfig())))
    for key, flag in FLAGS.items():
        if flag and values[key] != usual[key] and "\n" not in str(values[key]):  # a table: config.json has it
            words += [flag] if values[key] is True else [flag, str(values[key])]
    return f"{pretrain_command(processes)} --out {shlex.quote(str(folder))} --resume {shlex.join(words)}".rstrip()


WHOLE = "whole"  # in a line of attempts.jsonl: the config of all stages, where the attempt begins in one of several
# What of environment.json decides what is trained.
CORPUS = ("corpus_sha256", "tokenizer", "eos")


class Copy(NamedTuple):
    """A copy of a run's config."""

    source: str  # the entry of a file that has it
    table: Table  # by the keys of the version that wrote it
    step: int | None  # after which it holds; None: it is of all stages
    placed: bool = True  # whether config.json has its placement, which earlier versions did not write there


def copies(attempts: Sequence[Table], attempts_path: Path, checkpoint_dir: Path) -> Iterator[Copy]:
    """The copies of a run's config, the best one first."""
    last = attempts[-1] if attempts else {}
    for key in (WHOLE, "config"):
        if is_whole(last.get(key)):
            first = last.get("first_step")
            step = None if key == WHOLE or not isinstance(first, int) else max(first, 0)
            yield Copy(f"the entry {key} of the last line of {attempts_path}", last[key], step, "environment" in last)
    with contextlib.suppress(ValueError, OSError):
        for step in reversed(checkpoint.steps(checkpoint_dir)):
            path = checkpoint.step_folder(checkpoint_dir, step)
            with contextlib.suppress(ValueError, OSError):
                table = checkpoint.read_manifest(path)["config"]
                if is_whole(table):
                    yield Copy(f"the entry config of {path}{os.sep}{MANIFEST}", table, max(step - 1, 0), False)


def is_whole(table: Any) -> bool:
    """Whether a value of a record is the table of a whole config."""
    return isinstance(table, dict) and "preset" in table


def expect_recorded(config: RunConfig, path: Path, copy: Copy) -> None:
    """Raise ValueError naming the first entry of `config` that differs from a copy of it."""
    try:
        recorded = from_table(current_keys(copy.table))
    except ValueError:  # of keys that this version does not have: there is nothing to compare with
        return
    current = config if copy.step is None else stage_of_step(config, copy.step).config
    current_values, recorded_values = (dict(flat(to_table(without_folders(item)))) for item in (current, recorded))
    free = {key for key, marks in MARKS.items() if LOCATION in marks}
    free |= {"pipeline.layout"}  # an attempt may have had another mesh
    free |= set(() if copy.placed else FLAGS)
    for key in {**current_values, **recorded_values}:
        if current_values.get(key) != recorded_values.get(key) and key not in free and not key.startswith("mesh."):
            new_text, old_text = (short(item.get(key)) for item in (current_values, recorded_values))
            raise ValueError(
                f"{path}: {key} is {new_text}, and {old_text} is what the run trained with, by {copy.source}; set it "
                f"back, {change_of(key, new_text)}"
            )


def without_folders(config: RunConfig) -> RunConfig:
    """The config with the names of a mixture's sources in place of their folders, which may have moved."""
    if not config.data.mixture:
        return config
    sources = Mixture.parse(config.data.mixture).sources
    named = Mixture(tuple(replace(source, path=source.name) for source in sources))
    return replace(config, data=replace(config.data, mixture=str(named)))


def change_of(key: str, value: str) -> str:
    """How an entry of a run's config is changed on purpose, in words."""
    if may_change(key) or key in STAGED or (key in FLAGS and key != "precision.policy"):
        return f"and change it by --resume --set {key}={value}"
    return "or start a new run with --config and this file: a run keeps this value"


def expect_corpus(environment: Table, path: Path, attempts: Sequence[Table], attempts_path: Path) -> None:
    """Raise ValueError naming the first entry of environment.json by which the run has another text than before."""
    recorded: Any = attempts[-1].get("environment") if attempts else None
    for key, recorded_value in recorded.items() if isinstance(recorded, dict) else ():
        if environment.get(key) != recorded_value:
            raise ValueError(
                f"{path}: {key} is {short(environment.get(key))}, and {short(recorded_value)} is what the run trained "
                f"with, by the entry environment of the last line of {attempts_path}; set it back, or start a new run"
            )
