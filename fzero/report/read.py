"""A run folder, read into a RunReport: every number of it comes from a file there, and says which."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fzero.core.tables import parse_json
from fzero.report.values import Quantity, RunReport
from fzero.run import run_folder

ATTEMPTS, LEDGER, MEMORY, PLAN = "attempts.jsonl", "ledger.json", "memory.json", "plan.json"
WARM_UP = 2  # steps at the begin of an attempt that no figure of time counts: they compile, and make buffers
# Of a row's phases, those that are not part of step_s.
BESIDE_THE_STEP = ("evaluate", "checkpoint")
MISSING = {
    ATTEMPTS: "commit, command, mesh and machine of each start are not known",
    LEDGER: "measured communication is not known",
    MEMORY: "measured memory over a step is not known",
}


# Of memory.json, ledger.json and plan.json: the kind of a part, and what every item of a list has.
FORM: dict[str, tuple[type, tuple[str, ...]]] = {
    **{name: (dict, ()) for name in ("state", "peak", "state_bytes", "comm_bytes_per_axis", "time", "device", "traffic")},
    **{name: (list, ("phase", "collective", "axis", "calls", "bytes")) for name in ("rows", "comm")},
    "timeline": (list, ("phase", "bytes", "parts")),
}

Predict = Callable[[Path], dict[str, Any] | None]


def read_run(folder: Path, predict: Predict | None = None) -> RunReport:
    """What the files of the run in `folder` say. `predict` makes the prediction of a run folder that holds none.

    Raises ValueError naming the file where one is damaged, where `folder` is no run, or where it has made no step.
    """
    if not (folder / run_folder.CONFIG).is_file():
        raise ValueError(f"{folder}: {'is not a run' if folder.is_dir() else 'no such folder'}; a run folder has a {run_folder.CONFIG}")
    said = read_object(folder / run_folder.CONFIG)
    environment = run_folder.read_environment(folder)
    if not environment.get("corpus") and not (folder / run_folder.METRICS).is_file():
        raise ValueError(f"{folder}: holds imported weights, not a training run; there is nothing to report")
    rows = list(run_folder.read_metrics(folder))
    if not rows:
        raise ValueError(f"{folder / run_folder.METRICS}: has no step yet; report the run when it has made some")
    series = columns(rows, folder / run_folder.METRICS)
    missing = [f"{name} is not there: {what}." for name, what in MISSING.items() if not (folder / name).is_file()]
    attempts = list(run_folder.read_lines(folder / ATTEMPTS))
    memory = in_form(read_object(folder / MEMORY), folder / MEMORY) if (folder / MEMORY).is_file() else None
    ledger = in_form(read_object(folder / LEDGER), folder / LEDGER) if (folder / LEDGER).is_file() else {}
    predicted, plan_from = read_plan(folder, predict)
    if predicted is None:
        missing.append(f"There is no prediction: {plan_from}.")
    for name, what in (("phases.forward", "time by phase"), ("grad_norms", "norms of each layer"), ("ranks", "times of each rank")):
        if not any(column == name or column.startswith(f"{name}.") for column in series):
            missing.append(f"{run_folder.METRICS} has no {name.split('.')[0]}: {what} is not known.")
    quantities = beside(series, environment, attempts, memory, ledger.get("rows"), predicted, plan_from)
    return RunReport(
        folder.absolute().name,
        said,
        environment,
        attempts,
        series,
        predicted,
        plan_from,
        memory,
        ledger.get("rows"),
        quantities,
        missing,
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError naming the file for anything else."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text ({error})") from None
    return value


def in_form(value: dict[str, Any], path: Path) -> dict[str, Any]:
    """`value`, whose parts that a report reads are of the kind that fzero writes. Raises ValueError naming the file and the part."""
    for name, (kind, keys) in FORM.items():
        part = value.get(name)
        items = part if isinstance(part, list) else []
        whole = all(isinstance(item, dict) and all(key in item for key in keys) for item in items)
        if part is not None and not (isinstance(part, kind) and whole):
            raise ValueError(f"{path}: {name} is not what fzero writes there; remove the file, or report the run without it")
    return value


def read_plan(folder: Path, predict: Predict | None) -> tuple[dict[str, Any] | None, str]:
    """(the prediction for a run or None, where it is from or why there is none)."""
    if (folder / PLAN).is_file():
        return once(in_form(read_object(folder / PLAN), folder / PLAN)), PLAN
    if predict is None:
        return None, f"the run folder has no {PLAN}, and none was to be made"
    try:
        value = predict(folder)
    except Exception as error:  # a report without a prediction is better than none; it says why
        return None, f"fzero plan could not make one ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"
    return (once(value), PLAN) if value is not None else (None, f"the run folder has no {PLAN}, and not what fzero plan needs to make one")


def once(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan whose moments have what is alive by component once: as "parts"."""
    if plan.get("timeline") is None:
        return plan
    return {
        **plan,
        "timeline": [{name: value for name, value in m.items() if name != "components" or "parts" not in m} for m in plan["timeline"]],
    }


