"""Nvme: a rank's folder on a disk, with the buffers, I/O threads, store and scratch file that use it.

The folder of a store is opened as a new store or an existing one, taken over from a run that is over, and released.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import offload
from fzero.comm.rank_tables import Refusal, failing_together, raise_local, raise_together
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.files import make_folder, remove_entry
from fzero.core.host_memory import round_to_pages
from fzero.core.storage import Damaged, is_url, write_text
from fzero.offload import store_manifest
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.disk_io import FOLDER, NEXT, DiskIO, DiskSettings, DiskTraffic, load_settings
from fzero.offload.store_manifest import (
    NEW_STATE,
    STEP,
    STORE,
    StepManifest,
    check_same_store,
    describe_store,
    read_description,
    read_step_manifest,
    read_store,
    signed_text,
    step_manifest_text,
)
from fzero.sharding import Plan
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import is_stacked, local_numel

# A folder with these alone, and no store.json, is that of a start that was killed; anything else may be somebody's
# files.
LEFTOVER_NAMES = {
    "arrays",
    "sums",
    "scratch",
    f"{STORE}.partial",
    "lock.json",  # of the run that writes the store
}  # left in a folder if a run ended before store.json was written


class StoreRanks(NamedTuple):
    """The processes that share a store."""

    rank: int = 0
    size: int = 1
    # returns when all ranks have called it with None, else raises on all of them: see `raise_together`
    agree: Callable[[Refusal | None], None] = raise_local


def open_store(
    folder: str | Path,
    leaves: dict[str, offload.LeafFiles],
    *,
    streams: tuple[BufferPool, DiskIO],
    ranks: StoreRanks | None = None,
    slots: int = 2,
    verify: bool = True,
    owner: dict[str, Any] | None = None,
    resume: bool = False,
) -> offload.VersionedStore:
    """Open the store of `leaves` in `folder`: a new one, to be written and committed, or with `resume` the existing
    one.

    A new store takes over the files of a store whose run is over; the folder of a run that is not over is refused.
    streams: the memory and threads of the transfers. ranks: None for one process. slots, verify: see `Nvme`.
    owner: JSON values that must be equal when the store is opened again.
    Raises ValueError if the folder cannot be written or holds another store, or the disk is too small, and Damaged if
    the store is damaged.
    """
    (buffers, disk), (rank, size, agree) = streams, ranks or StoreRanks()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(store_manifest.unlock_unowned, (store_manifest.canonical_name(folder), rank))
        if slots < 1:
            raise ValueError(
                f"nvme.slots is {slots} (slots of fzero.Nvme); it must be at least 1, and 2 or more for steps that "
                "survive a kill"
            )
        leaves = {
            name: leaf._replace(slots=min(leaf.slots, slots) if leaf.slots == 1 else slots)
            for name, leaf in leaves.items()
        }
        description, record, sums = describe_store(leaves, size, slots, owner or {}, verify=verify), None, verify
        with failing_together(agree):
            if resume:
                record, sums = _expect_store(folder, description, verify=verify)
                if rank == 0:
                    store_manifest.lock(folder)
            elif rank == 0:
                _claim_folder(folder, description)
        with failing_together(agree):
            chunks = _make_chunks(
                folder,
                partial(offload.chunk_files.Chunks, folder, leaves, rank, size, buffers, disk, create=not resume),
            )
        on_failure.callback(chunks.discard)
        with failing_together(agree):
            resident = {record.slot, *record.pinned} if record is not None else set()
            _make_chunks(folder, partial(chunks.open, resident))
            store = offload.VersionedStore(chunks, slots, sums)
            if record is not None:
                store.record = record
                store.check(record.slot) if verify else None
        store_manifest.claim(store, folder, rank)  # not before: a store that is refused leaves the owner what it was
        on_failure.pop_all()
        return store


def _make_chunks(folder: str | Path, make: Callable[[], Any]) -> Any:
    """What `make` returns; raises ValueError for a folder that may not be written."""
    try:
        return make()
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror}; give a folder that this user may write ({FOLDER})"
        ) from None


def _expect_store(folder: str | Path, description: dict[str, Any], *, verify: bool) -> tuple[StepManifest, bool]:
    """(the last complete step, whether there are checksums) of the store; raises ValueError for another one."""
    opened = read_store(folder)
    check_same_store(folder, json.loads(json.dumps(description)))
    if opened is None:
        raise ValueError(f"{folder}: holds no complete step yet; {NEW_STATE}")
    record, sums = opened[1], opened[0]["verify"]
    if verify and not sums:
        raise ValueError(f"{folder}: was written without checksums; use verify=False (nvme.verify=false of a run)")
    if record.dirty:
        raise Damaged(
            f"{folder}: with one slot, step {record.step + 1} was being written over step {record.step} when its run "
            "ended; resume from a checkpoint, and use two slots (nvme.slots=2) to survive a kill"
        )
    return record, sums


def _claim_folder(folder: str | Path, description: dict[str, Any]) -> None:
    """Prepare `folder` for a new store."""
    existing = read_description(folder)
    if existing is not None:
        record = read_step_manifest(folder)
        if record is not None and not record.done:
            raise ValueError(
                f"{folder}: holds step {record.step} of a run that is not over; go on from it by "
                f"fzero.reopen_state (--resume of a run), or "
                f"give another folder ({FOLDER})"
            )
    if is_url(folder):
        write_text(folder, STORE, signed_text(description))
        return
    path = Path(folder)
    try:
        make_folder(path)
        store_manifest.lock(path)
        unknown_entries = sorted({entry.name for entry in path.iterdir()} - LEFTOVER_NAMES)
        if existing is None and unknown_entries:
            raise ValueError(
                f"{folder}: is not empty ({unknown_entries[0]}) and holds no store; give an empty folder ({FOLDER})"
            )
        # First, so that a crash from here on leaves no step that names other leaves.
        (path / STEP).unlink(missing_ok=True)
        if existing is None or _geometry(existing) != _geometry(description):
            remove_entry(path / "arrays")
            remove_entry(path / "sums")
        make_folder(path, "sums")
        write_text(folder, STORE, signed_text(description))
    except NotADirectoryError as error:
        raise ValueError(f"{error.filename}: is not a folder; give one ({FOLDER})") from None
    except FileExistsError as error:
        raise ValueError(f"{error.filename}: is a file; give a folder ({FOLDER})") from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror}; give a folder that this user may write ({FOLDER})"
        ) from None


def release_store(folder: str | Path) -> None:
    """Mark the store in `folder` as over, so that another run may take the folder."""
    if is_url(folder) or not os.path.lexists(Path(folder, STEP)):
        return
    try:
        record = read_step_manifest(folder)
    except ValueError:  # damaged: the run resumes from a checkpoint
        remove_entry(Path(folder, STEP))
        return
    if record is not None:
        write_text(folder, STEP, step_manifest_text(record._replace(pinned={}, done=True)))


def _geometry(described: dict[str, Any]) -> Any:
    return json.loads(json.dumps([described.get(key) for key in ("leaves", "ranks", "slots")]))


def store_bytes(leaves: Iterable[offload.LeafFiles], slots: int) -> int:
    """The bytes on disk of one rank's leaves."""
    return sum((slots if leaf.slots > 1 else 1) * leaf.layers * leaf.file_bytes for leaf in leaves)


