"""The report of a plan with pp: that of the rank with the fullest memory, a table of all ranks, and the time.

A step is the schedule played with the seconds of every act and message. Each act has its gathers and sums over dp as
far as they are exposed in it. Before the rows all ranks gather what is used outside the layers; behind them they sum,
and update: the slowest rank counts. `layer_costs`, by which `--layout cost` cuts a pipeline, sends one micro-batch
through all layers on fake tensors, without messages of dp and pp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.planner.devices import Device
from fzero.planner.operations import ExecutedOp
from fzero.planner.pipeline_trace import PipelineTrace, RankRow, Record, ends_of
from fzero.planner.plan_report import PASSES, PlanReport, has_rates, report_of
from fzero.planner.rates import ways_of, wire_s
from fzero.planner.step_trace import FakeStep, Transfer, run_step
from fzero.planner.timing import Timing, play_of
from fzero.run.config.run_config import LocalSteps, RunConfig
from fzero.run.measure.flops import hfu
from fzero.run.setup.build import build
from fzero.sharding import fake_mesh
from fzero.sharding.pipeline import FAMILIES, Act, Played, Schedule, Stages, play, split_layers, stage_ranks
from fzero.sharding.pipeline_plan import Pipeline

Sums = Counter  # {(group, key): seconds or FLOPs} as those of timing.Play


class PipelineTiming(NamedTuple):
    """The time of a step: of the longest rank, and of the acts of all."""

    timing: Timing
    played: Played
    wire: tuple[float, ...]  # by stage, of a message to the next one: seconds
    busy: tuple[float, ...]  # by rank: the seconds of its acts
    acts: tuple[dict[str, float], ...]  # by stage: the seconds of an act of each kind in the middle of the step
    edges_s: float  # before the rows and behind them


class SimulatedRecord(NamedTuple):
    """The seconds of a record: before its acts, of each, and behind them."""

    prologue: tuple[float, Sums]
    acts: dict[int, tuple[float, Sums]]
    epilogue: tuple[float, Sums]


def predict_pipeline(pipeline: PipelineTrace, device: Device) -> PipelineTiming:
    """The PipelineTiming of a traced step on a device."""
    s, ways = pipeline.schedule, ways_of(device, pipeline.trace.sizes)
    records = {id(record): record for row in pipeline.ranks for record in row.records}
    simulated = {key: simulate_record(record, pipeline, device) for key, record in records.items()}
    of_acts = {key: cost for simulation in simulated.values() for key, cost in simulation.acts.items()}
    costs = {
        act: of_acts[id(stays)] for rank, row in enumerate(pipeline.ranks) for act, stays in zip(s.rows[rank], row.acts)
    }
    wire = tuple(
        wire_s(ways["pp"], s.stages.ranks[stage], s.stages.ranks[stage + 1], size)
        for stage, size in enumerate(boundary_bytes(pipeline))
    )
    played = play(s, lambda act: costs[act][0], wire)
    edges = [(simulated[id(row.record)].prologue, simulated[id(row.record)].epilogue) for row in pipeline.ranks]
    edges_s = sum(max(edge[i][0] for edge in edges) for i in (0, 1))
    busy = tuple(sum(costs[act][0] for act in row) for row in s.rows)
    longest = max(range(len(busy)), key=busy.__getitem__)
    total = play_of(pipeline.trace.config, pipeline.trace.sizes, device)
    total.sums, step = {}, played.step + edges_s
    for _, sums in (*edges[longest], *(costs[act] for act in s.rows[longest])):
        for (group, key), amount in sums.items():
            total.add(group, key, amount)
    idle = step - busy[longest] - sum(seconds for seconds, _ in edges[longest])
    total.add("phases", "bubble", idle)
    total.add("bound", "bubble", idle)
    total.clock["device"] = step
    total.lose()
    return PipelineTiming(total.timing(), played, wire, busy, middle_costs(s, costs), edges_s)


def simulate_record(record: Record, pipeline: PipelineTrace, device: Device) -> SimulatedRecord:
    """Simulate a record from its begin to its end, and cut its time at its acts."""
    config, sizes = record.step.job.config, pipeline.trace.sizes
    sim = play_of(config, sizes, device)
    groups = [record.prologue, *record.acts, record.epilogue]
    sim.expect_waits(e for group in groups for stay in group for e in stay.events)
    costs, begin, previous_sums = [], 0.0, Sums()
    for group in groups:
        for stay in group:
            sim.run(stay.events, 0, len(stay.events), [])
        if group is record.epilogue:
            sim.settle()
        delta = Sums({key: value - previous_sums[key] for key, value in sim.sums.items()})
        costs.append((sim.clock["device"] - begin, delta))
        begin, previous_sums = sim.clock["device"], Sums(sim.sums)
    acts = {id(act): cost for act, cost in zip(record.acts, costs[1:-1])}
    return SimulatedRecord(costs[0], acts, costs[-1])


def boundary_bytes(pipeline: PipelineTrace) -> list[int]:
    """By stage but the last, the bytes of activations to the next rank."""
    out = [0] * (len(pipeline.schedule.stages.ranks) - 1)
    for rank, row in enumerate(pipeline.ranks):
        for act, stays in zip(pipeline.schedule.rows[rank], row.acts):
            if act.kind == "F" and act.micro_batch == 0 and ends_of(pipeline.schedule, rank, act)[1] is not None:
                out[act.stage] = sum(
                    e.bytes for stay in stays for e in stay.events if isinstance(e, Transfer) and e.kind == "message"
                )
    return out


def middle_costs(s: Schedule, costs: dict[Act, tuple[float, Sums]]) -> tuple[dict[str, float], ...]:
    """By stage the seconds of its acts of each kind, in the middle micro-batch."""
    out: list[dict[str, float]] = [{} for _ in s.stages.ranks]
    for act, (seconds, _) in costs.items():
        if act.micro_batch == s.parts // 2:
            out[act.stage][act.kind] = seconds
    return tuple(out)


def pipeline_report(pipeline: PipelineTrace, device: Device) -> PlanReport:
    """Play a traced pipeline on a device and return its PlanReport."""
    timed = predict_pipeline(pipeline, device) if has_rates(device) else None
    report = report_of(pipeline.trace, device, None if timed is None else timed.timing)
    per_stage = report.ranks // len(pipeline.ranks)  # ranks of each coordinate of pp
    flop, passes = (per_stage * sum(flop_of(row, phases) for row in pipeline.ranks) for phases in ((), PASSES))
    dtype = str(pipeline.ranks[0].record.step.job.policy.compute).removeprefix("torch.")
    top = device.flops.get(dtype)
    reached = hfu(passes / report.ranks, timed.timing.step_s, top) if timed is not None and top is not None else None
    return report._replace(
        flop_per_step=flop, pass_flop_per_step=passes, hfu=reached, pipeline=pipeline_facts(pipeline, timed)
    )


def flop_of(row: RankRow, phases: tuple[str, ...]) -> int:
    """The hardware FLOPs of a rank in a step, or in the given phases."""

    def total(stays: Any) -> int:
        events = (e for stay in stays for e in stay.events if isinstance(e, ExecutedOp))
        return sum(e.flop for e in events if not phases or e.phase in phases)

    act_flop = {id(act): total(act) for act in row.acts}
    return total(row.record.prologue) + sum(act_flop[id(act)] for act in row.acts) + total(row.record.epilogue)


def pipeline_facts(pipeline: PipelineTrace, timed: PipelineTiming | None) -> dict[str, Any]:
    """What a report says of a pipeline, as JSON has it."""
    s, ranks = pipeline.schedule, []
    for rank, row in enumerate(pipeline.ranks):
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
        "boundary_bytes": boundary_bytes(pipeline),
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
    """The stages by the seconds of the layers, and of what embedding and head take more than those."""
    stages = s.stages
    times = [sum(costs.values()) for costs in acts]
    layers = [len(stage_layers) for stage_layers in stages.layers]
    inner = range(1, len(times) - 1) if len(times) > 2 else range(len(times))
    layer = min(times[i] / layers[i] for i in inner)
    embed, head = (max(0.0, times[i] - layer * layers[i]) for i in (0, -1))
    cut = split_layers([layer] * sum(layers), stages.ranks, embed, head)

    def longest(cut_stages: Stages) -> float:
        of_stages = [layer * len(stage_layers) for stage_layers in cut_stages.layers]
        of_stages[0] += embed
        of_stages[-1] += head
        return max(sum(of_stages[stage] for stage in cut_stages.chunks(rank)) for rank in range(cut_stages.size))

    return Cut(cut, longest(cut) / longest(stages))


COST = "cost"  # --layout cost


class Costs(NamedTuple):
    """Seconds of a micro-batch's forward and backward pass."""

    layers: tuple[float, ...]  # of all stacks, in the order of a forward pass; a join counts to the layer behind it
    embed: float
    head: float


