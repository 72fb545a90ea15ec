"""Cut a state into units that are updated one after another: row blocks of layers that fit into the buffers.

Activations and gradients of a step in host memory or in a nameless file on a disk, which leaves nothing after a
crash.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.core.copy_buckets import start_fetch
from fzero.core.files import open_to_write
from fzero.core.gpu import HOST, pinned
from fzero.core.gpu_copies import Copied, Future, copy_in, copy_out
from fzero.core.storage import PAGE
from fzero.offload.buffer_pool import Buffer, BufferPool
from fzero.offload.chunk_files import RowRead, Rows
from fzero.offload.disk_io import FOLDER, LATER, NEXT, DiskIO, DiskRequest, allocate_space, serves_direct
from fzero.offload.nvme import DiskTensor
from fzero.sharding.slices import row_blocks


class Extent(NamedTuple):
    """Where a value lies in the file, its shape and its dtype."""

    offset: int
    size: int  # bytes, whole pages
    shape: tuple[int, ...]
    dtype: torch.dtype


class StackNumbers:
    """The numbers of the stacks of activations that hold something, by which their values are told apart."""

    def __init__(self) -> None:
        self.in_use: set[int] = set()

    def acquire(self) -> int:
        """The lowest number that is free, which is taken from then on."""
        number = next(i for i in range(len(self.in_use) + 1) if i not in self.in_use)
        self.in_use.add(number)
        return number

    def release(self, number: int) -> None:
        """Make a number free."""
        self.in_use.remove(number)


class ScratchFile:
    """Values by key in one nameless file of `folder`.

    A key keeps its extent as long as its value fits, so that the file stops growing.
    """

    def __init__(self, folder: Path, buffers: BufferPool, disk: DiskIO) -> None:
        self.folder, self.buffers, self.disk, self.end = folder, buffers, disk, 0
        self.direct = serves_direct(folder)
        if not self.direct:
            warnings.warn(
                f"{folder}: its file system refuses direct transfers (O_DIRECT); they go through the page cache",
                stacklevel=3,
            )
        path = folder / f".scratch-{os.getpid()}-{id(self)}"
        self.fd = open_to_write(path, "update", direct=self.direct)
        # Without a name the file is freed when the process ends, however it ends.
        path.unlink()
        self.extents: dict[Any, Extent] = {}
        self.stacks = StackNumbers()
        self.writing: dict[Any, DiskRequest] = {}

    def write(self, key: Any, value: Tensor | Buffer) -> None:
        """Start to write a value; a tensor is copied, a Buffer may not change until it is written.

        A GPU's tensor leaves after the work that the current stream was given so far, and the disk's thread waits for
        it.
        """
        if isinstance(value, Buffer):
            buffer, copied = value, Copied(value.view)
        else:
            buffer = self.buffers.allocate(tuple(value.shape), value.dtype, self.disk.busy)
            copied = copy_out(value, out=buffer.view)
        # Of a write before this one to the same extent: the disk serves requests in either order.
        self._wait(key)
        size, extent = len(buffer.raw), self.extents.get(key)
        if extent is None or extent.size < size:
            try:
                # Reserved before the write, so that a full disk is an error here and not in a thread.
                allocate_space(self.fd, self.end, size)
            except OSError as error:
                raise self.failed(error) from error
            extent = Extent(self.end, size, (), buffer.view.dtype)
            self.end += size
        self.extents[key] = extent._replace(shape=tuple(buffer.view.shape), dtype=buffer.view.dtype)

        def arrive(block: memoryview) -> None:
            copied.finish()

        # Behind reads: nobody waits for this write, and somebody soon for a read. The disk's thread waits for the GPU's
        # copy, so that the training thread need not.
        self.writing[key] = self.disk.write(self.fd, buffer.raw, extent.offset, priority=LATER, note=arrive)

    def _wait(self, key: Any) -> None:
        if key in self.writing:
            try:
                self.writing.pop(key).wait()
            except OSError as error:
                raise self.failed(error) from error

    def failed(self, error: OSError) -> ValueError:
        """The ValueError to raise for a failed transfer."""
        return ValueError(
            f"{self.folder}: {error.strerror or error}, of activations or gradients ({self.end:,} bytes so far); "
            f"make room, or give a folder on another disk ({FOLDER})"
        )

    def read(self, key: Any, rows: Rows | None = None, *, priority: int = NEXT) -> RowRead:
        """Start to read a value, or rows of it, which must begin at a page."""
        self._wait(key)
        extent = self.extents[key]
        shape, offset = extent.shape, extent.offset
        if rows is not None and shape:
            row = torch.Size(shape[1:]).numel() * extent.dtype.itemsize
            assert rows[0] * row % PAGE == 0, f"{key}: rows {rows} begin inside a page"
            shape, offset = (rows[1] - rows[0], *shape[1:]), offset + rows[0] * row
        buffer = self.buffers.allocate(shape, extent.dtype, self.disk.busy)
        reading = self.disk.read(self.fd, buffer.raw, offset, priority=priority)
        return RowRead(buffer, reading, self.failed, self.buffers.retain)

    def close(self) -> None:
        """Wait for all writes and close the file, which frees its disk space."""
        for pending in self.writing.values():
            pending.done.wait()
        os.close(self.fd)


class ScratchTensor:
    """The gradient sum of a leaf in a scratch file, layer by layer; it is read in `dtype`."""

    requires_grad = False

    def __init__(self, scratch: ScratchFile, key: tuple[str, ...], depth: int | None, dtype: torch.dtype) -> None:
        self.scratch, self.key, self.depth, self.dtype = scratch, key, depth, dtype
        self.device = torch.device("cpu")
        self.written_layers: set[int] = set()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole leaf; known once a layer has been added."""
        chunk = self.scratch.extents[*self.key, 0].shape
        return torch.Size(chunk if self.depth is None else (self.depth, *chunk))

    def dim(self) -> int:
        return len(self.shape)

    def add(self, layer: int, value: Tensor) -> None:
        """Add a value to the sum of a layer, in the dtype of its first value."""
        if layer not in self.written_layers:
            self.set_layer(layer, value)
            return
        reading = self.scratch.read((*self.key, layer))
        reading.wait().add_(value)
        self.scratch.write((*self.key, layer), reading.buffer)

    def set_layer(self, layer: int, value: Tensor) -> None:
        """Make a value the sum of a layer."""
        self.written_layers.add(layer)
        self.scratch.write((*self.key, layer), value)

    def plus(self, addend: ScratchTensor) -> ScratchTensor:
        """Add another sum to this one, in `dtype`, and return this one."""
        for layer in sorted(addend.written_layers):
            sum_read, addend_read = self.read(layer), addend.read(layer)
            self.scratch.write((*self.key, layer), sum_read.wait().to(self.dtype).add_(addend_read.wait()))
        return self

    def read(self, layer: int = 0, rows: Rows | None = None, *, priority: int = LATER) -> RowRead:
        """Start to read rows of a layer, in the dtype in which they were written."""
        return self.scratch.read((*self.key, layer), rows, priority=priority)

    def iterate_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, row block) for all row blocks, in order, each read while the one before it is used."""
        order = [
            (layer, rows)
            for layer in range(self.depth or 1)
            for rows in row_blocks(self.scratch.extents[*self.key, layer].shape)
        ]
        pending = (order[0][0], self.read(*order[0]))
        for next_block in [*order[1:], None]:
            layer, reading = pending
            if next_block is not None:
                pending = (next_block[0], self.read(*next_block))
            value = reading.wait()
            if value.dtype != self.dtype:
                # In a buffer, as repeated allocations of this size would fragment the heap.
                value = self.scratch.buffers.allocate(
                    tuple(value.shape), self.dtype, self.scratch.disk.busy
                ).view.copy_(value)
            yield layer, value
            del value, reading


class HostActivations:
    """A stack of lists of tensors of a GPU, in pinned memory of the host, which waits for no copy."""

    def __init__(self, device: torch.device | None) -> None:
        self.device, self.lists = device, list[Any]()
        self.ahead: Future[list[Tensor]] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors, which nobody may write over before `pop` has returned them."""
        assert self.ahead is None, "all lists must be popped before the next append"
        self.lists.append(self._store([tensor.detach() for tensor in tensors]))

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        pending = self.ahead or self._fetch(self.lists.pop())
        # The backward pass pops in reverse order, so that the next list is known: it is on its way while this one is
        # used.
        self.ahead = self._fetch(self.lists.pop()) if self.lists else None
        return pending.wait()

    def _store(self, tensors: list[Tensor]) -> Any:
        return [copy_out(tensor) for tensor in tensors]

    def _fetch(self, stored: Any) -> Future[list[Tensor]]:
        assert self.device is not None
        arriving = [copy_in(out.tensor, self.device, event=out.event) for out in stored]
        return Future(lambda: [copied.use() for copied in arriving])

    def __bool__(self) -> bool:
        return bool(self.lists) or self.ahead is not None


