"""The layout of a leaf in a checkpoint: divided into parts, each a file written by one rank, and these into chunks.

A chunk is read whole and has a checksum of its own. A leaf is a zarr3 array, a part a chunk of its grid: one chunk of
ours followed by its crc32c, or several with zarr's codec `sharding_indexed`:

    index       offset and bytes of every chunk, uint64, in C order; the crc32c of those
    sums        the crc32c of every chunk, uint32, ignored by zarr; the manifest has the crc32c of index and sums
    chunks      each begins at a page and is followed by its crc32c; zeros fill the page

The last part along a dim may reach beyond the leaf, with zeros there. So any zarr library can read it, direct transfers
can write it, and a slice of the leaf is a few chunks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.axes import EP, TP
from fzero.core.digest import digest_strided
from fzero.core.host_memory import round_to_pages
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import global_shape, narrow_box

TARGET = 1 << 20  # bytes of a chunk: chunks of twice this size or more are cut
MIN_CHUNK_BYTES = 1 << 18  # smaller chunks are never cut
FINE = 16  # least number of chunks of a layer, even if they become smaller than TARGET
RUN = 2048  # least contiguous bytes: rows are not cut into shorter runs
SHARE = 1 << 20  # bytes for each rank, from which each of the ranks with the same shard writes a part
CRC = 4  # bytes of a checksum

# The name of a dtype in a zarr array; dtypes that zarr does not have are stored as integers of their width.
ZARR = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "uint16",
    torch.float8_e4m3fn: "uint8",
    torch.float8_e5m2: "uint8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
Index = tuple[int, ...]


class ChunkLayout(NamedTuple):
    """How the elements of a leaf are divided into parts and chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: tuple[int, ...]  # number of parts along each dim
    chunk: tuple[int, ...]  # the shape of a chunk
    compress: str = ""  # "" or "zstd"

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of a part; the last one along a dim may reach beyond the leaf."""
        return tuple(-(-n // g) for n, g in zip(self.shape, self.grid))

    @property
    def counts(self) -> tuple[int, ...]:
        """The chunks of a part along each dim."""
        return tuple(n // c if c else 0 for n, c in zip(self.tile, self.chunk))

    @property
    def chunks(self) -> int:
        """The chunks of a part."""
        return math.prod(self.counts)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk's elements."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def stride(self) -> int:
        """The bytes from one chunk that is not compressed to the next."""
        return round_to_pages(self.chunk_bytes + CRC)

    @property
    def header(self) -> int:
        """The bytes of a part's index and sums, whole pages; 0 if a part is one chunk."""
        return round_to_pages(self.chunks * (16 + CRC) + CRC) if self.chunks > 1 else 0

    @property
    def file_bytes(self) -> int:
        """The bytes of a part's file if chunks are not compressed."""
        return self.header + self.chunks * self.stride if self.chunks > 1 else self.chunk_bytes + CRC

    @property
    def nbytes(self) -> int:
        """The bytes of the leaf's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def tiles(self) -> list[Index]:
        """The index of every part in the grid, in C order; none if the leaf has no elements."""
        return list(itertools.product(*(range(n) for n in self.grid))) if self.nbytes else []

    def number(self, tile: Index) -> int:
        """The number of a part among `parts`."""
        return flat_index(tile, self.grid)

    def key(self, tile: Index) -> str:
        """The name of a part's file beside zarr.json."""
        return ".".join(["c", *map(str, tile)])

    def file(self, name: str, tile: Index) -> str:
        """The name of a part's file, of the leaf `name`, below the folder of arrays."""
        return f"{name}/{self.key(tile)}" if name else self.key(tile)


def smallest_factor(n: int) -> int:
    """The smallest prime factor of n; n itself if it is prime, 1 for 1."""
    return next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)


def chunk_shape(tile: Sequence[int], itemsize: int, spec: Spec, grid: Sequence[int]) -> tuple[int, ...]:
    """The shape of the chunks of a tile: layers are cut first, then rows and dims that `spec` shards, then others."""
    # If there are three dims or more, the first counts layers and is cut first. Then the rows (which a data axis
    # shards) and the dims for which `spec` names an axis are cut evenly, counting the cuts into parts of `grid`; other
    # dims only when those cannot be cut further.
    chunk, cuts = list(tile), list(grid)
    lead = int(len(chunk) > 2)
    named = {dim for dim, axes in enumerate(spec.dims) if axes} | {lead}

    def size() -> int:
        return math.prod(chunk) * itemsize

    while lead and size() >= 2 * TARGET and chunk[0] > 1:
        chunk[0] //= smallest_factor(chunk[0])
    while size() >= 2 * TARGET or (size() and math.prod(cuts[lead:]) < FINE):
        ways = []
        for dim in range(lead, len(chunk)):
            p = smallest_factor(chunk[dim])
            in_a_row = chunk[dim] // p * itemsize if dim == len(chunk) - 1 else RUN
            if p > 1 and size() // p >= MIN_CHUNK_BYTES and (in_a_row >= RUN or len(chunk) == 1):
                ways.append((dim not in named, cuts[dim], dim, p))
        if not ways:
            break
        *_, dim, p = min(ways)
        chunk[dim] //= p
        cuts[dim] *= p
    return tuple(chunk)