def with_layout(config: RunConfig, sizes: Mapping[str, int], device: Device) -> RunConfig:
    """`config` with the numbers of layers by cost in place of "cost"; another one as it is."""
    pipeline = config.pipeline
    if pipeline.layout != COST:
        return config
    p = sizes.get("pp", 1)
    if p == 1:
        raise ValueError(f"layout is {COST}, and the mesh has no pp; leave it out, or use a mesh with pp=2 (--mesh)")
    if pipeline.has_table:
        raise ValueError(f"layout is {COST}, and schedule {pipeline.name} is a table; give it a line of layers")
    if not has_rates(device):
        raise ValueError(
            f"layout is {COST}, and the rates of {device.name} are unknown; run fzero bench first, or give the numbers "
            "of layers that fzero plan --layout cost --gpu NAME shows"
        )
    even = replace(config, pipeline=replace(pipeline, layout="auto"))
    build(even, fake_mesh(sizes))  # what a run refuses is refused before anything is traced
    costs = layer_costs(even, sizes, device)
    ranks = stage_ranks(p, pipeline.chunks, FAMILIES[str(pipeline.schedule)].placement)
    cut = split_layers(costs.layers, ranks, costs.embed, costs.head)
    return replace(config, pipeline=replace(pipeline, layout=layout_text(cut)))


