"""Read a .zst file as a stream of bytes; one that ends inside a frame is an error, as with gzip."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from fzero.core import packages

READ = 4096  # compressed bytes at a time: they may stand for 100 MB


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file of one frame or several; raises OSError where it is not sound, EOFError
    where it ends within a frame, and ValueError without the package zstandard.

    >>> import tempfile, zstandard
    >>> path = Path(tempfile.mkdtemp(), "text.zst")
    >>> _ = path.write_bytes(zstandard.compress(b"one, ") + zstandard.compress(b"two"))
    >>> io.BufferedReader(ZstdFile(path)).read()
    b'one, two'
    """

    def __init__(self, path: Path) -> None:
        self.file, self.ready = path.open("rb"), b""
        self.zstandard = packages.load("zstandard", path.name)
        self.frame = self.zstandard.ZstdDecompressor().decompressobj()
        self.within = False  # a frame that has begun

    def readable(self) -> bool:
        """True: the one thing that it does."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there are bytes; 0 at the end."""
        left = b""
        while not self.ready:
            data = left or self.file.read(READ)
            if not data:
                if self.within:
                    raise EOFError("it ends inside a frame")
                return 0
            try:
                self.ready, self.within = self.frame.decompress(data), True
            except self.zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            left = b""
            if self.frame.eof:
                left, self.within = self.frame.unused_data, False
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            if left and self.ready:  # of the next frame, for the next call
                self.file.seek(-len(left), io.SEEK_CUR)
                left = b""
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self.ready))
        view[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self.file.close()
        super().close()
