"""A checkpoint being written: its state, its outcome, the errors of its threads, and the manifest that completes it.

The plan of a state's snapshot: which slabs of which parts this rank writes, and the memory that they take. A part being
written has its chunks in file order, their checksums, and the index that finds them.
"""

from __future__ import annotations

import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero import offload
from fzero.checkpoint import manifest
from fzero.checkpoint.directory import step_folder
from fzero.checkpoint.layout import (
    CRC,
    ZSTD_LEVEL,
    ChunkLayout,
    Index,
    RankTiles,
    Slab,
    inner_chunks,
    plan_tiles,
    slab_digest,
    slab_size,
    slab_start,
    slabs,
    view_chunks,
    view_file,
)
from fzero.checkpoint.manifest import Leaf, write_descriptions
from fzero.core import packages
from fzero.core.digest import crc32c
from fzero.core.files import sync_folder
from fzero.core.gpu_copies import Copied, SnapshotReader
from fzero.core.host_memory import HUGE, aligned_memory, round_to_pages
from fzero.core.storage import Folder, is_url, join
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import narrow_box

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(x: Tensor) -> np.ndarray:
    """View the memory of a CPU tensor as integers of its elements' width."""
    return x.view(WORDS[x.dtype.itemsize]).numpy()


def as_tensor(raw: np.ndarray) -> Tensor:
    """A uint8 tensor of some bytes; it shares their memory if that is writable."""
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy())


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor; a large one in huge pages, whose first use is a hundred times faster."""
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.from_numpy(aligned_memory(size)[:size]).view(dtype).view(shape)
        if size >= HUGE
        else torch.empty(shape, dtype=dtype)
    )


Box = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (start, size) -> elements of this rank's shard


class TileFile:
    """A part being written: call `fill` and `write` for each of its slabs, in any order and from any thread."""

    def __init__(self, name: str, layout: ChunkLayout, index: Index, path: Callable[[str], Folder]) -> None:
        # path: (leaf name) -> the folder of its array, called once that is known.
        self.name, self.layout, self.index, self.path = name, layout, index, path
        self.pending_slabs, self.sum, self.digest = 0, 0, 0
        self.lock = threading.Lock()
        self.table = np.zeros((layout.chunks, 2), "<u8")
        self.sums = np.zeros(layout.chunks, "<u4")
        self.file: offload.buffer_pool.RangeWriter | None = None

    @property
    def number(self) -> int:
        return self.layout.number(self.index)

    def fill(
        self, raw: Tensor, slab: Slab, give: Box, shard_start: Index, reading: SnapshotReader | None = None
    ) -> Copied:
        """Copy a slab's elements into `raw` in file order; from a GPU, start to."""
        layout = self.layout
        start = tuple(index - begin for index, begin in zip(slab_start(layout, self.index, slab), shard_start))
        size = slab_size(layout, self.index, slab)
        box, is_full = give(start, size), size == tuple(k * c for k, c in zip(slab.counts, layout.chunk))

        def write_chunks(memory: Tensor) -> None:
            chunks = view_file(memory, layout, slab.counts)
            if is_full:
                chunks.copy_(view_chunks(box, slab.counts, layout.chunk))
                return
            chunks.zero_()
            for position, offset, extent in inner_chunks(layout, self.index, slab):
                narrow_box(chunks[position], (0,) * len(extent), extent).copy_(narrow_box(box, offset, extent))

        if reading is not None:
            return reading.copy(box, raw, write_chunks)
        write_chunks(raw)
        return Copied(raw)

    def write(self, raw: Tensor, slab: Slab) -> None:
        """Checksum a slab and write it; after the last slab, write the index. Raises OSError."""
        layout = self.layout
        with self.lock:
            if self.file is None:
                self.file = self._open()
            file = self.file
        total = slab_digest(raw, layout, self.index, slab)
        rows = raw.numpy().reshape(-1, layout.stride)
        if layout.compress:
            self._write_compressed(file, [compress(row[: layout.chunk_bytes]) for row in rows], slab)
        else:
            self.sums[slab.first : slab.first + len(rows)] = append_crc(rows, layout.chunk_bytes)
            size = raw.numel() if layout.chunks > 1 else layout.file_bytes
            file.write_at(raw, size, layout.header + slab.first * layout.stride)
        with self.lock:
            self.digest = (self.digest + total) % (1 << 64)
            self.pending_slabs -= 1
            last = self.pending_slabs == 0
        if last:
            self._end(file)

    def _write_compressed(self, file: offload.buffer_pool.RangeWriter, packed: list[np.ndarray], slab: Slab) -> None:
        for number, data in enumerate(packed, slab.first):
            size = len(data) + CRC
            block = aligned_memory(size)
            block[: len(data)] = data
            self.sums[number] = append_crc(block[None], len(data))[0]
            offset = file.append(size) if self.layout.chunks > 1 else 0
            self.table[number] = offset, size
            file.write_at(torch.from_numpy(block), size, offset)

    def _open(self) -> offload.buffer_pool.RangeWriter:
        layout, folder = self.layout, self.path(self.name)
        if is_url(folder):
            file = offload.buffer_pool.ObjectWriter(str(folder), layout.key(self.index))
        else:
            name, size = layout.file(self.name, self.index), 0 if layout.compress else layout.file_bytes
            file = offload.buffer_pool.FileWriter(Path(self.path("")), name, size)
        file.append(layout.header)
        return file

    def _end(self, file: offload.buffer_pool.RangeWriter) -> None:
        layout = self.layout
        if not layout.compress:
            self.table[:, 0] = layout.header + np.arange(layout.chunks) * layout.stride
            self.table[:, 1] = layout.chunk_bytes + CRC
        size = int(self.table.sum(1).max()) if layout.compress else layout.file_bytes
        if layout.chunks == 1:
            self.sum = int(self.sums[0])
        else:
            head = make_header(self.table, self.sums, layout.header)
            file.write_at(torch.from_numpy(head), len(head), 0)
            self.sum = crc32c(memoryview(head))
        file.end(size)
        self.file = None

    def close(self) -> None:
        """Close its file if it was not written to the end."""
        if self.file is not None:
            self.file.close()


