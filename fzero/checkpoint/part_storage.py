"""The files of a checkpoint's parts, on a local disk or in an object store: reads and writes of byte ranges.

On a disk that takes direct transfers, large files bypass the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fzero.checkpoint.manifest import Folder, join
from fzero.core.files import is_lone_file, kind_of, make_folder, open_to_write, remove_entry
from fzero.core.object_store import Objects
from fzero.core.storage import PAGE, is_url, naming
from fzero.offload.buffer_pool import HUGE, round_to_pages
from fzero.offload.disk_io import open_direct

OPEN = 64  # most files left open after a read, as a process may open fewer than a checkpoint has
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALL = 1 << 18  # files up to this size are read faster through the page cache


class FileWriter:
    """A file that several threads write: `put` each range, then `end`.

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
        room = round_to_pages(size) if direct is not None else size
        if os.fstat(self.fd).st_size not in (size, room) or not size:
            with naming(path):
                os.ftruncate(self.fd, 0)
                if room:
                    os.posix_fallocate(self.fd, 0, room)
        self.end_at, self.direct = 0, direct is not None

    def put(self, raw: Tensor, size: int, offset: int) -> None:
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


class PartReader:
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
            with self._held(name) as file:
                if (end := os.fstat(file.fd).st_size) < offset + size:
                    raise EOFError(end)  # before memory is taken for what a damaged header asks for
                wanted = round_to_pages(size) if file.direct else size
                raw = self._buffer(wanted)
                done = 0
                while done < size:
                    moved = os.preadv(file.fd, [memoryview(raw)[done:wanted]], offset + done)
                    if not moved:
                        break
                    done += moved
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
            found = objects.read(name, start, end)
        except EOFError:
            raise EOFError(len(objects.read(name) or b"")) from None
        if found is None:
            raise FileNotFoundError(2, "No such file", str(join(self.folder, name)))
        return np.frombuffer(found, np.uint8)

    def _range(self, name: str, offset: int, size: int) -> np.ndarray:
        held = getattr(self.local, "whole", None)
        if held is not None and held[0] == name:
            return held[1][offset : offset + size]
        return self._object(name, offset, offset + size)

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[OpenFile]:
        with self.lock:
            file = self.open.pop(name, None) or self._open(name)
            self.open[name] = file
            file.users += 1
            for old in [key for key, one in self.open.items() if not one.users][: max(0, len(self.open) - OPEN)]:
                os.close(self.open.pop(old).fd)
        try:
            yield file
        finally:
            with self.lock:
                file.users -= 1

    def _open(self, name: str) -> OpenFile:
        path = Path(self.folder, name)
        seen = os.stat(path)
        if kind := kind_of(seen.st_mode):  # a FIFO would be waited for
            raise OSError(errno.EINVAL, f"is {kind} and no regular file", str(path))
        fd = open_direct(path, write=False) if seen.st_size > SMALL else None
        return OpenFile(os.open(path, os.O_RDONLY), False) if fd is None else OpenFile(fd, True)

    def _buffer(self, size: int) -> np.ndarray:
        held = getattr(self.local, "buffer", None)
        if held is None or len(held) < size:
            held = self.local.buffer = aligned_memory(size)
        return held

    def close(self) -> None:
        for file in self.open.values():
            os.close(file.fd)
        self.open.clear()


def aligned_memory(size: int) -> np.ndarray:
    """Allocate `size` zero bytes aligned to a page; large sizes to a huge page, so that direct transfers need fewer
    descriptors."""
    room = HUGE if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    memory = mmap.mmap(-1, round_to_pages(max(size, 1)) + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if room:
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    begin = -raw.ctypes.data % HUGE if room else 0
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
