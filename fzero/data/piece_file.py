"""A file of what is known of one piece of the sources, with its checksum: whole when it has its name.

The content, and at the end TAIL: the number of the piece, and the crc32c of the content and that number.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from fzero.core.crc32c import crc32c
from fzero.core.files import writing

TAIL = struct.Struct("<QI")
READ = 1 << 22  # bytes that are compared together


@contextlib.contextmanager
def write_piece(path: Path, number: int) -> Iterator[Callable[[bytes], None]]:
    """A context of a function that appends bytes to the file of a piece, which has its name at the end."""
    partial, crc = path.with_suffix(".partial"), 0
    with writing(partial, "replace") as file:

        def write(data: bytes) -> None:
            nonlocal crc
            file.write(data)
            crc = crc32c(data, crc)

        yield write
        file.write(TAIL.pack(number, crc32c(struct.pack("<Q", number), crc)))
    os.replace(partial, path)


def sound_bytes(path: Path, number: int) -> int | None:
    """The bytes of the content of the file of a piece, which are read once, a few in memory at a time; None if the file
    is not there, damaged, or of another piece.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "3")
    >>> with write_piece(path, 3) as write:
    ...     write(b"some")
    ...     write(b"thing")
    >>> sound_bytes(path, 3), sound_bytes(path, 4)
    (9, None)
    """
    if not path.is_file() or path.stat().st_size < TAIL.size:
        return None
    size, crc = path.stat().st_size - TAIL.size, 0
    with path.open("rb") as file:
        for begin in range(0, size, READ):
            crc = crc32c(file.read(min(READ, size - begin)), crc)
        own, wanted = TAIL.unpack(file.read(TAIL.size))
    return size if own == number and crc32c(struct.pack("<Q", number), crc) == wanted else None
