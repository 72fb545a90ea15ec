"""The checkpoints that a run writes while it trains, and the policy if one cannot be written; the newest state of a
run.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero import checkpoint, offload
from fzero.checkpoint import directory
from fzero.checkpoint.directory import newest_sound
from fzero.checkpoint.restore_tree import code_lines, encode_moments
from fzero.core import pytree
from fzero.core.pytree import leaves
from fzero.core.storage import Damaged, is_url
from fzero.offload import DiskTensor, DiskTraffic
from fzero.offload.nvme import release_store
from fzero.run import setup
from fzero.run.config.config_table import to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_check import expect_disk_space
from fzero.run.setup import run_folder, run_lock
from fzero.run.setup.build import Job, all_on_disk, first_state, latest, like_of, restore, save_store, specs_of
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.train.state import TrainState
from fzero.train.state_on_disk import DiskLayout, plan_record


def expect_disk(job: Job, coordinator: Coordinator) -> None:
    """Raise ValueError if the disk of a new run is too small for its state."""
    store_path = job.nvme.folder if job.nvme is not None else None
    if store_path is None or is_url(store_path) or not job.config.train.memory_check:
        return
    existing_parent = next(
        path for path in (Path(store_path).absolute(), *Path(store_path).absolute().parents) if path.exists()
    )
    reusable_bytes = sum(
        path.stat().st_blocks * 512 for path in Path(store_path).rglob("*") if path.is_file()
    )  # taken over from a finished run
    coordinator.share(lambda: expect_disk_space(job, shutil.disk_usage(existing_parent).free + reusable_bytes))


def expect_new(job: Job, folder: Path, coordinator: Coordinator) -> None:
    """Raise ValueError if a new run's checkpoint folder has checkpoints, OSError if its store is out of reach."""
    if job.config.train.checkpoints and not all_on_disk(job):
        checkpoint_dir = run_folder.checkpoints_of(folder, job.config)
        if steps := coordinator.share(lambda: checkpoint.steps(checkpoint_dir)):
            raise ValueError(
                f"train.checkpoints is {checkpoint_dir}, which has the step {steps[-1]} of a run already; "
                "name another place"
            )


def load_newest_state(job: Job, folder: Path, coordinator: Coordinator, say: Say, init: Path | None) -> TrainState:
    """The state to resume from: the last complete step on the run's disk, else the newest sound checkpoint."""
    checkpoint_dir = run_folder.checkpoints_of(folder, job.config)
    saved = coordinator.share(lambda: checkpoint.steps(checkpoint_dir))
    previous = run_folder.read_config(folder)
    store_changed = [previous.offload, previous.nvme.folder] != [job.config.offload, job.config.nvme.folder]
    if all_on_disk(job) and not store_changed and matches_store(job):
        failure = ""
        try:
            state = latest(job)
        except Damaged as error:
            failure = str(error)
        failures = [text for text in coordinator.gather(failure) if text]
        if not failures:
            return state
        if not saved:
            raise ValueError(failures[0])
        say(f"passed over: {failures[0]}")
        coordinator.share(lambda: release_store(store_folder(job)))
    else:
        saved = convert_foreign_store(job, folder, previous, saved, coordinator, say)
    if not saved:
        return first_state(job, setup.weights.load_start(init).params if init else None)
    return restore_newest(job, checkpoint_dir, saved, coordinator, say)


def store_folder(job: Job) -> str | Path:
    """The folder of the store of a run that has one."""
    assert job.nvme is not None and job.nvme.folder is not None
    return job.nvme.folder


def matches_store(job: Job) -> bool:
    """Whether the store in the run's folder was made by the same plan, or there is none."""
    try:
        record = offload.read_description(store_folder(job))
    except Damaged:
        return True
    if record is None or record["ranks"] != job.mesh.size or record["owner"] != plan_record(job.plan):
        return record is None
    leaves = DiskLayout(like_of(job), specs_of(job), job.plan).files
    expected = {name: [list(leaf.described), str(leaf.dtype).removeprefix("torch.")] for name, leaf in leaves.items()}
    return expected == {name: [leaf["shape"], leaf["dtype"]] for name, leaf in record["leaves"].items()}


