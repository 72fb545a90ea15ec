"""One part of a leaf being written: chunks in file order, their checksums, and the index that finds them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fzero.checkpoint.layout import (
    CRC,
    ZSTD_LEVEL,
    ChunkLayout,
    Index,
    Slab,
    inner_chunks,
    slab_digest,
    slab_size,
    slab_start,
    view_chunks,
    view_file,
)
from fzero.checkpoint.manifest import Folder
from fzero.checkpoint.part_storage import FileWriter, aligned_memory
from fzero.core import packages
from fzero.core.crc32c import crc32c
from fzero.core.gpu_copies import Copied, Reading
from fzero.core.object_store import Objects
from fzero.core.storage import is_url
from fzero.offload.buffer_pool import round_to_pages
from fzero.sharding.slices import narrow_box

Box = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (start, size) -> elements of this rank's shard


class PartFile:
    """A part being written: call `fill` and `write` for each of its slabs, in any order and from any thread.

    path: (leaf name) -> the folder of its array, called once that is known. left: the number of slabs still to be
    written.
    """

    def __init__(self, name: str, layout: ChunkLayout, index: Index, path: Callable[[str], Folder]) -> None:
        self.name, self.layout, self.index, self.path = name, layout, index, path
        self.left, self.sum, self.digest = 0, 0, 0
        self.lock = threading.Lock()
        self.table = np.zeros((layout.chunks, 2), "<u8")
        self.sums = np.zeros(layout.chunks, "<u4")
        self.file: FileWriter | ObjectWriter | None = None

    @property
    def number(self) -> int:
        return self.layout.number(self.index)

    def fill(self, raw: Tensor, slab: Slab, give: Box, begins: Index, reading: Reading | None = None) -> Copied:
        """Copy a slab's elements into `raw` in file order; from a GPU, start to.

        give: reads boxes of this rank's shard. begins: the start of the shard in the leaf. reading: of its GPU.
        """
        layout = self.layout
        start = tuple(at - begin for at, begin in zip(slab_start(layout, self.index, slab), begins))
        size = slab_size(layout, self.index, slab)
        box, whole = give(start, size), size == tuple(k * c for k, c in zip(slab.counts, layout.chunk))

        def put(memory: Tensor) -> None:
            chunks = view_file(memory, layout, slab.counts)
            if whole:
                chunks.copy_(view_chunks(box, slab.counts, layout.chunk))
                return
            chunks.zero_()
            for place, at, extent in inner_chunks(layout, self.index, slab):
                narrow_box(chunks[place], (0,) * len(extent), extent).copy_(narrow_box(box, at, extent))

        if reading is not None:
            return reading.copy(box, raw, put)
        put(raw)
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
            self._put_packed(file, [compress(row[: layout.chunk_bytes]) for row in rows], slab)
        else:
            self.sums[slab.first : slab.first + len(rows)] = append_crc(rows, layout.chunk_bytes)
            size = raw.numel() if layout.chunks > 1 else layout.file_bytes
            file.put(raw, size, layout.header + slab.first * layout.stride)
        with self.lock:
            self.digest = (self.digest + total) % (1 << 64)
            self.left -= 1
            last = self.left == 0
        if last:
            self._end(file)

    def _put_packed(self, file: FileWriter | ObjectWriter, packed: list[np.ndarray], slab: Slab) -> None:
        for number, data in enumerate(packed, slab.first):
            size = len(data) + CRC
            block = aligned_memory(size)
            block[: len(data)] = data
            self.sums[number] = append_crc(block[None], len(data))[0]
            offset = file.append(size) if self.layout.chunks > 1 else 0
            self.table[number] = offset, size
            file.put(torch.from_numpy(block), size, offset)

    def _open(self) -> FileWriter | ObjectWriter:
        layout, folder = self.layout, self.path(self.name)
        if is_url(folder):
            file = ObjectWriter(str(folder), layout.key(self.index))
        else:
            arrays = self.path("")
            name = f"{self.name}/{layout.key(self.index)}" if self.name else layout.key(self.index)
            file = FileWriter(Path(arrays), name, 0 if layout.compress else layout.file_bytes)
        file.append(layout.header)
        return file

    def _end(self, file: FileWriter | ObjectWriter) -> None:
        layout = self.layout
        if not layout.compress:
            self.table[:, 0] = layout.header + np.arange(layout.chunks) * layout.stride
            self.table[:, 1] = layout.chunk_bytes + CRC
        size = int(self.table.sum(1).max()) if layout.compress else layout.file_bytes
        if layout.chunks == 1:
            self.sum = int(self.sums[0])
        else:
            head = make_header(self.table, self.sums, layout.header)
            file.put(torch.from_numpy(head), len(head), 0)
            self.sum = crc32c(memoryview(head))
        file.end(size)
        self.file = None

    def close(self) -> None:
        """Close its file if it was not written to the end."""
        if self.file is not None:
            self.file.close()


def append_crc(rows: np.ndarray, n: int) -> np.ndarray:
    """Write the crc32c of the first n bytes of each row after those bytes, and zeros after it.

    Returns the crc32c of each row.
    """
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


class ObjectWriter:
    """An object sent to an object store once it is complete, with the methods of `FileWriter`."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name, self.data, self.end_at, self.lock = folder, name, bytearray(), 0, threading.Lock()

    def put(self, raw: Tensor, size: int, offset: int) -> None:
        """Copy the first `size` bytes of `raw` to `offset`."""
        with self.lock:
            self.data.extend(bytes(max(0, offset + size - len(self.data))))
            self.data[offset : offset + size] = memoryview(raw.numpy())[:size]

    def append(self, size: int) -> int:
        """Reserve `size` bytes from the next page on; returns their offset."""
        with self.lock:
            offset, self.end_at = self.end_at, self.end_at + round_to_pages(size)
            return offset

    def end(self, size: int) -> None:
        """Send its first `size` bytes to the store, durably."""
        self.data.extend(bytes(max(0, size - len(self.data))))
        Objects(self.folder).write(self.name, bytes(memoryview(self.data)[:size]))

    def close(self) -> None:
        """Drop its data without sending it."""
        self.data = bytearray()
