"""Read checkpoints: slices of leaves, from only the chunks that contain them, each compared with its checksum."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.checkpoint.layout import (
    CRC,
    ChunkLayout,
    Index,
    Slab,
    grid_positions,
    slab_start,
    slabs,
    view_chunks,
    view_file,
)
from fzero.checkpoint.manifest import EXTRAS, Leaf, from_bytes, parse_leaf, read_manifest
from fzero.checkpoint.save_state import as_integers, as_tensor, empty_tensor
from fzero.core import packages, pytree
from fzero.core.arguments import checked
from fzero.core.digest import crc32c
from fzero.core.pytree import nearest
from fzero.core.storage import Damaged, Folder, join
from fzero.offload.buffer_pool import RangeReader
from fzero.sharding import Mesh, one_process
from fzero.sharding.slices import Window

RUN = 4 << 20  # most bytes of neighbouring chunks to read at a time
THREADS = 4  # that read and check chunks


class CheckpointReader:
    """A checkpoint open for reading; `open_checkpoint` makes it.

    step, config, mesh: as the manifest has them. leaves: {name: Leaf}.
    `read` returns slices of leaves; `close` closes the files.
    Raises ValueError if the checkpoint is not complete, and Damaged if its manifest is damaged.

    >>> import tempfile
    >>> path = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.arange(6.0)}, step=10, config={"lr": 0.1})
    >>> reader = CheckpointReader(path)
    >>> reader.step, reader.config, list(reader.leaves)
    (10, {'lr': 0.1}, ['w'])
    >>> reader.read("w", start=(2,), size=(3,))
    tensor([2., 3., 4.])
    >>> reader.close()
    """

    def __init__(self, path: Folder) -> None:
        record = read_manifest(path)
        self.path, self.step, self.config, self.mesh = path, record["step"], record["config"], record["mesh"]
        self.leaves: dict[str, Leaf] = {name: parse_leaf(table) for name, table in record["leaves"].items()}
        self.arrays = join(path, record["arrays"])
        self.files = RangeReader(self.arrays)
        self.headers: dict[tuple[str, Index], tuple[np.ndarray, np.ndarray]] = {}
        self.lock = threading.Lock()

    @property
    def read_bytes(self) -> int:
        """The number of bytes read so far."""
        return self.files.read_bytes

    def read(
        self, name: str, start: Index | None = None, size: Index | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Read the elements [start, start + size) of a leaf (None: all of it), verified, into new memory or `out`.

        Raises ValueError if the checkpoint has no such leaf or slice, and Damaged naming leaf, chunk and file if a
        checksum does not match.
        """
        box = self.box(name, start, size, out)
        self.read_boxes([box])
        return box.out

    def read_boxes(self, boxes: list[Box], pool: ThreadPoolExecutor | None = None) -> None:
        """Read the boxes from only the chunks that contain their elements, by threads of `pool` or of their own."""
        if pool is None:
            with reading_threads() as pool:
                return self.read_boxes(boxes, pool)
        needs = [
            (box, StoredTile(self, box.name, index), spans)
            for box in boxes
            for index, spans in overlapping_tiles(self.leaves[box.name].layout, box.start, box.size)
        ]
        # Headers are read first: they are small, and the large reads would wait for them.
        tasks: list[Future[Any]] = [pool.submit(tile.header) for _, tile, _ in needs]
        for box, tile, spans in needs:
            for slab in slabs(tile.layout, 0 if tile.layout.compress else RUN, spans):
                tasks.append(pool.submit(tile.read_into, box, slab))
        failures = [error for task in tasks if (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        torch.autograd.graph.increment_version([box.out for box in boxes])  # which were written without a word to torch

    def box(self, name: str, start: Index | None = None, size: Index | None = None, out: Tensor | None = None) -> Box:
        """A slice to read, with the tensor that it will be read into."""
        if name not in self.leaves:
            raise ValueError(f"{self.path}: has no leaf {name}{pytree.nearest(name, self.leaves)}")
        leaf = self.leaves[name]
        start = (0,) * len(leaf.shape) if start is None else tuple(start)
        size = tuple(n - begin for n, begin in zip(leaf.shape, start)) if size is None else tuple(size)
        fits = len(start) == len(size) == len(leaf.shape)
        if not fits or any(not 0 <= begin <= begin + n <= extent for begin, n, extent in zip(start, size, leaf.shape)):
            raise ValueError(
                f"{self.path}: {name} has shape {list(leaf.shape)}, and no slice of {list(size)} from {list(start)} on"
            )
        return Box(name, start, size, empty_tensor(size, leaf.dtype) if out is None else out)

    def shard(
        self, name: str, windows: Sequence[Window], size: Sequence[int], out: Tensor | None = None
    ) -> tuple[Tensor, list[Box]]:
        """(a tensor of this size, the slices to read into it) for the windows of a leaf that a rank holds."""
        if len(windows) == 1:
            box = self.box(name, windows[0].start, windows[0].size, out)
            return box.out, [box]
        out = empty_tensor(tuple(size), self.leaves[name].dtype) if out is None else out
        return out, [self.box(name, window.start, window.size, window.view(out)) for window in windows]

    def close(self) -> None:
        self.files.close()


def reading_threads() -> ThreadPoolExecutor:
    """The threads of one or several calls of `read_boxes`; each has buffers of its own."""
    return ThreadPoolExecutor(THREADS, "fzero-load")


class Box(NamedTuple):
    """A slice of a leaf and the tensor to read it into."""

    name: str
    start: Index
    size: Index
    out: Tensor


@checked()
def open_checkpoint(path: Folder) -> CheckpointReader:
    """Open the checkpoint at `path` to read leaves and slices of them.

    Raises ValueError if it is not complete, and Damaged if its manifest is damaged.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.arange(12.0).reshape(4, 3)}, step=7)
    >>> reader = checkpoint.open_checkpoint(path)
    >>> reader.step, reader.leaves["w"].shape
    (7, (4, 3))
    >>> reader.read("w", start=(1, 0), size=(1, 3))
    tensor([[3., 4., 5.]])
    >>> reader.close()
    """
    return CheckpointReader(path)


def overlapping_tiles(layout: ChunkLayout, start: Index, size: Index) -> Iterator[tuple[Index, list[tuple[int, int]]]]:
    """Yield (part, first and last + 1 chunk along each dim) of every part that meets a box."""
    if not all(size):
        return
    for tile in itertools.product(
        *(range(begin // n, (begin + k - 1) // n + 1) for begin, k, n in zip(start, size, layout.tile))
    ):
        spans = []
        for p, n, c, begin, k in zip(tile, layout.tile, layout.chunk, start, size):
            low, high = max(begin - p * n, 0), min(begin + k - p * n, n)
            spans.append((low // c, (high - 1) // c + 1))
        yield tile, spans


class StoredTile:
    """A part of a leaf of an open checkpoint. Its reads raise Damaged naming leaf, chunk and file."""

    def __init__(self, reader: CheckpointReader, name: str, index: Index) -> None:
        self.reader, self.name, self.index, self.leaf = reader, name, index, reader.leaves[name]
        self.layout = self.leaf.layout
        self.file = self.layout.file(name, index)
        self.path = join(reader.arrays, self.file)

    def damaged(self, fault: str) -> Damaged:
        """The error to raise for a fault of its leaf."""
        return Damaged(f"leaf {self.name} is damaged: {fault}")

    def chunk_text(self, number: int) -> str:
        """A chunk by its position in its leaf and its file, such as "0,3,1 in PATH"."""
        layout = self.layout
        position = np.unravel_index(number, layout.counts) if layout.counts else ()
        numbers = ",".join(str(int(p * k + i)) for p, k, i in zip(self.index, layout.counts, position)) or "0"
        return f"{numbers} in {self.path}"

    def read_into(self, box: Box, slab: Slab) -> None:
        """Read contiguous chunks, verify them, and copy the elements that belong to a box into it."""
        layout = self.layout
        chunks = view_file(as_tensor(self.read(slab)), layout, slab.counts)
        first = slab_start(layout, self.index, slab)
        ends = [corner + k * c for corner, k, c in zip(first, slab.counts, layout.chunk)]
        if all(corner >= begin and end <= begin + n for corner, end, begin, n in zip(first, ends, box.start, box.size)):
            target = box.out
            for dim, (corner, end, begin) in enumerate(zip(first, ends, box.start)):
                target = target.narrow(dim, corner - begin, end - corner)
            copy_elements(chunks, view_chunks(target, slab.counts, layout.chunk))
            return
        for position in grid_positions(slab.counts):
            chunk, target = chunks[position], box.out
            for dim, (f, i, c, begin, n) in enumerate(zip(first, position, layout.chunk, box.start, box.size)):
                low, high = max(f + i * c, begin), min(f + (i + 1) * c, begin + n)
                chunk = chunk.narrow(dim, low - f - i * c, high - low)
                target = target.narrow(dim, low - begin, high - low)
            copy_elements(chunk, target)

    def read(self, slab: Slab) -> np.ndarray:
        """The bytes of a slab in file order, verified; valid until this thread reads again."""
        layout = self.layout
        table, sums = self.header()
        if layout.compress or layout.chunks == 1:
            offset, size = (int(x) for x in table[slab.first])
            rows = self.read_range(offset, size)[None]
        else:
            rows = self.read_range(layout.header + slab.first * layout.stride, slab.size * layout.stride)
            rows = rows.reshape(slab.size, layout.stride)
        n = rows.shape[1] - CRC if layout.compress else layout.chunk_bytes
        stored = rows[:, n : n + CRC].copy().view("<u4")[:, 0]
        for i, (row, wanted_sum) in enumerate(zip(rows, sums[slab.first :].tolist())):
            if crc32c(row[:n]) != wanted_sum or stored[i] != wanted_sum:
                raise self.damaged(f"chunk {self.chunk_text(slab.first + i)} does not match its checksum")
        if not layout.compress:
            return rows.reshape(-1)[: n if layout.chunks == 1 else None]
        zstandard = packages.load("zstandard", str(self.path))
        try:
            data = zstandard.ZstdDecompressor().decompress(memoryview(rows[0, :n]), layout.chunk_bytes)
        except zstandard.ZstdError as error:
            data, fault = b"", f" ({error})"
        else:
            fault = f": {len(data):,} bytes"
        if len(data) != layout.chunk_bytes:
            chunk = self.chunk_text(slab.first)
            raise self.damaged(f"chunk {chunk} is not what zstd made of {layout.chunk_bytes:,} bytes{fault}")
        return np.frombuffer(data, np.uint8)

    def header(self) -> tuple[np.ndarray, np.ndarray]:
        """(offset and bytes of every chunk, their crc32c), from the verified header, which is read only once."""
        reader, key = self.reader, (self.name, self.index)
        with reader.lock:
            if key in reader.headers:
                return reader.headers[key]
        layout, crc, n = self.layout, self.leaf.sums[self.layout.number(self.index)], self.layout.chunks
        if n == 1:
            size = layout.file_bytes if not layout.compress else self.size()
            header = np.array([[0, size]], "<u8"), np.array([crc], "<u4")
        else:
            if layout.header > self.size():  # before memory for it is taken
                raise self.damaged(f"{self.path} is shorter than its index")
            raw = self.read_range(0, layout.header)
            if crc32c(memoryview(raw)) != crc:
                raise self.damaged(f"the index of {self.path} does not match its checksum")
            header = (
                raw[: 16 * n].copy().view("<u8").reshape(n, 2),
                raw[16 * n + CRC : 16 * n + CRC + 4 * n].copy().view("<u4"),
            )
        with reader.lock:
            reader.headers[key] = header
        return header

    def read_range(self, offset: int, size: int) -> np.ndarray:
        """Read bytes of the file; raises Damaged if it is missing or too short."""
        try:
            return self.reader.files.get(self.file, offset, size)
        except FileNotFoundError:
            raise self.damaged(f"{self.path} is missing") from None
        except EOFError as error:
            raise self.damaged(f"{self.path} ends after {error.args[0]:,} bytes") from None
        except OSError as error:
            if self.reader.files.objects is not None:
                raise  # a failure of the network does not mean damage
            raise Damaged(f"leaf {self.name} cannot be read: {self.path}: {error.strerror or error}") from None

    def size(self) -> int:
        """The size of the file in bytes; raises Damaged if it is missing."""
        try:
            return self.reader.files.size(self.file)
        except FileNotFoundError:
            raise self.damaged(f"{self.path} is missing") from None


def copy_elements(source: Tensor, target: Tensor) -> None:
    """Copy elements in this thread alone; Tensor.copy_ would start threads in each of ours."""
    np.copyto(as_integers(target), as_integers(source))


@checked()
def read_extra(path: Folder, name: str, mesh: Mesh | None = None) -> Any:
    """The value of this rank that the checkpoint at `path` was saved with as `extras={name: value}`, verified.

    mesh: None is one process. It has as many data ranks as the mesh that saved the checkpoint, unless all of those had
    the same value.
    Raises ValueError if the checkpoint has no such extra or those of other ranks, and Damaged if a checksum does not
    match.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=5, extras={"loader": {"batch": 7}})
    >>> checkpoint.read_extra(path, "loader")
    {'batch': 7}
    """
    mesh = one_process() if mesh is None else mesh
    reader = open_checkpoint(path)
    try:
        names = [leaf.removeprefix(EXTRAS) for leaf in reader.leaves if leaf.startswith(EXTRAS)]
        if name not in names:
            raise ValueError(
                f"{path}: has no extra {name!r}{nearest(name, names)}; it has {', '.join(names) or 'none'}"
            )
        rows, width = reader.leaves[EXTRAS + name].shape
        if rows not in (1, mesh.data_size):
            raise ValueError(
                f"{path}: extra {name!r} is of {rows} data ranks, each with its own, and this mesh has "
                f"{mesh.data_size}; resume on {rows}"
            )
        return from_bytes(reader.read(EXTRAS + name, (mesh.data_rank if rows > 1 else 0, 0), (1, width))[0])
    finally:
        reader.close()
