"""The policy after a bad step: train on without its update, roll back to a checkpoint, or stop.

A rollback first retries the same batch: a hardware fault is then gone, and the run has the bits of one without it. If
the fault returns, the run rolls back once more and leaves that batch out for good. Decisions are in RUN/skips.json,
replaced as a whole before they take effect, so that a run that is killed at any instant resumes as if it had not been:

    skips       [first sample, count] of each batch that is left out: see corpus.sample_of_cursor
    tried       first samples of batches under retry
    back_to     a step: later checkpoints are invalid and being removed; null if no rollback is under way
    behind      the number of the last bad step
    in_a_row    rollbacks since a checkpoint was saved at or after it
    rollbacks   all of them, with their reasons
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.core import pytree
from fzero.core.copy_buckets import read_scalars
from fzero.core.pytree import Tree
from fzero.core.storage import read_text, write_text
from fzero.core.text_parsing import expect_entries, parse_json, short
from fzero.run import setup
from fzero.run.config.run_config import Guard
from fzero.run.runner.saver import restore_on_all
from fzero.run.setup import run_folder
from fzero.run.setup.build import Job, first_state
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.train.state import TrainState

SKIPS = "skips.json"
REASONS = {  # of a row's "reason"
    "nonfinite": "the gradient is not finite",
    "spike": "the loss is a spike",
    "empty": "nothing in the batch counts",
}


class Fault(NamedTuple):
    """A step that asks for a rollback."""

    step: int  # steps made before
    sample: int  # first of the batch
    cause: str


class RollbackLog(NamedTuple):
    """The content of skips.json; see the head of this file."""

    skips: list[list[int]]
    tried: list[int]
    back_to: int | None
    behind: int
    in_a_row: int
    rollbacks: list[dict[str, Any]]


ENTRIES = {"skips": list, "tried": list, "back_to": int | None, "behind": int, "in_a_row": int, "rollbacks": list}


def read_log(folder: Path) -> RollbackLog:
    """The rollback log of the run in `folder`, an empty one if there is none; raises ValueError if it is damaged."""
    text = read_text(folder, SKIPS)
    if text is None:
        return RollbackLog([], [], None, 0, 0, [])
    try:
        table = parse_json(text, "it")
        expect_entries(table, ENTRIES, "it")
        if not all(type(n) is int for pair in table["skips"] for n in pair) or {*map(len, table["skips"])} - {2}:
            raise ValueError(f"its skips are {short(table['skips'])}")
        return RollbackLog(**table)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{folder / SKIPS}: is not the record of a run's rollbacks ({error}); put it back, or start a new run"
        ) from None


def write_log(folder: Path, record: RollbackLog) -> None:
    """Replace the rollback log of the run in `folder`, durably."""
    write_text(folder, SKIPS, json.dumps(record._asdict(), indent=1) + "\n")


def skips_of(folder: Path) -> list[tuple[int, int]]:
    """(first sample, count) of each batch that the run in `folder` leaves out: the `skips` of `sample_of_cursor`."""
    return [(first, count) for first, count in read_log(folder).skips]


def finish_rollback(folder: Path) -> None:
    """Finish a rollback under way: remove the checkpoints and rows after its target step; one process calls it."""
    record = read_log(folder)
    if record.back_to is None:
        return
    checkpoint_dir = run_folder.checkpoints_of(folder, run_folder.read_config(folder))
    for step in checkpoint.steps(checkpoint_dir):
        if step > record.back_to:
            checkpoint.remove(checkpoint_dir, step)
    run_folder.cut_metrics(folder, record.back_to)
    write_log(folder, record._replace(back_to=None))


def roll_back_decision(g: Guard, row: dict[str, Any], sample: int, skipped: int) -> Fault | None:
    """The Fault of a step that asks for a rollback, or None; raises FloatingPointError if the run must stop."""
    if not row["skipped"]:
        return None
    step, reason = row["step"], row["reason"]
    policy, cause = {"spike": g.spike, "nonfinite": g.nonfinite}.get(reason, "skip"), REASONS[reason]
    if reason == "spike":
        cause += f" ({row['loss']:.4f})"
    if reason == "nonfinite" and row["grad_norm"] is not None:
        cause = "the loss is not finite"
    if policy == "rollback":
        return Fault(step - 1, sample, cause)
    if policy == "stop":
        raise FloatingPointError(
            f"step {step}: {cause}, with the batch of sample {sample}; guard.nonfinite=stop ends the run here"
        )
    if skipped >= g.max_skipped and reason == "nonfinite":
        raise FloatingPointError(
            f"the gradient has not been finite for {skipped} steps in a row (to step {step}); lower --lr"
        )
    if skipped >= g.max_skipped:
        raise FloatingPointError(
            f"{skipped} steps in a row were skipped (to step {step}, where {cause}); lower --lr, or raise guard.sigmas"
        )
    return None


def expect_agreement(job: Job, state: TrainState, read_micro_batch: Callable[[int], Any], step: int) -> None:
    """Raise FloatingPointError, on all ranks, if they hold different values of one thing (train/sdc_check.py)."""
    assert job.check is not None  # guard.check_every is given
    lines = job.check(state, read_micro_batch)
    if lines:
        count_text = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise FloatingPointError(
            f"step {step}: {lines[0]}{count_text}: hardware computes wrongly, or a memory has "
            "changed; start it again without that host: --resume goes on from the last checkpoint, if there is one"
        )


def roll_back(job: Job, folder: Path, fault: Fault, coordinator: Coordinator, say: Say) -> TrainState:
    """The state to resume from after a fault: the newest sound checkpoint far enough back, or the start."""
    checkpoint_dir = run_folder.checkpoints_of(folder, job.config)
    steps, init = coordinator.share(lambda: candidates(job.config.guard, folder, checkpoint_dir, fault))

    def check(state: TrainState) -> str:
        return "" if is_finite(state) else "a value in it is not finite"

    paths = [checkpoint.step_folder(checkpoint_dir, step) for step in steps]
    target = checkpoint.first_sound(paths, lambda path: restore_on_all(job, path, coordinator, check))
    for line in target.lines():
        say(line)
    state = target.value
    if target.path is None:
        state = first_state(job, setup.weights.load_start(Path(init)).params if init else None)
    say(coordinator.share(lambda: record_rollback(job, folder, checkpoint_dir, fault, int(state.step))))
    return state


def candidates(g: Guard, folder: Path, checkpoint_dir: checkpoint.Folder, fault: Fault) -> tuple[list[int], str]:
    """(steps of the checkpoints to roll back to, the best first; the run whose weights this one began with)."""
    record, steps = merge_progress(read_log(folder), checkpoint_dir), checkpoint.steps(checkpoint_dir)
    if record.in_a_row >= g.max_rollbacks:
        raise FloatingPointError(
            f"step {fault.step + 1}: {fault.cause}, and the run has gone back {record.in_a_row} "
            "times without coming to a checkpoint at or "
            f"after step {record.behind}; lower --lr, or look at the hardware "
            f"(guard.max_rollbacks is {g.max_rollbacks})"
        )
    limit = fault.step - g.rollback_steps
    order = [step for step in reversed(steps) if step <= limit] + [step for step in steps if limit < step <= fault.step]
    return order, run_folder.read_environment(folder).get("init", "")


def merge_progress(record: RollbackLog, checkpoint_dir: checkpoint.Folder) -> RollbackLog:
    """The log, with rollbacks reset if a checkpoint after the bad step exists."""
    progress = any(step >= record.behind for step in checkpoint.steps(checkpoint_dir))
    return record._replace(behind=0, in_a_row=0) if progress else record


def free_state(state: TrainState) -> None:
    """Free the memory of a state, even if its tensors are still referenced."""
    for leaf in pytree.leaves(state):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().resizable():
            leaf.untyped_storage().resize_(0)


def is_finite(tree: Tree) -> bool:
    """Whether all numbers of this rank's part of a state are finite."""
    floats = [x for x in pytree.leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
    return all(read_scalars([torch.isfinite(x.float() if x.element_size() == 1 else x).all() for x in floats]))


def record_rollback(job: Job, folder: Path, checkpoint_dir: checkpoint.Folder, fault: Fault, target_step: int) -> str:
    """Log the rollback to `target_step` and remove what is after it; returns the line about the batch."""
    record, batch = merge_progress(read_log(folder), checkpoint_dir), job.config.train.batch
    repeat = fault.sample in record.tried
    if repeat:
        skips, tried = (
            [*record.skips, [fault.sample, batch]],
            [first for first in record.tried if first != fault.sample],
        )
    else:
        skips, tried = record.skips, [*record.tried, fault.sample]
    entry = {"step": fault.step + 1, "to": target_step, "sample": fault.sample, "why": fault.cause, "left_out": repeat}
    behind = max(record.behind, fault.step + 1)
    write_log(folder, RollbackLog(skips, tried, target_step, behind, record.in_a_row + 1, [*record.rollbacks, entry]))
    finish_rollback(folder)
    if repeat:
        return (
            f"step {fault.step + 1}: {fault.cause} again with the same batch, so the data is to blame; back to step "
            f"{target_step}, and samples {fault.sample} to {fault.sample + batch - 1} are left out"
        )
    return (
        f"step {fault.step + 1}: {fault.cause}; back to step {target_step}, to try the batch of sample {fault.sample} "
        "again: bad hardware may pass, bad data does not"
    )


def record_recovery(folder: Path, step: int, sample: int, tried: list[int], coordinator: Coordinator, say: Say) -> None:
    """Log and announce that a retried batch went well, and remove it from `tried`."""
    tried.remove(sample)
    coordinator.share(lambda: write_log(folder, read_log(folder)._replace(tried=tried)))
    say(
        f"step {step}: went well when it was tried again: the batch is sound, and a fault of the hardware "
        "likely; look at the hosts"
    )
