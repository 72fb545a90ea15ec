"""Read the texts of a column of .parquet and .arrow files, such as those of a dataset that Hugging Face's `datasets`
saved. It needs pyarrow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fzero.core import packages
from fzero.core.foreign import LARGEST, read_json

SUFFIXES = (".parquet", ".arrow")
ROWS = 256  # read at a time, or fewer of
BATCH = 1 << 23  # bytes
BLOCK = 1 << 20  # bytes of a text that are copied together
END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream of Arrow


def column_of(
    path: Path, name: str, key: str, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, Sequence[bytes] | None]]:
    """(the number of a row, from 0 on, and its text at `key` in blocks of UTF-8, or None) of a file, a few rows in
    memory at a time.

    name: of the file, for messages. begin, end: the row groups of a .parquet to read; None: to the last. Raises
    ValueError if pyarrow is not installed, the file is damaged or truncated, has no column of texts of this name, or,
    of a .parquet, a text of more than 64 MB, which pyarrow reads whole.
    """
    with _sound(path, name):
        if path.suffix == ".parquet":
            row, batches = _parquet(path, name, key, begin, end)
        else:
            row, batches = 0, _arrow(path, name, key)
        for batch in batches:
            for scalar in batch:
                found = scalar.as_buffer() if scalar.is_valid else None
                if found is not None and path.suffix == ".parquet" and found.size > LARGEST:
                    raise ValueError(
                        f"{name}, row {row}: a text of {found.size:,} bytes; at most {LARGEST:,} are read of a row of "
                        ".parquet: split it, or save it as .arrow or .txt"
                    )
                yield row, Blocks(found) if found is not None and found.size else None
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
        said = " ".join(str(error).split())
        raise ValueError(f"{name}: not a sound {path.suffix} file ({said}); replace it or leave it out") from None


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
            batch_size=rows_at_once(file.metadata.row_group(group)),
            row_groups=[group],
            columns=[key],
            use_threads=False,
        )
    )
    return first, batches


def rows_at_once(group: Any) -> int:
    """How many rows of a group are read together, by what they have in the mean."""
    return max(1, min(ROWS, BATCH * group.num_rows // max(1, group.total_byte_size)))


def _arrow(path: Path, name: str, key: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        whole = file.read(6) == b"ARROW1"  # of a file with an index; else a stream
        file.seek(0)
        if whole:
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
    """The files of a folder that `datasets` saved (save_to_disk), in their order; None for another folder.

    Raises ValueError for one of several splits, and where a file is missing.
    """
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
    if not isinstance(names, list) or not all(isinstance(one, dict) and "filename" in one for one in names):
        raise ValueError(f"{folder / 'state.json'}: does not list the files of a dataset (_data_files); save it again")
    found = [folder / Path(str(one["filename"])).name for one in names]
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path}: no such file, but state.json lists it; put it back, or save the dataset again")
    return found
