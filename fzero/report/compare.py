"""Which attempts of a run are counted together, and what differs between runs: configs, losses and speeds.

A resumed run may have another mesh, stage, offload or machine. A figure of the run is that of one placement: of the
last attempt that made a step, and of those like it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.core.config_tables import flat
from fzero.report.values import RunReport
from fzero.run.config.config_versions import current_keys
from fzero.run.config.placement import FLAGS

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
    """(tokens seen before, or steps; number) of each attempt after the first that made a step."""
    places, row_attempts = series.get("tokens", series["step"]), attempt_of_rows(series["step"], attempts)
    firsts = {number: row for row, number in reversed(list(enumerate(row_attempts)))}
    return [(places[row - 1], attempts[n].get("attempt", n + 1)) for n, row in sorted(firsts.items()) if row and n >= 0]


def subject(steps: Sequence[int], attempts: Sequence[Attempt]) -> Attempt:
    """The last attempt that made a step; {} if none is recorded."""
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


# -- several runs

# Config values that may differ between the runs of a scaling series: layout, amount of work, and places of files.
LAYOUT = (
    *(
        "mesh",
        "zero",
        "reduce",
        "sequence",
        "prefetch",
        "reshard",
        "guard.",
        "nvme.",
        "host_memory_gb",
        "data.path",
        "data.cache",
        "data.retry_minutes",
    ),
    *(
        f"train.{name}"
        for name in ("batch", "micro_batch", "steps", "seed", "eval_", "checkpoint", "keep_", "compress", "snapshot_mb")
    ),
    *(
        f"train.{name}"
        for name in ("log_every", "digest_every", "measure_every", "hang_s", "on_save_error", "memory_check")
    ),
)
ABSENT = "(not there)"


def compare(runs: Sequence[RunReport]) -> dict[str, Any]:
    """{"config": differences, "losses": at equal tokens, "scaling": series, "apart": ...} of two runs or more."""
    return {
        "config": differences(runs),
        "losses": losses(runs),
        "scaling": scaling(runs),
        "apart": conflicting_keys(runs),
    }


def ranks_of(run: RunReport) -> int:
    """The number of processes of a run, in its last attempt that made a step."""
    last = subject(run.series["step"], run.attempts)
    return int(
        last.get("processes") or run.environment.get("processes") or math.prod(run.config.get("mesh", {}).values())
    )


def differences(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """[{"key", "values": one for each run}] of the config values that differ between runs."""
    tables = [dict(flat(run.config)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, ABSENT) for table in tables]
        if any(value != values[0] for value in values):
            rows.append({"key": key, "values": values})
    return rows


def losses(runs: Sequence[RunReport]) -> dict[str, Any] | None:
    """The losses of all runs at the largest number of tokens that all have seen."""
    common = min(max(run.series["tokens"]) for run in runs) if all("tokens" in run.series for run in runs) else 0
    if not common:
        return None
    train, val, val_tokens = [], [], []
    for run in runs:
        upto = [i for i, tokens in enumerate(run.series["tokens"]) if tokens <= common]
        window = [run.series["loss"][i] for i in upto[-max(1, len(upto) // 10) :] if run.series["loss"][i] is not None]
        train.append(sum(window) / len(window) if window else None)
        column = run.series.get("val_loss", [None] * len(run.series["loss"]))
        indices = [i for i in upto if column[i] is not None]
        val.append(column[indices[-1]] if indices else None)
        val_tokens.append(run.series["tokens"][indices[-1]] if indices else None)
    return {"tokens": common, "train": train, "val": val, "val_tokens": val_tokens}


def scaling(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Series of runs of the same work on different numbers of ranks, with tokens/s and efficiency."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(json.dumps(work_of(run), sort_keys=True), []).append(i)
    series = []
    for members in groups.values():
        points = [point for i in members if (point := point_of(i, runs[i])) is not None]
        name = runs[members[0]].config.get("preset") or "model"
        for kind, chosen in series_of(points):
            chosen.sort(key=lambda p: (p["ranks"], -p["tokens_per_s"]))
            first = chosen[0]["tokens_per_s"]
            base = first / chosen[0]["ranks"]
            ratios = [
                {"efficiency": p["tokens_per_s"] / p["ranks"] / base, "speedup": p["tokens_per_s"] / first}
                for p in chosen
            ]
            series.append({"name": name, "kind": kind, "points": [p | ratio for p, ratio in zip(chosen, ratios)]})
    return series


def series_of(points: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """[(kind, points)] of the series among points of the same work, of two numbers of ranks or more."""
    series = []
    for kind, key in (("strong", lambda p: p["batch"]), ("weak", lambda p: p["batch"] / p["ranks"])):
        groups: dict[Any, list[dict[str, Any]]] = {}
        for p in points:
            if p["batch"]:
                groups.setdefault(key(p), []).append(p)
        several = [group for group in groups.values() if len({p["ranks"] for p in group}) > 1]
        if several and len(groups) == 1:
            return [(kind, several[0])]
        series += [(kind, group) for group in several]
    return series


def work_of(run: RunReport) -> dict[str, Any]:
    """What the runs of a scaling series share: config but LAYOUT, and machine."""
    machine = subject(run.series["step"], run.attempts).get("machine") or {}
    shared = {key: value for key, value in flat(run.config) if not key.startswith(LAYOUT)}
    return shared | {"machine.cpu": machine.get("cpu"), "machine.cores": machine.get("cores")}


def conflicting_keys(runs: Sequence[RunReport]) -> list[str]:
    """The keys of `work_of` in which runs differ, if no series has two of them."""
    if len({ranks_of(run) for run in runs}) < 2 or scaling(runs):
        return []
    works = [work_of(run) for run in runs]
    keys = dict.fromkeys(key for work in works for key in work)
    return [key for key in keys if len({json.dumps(work.get(key)) for work in works}) > 1]


def point_of(index: int, run: RunReport) -> dict[str, Any] | None:
    """The point of a run in a scaling series; None if its speed is unknown."""
    speed = value_of(run, "tokens_per_s")
    if speed is None:
        return None
    last = subject(run.series["step"], run.attempts)
    mesh = last.get("mesh") or run.config.get("mesh") or {}
    threads = last.get("threads", run.environment.get("threads"))
    cores = last.get("machine", {}).get("cores")
    batch = run.config.get("train", {}).get("batch")
    return {
        "run": index,
        "ranks": ranks_of(run),
        "mesh": mesh,
        "threads": threads,
        "cores": cores,
        "batch": batch,
        "tokens_per_s": speed,
    }


def value_of(run: RunReport, name: str, *, predicted: bool = False) -> Any:
    """The measured (or predicted) value of a quantity; None if unknown."""
    values: Mapping[str, Any] = {q.name: q.predicted if predicted else q.measured for q in run.quantities}
    return values.get(name)
