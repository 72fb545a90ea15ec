"""The checkpoints that a run writes while it trains, and what follows where one cannot be written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fzero import checkpoint
from fzero.core.pytree import leaves
from fzero.offload import DiskTensor
from fzero.run import run_folder
from fzero.run.build import Job, all_on_disk, specs_of
from fzero.run.config_table import to_table
from fzero.run.corpus import Say
from fzero.train.state import TrainState
from fzero.train.update.delayed import settled


class CheckpointSaver:
    """`save` after steps that are to be kept, `poll` after every step, `close` at the end; all ranks alike. In a `with`, an error ends it.

    A run whose whole state is committed to a disk with every step writes no checkpoints: a slot of its store is one.
    room: bytes of memory that a snapshot may take.
    """

    def __init__(self, job: Job, folder: Path, step: int, room: int, say: Say) -> None:
        t = job.config.train
        self.job, self.say, self.saved = job, say, step
        self.specs, self.config = specs_of(job), to_table(job.config)
        self.on_error, self.every, self.writer = t.on_save_error, t.checkpoint_every, None
        self.done: checkpoint.Saved | None = None  # and not in a row of metrics yet
        if not all_on_disk(job):
            self.writer = checkpoint.Writer(
                run_folder.checkpoints_of(folder, job.config),
                job.mesh,
                keep_last=t.keep_last or None,
                keep_every=t.keep_every or None,
                compress=t.compress.replace("none", ""),
                buffer_bytes=t.snapshot_mb << 20 or room,
            )

    def reserve(self, state: TrainState) -> None:
        """Allocate the memory of the snapshots before the first step."""
        if self.writer is not None and self.every:
            held = [leaf for leaf in leaves(state) if not isinstance(leaf, DiskTensor)]
            self.writer.reserve(sum(int(1.02 * leaf.nbytes) + 8192 for leaf in held))

    def save(self, state: TrainState, step: int) -> None:
        """Begin the checkpoint of `step`; the state may change when this returns. Raises SaveFailed where the policy is to stop."""
        self.saved = step
        if self.writer is None:
            if self.job.space.slots > 2:
                self.job.space.store.pin(self.job.space.slots - 2)
            return
        self.done = self._saved(self.writer.wait) or self.done
        self.writer.save(settled(state), step=step, config=self.config, specs=self.specs)

    def poll(self) -> dict[str, Any]:
        """The fields of a row of metrics for a checkpoint that was completed since the last call; raises as `save` does."""
        done = self.done or (self._saved(self.writer.poll) if self.writer is not None else None)
        self.done = None
        return {} if done is None else {"saved_step": done.step, "save_blocked_s": done.blocked_s, "save_s": done.total_s}

    def _saved(self, ask: Any) -> checkpoint.Saved | None:
        try:
            return ask()
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
                self.writer.close()  # what was begun is worth having
        else:
            self.writer.abandon()  # it may need a rank that is gone

    def close(self, state: TrainState | None, step: int) -> None:
        """End the saves, with a checkpoint of `step` where there is none yet. Raises SaveFailed where that cannot be written."""
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
