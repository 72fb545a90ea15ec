"""The memory through which all transfers to and from a disk pass: allocated ahead of them, and lent as buffers.

And files that threads read and write by ranges of bytes, below a local folder or a URL: the parts of a checkpoint.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.files import is_lone_file, make_folder, naming, open_to_write, remove_entry
from fzero.core.gpu_copies import Copied
from fzero.core.host_memory import HUGE, aligned_memory, allocate_pages, round_to_pages
from fzero.core.storage import PAGE, Folder, Objects, is_url, join
from fzero.core.text_parsing import file_kind
from fzero.offload.disk_io import BUFFERS, allocate_space, open_direct, read_range, write_range

OPEN = 64  # most files left open after a read, as a process may open fewer than a checkpoint has
SMALL = 1 << 18  # files up to this size are read faster through the page cache


class RangeWriter:
    """A file that several threads write: `write_at` each range, or where `append` has reserved one, then `end`."""

    def __init__(self) -> None:
        self.end_at, self.lock = 0, threading.Lock()

    def write_at(self, raw: Tensor, size: int, offset: int) -> None:
        """Write the first `size` bytes of `raw` (uint8, whole pages) at `offset`."""
        raise NotImplementedError

    def append(self, size: int) -> int:
        """Reserve `size` bytes from the next page on; returns their offset."""
        with self.lock:
            offset, self.end_at = self.end_at, self.end_at + round_to_pages(size)
            return offset

    def end(self, size: int) -> None:
        """Set the file's size to `size` bytes and close it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close a file that is not written to its end."""


