"""The tokens of a corpus in an object store, as an array whose elements are read when they are asked for.

A token file is read by pieces of one size, compared with the checksums that the run began with, and kept in a cache on
this machine; a piece that does not match is fetched again. A store that does not answer is asked again until `retry_s`
have passed. A cached piece is compared when a process first reads it, 64 KiB at a time.

The cache, which all processes of a machine share:

    pieces/lock       locked (flock) by a process that writes a piece or makes room; the bytes of all pieces, as text
    pieces/partial    a piece that is being written, before it is renamed; what is left of one is written over
    pieces/NAME       a piece

The number in `lock` is raised before a piece is written and lowered after pieces are removed, so that after a kill it
is at most too high. The pieces read longest ago (mtime, within TOUCH_S) are removed first; a removed piece is emptied,
as others may have it open.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from fzero.core.digest import crc32c
from fzero.core.files import make_folder, naming, open_to_write, writing
from fzero.core.storage import Objects, Refused, user_folder
from fzero.data.checksums import CHUNK

LOCK, PARTIAL = "lock", "partial"
RETAINED_SHARE = 0.9  # the share of the bytes that is kept where room is made
LOCK_BYTES = 32  # bytes of the lock's own text
TOUCH_S = 5.0  # between notes of a piece's readings, which take longer than the readings
MOST_TOUCHED = 100_000  # names that are remembered, some MB
MOST_OPEN = 128  # files


class PieceCache:
    """The pieces in the folder `pieces` below `folder`, of at most `max_bytes` bytes together; thread-safe.

    >>> import tempfile
    >>> cache = PieceCache(Path(tempfile.mkdtemp()), max_bytes=200)
    >>> cache.write("a/0", bytes(40))
    >>> cache.write("a/1", bytes(40))
    >>> cache.read_into([("a/0", 8, memoryview(bytearray(16)))]), cache.contains("a/1"), cache.contains("a/2")
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
        """Fill each part (name, start, out) from a piece; how many bytes it has, None if there is no such piece."""
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
        """Put a piece in place, whole or not at all, after making room; `anew`: in place of one that is there."""
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


LARGE, SMALL = 64 * CHUNK, CHUNK  # bytes of a piece: of files that fit into the cache, and of others
MAX_PENDING_BYTES = 64 << 20  # bytes that are on their way at a time, in at most MOST_COMING pieces
MAX_PENDING = 64  # requests on their way at a time
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0  # between two tries; each wait is twice the one before
FETCHES = 4  # of a piece that does not match its checksum
MIN_CACHE_BYTES = 1 << 20  # bytes of a cache
JITTER = random.Random()  # of waits, so that ranks do not ask all at once; no content follows from it
# Whether the work of this thread is still asked for; a wait for a store ends when it is not.
IS_NEEDED: ContextVar[Callable[[], bool]] = ContextVar("asked_for", default=lambda: True)


class Reading(NamedTuple):
    """How the tokens of a corpus in an object store are read."""

    cache: Path | None = None  # the folder of the cache; None: of the user's caches
    cache_bytes: int = 20 * 10**9
    retry_s: float = 300.0  # how long a store may be away
    piece: int = 0  # bytes; 0: LARGE if the corpus fits into the cache, else SMALL

    def piece_bytes(self, size: int) -> int:
        """The bytes of a piece of a corpus of `size` bytes."""
        return self.piece or (LARGE if size <= self.cache_bytes else SMALL)

    def open_cache(self) -> PieceCache:
        """The cache; raises ValueError if it is too small."""
        if self.cache_bytes < MIN_CACHE_BYTES:
            raise ValueError(
                f"the cache has {self.cache_bytes:,} bytes; give it {MIN_CACHE_BYTES:,} or more (data.cache_gb)"
            )
        folder = self.cache or user_folder("XDG_CACHE_HOME")
        piece_cache = OPENED.get((folder, self.cache_bytes))
        if piece_cache is None:
            piece_cache = OPENED[folder, self.cache_bytes] = PieceCache(folder, self.cache_bytes)
        return piece_cache


READING = Reading()
# The caches that this process uses, each once, so that all corpora together have so many files open at most.
OPENED = WeakValueDictionary[tuple[Path, int], PieceCache]()


