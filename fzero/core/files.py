"""The opening of every file that fzero writes: a name that fzero chooses is never followed through a link.

A folder that a user names may be reached through symbolic links. Below it a file is a regular file with one name, a
folder is a folder, and what else stands there is refused or, where its content would be replaced anyway, removed. So no
run changes a file outside of its folder (tests/test_writing.py walks the package for other openings).

And the one rule for names that become paths of files, of leaves and in foreign files: none leaves its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fzero.core.text_parsing import KINDS, file_kind

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3000  # bytes that file systems take
DESCRIPTION = "zarr.json"  # the file beside the chunks of an array


def path_fault(path: Any) -> str:
    """The fault of `path` as that of a file below some folder, to follow its name in a message; "" if none.

    >>> path_fault("blocks/attn/w_q"), path_fault("../w")
    ('', 'has a part ".."')
    """
    if not isinstance(path, str):
        return f"is a {type(path).__name__}, not a text"
    for name in path.split("/"):
        if name in ("", ".", ".."):
            return f'has a part "{name}"' if name else 'has an empty part (it begins or ends with "/", or has "//")'
        if "\\" in name or not name.isprintable():
            return "has a backslash or a character that cannot be printed"
        if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
            return f"has a part of more than {MAX_NAME_BYTES} bytes"
    return f"has more than {MAX_PATH_BYTES:,} bytes" if len(path.encode()) > MAX_PATH_BYTES else ""


def leaf_fault(names: Iterable[Any]) -> str:
    """The first fault of the names of leaves that are zarr arrays of one folder, with the name; "" if none.

    >>> leaf_fault(["a", "b/c"]), leaf_fault([""]), leaf_fault(["a", "a/b"])
    ('', '', "leaf 'a/b' is below 'a', which is a leaf itself")
    """
    names = list(names)
    if names == [""]:
        return ""
    leaf_names = {name for name in names if isinstance(name, str)}
    for name in names:
        fault = path_fault(name)
        if fault:
            return f"leaf {name!r} {fault}"
        parts = name.split("/")
        if DESCRIPTION in parts:
            return f"leaf {name!r} has a part {DESCRIPTION!r}, which is the name of zarr's own file"
        ancestor = next((a for n in range(1, len(parts)) if (a := "/".join(parts[:n])) in leaf_names), None)
        if ancestor is not None:
            return f"leaf {name!r} is below {ancestor!r}, which is a leaf itself"
    return ""


WriteMode = Literal["new", "replace", "append", "update"]
FLAGS: dict[WriteMode, int] = {
    "new": os.O_WRONLY | os.O_EXCL,
    "replace": os.O_WRONLY | os.O_EXCL,
    "append": os.O_RDWR | os.O_APPEND,
    "update": os.O_RDWR,
}
BLOCK = 1 << 16  # bytes that are read at a time


class NotWritable(OSError):
    """Raised where a link or something of another kind is in place of a file to write."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EPERM, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """A context in which an OSError that names no file, such as that of a full disk, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def is_lone_file(path: str | Path) -> bool:
    """Whether there is a regular file at `path` itself, not through a link, that has no other name."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def open_to_write(path: str | Path, mode: WriteMode, *, direct: bool = False, make: bool = True) -> int:
    """The descriptor of a regular file opened for writing, never through a link; raises NotWritable."""
    # O_NOFOLLOW: a link fails. O_NONBLOCK: so does a FIFO without a reader, which would be waited for.
    path, flags = Path(path), FLAGS[mode] | os.O_CREAT * make | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_DIRECT if direct else 0
    try:
        if mode == "replace":
            path.unlink(missing_ok=True)
        fd = os.open(path, flags, 0o644)
    except OSError as error:
        kind = _kind_on_disk(path) if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) else ""
        if kind:
            raise NotWritable(path, _fault(kind)) from None
        raise
    try:
        # Of the open file: what is at the path may have changed since.
        status = os.fstat(fd)
        if kind := file_kind(status.st_mode):
            raise NotWritable(path, _fault(kind))
        if status.st_nlink > 1 and mode == "append":
            # The other names keep the old content.
            with replacing(path) as copy, path.open("rb") as old:
                shutil.copyfileobj(old, copy)
        elif status.st_nlink > 1 and mode != "replace":
            raise NotWritable(
                path,
                f"has {status.st_nlink} names (hard links), whose content would change too; put a copy in its place",
            )
        else:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return os.open(path, flags, 0o644)


def _fault(kind: str) -> str:
    return f"is {kind}, and fzero writes a regular file there; remove it"


def _kind_on_disk(path: Path) -> str:
    with contextlib.suppress(OSError):
        return file_kind(os.lstat(path).st_mode)
    return ""


@contextlib.contextmanager
def writing(path: str | Path, mode: WriteMode, *, make: bool = True) -> Iterator[BinaryIO]:
    """A context of the file that `open_to_write` opens."""
    with naming(path), open(open_to_write(path, mode, make=make), "r+b" if mode == "update" else "wb") as file:
        yield file


@contextlib.contextmanager
def replacing(path: str | Path, *, cache: bool = False) -> Iterator[BinaryIO]:
    """A context of a file whose content replaces that of `path` at its end, atomically and (cache=False) durably."""
    path = Path(path)
    # In the same folder, as a rename is atomic within one file system. A cache's has the process in its name, as
    # several may write it at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}.part" if cache else f"{path.name}.partial")
    try:
        with writing(partial, "replace") as file, naming(path):
            yield file
            file.flush()
            if not cache:
                # Before the rename: after a crash the name may otherwise lead to an empty file.
                os.fsync(file.fileno())
        try:
            os.replace(partial, path)
        except IsADirectoryError:
            raise NotWritable(path, _fault(KINDS[stat.S_IFDIR])) from None
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if not cache:
        # Then the folder, in which the rename is.
        sync_folder(path.parent)


def expect_absent(folder: str | Path) -> Path:
    """The path of a folder to write; raises ValueError if it exists."""
    if Path(folder).exists():
        raise ValueError(f"{folder}: already exists; name another folder or remove this one first")
    return Path(folder)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A context of a folder beside `folder` that is renamed to it at the end."""
    partial = folder.with_name(f"{folder.name}.partial")
    remove_entry(partial)
    make_folder(partial.parent, partial.name)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a text file, after removing one that a kill cut short."""
    with writing(path, "append") as file:
        cut_half_line(file.fileno())
        file.write(f"{line}\n".encode())


def cut_half_line(fd: int) -> None:
    """Remove what follows the last newline of an open file."""
    size = end = os.fstat(fd).st_size
    while end:
        begin = max(0, end - BLOCK)
        # From the end, as the file may be long.
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)


def make_folder(folder: str | Path, *names: str) -> Path:
    """Make `folder`, and below it `names`, each in the one before; returns the last; raises NotWritable for a link."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        path /= name
        try:
            path.mkdir()
        except FileExistsError:
            # lstat, which does not follow a link.
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode):
                kind = file_kind(mode) or "a file"
                hint = ", and name a folder elsewhere by an option" if stat.S_ISLNK(mode) else ""
                raise NotWritable(path, f"is {kind}, and fzero writes a folder there; remove it{hint}") from None
    return path


def is_real_folder(path: str | Path) -> bool:
    """Whether there is a folder at `path` itself, not through a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def remove_entry(path: str | Path) -> None:
    """Remove a file, a link itself, or a folder with its content, if it is there."""
    if is_real_folder(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make the entries (names) of a local folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
