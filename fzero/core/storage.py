"""Folders, local or at any URL that tensorstore knows: small texts in them, replaced atomically.

It also defines `Damaged` and the page of direct transfers.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from fzero.core.object_store import Objects, context, is_url, url_spec

__all__ = ["PAGE", "Damaged", "context", "is_url", "kvstore", "read_text", "sync_file_system", "sync_folder", "write_text"]

PAGE = 4096  # bytes: a direct transfer to or from a disk begins and ends at a multiple of this


class Damaged(ValueError):
    """A store or checkpoint does not hold what was written to it, or holds no step as a whole.

    Another checkpoint may be read instead.
    """


def kvstore(folder: str | Path, *path: str) -> Any:
    """tensorstore's specification of the folder `path` below `folder`."""
    if is_url(folder):
        return url_spec("/".join((str(folder).rstrip("/"), *path)))
    return {"driver": "file", "path": str(Path(folder, *path)) + "/"}


def read_text(folder: str | Path, name: str) -> str | None:
    """The text `name`, or None where there is none."""
    if is_url(folder):
        found = Objects(str(folder)).read(name)
        return None if found is None else found.decode()
    path = Path(folder, name)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def write_text(folder: str | Path, name: str, text: str) -> None:
    """Replace the text `name`, durably and atomically: after any crash a reader finds all of the old text or all of the new one."""
    if is_url(folder):
        Objects(str(folder)).write(name, text.encode())
        return
    path = Path(folder, name)
    partial = path.with_name(f"{path.name}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(text.encode())
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the file names in a local folder durable (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    """Make all that was written to the file system of a local folder durable, files and names, with a single wait for the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
