"""A folder of pieces of files, bounded in bytes, which all processes of a machine share.

    pieces/lock       locked (flock) by a process that writes a piece or makes room; the bytes of all pieces, as text
    pieces/partial    a piece that is being written, before it is renamed; what is left of one is written over
    pieces/NAME       a piece

The number in `lock` is raised before a piece is written and lowered after pieces are removed, so that after a kill it
is too high at most, until the pieces are counted again. The pieces read longest ago are removed first; the time of a
file's last change is that of its last reading, within TOUCH_S. Nothing here says whether a piece is sound: who reads it
has checksums.

A process keeps the files open that it read last, as opening one takes longer than reading a row of it. So that a piece
that is removed takes no room on the disk while others have it open, it is emptied then; who finds less than it asked
for, in a file that has no name any more, looks for the piece anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fzero.core.files import make_folder, naming, open_to_write, writing

LOCK, PARTIAL = "lock", "partial"
RETAINED_SHARE = 0.9  # the share of the bytes that is kept where room is made
LOCK_BYTES = 32  # bytes of the lock's own text
TOUCH_S = 5.0  # between notes of a piece's readings, which take longer than the readings
MOST_TOUCHED = 100_000
MOST_OPEN = 128  # files


class PieceCache:
    """The pieces in the folder `pieces` below `folder`, of at most `max_bytes` bytes together; thread-safe.

    Raises OSError, naming the folder, if it cannot be written to.

    >>> import tempfile
    >>> cache = PieceCache(Path(tempfile.mkdtemp()), max_bytes=200)
    >>> cache.write("a/0", bytes(40))
    >>> cache.write("a/1", bytes(40))
    >>> cache.read_into([("a/0", 8, memoryview(bytearray(16)))]), cache.has("a/1"), cache.has("a/2")
    ([16], True, False)
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder / "pieces", max_bytes - LOCK_BYTES
        self.touched: dict[str, float] = {}  # when this process last noted that a piece was read
        self.root = str(self.folder)  # joined faster than a Path
        self.open = OrderedDict[str, int]()  # the files that this process has open, those touched last at the end
        self.lock = threading.Lock()  # of them
        with naming(self.folder):
            make_folder(folder, self.folder.name)
        with self._locked():
            pass

    def contains(self, name: str) -> bool:
        """Whether there is a piece of this name, or was TOUCH_S ago."""
        recent = time.monotonic() - self.touched.get(name, -TOUCH_S) < TOUCH_S
        return recent or os.path.exists(f"{self.root}/{name}")

    def read_into(self, parts: Sequence[tuple[str, int, memoryview]]) -> list[int | None]:
        """Fill each part (name, start, out), out of bytes, with those of a piece from `start` on; return how many it
        has, None if there is no such piece."""
        counts = list[int | None]()
        with self.lock:
            timestamp = time.monotonic()
            for name, start, out in parts:
                fd, count = self.open.get(name), None
                while fd is not None or (fd := self._opened(name)) is not None:
                    count = os.preadv(fd, (out,), start)
                    if count == len(out) or os.fstat(fd).st_nlink:
                        break
                    self._close_piece(name)  # it was removed, and perhaps put back
                    fd = count = None
                if fd is not None and timestamp - self.touched.get(name, -TOUCH_S) >= TOUCH_S:
                    self._touch(name, fd, timestamp)
                counts.append(count)
        return counts

    def _opened(self, name: str) -> int | None:
        """The file of a piece, opened; None if there is no such piece."""
        try:
            fd = os.open(f"{self.root}/{name}", os.O_RDONLY)
        except FileNotFoundError:
            return None
        self.open[name] = fd
        if len(self.open) > MOST_OPEN:
            os.close(self.open.popitem(last=False)[1])
        return fd

    def _touch(self, name: str, fd: int, timestamp: float) -> None:
        """Note that a piece is read."""
        os.utime(fd)
        self.open.move_to_end(name)
        if len(self.touched) >= MOST_TOUCHED:
            self.touched.clear()
        self.touched[name] = timestamp

    def _close_piece(self, name: str) -> None:
        """Close the file of a piece, which is not there any more."""
        self.touched.pop(name, None)
        if (fd := self.open.pop(name, None)) is not None:
            os.close(fd)

    def __del__(self) -> None:
        for fd in getattr(self, "open", {}).values():
            os.close(fd)

    def write(self, name: str, data: bytes, *, anew: bool = False) -> None:
        """Put a piece in place, whole or not at all; one that is there stays, unless it is to be written `anew`.

        Pieces read longest ago are removed before it is written. A piece larger than all room is not kept.
        """
        path, partial = self.folder / name, self.folder / PARTIAL
        with naming(path), self._locked() as lock:
            exists = path.exists()
            if len(data) > self.max_bytes or (exists and not anew):
                return
            total = _number(lock)
            if exists:
                total -= path.stat().st_size
                self._remove(name)
            if total < 0 or total + len(data) > self.max_bytes:
                total = self._evict(len(data))
            os.pwrite(lock, f"{total + len(data):<{LOCK_BYTES - 1}}\n".encode(), 0)
            make_folder(self.folder, *name.split("/")[:-1])
            try:
                with writing(partial, "replace") as file:
                    file.write(data)
                os.replace(partial, path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        with naming(self.folder / LOCK):
            fd = open_to_write(self.folder / LOCK, "update")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _evict(self, size: int) -> int:
        """Remove pieces until `size` more bytes fit; returns the bytes of those that stay."""
        (self.folder / PARTIAL).unlink(missing_ok=True)
        entries, total = [], 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if folder != str(self.folder):
                    path = os.path.join(folder, name)
                    info = os.stat(path)
                    entries.append((info.st_mtime_ns, info.st_size, os.path.relpath(path, self.root)))
                    total += info.st_size
        for _, entry_size, name in sorted(entries):
            if total + size <= RETAINED_SHARE * self.max_bytes or not total:
                break
            self._remove(name)
            total -= entry_size
        return total

    def _remove(self, name: str) -> None:
        """Remove a piece, and what it takes on the disk where a process has it open."""
        with self.lock:
            self._close_piece(name)
        fd = open_to_write(f"{self.root}/{name}", "update", make=False)
        try:
            os.unlink(f"{self.root}/{name}")
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _number(fd: int) -> int:
    """The number in a file; -1 for none."""
    text = os.pread(fd, LOCK_BYTES, 0)
    return int(text) if text.strip().isdigit() else -1