class RankTiles(NamedTuple):
    """The parts of a leaf that one rank writes."""

    layout: ChunkLayout
    tiles: list[Index]
    start: Index  # of the rank's shard in the leaf
    rows: Index = ()  # of a leaf whose layers are on several ranks of pp, each a part or more: the rank's layers

    def shard_start(self, tile: Index) -> Index:
        """Where the rank's shard would begin in the leaf if all layers were next to each other."""
        return (tile[0] - self.rows.index(tile[0]), *self.start[1:]) if self.rows else self.start


Grid = tuple[list[int], list[int], list[int], list[Sequence[int]]]


def grid_by_ranks(local: Sequence[int], spec: Spec, mesh: Mesh) -> Grid:
    """(the shape of a part, parts along each dim, this rank's first part, its parts) of a grid of shards."""
    tile, grid, start = list(local), [1] * len(local), [0] * len(local)
    ranges: list[Sequence[int]] = [range(1)] * len(local)
    for dim, axes in enumerate(spec.dims):
        if spec.rows and dim == 0:
            tile[0], grid[0], ranges[0] = 1, sum(map(len, spec.rows)), spec.rows[mesh.pp.rank]
            continue
        if spec.part_axis == EP and axes == (EP,):
            start[dim] = sum(spec.parts[: mesh.ep.rank])
            ranges[dim] = range(start[dim], start[dim] + tile[dim])
            tile[dim], grid[dim] = 1, sum(spec.parts)
            continue
        if spec.part_axis == TP and axes == (TP,):
            tile[dim] = spec.parts[0]  # the last rank's too, which reaches beyond the leaf
        for name in axes:
            grid[dim] *= mesh[name].size
            start[dim] = start[dim] * mesh[name].size + mesh[name].rank
        ranges[dim] = range(start[dim], start[dim] + 1)
        start[dim] *= tile[dim]
    return tile, grid, start, ranges


