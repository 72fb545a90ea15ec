"""The time of a step: a trace's events simulated in order at a device's rates.

Each rank runs the same program, so one is simulated, with clocks: the host, which issues the operators and beside a GPU
computes with what rests in its memory; the device; the messages of each axis, and the links of each level; each disk,
and copies to and from the host. An operator begins when the device is free and the host has issued it, a transfer when
it is started, its input is ready and the previous one on its axis has ended. A wait blocks the device, or for what has
left a GPU the host. So overlap is that of the engine; a psum of tensor parallelism overlaps with nothing.

A compiled block is one call for the host. Messages of gloo need the cores that compute: only the measured fraction of a
transfer (Level.hidden) is hidden.

Members that train apart (train/local_steps.py) agree by their differences, in codes if there are any, their sum over
rp, and the outer optimizer's update: traced as a step is. A step has its share of that, and of the means after each of
the first `after` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.comm.ledger import sent_elements
from fzero.core.autodiff import Remat
from fzero.core.device import FakeDevice, Target
from fzero.planner import fake_inductor
from fzero.planner.devices import Device
from fzero.planner.rates import Way, collective_s, least_seconds, op_costs, threads_of, ways_of
from fzero.planner.step_trace import ExecutedOp, Trace, Tracer, Transfer, fake_state, shared_mesh, shared_model
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.live_bytes import MemoryTrace, recorded
from fzero.run.setup import build
from fzero.sharding.spec import DEVICE, HOST_MEMORY, MEMORIES

STEADY = 3  # turns of a repeated segment to simulate; the others are assumed to equal the last of them
ISSUER = "host"  # the processor that issues operators: its clock, its work, and what waits for it
COMPILED = (
    "fused",
    "gemm",
    "attention",
    "other",
)  # kinds of operators in a compiled block, besides our own
PARTS = ("seconds", "FLOPs at the peak", "bytes at the bandwidth")  # of Timing.parts
SUMS = ("phases", "layers", "kinds", "bound", "exposed", "hidden", "waiting", "moving")  # of Timing: seconds by name
SECONDS_A_DAY = 86400.0


class Timing(NamedTuple):
    """The parts of a step's time, in seconds; phases, exposed and waiting add up to step_s."""

    step_s: float
    phases: dict[str, float]  # of the device, by phase, without waits; "lost": what is not simulated (Device.lost)
    layers: dict[str, float]  # the same by "phase/layer"
    kinds: dict[str, float]  # of operators, by kind
    # of the device, by "phase/kind" of operators: the seconds predicted, those of their FLOPs at its peak, and those of
    # their bytes at its bandwidth
    parts: dict[str, tuple[float, float, float]]
    # the phases' sum by bottleneck: "compute", "memory", "host", which issues the operators, or "lost"
    bound: dict[str, float]
    exposed: dict[str, float]  # waited for, by mesh axis
    hidden: dict[str, float]  # overlapped with computation, by mesh axis
    waiting: dict[str, float]  # waited for, by disk ("nvme") or memory ("host")
    moving: dict[str, float]  # busy time of a disk ("nvme") or of copies to and from the host ("host")
    flop: int  # hardware FLOPs of one rank
    binds: str  # the largest part of the step: "compute", "memory", "host", "communication on dp", "nvme"
    issue_s: float  # of a GPU: the host's seconds to issue the operators, beside the device's
    host_s: float = 0.0  # of those, to compute with what rests in its memory: the optimizer's update


def predict(trace: Trace, device: Device, captured: bool = False) -> Timing:
    """The Timing of a traced step on a device; captured: as one graph."""
    play = play_of(trace.config, trace.sizes, device, captured)
    play.expect_waits(trace.events)
    play.run(trace.events, 0, len(trace.events), sorted(trace.segments, key=lambda s: (s.first, -s.last)))
    play.settle()
    play.lose()
    return play.timing()