class DiskActivations(HostActivations):
    """The same stack on a disk, for tensors of any device; one for each micro-batch under way."""

    def __init__(self, scratch: ScratchFile) -> None:
        super().__init__(None)
        self.scratch = scratch
        self.number: int | None = None  # among the stacks of the file that hold anything

    def pop(self) -> list[Tensor]:
        tensors = super().pop()
        if not self:  # all is read, so another stack may write over it
            assert self.number is not None  # something was appended
            self.scratch.stacks.release(self.number)
            self.number = None
        return tensors

    def _store(self, tensors: list[Tensor]) -> Any:
        if self.number is None:
            self.number = self.scratch.stacks.acquire()
        keys = [("acts", self.number, len(self.lists), j) for j in range(len(tensors))]
        for key, tensor in zip(keys, tensors):
            self.scratch.write(key, tensor)
        return [(key, tensor.device) for key, tensor in zip(keys, tensors)]

    def _fetch(self, stored: Any) -> Future[list[Tensor]]:
        arriving = [self.scratch.read(key).copy_to(device) for key, device in stored]
        return Future(lambda: [tensor.wait() for tensor in arriving])


Item = TypeVar("Item")
Begun = TypeVar("Begun")
OFF = (DiskTensor, ScratchTensor)


class RowBlock(NamedTuple):
    """Rows of one layer of a leaf: all rows, or all layers, where None."""

    name: str
    layer: int | None
    rows: tuple[int, int] | None

    def narrow(self, leaf: Tensor) -> Tensor:
        """The view of these rows of a leaf, or of a tensor with the same rows; a layer keeps its leading dim."""
        layers = leaf if self.layer is None else leaf[self.layer : self.layer + 1]
        dim = 0 if self.layer is None else 1
        return (
            layers
            if self.rows is None or layers.dim() <= dim
            else layers.narrow(dim, self.rows[0], self.rows[1] - self.rows[0])
        )

    def start(self, dims: int) -> tuple[int, ...]:
        """The index of its first element in a leaf with `dims` dims."""
        lead = () if self.layer is None else (self.layer,)
        index = (*lead, self.rows[0] if self.rows else 0)
        return (*index[:dims], *(0,) * (dims - len(index)))


