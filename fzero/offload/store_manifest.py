"""The small files of a store: store.json, its description, step.json, its last complete step, and its checksums.

Every reader of a store begins with `read_store`, which takes only whole files that agree with each other.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.comm.axes import PP, expect_mesh
from fzero.core.files import leaf_fault
from fzero.core.storage import Damaged, is_url, read_text
from fzero.core.text_parsing import expect_entries, parse_json, short
from fzero.offload.chunk_files import LeafFiles
from fzero.offload.disk_io import FOLDER
from fzero.sharding.slices import largest_shard
from fzero.sharding.spec import Spec

# By (folder, rank) the store that was opened last in this process, and by folder the descriptor that holds its lock.
OWNERS: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()
LOCKS: dict[str, int] = {}


def canonical_name(folder: str | Path) -> str:
    """The one name of a folder or URL."""
    return str(folder) if is_url(folder) else os.path.realpath(folder)


def lock(folder: str | Path) -> None:
    """Lock the folder of a store for this process; raises ValueError if another process has it."""
    path = canonical_name(folder)
    if is_url(folder) or path in LOCKS:
        return
    # Closed in programs that this process starts, which would hold the lock otherwise.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Of the kernel, which frees it however the process ends; no file is left over.
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
    # A store that is dropped without `close` must not keep its folder locked.
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


FORMAT = 2
STORE, STEP = "store.json", "step.json"
# More than any leaf has: a bound for damaged files.
MAX_DIMS = 32
STEP_ENTRIES = {"step": int, "slot": int, "values": dict, "pinned": dict, "dirty": bool, "done": bool}
STORE_ENTRIES = {"format": int, "ranks": int, "slots": int, "verify": bool, "owner": dict, "leaves": dict}


class OtherFormat(ValueError):
    """Raised for a store of another version of fzero."""


class StepManifest(NamedTuple):
    """The content of step.json: the last complete step of a store."""

    step: int
    slot: int
    values: dict[str, Any]  # small values that the owner keeps besides the leaves
    pinned: dict[int, int] = {}  # noqa: RUF012  (slot -> step: never mutated)
    dirty: bool = False  # whether the only slot is being overwritten
    done: bool = False  # whether the run is over, so that another may take over the folder


def sums_name(slot: int, rank: int) -> str:
    """The name of the file with the checksums of a rank's chunks in a slot."""
    return f"sums/slot-{slot}.rank-{rank}.json"


def describe_store(
    leaves: dict[str, LeafFiles], ranks: int, slots: int, owner: dict[str, Any], *, verify: bool = True
) -> dict[str, Any]:
    """The content of store.json for these leaves; raises ValueError for a name that no folder can have."""
    fault = leaf_fault(leaves)
    if fault:
        raise ValueError(f"offload: {fault}; rename it")
    listed = {
        name: {
            "shape": list(leaf.described),
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "stacked": leaf.stacked,
            "fixed": leaf.slots < slots,  # written once
            **({} if leaf.cut is None else {"cut": str(leaf.cut)}),
        }
        for name, leaf in leaves.items()
    }
    return {"format": FORMAT, "ranks": ranks, "slots": slots, "verify": verify, "owner": owner, "leaves": listed}


def signed_text(values: dict[str, Any]) -> str:
    """The text of a small file, with a checksum."""
    return json.dumps({**values, "sum": zlib.crc32(json.dumps(values).encode())})


