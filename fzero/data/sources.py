"""Read documents from files, folders, standard input or Python's standard library, as one stream of texts.

A .txt or .py file is one document, and so is each line of a .jsonl and each row of a .parquet or .arrow file; .gz and
.zst are decompressed. `cut` divides the files into pieces, each of which can be read by itself.
"""

import codecs
import contextlib
import gzip
import io
import os
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fzero import data
from fzero.core.files import writing
from fzero.core.text_parsing import LARGEST, expect_regular, parse_json_value

LARGEST_DOCUMENT = 1 << 32  # bytes, decompressed: a small .gz may hold petabytes
BLOCK = 1 << 20  # bytes of a document that are in memory together
PIECES, SMALLEST, LARGEST_PIECE = 256, 1 << 20, 1 << 25  # how many pieces, and the least and most bytes of one
TEXTS, PACKED = (".txt", ".jsonl", ".py"), (".gz", ".zst")
TABLES = (".parquet", ".arrow")
SUFFIXES = (*TEXTS, *TABLES)
ALLOWED = (
    f"sources are files ({', '.join(TEXTS)}, each plain, .gz or .zst; "
    f"{', '.join(TABLES)}), folders of those, "
    "'-' (standard input, one text), '-.jsonl' (standard input, one document a line) and 'stdlib' (the source files of "
    "Python's standard library)"
)


class SourceFile(NamedTuple):
    """A file to read documents from."""

    name: str  # for messages
    path: Path
    kind: str  # one of SUFFIXES
    packed: str  # one of PACKED, or ""
    named: bool  # by the user: non-text is an error; in files found in folders it is left out and counted
    unique: bool = False  # leave out a file with the content of another unique file
    # The part to read, in bytes of a plain .jsonl (the lines that begin there) or in row groups of a .parquet.
    begin: int = 0
    end: int | None = None  # None: all of it
    length: int = 0  # bytes, about, as they are stored; known once the files are cut into pieces


class Document(NamedTuple):
    """A text of a source, and why it is left out."""

    file: SourceFile
    number: int  # of its line in the part of the file, from 1 on, or of its row in the file, from 0 on
    read: Callable[[], Iterable[str]]  # its text in blocks, of a large one read anew
    problem: str = ""  # why it is left out: "empty", "binary", "not UTF-8"; "" when it is good

    @property
    def text(self) -> str:
        """The whole text, in memory."""
        return "".join(self.read())

    @property
    def origin(self) -> str:
        """Its place, for messages: "file", "file:line" or "file, row"."""
        if self.file.kind == ".jsonl":
            return _line(self.file, self.number)
        return f"{self.file.name}, row {self.number}" if self.file.kind in TABLES else self.file.name


def find_files(sources: Sequence[str | Path], spool: Path) -> list[SourceFile]:
    """The files of `sources`, in reading order; standard input is copied to the folder `spool`."""
    files = []
    for source in map(str, sources):
        path = Path(source)
        if source in ("-", "-.jsonl"):
            if any(file.name == "standard input" for file in files):
                raise ValueError(f"{source}: standard input is named twice; it can be read once")
            files.append(_spool_stdin(spool / "stdin", jsonl=source != "-"))
        elif source == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            matches = _folder_files(root, (".py",), exclude=("site-packages", "dist-packages"))
            if not matches:
                raise ValueError(
                    f"stdlib: no .py file in {root}; this Python has its library elsewhere: name files or folders"
                )
            files += [file._replace(name=f"stdlib/{file.path.relative_to(root)}", unique=True) for file in matches]
        elif path.is_dir():
            saved = data.arrow_tables.saved_dataset(path)
            matches = (
                _folder_files(path, SUFFIXES)
                if saved is None
                else [_file(str(dataset_file), dataset_file, named=True) for dataset_file in saved]
            )
            if not matches:
                raise ValueError(f"{source}: no {', '.join(SUFFIXES)} file (plain, .gz or .zst) in this folder")
            files += matches
        elif not path.exists():
            raise ValueError(f"{source}: no such file or folder; {ALLOWED}")
        elif not path.is_file():
            expect_regular(path)
        elif _suffix(path) not in SUFFIXES:
            raise ValueError(f"{source}: cannot read a file of this kind; {ALLOWED}")
        else:
            files.append(_file(source, path, named=True))
    return files


def _file(name: str, path: Path, *, named: bool) -> SourceFile:
    return SourceFile(name, path, _suffix(path), path.suffix if path.suffix in PACKED else "", named=named)