def play_of(config: RunConfig, sizes: Mapping[str, int], device: Device, captured: bool = False) -> Play:
    """A simulation of a step of `config` on a mesh of these sizes, at its begin."""
    processes = device.on_node(math.prod(sizes.values()))  # share a machine, its cores and disks
    threads = threads_of(device.cores, processes) if device.kind == "cpu" else 1
    fp32_matmul = config.precision.fp32_matmul
    cost = op_costs(device, threads=threads, processes=processes, fp32_matmul=fp32_matmul)
    play = Play(device, cost, ways_of(device, sizes), processes, issued=not captured)
    play.imbalance = device.loads.imbalance(sizes.get("ep", 1))
    rates = device.rates_of(threads, processes)
    op_s, step_s = (rates.op_s, rates.step_s) if rates is not None else (device.op_s, {})
    if config.train.compiled:
        play.call_s = op_s.get("compiled", 0.0)
        play.again = bool(Remat.parse(config.train.remat).every)
    if step := step_s.get("compiled" if config.train.compiled else "eager", 0.0):
        play.spend("update", None, step)
    return play


class Play:
    """The state of a simulation: clocks, transfers under way, and sums of seconds."""

    def __init__(self, device: Device, cost: Any, ways: Mapping[str, Way], processes: int, issued: bool = True):
        self.device, self.cost, self.ways, self.processes = device, cost, ways, processes
        self.issued = issued  # whether the host issues the operators
        self.one_clock = device.kind == "cpu"
        self.clock: dict[str, float] = {ISSUER: 0.0, "device": 0.0}
        self.call_s: float | None = None  # host seconds for a call of a compiled block; None: blocks are not compiled
        self.imbalance = 1.0  # the rows of the rank with the fullest experts over the mean
        self.again = False  # whether blocks are recomputed in the backward pass
        self.block: tuple[str, int] | None = None  # (phase, layer) of the last block called
        self.done: dict[int, tuple[float, float, float]] = {}  # number -> (end, seconds, seconds that cannot be hidden)
        self.waited: set[int] = set()  # numbers of the transfers that something waits for
        self.sums: dict[tuple[str, str], float] = {}  # (group, key) -> seconds, or FLOPs

    def expect_waits(self, events: Iterable[ExecutedOp | Transfer]) -> None:
        """Note for which transfers events wait."""
        self.waited = {e.number for e in events if isinstance(e, Transfer) and e.event == "wait"}

    # ---- one event ---------------------------------------------------------------------------------------------------

    def add(self, group: str, key: str, amount: float) -> None:
        self.sums[group, key] = self.sums.get((group, key), 0.0) + amount

    def spend(self, phase: str, layer: int | None, host_s: float, device_s: float = 0.0, bound: str = ISSUER) -> None:
        """Issue and compute some work."""
        clock, start = self.clock, self.clock["device"]
        host_s *= self.issued
        if self.one_clock:
            lag = host_s
            clock["device"] = clock[ISSUER] = start + host_s + device_s
        else:
            clock[ISSUER] += host_s
            lag = max(0.0, clock[ISSUER] - start)
            if device_s:
                clock["device"] = start + lag + device_s
            else:
                lag = 0.0
        spent = clock["device"] - start
        self.add("phases", phase, spent)
        if layer is not None:
            self.add("layers", f"{phase}/{layer}", spent)
        self.add("bound", ISSUER, lag)
        self.add("bound", bound, spent - lag)

    def on_host(self, op: ExecutedOp) -> None:
        """Simulate an operator of a GPU's host, by the bandwidth of its memory, which a node's processes share."""
        rate = self.device.host_memory_bytes_s
        if not rate:
            raise ValueError(
                f"device {self.device.name}: the host updates what rests in its memory, and the rate of that memory, "
                "host_memory_bytes_s, is not known; run `fzero bench`"
            )
        efficiency = self.device.efficiency.get(HOST_MEMORY, 1.0)
        seconds = op.bytes * self.processes / (rate * efficiency)
        self.clock[ISSUER] += seconds
        self.add(ISSUER, op.kind, seconds)

    def op(self, op: ExecutedOp) -> None:
        """Simulate an operator."""
        if op.host:
            self.on_host(op)
            return
        cost = self.cost(op)
        if "grouped_mm" in op.name:  # of the fullest rank, for which the others wait
            cost = cost._replace(device_s=cost.device_s * self.imbalance)
        host_s = self.inside(op) if self.call_s is not None else None
        host_s = cost.host_s if host_s is None else host_s
        self.spend(op.phase, op.layer, host_s, cost.device_s, cost.bound)
        self.add("kinds", op.kind, cost.device_s + (host_s if self.one_clock else 0.0))
        self.add("flop", "", op.flop)
        for group, seconds in zip(PARTS, (cost.device_s, *least_seconds(self.device, op))):
            self.add(group, f"{op.phase}/{op.kind}", seconds)

    def inside(self, op: ExecutedOp) -> float | None:
        """The host's seconds for an operator of a compiled block, the first with the call; None outside."""
        if op.layer is None or op.phase not in ("forward", "backward"):
            self.block = None
            return None
        if op.kind not in COMPILED and not op.name.startswith("fzero."):
            return None
        previous, self.block = self.block, (op.phase, op.layer)
        calls = 2 if self.again and op.phase == "backward" else 1
        return (self.call_s or 0.0) * calls if previous != self.block else 0.0

    def start(self, t: Transfer) -> None:
        if t.axis in MEMORIES:
            self.done[t.number] = self.transfer_time(t)
            return
        if t.kind == "message":  # between stages of a pipeline; the schedule has its time, see pipeline_report.py
            self.spend(t.phase, t.layer, self.ways[t.axis].hops[0][0].call_s)
            self.done[t.number] = self.clock["device"], 0.0, 0.0
            return
        size = int(t.bytes * self.imbalance) if t.kind == "exchange_rows" else t.bytes
        message = collective_s(self.ways[t.axis], t.kind, size)
        self.spend(t.phase, t.layer, message.host_s)
        hidden, channel = message.hidden, f"messages on {t.axis}"
        # No message begins before the last rank is ready; computation can hide that. An axis sends its messages in
        # order.
        begin = max(self.clock["device"] + message.late_s, self.clock.get(channel, 0.0))
        delay = 0.0
        for name, busy in message.busy.items():
            # Messages of several axes share a level evenly: each of two has half of it, until the shorter one ends.
            delay = max(delay, min(busy, self.clock.get(name, 0.0) - begin))
            self.clock[name] = max(begin, self.clock.get(name, 0.0)) + busy
        end = begin + message.seconds + delay
        self.clock[channel] = end - message.behind_s * hidden
        self.done[t.number] = end, message.seconds, message.seconds * (1.0 - hidden)

    def transfer_time(self, t: Transfer) -> tuple[float, float, float]:
        """(end, seconds, 0) of a transfer of a disk or of the host's memory, which a node's processes share."""
        memory = MEMORIES[t.axis]
        rates = self.device.rates_to(memory)
        rate = rates.get(t.kind) or rates.get("both")
        if not rate:
            names = ", ".join(rates) or "none"
            raise ValueError(
                f"device {self.device.name}: a plan with {t.axis} needs its rate of {t.kind}, and it has {names}; "
                "run `fzero bench`"
            )
        channel, begin = f"{t.axis} {t.kind}", self.clock[ISSUER if t.kind == "read" else "device"]
        if memory.on_host:
            share = (self.device.host_memory_bytes_s or math.inf) / self.processes
            seconds = t.bytes / min(rate, share * self.device.efficiency.get(memory, 1.0))
        else:
            seconds = t.bytes * self.processes / rate
        end = self.clock[channel] = max(begin, self.clock.get(channel, 0.0)) + seconds
        if memory.on_disk:  # its reads and writes share a common rate as well
            common_s, shared = t.bytes * self.processes / max(rates.values()), f"{t.axis} both"
            self.clock[shared] = max(begin, self.clock.get(shared, 0.0)) + common_s
            end = max(end, self.clock[shared])
        self.add("moving", t.axis, seconds)
        return end, seconds, 0.0

    def wait(self, t: Transfer) -> None:
        if t.number not in self.done:
            return  # of an earlier turn of a repeated segment, which a later one has overtaken
        end, seconds, min_s = self.done.pop(t.number)
        clock, current, memory = self.clock, self.clock["device"], MEMORIES.get(t.axis, DEVICE)
        if memory.on_host and t.kind == "write" and not self.one_clock:
            clock[ISSUER] = max(clock[ISSUER], end)  # the host waits for what it computes with, and not the device
            return
        exposed = max(end - current, min_s)
        clock["device"] = current + exposed
        if self.one_clock or memory.on_disk:  # the host waits for a disk; for a link the device does
            clock[ISSUER] = max(clock[ISSUER], clock["device"])
        self.add("exposed" if memory.on_device else "waiting", t.axis, exposed)
        if memory.on_device:
            self.add("hidden", t.axis, max(0.0, seconds - exposed))

    # ---- many --------------------------------------------------------------------------------------------------------

    def run(self, events: Sequence[ExecutedOp | Transfer], first: int, last: int, segments: Sequence[Any]) -> None:
        """Simulate events[first:last], of which `segments` repeat (outer ones come before those inside them)."""
        i, pending = first, [s for s in segments if first <= s.first and s.last <= last]
        while i < last:
            if pending and pending[0].first == i:
                segment = pending[0]
                inside = [s for s in pending[1:] if s.last <= segment.last]
                self.repeat(events, segment, inside)
                i, pending = segment.last, [s for s in pending if s.first >= segment.last]
                continue
            event = events[i]
            if isinstance(event, ExecutedOp):
                self.op(event)
            elif event.event == "start":
                self.start(event)
            else:
                self.wait(event)
            i += 1

    def repeat(self, events: Sequence[ExecutedOp | Transfer], segment: Any, inside: Sequence[Any]) -> None:
        """Simulate some turns of a repeated segment; the others take as long as the last of these."""
        started, awaited = crossing(events, segment.first, segment.last)
        kinds = {e.number: (e.axis, e.kind) for e in events[segment.first : segment.last] if isinstance(e, Transfer)}
        pairs = [
            pair
            for kind in {kinds[number] for number in awaited}
            for pair in zip(
                *([n for n in ns if kinds[n] == kind] for ns in (awaited, filter(self.waited.__contains__, started)))
            )
        ]
        turns = min(segment.times, STEADY)
        for turn in range(turns):
            if turn:
                for older, newer in pairs:
                    if newer in self.done:
                        self.done[older] = self.done.pop(newer)
            clock, sums = dict(self.clock), dict(self.sums)
            self.run(events, segment.first, segment.last, inside)
        extra_turns = segment.times - turns
        if extra_turns:
            turn_s = self.clock["device"] - clock["device"]
            self.done = {
                number: (end + extra_turns * turn_s, s, min_s) for number, (end, s, min_s) in self.done.items()
            }
            self.clock = {
                name: value + extra_turns * (value - clock.get(name, 0.0)) for name, value in self.clock.items()
            }
            self.sums = {key: value + extra_turns * (value - sums.get(key, 0.0)) for key, value in self.sums.items()}

    def settle(self) -> None:
        """Go on to the end of the host's update and of its copies, with which the next step begins."""
        lag = max(self.clock[ISSUER], self.clock.get(f"{HOST_MEMORY} read", 0.0)) - self.clock["device"]
        if self.sums.get((ISSUER, "optimizer")) and lag > 0.0:
            self.clock["device"] += lag
            self.add("phases", "update", lag)
            self.add("bound", ISSUER, lag)

    def lose(self) -> None:
        """Add what a step takes besides what is simulated, see `Device.lost`."""
        if lost := self.device.lost:
            self.spend("lost", None, 0.0, self.clock["device"] * lost / (1.0 - lost), "lost")

    def timing(self) -> Timing:
        groups: dict[str, dict[str, float]] = {}
        for (group, key), value in self.sums.items():
            groups.setdefault(group, {})[key] = value
        sums = {name: groups.get(name, {}) for name in SUMS}
        predicted, of_flop, of_bytes = (groups.get(name, {}) for name in PARTS)
        rows = {label: (seconds, of_flop[label], of_bytes[label]) for label, seconds in predicted.items()}
        flop = int(groups.get("flop", {}).get("", 0))
        binds = binding(sums)
        issue_s = 0.0 if self.one_clock else self.clock[ISSUER]
        host_s = sum(groups.get(ISSUER, {}).values())
        return Timing(self.clock["device"], **sums, parts=rows, flop=flop, binds=binds, issue_s=issue_s, host_s=host_s)


