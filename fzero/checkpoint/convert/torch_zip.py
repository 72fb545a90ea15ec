"""The zip files of torch.save, and their checksums, which torch.load ignores."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from fzero.core.text_parsing import expect_regular


class FileSpan(io.RawIOBase):
    """The bytes [begin, begin + length) of a file, as a file object."""

    def __init__(self, path: Path, begin: int, length: int) -> None:
        super().__init__()
        expect_regular(path)
        self.file = open(path, "rb")  # noqa: SIM115  (closed with this one)
        self.begin, self.length, self.position = begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.position)]
        self.file.seek(self.begin + self.position)
        got = self.file.readinto(view)
        self.position += got
        return got

    def close(self) -> None:
        self.file.close()
        super().close()


def expect_sound(path: Path, begin: int = 0, length: int | None = None) -> None:
    """Raise ValueError naming the file if the zip in these bytes does not match its checksums. Reads it whole, in
    pieces.

    A zip written without checksums (torch.serialization.set_crc32_options) passes.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(
            io.BufferedReader(FileSpan(path, begin, path.stat().st_size if length is None else length), 1 << 20)
        ) as file:
            summed = [info for info in file.infolist() if info.CRC]
            for info in summed:
                with file.open(info) as inside:
                    while inside.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from None
