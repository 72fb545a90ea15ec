"""The report of a plan: memory, communication, time and cost, by the trace of its step and the rates of a device.

The bound of each part of a planned step (its FLOPs, its bytes, waits, or the host), beside the device's limits.

Ref: Williams et al. 2009, "Roofline".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.core.text_parsing import text_table
from fzero.models import LoRAConfig
from fzero.planner import extrapolate, fake_inductor
from fzero.planner.devices import Device
from fzero.planner.plan_text import duration, page, percent, size
from fzero.planner.step_trace import Trace, Transfer
from fzero.planner.timing import ISSUER, SECONDS_A_DAY, Timing, predict, weighted_sum, with_agreements
from fzero.run.config.config_table import to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import count_sums
from fzero.run.measure.flops import hfu, mfu, token_flop
from fzero.run.measure.memory_check import grad_bytes, rounded_on_host
from fzero.run.setup import build
from fzero.run.setup.build import Job
from fzero.sharding import AXES, fake_mesh
from fzero.sharding.leaf_plan import sent_by_link
from fzero.sharding.spec import DISK
from fzero.train.capture import SHARE, refusal_of

PASSES = ("forward", "backward")


COMMUNICATED = ("phase", "collective", "axis", "leaf", "dtype", "calls", "elements", "bytes")


class PlanReport(NamedTuple):
    """The result of `plan`: whether a run fits, its memory, communication and time; `print(report)` shows one page.

    Bytes and FLOPs are exact, as the step has them; times are predicted.

    >>> settings = {"precision.policy": "bf16", "train.compiled": False}
    >>> report = fzero.plan("mlp-tiny", gpu="a100", settings=settings)
    >>> report.fits, report.num_params, report.state_bytes["master"]  # float32: 4 bytes a parameter
    (True, 24640, 98560)
    """

    config: RunConfig  # with every "auto" resolved for the device
    mesh: dict[str, int]  # mesh axes larger than 1
    ranks: int
    ranks_on_node: int
    device: Device
    num_params: int
    tokens_per_step: int  # of all ranks
    micro_batches: int  # of each rank

    fits: bool
    capacity_bytes: int  # available to the tensors of one rank
    margin_bytes: int  # capacity left at the peak; negative: missing
    allocator_bytes: int  # assumed loss to fragmentation, not in the capacity
    binds: str  # "memory" if it does not fit, else the largest part of a step's time
    memory_binds: str  # the largest component at the peak

    # between steps, on a rank's device: params, master, opt, ema, other, and grads after a backward pass
    state_bytes: dict[str, int]
    state_elsewhere: dict[str, int]  # between steps, of a rank: "host" and "nvme"
    state_bytes_per_rank: int  # params, gradients and optimizer states: the sum of state_bytes
    peak_bytes_per_rank: int
    host_peak_bytes: int  # of a rank's tensors in the host's memory, at most, with what their allocators round up
    host_capacity_bytes: int | None  # available to a rank there; None: unknown, not checked
    peak: dict[str, Any]  # phase, layer, op, bytes, components, largest: [name, component, bytes] alive there
    phases: dict[str, int]  # the peak of each phase of the step
    timeline: list[dict[str, Any]]  # the fullest and last moment of each visit of a part of the model

    comm: list[dict[str, Any]]  # rows of the ledger of one rank
    comm_bytes_per_axis: dict[str, int]  # sent by one rank in a step
    traffic: dict[str, dict[str, int]]  # "host" and "nvme": bytes of one rank in a step, "read" and "write"

    flop_per_step: int  # hardware FLOPs of all ranks, with recomputation
    pass_flop_per_step: int  # those of the forward and backward passes, which HFU counts; without the optimizer's
    model_flop_per_step: float  # 6 N + 12 L T D a token
    model_flop_per_step_causal: float  # 6 N + 6 L T D a token
    step_s: float | None  # None: the device's rates are unknown
    step_s_range: tuple[float, float] | None  # the least and the most, by the errors of earlier predictions
    time: dict[str, Any]  # phases, kinds, bound, exposed, hidden, waiting: seconds
    tokens_per_s: float | None
    mfu: float | None
    mfu_causal: float | None
    hfu: float | None

    price_per_hour: float | None  # of one device
    exact: str  # how the trace was extrapolated; "" if all layers were run
    notes: list[str]

    tokens: float | None = None  # the budget, by `for_tokens`
    days: float | None = None
    device_hours: float | None = None
    cost: float | None = None

    # with pp: schedule, chunks, layout, wire_s, acts_s, bubble_s; ranks: of each its layers, bytes and seconds
    pipeline: dict[str, Any] = {}  # noqa: RUF012  (never written to)

    def for_tokens(self, tokens: float) -> PlanReport:
        """This report with a budget of tokens: its days, device hours and cost, as far as rates and price are known."""
        if self.tokens_per_s is None:
            return self._replace(tokens=tokens)
        seconds = tokens / self.tokens_per_s
        hours = seconds * self.ranks / 3600
        cost = None if self.price_per_hour is None else hours * self.price_per_hour
        return self._replace(tokens=tokens, days=seconds / SECONDS_A_DAY, device_hours=hours, cost=cost)

    def too_much(self) -> str:
        """Say how much memory is missing; "" if the run fits."""
        if self.margin_bytes < 0:
            return f"{size(-self.margin_bytes)} too much"
        if self.fits or self.host_capacity_bytes is None:
            return ""
        return f"{size(self.host_peak_bytes - self.host_capacity_bytes)} of a rank too much for the host's memory"

    def to_json(self) -> str:
        """Format all fields as one JSON object; `config` is the table of a run's config.json."""
        table = self._asdict() | {"config": to_table(self.config), "device": device_facts(self.device)}
        return json.dumps(table, indent=1)

    def __str__(self) -> str:
        return page(self)


