"""Cut a state into units that are updated one after another: row blocks of layers that fit into the buffers
together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.core.copy_buckets import start_fetch
from fzero.core.future import Future
from fzero.core.gpu import HOST, pinned
from fzero.core.gpu_copies import copy_in
from fzero.offload.chunk_files import RowRead
from fzero.offload.disk_io import LATER
from fzero.offload.scratch import ScratchTensor
from fzero.offload.store import DiskTensor
from fzero.sharding.slices import row_blocks

Item = TypeVar("Item")
Begun = TypeVar("Begun")
OFF = (DiskTensor, ScratchTensor)


class RowBlock(NamedTuple):
    """Rows of one layer of a leaf. layer: None for a leaf without layers, or all of them. rows: (first, end);
    None for all rows."""

    name: str
    layer: int | None
    rows: tuple[int, int] | None

    def of(self, leaf: Tensor) -> Tensor:
        """The view of these rows of a leaf, or of a tensor with the same rows.

        A layer keeps its leading dim, of size 1.
        """
        part = leaf if self.layer is None else leaf[self.layer : self.layer + 1]
        dim = 0 if self.layer is None else 1
        return (
            part
            if self.rows is None or part.dim() <= dim
            else part.narrow(dim, self.rows[0], self.rows[1] - self.rows[0])
        )

    def start(self, dims: int) -> tuple[int, ...]:
        """The index of its first element in a leaf with `dims` dims."""
        lead = () if self.layer is None else (self.layer,)
        at = (*lead, self.rows[0] if self.rows else 0)
        return (*at[:dims], *(0,) * (dims - len(at)))


UpdateUnit = tuple[RowBlock, ...]


def cut_units(
    shapes: Mapping[str, tuple[int, ...]], stacked: Callable[[str], bool], whole: Callable[[str], bool], most: int
) -> list[UpdateUnit]:
    """Cut leaves of these shapes into units, layer by layer, of about `most` elements at most and with each leaf at
    most once.

    stacked: (name) -> whether its first dim counts layers, which are updated one by one. whole: (name) -> whether its
    layers may not be cut into rows.
    """
    outside = [
        RowBlock(n, None, rows)
        for n, shape in shapes.items()
        if not stacked(n)
        for rows in _rows(shape, whole(n), most)
    ]
    depth = max((shape[0] for n, shape in shapes.items() if stacked(n)), default=0)
    layers = [
        [
            RowBlock(n, i, rows)
            for n, shape in shapes.items()
            if stacked(n) and i < shape[0]
            for rows in _rows(shape[1:], whole(n), most)
        ]
        for i in range(depth)
    ]
    units: list[list[RowBlock]] = []
    for group in (*layers, outside):
        unit: list[RowBlock] = []
        held = 0
        for part in group:
            size = _numel(part, shapes[part.name])
            if unit and (held + size > most or any(part.name == other.name for other in unit)):
                units.append(unit)
                unit, held = [], 0
            unit.append(part)
            held += size
        if unit:
            units.append(unit)
    return [tuple(unit) for unit in units]


def _rows(shape: tuple[int, ...], whole: bool, most: int) -> list[tuple[int, int] | None]:
    found = [(0, 0)] if whole else row_blocks(shape, most)
    return [None] if len(found) == 1 else list(found)


def _numel(part: RowBlock, shape: tuple[int, ...]) -> int:
    chunk = shape if part.layer is None else shape[1:]
    if part.rows is None:
        return math.prod(chunk)
    return (part.rows[1] - part.rows[0]) * math.prod(chunk[1:])


class BlockRead(NamedTuple):
    """The rows of a row block where they rest: in a leaf in memory, or in the buffer of a read from a disk."""

    reading: RowRead | None
    home: Tensor  # with the leading dim of their layer
    arrive: Callable[[], Any] | None = None  # waits for the rows, if they are on their way to `home`

    def start(self, where: torch.device) -> Future[Tensor]:
        """Start to bring the rows to `where`."""
        if self.reading is None:
            if self.arrive is not None:
                arrive, home = self.arrive, self.home
                if where == HOST:
                    return Future(lambda: (arrive(), home)[1])
                return Future(lambda: (arrive(), copy_in(pinned(home, where), where).use())[1])
            return Future(copy_in(self.home, where).use)
        arriving, shape = self.reading.copy_to(where), self.home.shape
        return Future(lambda: arriving.wait().view(shape))


def read_block(leaf: Any, part: RowBlock, *, whole: bool = False) -> BlockRead:
    """Start to read a row block of a leaf. whole: all rows of its layer."""
    if is_whole_stack(leaf, part):
        home = torch.empty(leaf.shape, dtype=leaf.dtype)
        return BlockRead(None, home, lambda: read_layers(leaf, home))
    if isinstance(leaf, OFF):
        reading = leaf.read(part.layer or 0, None if whole else part.rows, priority=LATER)
        view = reading.buffer.view
        return BlockRead(reading, view if part.layer is None else view[None])
    return BlockRead(None, (part._replace(rows=None) if whole else part).of(leaf))


def is_whole_stack(leaf: Any, part: RowBlock) -> bool:
    """Whether a row block is all layers of a leaf on a disk: it passes the buffers a row block of a layer at a time."""
    return isinstance(leaf, OFF) and part.layer is None and leaf.depth is not None


def read_layers(leaf: Any, out: Tensor) -> None:
    """Read all layers of a leaf on a disk into memory."""
    for i, rows in layer_blocks(out):
        part = out[i]
        (part[rows[0] : rows[1]] if part.dim() else part).copy_(leaf.read(i, rows, priority=LATER).wait())


def layer_blocks(stack: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """(layer, rows) of all row blocks of a stack of layers."""
    blocks = row_blocks(tuple(stack.shape[1:]))
    return ((i, rows) for i in range(stack.shape[0]) for rows in blocks)


class BegunUnit(NamedTuple):
    """A unit on its way to where it is updated."""

    found: dict[str, dict[str, BlockRead]]  # parameter -> column -> its rows at rest
    arriving: Future[dict[str, dict[str, Tensor]]]  # the rows there


def begin_unit(found: dict[str, dict[str, BlockRead]], where: torch.device) -> BegunUnit:
    """Start to bring the rows of a unit to `where`: what is on a GPU goes to the host with one wait for all of it."""
    flat = {(name, column): one for name, columns in found.items() for column, one in columns.items()}
    leaving = [key for key, one in flat.items() if one.home.is_cuda and where == HOST]
    leaving.sort(key=lambda key: key[1] != "grad")  # so that those that come back are side by side there
    fetch = start_fetch([flat[key].home for key in leaving])
    coming = {key: one.start(where) for key, one in flat.items() if key not in leaving}

    def arrive() -> dict[str, dict[str, Tensor]]:
        values = {key: one.wait() for key, one in coming.items()} | dict(zip(leaving, fetch.wait()))
        return {name: {column: values[name, column] for column in columns} for name, columns in found.items()}

    return BegunUnit(found, Future(arrive))


def begin_ahead(items: Iterable[Item], begin: Callable[[Item], Begun], depth: int) -> Iterator[tuple[Item, Begun]]:
    """Yield (item, begin(item)) in order, calling `begin` up to `depth` items ahead of use."""
    waiting: list[tuple[Item, Begun]] = []
    for item in items:
        waiting.append((item, begin(item)))
        if len(waiting) > depth:
            yield waiting.pop(0)
    while waiting:
        yield waiting.pop(0)
