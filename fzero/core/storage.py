"""Small text files in a local folder or below a URL that tensorstore supports, replaced atomically."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fzero.core.files import make_folder, naming, replacing, sync_folder
from fzero.core.object_store import Objects, context, is_url, url_spec
from fzero.core.text_parsing import read_text_file

__all__ = [
    "PAGE",
    "Damaged",
    "absolute",
    "context",
    "is_url",
    "kvstore",
    "naming",
    "read_text",
    "sync_file_system",
    "sync_folder",
    "user_folder",
    "write_text",
    "write_texts",
]

PAGE = 4096  # bytes: a direct transfer to or from a disk begins and ends at a multiple of this


class Damaged(ValueError):
    """Raised if a store or checkpoint is corrupt, or holds no whole step.

    Another checkpoint may be read instead: see `newest_sound`.

    >>> import tempfile
    >>> path = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10)
    >>> _ = (path / "manifest.json").write_text("{}")
    >>> fzero.checkpoint.restore(path, {"w": torch.empty(2)})
    Traceback (most recent call last):
    fzero.core.storage.Damaged: ...manifest.json: damaged, or not a manifest of fzero: ...
    """


USERS = {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}


def user_folder(variable: str) -> Path:
    """fzero's part of a folder of the user: of caches ($XDG_CACHE_HOME, or ~/.cache), or of settings ($XDG_CONFIG_HOME,
    or ~/.config).

    A user without a home, as in some containers, has it in the system's temporary folder.
    """
    if named := os.environ.get(variable):
        return Path(named, "fzero")
    try:
        base = Path.home()
    except RuntimeError:
        base = Path(tempfile.gettempdir(), f"fzero-{os.getuid()}")
    return base / USERS[variable] / "fzero"


def kvstore(folder: str | Path, *path: str) -> Any:
    """tensorstore's specification of the folder `path` below `folder`."""
    if is_url(folder):
        return url_spec("/".join((str(folder).rstrip("/"), *map(quote, path))))
    return {"driver": "file", "path": str(Path(folder, *path)) + "/"}


def absolute(path: str | Path) -> str:
    """The absolute path of a folder, and a URL as it is.

    >>> absolute("s3://bucket/corpus"), absolute("/a/b")
    ('s3://bucket/corpus', '/a/b')
    """
    return str(path) if is_url(path) else str(Path(path).absolute())


def read_text(folder: str | Path, name: str) -> str | None:
    """Return the text `name`, or None if it does not exist; raises ValueError naming it if it is no text or no regular
    file.
    """
    if is_url(folder):
        content = Objects(str(folder)).read(name)
        try:
            return None if content is None else content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder}/{name}: is not UTF-8 text ({error})") from None
    path = Path(folder, name)
    return read_text_file(path) if os.path.lexists(path) else None


def write_text(folder: str | Path, name: str, text: str) -> None:
    """Replace the text `name` atomically and durably: after a crash at any moment a reader finds all of the old text or
    all of the new one.
    """
    if is_url(folder):
        Objects(str(folder)).write(name, text.encode())
        return
    with replacing(Path(folder, name)) as file:
        file.write(text.encode())


def write_texts(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files {name: content}, as `write_text` does; a name may be in a folder of its own: "more/a.txt"."""
    for name, content in files.items():
        *folders, last = name.split("/")
        write_text(make_folder(folder, *folders), last, content)


def sync_file_system(path: Path) -> None:
    """Make everything written to the file system of a local folder durable, by one syncfs instead of one fsync per
    file.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