UpdateUnit = tuple[RowBlock, ...]


def cut_units(
    shapes: Mapping[str, tuple[int, ...]],
    stacked: Callable[[str], bool],
    uncut: Callable[[str], bool],
    max_elements: int,
) -> list[UpdateUnit]:
    """Cut leaves of these shapes, layer by layer, into units of about `max_elements` elements at most."""
    # stacked: (name) -> whether its first dim counts layers, which are updated one by one. uncut: (name) -> whether its
    # layers may not be cut into rows.
    outside = [
        RowBlock(n, None, rows)
        for n, shape in shapes.items()
        if not stacked(n)
        for rows in _rows(shape, uncut(n), max_elements)
    ]
    depth = max((shape[0] for n, shape in shapes.items() if stacked(n)), default=0)
    layers = [
        [
            RowBlock(n, i, rows)
            for n, shape in shapes.items()
            if stacked(n) and i < shape[0]
            for rows in _rows(shape[1:], uncut(n), max_elements)
        ]
        for i in range(depth)
    ]
    units: list[list[RowBlock]] = []
    for group in (*layers, outside):
        unit: list[RowBlock] = []
        total = 0
        for block in group:
            size = _numel(block, shapes[block.name])
            # One block of a leaf at most, as a unit names its rows by leaf.
            if unit and (total + size > max_elements or any(block.name == member.name for member in unit)):
                units.append(unit)
                unit, total = [], 0
            unit.append(block)
            total += size
        if unit:
            units.append(unit)
    return [tuple(unit) for unit in units]


def _rows(shape: tuple[int, ...], uncut: bool, max_elements: int) -> list[tuple[int, int] | None]:
    ranges = [(0, 0)] if uncut else row_blocks(shape, max_elements)
    return [None] if len(ranges) == 1 else list(ranges)