class FileWriter(RangeWriter):
    """A file on a local disk. Its content is not durable until the file system is synced."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        """name: of the file, below `folder`. size: its bytes; 0 if unknown so far."""
        super().__init__()
        path = self.path = make_folder(folder, *Path(name).parts[:-1]) / Path(name).name
        if not is_lone_file(path):  # else it is a spare file, whose space is used again
            remove_entry(path)
        # A small file costs less through the page cache than a direct write of whole pages.
        direct = open_direct(path, make=True) if size > SMALL else None
        self.direct, self.fd = direct is not None, open_to_write(path, "update") if direct is None else direct
        file_bytes = round_to_pages(size) if self.direct else size
        if os.fstat(self.fd).st_size not in (size, file_bytes) or not size:
            with naming(path):
                os.ftruncate(self.fd, 0)
                allocate_space(self.fd, 0, file_bytes)

    def write_at(self, raw: Tensor, size: int, offset: int) -> None:
        view = memoryview(raw.numpy())[: round_to_pages(size) if self.direct else size]
        with naming(self.path):
            write_range(self.fd, view, offset)

    def end(self, size: int) -> None:
        with naming(self.path):
            # Direct writes end at a page; the file ends here.
            if os.fstat(self.fd).st_size != size:
                os.ftruncate(self.fd, size)
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ObjectWriter(RangeWriter):
    """An object, which is sent to its store when it is complete, and durable then."""

    def __init__(self, folder: str, name: str) -> None:
        super().__init__()
        self.folder, self.name, self.data = folder, name, bytearray()

    def write_at(self, raw: Tensor, size: int, offset: int) -> None:
        with self.lock:
            self.data.extend(bytes(max(0, offset + size - len(self.data))))
            self.data[offset : offset + size] = memoryview(raw.numpy())[:size]

    def end(self, size: int) -> None:
        self.data.extend(bytes(max(0, size - len(self.data))))
        Objects(self.folder).write(self.name, bytes(memoryview(self.data)[:size]))

    def close(self) -> None:
        self.data = bytearray()


@dataclass
class OpenFile:
    """An open file and the number of threads reading it."""

    fd: int
    direct: bool
    users: int = 0


class RangeReader:
    """Reads ranges of the files below a folder or URL, for several threads, each with its own buffer."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.objects = Objects(str(folder)) if is_url(folder) else None
        self.open: dict[str, OpenFile] = {}  # least recently used first
        self.local = threading.local()
        self.read_bytes = 0

    def get(self, name: str, offset: int, size: int) -> np.ndarray:
        """The `size` bytes of a file at `offset`, a multiple of a page; valid until this thread's next call."""
        raw = self._read_file(name, offset, size) if self.objects is None else self._read_object(name, offset, size)
        self.read_bytes += len(raw)
        if len(raw) < size:
            raise EOFError(offset + len(raw))
        return raw

    def _read_file(self, name: str, offset: int, size: int) -> np.ndarray:
        with self._acquire(name) as file:
            if (end := os.fstat(file.fd).st_size) < offset + size:
                raise EOFError(end)  # before memory is taken for what a damaged header asks for
            raw = self._buffer(round_to_pages(size) if file.direct else size)
            return raw[: min(size, read_range(file.fd, memoryview(raw), offset, direct=file.direct))]

    def _read_object(self, name: str, offset: int, size: int) -> np.ndarray:
        cached = getattr(self.local, "whole", None)
        if cached is not None and cached[0] == name:
            return cached[1][offset : offset + size]
        return self._object(name, offset, offset + size)

    def size(self, name: str) -> int:
        """The size of a file in bytes; an object is read whole and kept for this thread's next `get`."""
        if self.objects is None:
            return os.stat(join(self.folder, name)).st_size
        self.local.whole = None
        self.local.whole = (name, self._object(name))
        return len(self.local.whole[1])

    def _object(self, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
        assert self.objects is not None  # only called for a URL
        try:
            content = self.objects.read(name, start, end)
        except EOFError:
            raise EOFError(len(self.objects.read(name) or b"")) from None
        if content is None:
            raise FileNotFoundError(2, "No such file", str(join(self.folder, name)))
        return np.frombuffer(content, np.uint8)

    @contextlib.contextmanager
    def _acquire(self, name: str) -> Iterator[OpenFile]:
        with self.lock:
            file = self.open.pop(name, None) or self._open(name)
            self.open[name] = file
            file.users += 1
            unused = [key for key, open_file in self.open.items() if not open_file.users]
            # A file that a thread reads stays open, whatever the limit.
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
        if kind := file_kind(info.st_mode):  # a FIFO would be waited for
            raise OSError(errno.EINVAL, f"is {kind} and no regular file", str(path))
        fd = open_direct(path, write=False) if info.st_size > SMALL else None
        return OpenFile(os.open(path, os.O_RDONLY), False) if fd is None else OpenFile(fd, True)

    def _buffer(self, size: int) -> np.ndarray:
        buffer = getattr(self.local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self.local.buffer = aligned_memory(size)
        return buffer[:size]

    def close(self) -> None:
        for file in self.open.values():
            os.close(file.fd)
        self.open.clear()


class Buffer(NamedTuple):
    """Memory of a buffer pool as a tensor; it is returned to the pool when the last tensor that shares it is freed."""

    raw: Tensor  # uint8, whole pages
    view: Tensor  # the same memory, in the shape and dtype asked for


class BufferPool:
    """A pool of `size` bytes, rounded up to whole huge pages, from which `allocate` lends Buffers.

    The memory is that of `allocate_pages`: one region, and one more for each time that the pool grew. fixed: whether it
    never grows.
    """

    def __init__(self, size: int, *, fixed: bool = True) -> None:
        self.size, self.fixed = 0, fixed
        self.regions: list[tuple[int, np.ndarray]] = []  # the offset of its first byte, and its memory
        self.free: list[tuple[int, int]] = []  # (offset, size), in order
        self.returned: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.leaving: deque[Copied] = deque()  # memory that copies to a GPU read, oldest first
        self.lock = threading.Lock()
        self.lent = self.peak = 0
        self.grow(size)

    def grow(self, size: int) -> None:
        """Add a region of `size` bytes, rounded up to whole huge pages."""
        size = -(-size // HUGE) * HUGE
        memory = allocate_pages(
            size, "the offload buffers", f"give them less memory ({BUFFERS})", align=HUGE, awaited=True
        )
        with self.lock:
            # a page lies between two regions, so that free memory of both is never merged
            start = self.regions[-1][0] + len(self.regions[-1][1]) + PAGE if self.regions else 0
            self.regions.append((start, memory))
            self.free.append((start, size))
            self.size += size

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, busy: Callable[[], bool] = lambda: False) -> Buffer:
        """Lend an uninitialised Buffer of `shape`; while `busy()`, wait for memory to be returned.

        If the pool is too small for the buffers that are held at the same time it grows, or raises ValueError if it is
        fixed.
        """
        n = math.prod(shape) * dtype.itemsize
        size = max(PAGE, round_to_pages(n))
        while True:
            # called first: a request that ends after this call has returned its memory before the next check
            working = busy()
            self._release()
            offset = self._find_range(size)
            if offset is not None:
                break
            if self._release(wait=True):
                continue
            if not working and self.returned.empty():
                if self.fixed:
                    raise ValueError(
                        f"the offload buffers are {self.size:,} bytes, of which {self.lent:,} are in use, and {size:,} "
                        f"more are needed at once; give them more, or leave their size out ({BUFFERS})"
                    )
                self.grow(size)
                continue
            with suppress(Empty):
                # Put back, as `_find_range` merges it. Seconds: then everything is looked at again, as a transfer may
                # end without returning memory.
                self.returned.put(self.returned.get(timeout=0.05))
        start, memory = self.regions[bisect.bisect(self.regions, offset, key=lambda region: region[0]) - 1]
        block = memory[offset - start : offset - start + size]
        raw = torch.from_numpy(block)
        weakref.finalize(block, self._return, offset, size).atexit = False
        return Buffer(raw, raw[:n].view(dtype).view(shape))

    def retain(self, raw: Tensor, copied: Copied) -> None:
        """Lend `raw`, memory of a buffer, until a copy that reads it is made, whoever drops it before."""
        with self.lock:
            self.leaving.append(Copied(raw, copied.event))  # not what the GPU has of it

    def _release(self, *, wait: bool = False) -> bool:
        """Forget what `retain` was given and is copied; returns whether there was any; wait: for the oldest copy."""
        with self.lock:
            oldest = self.leaving[0] if wait and self.leaving else None
        if oldest is not None:
            # Without the lock, which the disk's threads take in `retain`.
            oldest.finish()
        with self.lock:
            finished = []
            while self.leaving and self.leaving[0].is_done():
                finished.append(self.leaving.popleft())
        return bool(finished)

    def drain(self) -> None:
        """Wait until nothing that `retain` was given is being copied."""
        with self.lock:
            newest = self.leaving[-1] if self.leaving else None
        if newest is not None:
            newest.finish()  # on one stream, so the others are made too
        self._release()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lies in this memory."""
        address = storage.data_ptr()
        return any(memory.ctypes.data <= address < memory.ctypes.data + len(memory) for _, memory in self.regions)

    def _return(self, offset: int, size: int) -> None:
        # Called when the last reference is dropped, in any thread, even by a garbage collection inside `allocate`:
        # so it may not take a lock.
        self.returned.put((offset, size))

    def _find_range(self, size: int) -> int | None:
        with self.lock:
            returned = []
            with suppress(Empty):
                while True:
                    returned.append(self.returned.get_nowait())
            if returned:
                self._merge(returned)
            for i, (offset, length) in enumerate(self.free):
                if length >= size:
                    self.free[i : i + 1] = [(offset + size, length - size)] if length > size else []
                    self.lent += size
                    self.peak = max(self.peak, self.lent)
                    return offset
            return None

    def _merge(self, returned: list[tuple[int, int]]) -> None:
        # Neighbours are merged, so that a large buffer fits again.
        self.lent -= sum(size for _, size in returned)
        pieces = sorted([*self.free, *returned])
        merged = [pieces[0]]
        for start, length in pieces[1:]:
            last, last_length = merged[-1]
            if last + last_length == start:
                merged[-1] = (last, last_length + length)
            else:
                merged.append((start, length))
        self.free = merged
