"""Nvme: a rank's folder on a disk, with the buffers, I/O threads, store and scratch file that use it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fzero.comm.rank_tables import raise_together
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.files import make_folder
from fzero.core.host_memory import round_to_pages
from fzero.core.storage import is_url
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.chunk_files import LeafFiles
from fzero.offload.disk_io import FOLDER, DiskIO, DiskSettings, DiskTraffic, load_settings
from fzero.offload.scratch import ScratchFile
from fzero.offload.store import VersionedStore
from fzero.offload.store_folder import StoreRanks, open_store
from fzero.sharding import Plan
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import is_stacked, local_numel

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
        self._scratch: ScratchFile | None = None
        self.store: VersionedStore | None = None

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
    def scratch(self) -> ScratchFile:
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
                self._scratch = ScratchFile(path, self.buffers, self.disk)
            except OSError as error:
                raise ValueError(
                    f"{error.filename or path}: {error.strerror}; give a folder that this user may write ({FOLDER})"
                ) from None
        return self._scratch

    def open(
        self, leaves: dict[str, LeafFiles], mesh: Mesh, *, owner: dict[str, Any] | None = None, resume: bool = False
    ) -> VersionedStore:
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
