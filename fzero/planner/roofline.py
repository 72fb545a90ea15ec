"""The bound of each part of a planned step (its FLOPs, its bytes, waits, or the host), beside the device's limits.

Ref: Williams et al. 2009, "Roofline"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fzero.core.text_parsing import text_table
from fzero.planner.plan_report import PlanReport
from fzero.planner.plan_text import duration, percent
from fzero.planner.timing import ISSUER

LEAST = 0.005  # fraction of the step; smaller parts are one row


class RooflineRow(NamedTuple):
    """One kind of operator in one phase of a step, or a wait."""

    name: str  # "backward gemm", "waiting for dp"
    seconds: float  # predicted
    peak: float  # fraction of the device's peak that its FLOPs reach in this time
    bandwidth: float  # fraction of the memory's bandwidth that its bytes reach
    bound: str  # "compute", "memory", "transfers" or "host"; "" if not simulated


def roofline(report: PlanReport) -> list[RooflineRow]:
    """The parts of a step of a plan, longest first; raises ValueError if the plan has no times.

    >>> import fzero
    >>> from fzero.planner.roofline import roofline
    >>> parts = roofline(fzero.plan("llama-tiny", gpu="h100"))
    >>> sum(part.seconds for part in parts) > 0, {part.bound for part in parts} >= {"memory"}
    (True, True)
    """
    if report.step_s is None:
        raise ValueError(
            f"the rates of {report.device.name} are unknown, so there is no time to divide; run fzero bench"
        )
    time = report.time
    rows = []
    for name, (seconds, flop_s, bytes_s) in time["parts"].items():
        phase, _, kind = name.rpartition("/")
        if seconds:
            bound = "compute" if flop_s > bytes_s else "memory"
            name = f"{phase or 'between'} {kind}"
            rows.append(RooflineRow(name, seconds, flop_s / seconds, bytes_s / seconds, bound))
    waits = {f"waiting for {axis}": seconds for axis, seconds in time["exposed"].items()}
    waits |= {f"waiting for {memory}": seconds for memory, seconds in time["waiting"].items()}
    waits |= {"issuing operators": time["bound"].get(ISSUER, 0.0), "not simulated": time["phases"].get("lost", 0.0)}
    bounds = {"issuing operators": ISSUER, "not simulated": ""}
    rows += [RooflineRow(name, s, 0.0, 0.0, bounds.get(name, "transfers")) for name, s in waits.items() if s]
    return sorted(rows, key=lambda row: -row.seconds)


def least_step(report: PlanReport) -> float:
    """The seconds of a step at the device's limits: each part at the longer of FLOPs and bytes, no wait."""
    times: Mapping[str, tuple[float, float, float]] = report.time["parts"]
    return sum(max(flop_s, bytes_s) for _, flop_s, bytes_s in times.values())


def page(report: PlanReport) -> str:
    """The table of `roofline`, with parts below half a percent of the step in one row."""
    parts, step = roofline(report), report.step_s or 0.0
    large = [row for row in parts if row.seconds >= LEAST * step]
    others_s = sum(row.seconds for row in parts) - sum(row.seconds for row in large)
    rows = [
        (
            row.name,
            duration(row.seconds),
            percent(row.seconds / step),
            percent(row.peak) if row.peak else "",
            percent(row.bandwidth) if row.bandwidth else "",
            row.bound,
        )
        for row in large
    ]
    rows += [("all others", duration(others_s), percent(others_s / step), "", "", "")] if others_s > 0 else []
    limit_s = least_step(report)
    header = ("part", "time", "of the step", "of peak FLOPs", "of bandwidth", "bound by")
    limit = f"at the limits of a {report.device.name} a step takes"
    summary = f"{limit} {duration(limit_s)}, {percent(limit_s / step)} of {duration(step)}"
    return "\n".join(["roofline:", *("  " + line for line in text_table(header, rows, text=(0, -1))), summary])
