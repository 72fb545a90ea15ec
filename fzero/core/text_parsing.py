"""Text from elsewhere: JSON and TOML that other programs or people wrote, and environment variables.

Every file of JSON or TOML that fzero reads is parsed here, so that the same bounds hold everywhere: bytes, values,
depth, whole numbers of 64 bits, and texts without half a character. What a file says is checked by its reader, with
`expect_entries` and `in_form`. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import io
import json
import math
import os
import stat
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 1 << 26  # bytes of a text that is read whole
LARGEST_TOML, MAX_DOTS = 1 << 20, 200  # characters of a text, dots in a line of it
MAX_VALUES = 4_000_000  # in one text: each takes up to 70 bytes in memory
DEEPEST = 64  # tables and lists within one another
LOWEST, HIGHEST = -(2**63), 2**64 - 1  # whole numbers
NAMES: dict[type, str] = {
    dict: "a table",
    list: "a list",
    tuple: "a list",  # of a caller in Python
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    type(None): "null",
}


class Unparsable(ValueError):
    """Raised for a text that is not of the format it should be of."""


def parse_json(text: str | bytes, name: str, *, wide: bool = False, unique_keys: bool = False) -> dict[str, Any]:
    """Parse a JSON object; raises ValueError naming the file `name` for other text or beyond the bounds.

    >>> parse_json('{"a": [1, 2]}', "sizes.json")
    {'a': [1, 2]}
    """
    table = parse_json_value(text, name, wide=wide, unique_keys=unique_keys)
    if not isinstance(table, dict):
        raise ValueError(f"{name}: not a JSON object, but a {type(table).__name__}")
    return table


def parse_json_value(text: str | bytes, name: str, *, wide: bool = False, unique_keys: bool = False) -> Any:
    """Parse any JSON value; wide, once, and raises ValueError, as in `parse_json`."""
    parse = functools.partial(json.loads, object_pairs_hook=_unique_keys) if unique_keys else json.loads
    return _parse(text, name, "JSON", parse, (",", "[", "{"), wide=wide)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these keys and values; raises ValueError for a key that comes twice."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {short(key)} comes twice in one table")
        table[key] = value
    return table


def json_text(value: Any, name: str, indent: int | None = None) -> str:
    """The JSON text of a value for the file `name`, within the bounds of reading; raises ValueError.

    >>> json_text({"a": [1, 2]}, "sizes.json")
    '{"a": [1, 2]}'
    """
    _check_values(value, name, wide=False)
    text = json.dumps(value, indent=indent)
    if len(text) > LARGEST:
        raise ValueError(f"{name}: {len(text):,} bytes of JSON; at most {LARGEST:,} are read again")
    return text


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError as `parse_json` does."""
    if len(text) > LARGEST_TOML:
        raise ValueError(f"{name}: {len(text):,} characters of TOML; at most {LARGEST_TOML:,} are read")
    for number, line in enumerate(text.splitlines(), 1):
        # Python's parser takes a time that grows with the square of a key's parts.
        if line.count(".") > MAX_DOTS and not line.lstrip().startswith("#"):
            raise ValueError(f"{name}:{number}: more than {MAX_DOTS} dots; tables are at most {DEEPEST} deep")
    return _parse(text, name, "TOML", tomllib.loads, (",", "[", "{", "="))


def _parse(text: str | bytes, name: str, kind: str, parse: Any, marks: tuple[str, ...], *, wide: bool = False) -> Any:
    if len(text) > LARGEST:
        raise ValueError(f"{name}: {len(text):,} bytes of {kind}; at most {LARGEST:,} are read")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Unparsable(f"{name}: not {kind} ({error})") from None
    # Counted before parsing: a text of [[],[],...] takes thirty times its bytes.
    if len(text) > MAX_VALUES and sum(map(text.count, marks)) > MAX_VALUES:
        raise ValueError(f"{name}: more than {MAX_VALUES:,} values; this is too large to be meant")
    if kind == "JSON" and not text.strip():
        raise Unparsable(f"{name}: is empty, where {kind} was to be")
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(f"{name}: tables and lists are nested more than {DEEPEST} deep") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise Unparsable(f"{name}: not {kind} ({error})") from None
    _check_values(value, name, wide=wide)
    return value


def _check_values(value: Any, name: str, *, wide: bool) -> None:
    """Raise ValueError if a parsed value is beyond the bounds of this module."""
    level, depth = [value], 0
    while level:
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                    raise ValueError(
                        f"{name}: {_path_to(value, item)}{short(item)}, with half a surrogate pair, which is no text "
                        "(of a name or an argument that is not UTF-8)"
                    )
            elif isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list | tuple):
                deeper += item
            elif isinstance(item, int) and not wide and not LOWEST <= item <= HIGHEST:
                raise ValueError(f"{name}: {_path_to(value, item)}{short(item)} does not fit into 64 bits")
        level, depth = deeper, depth + 1
        if level and depth > DEEPEST:
            raise ValueError(f"{name}: tables and lists are nested more than {DEEPEST} deep")


