"""Plans of one run side by side: one for each combination of chosen values of its config, mesh and device."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import text_table
from fzero.models import ModelConfig
from fzero.planner.devices import Device
from fzero.planner.plan import device_for, plan
from fzero.planner.plan_report import PlanReport
from fzero.planner.plan_text import duration, percent, quantity, size
from fzero.run.config.run_config import RunConfig

COLUMNS = ("memory", "of it", "at rest", "sent a step", "step", "tokens/s", "MFU", "binds")
FACTS = (
    *("fits", "mesh", "num_params", "peak_bytes_per_rank", "capacity_bytes", "margin_bytes", "state_bytes_per_rank"),
    *("comm_bytes_per_axis", "step_s", "tokens_per_s", "mfu", "binds", "memory_binds", "days", "device_hours", "cost"),
)


class Variant(NamedTuple):
    """One combination of values: its plan, or the reason why a run refuses it."""

    values: dict[str, Any]  # by name
    report: PlanReport | None
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan and it fits."""
        return self.report is not None and self.report.fits


class Variants(NamedTuple):
    """The result of `vary`, in the order of the product of the values; printed, one row for each plan."""

    rows: tuple[Variant, ...]

    def best(self) -> Variant | None:
        """The fastest plan that fits; without times, the one with the smallest peak. None if none fits."""
        fitting = [row for row in self.rows if row.fits]
        slowness = [
            (report.step_s is None, -(report.tokens_per_s or 0.0), report.peak_bytes_per_rank)
            for report in (row.report for row in fitting)
            if report is not None
        ]
        return fitting[slowness.index(min(slowness))] if fitting else None

    def for_tokens(self, tokens: float) -> Variants:
        """These plans with a budget of tokens in each report."""
        return Variants(tuple(row._replace(report=row.report and row.report.for_tokens(tokens)) for row in self.rows))

    def to_json(self) -> str:
        """Format as one JSON object."""
        rows = []
        for row in self.rows:
            facts = {name: getattr(row.report, name) for name in FACTS} if row.report else {"fits": False}
            rows.append({"values": row.values, **facts, "error": row.error})
        best = self.best()
        return json.dumps({"rows": rows, "best": best.values if best else None}, indent=1)

    def __str__(self) -> str:
        names, budget = list(self.rows[0].values), any(row.report and row.report.days is not None for row in self.rows)
        header = [*names, *COLUMNS, *(("time", "device hours", "cost") if budget else ()), "fits"]
        cells = [[*map(words, row.values.values()), *row_cells(row, budget)] for row in self.rows]
        best = self.best()
        last = (
            f"the fastest that fits: {describe_values(best)}"
            if best and best.report and best.report.step_s is not None
            else ""
        )
        if not last:
            last = f"the least memory: {describe_values(best)}" if best else "none of them fits"
        return "\n".join(
            [*text_table(header, cells, text=(*range(len(names)), len(names) + len(COLUMNS) - 1, -1)), "", last]
        )


def vary(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    choices: Mapping[str, Sequence[Any]],
    mesh: Mapping[str, int] | None = None,
    *,
    gpu: str | Device = "h100",
    **options: Any,
) -> Variants:
    """Plan a run for every combination of `choices`; the last name varies fastest.

    >>> small = {"preset": "llama-tiny", "train": {"compiled": False}, "precision": {"policy": "bf16"}}
    >>> [row.fits for row in vary(small, {"train.remat": ["none", "full"], "zero": [0, 3]}, {"dp": 2}).rows]
    [True, True, True, True]
    """
    if "preset" in choices and not isinstance(model, str | Mapping):
        raise ValueError("preset varies for a preset's name or a table of a config; this model has its sizes already")
    settings, usual = dict(options.pop("settings", None) or {}), device_for(gpu)
    common = {
        name: x for name in ("price_per_hour", "ranks_on_node", "loads") if (x := getattr(usual, name)) is not None
    }
    rows: list[Variant] = []
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination))
        labels = {name: value.name if isinstance(value, Device) else value for name, value in values.items()}
        changes = {name: value for name, value in values.items() if name not in ("mesh", "gpu", "preset")}
        base: Any = (
            model
            if "preset" not in values
            else values["preset"]
            if not isinstance(model, Mapping)
            else {**model, "preset": values["preset"]}
        )
        try:
            device = values.get("gpu", usual)
            device = device if isinstance(device, Device) else replace(device_for(device), **common)
            report = plan(base, values.get("mesh", mesh), gpu=device, settings=settings | changes, **options)
            rows.append(Variant(labels, report))
        except ValueError as error:
            rows.append(Variant(labels, None, str(error)))
    if rows and not any(row.report for row in rows):
        raise ValueError(rows[0].error)
    return Variants(tuple(rows))


def words(value: Any) -> str:
    """Format a value of a choice for a table."""
    return mesh_text(value) if isinstance(value, Mapping) else "none" if value == "" else str(value)


def describe_values(row: Variant) -> str:
    """Format the values of a plan by name."""
    return ", ".join(f"{name} {words(value)}" for name, value in row.values.items())


def row_cells(row: Variant, budget: bool) -> list[str]:
    """The cells of a plan after its values; budget: with days, device hours and cost."""
    r = row.report
    if r is None:
        return ["-"] * (len(COLUMNS) + 3 * budget) + [f"no: {row.error.split(';')[0]}"]
    cells = [
        size(r.peak_bytes_per_rank),
        percent(r.peak_bytes_per_rank / r.capacity_bytes),
        size(r.state_bytes_per_rank),
    ]
    cells.append(size(sum(r.comm_bytes_per_axis.values())))
    cells += [duration(r.step_s), quantity(r.tokens_per_s or 0.0)] if r.step_s is not None else ["-", "-"]
    cells += [percent(r.mfu) if r.mfu is not None else "-", r.binds or "-"]
    if budget:
        cells += [duration(r.days * 86400), f"{r.device_hours:,.0f}"] if r.days is not None else ["-", "-"]
        cells.append(f"{r.cost:,.0f}" if r.cost is not None else "-")
    return [*cells, "yes" if r.fits else f"no: {r.too_much()}"]