def append_crc(rows: np.ndarray, n: int) -> np.ndarray:
    """Write the crc32c of the first n bytes of each row after those bytes, then zeros; return the crc32c of each."""
    sums = np.array([crc32c(row[:n]) for row in rows], "<u4")
    rows[:, n : n + CRC] = sums.view(np.uint8).reshape(-1, CRC)
    rows[:, n + CRC :] = 0
    return sums


def make_header(table: np.ndarray, sums: np.ndarray, size: int) -> np.ndarray:
    """The first `size` bytes of a part: zarr's index with its crc32c, and the chunks' sums."""
    out, index = aligned_memory(size), table.tobytes()
    out[: len(index)] = np.frombuffer(index, np.uint8)
    out[len(index) : len(index) + CRC] = np.frombuffer(crc32c(index).to_bytes(CRC, "little"), np.uint8)
    out[len(index) + CRC : len(index) + CRC + 4 * len(sums)] = sums.view(np.uint8)
    return out


def compress(data: np.ndarray) -> np.ndarray:
    """Compress the bytes to a zstd frame."""
    packer = packages.load("zstandard", "train.compress = zstd").ZstdCompressor(level=ZSTD_LEVEL)
    return np.frombuffer(packer.compress(memoryview(data)), np.uint8)


SLAB = 16 << 20  # bytes to copy, checksum and write at a time
SLAB_OF_GPU = 64 << 20  # the same from a GPU, where each copy takes the host as long as it takes to start it
OBJECT = 64 << 20  # bytes of an object in an object store
Named = Mapping[str, tuple[Any, Spec]]  # a leaf and its Spec by name


class SnapshotLeaf(NamedTuple):
    """The part of a leaf that this rank writes."""

    rank_tiles: RankTiles
    slabs: list[list[Slab]]  # of each of its parts
    sizes: list[list[int]]  # bytes of memory for each of those


class SnapshotPlan(NamedTuple):
    """The parts of a state that this rank writes, in the order of its leaves."""

    leaves: dict[str, SnapshotLeaf]
    total: int  # bytes of memory for all slabs
    largest: int  # bytes of memory for one
    nbytes: int  # bytes of elements


def is_on_gpu(leaf: Any) -> bool:
    """Whether a leaf of a state is a tensor on a GPU."""
    return isinstance(leaf, Tensor) and leaf.is_cuda


def traits_of(named: Named) -> list[tuple[Any, ...]]:
    """All that the plan of a snapshot depends on: two states with equal traits have the same."""
    return [(name, tuple(leaf.shape), leaf.dtype, spec, is_on_gpu(leaf)) for name, (leaf, spec) in named.items()]


def plan_snapshot(named: Named, mesh: Mesh, *, objects: bool, compress: str) -> SnapshotPlan:
    """The SnapshotPlan of a state. objects: it goes to an object store."""
    leaves, sizes, nbytes = {}, [], 0
    for number, (name, (leaf, spec)) in enumerate(named.items()):
        rank_tiles = plan_tiles(
            leaf.shape, leaf.dtype, spec, mesh, number, max_bytes=OBJECT if objects else None, compress=compress
        )
        max_bytes = 2 * OBJECT if objects else SLAB_OF_GPU if is_on_gpu(leaf) else SLAB
        pieces = [list(slabs(rank_tiles.layout, max_bytes)) for _ in rank_tiles.tiles]
        slab_bytes = [
            [round_to_pages(math.prod(slab.counts) * rank_tiles.layout.stride) for slab in tile] for tile in pieces
        ]
        leaves[name] = SnapshotLeaf(rank_tiles, pieces, slab_bytes)
        sizes += [size for tile in slab_bytes for size in tile]
        nbytes += sum(math.prod(slab.counts) * rank_tiles.layout.chunk_bytes for tile in pieces for slab in tile)
    return SnapshotPlan(leaves, sum(sizes), max(sizes, default=0), nbytes)