def cut(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """The files in pieces of about equally many bytes, in reading order; large .jsonl and .parquet are divided."""
    files = [file._replace(length=_stored_bytes(file)) for file in files]
    size = min(max(sum(file.length for file in files) // PIECES, SMALLEST), LARGEST_PIECE)
    pieces: list[list[SourceFile]] = []
    budget = 0
    for segment in (segment for file in files for segment in _divided(file, size)):
        if not pieces or segment.length > budget:
            pieces.append([])
            budget = size
        pieces[-1].append(segment)
        budget -= segment.length
    return pieces


def _stored_bytes(file: SourceFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError:
        return 0  # what is wrong with it is said when it is read


def _divided(file: SourceFile, size: int) -> Iterator[SourceFile]:
    """The parts of a file."""
    if file.length <= size or file.packed or file.kind not in (".jsonl", ".parquet"):
        yield file
    elif file.kind == ".jsonl":
        for begin in range(0, file.length, size):
            end = min(begin + size, file.length)
            yield file._replace(begin=begin, end=end, length=end - begin)
    else:
        lengths, begin = data.arrow_tables.group_bytes(file.path, file.name), 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or sum(lengths[begin : end + 1]) > size:
                yield file._replace(begin=begin, end=end, length=sum(lengths[begin:end]))
                begin = end


def read_documents(files: Sequence[SourceFile], text_key: str) -> Iterator[Document]:
    """All documents of `files` in order, a block in memory at a time; those to leave out have their problem."""
    for file in files:
        if file.kind in TABLES:
            yield from _rows(file, text_key)
        else:
            yield from _json_lines(file, text_key) if file.kind == ".jsonl" else _text_document(file)


def _folder_files(root: Path, suffixes: Sequence[str], exclude: Sequence[str] = ()) -> list[SourceFile]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in exclude]
        paths += [Path(folder, name) for name in names if not name.startswith(".") and not is_cache(name)]
    matches = [
        path for path in sorted(paths, key=lambda path: path.relative_to(root).parts) if _suffix(path) in suffixes
    ]
    for path in matches:
        if path.exists() and not path.is_file():
            expect_regular(path)
    return [_file(str(path), path, named=False) for path in matches]


def is_cache(name: str) -> bool:
    """Whether a file holds the rows of another one, as `datasets` keeps them."""
    return name.startswith("cache-") and name.endswith(".arrow")


def _suffix(path: Path) -> str:
    inner = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    return "" if inner in TABLES and path.suffix in PACKED else inner  # those are compressed themselves


def _spool_stdin(path: Path, jsonl: bool) -> SourceFile:
    with writing(path, "replace") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    with path.open("rb") as file:
        begin = file.read(4)
    packed = ".gz" if begin[:2] == b"\x1f\x8b" else ".zst" if begin == b"\x28\xb5\x2f\xfd" else ""
    return SourceFile("standard input", path, ".jsonl" if jsonl else ".txt", packed, named=True)


OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.GzipFile,
    ".zst": lambda path: io.BufferedReader(data.arrow_tables.ZstdFile(path)),
}


@contextlib.contextmanager
def _open(file: SourceFile) -> Iterator[io.BufferedIOBase]:
    try:
        with OPENERS[file.packed](file.path) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        fault = {".gz": "not a sound gzip file", ".zst": "not a sound zstd file"}.get(file.packed, "cannot be read")
        raise ValueError(f"{file.name}: {fault} ({error}); replace it or leave it out") from None


def _text_document(file: SourceFile) -> Iterator[Document]:
    with _open(file) as stream:
        first = stream.read(BLOCK)
        # A large one is read to its end first, as a byte there may make it no text, and then block by block.
        read = [first] if len(first) < BLOCK else _blocks(file)
        problem = problem_of(read, file.name)
    if problem and file.named:
        faults = {
            "empty": "is empty",
            "binary": "contains NUL bytes: it is binary, not text",
            "not UTF-8": "is not UTF-8 text",
        }
        raise ValueError(f"{file.name}: {faults[problem]}; convert it to UTF-8 text or leave it out")
    if isinstance(read, list) or problem:
        yield Document(file, 0, partial(decoded, [] if problem else [first]), problem)
    else:
        yield Document(file, 0, lambda: decoded(_blocks(file)))


def _blocks(file: SourceFile) -> Iterator[bytes]:
    """The bytes of a file, decompressed."""
    with _open(file) as stream:
        while block := stream.read(BLOCK):
            yield block


def decoded(blocks: Iterable[bytes], encoding: str = "utf-8-sig") -> Iterator[str]:
    """The text of UTF-8 in blocks, without a file's byte order mark; raises UnicodeDecodeError.

    >>> raw = "né".encode()
    >>> list(decoded([raw[:2], raw[2:]]))
    ['n', 'é']
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in blocks:
        if text := decoder.decode(block):
            yield text
    decoder.decode(b"", final=True)


def blocks_of(text: str) -> Iterator[str]:
    """A text in blocks, so that what is made of one block is small."""
    return (text[offset : offset + BLOCK] for offset in range(0, len(text), BLOCK))


def problem_of(blocks: Iterable[bytes], name: str) -> str:
    """Why the text of these blocks is left out, or ""; raises ValueError if too large."""
    size, binary, problem, checked = 0, False, "", codecs.getincrementaldecoder("utf-8-sig")()
    characters = 0
    for block in blocks:
        size, binary = size + len(block), binary or b"\0" in block
        if size > LARGEST_DOCUMENT:
            raise ValueError(f"{name}: a document of more than {LARGEST_DOCUMENT:,} bytes; split it into files")
        if not problem:
            try:
                characters += len(checked.decode(block))
            except UnicodeDecodeError:
                problem = "not UTF-8"
    if binary:
        return "binary"
    try:
        checked.decode(b"", final=not problem)
    except UnicodeDecodeError:
        problem = "not UTF-8"
    return problem or ("" if characters else "empty")


def _json_lines(file: SourceFile, text_key: str) -> Iterator[Document]:
    records = 0
    with _open(file) as stream:
        for number, line in enumerate(_lines(stream, file), start=1):
            if line.strip():
                records += 1
                try:
                    text = _json_text(line, "", text_key)
                except ValueError:  # once more, with its place, for which lines are counted
                    text = _json_text(line, _line(file, number), text_key)
                yield Document(file, number, partial(blocks_of, text), "" if text else "empty")
    if not records and file.end is None:
        if file.named:
            raise ValueError(f"{file.name}: is empty; wanted one JSON object a line")
        yield Document(file, 1, ().__iter__, "empty")


def _lines(stream: io.BufferedIOBase, file: SourceFile) -> Iterator[bytes]:
    """The lines of a stream that begin in the part to read; long ones are cut."""
    read, position = partial(stream.readline, LARGEST + 1), file.begin
    if position:
        stream.seek(position - 1)
        position -= 1
        while (line := read()) and not line.endswith(b"\n"):  # the end of one that begins before
            position += len(line)
        position += len(line)
    while (file.end is None or position < file.end) and (line := read()):
        yield line if position else line.removeprefix(codecs.BOM_UTF8)
        position += len(line)


def _line(file: SourceFile, number: int) -> str:
    """The place of a line, by its number in the part of the file."""
    previous_lines, last = 0, b"\n"
    with file.path.open("rb") as stream:
        remaining = file.begin
        while remaining and (chunk := stream.read(min(remaining, 1 << 20))):
            previous_lines, remaining, last = previous_lines + chunk.count(b"\n"), remaining - len(chunk), chunk
    within = file.begin and not last.endswith(b"\n")  # of a line that is counted with the part before
    return f"{file.name}:{previous_lines + within + number}"


def _rows(file: SourceFile, text_key: str) -> Iterator[Document]:
    rows = 0
    for row, value in data.arrow_tables.column_of(file.path, file.name, text_key, file.begin, file.end):
        read = partial(decoded, value, "utf-8") if value else ().__iter__
        document = Document(file, row, read, "" if value else "empty")
        for text in read():
            expect_text(text, document.origin, text_key)
        rows += 1
        yield document
    if not rows and file.end is None:
        if file.named:
            raise ValueError(f"{file.name}: is empty; wanted a text a row")
        yield Document(file, 0, ().__iter__, "empty")


def _json_text(line: bytes, origin: str, text_key: str) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{origin}: is not UTF-8 text; convert it or leave it out") from None
    try:
        record = parse_json_value(text, origin, wide=True)
    except ValueError as error:
        raise ValueError(f"{error}; wanted one object a line") from None
    if not isinstance(record, dict) or text_key not in record:
        record_text = (
            f"an object with the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        )
        raise ValueError(
            f"{origin}: wanted an object with the key {text_key!r}, found {record_text}; name the right key with "
            f"text_key= (--text-key)"
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{origin}: the value of {text_key!r} is a {type(text).__name__}, wanted a string")
    expect_text(text, origin, text_key)
    return text


def expect_text(text: str, origin: str, text_key: str) -> None:
    """Raise ValueError for what is in no text."""
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in set(text)):
        raise ValueError(f"{origin}: {text_key!r} contains a NUL or half a surrogate pair, which is no text; remove it")
