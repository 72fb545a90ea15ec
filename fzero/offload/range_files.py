"""Files that threads read and write by ranges of bytes, below a local folder or a URL: the parts of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fzero.core.files import is_lone_file, make_folder, naming, open_to_write, remove_entry
from fzero.core.host_memory import aligned_memory, round_to_pages
from fzero.core.storage import Folder, Objects, is_url, join
from fzero.core.text_parsing import file_kind
from fzero.offload.disk_io import allocate_space, open_direct, read_range, write_range

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
