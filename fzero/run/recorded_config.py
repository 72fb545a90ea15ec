"""The config that a run trained with, as its attempts.jsonl and checkpoints have it: a config.json whose checksum was
taken out is compared with it, and one that is damaged is made again from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero import checkpoint
from fzero.checkpoint.manifest import MANIFEST
from fzero.core.config_tables import Table, flat
from fzero.core.text_parsing import short
from fzero.data.mixture import Mixture
from fzero.run.config import RunConfig
from fzero.run.config_table import from_table, to_table
from fzero.run.config_versions import current_keys
from fzero.run.placement import FLAGS
from fzero.run.resume.changed_run import may_change
from fzero.run.stages import STAGED, stage_of_step

WHOLE = "whole"  # in a line of attempts.jsonl: the config of all stages, where the attempt begins in one of several
# Where a run lies and computes is no number of it: folders may have moved, and an attempt may have had another mesh.
PLACES = ("data.path", "data.cache", "data.template", "train.checkpoints", "nvme.folder", "device", "pipeline.layout")
# What of environment.json decides what is trained.
CORPUS = ("corpus_sha256", "tokenizer", "eos")


class Copy(NamedTuple):
    """A copy of a run's config."""

    source: str  # the entry of a file that has it
    table: Table  # by the keys of the version that wrote it
    step: int | None  # after which it holds; None: it is of all stages
    placed: bool = True  # whether config.json has its placement, which earlier versions did not write there


def copies(attempts: Sequence[Table], attempts_path: Path, checkpoint_dir: Path) -> Iterator[Copy]:
    """The copies of a run's config, the best one first: of its last attempt, then of its local checkpoints."""
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
    """Raise ValueError naming the first entry of `config`, that of the file `path` without a checksum, which differs
    from a copy of it."""
    try:
        recorded = from_table(current_keys(copy.table))
    except ValueError:  # of keys that this version does not have: there is nothing to compare with
        return
    current = config if copy.step is None else stage_of_step(config, copy.step).config
    current_values, recorded_values = (dict(flat(to_table(without_folders(item)))) for item in (current, recorded))
    free = {*PLACES, *(() if copy.placed else FLAGS)}
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
    """Raise ValueError naming the first entry of environment.json, without a checksum, by which the run trains on
    another text than its last attempt did."""
    recorded: Any = attempts[-1].get("environment") if attempts else None
    for key, recorded_value in recorded.items() if isinstance(recorded, dict) else ():
        if environment.get(key) != recorded_value:
            raise ValueError(
                f"{path}: {key} is {short(environment.get(key))}, and {short(recorded_value)} is what the run trained "
                f"with, by the entry environment of the last line of {attempts_path}; set it back, or start a new run"
            )
