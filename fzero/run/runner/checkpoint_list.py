"""List, describe and remove checkpoints, reading only manifests and the names and sizes of files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from fzero import checkpoint
from fzero.checkpoint import Folder
from fzero.checkpoint.directory import SPARE, clean_step, step_of
from fzero.checkpoint.manifest import MANIFEST, parse_leaf
from fzero.checkpoint.restore_tree import dtype_name
from fzero.checkpoint.stored_state import verify_store
from fzero.core.config_tables import flat
from fzero.core.storage import Objects, is_url, join
from fzero.offload.store_manifest import STEP, STORE, read_store
from fzero.run.config import config_table
from fzero.run.config.config_versions import current_keys
from fzero.run.setup import run_folder
from fzero.sharding.spec import Offload


class CheckpointEntry(NamedTuple):
    """The folder of one step."""

    step: int
    path: Folder
    # complete; damaged (by its manifest, or files that are missing or too short); incomplete (it has no manifest)
    state: str
    note: str  # the damage, or leftover files
    written: float | None  # when it became complete, in seconds since 1970; None if the store does not tell
    size: int | None  # bytes of its files; None if the store does not tell
    leaves: int | None
    nbytes: int | None  # bytes of the leaves' elements
    mesh: dict[str, int] | None  # of the run that saved it; axes of one process are left out


class OnDisk(NamedTuple):
    """The store that a run keeps its state in, by its record."""

    place: str
    step: int | None  # the last complete one; None if there is none
    pinned: list[int]  # earlier steps that it keeps as checkpoints
    note: str


class Listing(NamedTuple):
    """The checkpoints in a folder."""

    checkpoint_dir: Folder
    entries: list[CheckpointEntry]  # by step
    spare: int  # bytes of files that the next save will overwrite
    store: OnDisk | None  # if the run keeps its state on a disk


class CheckpointDescription(NamedTuple):
    """The content of a manifest."""

    path: Folder
    step: int
    versions: dict[str, str]
    mesh: dict[str, int]
    config: dict[str, Any]  # `a.b`: value, for values that differ from the preset
    leaves: dict[str, dict[str, Any]]  # name: shape, dtype, spec, parts, chunk, bytes, digest
    totals: dict[
        str, dict[str, int]
    ]  # params, master, opt_state, ...: leaves, elements, bytes; of all leaves, selected or not


def checkpoint_dir_of(location: str) -> tuple[Folder, Path | None]:
    """(the folder of checkpoints of a location; the run's folder or None)."""
    if is_url(location):
        return trim_zeros(location), None
    folder = Path(location)
    if not folder.is_dir():
        raise ValueError(
            f"{location}: no such folder; give a run, a folder with checkpoints, or a URL such as s3://bucket/run"
        )
    if is_run(folder):
        return run_folder.checkpoints_of(folder, run_folder.read_config(folder)), folder
    return folder, None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, perhaps of one whose config.json is missing."""
    return any(os.path.lexists(folder / name) for name in (run_folder.CONFIG, run_folder.ENVIRONMENT))


def path_of(location: str) -> Folder:
    """The checkpoint that `location` names: itself, or the newest complete one; raises ValueError for none."""
    if is_url(location):
        candidate = Objects(location).read(MANIFEST) is not None
        return trim_zeros(location) if candidate else checkpoint.latest(trim_zeros(location))
    candidate = Path(location)
    if os.path.lexists(candidate / MANIFEST) or (candidate.is_dir() and step_of(candidate.name) is not None):
        return candidate
    return checkpoint.latest(checkpoint_dir_of(location)[0])


def trim_zeros(url: str) -> str:
    """A URL without the slashes at its end."""
    return url if url.endswith("://") else url.rstrip("/")


# ---- which there are ----


def listing(location: str) -> Listing:
    """The checkpoints of a run, folder or URL, whole or not; raises ValueError."""
    checkpoint_dir, folder = checkpoint_dir_of(location)
    files = files_of(checkpoint_dir)
    if MANIFEST in files.get("", {}):
        raise ValueError(f"{location}: is a checkpoint; give the folder that it is in, or use `fzero ckpt show`")
    by_step = sorted((step, name) for name in files if (step := step_of(name)) is not None)
    entries = [entry_of(join(checkpoint_dir, name), step, files[name]) for step, name in by_step]
    return Listing(
        checkpoint_dir,
        entries,
        sum(size or 0 for size in files.get(SPARE, {}).values()),
        on_disk(folder) if folder else None,
    )


def files_of(checkpoint_dir: Folder) -> dict[str, dict[str, int | None]]:
    """{folder: {file below it: bytes}} in a folder of checkpoints."""
    files: dict[str, dict[str, int | None]] = {}
    if is_url(checkpoint_dir):
        sizes: dict[str, int | None] = dict.fromkeys(Objects(str(checkpoint_dir)).names())
    else:
        paths = (
            [path for path in Path(checkpoint_dir).rglob("*") if path.is_file()]
            if Path(checkpoint_dir).is_dir()
            else []
        )
        sizes = {path.relative_to(checkpoint_dir).as_posix(): path.stat().st_size for path in paths}
        files |= {
            path.name: {}
            for path in (Path(checkpoint_dir).iterdir() if Path(checkpoint_dir).is_dir() else ())
            if path.is_dir()
        }
    for name, size in sizes.items():
        top, slash, tail = name.partition("/")
        files.setdefault(top if slash else "", {})[tail if slash else top] = size
    return files


def entry_of(path: Folder, step: int, files: dict[str, int | None]) -> CheckpointEntry:
    """The Entry of a step, from its manifest and the names and sizes of its files."""
    size = None if is_url(path) else sum(size or 0 for size in files.values())
    if MANIFEST not in files:
        note = f"{len(files)} files that no manifest names: of a save that is under way, or did not end"
        return CheckpointEntry(step, path, "incomplete", note, None, size, None, None, None)
    written = None if is_url(path) else Path(path, MANIFEST).stat().st_mtime
    try:
        record = checkpoint.read_manifest(path)
    except ValueError as error:
        return CheckpointEntry(step, path, "damaged", str(error), written, size, None, None, None)
    leaves = {name: parse_leaf(table) for name, table in record["leaves"].items()}
    parts = {
        f"{record['arrays']}/{leaf.layout.file(name, shard)}": None if leaf.layout.compress else leaf.layout.file_bytes
        for name, leaf in leaves.items()
        for shard in leaf.layout.tiles()
    }
    short = [
        name
        for name, min_bytes in parts.items()
        if name not in files
        or (min_bytes is not None and (actual_bytes := files[name]) is not None and actual_bytes < min_bytes)
    ]
    strays = [name for name in files if name != MANIFEST and not name.startswith(f"{record['arrays']}/")]
    state, note = ("damaged", f"{subject_text(short)} missing or too short") if short else ("complete", "")
    if strays and not note:
        note = f"{subject_text(strays)} left by a save that did not end"
    return CheckpointEntry(
        step,
        path,
        state,
        note,
        written,
        size,
        len(leaves),
        sum(leaf.layout.nbytes for leaf in leaves.values()),
        record["mesh"],
    )


def subject_text(names: list[str]) -> str:
    """The first name and how many there are, as the subject of a sentence."""
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} files ({names[0]}, ...) are"


def on_disk(folder: Path) -> OnDisk | None:
    """The store of the run in `folder`; None if its state is not on a disk."""
    store_path = store_of(folder)
    if store_path is None:
        return None
    try:
        opened = read_store(store_path)
    except ValueError as error:
        return OnDisk(store_path, None, [], str(error))
    if opened is None:
        return OnDisk(store_path, None, [], "")
    record = opened[1]
    note = "the step that overwrites it did not end" if record.dirty else "the run has ended" if record.done else ""
    return OnDisk(store_path, record.step, sorted(record.pinned.values()), note)


def store_of(folder: Path) -> str | None:
    """The folder of the store of the run in `folder`; None without one."""
    value = run_folder.read_config(folder)
    if not Offload.parse(value.offload).on_disk:
        return None
    return str(value.nvme.folder or folder / run_folder.NVME)


def verify(location: str) -> list[tuple[Folder, list[str]]]:
    """(what was read, a line for each damage in it) for what `location` names: a checkpoint, the newest one of a run,
    folder or URL, and the store of a run, or in a folder, with its state on a disk. Raises ValueError for none."""
    if is_url(location):
        path = path_of(location)
        return [(path, checkpoint.verify(path))]
    folder, store = Path(location), None
    if os.path.lexists(folder / STORE) or os.path.lexists(folder / STEP):
        store = location
    elif is_run(folder):
        store = store_of(folder)
    if store is None or is_url(store):
        path = path_of(location)
        return [(path, checkpoint.verify(path))]
    reads: list[tuple[Folder, list[str]]] = [(store, verify_store(Path(store)))]
    if store == location or not checkpoint.steps(checkpoint_dir_of(location)[0]):
        return reads
    path = path_of(location)
    return [(path, checkpoint.verify(path)), *reads]


# ---- what one holds ----


def describe_checkpoint(location: str) -> CheckpointDescription:
    """The content of the manifest of a checkpoint (of a run, folder or URL: of its newest)."""
    path = path_of(location)
    record = checkpoint.read_manifest(path)
    leaves, totals = {}, {}
    for name, table in record["leaves"].items():
        layout = parse_leaf(table).layout
        leaves[name] = {
            "shape": list(layout.shape),
            "dtype": dtype_name(layout.dtype),
            "spec": table["spec"],
            "parts": len(layout.tiles()),
            "chunk": list(layout.chunk),
            "bytes": layout.nbytes,
            "digest": table["digest"],
        }
        total = totals.setdefault(name.split("/")[0], {"leaves": 0, "elements": 0, "bytes": 0})
        for key, value in (("leaves", 1), ("elements", math.prod(layout.shape)), ("bytes", layout.nbytes)):
            total[key] += value
    return CheckpointDescription(
        path, record["step"], record["versions"], record["mesh"], differing_values(record["config"]), leaves, totals
    )


def differing_values(saved: Any) -> dict[str, Any]:
    """{`a.b`: value} where a manifest's config differs from its preset; all values if the config is no run's."""
    if not isinstance(saved, dict):
        return {} if saved is None else {"": saved}
    saved = current_keys(saved)
    values = dict(flat(saved))
    preset, chosen = saved.get("preset"), {"train.steps", "optim.name"}  # which other defaults follow from
    if not isinstance(preset, str):
        return values
    base: dict[str, Any] = {"preset": preset}
    if not preset:
        base["model"] = {"family": saved.get("model", {}).get("family", "")}
    try:
        plain = dict(flat(config_table.to_table(config_table.from_table(base))))
        table = {**base, "train": {"steps": values["train.steps"]}, "optim": {"name": values["optim.name"]}}
        following = dict(flat(config_table.to_table(config_table.from_table(table))))
    except (ValueError, KeyError):  # of another version of fzero
        return values
    expected = {name: (plain if name in chosen else following).get(name, ...) for name in values}
    return {name: value for name, value in values.items() if name == "preset" or value != as_json(expected[name])}


def as_json(value: Any) -> Any:
    """A value after a round trip through JSON."""
    return value if value is ... else json.loads(json.dumps(value))


# ---- removing ----


def remove(places: list[str], steps: list[int] | None = None, *, force: bool = False) -> list[str]:
    """Remove checkpoints and the leftovers of unfinished saves; returns a line for each.

    places: checkpoints; or, with `steps`, one run, folder or URL that has them. force: even if no complete
    checkpoint would be left. Raises ValueError before anything is removed.
    """
    if steps and len(places) != 1:
        raise ValueError(f"--step names checkpoints of one run and {len(places)} places are given; give one")
    if steps:
        checkpoint_dir = checkpoint_dir_of(places[0])[0]
        paths = [checkpoint.step_folder(checkpoint_dir, step) for step in steps]
    else:
        paths = [trim_zeros(location) if is_url(location) else Path(location) for location in places]
    homes: dict[str, list[tuple[Folder, int]]] = {}
    for path in dict.fromkeys(paths):
        name = str(path).rsplit("/", 1)[-1] if is_url(path) else Path(path).absolute().name
        number = step_of(name)
        if number is None:
            raise ValueError(
                f"{path}: is not a checkpoint, which is a folder step-XXXXXXXX; name one, or use --step N with a run"
            )
        checkpoint_dir = str(path).rsplit("/", 1)[0] if is_url(path) else str(Path(path).absolute().parent)
        homes.setdefault(checkpoint_dir, []).append((path, number))
    states = {
        checkpoint_dir: {entry.step: entry.state for entry in listing(checkpoint_dir).entries}
        for checkpoint_dir in homes
    }
    for checkpoint_dir, targets in homes.items():
        for path, step in targets:
            if step not in states[checkpoint_dir]:
                raise ValueError(
                    f"{path}: no such checkpoint; {checkpoint_dir} has "
                    f"{', '.join(map(str, states[checkpoint_dir])) or 'none'}"
                )
        complete_steps = {step for step, state in states[checkpoint_dir].items() if state == "complete"}
        if complete_steps and not force and not complete_steps - {step for _, step in targets}:
            last = checkpoint.step_folder(checkpoint_dir, max(complete_steps))
            raise ValueError(
                f"{last}: is the last complete checkpoint in {checkpoint_dir}; nothing was removed (--force "
                "removes it too)"
            )
    lines = []
    for checkpoint_dir, targets in homes.items():
        for path, step in targets:
            if states[checkpoint_dir][step] == "incomplete":
                clean_step(path)
            else:
                checkpoint.remove(checkpoint_dir, step)
            lines.append(f"removed {path}")
    return lines
