"""Resume a run by the command that started it: detect the run in the folder, and check the command's values.

And begin a stage of a run that is resumed with another length of sequences, or what else a stage has.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fzero import models
from fzero.core.config_tables import Table, flat, set_nested
from fzero.core.files import make_folder, open_to_write
from fzero.core.storage import absolute
from fzero.data.mixture import Mixture
from fzero.models.base import leaf_shapes
from fzero.models.configs import family_of
from fzero.run.config.config_table import apply_table, to_table
from fzero.run.config.placement import KEYS, may_change
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import staged
from fzero.run.runner import rollback
from fzero.run.setup import run_folder, run_lock
from fzero.run.setup.coordinator import Say
from fzero.run.setup.corpus import first_samples


def with_changes(recorded: RunConfig, values: Table, say: Say) -> tuple[RunConfig, Table]:
    """(the config of a new last stage of a run, its changed values by name); raises ValueError for wrong ones."""
    length, max_len = values.get("data.seq_len", 0), getattr(recorded.model, "max_len", 0)
    if length > max_len and "model.max_len" in staged(recorded):
        values = {**values, "model.max_len": length}
    table: Table = {}
    for key, value in values.items():
        set_nested(table, key, value)
    if recorded.task.examples:
        raise ValueError(
            f"{', '.join(values)}: the objective is {recorded.objective}, whose examples were prepared for sequences "
            f"of {recorded.data.seq_len}; leave it out"
        )
    new = apply_table(replace(recorded, stages=()), table)
    old_shapes, new_shapes = (leaf_shapes(models.build(config.model)) for config in (recorded, new))
    for name, shape in old_shapes.items():
        if new_shapes[name] != shape:
            raise ValueError(
                f"data.seq_len is {length} and the model has positions of its own for {max_len} ({name}, "
                f"{list(shape)}), which do not grow; use --seq-len {max_len} or less, or a model with RoPE"
            )
    old_values, new_values = staged(recorded), staged(new)
    changed = {key: new_values[key] for key in new_values if new_values[key] != old_values[key]}
    if "model.max_len" in changed:
        say(f"the model takes {new.model.max_len:,} positions now, before that {max_len:,} (model.max_len)")
    return new, changed


def drop_later_skips(folder: Path, config: RunConfig) -> None:
    """Drop from the record of rollbacks the batches that the run's last stage has in other rows."""
    log = rollback.read_log(folder)
    begin = first_samples(config, [(first, count) for first, count in log.skips])[-1]
    skips, tried = [skip for skip in log.skips if skip[0] < begin], [first for first in log.tried if first < begin]
    if (skips, tried) != (log.skips, log.tried):
        rollback.write_log(folder, log._replace(skips=skips, tried=tried))


MARKER = "begun"  # a file that marks the folder of a run without config.json yet: its files belong to that run


def claim_folder(folder: Path, *, auto: bool) -> bool:
    """Own a `folder` that is free for a new run; whether it was there before; auto: remove an earlier start's files."""
    if not any(os.path.lexists(folder / name) for name in (run_lock.LOCK, *([MARKER] if auto else []))):
        run_folder.expect_free(folder)
    preexisting = run_lock.acquire(folder)
    if auto and (folder / MARKER).is_file() and not os.path.lexists(folder / run_folder.CONFIG):
        run_folder.clear_folder(folder, preserve=True)
    run_folder.expect_free(folder)
    return preexisting


def write_marker(folder: Path) -> None:
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
    """The values in the table of a command that a resumed run takes over; raises ValueError for other changes."""
    old, recorded = run_folder.read_config(folder), run_folder.read_environment(folder)
    if init is not None and str(init.resolve()) != recorded.get("init", ""):
        raise difference_error("--init", init, recorded.get("init") or "no other run", folder)
    if table.get("preset", old.preset) != old.preset:
        raise difference_error("preset", table["preset"], old.preset, folder)
    other_values: Table = {}
    changes: Table = {}
    for key, value in flat({name: value for name, value in table.items() if name != "preset"}):
        if key == "model.family":
            if value != family_of(old.model):
                raise difference_error(key, value, family_of(old.model), folder)
        elif key == "model.vocab_size":  # below adapters too
            if value != old.model.vocab_size:
                raise difference_error(key, value, old.model.vocab_size, folder)
        elif value != "auto" and (key, value) != ("pipeline.layout", "cost"):  # decided already
            set_nested(changes if key in KEYS or key.startswith("mesh.") else other_values, key, value)
    new_values, run_values = dict(flat(to_table(apply_settings(old, other_values)))), dict(flat(to_table(old)))
    for key, value in flat(other_values):
        if new_values[key] != run_values[key]:
            if not may_change(key):
                raise difference_error(key, new_values[key], run_values[key], folder)
            set_nested(changes, key, value)
    return changes


def apply_settings(old: RunConfig, table: Table) -> RunConfig:
    """The run's config with the values of `table`, and absolute paths of its corpora."""
    return with_absolute_data(apply_table(replace(old, mesh={}), table), ("stdlib", old.data.path))


def with_absolute_data(config: RunConfig, unchanged: tuple[str, ...] = ("stdlib",)) -> RunConfig:
    """The config with absolute paths of its corpora, but for those of `data.path` that stay as they are."""
    d, paths = config.data, dict[str, str]()
    if d.path not in unchanged:
        paths["path"] = absolute(d.path)
    if d.cache:
        paths["cache"] = absolute(d.cache)
    if d.mixture:
        paths["mixture"] = str(Mixture.parse(d.mixture).absolute())
    return replace(config, data=replace(d, **paths)) if paths else config


def difference_error(key: str, value: Any, recorded: Any, folder: Path) -> ValueError:
    """The error for a value that differs from the run's."""
    return ValueError(
        f"{key} is {value} here and {recorded} in {folder}, which is to be resumed; give the same, leave it out, "
        "or name another --out"
    )