def convert_foreign_store(
    job: Job, folder: Path, previous: RunConfig, saved: list[int], coordinator: Coordinator, say: Say
) -> list[int]:
    """Convert another plan's store into a checkpoint, release its folder, and list the checkpoints' steps."""
    snapshot, checkpoint_dir = (
        setup.weights.snapshot_of(folder, previous),
        run_folder.checkpoints_of(folder, job.config),
    )
    failure, checkpoint_path = "", None
    if snapshot is not None and not snapshot.record.done and not lacks_optimizer_state(job, snapshot):
        try:
            checkpoint_path = save_store(job, previous, snapshot, checkpoint_dir, saved[-1] if saved else -1)
        except (Damaged, checkpoint.SaveFailed) as error:
            failure = str(error)
    failures = [text for text in coordinator.gather(failure) if text]
    if failures and not saved:
        raise ValueError(failures[0])
    if failures:
        say(f"passed over: {failures[0]}")
    elif checkpoint_path is not None and snapshot is not None:
        say(f"step {snapshot.record.step} on the disk was another plan's: it is {checkpoint_path} now")
    for store in (
        {str(snapshot.folder)} if snapshot is not None else {str(job.nvme.folder)} if job.nvme is not None else ()
    ):
        coordinator.share(lambda store=store: release_store(store))
    return coordinator.share(lambda: checkpoint.steps(checkpoint_dir))


def lacks_optimizer_state(job: Job, snapshot: checkpoint.StoreSnapshot) -> bool:
    """Whether the store lacks optimizer state, and cannot resume alone."""
    stored_names = {*snapshot.leaves, *snapshot.record.values}
    stored = checkpoint.renamed_leaves(stored_names, like_of(job))
    names = [name for name in pytree.names(like_of(job)) if name.startswith("opt_state/")]
    return any(stored.get(name, name) not in stored_names for name in names)


def expect_leaves(job: Job, folder: Path, previous: RunConfig) -> None:
    """Raise ValueError if a store lacks a leaf of the changed optimizer's state and no checkpoint has it."""
    snapshot = setup.weights.snapshot_of(folder, previous)
    if snapshot is None or checkpoint.steps(run_folder.checkpoints_of(folder, previous)):
        return
    if lacks_optimizer_state(job, snapshot):
        raise ValueError(
            f"{snapshot.folder}: the state on this disk lacks leaves that the optimizer has with these values; leave "
            "out what gives it other leaves, such as optim.momentum"
        )


def restore_newest(
    job: Job, checkpoint_dir: checkpoint.Folder, saved: list[int], coordinator: Coordinator, say: Say
) -> TrainState:
    """The state of the newest sound checkpoint among `steps`; says which ones were passed over."""
    if job.plan.on_disk:  # all ranks make a store together, so check its source first

        def look() -> tuple[str, list[str]]:
            newest = newest_sound(checkpoint_dir, checkpoint.expect_sound)
            return str(newest.path), newest.lines()

        path, lines = coordinator.share(look)
        for line in [*lines, *code_lines(path), *checkpoint.error_lines(path, job.plan, pytree.names(like_of(job)))]:
            say(line)
        return restore(job, path)
    newest = newest_sound(checkpoint_dir, lambda path: restore_on_all(job, path, coordinator), saved)
    assert newest.path is not None  # else it has raised
    lines = [*newest.lines(), *code_lines(newest.path)]
    for line in [*lines, *checkpoint.error_lines(newest.path, job.plan, pytree.names(like_of(job)))]:
        say(line)
    return newest.value


def restore_on_all(
    job: Job, path: checkpoint.Folder, coordinator: Coordinator, check: Callable[[TrainState], str] = lambda state: ""
) -> TrainState:
    """This rank's state from the checkpoint at `path`; raises Damaged, on all ranks, if it is for one."""
    try:
        state = restore(job, path)
        failure = check(state)
    except Damaged as error:
        failure = str(error)
    failures = [text for text in coordinator.gather(failure) if text]
    if failures:
        raise Damaged(failures[0])
    return state


def offload_summary(job: Job) -> list[str]:
    """The lines about the run's disk shown at its start; none without a disk."""
    if job.nvme is None:
        return []
    size = job.nvme.pool_bytes
    lines = [f"offload {job.config.offload}: {job.nvme.folder}, {size / 1e6:,.0f} MB of buffers a process"]
    if all_on_disk(job):
        pinned_slots = job.nvme.slots - 2
        pinned_text = f", and the last {pinned_slots} checkpoints are kept" if pinned_slots > 0 else ""
        lines.append(
            f"every step is complete on the disk when it ends: --resume resumes from the last one{pinned_text}"
        )
    return lines


def disk_row(job: Job, previous: DiskTraffic) -> dict[str, Any]:
    """The fields of a step's row: the disk's bytes, and seconds of waiting."""
    if job.nvme is None:
        return {}
    current = job.nvme.traffic()
    return {
        "disk_read_bytes": current.read_bytes - previous.read_bytes,
        "disk_written_bytes": current.written_bytes - previous.written_bytes,
        "disk_wait_s": current.waited_s - previous.waited_s,
    }


