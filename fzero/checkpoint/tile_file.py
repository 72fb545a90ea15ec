"""One part of a leaf being written: chunks in file order, their checksums, and the index that finds them.

The files of a checkpoint's parts, on a local disk or in an object store: reads and writes of byte ranges.

On a disk that takes direct transfers, large files bypass the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from fzero.checkpoint.manifest import Folder, join
from fzero.core import packages
from fzero.core.crc32c import crc32c
from fzero.core.files import is_lone_file, kind_of, make_folder, open_to_write, remove_entry
from fzero.core.gpu_copies import Copied, SnapshotReader
from fzero.core.object_store import Objects
from fzero.core.storage import PAGE, is_url, naming
from fzero.offload.buffer_pool import HUGE, round_to_pages
from fzero.offload.disk_io import open_direct
from fzero.sharding.slices import narrow_box

OPEN = 64  # most files left open after a read, as a process may open fewer than a checkpoint has
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALL = 1 << 18  # files up to this size are read faster through the page cache


class FileWriter:
    """A file that several threads write: `write_at` each range, then `end`.

    Its content is not durable until the file system is synced.
    """

    def __init__(self, folder: Path, name: str, size: int) -> None:
        """name: of the file, below `folder`. size: its bytes; 0 if unknown so far."""
        path = make_folder(folder, *Path(name).parts[:-1]) / Path(name).name
        self.path, self.size, self.lock = path, size, threading.Lock()
        if not is_lone_file(path):  # else it is a spare file, whose space is used again
            remove_entry(path)
        direct = open_direct(path, make=True) if size > SMALL else None
        self.fd = open_to_write(path, "update") if direct is None else direct
        file_bytes = round_to_pages(size) if direct is not None else size
        if os.fstat(self.fd).st_size not in (size, file_bytes) or not size:
            with naming(path):
                os.ftruncate(self.fd, 0)
                if file_bytes:
                    os.posix_fallocate(self.fd, 0, file_bytes)
        self.end_at, self.direct = 0, direct is not None

    def write_at(self, raw: Tensor, size: int, offset: int) -> None:
        """Write the first `size` bytes of `raw` (uint8, whole pages) at `offset`."""
        view = memoryview(raw.numpy())[: round_to_pages(size) if self.direct else size]
        with naming(self.path):
            while view:
                done = os.pwrite(self.fd, view, offset)
                view, offset = view[done:], offset + done

    def append(self, size: int) -> int:
        """Reserve `size` bytes from the next page on; returns their offset."""
        with self.lock:
            offset, self.end_at = self.end_at, self.end_at + round_to_pages(size)
            return offset

    def end(self, size: int) -> None:
        """Set the file's size to `size` bytes and close it."""
        with naming(self.path):
            if os.fstat(self.fd).st_size != size:
                os.ftruncate(self.fd, size)
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class OpenFile:
    """An open file and the number of threads reading it."""

    fd: int
    direct: bool
    users: int = 0


