"""Read a run folder into a RunReport, in which every number names its file."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fzero.core.config_tables import flat
from fzero.core.text_parsing import expect_entries, read_json
from fzero.report.compare import belongs, counted, planned_for, subject
from fzero.report.values import Quantity, RunReport
from fzero.run.config.config_versions import current_keys
from fzero.run.measure.timer import PIPELINE
from fzero.run.runner import rollback
from fzero.run.setup import run_folder
from fzero.sharding import pipeline as schedules

ATTEMPTS, LEDGER, MEMORY, PLAN = run_folder.ATTEMPTS, "ledger.json", "memory.json", "plan.json"
SAMPLE = {"step": int, "prompt": str, "text": str}  # a line of samples.jsonl
ROLLBACK = {"step": int, "to": int, "why": str}  # of a rollback in skips.json
WARM_UP = 2  # first steps of an attempt left out of all times: they compile and allocate buffers
# The phases of a row that are not part of step_s.
BESIDE_THE_STEP = ("evaluate", "checkpoint")
MISSING = {
    ATTEMPTS: "commit, command, mesh and machine of each start are not known",
    LEDGER: "measured communication is not known",
    MEMORY: "measured memory over a step is not known",
}


# In memory.json, ledger.json and plan.json: the type of a part, and the required keys of a list's items.
FORM: dict[str, tuple[type, tuple[str, ...]]] = {
    **{
        name: (dict, ())
        for name in ("state", "peak", "state_bytes", "comm_bytes_per_axis", "time", "device", "traffic")
    },
    **{name: (list, ("phase", "collective", "axis", "calls", "bytes")) for name in ("rows", "comm")},
    "timeline": (list, ("phase", "bytes", "parts")),
}

Predict = Callable[[Path], dict[str, Any] | None]


def read_run(folder: Path, predict: Predict | None = None) -> RunReport:
    """The files of the run in `folder`; `predict` makes a missing prediction; raises ValueError."""
    config = current_keys(run_folder.read_config_table(folder))
    environment = run_folder.read_environment(folder)
    if not environment.get("corpus") and not os.path.lexists(folder / run_folder.METRICS):
        raise ValueError(f"{folder}: holds imported weights, not a training run; there is nothing to report")
    rows = list(run_folder.read_metrics(folder))
    if not rows:
        raise ValueError(f"{folder / run_folder.METRICS}: has no step yet; report the run when it has made some")
    series = columns(rows, folder / run_folder.METRICS)
    missing = [
        f"{name} is not there: {description}."
        for name, description in MISSING.items()
        if not os.path.lexists(folder / name)
    ]
    attempts = run_folder.read_attempts(folder)
    memory = expect_form(read_json(folder / MEMORY), folder / MEMORY) if os.path.lexists(folder / MEMORY) else None
    ledger = expect_form(read_json(folder / LEDGER), folder / LEDGER) if os.path.lexists(folder / LEDGER) else {}
    reason = "is of an earlier attempt with another placement, so it is not compared with the last one's figures"
    pipeline = read_pipeline(folder / PIPELINE) if os.path.lexists(folder / PIPELINE) else None
    if not belongs(memory, series["step"], attempts):
        memory, missing = None, [*missing, f"{MEMORY} {reason}."]
    if not belongs(ledger, series["step"], attempts):
        ledger, missing = {}, [*missing, f"{LEDGER} {reason}."]
    if len(counted(series["step"], attempts)) < len(rows):
        missing.append("Attempts with another placement are not counted in times and rates; see Attempts.")
    predicted, plan_from = read_plan(folder, predict, subject(series["step"], attempts))
    if predicted is None:
        missing.append(f"There is no prediction: {plan_from}.")
    for name, description in (
        ("phases.forward", "time by phase"),
        ("grad_norms", "norms of each layer"),
        ("ranks", "times of each rank"),
    ):
        if not any(column == name or column.startswith(f"{name}.") for column in series):
            missing.append(f"{run_folder.METRICS} has no {name.split('.')[0]}: {description} is not known.")
    run = RunReport(
        folder.absolute().name,
        config,
        environment,
        attempts,
        series,
        predicted,
        plan_from,
        memory,
        ledger.get("rows"),
        [],
        missing,
        read_samples(folder / run_folder.SAMPLES),
        read_rollbacks(folder),
        pipeline if belongs(pipeline, series["step"], attempts) else None,
    )
    return run._replace(quantities=list_quantities(run))


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of text that a run generated; raises ValueError naming a damaged line."""
    samples = list(run_folder.read_lines(path))
    for number, line in enumerate(samples, 1):
        expect_entries(line, SAMPLE, f"{path}:{number}")
    return samples


