"""Cut a state into units that are updated one after another: row blocks of layers that fit into the buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.core.copy_buckets import start_fetch
from fzero.core.gpu import HOST, pinned
from fzero.core.gpu_copies import Future, copy_in
from fzero.offload.chunk_files import RowRead
from fzero.offload.disk_io import LATER
from fzero.offload.nvme import DiskTensor
from fzero.offload.scratch import ScratchTensor
from fzero.sharding.slices import row_blocks

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
