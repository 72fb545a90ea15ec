"""What a planned run has from elsewhere: its buffers, store and scratch file, without memory and without files; and the
shapes that the ranks of its pipeline tell each other in a first step.

Reads and writes are reported with the bytes of whole pages. The buffer pool counts as one buffer of its full size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.rank_tables import TreeLayout
from fzero.core import pytree
from fzero.core.device import HOST, FakeDevice
from fzero.core.gpu_copies import Future
from fzero.core.host_memory import HUGE, round_to_pages
from fzero.core.storage import PAGE
from fzero.models import base
from fzero.offload import Buffer, LeafFiles, Nvme
from fzero.offload.chunk_files import RowRead, Rows
from fzero.offload.disk_io import DiskTraffic
from fzero.offload.update_units import Extent, StackNumbers
from fzero.run.config.run_config import LocalSteps, RunConfig
from fzero.run.setup import build as run_build
from fzero.sharding import Plan, fake_mesh
from fzero.sharding.mesh import Mesh
from fzero.train.batch import split_batch
from fzero.train.execution import Execution
from fzero.train.loss import context_of
from fzero.train.stage_exchange import SegmentActivations, segments_of, signature_of, stages_of
from fzero.train.streamed_model import StreamedModel


def stage_shapes(
    config: RunConfig, plan: Plan, model: base.Model, batch: Mapping[str, Tensor], parts: int, mode: FakeDevice
) -> dict[Any, Any]:
    """What a step of `plan`, with pp, knows after its first one, from a layer of each stack on fake tensors."""
    t = replace(config.train, batch=config.train.micro_batch, update="end", updates=1, delay_after=0, compiled=False)
    config = replace(config, local=LocalSteps())
    alone = replace(
        config, zero=0, codec="", offload="", mesh={}, train=t, resident=0, partition_activations=False
    )  # parameters whole over dp, ep
    sizes = {axis.name: 1 if axis.name in ("pp", "dp", "rp", "ep") else axis.size for axis in plan.mesh.axes}
    job = run_build.build(alone, fake_mesh(sizes), model=model, layers=1)
    execution = Execution(kernels=config.train.kernels, prefetch=0)
    streamed = StreamedModel(
        job.model, segments_of(job.model, job.plan, 1), job.plan, context_of(job.plan, execution), execution
    )
    params = pytree.map(
        lambda x: torch.empty(x.shape, dtype=x.dtype, device=mode.device), run_build.like_of(job).params
    )
    micro_batch = split_batch(batch, parts)[1][0]
    ctx, ahead, x = (
        streamed.context(micro_batch, {}, 0),
        streamed.fetcher(params, mode.device),
        SegmentActivations([], pytree.flatten(())[1]),
    )
    behind: dict[str, tuple[Any, Any]] = {}  # by part: the shapes and the tree of what it gives
    loss = None
    for segment in streamed.parts:
        x = streamed.primal((segment,), x, micro_batch, ctx, ahead)
        if segment.kind == "head":
            loss = x
        else:
            behind[segment.name] = [(tuple(leaf.shape), leaf.dtype) for leaf in x.leaves], x.treedef
    assert plan.stages is not None  # a plan with pp
    assert loss is not None  # the head is the last part
    shapes: dict[Any, Any] = {"loss": TreeLayout.from_tree(loss)}
    for rank in range(plan.stages.size):
        for stage, segments in stages_of(segments_of(job.model, plan), plan, rank).items():
            if segments[-1].kind != "head":
                shapes[stage, signature_of(micro_batch)] = behind[segments[-1].name]
    return shapes


Tell = Callable[[str, int, str, int], None]  # callback("start" | "wait", number, "read" | "write", bytes)
FIRST = 1 << 40  # number of the first transfer: collectives count from 1


class PlannedBufferPool:
    """A buffer pool whose Buffers have no memory."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE) * HUGE
        self.keys: set[int] = set()
        self.taking = False

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, busy: Any = None) -> Buffer:
        n = math.prod(shape) * dtype.itemsize
        self.taking = True
        raw = torch.empty(max(PAGE, round_to_pages(n)), dtype=torch.uint8, device=HOST)
        self.taking = False
        key = raw.untyped_storage()._cdata
        self.keys.add(key)
        weakref.finalize(raw.untyped_storage(), self.keys.discard, key).atexit = False
        return Buffer(raw, raw[:n].view(dtype).view(shape))

    def drain(self) -> None:
        """Nothing is ever being copied."""

    def holds(self, storage: Any) -> bool:
        """Whether a storage belongs to this pool."""
        return self.taking or storage._cdata in self.keys


