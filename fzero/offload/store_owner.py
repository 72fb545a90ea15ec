"""One owner of a store: the process that opened it, and in that the store object that was opened last."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from fzero.core.storage import is_url
from fzero.offload.disk_config import FOLDER

# By (folder, rank) the store that was opened last in this process, and by folder the descriptor that holds its lock.
OWNERS: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()
LOCKS: dict[str, int] = {}


def canonical_name(folder: str | Path) -> str:
    """The one name of a folder or URL."""
    return str(folder) if is_url(folder) else os.path.realpath(folder)


def lock(folder: str | Path) -> None:
    """Lock the folder of a store for this process, until `release` or its end; a URL has no lock, nor has a file system
    without locks.

    Raises ValueError if another process has it.
    """
    path = canonical_name(folder)
    if is_url(folder) or path in LOCKS:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{folder}: another process has this store open, and a store has one owner; end that one, or give another "
            f"folder ({FOLDER})"
        ) from None
    except OSError:  # no locks here: a commit still looks whether the last step is its own
        os.close(descriptor)
        return
    LOCKS[path] = descriptor


def claim(store: Any, folder: str | Path, rank: int) -> None:
    """Make a store the owner of its folder, in the place of one that this process opened before."""
    key = (canonical_name(folder), rank)
    OWNERS[key] = store
    weakref.finalize(store, unlock_unowned, key)


def expect_owner(store: Any, folder: str | Path, rank: int) -> None:
    """Raise ValueError if another store was opened in the folder since."""
    if OWNERS.get((canonical_name(folder), rank)) not in (store, None):
        raise another_state(folder)


def another_state(folder: str | Path) -> ValueError:
    """The error for a state whose store holds another one by now."""
    return ValueError(
        f"{folder}: holds another state by now: the store was opened again since this state was made, and a store has "
        "one owner; go on with the state of the last init_state or reopen_state, or give each its own folder"
    )


def release(store: Any, folder: str | Path, rank: int) -> None:
    """End the ownership of a store, if it is the owner."""
    key = (canonical_name(folder), rank)
    if OWNERS.get(key) is store:
        del OWNERS[key]
        unlock_unowned(key)


def unlock_unowned(key: tuple[str, int]) -> None:
    """Unlock a folder, by (name, rank), that no store of this process owns; only rank 0 locks it."""
    if key[1] == 0 and key not in OWNERS and key[0] in LOCKS:
        descriptor = LOCKS.pop(key[0])
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