def layer_costs(config: RunConfig, sizes: Mapping[str, int], device: Device) -> Costs:
    """The Costs of a model's parts on a device, shared by tp, cp and ep."""
    model_axes = {axis: size for axis, size in sizes.items() if axis not in ("pp", "dp", "rp")}
    micro, data = config.train.micro_batch, fake_mesh(model_axes).data_size
    t = replace(config.train, batch=micro * data, update="end", updates=1, delay_after=0, measure_every=0)
    config = replace(config, local=LocalSteps())
    alone = replace(
        config,
        zero=0,
        codec="",
        offload="",
        mesh=model_axes,
        train=t,
        resident=0,
        pipeline=Pipeline(),
        partition_activations=False,
    )
    return costs_of(run_step(alone, model_axes, 0, device.target), model_axes, device)


def costs_of(step: FakeStep, sizes: Mapping[str, int], device: Device) -> Costs:
    """The Costs of a recorded step of one micro-batch."""
    sim = play_of(step.job.config, sizes, device)
    sim.expect_waits(e for stay in step.stays for e in stay.events)
    spent: dict[tuple[str, int], float] = {}  # by part and layer, in the order of the forward pass; -1: no layer
    for stay in step.stays:
        begin, visit = sim.clock["device"], stay.visit
        sim.run(stay.events, 0, len(stay.events), [])
        if visit.phase in ("forward", "backward"):
            key = visit.segment, -1 if visit.layer is None else visit.layer
            spent[key] = spent.get(key, 0.0) + sim.clock["device"] - begin
    layers: list[float] = []
    ends, join_s = {"embed": 0.0, "head": 0.0}, 0.0
    for (segment, layer), seconds in spent.items():
        if layer >= 0:
            layers.append(seconds + join_s)
            join_s = 0.0
        elif segment in ends:
            ends[segment] = seconds
        else:
            join_s += seconds
    return Costs(tuple(layers), ends["embed"], ends["head"])