class Saved(NamedTuple):
    """A checkpoint that has been completed, as `Writer.wait` and `Writer.poll` return it.

    >>> import tempfile
    >>> writer = fzero.checkpoint.Writer(tempfile.mkdtemp())
    >>> writer.save({"w": torch.ones(2)}, step=10)
    >>> saved = writer.wait()
    >>> saved.step, saved.path.name, saved.nbytes
    (10, 'step-00000010', 8)
    >>> writer.close()
    """

    step: int
    path: Folder
    blocked_s: float  # seconds that `save` took
    total_s: float  # seconds until the manifest was written
    nbytes: int  # bytes that this rank wrote


class SaveFailed(OSError):
    """Raised if a checkpoint could not be written; the earlier ones are unchanged.

    >>> import tempfile
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> fzero.checkpoint.step_folder(checkpoint_dir, 10).touch()  # a file in the place of the folder
    >>> fzero.checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=10)
    Traceback (most recent call last):
    fzero.checkpoint.save_state.SaveFailed: ...step-00000010: the checkpoint could not be written: ...
    """


class Save:
    """A checkpoint being written."""

    def __init__(self, step: int, config: Any) -> None:
        self.step, self.config, self.began = step, config, time.perf_counter()
        self.target, self.go, self.staged, self.finished = (threading.Event() for _ in range(4))
        self.arrays, self.blocked_s, self.nbytes = "", 0.0, 0
        self.error: BaseException | None = None
        self.early = threading.Lock()
        self.layouts: dict[str, tuple[RankTiles, Spec]] = {}
        self.tiles: dict[str, list[TileFile]] = {}
        self.tasks: list[Future] = []
        self.outcome: Saved | SaveFailed | None = None


def wait_for_all(tasks: list[Future]) -> None:
    """Wait for all tasks, and free the memory held by tracebacks of failed ones."""
    for task in tasks:
        error = task.exception()
        if error is not None:
            traceback.clear_frames(error.__traceback__)


def error_line(error: BaseException) -> str:
    """Format an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return " ".join(str(error).split()) or type(error).__name__


class Reports:
    """What the ranks of a mesh tell one another about a save, as JSON in the mesh's store."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.rank
        store: Any = mesh.store  # torch tells a type checker of no `clone`
        # The mesh's own connection may be blocked by a wait.
        self.store: Any = None if store is None else store.clone()

    def send(self, key: str, report: dict[str, Any]) -> None:
        """Tell rank 0 this rank's report; nothing on rank 0 itself."""
        if self.store is not None and self.rank:
            self.store.set(key, json.dumps(report))

    def receive(self, key: str) -> dict[str, Any]:
        """Wait for the report of that key."""
        pause = 0.001
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return json.loads(self.store.get(key))

    def broadcast(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `make()` on rank 0, or {"error": ...}, on every rank."""
        if self.rank:
            return self.receive(key)
        try:
            result = make()
        except Exception as error:
            result = {"error": error_line(error)}
        if self.store is not None:
            self.store.set(key, json.dumps(result))
        return result


def complete(
    checkpoint_dir: Folder, save: Save, reports: Sequence[dict[str, Any]], mesh: Mesh, pool: ThreadPoolExecutor
) -> None:
    """Write the zarr metadata and the manifest of a save whose parts are all written."""
    path, leaves = step_folder(checkpoint_dir, save.step), {}
    for name, (rank_tiles, spec) in save.layouts.items():
        layout = rank_tiles.layout
        checksums = {int(number): value for report in reports for number, value in report.get(name, {}).items()}
        assert len(checksums) == len(layout.tiles()), (
            f"{name}: {len(checksums)} parts of {len(layout.tiles())} were written"
        )
        digest = sum(value for _, value in checksums.values()) % (1 << 64)
        leaves[name] = Leaf(layout, str(spec), f"{digest:016x}", [checksums[i][0] for i in range(len(checksums))])
    write_descriptions(join(path, save.arrays), leaves, pool)
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
    manifest.write_manifest(path, save.arrays, leaves, step=save.step, config=save.config, mesh=sizes)
    if not is_url(checkpoint_dir):
        sync_folder(Path(checkpoint_dir))
