"""The time of a step of a pipeline: its schedule played with the seconds of every act and of every message.

A record of a rank is simulated as a step without pp is (timing.py), but for the messages between stages, which the
schedule waits for. So each act has its seconds: with gathers and sums over dp as far as they are exposed in it. Before
the rows all ranks gather what is used outside the layers; behind them they sum, and update: the slowest rank counts.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fzero.planner.devices import Device
from fzero.planner.pipelined import PipelineTrace, Record, ends_of
from fzero.planner.rates import ways_of, wire_s
from fzero.planner.step_trace import Transfer
from fzero.planner.timing import Timing, play_of
from fzero.sharding.pipeline import Act, Played, Schedule, play

Sums = Counter  # {(group, key): seconds or FLOPs} as those of timing.Play


class PipelineTiming(NamedTuple):
    """The time of a step: of the rank that computes longest, and what the schedule made of the acts of all."""

    timing: Timing
    played: Played
    wire: tuple[float, ...]  # by stage, of a message to the next one: seconds
    busy: tuple[float, ...]  # by rank: the seconds of its acts
    acts: tuple[dict[str, float], ...]  # by stage: the seconds of an act of each kind in the middle of the step
    edges_s: float  # before the rows and behind them


class Simulated(NamedTuple):
    """The seconds of a record: before its acts, of each by the identity of its stays, and behind them."""

    before: tuple[float, Sums]
    acts: dict[int, tuple[float, Sums]]
    after: tuple[float, Sums]


def predict_pipeline(found: PipelineTrace, device: Device) -> PipelineTiming:
    """The PipelineTiming of a traced step on a device."""
    s, ways = found.schedule, ways_of(device, found.trace.sizes)
    records = {id(record): record for row in found.ranks for record in row.records}
    simulated = {key: simulate_record(record, found, device) for key, record in records.items()}
    of_acts = {key: cost for one in simulated.values() for key, cost in one.acts.items()}
    costs = {
        act: of_acts[id(stays)] for rank, row in enumerate(found.ranks) for act, stays in zip(s.rows[rank], row.acts)
    }
    wire = tuple(
        wire_s(ways["pp"], s.stages.ranks[stage], s.stages.ranks[stage + 1], size)
        for stage, size in enumerate(boundary_bytes(found))
    )
    played = play(s, lambda act: costs[act][0], wire)
    edges = [(simulated[id(row.record)].before, simulated[id(row.record)].after) for row in found.ranks]
    edges_s = sum(max(edge[i][0] for edge in edges) for i in (0, 1))
    busy = tuple(sum(costs[act][0] for act in row) for row in s.rows)
    longest = max(range(len(busy)), key=busy.__getitem__)
    total = play_of(found.trace.config, found.trace.sizes, device)
    total.sums, step = {}, played.step + edges_s
    for _, more in (*edges[longest], *(costs[act] for act in s.rows[longest])):
        for (group, key), amount in more.items():
            total.add(group, key, amount)
    idle = step - busy[longest] - sum(seconds for seconds, _ in edges[longest])
    total.add("phases", "bubble", idle)
    total.add("bound", "bubble", idle)
    total.clock["device"] = step
    if device.lost:
        total.spend("lost", None, 0.0, step * device.lost / (1.0 - device.lost), "lost")
    return PipelineTiming(total.timing(), played, wire, busy, middle_costs(s, costs), edges_s)


def simulate_record(record: Record, found: PipelineTrace, device: Device) -> Simulated:
    """Simulate a record from its begin to its end, and cut its time at its acts."""
    config, sizes = record.step.job.config, found.trace.sizes
    sim = play_of(config, sizes, device)
    groups = [record.before, *record.acts, record.after]
    sim.waited = {
        e.number
        for group in groups
        for stay in group
        for e in stay.events
        if isinstance(e, Transfer) and e.event == "wait"
    }
    costs, begin, before = [], 0.0, Sums()
    for group in groups:
        for stay in group:
            sim.run(stay.events, 0, len(stay.events), [])
        if group is record.after:
            sim.settle()
        more = Sums({key: value - before[key] for key, value in sim.sums.items()})
        costs.append((sim.clock["device"] - begin, more))
        begin, before = sim.clock["device"], Sums(sim.sums)
    acts = {id(act): cost for act, cost in zip(record.acts, costs[1:-1])}
    return Simulated(costs[0], acts, costs[-1])


def boundary_bytes(found: PipelineTrace) -> list[int]:
    """By stage but the last, the bytes of a micro-batch's activations that go to the next one; 0 within a rank."""
    out = [0] * (len(found.schedule.stages.ranks) - 1)
    for rank, row in enumerate(found.ranks):
        for act, stays in zip(found.schedule.rows[rank], row.acts):
            if act.kind == "F" and act.part == 0 and ends_of(found.schedule, rank, act)[1] is not None:
                out[act.stage] = sum(
                    e.bytes for stay in stays for e in stay.events if isinstance(e, Transfer) and e.what == "message"
                )
    return out


def middle_costs(s: Schedule, costs: dict[Act, tuple[float, Sums]]) -> tuple[dict[str, float], ...]:
    """By stage the seconds of its acts of each kind, in the middle micro-batch."""
    out: list[dict[str, float]] = [{} for _ in s.stages.ranks]
    for act, (seconds, _) in costs.items():
        if act.part == s.parts // 2:
            out[act.stage][act.kind] = seconds
    return tuple(out)
