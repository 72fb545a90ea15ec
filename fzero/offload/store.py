"""A state on a disk: versions of its leaves in slots, of which one is complete at every instant.

A step reads the slot of the last complete step and writes another one; `commit` replaces one small file, step.json.
With one slot a step overwrites its input: step.json is marked dirty meanwhile, and a store whose run ended then cannot
be resumed.

Files: store.json, the description; step.json, the last complete step; sums/, checksums; arrays/, the leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from fzero.comm.rank_tables import Refusal, failing_together, raise_local
from fzero.core.gpu_copies import Copied
from fzero.core.storage import Damaged, write_text
from fzero.offload import store_manifest
from fzero.offload.buffer_pool import Buffer
from fzero.offload.chunk_files import Chunks, LeafFiles, RowRead, Rows
from fzero.offload.disk_io import LATER, NEXT, DiskRequest
from fzero.offload.store_manifest import (
    STEP,
    StepManifest,
    read_step_manifest,
    read_sums,
    step_manifest_text,
    sums_name,
)
from fzero.sharding.slices import MOST_ELEMENTS

# Checksums are sums modulo 2^64: blocks may be added in any order, in which the threads write them.
WORD = 1 << 64


class VersionedStore:
    """One rank's leaves of a state on a disk, in versions; `open_store` makes it."""

    def __init__(self, chunks: Chunks, slots: int, verify: bool) -> None:
        self.chunks, self.slots, self.verify = chunks, slots, verify
        self.buffers, self.disk, self.folder = chunks.buffers, chunks.disk, chunks.folder
        self.record: StepManifest | None = None
        self.target: int | None = None  # the slot being written
        # Checksums of the version being written: {(leaf, layer): {first row: sums of blocks}}.
        self.sums: dict[tuple[str, int], dict[int, list[int]]] = {}
        self.fixed: dict[str, list[int]] = {}  # checksums of leaves with one slot, which are written once
        self.writing: list[DiskRequest] = []
        self.closed = False

    @property
    def leaves(self) -> dict[str, LeafFiles]:
        return self.chunks.leaves

    def slot_of(self, name: str, slot: int) -> int:
        """The slot of a leaf in version `slot`: a leaf that never changes has only slot 0."""
        return slot if self.leaves[name].slots > 1 else 0

    def read(
        self, name: str, layer: int = 0, rows: Rows | None = None, *, priority: int = NEXT, slot: int | None = None
    ) -> RowRead:
        """Start to read rows of a layer of a leaf of the last complete step (or of a pinned slot)."""
        record = self._last()
        return self.chunks.read(
            name, self.slot_of(name, record.slot if slot is None else slot), layer, rows, priority=priority
        )

    def begin(self) -> None:
        """Begin the next version, in a slot that holds no needed step; does nothing if a version has been begun."""
        if self.target is not None:
            return
        self.chunks.expect_writable()
        self.expect_last()
        used_slots = {self.record.slot, *self.record.pinned} if self.record is not None and self.slots > 1 else set()
        free = [slot for slot in range(self.slots) if slot not in used_slots]
        assert free, f"the {self.slots} slots are all held: {self.record}"
        self.target = free[0]
        if self.slots == 1 and self.record is not None:
            # Before any byte is overwritten: a run that ends now has lost its only step.
            self._write_manifest(self.record._replace(dirty=True))
        self.sums = {}

    def write(
        self, name: str, layer: int, rows: Rows | None, buffer: Buffer, *, fill: Copied | None = None
    ) -> DiskRequest:
        """Start to write rows of a layer of a leaf into the next version.

        The buffer may not change until that is done. fill: a copy into it, for which the disk's thread waits.
        """
        assert self.target is not None, "begin was not called"
        sums: list[int] | None = None
        if self.verify:
            # The writing threads compute checksums just before each block is written, while it is in the cache.
            buffer.raw[buffer.view.nbytes :] = 0
            sums = self.sums.setdefault((name, layer), {}).setdefault(rows[0] if rows else 0, [])
            sums.clear()

        def note(block: memoryview) -> None:
            if fill is not None:
                fill.finish()
            if sums is not None:
                sums.append(sum_words(block))

        # Those that ended without an error are forgotten; errors are raised by `flush`.
        self.writing = [pending for pending in self.writing if not pending.done.is_set() or pending.error]
        self.writing.append(
            self.chunks.write(name, self.slot_of(name, self.target), layer, rows, buffer, priority=LATER, note=note)
        )
        return self.writing[-1]

    def write_rows(self, name: str, layer: int, rows: Rows, value: Tensor) -> None:
        """Start to write a copy of `value`, rows of a layer of a leaf, into the next version."""
        leaf = self.leaves[name]
        buffer = self.buffers.allocate(
            (rows[1] - rows[0], *leaf.chunk[1:]) if leaf.chunk else (), leaf.dtype, self.disk.busy
        )
        buffer.view.copy_(value.reshape(buffer.view.shape))
        self.write(name, layer, rows, buffer)

    def write_layer(self, name: str, layer: int, value: Tensor) -> None:
        """Start to write a copy of `value`, all of a layer of a leaf, into the next version."""
        leaf = self.leaves[name]
        value = value.reshape(leaf.chunk)
        for begin, end in self.chunks.row_blocks(name, self.block_bytes(name)):
            self.write_rows(name, layer, (begin, end), value[begin:end] if leaf.chunk else value)

    def write_leaf(self, name: str, value: Tensor) -> None:
        """Start to write a copy of `value`, all layers of a leaf, into the next version."""
        leaf = self.leaves[name]
        for layer in range(leaf.layers):
            self.write_layer(name, layer, value[layer] if leaf.stacked else value)

    def block_bytes(self, name: str) -> int:
        """The bytes of a row block by which all of a leaf is read and written."""
        return min(MOST_ELEMENTS * self.leaves[name].dtype.itemsize, self.buffers.size // 4)

    def flush(self) -> None:
        """Wait for all writes; raises ValueError if one failed."""
        writing, self.writing = self.writing, []
        for pending in writing:  # wait for all before raising an error: none may finish after later writes
            with suppress(OSError):
                pending.wait()
        for error in filter(None, (pending.error for pending in writing)):
            raise self.chunks.failed(error) from error

    def commit(self, step: int, values: dict[str, Any], agree: Callable[[Refusal | None], None] = raise_local) -> None:
        """Make the version written since `begin` the last complete step.

        Without a `begin`, that is the old leaves with new values.
        step: its number. values: the small values of the state. agree: `raise_together` of the ranks: where a write
        failed on one of them, none makes the step.
        """
        previous = self.record
        slot = self.target
        if slot is None:
            assert previous is not None, "nothing was committed yet, and begin was not called"
            slot = previous.slot
        with failing_together(agree):
            self._finish_slot(slot)
            self.expect_last()
        self.target = None
        # Last, when the leaves and sums of all ranks are durable: this one small file decides which step is complete.
        self._write_manifest(StepManifest(step, slot, values, previous.pinned if previous else {}))

    def _finish_slot(self, slot: int) -> None:
        """Make the version that is written durable, with its checksums."""
        if self.target is not None:
            self.flush()
            sums = {name: [self._sum(name, i) for i in range(leaf.layers)] for name, leaf in self.leaves.items()}
            if self.record is None:
                self.fixed = {name: checksums for name, checksums in sums.items() if self.leaves[name].slots == 1}
            # Leaves first, then their checksums, then (in `commit`) step.json: a crash between leaves the step before.
            self._durably(lambda: self.chunks.sync(slot))
            if self.verify:
                text = json.dumps(sums | (self.fixed if self.slots > 1 else {}))
                self._durably(lambda: write_text(self.folder, sums_name(slot, self.chunks.rank), text))

    def _sum(self, name: str, layer: int) -> int:
        return sum(sum(blocks) for blocks in self.sums.get((name, layer), {}).values()) % WORD

    def abandon(self) -> None:
        """Discard the version written since `begin`."""
        assert self.slots > 1 or self.target is None, "with one slot there is no version to go back to"
        self.flush()
        self.target = None

    def pin(self, count: int) -> list[int]:
        """Keep the last complete step as a checkpoint, with the newest ones before it, `count` in all.

        Returns the steps that are kept.
        Nothing is copied: later steps leave its slot alone. Raises ValueError if there are too few slots.
        """
        if count > self.slots - 2:
            raise ValueError(
                f"{self.folder}: {self.slots} slots keep {max(0, self.slots - 2)} checkpoints and {count} are asked "
                f"for; use nvme.slots={count + 2} (slots of fzero.Nvme)"
            )
        record = self._last()
        pinned = sorted({**record.pinned, record.slot: record.step}.items(), key=lambda item: -item[1])[:count]
        self._write_manifest(record._replace(pinned=dict(pinned)))
        return sorted(step for _, step in pinned)

    def trim(self) -> None:
        """Free the disk space of slots that hold no step: a run that ends does not need them; a resumed one makes them
        again."""
        record = self._last()
        self.chunks.trim({record.slot, *record.pinned})

    def finish(self) -> None:
        """Mark the run as over, so that another run may take over the folder."""
        self._write_manifest(self._last()._replace(done=True))

    def _last(self) -> StepManifest:
        assert self.record is not None, "nothing was committed yet"
        self.expect_open()
        return self.record

    def expect_open(self) -> None:
        """Raise ValueError if this store was closed, or its folder opened again since."""
        if self.closed:
            raise ValueError(f"{self.folder}: this store was closed (Nvme.close); fzero.reopen_state opens it again")
        store_manifest.expect_owner(self, self.folder, self.chunks.rank)

    def expect_last(self) -> None:
        """Raise ValueError if the last complete step is not the one that this store left, as somebody else wrote to the
        folder since. Rank 0 reads it, who wrote it: on another node a file may come late."""
        self.expect_open()
        if self.chunks.rank == 0 and self.record is not None and read_step_manifest(self.folder) != self.record:
            raise self.chunks.failed(OSError()) if self.chunks.is_removed else store_manifest.another_state(self.folder)

    def _write_manifest(self, record: StepManifest) -> None:
        if self.chunks.rank == 0:
            self._durably(lambda: write_text(self.folder, STEP, step_manifest_text(record)))
        # Behind the write: where it fails, the step before is the last complete one here as on the disk.
        self.record = record

    def _durably(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            raise self.chunks.failed(error) from error

    def check(self, slot: int) -> None:
        """Raise Damaged naming the first chunk of the slot whose checksum does not agree."""
        if not self.verify:
            return
        sums = read_sums(self.folder, slot, self.chunks.rank, {name: leaf.layers for name, leaf in self.leaves.items()})
        step = self.record.step if self.record is not None else None
        for name, leaf in self.leaves.items():
            for layer in range(leaf.layers):
                leaf_slot, actual_sum = self.slot_of(name, slot), 0
                for rows in self.chunks.row_blocks(name, self.buffers.size // 4):
                    reading = self.chunks.read(name, leaf_slot, layer, rows)
                    reading.wait()
                    actual_sum += checksum(reading.buffer)
                if actual_sum % WORD != sums[name][layer]:
                    raise Damaged(
                        f"{self.chunks.path(name, leaf_slot, layer)}: is damaged: the checksum does not match for "
                        f"{name}{f', layer {layer},' if leaf.stacked else ''} at step {step}; resume from a checkpoint"
                    )
        self.fixed = {name: sums[name] for name, leaf in self.leaves.items() if leaf.slots == 1}

    def close(self) -> None:
        """Wait for the writes under way and close the files; the threads of the disk keep running."""
        for pending in self.writing:
            pending.done.wait()
        self.closed = True
        self.chunks.close()
        store_manifest.release(self, self.folder, self.chunks.rank)


def checksum(buffer: Buffer) -> int:
    """The sum of a buffer's 64-bit words, modulo 2^64, after zeroing its padding."""
    buffer.raw[buffer.view.nbytes :] = 0
    return sum_words(memoryview(buffer.raw.numpy()))


def sum_words(block: memoryview) -> int:
    """The sum of the 64-bit words of whole pages, modulo 2^64."""
    return int(np.frombuffer(block, np.uint64).sum(dtype=np.uint64))