def report_of(trace: Trace, device: Device, timing: Timing | None = None) -> PlanReport:
    """The PlanReport of a traced step, simulated on a device."""
    ranks = math.prod(trace.sizes.values())
    node = device.on_node(ranks)
    built = build.build(trace.config, fake_mesh(trace.sizes, trace.rank))
    state = {**trace.state, "grads": grad_bytes(built)}
    share = node if device.kind == "cpu" else 1  # the ranks of a machine share its memory
    capacity, peak = device.capacity_bytes // share, trace.peak.bytes
    host, host_peak = device.host_capacity_bytes(node), trace.host_peak
    host_peak += rounded_on_host(built) if device.kind == "cuda" else 0
    exceeds, host_over = peak > capacity, host is not None and host_peak > host
    if timing is None and has_rates(device) and not trace.turns:
        timing = predict(trace, device)
    phases = list[tuple[Timing, float]]()
    if timing is not None and built.members is not None:
        phases = with_agreements(timing, trace.config, trace.sizes, device, trace.rank)
        timing = weighted_sum(phases)
    if timing is not None and built.tx.sums.local is not None:
        timing = with_sums(timing, trace, device)
    step_tokens = trace.tokens * built.mesh.data_size
    full, causal = (step_tokens * flop for flop in token_flop(built)[:2])
    flop, passes = total_flop(trace), total_flop(trace, PASSES)
    rate = step_tokens / timing.step_s if timing else None
    dtype = str(built.policy.compute).removeprefix("torch.")
    top = device.flops.get(dtype)
    return PlanReport(
        config=trace.config,
        mesh={name: size for name, size in trace.sizes.items() if size > 1},
        ranks=ranks,
        ranks_on_node=node,
        device=device,
        num_params=trace.num_params,
        tokens_per_step=step_tokens,
        micro_batches=build.local_micro_batches(trace.config, built.mesh),
        fits=not exceeds and not host_over,
        capacity_bytes=capacity,
        margin_bytes=capacity - peak,
        allocator_bytes=int((device.memory_bytes - device.reserved_bytes) * device.margin) // share,
        binds="memory" if exceeds else "host memory" if host_over else timing.binds if timing else "",
        memory_binds=max(trace.peak.parts, key=trace.peak.parts.__getitem__),
        state_bytes=state,
        state_elsewhere=trace.state_elsewhere,
        state_bytes_per_rank=sum(state.values()),
        peak_bytes_per_rank=peak,
        host_peak_bytes=host_peak,
        host_capacity_bytes=host,
        peak=moment_facts(trace.peak) | {"largest": [list(tensor) for tensor in trace.alive]},
        phases=phase_peaks(trace),
        timeline=[moment_facts(moment) for moment in trace.timeline],
        comm=[{name: getattr(row, name) for name in COMMUNICATED} for row in trace.ledger],
        comm_bytes_per_axis=sent_by_axis(trace),
        traffic=traffic_of(trace),
        flop_per_step=flop * ranks,
        pass_flop_per_step=passes * ranks,
        model_flop_per_step=full,
        model_flop_per_step_causal=causal,
        step_s=timing.step_s if timing else None,
        step_s_range=(timing.step_s * device.step_range[0], timing.step_s * device.step_range[1]) if timing else None,
        time=time_facts(timing) if timing else {},
        tokens_per_s=rate,
        mfu=mfu(full / step_tokens, rate, top * ranks) if rate is not None and top is not None else None,
        mfu_causal=mfu(causal / step_tokens, rate, top * ranks) if rate is not None and top is not None else None,
        hfu=hfu(passes, timing.step_s, top) if timing and top is not None else None,
        price_per_hour=device.price_per_hour,
        exact=trace.exact,
        notes=[
            *notes_of(trace, timing, device),
            *sums_notes(built, phases),
            *capture_notes(trace, device, timing, built),
        ],
    )


