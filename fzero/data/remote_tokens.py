"""The tokens of a corpus in an object store, as an array whose elements are read when they are asked for.

A token file is read by pieces of one size, each by one request, compared with the corpus' checksums, and kept in a
cache on this machine (fzero/data/piece_cache.py). What a piece holds is decided by the checksums that the run began
with, never by the store: a piece that does not match is fetched again. A store that does not answer is asked again,
after waits that double, until `retry_s` have passed.

What is in the cache is compared again when a process reads it for the first time, 64 KiB at a time, as the chunks of a
corpus in a folder are.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from fzero.core.crc32c import crc32c
from fzero.core.storage import Objects, Refused, user_folder
from fzero.data.checksums import CHUNK
from fzero.data.piece_cache import PieceCache

LARGE, SMALL = 64 * CHUNK, CHUNK  # bytes of a piece: of files that fit into the cache, and of others
MAX_PENDING_BYTES = 64 << 20  # bytes that are on their way at a time, in at most MOST_COMING pieces
MAX_PENDING = 64
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
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
    """The tokens of a file as an array of one dimension, of which elements are read by an array of their numbers, or by
    a slice; thread-safe.

    Reading raises OSError if the store has been away for `retry_s`, or refuses, and ValueError if what it has is not
    what the run began with.
    """

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
        """Fill parts of `out`, of one dimension and this dtype: from each of `places` on, as many tokens as `counts`
        says, from the token of `firsts` on; all int64 [n]."""
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
        """Begin to fetch the pieces that hold these tokens and are not in the cache, as many as may be on their way;
        returns whether that is all of them."""
        with self.lock:
            self._store_pending()
            for piece in dict.fromkeys((np.concatenate(positions) * self.itemsize // self.piece).tolist()):
                if piece not in self.pending and not self.cache.contains(self._name(piece)):
                    if len(self.pending) >= self.max_pending:
                        return False
                    self._begin(piece)
        return True

    def _compare(self, piece: int, begin: int, end: int) -> bool:
        """Compare the chunks of the bytes [begin, end) in a piece of the cache that were not compared before, whole;
        returns whether they are there, sound."""
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
        """The bytes of a piece that was begun, or what there is of them; None if there is no such object."""
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
        """The number of the first chunk of a piece that does not match its checksum; None if all do."""
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
