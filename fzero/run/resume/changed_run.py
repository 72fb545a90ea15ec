"""Values of a run that may change while it goes on: its length, and the numbers of its optimizer and intervals."""

from __future__ import annotations

import re
from dataclasses import replace

from fzero.core.config_tables import Table, flat, set_nested
from fzero.run.config import RunConfig
from fzero.run.config_ranks import first_local
from fzero.run.config_table import apply_table
from fzero.run.config_text import differences
from fzero.run.unused_keys import refuse_unused

# From the step at which a run is resumed on; what its state and its data are made of is not among them.
CHANGING = (
    r"train\.(steps|eval_every|eval_batches|checkpoint_every|keep_last|keep_every|log_every|on_save_error)"
    r"|optim\.(lr|lr_rest|weight_decay|decay|beta1|beta2|eps|momentum|nesterov|clip|schedule\..*)"
)


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of a key of its config.

    >>> may_change("optim.schedule.name"), may_change("train.seed")
    (True, False)
    """
    return re.fullmatch(CHANGING, key) is not None


def split_values(changes: Table) -> tuple[Table, Table]:
    """(the values that may change while a run goes on, the rest) of a table of changes."""
    changing: Table = {}
    remainder: Table = {}
    for key, value in flat(changes):
        set_nested(changing if may_change(key) else remainder, key, value)
    return changing, remainder


def with_values(recorded: RunConfig, values: Table) -> tuple[RunConfig, list[str]]:
    """(the config of a run from now on, a line for each value that changed).

    What follows from the number of steps where it is not written, the end of an optimizer's warm-up, stays as it was.
    Raises ValueError for values that are wrong or do not go together.
    """
    optim, steps = recorded.optim, recorded.train.steps
    new = apply_table(recorded, values)
    refuse_unused(new, values)
    local = optim.name == "zero_one_adam" and optim.sum_every > 1
    if new.train.steps != steps and not optim.freeze_steps and (local or optim.name.startswith("onebit_")):
        freeze = first_local(optim, steps) if optim.name != "onebit_lamb" else max(1, steps // 2)
        new = replace(new, optim=replace(new.optim, freeze_steps=freeze))
    return new, differences(new, recorded)
