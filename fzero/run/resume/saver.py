"""The checkpoints that a run writes while it trains, and the policy if one cannot be written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fzero import checkpoint
from fzero.checkpoint import directory
from fzero.checkpoint.moment_codes import encode_moments
from fzero.core.pytree import leaves
from fzero.offload import DiskTensor
from fzero.run import run_folder, run_lock
from fzero.run.build import Job, all_on_disk, specs_of
from fzero.run.config_table import to_table
from fzero.run.corpus import Say
from fzero.train.state import TrainState


class CheckpointSaver:
    """Write checkpoints: all ranks call `save` after steps to keep, `poll` after every step, `close` at the end.

    A run that commits its whole state to a disk with every step pins slots of its store in place of checkpoints.
    room: bytes of memory that a snapshot may take.
    """

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
        """The fields of a row of metrics for a checkpoint that was completed since the last call; raises as `save`
        does."""
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
        """Wait for the saves, and save `step` if it has no checkpoint. Raises SaveFailed if that cannot be written."""
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
    """Remove the checkpoints that a run, killed after it had completed one, left beyond `keep_last`.

    step: that of the state that the run resumes from. Without a checkpoint of it nothing is removed: which ones are
    sound is not known then.
    """
    if not keep_last or step not in checkpoint.steps(checkpoint_dir):
        return
    try:
        directory.retire(checkpoint_dir, step, keep_last=keep_last, keep_every=keep_every or None, spare=False)
    except OSError as error:
        say(f"{checkpoint_dir}: an old checkpoint cannot be removed: {error}")