def has_rates(device: Device) -> bool:
    """Whether times can be predicted for a device."""
    return device.measured or bool(device.flops)


def turns(trace: Trace) -> list[int]:
    """The number of times that each event of a trace happens in a step."""
    times = list(trace.turns) or [1] * len(trace.events)
    for segment in trace.segments:
        for i in range(segment.first, segment.last):
            times[i] *= segment.times
    return times


def total_flop(trace: Trace, phases: Sequence[str] = ()) -> int:
    """The hardware FLOPs of one rank in a step, or in the given phases."""
    ops = ((event, n) for event, n in zip(trace.events, turns(trace)) if not isinstance(event, Transfer))
    return sum(op.flop * n for op, n in ops if not phases or op.phase in phases)


def traffic_of(trace: Trace) -> dict[str, dict[str, int]]:
    """{"host" or "nvme": {"read": bytes, "write": bytes}} of one rank in a step, without unused memories."""
    out: dict[str, Counter[str]] = {}
    for event, n in zip(trace.events, turns(trace)):
        if isinstance(event, Transfer) and event.event == "start" and event.axis not in AXES:
            out.setdefault(event.axis, Counter())[event.kind] += event.bytes * n
    return {name: {direction: sums[direction] for direction in ("read", "write")} for name, sums in out.items()}


def sent_by_axis(trace: Trace) -> dict[str, int]:
    """The bytes that one rank sends in a step, by axis of the mesh."""
    sums: Counter[str] = Counter()
    for row in trace.ledger:
        sums[row.axis] += row.bytes
    return dict(sums)


def phase_peaks(trace: Trace) -> dict[str, int]:
    """The most bytes alive in each phase of the step, in the order of the step."""
    peaks: dict[str, int] = {}
    for moment in trace.timeline:
        peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.bytes)
    return peaks


def moment_facts(moment: Any) -> dict[str, Any]:
    """A Moment as a table, with its nonzero components."""
    table = moment._asdict()
    parts = {name: size for name, size in table.pop("parts").items() if size}
    return {**table, "components": parts, "parts": parts}


def time_facts(timing: Timing) -> dict[str, Any]:
    """The parts of a predicted step; phases, exposed and waiting add up to step_s."""
    names = ("phases", "kinds", "parts", "bound", "exposed", "hidden", "waiting", "moving", "binds")
    return {name: getattr(timing, name) for name in names}


def device_facts(device: Device) -> dict[str, Any]:
    """The table of a device for a report, without its curves."""
    names = (
        "name",
        "kind",
        "measured",
        "processors",
        "memory_bytes",
        "reserved_bytes",
        "margin",
        "flops",
        "bandwidth_bytes_s",
        "efficiency",
        "lost",
        "step_range",
        "sources",
    )
    return {name: getattr(device, name) for name in names} | {"links": [level._asdict() for level in device.links]}


def codes_of(model: LoRAConfig) -> str:
    """The part of LoRA's note on weights in codes."""
    kind = getattr(model, "kind", "")
    return f", the blocks' in {kind} with a scale for each {model.block} elements" if kind else ""