def _numel(block: RowBlock, shape: tuple[int, ...]) -> int:
    chunk = shape if block.layer is None else shape[1:]
    if block.rows is None:
        return math.prod(chunk)
    return (block.rows[1] - block.rows[0]) * math.prod(chunk[1:])


class BlockRead(NamedTuple):
    """The rows of a row block at rest: in a leaf in memory, or a disk's buffer."""

    reading: RowRead | None
    storage: Tensor  # with the leading dim of their layer
    arrive: Callable[[], Any] | None = None  # waits for the rows, if they are on their way to `home`

    def start(self, device: torch.device) -> Future[Tensor]:
        """Start to bring the rows to `device`."""
        if self.reading is None:
            if self.arrive is not None:
                arrive, storage = self.arrive, self.storage
                if device == HOST:
                    return Future(lambda: (arrive(), storage)[1])
                return Future(lambda: (arrive(), copy_in(pinned(storage, device), device).use())[1])
            return Future(copy_in(self.storage, device).use)
        arriving, shape = self.reading.copy_to(device), self.storage.shape
        return Future(lambda: arriving.wait().view(shape))


def read_block(leaf: Any, block: RowBlock, *, all_rows: bool = False) -> BlockRead:
    """Start to read a row block of a leaf. all_rows: all rows of its layer."""
    if is_full_stack(leaf, block):
        storage = torch.empty(leaf.shape, dtype=leaf.dtype)
        return BlockRead(None, storage, lambda: read_layers(leaf, storage))
    if isinstance(leaf, OFF):
        reading = leaf.read(block.layer or 0, None if all_rows else block.rows, priority=LATER)
        view = reading.buffer.view
        return BlockRead(reading, view if block.layer is None else view[None])
    return BlockRead(None, (block._replace(rows=None) if all_rows else block).narrow(leaf))


def is_full_stack(leaf: Any, block: RowBlock) -> bool:
    """Whether a row block is all layers of a leaf on a disk."""
    return isinstance(leaf, OFF) and block.layer is None and leaf.depth is not None


def read_layers(leaf: Any, out: Tensor) -> None:
    """Read all layers of a leaf on a disk into memory."""
    for i, rows in layer_blocks(out):
        layer = out[i]
        (layer[rows[0] : rows[1]] if layer.dim() else layer).copy_(leaf.read(i, rows, priority=LATER).wait())


def layer_blocks(stack: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """(layer, rows) of all row blocks of a stack of layers."""
    blocks = row_blocks(tuple(stack.shape[1:]))
    return ((i, rows) for i in range(stack.shape[0]) for rows in blocks)


class UnitTransfer(NamedTuple):
    """A unit on its way to where it is updated."""

    reads: dict[str, dict[str, BlockRead]]  # parameter -> column -> its rows at rest
    arriving: Future[dict[str, dict[str, Tensor]]]  # the rows there


def begin_unit(reads: dict[str, dict[str, BlockRead]], device: torch.device) -> UnitTransfer:
    """Start to bring the rows of a unit to `device`, with one wait for a GPU's."""
    flat = {(name, column): read for name, columns in reads.items() for column, read in columns.items()}
    leaving = [key for key, read in flat.items() if read.storage.is_cuda and device == HOST]
    leaving.sort(key=lambda key: key[1] != "grad")  # so that those that come back are side by side there
    fetch = start_fetch([flat[key].storage for key in leaving])
    transfers = {key: read.start(device) for key, read in flat.items() if key not in leaving}

    def arrive() -> dict[str, dict[str, Tensor]]:
        values = {key: transfer.wait() for key, transfer in transfers.items()} | dict(zip(leaving, fetch.wait()))
        return {name: {column: values[name, column] for column in columns} for name, columns in reads.items()}

    return UnitTransfer(reads, Future(arrive))


def begin_ahead(items: Iterable[Item], begin: Callable[[Item], Begun], depth: int) -> Iterator[tuple[Item, Begun]]:
    """Yield (item, begin(item)) in order, calling `begin` up to `depth` items ahead of use."""
    waiting: list[tuple[Item, Begun]] = []
    for item in items:
        waiting.append((item, begin(item)))
        # The oldest is used while the `depth` after it are on their way.
        if len(waiting) > depth:
            yield waiting.pop(0)
    while waiting:
        yield waiting.pop(0)