def to_memory(tree: Any) -> Any:
    """The tree with its leaves on a disk read into memory."""
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf, tree)


class CheckpointSaver:
    """Writes checkpoints: all ranks call `save`, then `poll` after every step, `close` at the end."""

    def __init__(self, job: Job, folder: Path, step: int, snapshot_budget: int, say: Say) -> None:
        t = job.config.train
        self.job, self.folder, self.say, self.saved = job, folder, say, step
        self.specs, self.config = specs_of(job), to_table(job.config)
        self.on_error, self.every, self.writer = t.on_save_error, t.checkpoint_every, None
        self.coded = t.compress.startswith("8bit")
        self.done: checkpoint.Saved | None = None  # completed, and not in a row of metrics yet
        if not all_on_disk(job):
            self.writer = checkpoint.Writer(
                run_folder.checkpoints_of(folder, job.config),
                job.mesh,
                keep_last=t.keep_last or None,
                keep_every=t.keep_every or None,
                compress="zstd" if t.compress.endswith("zstd") else "",
                buffer_bytes=t.snapshot_mb << 20 or snapshot_budget,
            )
            if job.mesh.rank == 0:
                retire_excess(run_folder.checkpoints_of(folder, job.config), step, t.keep_last, t.keep_every, say)

    def reserve(self, state: TrainState) -> None:
        """Allocate the memory of the snapshots before the first step."""
        if self.writer is not None and self.every:
            resident = [leaf for leaf in leaves(state) if not isinstance(leaf, DiskTensor)]
            self.writer.reserve(sum(int(1.02 * leaf.nbytes) + 8192 for leaf in resident))

    def save(self, state: TrainState, step: int) -> None:
        """Begin the checkpoint of `step`; the state may change after this returns. Raises SaveFailed if the policy is
        to stop."""
        self.saved = step
        run_lock.expect_owned(self.folder)
        if self.writer is None:
            nvme = self.job.nvme
            assert nvme is not None and nvme.store is not None  # each step is a checkpoint there
            if nvme.slots > 2:
                nvme.store.pin(nvme.slots - 2)
            return
        self.done = self._saved(self.writer.wait) or self.done
        snapshot, specs = encode_moments(state, self.specs, self.job.mesh) if self.coded else (state, self.specs)
        self.writer.save(snapshot, step=step, config=self.config, specs=specs)

    def poll(self) -> dict[str, Any]:
        """The fields of a row of metrics for a checkpoint completed since the last call; raises as `save` does."""
        done = self.done or (self._saved(self.writer.poll) if self.writer is not None else None)
        self.done = None
        return (
            {} if done is None else {"saved_step": done.step, "save_blocked_s": done.blocked_s, "save_s": done.total_s}
        )

    def _saved(self, poll_writer: Any) -> checkpoint.Saved | None:
        try:
            return poll_writer()
        except checkpoint.SaveFailed as error:
            if self.on_error == "stop":
                raise
            self.say(f"{error}; training goes on, the next checkpoint is tried {self.every} steps after this one")
            return None

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.writer is None:
            return
        if issubclass(kind, Exception) and self.job.mesh.size == 1:
            with contextlib.suppress(checkpoint.SaveFailed):
                self.writer.close()  # finish the checkpoint under way
        else:
            self.writer.abandon()  # it may need a rank that is gone

    def close(self, state: TrainState | None, step: int) -> None:
        """Wait for the saves, and save `step` if needed; raises SaveFailed."""
        try:
            if state is not None and self.saved != step:
                self.save(state, step)
            if self.writer is not None and state is not None:
                self.writer.wait()
            elif self.writer is not None:
                self._saved(self.writer.wait)  # the run goes on
        finally:
            if self.writer is not None:
                self.writer.close()


def retire_excess(checkpoint_dir: checkpoint.Folder, step: int, keep_last: int, keep_every: int, say: Say) -> None:
    """Remove the checkpoints that a killed run left beyond `keep_last`, if that of `step` is there."""
    # Without a checkpoint of that step nothing is removed: which ones are sound is not known then.
    if not keep_last or step not in checkpoint.steps(checkpoint_dir):
        return
    try:
        directory.retire(checkpoint_dir, step, keep_last=keep_last, keep_every=keep_every or None, spare=False)
    except OSError as error:
        say(f"{checkpoint_dir}: an old checkpoint cannot be removed: {error}")
