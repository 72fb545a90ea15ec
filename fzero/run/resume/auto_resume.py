"""Resume a run by the command that started it: detect the run in the folder, and check the command's values."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fzero.core.files import make_folder, open_to_write
from fzero.core.storage import absolute
from fzero.core.tables import Table, flat, put
from fzero.data.mixture import Mixture
from fzero.models.presets import family_of
from fzero.run import run_folder, run_lock
from fzero.run.config import RunConfig
from fzero.run.config_table import apply_table, to_table
from fzero.run.placement import KEYS
from fzero.run.resume.changed_run import may_change

MARKER = "begun"  # a file that marks the folder of a run without config.json yet: its files belong to that run


def take_folder(folder: Path, *, auto: bool) -> bool:
    """Make this process the owner of a `folder` that is free for a new run; returns whether it was there before.

    auto: remove the files of an earlier start of the run that ended before it trained.
    Raises ValueError if the folder holds anything else, or another process owns it.
    """
    if not any(os.path.lexists(folder / name) for name in (run_lock.LOCK, *([MARKER] if auto else []))):
        run_folder.expect_free(folder)
    there = run_lock.take(folder)
    if auto and (folder / MARKER).is_file() and not os.path.lexists(folder / run_folder.CONFIG):
        run_folder.clear_folder(folder, keep=True)
    run_folder.expect_free(folder)
    return there


def put_marker(folder: Path) -> None:
    """Mark `folder` as that of a run without config.json yet."""
    make_folder(folder)
    os.close(open_to_write(folder / MARKER, "replace"))


def remove_marker(folder: Path) -> None:
    """Remove the marker file, once config.json is written."""
    (folder / MARKER).unlink(missing_ok=True)


def run_exists(folder: Path) -> bool:
    """Whether `folder` holds a run."""
    return os.path.lexists(folder / run_folder.CONFIG)


def allowed_changes(table: Table, folder: Path, init: Path | None) -> Table:
    """The values in the table of a command that a resumed run takes over: of its placement, and those of its steps,
    optimizer, schedule and intervals that differ.

    Raises ValueError naming the first other key whose value in `table` differs from that of the run in `folder`.
    """
    old, recorded = run_folder.read_config(folder), run_folder.read_environment(folder)
    if init is not None and str(init.resolve()) != recorded.get("init", ""):
        raise difference_error("--init", init, recorded.get("init") or "no other run", folder)
    if table.get("preset", old.preset) != old.preset:
        raise difference_error("preset", table["preset"], old.preset, folder)
    rest: Table = {}
    changes: Table = {}
    for key, value in flat({name: value for name, value in table.items() if name != "preset"}):
        if key == "model.family":
            if value != family_of(old.model):
                raise difference_error(key, value, family_of(old.model), folder)
        elif key == "model.vocab_size":  # below adapters too
            if value != old.model.vocab_size:
                raise difference_error(key, value, old.model.vocab_size, folder)
        elif value != "auto" and (key, value) != ("pipeline.layout", "cost"):  # decided already
            put(changes if key in KEYS or key.startswith("mesh.") else rest, key, value)
    given, mine = dict(flat(to_table(apply_settings(old, rest)))), dict(flat(to_table(old)))
    for key, value in flat(rest):
        if given[key] != mine[key]:
            if not may_change(key):
                raise difference_error(key, given[key], mine[key], folder)
            put(changes, key, value)
    return changes


def apply_settings(old: RunConfig, table: Table) -> RunConfig:
    """The run's config with the values of `table`, and absolute paths of its corpora."""
    path = old.data.path
    new = apply_table(replace(old, mesh={}), table)
    if new.data.path not in ("stdlib", path):
        new = replace(new, data=replace(new.data, path=absolute(new.data.path)))
    if new.data.cache:
        new = replace(new, data=replace(new.data, cache=absolute(new.data.cache)))
    if new.data.mixture:
        new = replace(new, data=replace(new.data, mixture=str(Mixture.parse(new.data.mixture).absolute())))
    return new


def difference_error(key: str, given: Any, there: Any, folder: Path) -> ValueError:
    """The error for a value that differs from the run's."""
    return ValueError(
        f"{key} is {given} here and {there} in {folder}, which is to be resumed; give the same, leave it out, "
        "or name another --out"
    )