def columns(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, list[Any]]:
    """{name: value of each row, None where it has none}; objects in rows become columns of their own, such as "phases.forward"."""
    found: dict[str, list[Any]] = {}
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "loss" not in row:
            raise ValueError(f"{path}:{i + 1}: is no row of metrics (step, loss, ...); it was not written by fzero")
        for name, value in flat(row):
            found.setdefault(name, [None] * len(rows))[i] = value
    return found


def flat(row: Mapping[str, Any], where: str = "") -> list[tuple[str, Any]]:
    """[(dotted name, value)] of an object of objects."""
    found: list[tuple[str, Any]] = []
    for key, value in row.items():
        found += flat(value, f"{where}{key}.") if isinstance(value, dict) else [(f"{where}{key}", value)]
    return found


def steady(series: Mapping[str, list[Any]], attempts: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rows that figures of time count: not the first steps of an attempt, nor one under a recorder; all where none is left."""
    begins = {a.get("first_step", 0) for a in attempts} | {series["step"][0] - 1}
    warm = {first + i for first in begins for i in range(1, WARM_UP + 1)}
    recorded = series.get("recorded", [None] * len(series["step"]))
    kept = [i for i, (step, how) in enumerate(zip(series["step"], recorded)) if step not in warm and how is None]
    return kept or list(range(len(series["step"])))


def median(series: Mapping[str, list[Any]], name: str, kept: Sequence[int]) -> tuple[float | None, str]:
    """(the median of a column over the rows `kept`, words that say so)."""
    known = [series[name][i] for i in kept if series[name][i] is not None] if name in series else []
    if not known:
        return None, f"{run_folder.METRICS}: has no {name}"
    steps = [series["step"][i] for i in kept]
    return statistics.median(known), f"{run_folder.METRICS}: median of {name} over {len(known)} of the steps {steps[0]} to {steps[-1]}"


def mean_phases(series: Mapping[str, list[Any]], kept: Sequence[int]) -> dict[str, float]:
    """{phase: mean seconds in the rows `kept`}, without evaluation and checkpoints; {} of a run that has not recorded them."""
    found = {}
    for column, values in series.items():
        phase = column.removeprefix("phases.")
        known = [values[i] for i in kept if values[i] is not None] if column.startswith("phases.") and phase not in BESIDE_THE_STEP else []
        if known:
            found[phase] = statistics.fmean(known)
    return found


def beside(
    series: Mapping[str, list[Any]],
    environment: Mapping[str, Any],
    attempts: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any] | None,
    ledger: Sequence[Mapping[str, Any]] | None,
    plan: Mapping[str, Any] | None,
    plan_from: str,
) -> list[Quantity]:
    """Every quantity of a run that was predicted or measured, each with where it is from."""
    kept, plan, found = steady(series, attempts), plan or {}, []

    def add(name: str, title: str, unit: str, key: str, measured: Any, source: str, total: bool = False) -> None:
        predicted: Any = plan
        for part in key.split("/") if key else ():
            predicted = predicted.get(part) if isinstance(predicted, Mapping) else None
        if total and predicted is not None:
            predicted = sum(predicted.values())
        said = f"{plan_from}: {'sum of ' * total}{key.replace('/', '.')}" if key and predicted is not None else ""
        predicted = predicted if key else None
        if predicted is not None or measured is not None:
            found.append(Quantity(name, title, unit, predicted, measured, said, source if measured is not None else ""))

    add("num_params", "parameters", "1", "num_params", environment.get("num_params"), f"{run_folder.ENVIRONMENT}: num_params")
    last = attempts[-1] if attempts else {}
    per_step = last.get("tokens_per_step")
    add("tokens_per_step", "tokens of a step", "tokens", "tokens_per_step", per_step, f"{ATTEMPTS}: tokens_per_step")
    state = (memory or {}).get("state", {})
    for group in dict.fromkeys([*plan.get("state_bytes", {}), *state]):
        add(f"state/{group}", f"at rest: {group}", "bytes", f"state_bytes/{group}", state.get(group), f"{MEMORY}: state.{group}")
    peak, source = (memory or {}).get("peak", {}).get("bytes"), f"{MEMORY}: peak.bytes"
    if memory and memory.get("compiled"):
        # No operator has the inner buffers of a compiled block, and a plan has them: only the device's allocator counts both.
        peak, source = memory.get("allocator_peak_bytes"), f"{MEMORY}: allocator_peak_bytes"
    add("peak_bytes", "peak of live tensors of a rank", "bytes", "peak_bytes_per_rank", peak, source)
    sums: dict[str, int] = {}
    for row in ledger or ():
        sums[row["axis"]] = sums.get(row["axis"], 0) + row["bytes"]
    for axis in dict.fromkeys([*plan.get("comm_bytes_per_axis", {}), *sums]):
        # Nothing on an axis is a measurement too, where there is a ledger.
        sent = sums.get(axis, None if ledger is None else 0)
        source = f"{LEDGER}: sum of bytes where axis is {axis}"
        add(f"comm_bytes/{axis}", f"sent by a rank in a step over {axis}", "bytes", f"comm_bytes_per_axis/{axis}", sent, source)
    for way, column in (("read", "disk_read_bytes"), ("write", "disk_written_bytes")):
        words = {"read": "read from the disk by a rank in a step", "write": "written to the disk by a rank in a step"}[way]
        add(f"disk_bytes/{way}", words, "bytes", f"traffic/nvme/{way}", *median(series, column, kept))
    for name, title, key, per_token in (
        ("model_flop", "model FLOPs of a step, all ranks", "model_flop_per_step", "flop_per_token"),
        ("flop", "hardware FLOPs of a step's passes, all ranks", "pass_flop_per_step", "hardware_flop_per_token_causal"),
    ):
        whole = last[per_token] * per_step if last.get(per_token) and per_step else None
        add(name, title, "FLOP", key, whole, f"{ATTEMPTS}: {per_token} x tokens_per_step (a closed formula)")
    add("step_s", "time of a step", "s", "step_s", *median(series, "step_s", kept))
    phases, planned = mean_phases(series, kept), plan.get("time") or {}
    # A prediction has what is waited for apart from its phases, by axis and by memory.
    whole = {"comm_exposed": "time/exposed", "io": "time/waiting"}
    extra = [name for name, key in whole.items() if planned.get(key.removeprefix("time/"))]
    for phase in dict.fromkeys([*phases, *planned.get("phases", {}), *extra]):
        source = f"{run_folder.METRICS}: mean of phases.{phase} over the steps of step_s"
        key = whole.get(phase, f"time/phases/{phase}")
        add(f"time/{phase}", f"time: {phase}", "s", key, phases.get(phase), source, total=phase in whole)
    add("tokens_per_s", "throughput", "tokens/s", "tokens_per_s", *median(series, "tokens_per_s", kept))
    part = of_the_runs_peak(plan, last)
    for name, title in (("mfu", "MFU (6N + 12LTD)"), ("mfu_causal", "MFU (6N + 6LTD)"), ("hfu", "HFU, causal attention")):
        add(name, title, "fraction", name, *median(series, "hfu_causal" if name == "hfu" else name, kept))
        if part is not None and found and found[-1].name == name and found[-1].predicted is not None:
            said = f"{found[-1].predicted_from}, as a fraction of {ATTEMPTS}: peak_flops"
            found[-1] = found[-1]._replace(predicted=found[-1].predicted * part, predicted_from=said)
    return found


def of_the_runs_peak(plan: Mapping[str, Any], attempt: Mapping[str, Any]) -> float | None:
    """What a predicted MFU, a fraction of the device's highest rate, is multiplied by to be one of the run's own peak; None if unknown."""
    if not (plan.get("mfu") and plan.get("step_s") and attempt.get("peak_flops")):
        return None
    return plan["model_flop_per_step"] / plan["step_s"] / attempt["peak_flops"] / plan["mfu"]


# -- what is not for others

FOLDERS = re.compile(r"(?<![\w.:/…])/(?:[^\s/:,='\"]+/)+")


def without_folders(value: Any) -> Any:
    """A JSON value in whose texts absolute paths have lost their folders: "/home/me/run" is "…/run".

    >>> without_folders(["--out", "/home/me/run", "s3://bucket/a/b", "blocks/attn/w_q"])
    ['--out', '…/run', 's3://bucket/a/b', 'blocks/attn/w_q']
    """
    if isinstance(value, str):
        return FOLDERS.sub("…/", value)
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    return [without_folders(inner) for inner in value] if isinstance(value, (list, tuple)) else value