def plan_tiles(
    local: Sequence[int],
    dtype: torch.dtype,
    spec: Spec,
    mesh: Mesh,
    number: int,
    *,
    max_bytes: int | None = None,
    compress: str = "",
) -> RankTiles:
    """The parts of a leaf that all ranks write, by the shards; max_bytes: the largest part that can be cut."""
    full_shape, (tile, grid, start, ranges) = global_shape(local, spec, mesh), grid_by_ranks(local, spec, mesh)
    copies, copy = 1, 0
    for axis in mesh.axes:
        if axis.name not in spec.axes:
            copies, copy = copies * axis.size, copy * axis.size + axis.rank

    def cut(dim: int, divisor: int) -> None:
        tile[dim] //= divisor
        grid[dim] *= divisor
        ranges[dim] = range(ranges[dim][0] * divisor, (ranges[dim][-1] + 1) * divisor)

    def fills_grid(dim: int, divisor: int) -> bool:
        return not tile[dim] % divisor and (grid[dim] * divisor - 1) * (tile[dim] // divisor) < full_shape[dim]

    def size() -> int:
        return math.prod(tile) * dtype.itemsize

    is_writer = True
    if copies > 1:
        dim = next((d for d in range(len(tile)) if fills_grid(d, copies)), None)
        if dim is None or size() < copies * SHARE:
            is_writer = number % copies == copy
        else:
            cut(dim, copies)
            ranges[dim] = range(ranges[dim][0] + copy, ranges[dim][0] + copy + 1)
    for dim in range(len(tile)):
        while (
            max_bytes is not None
            and size() > max_bytes
            and tile[dim] > 1
            and fills_grid(dim, smallest_factor(tile[dim]))
        ):
            cut(dim, smallest_factor(tile[dim]))
    layout = ChunkLayout(full_shape, dtype, tuple(grid), chunk_shape(tile, dtype.itemsize, spec, grid), compress)
    rows = spec.rows[mesh.pp.rank] if spec.rows else ()
    return RankTiles(
        layout, list(itertools.product(*ranges)) if is_writer and layout.nbytes else [], tuple(start), rows
    )


class Slab(NamedTuple):
    """Chunks that are contiguous in a part's file and make up a box of the leaf."""

    first: int  # the number of its first chunk
    position: Index  # of that chunk in the part, in chunks
    counts: Index  # chunks along each dim

    @property
    def size(self) -> int:
        """The number of its chunks."""
        return math.prod(self.counts)


def slabs(layout: ChunkLayout, max_bytes: int, spans: Sequence[tuple[int, int]] | None = None) -> Iterator[Slab]:
    """The slabs of a part, in order, of at most `max_bytes` bytes each, or of one chunk if that is larger."""
    counts, dims = layout.counts, len(layout.counts)
    spans = [(0, n) for n in counts] if spans is None else spans
    max_chunks, dim = max(1, max_bytes // max(1, layout.stride)), dims
    while dim > 0 and spans[dim - 1] == (0, counts[dim - 1]) and math.prod(counts[dim - 1 :]) <= max_chunks:
        dim -= 1
    if dim == 0:
        yield Slab(0, (0,) * dims, counts)
        return
    step, last = max_chunks // math.prod(counts[dim:]), spans[dim - 1][1]
    for outer in itertools.product(*(range(*span) for span in spans[: dim - 1])):
        for begin in range(spans[dim - 1][0], last, step):
            position = (*outer, begin, *(0,) * (dims - dim))
            yield Slab(
                flat_index(position, counts), position, (*(1,) * (dim - 1), min(step, last - begin), *counts[dim:])
            )


def flat_index(position: Index, counts: Index) -> int:
    """The number, in C order, of the position `place` in a grid of these counts."""
    number = 0
    for index, count in zip(position, counts):
        number = number * count + index
    return number


def grid_positions(counts: Index) -> Iterator[Index]:
    """The positions in a grid of these counts, in C order."""
    return itertools.product(*(range(n) for n in counts))


def view_chunks(box: Tensor, counts: Index, chunk: Index) -> Tensor:
    """The view [*counts, *chunk] of a box of elements."""
    strides = (*(stride * n for stride, n in zip(box.stride(), chunk)), *box.stride())
    return box.as_strided((*counts, *chunk), strides, box.storage_offset())


def view_file(raw: Tensor, layout: ChunkLayout, counts: Index) -> Tensor:
    """The view [*counts, *chunk] of the bytes of a slab in file order."""
    steps, step = [], layout.stride // layout.dtype.itemsize
    for size, gap in ((layout.chunk, 1), (counts, step)):
        inner = gap
        for n in reversed(size):
            steps.append(inner)
            inner *= n
    chunk, outer = steps[: len(layout.chunk)], steps[len(layout.chunk) :]
    return raw.view(layout.dtype).as_strided((*counts, *layout.chunk), (*reversed(outer), *reversed(chunk)))


def slab_start(layout: ChunkLayout, tile: Index, slab: Slab) -> Index:
    """The index of a slab's first element in its leaf."""
    return tuple(p * n + index * c for p, n, index, c in zip(tile, layout.tile, slab.position, layout.chunk))


def slab_size(layout: ChunkLayout, tile: Index, slab: Slab) -> Index:
    """The shape of the box of a leaf that a slab has, without what reaches beyond the leaf."""
    ends = zip(slab_start(layout, tile, slab), slab.counts, layout.chunk, layout.shape)
    return tuple(max(0, min(start + k * c, n) - start) for start, k, c, n in ends)


def inner_chunks(layout: ChunkLayout, tile: Index, slab: Slab) -> Iterator[tuple[Index, Index, Index]]:
    """(position of a chunk in its slab, start, size of its elements in the slab's box) of each chunk in the leaf."""
    inside = slab_size(layout, tile, slab)
    for position in grid_positions(slab.counts):
        start = tuple(i * c for i, c in zip(position, layout.chunk))
        size = tuple(min(c, n - offset) for c, n, offset in zip(layout.chunk, inside, start))
        if all(n > 0 for n in size):
            yield position, start, size


def slab_digest(raw: Tensor, layout: ChunkLayout, tile: Index, slab: Slab) -> int:
    """The digest of the elements of a slab, from its bytes."""
    steps = [math.prod(layout.shape[dim + 1 :]) for dim in range(len(layout.shape))]
    chunks = view_file(raw, layout, slab.counts)

    def first(start: Index) -> int:
        return sum((a + b) * step for a, b, step in zip(slab_start(layout, tile, slab), start, steps))

    if slab_size(layout, tile, slab) == tuple(k * c for k, c in zip(slab.counts, layout.chunk)):
        return digest_strided(
            chunks, [*(c * step for c, step in zip(layout.chunk, steps)), *steps], first((0,) * len(steps))
        )
    pieces = inner_chunks(layout, tile, slab)
    return sum(
        digest_strided(narrow_box(chunks[position], (0,) * len(size), size), steps, first(start))
        for position, start, size in pieces
    )


# ---- zarr metadata ----


def array_json(layout: ChunkLayout, attributes: dict[str, Any]) -> str:
    """The zarr.json of a leaf's array."""
    little = [
        {"name": "bytes", "configuration": {"endian": "little"}} if layout.dtype.itemsize > 1 else {"name": "bytes"}
    ]
    packed = [{"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}] if layout.compress else []
    codecs: list[dict[str, Any]] = [*little, *packed, {"name": "crc32c"}]
    if layout.chunks > 1:
        inner = {
            "chunk_shape": list(layout.chunk),
            "codecs": codecs,
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "start",
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return _text(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(layout.shape),
            "data_type": ZARR[layout.dtype],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in layout.tile]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": False if layout.dtype == torch.bool else 0.0 if ZARR[layout.dtype].startswith("float") else 0,
            "codecs": codecs,
            "attributes": {"dtype": str(layout.dtype).removeprefix("torch."), **attributes},
        }
    )


ZSTD_LEVEL = 1  # the fastest: what is written are weights, which hardly compress


def group_json() -> str:
    """The zarr.json of a group."""
    return _text({"zarr_format": 3, "node_type": "group", "attributes": {}})


def _text(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=1) + "\n"