class TokenFile(NamedTuple):
    """A token file in an object store."""

    url: str  # of the corpus
    name: str
    dtype: np.dtype
    count: int  # tokens
    sums: np.ndarray  # uint32: the crc32c of each chunk of CHUNK bytes
    key: str  # the SHA-256 of the corpus' meta.json


class RemoteTokens:
    """The tokens of a file as an array whose elements are read on request; thread-safe."""

    def __init__(self, file: TokenFile, reading: Reading, corpus_bytes: int) -> None:
        """corpus_bytes: of all token files of the corpus."""
        self.file, self.retry_s, self.cache = file, reading.retry_s, reading.open_cache()
        self.objects = Objects(file.url)
        self.piece, self.nbytes = reading.piece_bytes(corpus_bytes), file.count * file.dtype.itemsize
        self.folder = f"{file.key[:32]}/{file.name}-{self.piece // 1024}"
        self.dtype, self.itemsize, self.shape = file.dtype, file.dtype.itemsize, (file.count,)
        # Less than the cache holds, so that what is read ahead is still there when it is asked for.
        self.max_pending = max(
            1, min(MAX_PENDING, MAX_PENDING_BYTES // self.piece, reading.cache_bytes // (4 * self.piece))
        )
        self.pending: dict[int, Any] = {}  # piece -> its request
        self.unchecked = bytearray(b"\1") * len(file.sums)  # 1 for each chunk that was not compared so far
        self.chunk = memoryview(bytearray(CHUNK))  # one that is compared
        self.broken = set[int]()  # pieces that are damaged in the cache
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return self.file.count

    def __getitem__(self, index: np.ndarray | slice) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        flat, out = index.ravel(), np.empty(index.size, self.dtype)
        run_starts = np.ones(flat.size, bool)
        run_starts[1:] = flat[1:] != flat[:-1] + 1
        begins = np.flatnonzero(run_starts)
        self.read(out, begins, flat[begins], np.diff(begins, append=flat.size))
        return out.reshape(index.shape)

    def read(self, out: np.ndarray, places: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> None:
        """Fill parts of `out`: from each of `places` on, `counts` tokens from the token of `firsts` on."""
        if len(firsts) and not 0 <= firsts.min() <= (firsts + counts).max() <= len(self):
            raise IndexError(
                f"tokens {firsts.min():,} to {(firsts + counts).max() - 1:,} of the {len(self):,} of {self.file.name}"
            )
        buffer, size, missing = memoryview(out.view(np.uint8)), self.itemsize, dict[int, list[tuple[int, memoryview]]]()
        cached_reads = list[tuple[int, int, memoryview]]()
        with self.lock:
            for position, begin, remaining in zip(
                (places * size).tolist(), (firsts * size).tolist(), (counts * size).tolist()
            ):
                while remaining:
                    piece, offset = divmod(begin, self.piece)
                    end = min(begin + remaining, begin - offset + self.piece)
                    view = buffer[position : position + end - begin]
                    if 1 in self.unchecked[begin // CHUNK : -(-end // CHUNK)] and not self._compare(piece, begin, end):
                        missing.setdefault(piece, []).append((offset, view))
                    else:
                        cached_reads.append((piece, offset, view))
                    position, begin, remaining = position + len(view), end, remaining - len(view)
            read_counts = self.cache.read_into(
                [(self._name(piece), offset, view) for piece, offset, view in cached_reads]
            )
            for (piece, offset, view), count in zip(cached_reads, read_counts):
                if count != len(view):
                    missing.setdefault(piece, []).append((offset, view))
                    if count is not None:
                        self._note_damage(piece)
            for i, (piece, parts) in enumerate(missing.items()):
                for later in itertools.islice(missing, i, i + self.max_pending):
                    self._begin(later)
                data = memoryview(self._fetch(piece))
                for offset, view in parts:
                    view[:] = data[offset : offset + len(view)]

    def begin(self, *positions: np.ndarray) -> bool:
        """Begin to fetch the missing pieces of these tokens, as many as may be; returns whether that is all."""
        with self.lock:
            self._store_pending()
            for piece in dict.fromkeys((np.concatenate(positions) * self.itemsize // self.piece).tolist()):
                if piece not in self.pending and not self.cache.contains(self._name(piece)):
                    if len(self.pending) >= self.max_pending:
                        return False
                    self._begin(piece)
        return True

    def _compare(self, piece: int, begin: int, end: int) -> bool:
        """Compare the new chunks of the bytes [begin, end) of a cached piece; returns whether they are sound."""
        for chunk in range(begin // CHUNK, -(-end // CHUNK)):
            data, offset = self.chunk[: self.nbytes - chunk * CHUNK], chunk * CHUNK - piece * self.piece
            if not self.unchecked[chunk]:
                continue
            [count] = self.cache.read_into([(self._name(piece), offset, data)])
            if count is None:
                return False
            if count < len(data) or crc32c(data) != self.file.sums[chunk]:
                self._note_damage(piece)
                return False
            self.unchecked[chunk] = 0
        return True

    def _note_damage(self, piece: int) -> None:
        """Note that the cache has a piece that is not sound: it is written anew, and compared again."""
        self.broken.add(piece)
        chunks = range(piece * self.piece // CHUNK, -(-(piece * self.piece + self._size(piece)) // CHUNK))
        self.unchecked[chunks.start : chunks.stop] = b"\1" * len(chunks)

    def _name(self, piece: int) -> str:
        """The name of a piece in the cache: of its content, whatever the URL."""
        return f"{self.folder}/{piece // 1000:06}/{piece % 1000:03}"

    def _size(self, piece: int) -> int:
        return min(self.piece, self.nbytes - piece * self.piece)

    def _begin(self, piece: int) -> None:
        if piece not in self.pending:
            start = piece * self.piece
            self.pending[piece] = self.objects.begin_read(self.file.name, start, start + self._size(piece))

    def _end(self, piece: int) -> bytes | None:
        """The bytes of a piece that was begun; None if there is no such object."""
        try:
            return self.objects.end_read(self.pending.pop(piece), self._size(piece))
        except EOFError:
            return b""

    def _store_pending(self) -> None:
        """Put pieces that have come into the cache; those that failed are asked for when they are needed."""
        for piece in [piece for piece, future in self.pending.items() if future.done()]:
            with contextlib.suppress(OSError):
                data = self._end(piece)
                if data is not None and self._damaged(piece, data) is None:
                    self.cache.write(self._name(piece), data)

    def _fetch(self, piece: int) -> bytes:
        """Fetch a piece and put it into the cache; returns its bytes."""
        start, wait_s, fetches = time.monotonic(), FIRST_WAIT_S, 0
        while True:
            self._begin(piece)
            try:
                data = self._end(piece)
            except Refused:
                raise
            except OSError as error:
                spent = time.monotonic() - start
                if spent + wait_s > self.retry_s:
                    raise OSError(
                        f"{error}; asked for {self.file.name} for {spent:.0f} s (data.retry_minutes); resume the run "
                        "when the store is back"
                    ) from None
                pause(wait_s * JITTER.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if data is None:
                raise OSError(f"{self.file.url}/{self.file.name}: no such object; put the corpus back")
            chunk = self._damaged(piece, data)
            if chunk is None:
                self.cache.write(self._name(piece), data, anew=piece in self.broken)
                self.broken.discard(piece)
                return data
            fetches += 1
            if fetches == FETCHES:
                raise ValueError(
                    f"{self.file.url}/{self.file.name}: damaged, or changed since the run began: its bytes from "
                    f"{chunk * CHUNK:,} on do not match their checksum, fetched {FETCHES} times; put that file back, "
                    "or start a new run"
                )

    def _damaged(self, piece: int, data: bytes) -> int | None:
        """The number of the first chunk of a piece that does not match; None if all do."""
        view, first = memoryview(data), piece * self.piece // CHUNK
        for i in range(-(-self._size(piece) // CHUNK)):
            if crc32c(view[i * CHUNK : (i + 1) * CHUNK]) != self.file.sums[first + i]:
                return first + i
        return None


def pause(seconds: float) -> None:
    """Wait; raises OSError if what this thread does is not asked for any more."""
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        if not IS_NEEDED.get()():
            raise OSError("the wait for an object store has ended with the run")
        time.sleep(min(remaining, 0.05))