class PlannedDisk:
    """A disk without files: it counts and reports the bytes that it would move."""

    def __init__(self) -> None:
        self.tell: Tell = lambda *_: None
        self.count, self.bytes = 0, {"read": 0, "write": 0}

    def busy(self) -> bool:
        """Nothing is ever under way."""
        return False

    def start(self, kind: str, size: int) -> Future[None]:
        """Report a transfer; who waits for it reports the wait."""
        self.count += 1
        self.bytes[kind] += size
        number = FIRST + self.count
        self.tell("start", number, kind, size)
        return Future(lambda: self.tell("wait", number, kind, size))

    def traffic(self) -> DiskTraffic:
        return DiskTraffic(self.bytes["read"], self.bytes["write"])


class PlannedStore:
    """A store as a step uses it: reads return Buffers, writes take them."""

    def __init__(self, leaves: dict[str, LeafFiles], space: PlannedNvme) -> None:
        self.leaves, self.space, self.slots, self.folder = leaves, space, space.slots, "a planned disk"
        self.writing: list[Future[None]] = []

    def read(
        self, name: str, layer: int = 0, rows: Rows | None = None, *, priority: int = 0, slot: int | None = None
    ) -> RowRead:
        chunk = self.leaves[name].chunk
        shape = chunk if rows is None or not chunk else (rows[1] - rows[0], *chunk[1:])
        buffer = self.space.buffers.allocate(shape, self.leaves[name].dtype)
        return RowRead(buffer, self.space.disk.start("read", len(buffer.raw)), _never)

    def begin(self) -> None:
        """Begin the next version."""

    def write(self, name: str, layer: int, rows: Rows | None, buffer: Buffer, *, fill: Any = None) -> Future[None]:
        if self.space.verify:
            buffer.raw[buffer.view.nbytes :] = 0
        self.writing.append(self.space.disk.start("write", len(buffer.raw)))
        return self.writing[-1]

    def flush(self) -> None:
        writing, self.writing = self.writing, []
        for pending in writing:
            pending.wait()

    def commit(self, step: int, values: dict[str, Any], agree: Callable[[Any], None]) -> None:
        self.flush()
        agree(None)

    def abandon(self) -> None:
        """Discard the version being written."""
        self.flush()


class Extents(dict):
    """Extents of values by key; a layer that was not run has the extent of the first."""

    def __missing__(self, key: tuple) -> Extent:
        return self[(*key[:-1], 0)]


class PlannedScratch:
    """A scratch file without a file."""

    def __init__(self, space: PlannedNvme) -> None:
        self.buffers, self.disk = space.buffers, space.disk
        self.extents: dict[Any, Extent] = Extents()
        self.writing: dict[Any, Future[None]] = {}
        self.stacks = StackNumbers()

    def write(self, key: Any, value: Tensor | Buffer) -> None:
        if isinstance(value, Buffer):
            buffer = value
        else:
            buffer = self.buffers.allocate(tuple(value.shape), value.dtype)
            buffer.view.copy_(value)
        if key in self.writing:
            self.writing.pop(key).wait()
        self.extents[key] = Extent(0, len(buffer.raw), tuple(buffer.view.shape), buffer.view.dtype)
        self.writing[key] = self.disk.start("write", len(buffer.raw))

    def read(self, key: Any, rows: Rows | None = None, *, priority: int = 0) -> RowRead:
        if key in self.writing:
            self.writing.pop(key).wait()
        extent = self.extents[key]
        shape = extent.shape if rows is None or not extent.shape else (rows[1] - rows[0], *extent.shape[1:])
        buffer = self.buffers.allocate(shape, extent.dtype)
        return RowRead(buffer, self.disk.start("read", len(buffer.raw)), _never)


class PlannedNvme(Nvme):
    """The Nvme of a planned run."""

    _buffers: PlannedBufferPool | None
    _disk: PlannedDisk | None
    _scratch: PlannedScratch | None
    store: PlannedStore | None

    def __init__(self, **options: Any) -> None:
        super().__init__(None, **options)

    @property
    def buffers(self) -> PlannedBufferPool:
        if self._buffers is None:
            self._buffers = PlannedBufferPool(self.pool_bytes)
        return self._buffers

    @property
    def disk(self) -> PlannedDisk:
        if self._disk is None:
            self._disk = PlannedDisk()
        return self._disk

    @property
    def scratch(self) -> PlannedScratch:
        if self._scratch is None:
            self._scratch = PlannedScratch(self)
        return self._scratch

    def open(
        self, leaves: dict[str, LeafFiles], mesh: Mesh, *, owner: Any = None, resume: bool = False
    ) -> PlannedStore:
        self.store = PlannedStore(leaves, self)
        return self.store


def _never(error: OSError) -> ValueError:
    return ValueError(str(error))
