"""Cut a state into units that are updated one after another: row blocks of layers that fit into the buffers
together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fzero.offload.chunk_files import RowRead
from fzero.offload.disk_io import LATER
from fzero.offload.scratch import ScratchTensor
from fzero.offload.store import DiskTensor
from fzero.sharding.slices import row_blocks

Item = TypeVar("Item")
Begun = TypeVar("Begun")
OFF = (DiskTensor, ScratchTensor)


class RowBlock(NamedTuple):
    """Rows of one layer of a leaf. layer: None for a leaf without layers. rows: (first, end); None for all rows."""

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

    stacked: (name) -> whether its first dim counts layers. whole: (name) -> whether its layers may not be cut into
    rows.
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


def params_of_leaves(names: list[str], params: list[str]) -> dict[str, str | None]:
    """{name of a leaf of a state: name of its parameter}; None for a leaf of no parameter, such as a count of steps."""
    known = set(params)
    found: dict[str, str | None] = {}
    for name in names:
        parts = name.split("/")
        tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
        found[name] = next((tail for tail in tails if tail in known), None)
    return found


class BlockRead(NamedTuple):
    """A read of a row block: of a leaf on a disk, under way, or of a leaf in memory."""

    reading: RowRead | None
    view: Tensor | None  # of a leaf in memory

    def wait(self, part: RowBlock) -> Tensor:
        """Wait for the rows and return them, with the leading dim of their layer."""
        if self.reading is None:
            assert self.view is not None  # a leaf in memory
            return self.view
        value = self.reading.wait()
        return value if part.layer is None else value[None]


def read_block(leaf: Any, part: RowBlock, *, whole: bool = False) -> BlockRead:
    """Start to read a row block of a leaf. whole: all rows of its layer."""
    if isinstance(leaf, OFF):
        return BlockRead(leaf.read(part.layer or 0, None if whole else part.rows, priority=LATER), None)
    return BlockRead(None, (part._replace(rows=None) if whole else part).of(leaf))


def begin_ahead(items: Iterable[Item], begin: Callable[[Item], Begun], depth: int) -> Iterator[tuple[Item, Begun]]:
    """Yield (item, begin(item)) in order, calling `begin` up to `depth` items ahead of use."""
    waiting: list[tuple[Item, Begun]] = []
    for item in items:
        waiting.append((item, begin(item)))
        if len(waiting) > depth:
            yield waiting.pop(0)
    while waiting:
        yield waiting.pop(0)