def read_rollbacks(folder: Path) -> list[dict[str, Any]]:
    """The rollbacks of a run; raises ValueError naming a damaged one."""
    rollbacks = rollback.read_log(folder).rollbacks
    for entry in rollbacks:
        expect_entries(entry, ROLLBACK, str(folder / rollback.SKIPS))
    return rollbacks


def read_pipeline(path: Path) -> dict[str, Any]:
    """The acts of a step; raises ValueError naming the file if they are not those of its schedule."""
    value = read_json(path)
    try:
        rows = [[len(row) for row in value[name]] for name in ("start", "end")]
        schedule = schedules.read_schedule(value["schedule"])
        valid = rows == [[len(row) for row in schedule.rows]] * 2
        valid = valid and all(0 <= t < 1e9 for name in ("start", "end") for row in value[name] for t in row)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path}: is not what fzero writes there; remove the file, or report the run without it")
    return value


def expect_form(value: dict[str, Any], path: Path) -> dict[str, Any]:
    """`value` if its parts have the types that fzero writes; raises ValueError."""
    for name, (kind, keys) in FORM.items():
        field = value.get(name)
        items = field if isinstance(field, list) else []
        valid = all(isinstance(item, dict) and all(key in item for key in keys) for item in items)
        if field is not None and not (isinstance(field, kind) and valid):
            raise ValueError(
                f"{path}: {name} is not what fzero writes there; remove the file, or report the run without it"
            )
    return value