SCRATCH = "scratch"
MIN_BYTES = 64 << 20  # bytes of buffers if the plan does not need more


class Nvme:
    """The disk folder of one run on this rank. Buffers, threads and files are made when they are first needed.

    folder: of the store, on a disk that all ranks see (or a URL that tensorstore knows); None if nothing is on a disk.
    buffer_bytes: the memory through which all transfers to and from the disk pass; None: what the state and the step
    need of it (`pool_bytes` says how much that is).
    slots: versions of the state on the disk. With 2 every step is atomic, each further one keeps a checkpoint without a
    copy; 1 takes the least space. verify: whether to checksum every write and compare when a store is opened again.
    settings: block size and threads of this rank's transfers; None: those that `fzero bench disk` wrote down for this
    disk, or the usual ones, whose threads the ranks of the plan share.
    Raises ValueError for fewer than 2^20 bytes of buffers, for no slot, and for an invalid file of settings.

    >>> import tempfile
    >>> nvme = Nvme(tempfile.mkdtemp(), slots=3)  # for init_state and make_train_step; close() ends its threads
    >>> nvme.slots, nvme.store is None  # no store is made before a state is
    (3, True)
    """

    @checked()
    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        buffer_bytes: int | None = None,
        slots: int = 2,
        verify: bool = True,
        settings: DiskSettings | None = None,
    ) -> None:
        if buffer_bytes is not None and buffer_bytes < 1 << 20:
            raise ValueError(f"offload: buffer_bytes is {buffer_bytes:,}; it must be at least {1 << 20:,}")
        self.folder, self.buffer_bytes, self.slots, self.verify = folder, buffer_bytes, slots, verify
        self.shared = settings is None  # threads, among the ranks
        measured = load_settings(folder) if settings is None and folder is not None else DiskSettings()
        self.settings, self.needed, self.ranks = settings or measured, 0, 1
        # Made when they are first needed: a plan of a run asks for sizes and makes nothing.
        self._buffers: BufferPool | None = None
        self._disk: DiskIO | None = None
        self._scratch: offload.ScratchFile | None = None
        self.store: offload.VersionedStore | None = None

    def need(self, size: int, ranks: int = 1) -> None:
        """Request at least `size` bytes of buffers, on each of the `ranks` that share the disk."""
        self.needed, self.ranks = max(size, self.needed), max(ranks, self.ranks)
        if self._buffers is not None and self._buffers.size < self.pool_bytes:
            self._buffers.grow(self.pool_bytes - self._buffers.size)

    @property
    def pool_bytes(self) -> int:
        """The bytes of the buffer pool."""
        return self.buffer_bytes or max(self.needed, MIN_BYTES)

    @property
    def buffers(self) -> BufferPool:
        if self._buffers is None:
            self._buffers = BufferPool(self.pool_bytes, fixed=self.buffer_bytes is not None)
        return self._buffers

    @property
    def disk(self) -> DiskIO:
        if self._disk is None:
            self._disk = DiskIO(self.settings.share(self.ranks) if self.shared else self.settings)
        return self._disk

    @property
    def scratch(self) -> offload.ScratchFile:
        """The nameless file for the activations and gradients of a step."""
        if self._scratch is None:
            if self.folder is None or is_url(self.folder):
                raise ValueError(
                    f"offload: activations and gradients on a disk need a local folder and it is {self.folder}; "
                    f"name one ({FOLDER})"
                )
            path = Path(self.folder, SCRATCH)
            try:
                make_folder(self.folder, SCRATCH)
                self._scratch = offload.ScratchFile(path, self.buffers, self.disk)
            except OSError as error:
                raise ValueError(
                    f"{error.filename or path}: {error.strerror}; give a folder that this user may write ({FOLDER})"
                ) from None
        return self._scratch

    def open(
        self,
        leaves: dict[str, offload.LeafFiles],
        mesh: Mesh,
        *,
        owner: dict[str, Any] | None = None,
        resume: bool = False,
    ) -> offload.VersionedStore:
        """Open the store of `leaves` in the folder: a new one, or with `resume` the existing one. It takes the place of
        the one that is open, which stays as it is where this fails."""
        if self.folder is None:
            raise ValueError(
                f"offload: {next(iter(leaves))} is offloaded to a disk and no folder is named; name one ({FOLDER})"
            )
        store = open_store(
            self.folder,
            leaves,
            streams=(self.buffers, self.disk),
            ranks=StoreRanks(mesh.rank, mesh.size, partial(raise_together, mesh=mesh)),
            slots=self.slots,
            verify=self.verify,
            owner=owner,
            resume=resume,
        )
        if self.store is not None:
            self.store.close()
        self.store = store
        return store

    def traffic(self) -> DiskTraffic:
        """The traffic of the disk so far."""
        return self._disk.traffic() if self._disk is not None else DiskTraffic()

    def close(self) -> None:
        """Wait for the transfers under way and close all files."""
        if self.store is not None:
            self.store.close()
        if self._scratch is not None:
            self._scratch.close()
        if self._disk is not None:
            self._disk.close()
        if self._buffers is not None:
            self._buffers.drain()  # their memory is unpinned when it is freed
        self.store = self._scratch = self._disk = self._buffers = None