class TileReader:
    """Reads ranges of the files below a folder or URL, for several threads, each with its own buffer."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.url, self.lock = folder, is_url(folder), threading.Lock()
        self.objects = Objects(str(folder)) if self.url else None
        self.open: dict[str, OpenFile] = {}  # least recently used first
        self.local = threading.local()
        self.read_bytes = 0

    def get(self, name: str, offset: int, size: int) -> np.ndarray:
        """Read `size` bytes of a file at `offset`, a multiple of a page; valid until this thread's next call.

        Raises OSError if it cannot be read, and EOFError if the file is too short.
        """
        if self.url:
            raw = self._range(name, offset, size)
        else:
            with self._acquire(name) as file:
                if (end := os.fstat(file.fd).st_size) < offset + size:
                    raise EOFError(end)  # before memory is taken for what a damaged header asks for
                aligned_size = round_to_pages(size) if file.direct else size
                raw = self._buffer(aligned_size)
                done = 0
                while done < size:
                    count = os.preadv(file.fd, [memoryview(raw)[done:aligned_size]], offset + done)
                    if not count:
                        break
                    done += count
                    if file.direct and done % PAGE:
                        break  # the file's end
            raw = raw[: min(done, size)]
        self.read_bytes += len(raw)
        if len(raw) < size:
            raise EOFError(offset + len(raw))
        return raw[:size]

    def size(self, name: str) -> int:
        """The size of a file in bytes; raises OSError if it is missing.

        An object is read whole, and kept for this thread's next `get`.
        """
        if not self.url:
            return os.stat(join(self.folder, name)).st_size
        self.local.whole = None
        self.local.whole = (name, self._object(name))
        return len(self.local.whole[1])

    def _object(self, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
        objects = self.objects
        assert objects is not None  # only called for a URL
        try:
            content = objects.read(name, start, end)
        except EOFError:
            raise EOFError(len(objects.read(name) or b"")) from None
        if content is None:
            raise FileNotFoundError(2, "No such file", str(join(self.folder, name)))
        return np.frombuffer(content, np.uint8)

    def _range(self, name: str, offset: int, size: int) -> np.ndarray:
        cached = getattr(self.local, "whole", None)
        if cached is not None and cached[0] == name:
            return cached[1][offset : offset + size]
        return self._object(name, offset, offset + size)

    @contextlib.contextmanager
    def _acquire(self, name: str) -> Iterator[OpenFile]:
        with self.lock:
            file = self.open.pop(name, None) or self._open(name)
            self.open[name] = file
            file.users += 1
            unused = [key for key, open_file in self.open.items() if not open_file.users]
            for old in unused[: max(0, len(self.open) - OPEN)]:
                os.close(self.open.pop(old).fd)
        try:
            yield file
        finally:
            with self.lock:
                file.users -= 1

    def _open(self, name: str) -> OpenFile:
        path = Path(self.folder, name)
        info = os.stat(path)
        if kind := kind_of(info.st_mode):  # a FIFO would be waited for
            raise OSError(errno.EINVAL, f"is {kind} and no regular file", str(path))
        fd = open_direct(path, write=False) if info.st_size > SMALL else None
        return OpenFile(os.open(path, os.O_RDONLY), False) if fd is None else OpenFile(fd, True)

    def _buffer(self, size: int) -> np.ndarray:
        buffer = getattr(self.local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self.local.buffer = aligned_memory(size)
        return buffer

    def close(self) -> None:
        for file in self.open.values():
            os.close(file.fd)
        self.open.clear()


def aligned_memory(size: int) -> np.ndarray:
    """Allocate `size` zero bytes aligned to a page; large sizes to a huge page, so that direct transfers need fewer
    descriptors."""
    slack = HUGE if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    memory = mmap.mmap(-1, round_to_pages(max(size, 1)) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack:
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    begin = -raw.ctypes.data % HUGE if slack else 0
    return raw[begin : begin + round_to_pages(max(size, 1))]


def as_integers(x: Tensor) -> np.ndarray:
    """View the memory of a CPU tensor as integers of its elements' width."""
    return x.view(WORDS[x.dtype.itemsize]).numpy()


def as_tensor(raw: np.ndarray) -> Tensor:
    """A uint8 tensor of some bytes; it shares their memory if that is writable."""
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy())


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor.

    A large one is in huge pages, whose first use is a hundred times faster than that of small ones.
    """
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.from_numpy(aligned_memory(size)[:size]).view(dtype).view(shape)
        if size >= HUGE
        else torch.empty(shape, dtype=dtype)
    )


Box = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (start, size) -> elements of this rank's shard


class TileFile:
    """A part being written: call `fill` and `write` for each of its slabs, in any order and from any thread.

    path: (leaf name) -> the folder of its array, called once that is known. pending_slabs: the number of slabs still to
    be written.
    """

    def __init__(self, name: str, layout: ChunkLayout, index: Index, path: Callable[[str], Folder]) -> None:
        self.name, self.layout, self.index, self.path = name, layout, index, path
        self.pending_slabs, self.sum, self.digest = 0, 0, 0
        self.lock = threading.Lock()
        self.table = np.zeros((layout.chunks, 2), "<u8")
        self.sums = np.zeros(layout.chunks, "<u4")
        self.file: FileWriter | ObjectWriter | None = None

    @property
    def number(self) -> int:
        return self.layout.number(self.index)

    def fill(
        self, raw: Tensor, slab: Slab, give: Box, shard_start: Index, reading: SnapshotReader | None = None
    ) -> Copied:
        """Copy a slab's elements into `raw` in file order; from a GPU, start to.

        give: reads boxes of this rank's shard. shard_start: the start of the shard in the leaf. reading: of its GPU.
        """
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

    def _write_compressed(self, file: FileWriter | ObjectWriter, packed: list[np.ndarray], slab: Slab) -> None:
        for number, data in enumerate(packed, slab.first):
            size = len(data) + CRC
            block = aligned_memory(size)
            block[: len(data)] = data
            self.sums[number] = append_crc(block[None], len(data))[0]
            offset = file.append(size) if self.layout.chunks > 1 else 0
            self.table[number] = offset, size
            file.write_at(torch.from_numpy(block), size, offset)

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
            file.write_at(torch.from_numpy(head), len(head), 0)
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

    def write_at(self, raw: Tensor, size: int, offset: int) -> None:
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
