"""Several runs beside each other: what differs in their configs, their losses and speeds, and how the speed grows with the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.read import flat
from fzero.report.values import RunReport

# What may differ between the runs of one series of scaling: how the work is laid out, how much there is of it, and where files are.
LAYOUT = (
    *(
        "mesh",
        "zero",
        "reduce",
        "sequence",
        "accumulate",
        "prefetch",
        "reshard",
        "guard.",
        "nvme.",
        "data.path",
        "optim.lr",
        "optim.schedule",
    ),
    *(f"train.{name}" for name in ("batch", "micro_batch", "steps", "seed", "eval_", "checkpoint", "keep_", "compress", "snapshot_mb")),
    *(f"train.{name}" for name in ("log_every", "digest_every", "measure_every", "hang_s", "on_save_error", "memory_check")),
)
ABSENT = "(not there)"


def compare(runs: Sequence[RunReport]) -> dict[str, Any]:
    """{"config": differences, "losses": at the same tokens, "scaling": series} of two runs or more."""
    return {"config": differences(runs), "losses": losses(runs), "scaling": scaling(runs)}


def ranks_of(run: RunReport) -> int:
    """How many processes a run was on, by its last attempt."""
    last = run.attempts[-1] if run.attempts else {}
    return int(last.get("processes") or run.environment.get("processes") or math.prod(run.config.get("mesh", {}).values()))


def differences(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """[{"key", "values": one of each run}] of the config values in which the runs are not all equal."""
    tables = [dict(flat(run.config)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, ABSENT) for table in tables]
        if any(value != values[0] for value in values):
            rows.append({"key": key, "values": values})
    return rows


def losses(runs: Sequence[RunReport]) -> dict[str, Any] | None:
    """{"tokens": the most that all runs have seen, "train": mean of the last tenth of steps before it, "val": the last one up to it}."""
    common = min(max(run.series["tokens"]) for run in runs) if all("tokens" in run.series for run in runs) else 0
    if not common:
        return None
    train, val = [], []
    for run in runs:
        upto = [i for i, tokens in enumerate(run.series["tokens"]) if tokens <= common]
        window = [run.series["loss"][i] for i in upto[-max(1, len(upto) // 10) :] if run.series["loss"][i] is not None]
        train.append(sum(window) / len(window) if window else None)
        seen = [value for i in upto if (value := run.series.get("val_loss", [None] * len(run.series["loss"]))[i]) is not None]
        val.append(seen[-1] if seen else None)
    return {"tokens": common, "train": train, "val": val}


def scaling(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Series of runs of the same work on different numbers of ranks, with tokens/s and efficiency of each.

    efficiency = (tokens/s / ranks) / (tokens/s / ranks of the run with the fewest ranks). "weak": the batch of a rank is the same in all;
    "strong": that of all ranks together is. Runs belong together where their configs agree in all but the layout and the batch.
    """
    series: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        same = {key: value for key, value in flat(run.config) if not key.startswith(LAYOUT)}
        series.setdefault(json.dumps(same, sort_keys=True), []).append(i)
    found = []
    for members in series.values():
        points = [point for i in members if (point := point_of(i, runs[i])) is not None]
        points.sort(key=lambda p: (p["ranks"], -p["tokens_per_s"]))
        fastest = [p for j, p in enumerate(points) if j == 0 or p["ranks"] != points[j - 1]["ranks"]]
        if len(fastest) < 2:
            continue
        base = fastest[0]["tokens_per_s"] / fastest[0]["ranks"]
        for point in points:
            point["efficiency"] = point["tokens_per_s"] / point["ranks"] / base
            point["speedup"] = point["tokens_per_s"] / fastest[0]["tokens_per_s"]
        batches = {p["batch"] for p in points}
        kind = "strong" if len(batches) == 1 else "weak" if len({p["batch"] / p["ranks"] for p in points}) == 1 else "mixed"
        name = runs[members[0]].config.get("preset") or "model"
        found.append({"name": name, "kind": kind, "points": points})
    return found


def point_of(index: int, run: RunReport) -> dict[str, Any] | None:
    """A run as a point of scaling; None where its speed is not known."""
    speed = value_of(run, "tokens_per_s")
    if speed is None:
        return None
    last = run.attempts[-1] if run.attempts else {}
    mesh = last.get("mesh") or run.config.get("mesh") or {}
    threads = last.get("threads", run.environment.get("threads"))
    cores = last.get("machine", {}).get("cores")
    batch = run.config.get("train", {}).get("batch")
    return {"run": index, "ranks": ranks_of(run), "mesh": mesh, "threads": threads, "cores": cores, "batch": batch, "tokens_per_s": speed}


def value_of(run: RunReport, name: str, *, predicted: bool = False) -> Any:
    """The measured (or predicted) value of a quantity; None where it is not known."""
    found: Mapping[str, Any] = {q.name: q.predicted if predicted else q.measured for q in run.quantities}
    return found.get(name)
