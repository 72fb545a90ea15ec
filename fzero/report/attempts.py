"""Which attempts of a run are counted together: the last one that made a step, and those like it.

A resumed run may have another mesh, stage, offload or machine, and its steps then take another time. A figure of the
run is that of one placement, and what belongs to another one is neither averaged with it nor divided by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.core.config_tables import flat
from fzero.run.config_versions import current_keys
from fzero.run.placement import FLAGS

Attempt = Mapping[str, Any]
# What the time of a step depends on, of a line of attempts.jsonl.
FACTS = ("processes", "zero", "offload", "precision", "threads", "micro_batches", "compiled", "fp32_matmul", "update")
FACTS += ("machine", "versions", "config")


def sizes(mesh: Any) -> dict[str, int]:
    """The axes of a mesh that divide something."""
    return {axis: size for axis, size in (mesh or {}).items() if size != 1}


def attempts_match(first: Attempt, second: Attempt) -> bool:
    """Whether two attempts computed the same thing in the same place."""
    same_mesh = sizes(first.get("mesh")) == sizes(second.get("mesh"))
    return same_mesh and all(first.get(key) == second.get(key) for key in FACTS)


def attempt_of_rows(steps: Sequence[int], attempts: Sequence[Attempt]) -> list[int]:
    """The index of the attempt that made each step; -1 for a step before all of them."""
    firsts = [a.get("first_step", 0) for a in attempts]
    return [max((i for i, first in enumerate(firsts) if first < step), default=-1) for step in steps]


def starts(series: Mapping[str, list[Any]], attempts: Sequence[Attempt]) -> list[tuple[int, int]]:
    """(tokens seen before, or steps if tokens were not recorded; number) of each attempt after the first that made a
    step."""
    places, row_attempts = series.get("tokens", series["step"]), attempt_of_rows(series["step"], attempts)
    firsts = {number: row for row, number in reversed(list(enumerate(row_attempts)))}
    return [(places[row - 1], attempts[n].get("attempt", n + 1)) for n, row in sorted(firsts.items()) if row and n >= 0]


def subject(steps: Sequence[int], attempts: Sequence[Attempt]) -> Attempt:
    """The last attempt that made a step, of which the figures of a run are; {} if none is recorded."""
    row_attempts = attempt_of_rows(steps, attempts)
    return (
        attempts[row_attempts[-1]]
        if attempts and row_attempts and row_attempts[-1] >= 0
        else (attempts[-1] if attempts else {})
    )


def counted(steps: Sequence[int], attempts: Sequence[Attempt]) -> list[int]:
    """The rows of the subject and of the attempts like it."""
    reference = subject(steps, attempts)
    by_index = [reference, *attempts]  # index -1 + 1: before all
    return [
        i for i, index in enumerate(attempt_of_rows(steps, attempts)) if attempts_match(by_index[index + 1], reference)
    ]


def belongs(record: Mapping[str, Any] | None, steps: Sequence[int], attempts: Sequence[Attempt]) -> bool:
    """Whether a record that names its attempt was made by the subject, or one like it."""
    number = (record or {}).get("attempt")
    matches = [a for i, a in enumerate(attempts, 1) if a.get("attempt", i) == number]
    return number is None or not matches or attempts_match(matches[0], subject(steps, attempts))


def planned_for(plan: Mapping[str, Any], attempt: Attempt) -> bool:
    """Whether a plan is of the placement of an attempt, as far as it tells."""
    plan_config = dict(flat(current_keys(plan.get("config") or {})))
    attempt_config = dict(flat(attempt.get("config") or {}))
    keys = [key for key in FLAGS if key in plan_config and key in attempt_config and not key.startswith("nvme.")]
    if "mesh" in plan and "mesh" in attempt and sizes(plan["mesh"]) != sizes(attempt["mesh"]):
        return False
    return all(plan_config[key] == attempt_config[key] for key in keys)


def rates(
    series: Mapping[str, list[Any]], attempts: Sequence[Attempt], indices: Sequence[int]
) -> list[tuple[int, float | None, float | None]]:
    """(steps made, median seconds of a step, median tokens/s) of each attempt, over its rows among `indices`."""
    row_attempts, table = attempt_of_rows(series["step"], attempts), []

    def middle(name: str, rows: list[int]) -> float | None:
        values = [value for i in rows if (value := series.get(name, {i: None})[i]) is not None]
        return statistics.median(values) if values else None

    for number in range(len(attempts)):
        rows = [i for i in indices if row_attempts[i] == number]
        table.append((row_attempts.count(number), middle("step_s", rows), middle("tokens_per_s", rows)))
    return table