def unsigned(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a small file without their checksum; raises ValueError if it does not agree."""
    values = dict(values)
    if values.pop("sum", None) != zlib.crc32(json.dumps(values).encode()):
        raise ValueError("its checksum does not agree")
    return values


def read_step_manifest(folder: str | Path) -> StepManifest | None:
    """The last complete step of the store in `folder`, or None; raises Damaged if step.json is damaged."""
    try:
        text = read_text(folder, STEP)
        if text is None:
            return None
        entries = unsigned(parse_json(text, "it"))
        expect_entries(entries, STEP_ENTRIES, "it")
        entries["pinned"] = {int(slot): step for slot, step in entries["pinned"].items()}
        if not all(0 <= n < 1 << 62 for n in (entries["step"], entries["slot"], *entries["pinned"].values())):
            raise ValueError("its numbers are below 0, or beyond any step")
        return StepManifest(**entries)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{folder}/{STEP}: is not a record of a step ({error}); the store is damaged: resume from a checkpoint"
        ) from None


def step_manifest_text(record: StepManifest) -> str:
    """The text of step.json for a record, with a checksum."""
    return signed_text({**record._asdict(), "pinned": {str(slot): step for slot, step in record.pinned.items()}})


NEW_STATE = "make a new state by fzero.init_state (a run: without --resume)"
SAME = "open it with the model, optimizer and plan that it was made with, or give the folder of this run"


def check_same_store(folder: str | Path, expected: dict[str, Any]) -> None:
    """Raise ValueError if the store in `folder` is not the one described by `expected`, naming the first difference."""
    stored = read_description(folder)
    if stored is None:
        raise ValueError(
            f"{folder}: holds no store (there is no {STORE}); {NEW_STATE}, or give the folder it began with"
        )
    leaves = stored["leaves"]
    for name, leaf in expected["leaves"].items():
        if name not in leaves:
            raise ValueError(f"{folder}: is the store of another model or optimizer: it has no {name}; {SAME}")
        if {"cut": leaf.get("cut"), **leaves[name]} != {"cut": None, **leaf}:  # earlier versions did not write it
            stored_text, expected_text = (
                f"{'frozen ' * x['fixed']}{x['dtype']} {x['shape']}" for x in (leaves[name], leaf)
            )
            raise ValueError(
                f"{folder}: is the store of another model, optimizer or mesh: {name} is {stored_text} there and "
                f"{expected_text} here; {SAME}"
            )
    extra = sorted(set(leaves) - set(expected["leaves"]))
    if extra:
        raise ValueError(f"{folder}: is the store of another model or optimizer: it has {extra[0]} too; {SAME}")
    for key, fix in (
        ("ranks", "use the same number of processes"),
        ("slots", f"use slots={stored.get('slots')} (nvme.slots of a run)"),
        ("owner", "give the folder of this run"),
    ):
        if stored.get(key) != expected[key]:
            raise ValueError(
                f"{folder}: the store's {key} is {stored.get(key)} and the run's is {expected[key]}; {fix}"
            )


def _check_leaf(name: str, leaf: dict[str, Any], sizes: dict[str, int]) -> None:
    """Raise ValueError if an entry of store.json describes no leaf."""
    entries = {"shape": list, "dtype": str, "stacked": bool, "fixed": bool, "cut?": str}
    expect_entries(leaf, entries, f"its leaf {short(name)}")
    shape, dtype = leaf["shape"], getattr(torch, leaf["dtype"], None)
    is_shape = len(shape) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or math.prod(shape) >= 1 << 60 or (leaf["stacked"] and not shape):
        raise ValueError(f"its leaf {short(name)} has the shape {short(shape)}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"its leaf {short(name)} has the dtype {short(leaf['dtype'])}")
    if "cut" in leaf:
        cut = Spec.parse(leaf["cut"])
        ranks = len(cut.rows) or sizes.get(PP, 1), len(cut.parts) or sizes.get(cut.part_axis, 1)
        if (
            len(cut.dims) != len(shape)
            or ranks != (sizes.get(PP, 1), sizes.get(cut.part_axis, 1))
            or largest_shard(tuple(shape), cut) != tuple(shape)
        ):
            raise ValueError(f"its leaf {short(name)} is cut by {short(leaf['cut'])}")


def read_description(folder: str | Path) -> dict[str, Any] | None:
    """The content of store.json in `folder`, or None; raises Damaged, or ValueError for another format."""
    try:
        text = read_text(folder, STORE)
        if text is None:
            return None
        description = parse_json(text, "it")
        expect_entries(description, {"format": int}, "it")
        if description["format"] != FORMAT:
            raise OtherFormat(
                f"{folder}: is a store of format {description['format']} and this version reads {FORMAT}; use the "
                "version that wrote it"
            )
        description = unsigned(description)
        expect_entries(description, STORE_ENTRIES, "it")
        expect_entries(description["owner"], {"mesh?": dict, "stage?": int | None, "pipeline?": dict}, "its owner")
        if description["ranks"] < 1 or description["slots"] < 1:
            raise ValueError(f"it has {description['ranks']} ranks and {description['slots']} slots")
        if "pipeline" in description["owner"]:
            expect_entries(
                description["owner"]["pipeline"], {"schedule": str, "chunks": int, "layout": str}, "its pipeline"
            )
        expect_mesh(description["owner"].get("mesh", {}))
        if fault := leaf_fault(description["leaves"]):
            raise ValueError(fault)
        for name, leaf in description["leaves"].items():
            expect_entries(description["leaves"], {name: dict}, "its leaves")
            _check_leaf(name, leaf, description["owner"].get("mesh", {}))
        return description
    except OtherFormat:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{folder}/{STORE}: is not the description of a store ({error}); "
            f"resume from a checkpoint, or start the run in another folder ({FOLDER})"
        ) from None


def read_store(folder: str | Path) -> tuple[dict[str, Any], StepManifest] | None:
    """(description, last complete step) of the store in `folder`, or None; raises Damaged if they disagree."""
    description, record = read_description(folder), read_step_manifest(folder)
    if record is None:
        return None
    if description is None:
        raise Damaged(f"{folder}/{STORE}: is missing beside {STEP}; the store is damaged: resume from a checkpoint")
    slots = description["slots"]
    if odd := [slot for slot in (record.slot, *record.pinned) if slot >= slots]:
        raise Damaged(
            f"{folder}/{STEP}: has a step in slot {odd[0]} of {slots}; the store is damaged: resume from a checkpoint"
        )
    return description, record


def read_sums(folder: str | Path, slot: int, rank: int, layers: dict[str, int]) -> dict[str, list[int]]:
    """{leaf: checksums of its layers} of a rank's chunks in a slot; raises Damaged if they do not fit `layers`."""
    path = sums_name(slot, rank)
    try:
        sums = parse_json(read_text(folder, path) or "null", f"{folder}/{path}")
        if sums.keys() != layers.keys() or any(
            len(sums[name]) != count or any(type(n) is not int for n in sums[name]) for name, count in layers.items()
        ):
            raise ValueError("other leaves")
        return sums
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(
            f"{folder}/{path}: does not hold the checksums of the store's leaves; it is damaged: "
            "resume from a checkpoint"
        ) from None