def binding(sums: Mapping[str, Mapping[str, float]]) -> str:
    """The largest part of a time. sums: its `bound`, `waiting` and `exposed`."""
    parts = {**sums["bound"], **sums["waiting"]}
    parts |= {f"communication on {axis}": seconds for axis, seconds in sums["exposed"].items()}
    return max(parts, key=parts.__getitem__, default="compute")


def weighted_sum(parts: Sequence[tuple[Timing, float]]) -> Timing:
    """The sum of times, each with a weight; FLOPs and `parts` are those of the first."""
    sums: dict[str, dict[str, float]] = {name: {} for name in SUMS}
    for timing, weight in parts:
        for name, totals in sums.items():
            for key, seconds in getattr(timing, name).items():
                totals[key] = totals.get(key, 0.0) + weight * seconds
    step_s, issue_s, host_s = (
        sum(weight * getattr(timing, name) for timing, weight in parts) for name in ("step_s", "issue_s", "host_s")
    )
    fields: dict[str, Any] = {**sums, "binds": binding(sums)}
    return parts[0][0]._replace(step_s=step_s, issue_s=issue_s, host_s=host_s, **fields)


def crossing(events: Sequence[ExecutedOp | Transfer], first: int, last: int) -> tuple[list[int], list[int]]:
    """Numbers of transfers across the borders of events[first:last]: (waited for later, started before)."""
    started: dict[int, None] = {}
    awaited = []
    for event in events[first:last]:
        if isinstance(event, Transfer):
            if event.event == "start":
                started[event.number] = None
            elif event.number in started:
                del started[event.number]
            else:
                awaited.append(event.number)
    return list(started), awaited


