"""One part of a leaf on its way to its file: chunks copied into place, checksummed, written, and the index that finds them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from fzero.checkpoint.files import Writing, aligned
from fzero.checkpoint.home import Place
from fzero.checkpoint.layout import CRC, ZSTD_LEVEL, Index, Layout, Slab, positions
from fzero.digest import digest
from fzero.offload.arena import padded
from fzero.offload.folder import is_url
from fzero.offload.objects import Objects

Box = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (start, size) -> elements of this rank's shard


class Part:
    """A part that is being written: `fill` and `write` for each of its slabs, in any order and by any threads.

    path: a function that gives the place of the array's folder by the leaf's name, once it is known. left: the slabs to come.
    """

    def __init__(self, name: str, layout: Layout, index: Index, path: Callable[[str], Place]) -> None:
        self.name, self.layout, self.index, self.path = name, layout, index, path
        self.left, self.sum, self.digest = 0, 0, 0
        self.lock = threading.Lock()
        self.table = np.zeros((layout.chunks, 2), "<u8")
        self.sums = np.zeros(layout.chunks, "<u4")
        self.file: Writing | Putting | None = None

    @property
    def number(self) -> int:
        """Its number among the leaf's parts."""
        return self.layout.number(self.index)

    def fill(self, raw: Tensor, slab: Slab, give: Box, begins: Index) -> None:
        """Copy a slab's elements into `raw`, each chunk at its place. begins: where the shard that `give` speaks of begins in the leaf."""
        layout = self.layout
        start = tuple(i * n + a * c - b for i, n, a, c, b in zip(self.index, layout.part, slab.at, layout.chunk, begins))
        size = tuple(k * c for k, c in zip(slab.counts, layout.chunk))
        elements, dims = give(start, size), len(size)
        split = elements.as_strided(
            (*slab.counts, *layout.chunk),
            (*(s * c for s, c in zip(elements.stride(), layout.chunk)), *elements.stride()),
            elements.storage_offset(),
        )
        steps, step = [], layout.stride // layout.dtype.itemsize
        for count in reversed(slab.counts):
            steps.insert(0, step)
            step *= count
        inner = torch.empty(layout.chunk, device="meta").stride()
        raw.view(layout.dtype).as_strided((*slab.counts, *layout.chunk), (*steps[:dims], *inner)).copy_(split)

    def write(self, raw: Tensor, slab: Slab) -> None:
        """Checksum a slab and write it, and with the last one the index. Raises OSError."""
        layout, n = self.layout, self.layout.chunk_bytes
        with self.lock:
            if self.file is None:
                self.file = self._open()
        total, bytes_of, packed = 0, raw.numpy(), []
        for i, at in enumerate(positions(slab.counts)):
            block = bytes_of[i * layout.stride : (i + 1) * layout.stride]
            start = tuple(p * size + (a + b) * c for p, size, a, b, c in zip(self.index, layout.part, slab.at, at, layout.chunk))
            total += digest(torch.from_numpy(block[:n]).view(layout.dtype).view(layout.chunk), layout.shape, start)
            if layout.compress:
                packed.append(compressed(block[:n]))
                continue
            number = slab.first + i
            self.sums[number] = seal(block, n)
            self.table[number] = layout.header + number * layout.stride, n + CRC
        if layout.compress:
            self._put_packed(packed, slab)
        elif layout.chunks == 1:
            self.file.put(raw, n + CRC, 0)
        else:
            self.file.put(raw, len(bytes_of), layout.header + slab.first * layout.stride)
        with self.lock:
            self.digest = (self.digest + total) % (1 << 64)
            self.left -= 1
            last = self.left == 0
        if last:
            self._end()

    def _put_packed(self, packed: list[np.ndarray], slab: Slab) -> None:
        for number, data in enumerate(packed, slab.first):
            size = len(data) + CRC
            block = aligned(size)
            block[: len(data)] = data
            self.sums[number] = seal(block, len(data))
            offset = self.file.append(size) if self.layout.chunks > 1 else 0
            self.table[number] = offset, size
            self.file.put(torch.from_numpy(block), size, offset)

    def _open(self) -> Writing | Putting:
        layout, folder = self.layout, self.path(self.name)
        if is_url(folder):
            file = Putting(str(folder), layout.key(self.index))
        else:
            file = Writing(Path(folder, layout.key(self.index)), 0 if layout.compress else layout.file_bytes)
        file.append(layout.header)
        return file

    def _end(self) -> None:
        layout = self.layout
        if layout.chunks == 1:
            self.sum, size = int(self.sums[0]), int(self.table[0, 1])
        else:
            head = header(self.table, self.sums, layout.header)
            self.file.put(torch.from_numpy(head), len(head), 0)
            self.sum, size = crc32c(memoryview(head)), padded(int(self.table.sum(1).max()))
            if layout.compress:
                size = int(self.table.sum(1).max())
        self.file.end(size)
        self.file = None

    def close(self) -> None:
        """Close its file where it was not written to the end."""
        if self.file is not None:
            self.file.close()


def seal(block: np.ndarray, n: int) -> int:
    """The crc32c of the first n bytes of a block, which is put behind them; what is left of the block is zeros then."""
    crc = crc32c(memoryview(block[:n]))
    block[n : n + CRC] = np.frombuffer(crc.to_bytes(CRC, "little"), np.uint8)
    block[n + CRC :] = 0
    return crc


def header(table: np.ndarray, sums: np.ndarray, size: int) -> np.ndarray:
    """The first `size` bytes of a part: zarr's index with its crc32c, and the chunks' sums."""
    out, index = aligned(size), table.tobytes()
    out[: len(index)] = np.frombuffer(index, np.uint8)
    out[len(index) : len(index) + CRC] = np.frombuffer(crc32c(index).to_bytes(CRC, "little"), np.uint8)
    out[len(index) + CRC : len(index) + CRC + 4 * len(sums)] = sums.view(np.uint8)
    return out


def compressed(data: np.ndarray) -> np.ndarray:
    """The zstd frame of some bytes."""
    import zstandard

    return np.frombuffer(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(memoryview(data)), np.uint8)


class Putting:
    """An object that is put into an object store when it is whole: what `Writing` is for a file."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name, self.data, self.end_at, self.lock = folder, name, bytearray(), 0, threading.Lock()

    def put(self, raw: Tensor, size: int, offset: int) -> None:
        """Put the first `size` bytes of `raw` at `offset`."""
        with self.lock:
            self.data.extend(bytes(max(0, offset + size - len(self.data))))
            self.data[offset : offset + size] = memoryview(raw.numpy())[:size]

    def append(self, size: int) -> int:
        """The offset at which `size` bytes more, from the next page on, are to be put."""
        with self.lock:
            offset, self.end_at = self.end_at, self.end_at + padded(size)
            return offset

    def end(self, size: int) -> None:
        """Send it; it is durable then."""
        self.data.extend(bytes(max(0, size - len(self.data))))
        Objects(self.folder).write(self.name, bytes(memoryview(self.data)[:size]))

    def close(self) -> None:
        """Forget it."""
        self.data = bytearray()
