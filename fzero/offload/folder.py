"""Where a store lives: a local folder, or any key-value store that tensorstore knows by URL. Small texts in it are replaced as a whole."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any


def is_url(place: str | Path) -> bool:
    """Whether `place` is a URL, such as gs://bucket/run/ or memory://run/, and not a local path."""
    return "://" in str(place)


def kvstore(place: str | Path, *path: str) -> Any:
    """tensorstore's specification of a folder in `place`."""
    if is_url(place):
        return "/".join((str(place).rstrip("/"), *path)) + "/"
    return {"driver": "file", "path": str(Path(place, *path)) + "/"}


def read_text(place: str | Path, name: str) -> str | None:
    """The text `name`, or None where there is none."""
    if is_url(place):
        found = _open(place).read(name).result()
        return None if found.state == "missing" else found.value.decode()
    path = Path(place, name)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def write_text(place: str | Path, name: str, text: str) -> None:
    """Replace the text `name`, durably: whoever reads it, after whatever end, finds all of the old one or all of the new one."""
    if is_url(place):
        _open(place).write(name, text.encode()).result()
        return
    path = Path(place, name)
    partial = path.with_name(f"{path.name}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a local folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@functools.cache
def context() -> Any:
    """How tensorstore uses its resources, in all that this process opens: a store in memory:// is one with what was put there before."""
    import tensorstore

    return tensorstore.Context(
        {
            "file_io_concurrency": {"limit": 4},
            "file_io_sync": False,
            "file_io_locking": {"mode": "none"},  # each chunk has one writer: its rank
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 2},
        }
    )


def _open(place: str | Path) -> Any:
    import tensorstore

    return tensorstore.KvStore.open(kvstore(place), context=context()).result()