METRICS = 6  # numbers of a step that members add up, see `join` in run/setup/members.py


class AgreementEvents(NamedTuple):
    """The events of an agreement."""

    events: tuple[ExecutedOp | Transfer, ...]

    @property
    def bytes(self) -> int:
        """What a rank sends over rp."""
        moves = [event for event in self.events if isinstance(event, Transfer) and event.axis == "rp"]
        return sum(move.bytes for move in moves if move.event == "start")


def trace_agreement(
    config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, full_mean: bool = False
) -> AgreementEvents:
    """The agreement of a rank on fake tensors; full_mean: that after each of the first `local.after` steps."""
    mesh = shared_mesh(tuple(sizes.items()), rank)
    with torch.no_grad(), FakeDevice(target, lower=fake_inductor.lowering()) as mode:
        job = build.build(config, mesh, model=shared_model(config.model))
        assert job.members is not None  # local.method is given
        state, agree = fake_state(job, mode), job.members.average if full_mean else job.members.restart
        tracer, device = Tracer(target.kind == "cuda"), None if target.kind == "cpu" else mode.device
        record = MemoryTrace(state, {}, device=device, note=tracer.note, make_transfer=tracer.make_transfer)
        with recorded(record, mesh.ledger):
            agree(state, job.plan)
            record.close(state)
    return AgreementEvents(tuple(event for stay in record.stays for event in stay.events))


