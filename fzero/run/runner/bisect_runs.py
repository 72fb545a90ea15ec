"""Find the first step, and the first leaf of the state, in which two runs differ by a bit.

Compare the recorded rows and checkpoints first. Then replay both runs side by side, from the last equal checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.core import pytree
from fzero.core.config_tables import flat
from fzero.core.digest import combine, digest_tree
from fzero.run.config.config_table import to_table
from fzero.run.runner.checkpoint_diff import describe_difference, recorded_digests
from fzero.run.runner.replay import (
    ReplayedStep,
    checkpoints_in,
    load_state,
    open_job,
    recorded_config,
    replay_steps,
    same_bits,
)
from fzero.run.runner.saver import to_memory
from fzero.run.setup import run_folder
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.train.state import TrainState

# The numbers of a row that follow from a run's state and data, in the order in which a step computes them.
NUMBERS = (
    "loss",
    "cross_entropy",
    "balance",
    "router_z",
    "grad_norm",
    "lr",
    "loss_scale",
    "skipped",
    "num_tokens",
    "digest",
    "val_loss",
)
ELSEWHERE = (
    "fzero",
    "torch",
    "python",
    "platform",
    "threads",
    "processes",
    "corpus_sha256",
    "init",
)  # of environment.json


class FirstDifference(NamedTuple):
    """The first step in which two runs are not the same."""

    step: int  # 0: their first states
    numbers: list[str]  # in the replayed rows that differ: loss, grad_norm, ...; "batch" if the data does
    leaf: str  # the first differing leaf of the state after the step, in the order of the tree; "" for none
    note: str  # where in the leaf, and by how much


class BisectResult(NamedTuple):
    """The result of a comparison of two runs."""

    differing: list[tuple[str, Any, Any]]  # values of the configs and the environments
    recorded: int | None  # the first step whose rows or checkpoints differ
    subject: str  # the name of that number or leaf
    parting: FirstDifference | None  # the difference found by replaying; None for none, or if no replay was needed
    strays: list[Path]  # runs whose replayed rows differ from the recorded ones
    elsewhere: bool  # whether one process may compute other bits than a run recorded
    steps: int  # that both have recorded

    @property
    def equal(self) -> bool:
        """Whether the records of both runs agree."""
        return self.recorded is None

    def __str__(self) -> str:
        if self.equal:
            return f"equal: no number and no leaf differs in the {self.steps} steps that both have a record of"
        if self.parting is not None:
            step, numbers, leaf, note = self.parting
            if step == 0:
                return f"part before step 1: leaf {leaf}{note}"
            first = ", ".join([*numbers, *([f"leaf {leaf}{note}"] if leaf else [])])
            return f"part at step {step}: {first}"
        recorded = f"recorded as parting at step {self.recorded} ({self.subject})"
        verdict = f"{recorded}, and equal there when made again in one process"
        if self.elsewhere:
            return (
                f"{verdict}: the meshes or devices they ran on add in another order (reduce=canonical does not on "
                "other meshes), or the hardware made a mistake"
            )
        if len(self.strays) == 1:
            return f"{verdict}: {self.strays[0]} does not reproduce itself"
        return (
            f"{verdict}: "
            f"{'neither run reproduces itself' if self.strays else 'both runs reproduce what they recorded of it'}"
        )


def bisect(
    a: Path, b: Path, *, device: str | None = None, nvme: str | None = None, say: Say = lambda line: None
) -> BisectResult:
    """Find where the runs in the folders `a` and `b` part, without changing them.

    device: auto, cpu or cuda, to make both again on (None: that of each). nvme: a folder for temporary copies of
    offloaded leaves (None: the system's).
    Raises ValueError if one is no run, they have no record of a common step, or files needed for a replay are missing.
    """
    folders = (a, b)
    checkpoints = [checkpoints_in(folder) for folder in folders]
    rows = [{row["step"]: row for row in run_folder.read_metrics(folder)} for folder in folders]
    differing = list(differences(*folders))
    equal, bound, subject, steps = recorded_difference(checkpoints, rows)
    if not steps:
        raise ValueError(f"{a} and {b} have no record of a common step; there is nothing to compare")
    if bound is None:
        return BisectResult(differing, None, "", None, [], False, steps)
    configs = [recorded_config(folder, bound, saved) for folder, saved in zip(folders, checkpoints)]
    local_configs = [replace(config, mesh={}, device=device or config.device) for config in configs]
    begin = f"checkpoint {equal}" if equal else "the start of each"
    say(
        f"recorded: the first difference is at step {bound} ({subject}); making both again from {begin}, in one process"
    )
    strays: list[Path] = []
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(open_job(folder, config, Coordinator(), nvme, say))
            for folder, config in zip(folders, local_configs)
        ]
        states = [
            load_state(f, p, saved[equal] if equal else None) for f, (p, *_), saved in zip(folders, opened, checkpoints)
        ]
        parting = find_difference(int(states[0].step), [], *states)
        replays = [replay_steps(replay_job, state, bound) for replay_job, state in zip(opened, states)]
        del states
        while parting is None:
            pair = [
                replayed_step
                for replayed_step in (next(steps_of, None) for steps_of in replays)
                if replayed_step is not None
            ]
            if len(pair) < 2:
                break
            step = int(pair[0].state.step)
            for folder, replayed_step, record, saved in zip(folders, pair, rows, checkpoints):
                if strays_from(replayed_step, record.get(step, {}), saved.get(step)) and folder not in strays:
                    strays.append(folder)
            numbers = [n for n in NUMBERS if differ(pair[0].row, pair[1].row, n)]
            parting = find_difference(
                step, ["batch"] * (not same_batch(*pair)) + numbers, *(replayed_step.state for replayed_step in pair)
            )
            del pair
    elsewhere = not all(same_bits(config, replay_job.job.config) for config, replay_job in zip(configs, opened))
    return BisectResult(differing, bound, subject, parting, strays, elsewhere, steps)


def recorded_difference(
    checkpoints: list[dict[int, checkpoint.Folder]], rows: list[dict[int, dict[str, Any]]]
) -> tuple[int, int | None, str, int]:
    """(last equal checkpoint, first unequal step or None, name of the difference or None, common steps)."""
    common, common_rows = checkpoints[0].keys() & checkpoints[1].keys(), rows[0].keys() & rows[1].keys()
    equal, steps = 0, sorted(common | common_rows)
    for step in steps:
        names = [n for n in NUMBERS if step in common_rows and differ(rows[0][step], rows[1][step], n)]
        if not names and step in common:
            names = first_leaf(checkpoints[0][step], checkpoints[1][step])
            equal = equal if names else step
        if names:
            return equal, step, names[0], len(steps)
    return equal, None, "", len(steps)


def report(result: BisectResult) -> Iterator[str]:
    """The lines of a report; the last one is the verdict."""
    for name, x, y in result.differing:
        yield f"{name}: {x!r} and {y!r}"
    yield str(result)


def differences(a: Path, b: Path) -> Iterator[tuple[str, Any, Any]]:
    """The values of the configs, and of the recorded machines and corpora, that differ."""
    tables = [dict(flat(to_table(run_folder.read_config(folder)))) for folder in (a, b)]
    machines = [{n: v for n, v in run_folder.read_environment(folder).items() if n in ELSEWHERE} for folder in (a, b)]
    for x, y in (tables, machines):
        yield from ((name, x.get(name), y.get(name)) for name in {**x, **y} if x.get(name) != y.get(name))


def differ(x: dict[str, Any], y: dict[str, Any], name: str) -> bool:
    """Whether both rows have the number `name`, with different values."""
    return name in x and name in y and x[name] != y[name]


def first_leaf(a: checkpoint.Folder, b: checkpoint.Folder) -> list[str]:
    """The first leaf that differs between two checkpoints, and how; or []."""
    x, y = recorded_digests(a), recorded_digests(b)
    for name in {**x, **y}:
        if name not in x or name not in y:
            return [f"leaf {name} is in one of them only"]
        if x[name] != y[name]:
            first, second = (checkpoint.restore_leaves(path, name.__eq__)[name] for path in (a, b))
            return [f"leaf {name}{describe_difference(first, second, 'which is {} and {}')}"]
    return []


def strays_from(replayed_step: ReplayedStep, row: dict[str, Any], path: checkpoint.Folder | None) -> bool:
    """Whether a replayed step differs from its run's record."""
    if "digest" in row:
        replayed_step.row["digest"] = f"{combine(digest_tree(to_memory(replayed_step.state.params))):016x}"
    if any(differ(replayed_step.row, row, name) for name in NUMBERS):
        return True
    return path is not None and digest_tree(to_memory(replayed_step.state)) != recorded_digests(path)


def same_batch(x: ReplayedStep, y: ReplayedStep) -> bool:
    """Whether two steps had the same batch."""
    return x.batch.keys() == y.batch.keys() and all(torch.equal(leaf, y.batch[name]) for name, leaf in x.batch.items())


def find_difference(step: int, numbers: list[str], x: TrainState, y: TrainState) -> FirstDifference | None:
    """The first difference after a step; None for none."""
    leaves_x, leaves_y = pytree.named_leaves(x), pytree.named_leaves(y)
    for name in {**leaves_x, **leaves_y}:
        if name not in leaves_x or name not in leaves_y:
            return FirstDifference(step, numbers, name, " is in one of them only")
        first, second = (
            leaf if isinstance(leaf, Tensor) else leaf.tensor() for leaf in (leaves_x[name], leaves_y[name])
        )
        if note := describe_difference(first, second, "which is {} and {}"):
            return FirstDifference(step, numbers, name, note)
    return FirstDifference(step, numbers, "", "") if numbers else None
