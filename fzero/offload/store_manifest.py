"""The two small files of a store: store.json, its description, and step.json, its last complete step."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.pytree import nearest
from fzero.core.storage import Damaged, read_text
from fzero.offload.chunk_files import LeafFiles

FORMAT = 1
STORE, STEP = "store.json", "step.json"


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


def describe_store(leaves: dict[str, LeafFiles], ranks: int, slots: int, owner: dict[str, Any]) -> dict[str, Any]:
    """The content of store.json for a store of these leaves, as JSON can hold it."""
    listed = {
        name: {
            "shape": list(kept.shape),
            "dtype": str(kept.dtype).removeprefix("torch."),
            "stacked": kept.stacked,
            "fixed": kept.slots < slots,  # written once
        }
        for name, kept in leaves.items()
    }
    return {"format": FORMAT, "ranks": ranks, "slots": slots, "owner": owner, "leaves": listed}


def read_step_manifest(folder: str | Path) -> StepManifest | None:
    """The last complete step of the store in `folder`, or None if there is none.

    Raises Damaged if step.json is damaged.
    """
    try:
        text = read_text(folder, STEP)
        if text is None:
            return None
        found = json.loads(text)
        if found.pop("sum") != zlib.crc32(json.dumps(found).encode()):
            raise ValueError("its checksum does not agree")
        return StepManifest(**{**found, "pinned": {int(slot): step for slot, step in found["pinned"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{folder}/{STEP}: is not a record of a step ({error}); the store is damaged: resume from a checkpoint") from None


def step_manifest_text(record: StepManifest) -> str:
    """The text of step.json for a record, with a checksum."""
    said = {**record._asdict(), "pinned": {str(slot): step for slot, step in record.pinned.items()}}
    return json.dumps({**said, "sum": zlib.crc32(json.dumps(said).encode())})


def check_same_store(folder: str | Path, wanted: dict[str, Any]) -> None:
    """Raise ValueError if the store in `folder` is not the one described by `wanted`, naming the first difference."""
    found = read_description(folder)
    if found is None:
        raise ValueError(
            f"{folder}: holds no store (there is no {STORE}); start the run without --resume, or give the folder it began with"
        )
    leaves = found["leaves"]
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{folder}: is a store of format {found.get('format')} and this version reads {FORMAT}; use the version that wrote it"
        )
    for name, leaf in wanted["leaves"].items():
        if name not in leaves:
            raise ValueError(
                f"{folder}: is the store of another model or optimizer: it has no {name}{nearest(name, leaves)}; "
                "give the folder of this run"
            )
        if leaves[name] != leaf:
            said, asked = (f"{'frozen ' * x['fixed']}{x['dtype']} {x['shape']}" for x in (leaves[name], leaf))
            raise ValueError(
                f"{folder}: is the store of another model or mesh: {name} is {said} there and {asked} here; give the folder of this run"
            )
    extra = sorted(set(leaves) - set(wanted["leaves"]))
    if extra:
        raise ValueError(f"{folder}: is the store of another model or optimizer: it has {extra[0]} too; give the folder of this run")
    for key, fix in (("ranks", "use as many processes"), ("slots", "keep nvme.slots"), ("owner", "give the folder of this run")):
        if found.get(key) != wanted[key]:
            raise ValueError(f"{folder}: the store's {key} is {found.get(key)} and the run's is {wanted[key]}; {fix}")


def read_description(folder: str | Path) -> dict[str, Any] | None:
    """The content of store.json in `folder`, or None if there is none.

    Raises Damaged if it does not describe a store.
    """
    try:
        text = read_text(folder, STORE)
        if text is None:
            return None
        found = json.loads(text)
        if all(leaf.keys() >= {"shape", "dtype", "stacked", "fixed"} for leaf in found["leaves"].values()):
            return found
        raise ValueError("its leaves lack fields")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{folder}/{STORE}: is not the description of a store ({error}); "
            "resume from a checkpoint, or start the run in another folder (--nvme)"
        ) from None
