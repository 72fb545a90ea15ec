"""The report of a plan with pp: that of the rank with the fullest memory, with a table of all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero.planner.devices import Device
from fzero.planner.operations import Op
from fzero.planner.pipeline_timing import PipelineTiming, boundary_bytes, predict_pipeline
from fzero.planner.pipelined import PipelineTrace, RankRow
from fzero.planner.plan_report import PASSES, PlanReport, has_rates, report_of
from fzero.run.measure.flops import hfu
from fzero.sharding.pipeline import Schedule, Stages, split_layers


def pipeline_report(found: PipelineTrace, device: Device) -> PlanReport:
    """Play a traced pipeline on a device and return its PlanReport."""
    timed = predict_pipeline(found, device) if has_rates(device) else None
    report = report_of(found.trace, device, None if timed is None else timed.timing)
    each = report.ranks // len(found.ranks)  # ranks of each coordinate of pp
    flop, passes = (each * sum(flop_of(row, phases) for row in found.ranks) for phases in ((), PASSES))
    dtype = str(found.ranks[0].record.step.job.policy.compute).removeprefix("torch.")
    top = device.flops.get(dtype)
    reached = hfu(passes / report.ranks, timed.timing.step_s, top) if timed is not None and top is not None else None
    return report._replace(
        flop_per_step=flop, pass_flop_per_step=passes, hfu=reached, pipeline=pipeline_facts(found, timed)
    )


def flop_of(row: RankRow, phases: tuple[str, ...]) -> int:
    """The hardware FLOPs of a rank in a step, or in the given phases."""

    def total(stays: Any) -> int:
        events = (e for stay in stays for e in stay.events if isinstance(e, Op))
        return sum(e.flop for e in events if not phases or e.phase in phases)

    once = {id(act): total(act) for act in row.acts}
    return total(row.record.before) + sum(once[id(act)] for act in row.acts) + total(row.record.after)


def pipeline_facts(found: PipelineTrace, timed: PipelineTiming | None) -> dict[str, Any]:
    """What a report says of a pipeline, as JSON has it."""
    s, ranks = found.schedule, []
    for rank, row in enumerate(found.ranks):
        facts = {"rank": rank, "stages": list(s.stages.chunks(rank)), "layers": list(row.layers)}
        facts |= {"in_flight": row.in_flight, "state_bytes": row.state_bytes, "peak_bytes": row.peak_bytes}
        if timed is not None:
            facts |= {"busy_s": timed.busy[rank], "idle_s": timed.played.idle[rank]}
        ranks.append(facts)
    out: dict[str, Any] = {
        "schedule": s.name,
        "chunks": len(s.stages.ranks) // s.stages.size,
        "layout": layout_text(s.stages),
        "micro_batches": s.parts,
        "boundary_bytes": boundary_bytes(found),
        "ranks": ranks,
    }
    if timed is not None:
        bubble = timed.played.step - max(timed.busy)
        out |= {"wire_s": list(timed.wire), "acts_s": list(timed.acts), "row_s": timed.played.step, "bubble_s": bubble}
        cut = layout_by_cost(s, timed.acts)
        out["layout_by_cost"], out["by_cost_takes"] = layout_text(cut.stages), cut.takes
    return out


def layout_text(stages: Stages) -> str:
    """The text of --layout for some stages: "8,9,9,6"."""
    return ",".join(str(len(layers)) for layers in stages.layers)


class Cut(NamedTuple):
    """Layers cut into stages by their seconds."""

    stages: Stages
    takes: float  # the seconds of the longest rank, of those that it has as planned


def layout_by_cost(s: Schedule, acts: Sequence[Mapping[str, float]]) -> Cut:
    """The stages by the seconds of the layers, and of embedding and head, which the first and the last stage have more
    than the cheapest layers.

    acts: by stage the seconds of an act of each kind.
    """
    stages = s.stages
    times = [sum(of.values()) for of in acts]
    layers = [len(one) for one in stages.layers]
    inner = range(1, len(times) - 1) if len(times) > 2 else range(len(times))
    layer = min(times[i] / layers[i] for i in inner)
    embed, head = (max(0.0, times[i] - layer * layers[i]) for i in (0, -1))
    cut = split_layers([layer] * sum(layers), stages.ranks, embed, head)

    def longest(one: Stages) -> float:
        of_stages = [layer * len(each) for each in one.layers]
        of_stages[0] += embed
        of_stages[-1] += head
        return max(sum(of_stages[stage] for stage in one.chunks(rank)) for rank in range(one.size))

    return Cut(cut, longest(cut) / longest(stages))
