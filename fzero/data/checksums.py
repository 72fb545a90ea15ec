"""Checksums of a corpus: the crc32c of every CHUNK bytes of its token and document files.

SPLIT.sums holds them as little-endian uint32, of SPLIT.bin and then SPLIT.docs; meta.json has the SHA-256 of that file,
so its digest stands for the corpus. A chunk is compared when it is read for the first time. Corpora of earlier versions
have no checksums.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fzero.core.digest import crc32c
from fzero.core.files import naming, open_to_write, writing

CHUNK = 1 << 16  # bytes
FIX = "put the file back, or prepare the corpus again (fzero data prepare)"


class SummedFile:
    """A file being written, and the checksums of its chunks: `sums` is whole once it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open(open_to_write(path, "new"), "wb")  # noqa: SIM115  (closed with this one)
        self.sums: list[int] = []
        self.size = self.crc = 0

    def write(self, data: bytes) -> None:
        """Append some bytes."""
        with naming(self.path):
            self.file.write(data)
        view = memoryview(data)
        while view:
            chunk = view[: CHUNK - self.size % CHUNK]
            self.crc, self.size, view = crc32c(chunk, self.crc), self.size + len(chunk), view[len(chunk) :]
            if self.size % CHUNK == 0:
                self.sums.append(self.crc)
                self.crc = 0

    def close(self) -> None:
        """Write the rest."""
        with naming(self.path):
            self.file.close()
        if self.size % CHUNK:
            self.sums.append(self.crc)
            self.size = self.crc = 0


def write_sums(path: Path, files: list[SummedFile]) -> str:
    """Write the checksums of closed files to `path`; returns the SHA-256 of that file."""
    raw = np.array([crc for file in files for crc in file.sums], "<u4").tobytes()
    with writing(path, "new") as file:
        file.write(raw)
    return hashlib.sha256(raw).hexdigest()


class ChunkSums:
    """The checksums of a file's chunks, of which each is compared once."""

    def __init__(self, path: Path, content: np.ndarray, sums: np.ndarray) -> None:
        """content: the bytes (uint8) of the file, memory-mapped."""
        self.path, self.content, self.sums = path, memoryview(content), memoryview(sums)  # faster to index than arrays
        self.left = bytearray(b"\1") * len(sums) + b"\0"  # 1 for each chunk that was not compared so far
        self.near = np.frombuffer(self.left, np.uint8).copy()  # 1 where it or the next one was not
        self.count = len(sums)

    def expect(self, begin: np.ndarray, size: int) -> None:
        """Compare the chunks of `size` bytes from each of `begin` that are new; raises ValueError naming one."""
        # Most calls find nothing to do. This costs two microseconds, a thousandth of a small batch's reading.
        if not self.count or (size <= CHUNK and 1 not in self.near[begin // CHUNK].tobytes()):
            return
        for start in begin.tolist():
            for chunk in range(start // CHUNK, (start + size - 1) // CHUNK + 1):
                if self.left[chunk]:
                    self._compare(chunk)

    def _compare(self, chunk: int) -> None:
        """Compare a chunk for the first time."""
        if not self._matches(chunk):
            raise ValueError(f"{line(self, chunk)}; {FIX}")
        self.left[chunk] = 0
        self.count -= 1
        self.near[chunk] = self.left[chunk + 1]
        if chunk:
            self.near[chunk - 1] = self.left[chunk - 1]

    def damaged(self) -> list[int]:
        """The numbers of all chunks that do not match."""
        return [chunk for chunk in range(len(self.sums)) if not self._matches(chunk)]

    def _matches(self, chunk: int) -> bool:
        return crc32c(self.content[chunk * CHUNK : (chunk + 1) * CHUNK]) == self.sums[chunk]


def line(sums: ChunkSums, chunk: int) -> str:
    """The line that says that a chunk is damaged."""
    end = min(len(sums.content), (chunk + 1) * CHUNK)
    return f"{sums.path}: damaged: the bytes {chunk * CHUNK:,} to {end - 1:,} do not match their checksum"


def read_sums(folder: Path, split: str, sha256: str, files: list[np.ndarray]) -> list[ChunkSums]:
    """The ChunkSums of a split's files, whose bytes are `files`; raises ValueError if they are damaged."""
    path = folder / f"{split}.sums"
    raw = path.read_bytes() if path.is_file() else None
    parts = split_sums(raw, str(path), sha256, [len(content) for content in files])
    names = (f"{split}.bin", f"{split}.docs", f"{split}.said")
    return [ChunkSums(folder / name, content, sums) for name, content, sums in zip(names, files, parts)]


def split_sums(raw: bytes | None, name: str, sha256: str, sizes: list[int]) -> list[np.ndarray]:
    """The checksums (uint32) of each file of a split, out of the content of SPLIT.sums."""
    counts = [-(-size // CHUNK) for size in sizes]
    if raw is None or hashlib.sha256(raw).hexdigest() != sha256 or len(raw) != 4 * sum(counts):
        fault = "no such file" if raw is None else "damaged: it is not the one that meta.json names"
        raise ValueError(f"{name}: {fault}; {FIX}")
    return np.split(np.frombuffer(raw, "<u4"), np.cumsum(counts)[:-1])
