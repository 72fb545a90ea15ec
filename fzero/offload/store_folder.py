"""The folder of a store: opened as a new store or an existing one, taken over from a run that is over, and released."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fzero.comm.rank_tables import Refusal, failing_together, raise_local
from fzero.core.files import make_folder, remove_entry
from fzero.core.storage import Damaged, is_url, write_text
from fzero.offload import store_manifest
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.chunk_files import Chunks, LeafFiles
from fzero.offload.disk_io import FOLDER, DiskIO
from fzero.offload.store import VersionedStore
from fzero.offload.store_manifest import (
    NEW_STATE,
    STEP,
    STORE,
    StepManifest,
    check_same_store,
    describe_store,
    read_description,
    read_step_manifest,
    read_store,
    signed_text,
    step_manifest_text,
)

# A folder with these alone, and no store.json, is that of a start that was killed; anything else may be somebody's
# files.
LEFTOVER_NAMES = {
    "arrays",
    "sums",
    "scratch",
    f"{STORE}.partial",
    "lock.json",  # of the run that writes the store
}  # left in a folder if a run ended before store.json was written


class StoreRanks(NamedTuple):
    """The processes that share a store."""

    rank: int = 0
    size: int = 1
    # returns when all ranks have called it with None, else raises on all of them: see `raise_together`
    agree: Callable[[Refusal | None], None] = raise_local


def open_store(
    folder: str | Path,
    leaves: dict[str, LeafFiles],
    *,
    streams: tuple[BufferPool, DiskIO],
    ranks: StoreRanks | None = None,
    slots: int = 2,
    verify: bool = True,
    owner: dict[str, Any] | None = None,
    resume: bool = False,
) -> VersionedStore:
    """Open the store of `leaves` in `folder`: a new one, to be written and committed, or with `resume` the existing
    one.

    A new store takes over the files of a store whose run is over; the folder of a run that is not over is refused.
    streams: the memory and threads of the transfers. ranks: None for one process. slots, verify: see `Nvme`.
    owner: JSON values that must be equal when the store is opened again.
    Raises ValueError if the folder cannot be written or holds another store, or the disk is too small, and Damaged if
    the store is damaged.
    """
    (buffers, disk), (rank, size, agree) = streams, ranks or StoreRanks()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(store_manifest.unlock_unowned, (store_manifest.canonical_name(folder), rank))
        if slots < 1:
            raise ValueError(
                f"nvme.slots is {slots} (slots of fzero.Nvme); it must be at least 1, and 2 or more for steps that "
                "survive a kill"
            )
        leaves = {
            name: leaf._replace(slots=min(leaf.slots, slots) if leaf.slots == 1 else slots)
            for name, leaf in leaves.items()
        }
        description, record, sums = describe_store(leaves, size, slots, owner or {}, verify=verify), None, verify
        with failing_together(agree):
            if resume:
                record, sums = _expect_store(folder, description, verify=verify)
                if rank == 0:
                    store_manifest.lock(folder)
            elif rank == 0:
                _claim_folder(folder, description)
        with failing_together(agree):
            chunks = _make_chunks(folder, partial(Chunks, folder, leaves, rank, size, buffers, disk, create=not resume))
        on_failure.callback(chunks.discard)
        with failing_together(agree):
            resident = {record.slot, *record.pinned} if record is not None else set()
            _make_chunks(folder, partial(chunks.open, resident))
            store = VersionedStore(chunks, slots, sums)
            if record is not None:
                store.record = record
                store.check(record.slot) if verify else None
        store_manifest.claim(store, folder, rank)  # not before: a store that is refused leaves the owner what it was
        on_failure.pop_all()
        return store


def _make_chunks(folder: str | Path, make: Callable[[], Any]) -> Any:
    """What `make` returns; raises ValueError for a folder that may not be written."""
    try:
        return make()
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror}; give a folder that this user may write ({FOLDER})"
        ) from None


def _expect_store(folder: str | Path, description: dict[str, Any], *, verify: bool) -> tuple[StepManifest, bool]:
    """(the last complete step, whether there are checksums) of the store; raises ValueError for another one."""
    opened = read_store(folder)
    check_same_store(folder, json.loads(json.dumps(description)))
    if opened is None:
        raise ValueError(f"{folder}: holds no complete step yet; {NEW_STATE}")
    record, sums = opened[1], opened[0]["verify"]
    if verify and not sums:
        raise ValueError(f"{folder}: was written without checksums; use verify=False (nvme.verify=false of a run)")
    if record.dirty:
        raise Damaged(
            f"{folder}: with one slot, step {record.step + 1} was being written over step {record.step} when its run "
            "ended; resume from a checkpoint, and use two slots (nvme.slots=2) to survive a kill"
        )
    return record, sums


def _claim_folder(folder: str | Path, description: dict[str, Any]) -> None:
    """Prepare `folder` for a new store."""
    existing = read_description(folder)
    if existing is not None:
        record = read_step_manifest(folder)
        if record is not None and not record.done:
            raise ValueError(
                f"{folder}: holds step {record.step} of a run that is not over; go on from it by "
                f"fzero.reopen_state (--resume of a run), or "
                f"give another folder ({FOLDER})"
            )
    if is_url(folder):
        write_text(folder, STORE, signed_text(description))
        return
    path = Path(folder)
    try:
        make_folder(path)
        store_manifest.lock(path)
        unknown_entries = sorted({entry.name for entry in path.iterdir()} - LEFTOVER_NAMES)
        if existing is None and unknown_entries:
            raise ValueError(
                f"{folder}: is not empty ({unknown_entries[0]}) and holds no store; give an empty folder ({FOLDER})"
            )
        # First, so that a crash from here on leaves no step that names other leaves.
        (path / STEP).unlink(missing_ok=True)
        if existing is None or _geometry(existing) != _geometry(description):
            remove_entry(path / "arrays")
            remove_entry(path / "sums")
        make_folder(path, "sums")
        write_text(folder, STORE, signed_text(description))
    except NotADirectoryError as error:
        raise ValueError(f"{error.filename}: is not a folder; give one ({FOLDER})") from None
    except FileExistsError as error:
        raise ValueError(f"{error.filename}: is a file; give a folder ({FOLDER})") from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror}; give a folder that this user may write ({FOLDER})"
        ) from None


def release_store(folder: str | Path) -> None:
    """Mark the store in `folder` as over, so that another run may take the folder."""
    if is_url(folder) or not os.path.lexists(Path(folder, STEP)):
        return
    try:
        record = read_step_manifest(folder)
    except ValueError:  # damaged: the run resumes from a checkpoint
        remove_entry(Path(folder, STEP))
        return
    if record is not None:
        write_text(folder, STEP, step_manifest_text(record._replace(pinned={}, done=True)))


def _geometry(described: dict[str, Any]) -> Any:
    return json.loads(json.dumps([described.get(key) for key in ("leaves", "ranks", "slots")]))


def store_bytes(leaves: Iterable[LeafFiles], slots: int) -> int:
    """The bytes on disk of one rank's leaves."""
    return sum((slots if leaf.slots > 1 else 1) * leaf.layers * leaf.file_bytes for leaf in leaves)
