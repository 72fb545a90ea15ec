"""Replay a recorded step of a run from the nearest checkpoint before it, without writing to the run's folder.

A step is a function of a state and a position in the data, so a replay must give the numbers of its row, and every leaf
of its checkpoint. Where sums have the same order (device, mesh and stage or `reduce = "canonical"`, threads) the bits
must be equal; a difference then comes from hardware, another version, or something outside the state.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import checkpoint
from fzero.comm.axes import TP, mesh_text
from fzero.core.config_tables import RATE, Table, check_bounds, flat
from fzero.data.packing import Batch
from fzero.run.config.config_table import apply_table, from_table
from fzero.run.config.config_versions import current_keys
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import stage_of_step
from fzero.run.measure.metrics_rows import metrics_row
from fzero.run.runner import rollback
from fzero.run.runner.checkpoint_diff import Comparison, compare_leaves
from fzero.run.runner.pretrain import expect_memory, resolve_placement
from fzero.run.runner.saver import expect_disk
from fzero.run.setup import corpus, machine, run_folder, weights
from fzero.run.setup.build import Job, build, first_state, restore, save_store, specs_of
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.run.setup.process_settings import settings_restored
from fzero.sharding.layouts import digest_text
from fzero.sharding.spec import Offload
from fzero.train.state import TrainState

SHOWN = 12  # lines about differences
# The largest relative difference of a loss that passes if sums have another order, by the bits of the factors.
CLOSE = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
EXACT = ("lr", "loss_scale", "skipped", "num_tokens")  # numbers of a row that do not depend on the order of sums


class ReplayResult(NamedTuple):
    """The result of a replay."""

    start: int  # the step of the initial state
    step: int  # the last replayed step
    source: str  # of the initial state: a checkpoint or the start of the run
    rows: list[Comparison]  # every comparison, in the order in which the run computes
    tolerance: float  # 0: all bits

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        if not self.tolerance:
            return [row for row in self.rows if not row.equal]
        close = [row for row in self.rows if row.name == "loss" and not row.relative_error <= self.tolerance]
        return [row for row in self.rows if (row in close or row.name in EXACT) and not row.equal]

    @property
    def reproduces(self) -> bool:
        """Whether the replay agrees with the record, to the bit or within the tolerance."""
        return not self.failed

    @property
    def max_error(self) -> float:
        """The largest relative difference of a loss."""
        return max((row.relative_error for row in self.rows if row.name == "loss"), default=0.0)

    def __str__(self) -> str:
        steps = f"steps {self.start + 1} to {self.step}" if self.step > self.start + 1 else f"step {self.step}"
        numbers, leaves = (len([row for row in self.rows if row.leaf == leaf]) for leaf in (False, True))
        counts = f"{steps}, from {self.source}: {numbers} numbers" + f" and {leaves} leaves" * bool(leaves)
        if all(row.equal for row in self.rows):
            return f"reproduces bit for bit ({counts})"
        if self.reproduces:
            return f"agrees within {self.tolerance:g}: the losses differ by {self.max_error:.1e} at most ({counts})"
        first = self.failed[0]
        return f"parts at step {first.step} ({first.name}; {counts}, of which {len(self.failed)} fail)"


def replay(
    folder: Path,
    step: int,
    changes: Table | None = None,
    *,
    start: int | None = None,
    tolerance: float | None = None,
    nvme: str | None = None,
    coordinator: Coordinator | None = None,
    say: Say = lambda line: None,
) -> ReplayResult:
    """Replay step `step` of the run in `folder`, from the newest sound checkpoint before it or else from the start.

    Compares every step on the way with its row in metrics.jsonl, and with its checkpoint if there is one. Nothing in
    `folder` is changed: offloaded leaves go to a temporary folder below `nvme` (None: the system's). changes: of the
    config, such as {"mesh": {"dp": 2}, "zero": 3}; the mesh is the run's own if it fits these processes, else dp over
    all. start: the checkpoint's step; 0 is the first state. tolerance: relative, of losses; None: 0 if the same bits
    are due, else CLOSE. Raises ValueError if there is no such run, checkpoint or record."""
    coordinator = coordinator or Coordinator()
    if step < 1:
        raise ValueError(f"--step is {step}; it must be at least 1")
    if tolerance is not None:
        check_bounds("--rtol", tolerance, RATE)
    rows = {row["step"]: row for row in run_folder.read_metrics(folder)}
    checkpoints = checkpoints_in(folder)
    config = recorded_config(folder, step, checkpoints)
    if step not in rows and step not in checkpoints:
        last = max([*rows, *checkpoints], default=0)
        raise ValueError(
            f"{folder}: has no record of step {step}, neither a row of {run_folder.METRICS} nor a checkpoint; "
            f"its last is {last}"
        )
    fits = math.prod(config.mesh.values()) == coordinator.size
    changes = {"mesh": config.mesh if fits else {}, **(changes or {})}
    with open_job(folder, apply_table(replace(config, mesh={}), changes), coordinator, nvme, say) as replay_job:
        job, scratch = replay_job.job, replay_job.scratch
        begin = choose_start(checkpoints, step, start, job, coordinator, say)
        state = load_state(folder, job, checkpoints[begin] if begin else None)
        source, first = f"step-{begin:08d}" if begin else "the start of the run", int(state.step)
        checkpoints |= (
            step_on_disk(job, folder, step, scratch) if step not in checkpoints and scratch is not None else {}
        )
        say(f"replaying {folder} from {source} to step {step}, on {placement_text(job.config)}")
        exact = same_bits(config, job.config)
        if tolerance is None:
            tolerance = 0.0 if exact else CLOSE[config.precision.policy]
        comparisons: list[Comparison] = []
        for replayed_step in replay_steps(replay_job, state, step):
            number = int(replayed_step.state.step)
            recorded = dict(flat(rows.get(number, {})))
            if "digest" in recorded:
                replayed_step.row["digest"] = digest_text(replayed_step.state.params, specs_of(job).params, job.mesh)
            actual = dict(flat(replayed_step.row))
            comparisons += [
                Comparison(number, n, recorded[n], actual[n]) for n in actual if n in recorded and n != "step"
            ]
            if number in checkpoints:
                parted = any(row.leaf and not row.equal for row in comparisons)
                comparisons += compare_leaves(job, replayed_step.state, checkpoints[number], number, explain=not parted)
    return ReplayResult(first, step, source, comparisons, tolerance)


def report(result: ReplayResult) -> Iterator[str]:
    """The lines of a report; the last one is the verdict."""
    lines: list[str] = []
    steps: dict[int, int] = {}  # step: number of differing leaves; the first has its own line
    for row in result.failed:
        steps[row.step] = steps.get(row.step, 0) + row.leaf
        if not row.leaf or steps[row.step] == 1:
            lines.append(str(row))
        elif steps[row.step] > 2:
            lines[-1] = f"step {row.step}: {steps[row.step] - 1} more of its leaves differ"
        else:
            lines.append(f"step {row.step}: leaf {row.name} differs too")
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"... and {len(lines) - SHOWN} lines more"
    yield str(result)


# -- replaying


class ReplayedStep(NamedTuple):
    """A replayed step."""

    state: TrainState  # after it
    row: dict[str, Any]  # as the run records it
    batch: Batch  # this rank's rows


class ReplayJob(NamedTuple):
    """The values needed to replay steps of a run."""

    job: Job  # of the last step's stage
    # by the steps made: the job of the stage of the next one, and this rank's rows by `state.data_cursor`
    stage_of: Callable[[int], tuple[Job, Callable[[int], Batch]]]
    threads: int  # of the run
    scratch: Path | None  # a folder for offloaded leaves, if the run has any


def replay_steps(replay_job: ReplayJob, state: TrainState, end: int) -> Iterator[ReplayedStep]:
    """The steps of a run from `state` to step `end`. Each overwrites the state before it."""
    while (step := int(state.step)) < end:
        job, batch_at = replay_job.stage_of(step)
        # Threads are of the process; another run replayed beside this one may use another number.
        torch.set_num_threads(replay_job.threads)
        machine.set_fp32_matmul(job.config.precision.fp32_matmul)
        batch = corpus.on_device(batch_at(int(state.data_cursor)), job.device)
        state, metrics = job.train_step(state, batch)
        yield ReplayedStep(state, metrics_row(job, metrics, step), batch)


@contextlib.contextmanager
def open_job(
    folder: Path, config: RunConfig, coordinator: Coordinator, nvme: str | None, say: Say
) -> Iterator[ReplayJob]:
    """A context with the ReplayJob of the run in `folder` by `config`."""
    environment = run_folder.read_environment(folder)
    if not environment.get("corpus"):
        raise ValueError(f"{folder}: holds imported weights, not a training run; there is no step to make again")
    run_folder.expect_trained(environment, folder)
    config = replace(config, nvme=replace(config.nvme, folder="", slots=min(config.nvme.slots, 2)))
    with settings_restored():
        config, mesh, device, _ = resolve_placement(config, coordinator)
        scratch = None
        try:
            torch.set_num_threads(environment.get("threads", torch.get_num_threads()))
            if Offload.parse(config.offload).on_disk:
                scratch = Path(coordinator.share(lambda: tempfile.mkdtemp(prefix="fzero-replay-", dir=nvme)))
            job = build(config, mesh, scratch, device=device)
            expect_memory(job, coordinator)
            expect_disk(job, coordinator)
            path = corpus.corpus_of_run(config, folder, environment, coordinator, say)
            skips = coordinator.share(lambda: rollback.skips_of(folder))

            @functools.cache
            def of_stage(begin: int) -> tuple[Job, Callable[[int], Batch]]:
                c = stage_of_step(config, begin).config
                stage_job = job if c == config else build(c, mesh, scratch, nvme=job.nvme, device=device)
                batch_at = corpus.open_data(c, path, mesh, skips)[0]
                return stage_job, lambda cursor: batch_at(corpus.sample_of_cursor(cursor, skips))

            find_stage = lambda step: of_stage(stage_of_step(config, step).begin)  # noqa: E731
            yield ReplayJob(job, find_stage, torch.get_num_threads(), scratch)
            if job.nvme is not None:
                job.nvme.close()
            coordinator.share(lambda: "all have closed their files")
        finally:
            if scratch is not None and coordinator.first:
                shutil.rmtree(scratch, ignore_errors=True)


def choose_start(
    checkpoints: dict[int, checkpoint.Folder],
    step: int,
    start: int | None,
    job: Job,
    coordinator: Coordinator,
    say: Say,
) -> int:
    """The step of the checkpoint to replay `step` from; 0 for the first state. start: the required one."""
    earlier_steps = sorted(n for n in checkpoints if n < step)
    if start is not None and start not in (0, *earlier_steps):
        raise ValueError(
            f"--from {start}: there is no such checkpoint below step {step}; there are 0 (the start), "
            f"{list_steps(earlier_steps)}"
        )
    if start is not None:
        return start

    def look() -> tuple[int, list[str]]:
        sound = checkpoint.first_sound([checkpoints[n] for n in reversed(earlier_steps)], checkpoint.expect_sound)
        return next((n for n in earlier_steps if checkpoints[n] == sound.path), 0), sound.lines()

    newest, lines = coordinator.share(look)
    for line in lines:
        say(line)
    if newest:
        return newest
    reason = ", and the disk of its state has its last step alone" if job.nvme is not None else ""
    say(f"there is no checkpoint below step {step} of the run{reason}; from its start")
    return 0


def load_state(folder: Path, job: Job, path: checkpoint.Folder | None) -> TrainState:
    """This rank's state from a checkpoint, or the first one of the run."""
    if path is not None:
        return restore(job, path)
    init = run_folder.read_environment(folder).get("init")
    return first_state(job, weights.load_start(Path(init)).params if init else None)


def step_on_disk(job: Job, folder: Path, step: int, scratch: Path) -> dict[int, checkpoint.Folder]:
    """{step: a checkpoint in `scratch`} of the state on the run's disk; else {}."""
    config = run_folder.read_config(folder)
    snapshot = weights.snapshot_of(folder, config)
    if snapshot is None or snapshot.record.step != step or snapshot.record.dirty:
        return {}
    path = save_store(job, config, snapshot, scratch / run_folder.CHECKPOINTS, -1)
    return {} if path is None else {step: path}


def checkpoints_in(folder: Path) -> dict[int, checkpoint.Folder]:
    """{step: place} of the checkpoints of the run in `folder`."""
    checkpoint_dir = run_folder.checkpoints_of(folder, run_folder.read_config(folder))
    return {step: checkpoint.step_folder(checkpoint_dir, step) for step in checkpoint.steps(checkpoint_dir)}


def recorded_config(folder: Path, step: int, checkpoints: dict[int, checkpoint.Folder]) -> RunConfig:
    """The config with which the run made step `step`."""
    config = run_folder.read_config(folder)
    next_step = min((n for n in checkpoints if n >= step), default=None)
    table = checkpoint.read_manifest(checkpoints[next_step])["config"] if next_step is not None else None
    return stage_of_step(from_table(current_keys(table)) if table else config, step - 1).config


def same_bits(recorded: RunConfig, actual: RunConfig) -> bool:
    """Whether a step must have the same bits by both configs of a run."""

    def sizes(config: RunConfig) -> dict[str, int]:
        return {axis: size for axis, size in config.mesh.items() if size > 1}

    if recorded.device not in ("auto", actual.device):  # auto: of a run before there was a choice
        return False
    if sizes(recorded) == sizes(actual) and (recorded.zero == actual.zero or not sizes(actual)):
        return True
    return actual.reduce == "canonical" and sizes(recorded).get(TP) == sizes(actual).get(TP)


def placement_text(config: RunConfig) -> str:
    """The mesh of a config in words, with the ZeRO stage on it."""
    return mesh_text(config.mesh) + f" at stage {config.zero}" * (math.prod(config.mesh.values()) > 1)


def list_steps(steps: list[int]) -> str:
    """The text of a list of steps, the middle of a long one left out."""
    return ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:3], "...", *steps[-3:]])) or "none"


# -- leaves
