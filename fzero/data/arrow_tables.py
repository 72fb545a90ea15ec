"""Read the texts of a column of .parquet and .arrow files, which needs pyarrow; and .zst files as streams."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fzero.core import packages
from fzero.core.text_parsing import LARGEST, read_json

READ = 4096  # compressed bytes at a time: they may stand for 100 MB


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file; raises OSError, or EOFError where it ends within a frame.

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
        surplus = b""
        while not self.ready:
            data = surplus or self.file.read(READ)
            if not data:
                if self.within:
                    raise EOFError("it ends inside a frame")
                return 0
            try:
                self.ready, self.within = self.frame.decompress(data), True
            except self.zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            surplus = b""
            if self.frame.eof:
                surplus, self.within = self.frame.unused_data, False
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            if surplus and self.ready:  # of the next frame, for the next call
                self.file.seek(-len(surplus), io.SEEK_CUR)
                surplus = b""
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self.ready))
        view[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self.file.close()
        super().close()


ROWS = 256  # read at a time, or fewer of
BATCH = 1 << 23  # bytes
BLOCK = 1 << 20  # bytes of a text that are copied together
END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream of Arrow


def column_of(
    path: Path, name: str, key: str, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, Sequence[bytes] | None]]:
    """(the number of a row, its text at `key` in blocks of UTF-8, or None) of a file, a few rows at a time."""
    with _sound(path, name):
        if path.suffix == ".parquet":
            row, batches = _parquet(path, name, key, begin, end)
        else:
            row, batches = 0, _arrow(path, name, key)
        for batch in batches:
            for scalar in batch:
                buffer = scalar.as_buffer() if scalar.is_valid else None
                if buffer is not None and path.suffix == ".parquet" and buffer.size > LARGEST:
                    raise ValueError(
                        f"{name}, row {row}: a text of {buffer.size:,} bytes; at most {LARGEST:,} are read of a row of "
                        ".parquet: split it, or save it as .arrow or .txt"
                    )
                yield row, Blocks(buffer) if buffer is not None and buffer.size else None
                row += 1


class Blocks(Sequence[bytes]):
    """The bytes of a text in blocks, each copied when it is asked for."""

    def __init__(self, buffer: Any) -> None:
        self.view = memoryview(buffer)

    def __len__(self) -> int:
        return -(-len(self.view) // BLOCK)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bytes(self.view[index * BLOCK : (index + 1) * BLOCK])


def group_bytes(path: Path, name: str) -> list[int]:
    """The bytes of each row group of a .parquet; raises ValueError as `column_of` does."""
    with _sound(path, name):
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            return [group.total_byte_size for group in groups]


@contextlib.contextmanager
def _sound(path: Path, name: str) -> Iterator[None]:
    """A context whose errors say that a file is damaged, or that pyarrow is not there."""
    pyarrow = packages.load("pyarrow", name)
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: not a sound {path.suffix} file ({reason}); replace it or leave it out") from None


def _parquet(path: Path, name: str, key: str, begin: int, end: int | None) -> tuple[int, Iterator[Any]]:
    """The number of the first row of these row groups, and their column by batches."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False)  # no column whole in memory
    expect_texts(file.schema_arrow, name, key)
    groups = range(begin, file.metadata.num_row_groups if end is None else end)
    first = sum(file.metadata.row_group(group).num_rows for group in range(begin))
    # Without threads of its own: its pool would not come along into a process that is forked.
    batches = (
        batch.column(0)
        for group in groups
        for batch in file.iter_batches(
            batch_size=rows_per_read(file.metadata.row_group(group)),
            row_groups=[group],
            columns=[key],
            use_threads=False,
        )
    )
    return first, batches


def rows_per_read(group: Any) -> int:
    """How many rows of a group are read together, by what they have in the mean."""
    return max(1, min(ROWS, BATCH * group.num_rows // max(1, group.total_byte_size)))


def _arrow(path: Path, name: str, key: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        has_index = file.read(6) == b"ARROW1"  # of a file with an index; else a stream
        file.seek(0)
        if has_index:
            opened: Any = pyarrow.ipc.open_file(file)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            # pyarrow takes a stream that was cut off between two parts for a whole one.
            file.seek(max(0, file.size() - len(END)))
            if file.read() != END:
                raise OSError("it does not end with the mark of a stream's end, so that it is truncated")
            file.seek(0)
            opened = batches = pyarrow.ipc.open_stream(file)
        expect_texts(opened.schema, name, key)
        for batch in batches:
            for begin in range(0, len(batch), ROWS):
                yield batch.column(key).slice(begin, ROWS)


def expect_texts(schema: Any, name: str, key: str) -> None:
    """Raise ValueError if a file has no column of texts of this name."""
    import pyarrow.types as kinds

    if key not in schema.names:
        raise ValueError(
            f"{name}: wanted a column {key!r}, found {', '.join(schema.names)}; name the right one with "
            f"text_key= (--text-key)"
        )
    kind = schema.field(key).type
    if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)):
        raise ValueError(
            f"{name}: the column {key!r} is of {kind}, wanted texts; name another with text_key= (--text-key)"
        )


def saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a folder that `datasets` saved, in their order; None for another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json", wide=True).get("splits", [])
        raise ValueError(
            f"{folder}: is a dataset of the splits {', '.join(map(str, splits))}; name one: {folder / str(splits[0])}"
            if isinstance(splits, list) and splits
            else f"{folder}: is a dataset of no split; name a folder with rows"
        )
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    names = read_json(folder / "state.json", wide=True).get("_data_files")
    if not isinstance(names, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in names):
        raise ValueError(f"{folder / 'state.json'}: does not list the files of a dataset (_data_files); save it again")
    paths = [folder / Path(str(entry["filename"])).name for entry in names]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file, but state.json lists it; put it back, or save the dataset again")
    return paths