def _path_to(value: Any, target: Any) -> str:
    """The words `a.b is ` for the path of `target` in a parsed value, or "" for a key."""
    work: list[tuple[str, Any]] = [("", value)]
    for path, item in work:
        if item is target:
            return f"{short(path[1:], 200)[1:-1]} is " if path else "the value "
        items = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        work += [(f"{path}.{key}", inner) for key, inner in items]
    return "the key "


KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_kind(mode: int) -> str:
    """What a file of this `st_mode` is, in words; "" for a regular file."""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no regular file")


def short(value: Any, max_length: int = 80) -> str:
    """`repr(value)`, cut to `max_length` characters."""
    text = "a number of thousands of digits" if isinstance(value, int) and abs(value) >> 10_000 else repr(value)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def read_text_file(path: str | Path, max_bytes: int = LARGEST) -> str:
    """The text of a file, without a byte order mark; raises ValueError naming a file that is no text."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path}: {size:,} bytes; a file of this kind has at most {max_bytes:,}")
        raw = file.read()
    try:
        return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from None


def read_json(path: str | Path, *, wide: bool = False) -> dict[str, Any]:
    """The JSON object in a file; wide as in `parse_json`; raises ValueError as that and `read_text_file` do."""
    return parse_json(read_text_file(path), str(path), wide=wide)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; raises ValueError as `expect_regular` does, and waits for no FIFO."""
    expect_regular(path)
    file = open(path, "rb", opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # noqa: SIM115
    if kind := file_kind(os.fstat(file.fileno()).st_mode):  # put there since
        file.close()
        raise ValueError(f"{path}: is {kind}; {REGULAR}")
    return file


REGULAR = "it must be a regular file (copy what it gives into one)"


def expect_regular(path: str | Path) -> int:
    """The bytes of a file; raises ValueError if there is none, or if it is not a regular file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise ValueError(f"{path}: is a symbolic link to nothing; {REGULAR}") from None
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: is a symbolic link to itself; {REGULAR}") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{str(path)!r}: is no name of a file ({error})") from None
    if kind := file_kind(status.st_mode):
        raise ValueError(f"{path}: is {kind}; {REGULAR}")
    return status.st_size


# ---- what a file says ----


def expect_entries(table: Mapping[str, Any], entries: Mapping[str, Any], name: str) -> None:
    """Raise ValueError naming `name` and the first of `entries` that `table` lacks or has in another type.

    >>> expect_entries({"eos": "x"}, {"eos": int}, "environment.json")
    Traceback (most recent call last):
    ValueError: environment.json: eos is 'x'; it must be a whole number
    """
    for key, hint in entries.items():
        bare = key.removesuffix("?")
        if bare not in table:
            if bare == key:
                raise ValueError(f"{name}: {key} is missing; the file is damaged, or of another program")
            continue
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        value = table[bare]
        good = type(value) in kinds or (float in kinds and type(value) is int)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            expected = " or ".join(NAMES[kind] for kind in kinds)
            raise ValueError(f"{name}: {bare} is {short(value)}; it must be {expected}")
        if type(value) is int and not LOWEST <= value <= HIGHEST:
            raise ValueError(f"{name}: {bare} is {short(value)}, which does not fit into 64 bits")


@contextlib.contextmanager
def in_form(name: str, fix: str = "") -> Iterator[None]:
    """A context that makes any failure to look into values of a file a ValueError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        detail = f"{type(error).__name__}: {short(str(error), 200)}"
        raise ValueError(f"{name}: damaged, or not of the form that fzero writes ({detail}){fix}") from error


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = (0,)) -> list[str]:
    """The lines of a table; columns `text` (negative from the end) are aligned left."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    left_columns = {i % len(header) for i in text}
    return [
        "  ".join(c.ljust(w) if i in left_columns else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    ]


def nearest(name: str, among: Iterable[str]) -> str:
    """The text ` (did you mean X?)` with the name in `among` closest to `name`, or ""."""
    close = difflib.get_close_matches(name[:100], list(among), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


# ---- environment variables ----


def environment_number(name: str, default: int, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
    """The whole number in an environment variable, or `default`; raises ValueError outside of [least, most]."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and minimum <= int(text) <= maximum):
        raise ValueError(
            f"the environment variable {name} is {short(text)}; it must be a whole number from {minimum} to {maximum}: "
            "torchrun sets it, else unset it"
        )
    return int(text)