def notes_of(trace: Trace, timing: Timing | None, device: Device) -> list[str]:
    """The notes for the reader of the report."""
    notes = []
    if timing is None:
        notes.append("no times: `fzero bench` has not measured this machine yet; run it once, and plan again")
    if trace.exact:
        notes.append(trace.exact)
    imbalance = device.loads.imbalance(trace.sizes.get("ep", 1))
    if imbalance != 1.0:
        notes.append(f"experts: in each layer the fullest rank of ep has {imbalance:.3g} times the mean rows")
    if isinstance(trace.config.model, LoRAConfig):
        notes.append(
            f"LoRA of rank {trace.config.model.rank}: other weights are frozen{codes_of(trace.config.model)} (no "
            "gradient, no state; 4N of the model's FLOPs); fzero finetune --lora trains it"
        )
    if trace.config.train.compiled and fake_inductor.note():
        notes.append(fake_inductor.note())
    if trace.state_elsewhere[DISK] and trace.config.nvme.slots > 1:
        notes.append(f"the disk holds {trace.config.nvme.slots} versions of what rests there")
    return notes


def with_sums(timing: Timing, trace: Trace, device: Device) -> Timing:
    """The mean Timing of a local step and of one that sums by signs."""
    optim = trace.config.optim
    summed_config = replace(trace.config, optim=replace(optim, sum_every=1, sum_double=0))
    summed = predict(extrapolate.trace(summed_config, trace.sizes, rank=trace.rank, target=device.target), device)
    share = count_sums(optim, trace.config.train.steps) / trace.config.train.steps
    return weighted_sum([(timing, 1.0 - share), (summed, share)])


def sums_notes(built: Job, phases: Sequence[tuple[Timing, float]]) -> list[str]:
    """The notes on sums that are not made in each step, or not as in it."""
    notes = []
    if built.members is not None:
        share, switch_step = "its share of them", built.config.local.after
        if switch_step:
            share += " over the run"
        if len(phases) > 1:
            local_time, first = (duration(timing.step_s) for timing, _ in phases)
            share += f": a step takes {first} until step {switch_step}, and {local_time} from then on"
        notes.append(f"{built.members.text(built.plan)}; the step above is one of a member with {share}")
    if built.tx.sums.makes:
        plan, optim = built.plan, built.config.optim
        full = size(sum(sent_bytes for _, sent_bytes in sent_by_link(plan, signs=False).values()))
        if plan.local:
            signs = size(sum(sent_bytes for _, sent_bytes in plan.sent_by_link().values()))
            steps = built.config.train.steps
            statement = (
                "makes no sum, and has its share of the time of those that do over the run: "
                f"{count_sums(optim, steps):,} of {steps:,} steps send {signs} each"
            )
        else:
            statement = "sends signs"
        notes.append(f"{optim.name}: the step above {statement}; one whose sum is in full sends {full}")
    return notes


def capture_notes(trace: Trace, device: Device, timing: Timing | None, built: Job) -> list[str]:
    """The note on train.capture=auto on a GPU: the time that it saves, and the memory that it takes."""
    if trace.config.train.capture == "off" or device.kind != "cuda":
        return []
    if built.plan.stages is not None:
        return ["capture: what it saves is not predicted with pp"]
    if refused := refusal_of(built.plan, built.tx, donate=True):
        return [f"capture: steps are issued one by one: {refused}"]
    graph_bytes = trace.peak.bytes - sum(trace.state.values())
    memory = (
        f"its graph keeps {size(graph_bytes)}, and a step that is measured or follows a checkpoint takes them once more"
    )
    if timing is None:
        return [f"capture: {memory}"]
    alone, would = predict(trace, device, captured=True).step_s, timing.issue_s >= SHARE * timing.step_s
    return [
        f"capture: the host issues a step in {duration(timing.issue_s)} of {duration(timing.step_s)}, as one graph it "
        f"takes {duration(alone)}; auto {'captures it' if would else 'leaves it as it is'}; {memory}"
    ]


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
    >>> from fzero.planner.plan_report import roofline
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


def roofline_page(report: PlanReport) -> str:
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
