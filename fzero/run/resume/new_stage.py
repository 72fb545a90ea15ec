"""Begin a stage of a run that is resumed with another length of sequences, or what else a stage has: its config,
checked before anything is loaded, and what the run's record of rollbacks keeps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fzero import models
from fzero.core.tables import Table, put
from fzero.models.base import leaf_shapes
from fzero.run.config import RunConfig
from fzero.run.config_table import apply_table
from fzero.run.corpus import Say, first_samples
from fzero.run.resume import rollback
from fzero.run.stages import staged


def with_changes(recorded: RunConfig, values: Table, say: Say) -> tuple[RunConfig, Table]:
    """(the config of a new last stage of a run, its `stages` left out; the values that differ, by their dotted names).

    values: that were asked for. A model takes longer sequences if none of its parameters changes its shape. Raises
    ValueError if it cannot, and for values that are wrong or do not go together.
    """
    length, most = values.get("data.seq_len", 0), getattr(recorded.model, "max_len", 0)
    if length > most and "model.max_len" in staged(recorded):
        values = {**values, "model.max_len": length}
    table: Table = {}
    for key, value in values.items():
        put(table, key, value)
    if recorded.objective != "text":
        raise ValueError(
            f"{', '.join(values)}: the objective is {recorded.objective}, whose examples were prepared for sequences "
            f"of {recorded.data.seq_len}; leave it out"
        )
    new = apply_table(replace(recorded, stages=()), table)
    before, after = (leaf_shapes(models.build(config.model)) for config in (recorded, new))
    for name, shape in before.items():
        if after[name] != shape:
            raise ValueError(
                f"data.seq_len is {length} and the model has positions of its own for {most} ({name}, "
                f"{list(shape)}), which do not grow; use --seq-len {most} or less, or a model with RoPE"
            )
    was, now = staged(recorded), staged(new)
    changed = {key: now[key] for key in now if now[key] != was[key]}
    if "model.max_len" in changed:
        say(f"the model takes {new.model.max_len:,} positions now, before that {most:,} (model.max_len)")
    return new, changed


def forget_later(folder: Path, config: RunConfig) -> None:
    """Remove from the record of the rollbacks of the run in `folder` the batches that its last stage has in other rows:
    those of the stage before that it had not come to."""
    log = rollback.read_log(folder)
    begin = first_samples(config, [(first, count) for first, count in log.skips])[-1]
    skips, tried = [skip for skip in log.skips if skip[0] < begin], [first for first in log.tried if first < begin]
    if (skips, tried) != (log.skips, log.tried):
        rollback.write_log(folder, log._replace(skips=skips, tried=tried))
