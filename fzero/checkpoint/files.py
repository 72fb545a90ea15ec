"""The files of a checkpoint's parts, on a local disk or in an object store: ranges of bytes in and out, durable when said so.

On a disk that takes direct transfers large files pass the page cache by.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fzero.checkpoint.home import Place, join, store
from fzero.offload.arena import PAGE, padded
from fzero.offload.disk import open_direct
from fzero.offload.folder import is_url

SMALL = 1 << 18  # bytes of a file up to which the page cache is the quicker way


class Writing:
    """A file that is being written by several threads: `put` each range, then `end`."""

    def __init__(self, path: Path, size: int) -> None:
        """size: the bytes of the file; 0 where they are not known yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.size, self.lock = path, size, threading.Lock()
        flags = os.O_RDWR | os.O_CREAT
        direct = open_direct(path, flags) if size > SMALL else None
        self.fd = os.open(path, flags, 0o644) if direct is None else direct
        room = padded(size) if direct is not None else size
        if os.fstat(self.fd).st_size not in (size, room) or not size:
            os.ftruncate(self.fd, 0)
            if room:
                os.posix_fallocate(self.fd, 0, room)
        self.end_at, self.direct = 0, direct is not None

    def put(self, raw: Tensor, size: int, offset: int) -> None:
        """Write the first `size` bytes of `raw` (uint8, whole pages) at `offset`."""
        view = memoryview(raw.numpy())[: padded(size) if self.direct else size]
        while view:
            done = os.pwrite(self.fd, view, offset)
            view, offset = view[done:], offset + done

    def append(self, size: int) -> int:
        """The offset at which `size` bytes more, from the next page on, are to be put."""
        with self.lock:
            offset, self.end_at = self.end_at, self.end_at + padded(size)
            return offset

    def end(self, size: int) -> None:
        """Make the file durable, with `size` bytes."""
        if os.fstat(self.fd).st_size != size:
            os.ftruncate(self.fd, size)
        os.fdatasync(self.fd)
        self.close()

    def close(self) -> None:
        """Close it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Reading:
    """The files of the parts below a place, for threads that each read ranges of them into a buffer of their own."""

    def __init__(self, place: Place) -> None:
        self.place, self.url, self.lock = place, is_url(place), threading.Lock()
        self.store = store(place) if self.url else None
        self.open: dict[str, tuple[int, bool]] = {}
        self.local = threading.local()
        self.read_bytes = 0

    def get(self, name: str, offset: int, size: int) -> np.ndarray:
        """`size` bytes of a file at `offset`, a page of it; good until this thread asks again.

        Raises OSError where it cannot be read, EOFError where it ends before.
        """
        if self.url:
            import tensorstore

            found = self.store.read(name, byte_range=tensorstore.KvStore.ByteRange(offset, offset + size)).result()
            if found.state == "missing":
                raise FileNotFoundError(2, "No such file", str(join(self.place, name)))
            raw = np.frombuffer(found.value, np.uint8)
        else:
            fd, direct = self._open(name)
            wanted = padded(size) if direct else size
            raw = self._buffer(wanted)
            done = 0
            while done < size:
                moved = os.preadv(fd, [memoryview(raw)[done:wanted]], offset + done)
                if not moved:
                    break
                done += moved
                if direct and done % PAGE:
                    break  # the file's end
            raw = raw[: min(done, size)]
        self.read_bytes += len(raw)
        if len(raw) < size:
            raise EOFError(offset + len(raw))
        return raw[:size]

    def size(self, name: str) -> int:
        """The bytes of a file; raises OSError where it is not there."""
        if not self.url:
            return os.stat(join(self.place, name)).st_size
        return len(self.store.read(name).result().value)

    def _open(self, name: str) -> tuple[int, bool]:
        with self.lock:
            if name not in self.open:
                path = Path(self.place, name)
                fd = open_direct(path, os.O_RDONLY) if os.stat(path).st_size > SMALL else None
                self.open[name] = (os.open(path, os.O_RDONLY), False) if fd is None else (fd, True)
            return self.open[name]

    def _buffer(self, size: int) -> np.ndarray:
        held = getattr(self.local, "buffer", None)
        if held is None or len(held) < size:
            held = self.local.buffer = aligned(size)
        return held

    def close(self) -> None:
        """Close the files."""
        for fd, _ in self.open.values():
            os.close(fd)
        self.open.clear()


def aligned(size: int) -> np.ndarray:
    """`size` bytes of memory that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, padded(max(size, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def tensor_of(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor in some bytes."""
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype).reshape(shape)