MIN_UNIT_BYTES, MAX_UNIT_BYTES = 64 << 20, 512 << 20  # bytes for the units of an update


def disk_of(nvme: Nvme | None, plan: Plan, prefetch: int = 0) -> Nvme | None:
    """The disk of a plan with the buffers of its steps, or None; raises ValueError if it needs one and has none."""
    if nvme is not None:
        nvme.need(buffer_need(plan, prefetch=prefetch), plan.mesh.size)
    elif any(memory.on_disk for group in (*plan.memories.values(), {plan.acts}) for memory in group):
        raise ValueError(
            "offload: the plan puts something on a disk, and none is given; give init_state and the step the same "
            "nvme=fzero.Nvme(folder)"
        )
    return nvme


def buffer_need(plan: Plan, *, prefetch: int = 0, activation_bytes: int = 0) -> int:
    """The bytes of buffers that a rank's step needs; prefetch: the layers read ahead of their use."""
    policy = plan.policy
    parts: dict[str, int] = {}
    sums: dict[str, int] = {}
    for name, leaf in plan.leaves.items():
        segment, layers = name.split("/")[0], leaf.shape[0] if is_stacked(name) else 1
        for sizes, spec, dtype in ((parts, leaf.params, policy.param), (sums, leaf.grads, policy.accumulate)):
            if spec.memory.on_disk:
                size = local_numel(leaf.shape, spec, plan.sizes) // max(1, layers) * dtype.itemsize
                sizes[segment] = sizes.get(segment, 0) + round_to_pages(size)
    acts = 4 * round_to_pages(activation_bytes) if plan.acts.on_disk else 0
    forward = (prefetch + 3) * max(parts.values(), default=0) + 2 * max(sums.values(), default=0) + acts
    total = sum(leaf.numel() for leaf in pytree.leaves(plan.like)) * 4
    return max(forward, min(max(total // 4, MIN_UNIT_BYTES), MAX_UNIT_BYTES))


class DiskTensor:
    """A leaf of a state in a store: shape, dtype and device of a tensor, without its memory.

    `read` and `tensor` read it.
    """

    requires_grad = False

    def __init__(self, store: offload.VersionedStore, name: str) -> None:
        self.store, self.name, self.leaf = store, name, store.leaves[name]
        self.shape, self.dtype, self.device = torch.Size(self.leaf.shape), self.leaf.dtype, torch.device("cpu")
        self.depth = self.leaf.layers if self.leaf.stacked else None  # the number of layers, if it is stacked

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def read(self, layer: int = 0, rows: offload.Rows | None = None, *, priority: int = NEXT) -> offload.RowRead:
        """Start to read rows of a layer."""
        return self.store.read(self.name, layer, rows, priority=priority)

    def tensor(self, slot: int | None = None, *, layers: tuple[int, int] | None = None) -> Tensor:
        """Read the whole leaf, or `layers` = (first, number) of a stacked one, into memory."""
        first, count = layers or (0, self.leaf.layers)
        out = torch.empty((count, *self.leaf.chunk) if self.leaf.stacked else self.shape, dtype=self.dtype)
        for layer in range(first, first + count):
            layer_out = out[layer - first] if self.leaf.stacked else out
            for rows in self.store.chunks.row_blocks(self.name, self.store.buffers.size // 4):
                value = self.store.read(self.name, layer, rows, slot=slot).wait()
                (layer_out[rows[0] : rows[1]] if layer_out.dim() else layer_out).copy_(value)
        return out

    def __repr__(self) -> str:
        return f"DiskTensor({self.name}, {list(self.shape)}, {self.dtype}, in {self.store.folder})"