def with_agreements(
    timing: Timing, config: RunConfig, sizes: Mapping[str, int], device: Device, rank: int
) -> list[tuple[Timing, float]]:
    """[(the Timing of a member's step with its share of the agreements, its part of the run)]."""
    local, trace = config.local, trace_agreement(config, sizes, rank, device.target)
    agreement = simulate_events(config, sizes, device, trace.events)
    sent = sent_elements("psum", 8 * METRICS, sizes["rp"])
    row = [Transfer(event, 0, "psum", "rp", sent, "metrics", None) for event in ("start", "wait")]
    metrics = simulate_events(config, sizes, device, row)
    first = local.after / config.train.steps
    local_timing = weighted_sum([(timing, 1.0), (agreement, 1.0 / local.every), (metrics, 1.0)])
    if not first:
        return [(local_timing, 1.0)]
    trace = trace_agreement(config, sizes, rank, device.target, full_mean=True)
    mean = simulate_events(config, sizes, device, trace.events)
    return [(local_timing, 1.0 - first), (weighted_sum([(timing, 1.0), (mean, 1.0), (metrics, 1.0)]), first)]


def agreement_bytes(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target) -> float:
    """The bytes that a rank sends over rp to agree in a step, the mean over the run."""
    local, first = config.local, config.local.after / config.train.steps
    fragment_bytes = trace_agreement(config, sizes, rank, target).bytes / local.every
    mean = trace_agreement(config, sizes, rank, target, full_mean=True).bytes if first else 0
    return fragment_bytes * (1.0 - first) + mean * first


def simulate_events(
    config: RunConfig, sizes: Mapping[str, int], device: Device, events: Sequence[ExecutedOp | Transfer]
) -> Timing:
    """The Timing of events."""
    play = play_of(config, sizes, device)
    play.sums.clear()  # what a step takes besides
    begin = play.clock["device"]
    play.run(events, 0, len(events), ())
    return play.timing()._replace(step_s=play.clock["device"] - begin)