def read_plan(folder: Path, predict: Predict | None, attempt: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return (the prediction for an attempt of a run, or None; its source, or why there is none)."""
    reason, another = f"the run folder has no {PLAN}", f"{PLAN} is of another placement than the last attempt's"
    if os.path.lexists(folder / PLAN):
        plan = drop_repeats(expect_form(read_json(folder / PLAN), folder / PLAN))
        if planned_for(plan, attempt):
            return plan, PLAN
        reason = another
    if predict is None:
        return None, f"{reason}, and none was requested"
    try:
        value = predict(folder)
    except Exception as error:  # write the report without a prediction; it says why
        return None, f"fzero plan could not make one ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"
    if value is not None and not planned_for(value, attempt):
        return None, another
    return (
        (drop_repeats(value), PLAN)
        if value is not None
        else (None, f"the run folder has neither {PLAN} nor the files from which fzero plan could make one")
    )


def drop_repeats(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan without its moments' "components" if they repeat "parts"."""
    if plan.get("timeline") is None:
        return plan
    return {
        **plan,
        "timeline": [
            {name: value for name, value in m.items() if name != "components" or "parts" not in m}
            for m in plan["timeline"]
        ],
    }


def columns(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, list[Any]]:
    """{name: value in each row, or None}; objects in rows become columns of their own, such as "phases.forward"."""
    table: dict[str, list[Any]] = {}
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "loss" not in row:
            raise ValueError(
                f"{path}:{i + 1}: is not a row of metrics (step, loss, ...) as fzero writes them; remove the line"
            )
        for name, value in flat(row):
            if name not in table:
                table[name] = [None] * len(rows)
            table[name][i] = value
    return table


def steady(series: Mapping[str, list[Any]], attempts: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rows that count for times: of attempts with the last placement, without first and recorded steps."""
    like = counted(series["step"], attempts)
    return sorted(set(like) & set(warm_rows(series, attempts))) or like


def warm_rows(series: Mapping[str, list[Any]], attempts: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rows without the first steps of each attempt and steps slowed by a recorder."""
    begins = {a.get("first_step", 0) for a in attempts} | {series["step"][0] - 1}
    warm = {first + i for first in begins for i in range(1, WARM_UP + 1)}
    recorded = series.get("recorded", [None] * len(series["step"]))
    return [
        i for i, (step, recorder) in enumerate(zip(series["step"], recorded)) if step not in warm and recorder is None
    ]


class Quantities:
    """The quantities of a run so far, each with its prediction beside it."""

    def __init__(self, run: RunReport) -> None:
        self.plan, self.plan_from, self.items = run.plan or {}, run.plan_from, list[Quantity]()
        self.series, self.indices = run.series, steady(run.series, run.attempts)

    def values(self, column: str) -> list[Any]:
        """The recorded values of a column in the steady rows."""
        rows = self.series.get(column)
        return [rows[i] for i in self.indices if rows[i] is not None] if rows else []

    def add_median(self, name: str, title: str, unit: str, key: str, column: str = "") -> None:
        """Add one that is measured as the median of a column, or of that of its name."""
        column = column or name
        values, source = self.values(column), f"{run_folder.METRICS}: has no {column}"
        if values:
            first, last = (self.series["step"][i] for i in (self.indices[0], self.indices[-1]))
            source = f"{run_folder.METRICS}: median of {column} over {len(values)} of the steps {first} to {last}"
        self.add(name, title, unit, key, statistics.median(values) if values else None, source)

    def add(self, name: str, title: str, unit: str, key: str, measured: Any, source: str, total: bool = False) -> None:
        """Add one that is predicted or measured; key: its path in the plan, or ""."""
        predicted: Any = self.plan if key else None
        for field in key.split("/") if key else ():
            predicted = predicted.get(field) if isinstance(predicted, Mapping) else None
        if predicted is not None and total:
            predicted = sum(predicted.values())
        plan_from = f"{self.plan_from}: {'sum of ' * total}{key.replace('/', '.')}" if predicted is not None else ""
        if predicted is not None or measured is not None:
            source = source if measured is not None else ""
            self.items.append(Quantity(name, title, unit, predicted, measured, plan_from, source))


def list_quantities(run: RunReport) -> list[Quantity]:
    """Every predicted or measured quantity of a run, with its sources."""
    out, last = Quantities(run), subject(run.series["step"], run.attempts)
    source = f"{run_folder.ENVIRONMENT}: num_params"
    out.add("num_params", "parameters", "1", "num_params", run.environment.get("num_params"), source)
    tokens, source = last.get("tokens_per_step"), f"{ATTEMPTS}: tokens_per_step"
    out.add("tokens_per_step", "tokens of a step", "tokens", "tokens_per_step", tokens, source)
    add_memory(out, run.memory or {})
    add_traffic(out, run.ledger)
    for way, column, words in (
        ("read", "disk_read_bytes", "read from the disk by a rank in a step"),
        ("write", "disk_written_bytes", "written to the disk by a rank in a step"),
    ):
        out.add_median(f"disk_bytes/{way}", words, "bytes", f"traffic/nvme/{way}", column)
    hardware = ("hardware FLOPs of a step's passes, all ranks", "pass_flop_per_step", "hardware_flop_per_token_causal")
    for name, (title, key, per_token) in {
        "model_flop": ("model FLOPs of a step, all ranks", "model_flop_per_step", "flop_per_token"),
        "flop": hardware,
    }.items():
        flop = last[per_token] * tokens if last.get(per_token) and tokens else None
        out.add(name, title, "FLOP", key, flop, f"{ATTEMPTS}: {per_token} x tokens_per_step (a closed formula)")
    add_times(out)
    out.add_median("tokens_per_s", "throughput", "tokens/s", "tokens_per_s")
    out.add_median("mfu", "MFU (6N + 12LTD)", "fraction", "mfu")
    out.add_median("mfu_causal", "MFU (6N + 6LTD)", "fraction", "mfu_causal")
    out.add_median("hfu", "HFU, causal attention", "fraction", "hfu", "hfu_causal")
    plan, peak = out.plan, last.get("peak_flops")
    if plan.get("mfu") and plan.get("step_s") and peak:  # predicted relative to the device's highest rate, not the peak
        factor = plan["model_flop_per_step"] / plan["step_s"] / peak / plan["mfu"]
        return [relative_to_peak(q, factor) for q in out.items]
    return out.items


def relative_to_peak(q: Quantity, factor: float) -> Quantity:
    """A quantity, whose prediction is multiplied by a factor if it is a utilization."""
    if q.unit != "fraction" or q.predicted is None:
        return q
    source = f"{q.predicted_from}, as a fraction of {ATTEMPTS}: peak_flops"
    return q._replace(predicted=q.predicted * factor, predicted_from=source)


def add_memory(out: Quantities, memory: Mapping[str, Any]) -> None:
    """Add the bytes at rest by group, and the peaks: of live tensors, and of a GPU's run its allocator's."""
    state = memory.get("state", {})
    for group in dict.fromkeys([*out.plan.get("state_bytes", {}), *state]):
        key, source = f"state_bytes/{group}", f"{MEMORY}: state.{group}"
        out.add(f"state/{group}", f"at rest: {group}", "bytes", key, state.get(group), source)
    peak, source = memory.get("peak", {}).get("bytes"), f"{MEMORY}: peak.bytes"
    if memory.get("compiled"):
        # Operator records miss the inner buffers of compiled blocks, which a plan has; the device's allocator counts
        # both.
        peak, source = memory.get("allocator_peak_bytes"), f"{MEMORY}: allocator_peak_bytes"
    out.add("peak_bytes", "peak of live tensors of a rank", "bytes", "peak_bytes_per_rank", peak, source)
    if peaks := out.values("gpu_peak_bytes"):
        source = f"{run_folder.METRICS}: the largest gpu_peak_bytes of {len(peaks)} rows"
        title = "peak of a rank by the GPU's allocator"
        out.add("gpu_peak_bytes", title, "bytes", "peak_bytes_per_rank", max(peaks), source)
    host = memory.get("host_peak_bytes")
    if host or out.plan.get("host_peak_bytes"):
        title, source = "peak of a rank's tensors in the host's memory", f"{MEMORY}: host_peak_bytes"
        out.add("host_peak_bytes", title, "bytes", "host_peak_bytes", host, source)


def add_traffic(out: Quantities, ledger: Sequence[Mapping[str, Any]] | None) -> None:
    """Add the bytes sent over each axis; with a ledger 0 without messages."""
    sums: dict[str, int] = {}
    for row in ledger or ():
        sums[row["axis"]] = sums.get(row["axis"], 0) + row["bytes"]
    for axis in dict.fromkeys([*out.plan.get("comm_bytes_per_axis", {}), *sums]):
        sent, source = sums.get(axis, None if ledger is None else 0), f"{LEDGER}: sum of bytes where axis is {axis}"
        title, key = f"sent by a rank in a step over {axis}", f"comm_bytes_per_axis/{axis}"
        out.add(f"comm_bytes/{axis}", title, "bytes", key, sent, source)


def add_times(out: Quantities) -> None:
    """Add the time of a step and of its phases, and predicted waits."""
    out.add_median("step_s", "time of a step", "s", "step_s")
    recorded = {name.removeprefix("phases."): out.values(name) for name in out.series if name.startswith("phases.")}
    means = {phase: statistics.fmean(v) for phase, v in recorded.items() if v and phase not in BESIDE_THE_STEP}
    planned, sum_keys = out.plan.get("time") or {}, {"comm_exposed": "time/exposed", "io": "time/waiting"}
    extra = [name for name, key in sum_keys.items() if planned.get(key.removeprefix("time/"))]
    for phase in dict.fromkeys([*means, *planned.get("phases", {}), *extra]):
        source = f"{run_folder.METRICS}: mean of phases.{phase} over the steps of step_s"
        key = sum_keys.get(phase, f"time/phases/{phase}")
        out.add(f"time/{phase}", f"time: {phase}", "s", key, means.get(phase), source, total=phase in sum_keys)


# -- private paths

FOLDERS = re.compile(r"(?<![\w.:/…])/(?:[^\s/:,='\"]+/)+")


def without_folders(value: Any) -> Any:
    """Remove the folders from absolute paths in the texts of a JSON value: "/home/me/run" becomes "…/run".

    >>> without_folders(["--out", "/home/me/run", "s3://bucket/a/b", "blocks/attn/w_q"])
    ['--out', '…/run', 's3://bucket/a/b', 'blocks/attn/w_q']
    """
    if isinstance(value, str):
        return FOLDERS.sub("…/", value)
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    return [without_folders(inner) for inner in value] if isinstance(value, (list, tuple)) else value
