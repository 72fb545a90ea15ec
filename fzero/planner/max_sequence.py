"""The longest sequence that a model trains on one device: `fzero plan --ask longest`.

Every tensor of a step is affine in the length T, so the peak of its passes is the largest of some lines. They are
traced at two lengths, then where the line meets the capacity, until a traced length fits and leaves less than ROOM. The
update comes after the passes and does not depend on T.

One rank, one row a micro-batch, remat "full", and loss, MLP and each layer for some tokens at a time. On a GPU the
offload of each of LADDER is tried, unless the config has one; only the longest is traced at its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.core.device import Target
from fzero.core.text_parsing import text_table
from fzero.planner import extrapolate
from fzero.planner.devices import Device
from fzero.planner.plan import resolve_for, with_host_memory
from fzero.planner.plan_report import has_rates, total_flop
from fzero.planner.plan_text import duration, format_moment, size
from fzero.planner.step_trace import Trace, make_trace, run_step
from fzero.planner.timing import predict
from fzero.run.config.config_table import apply_table
from fzero.run.config.run_config import RunConfig

LADDER = (
    "",
    "acts=host",
    "acts=host,opt=host,grads=host",
    "acts=host,opt=host,grads=host,params=host",
)
TOKENS = {"cuda": 16384, "cpu": 1024}  # that the MLP is computed for at a time
LAYER_TOKENS = {"cuda": 131072, "cpu": 2048}  # and a whole layer, where nothing is compiled
MOST_CHUNKS = 64  # of a layer: each is traced with all before it
# Of two chunks at least, as one chunk is a whole layer.
START = {"cuda": 262144, "cpu": 16384}  # the shorter of the two lengths that are traced first
UNIT = 128  # lengths are multiples of it
ROOM = 0.002  # of the capacity that a longest sequence may leave
NEAR = 0.01  # of a length, for which more is not offloaded


class Passes(NamedTuple):
    """The forward and backward passes over one row of T tokens."""

    tokens: int
    peak_bytes: int  # of tensors on the device
    host_bytes: int  # and in the host's memory
    trace: Trace


class Choice(NamedTuple):
    """An offload with the longest sequence that it allows."""

    offload: str
    tokens: int
    peak_bytes: int  # of tensors on the device
    host_bytes: int  # and in the host's memory
    bytes_per_token: float  # on the device, of the last ones
    traced: bool  # whether this length was traced, or is where the line through two shorter ones ends


class Longest(NamedTuple):
    """The answer: each choice of an offload, and the passes of the one with the longest sequence."""

    config: RunConfig  # of the longest, with every "auto" resolved
    device: Device
    capacity_bytes: int
    host_capacity_bytes: int | None
    choices: tuple[Choice, ...]
    best: Choice
    passes: Passes
    seconds: float | None  # of the passes; None: the device's rates are unknown

    def to_json(self) -> str:
        """Format as one JSON object."""
        peak = self.passes.trace.peak
        facts = {
            "device": self.device.name,
            "capacity_bytes": self.capacity_bytes,
            "host_capacity_bytes": self.host_capacity_bytes,
            "choices": [choice._asdict() for choice in self.choices],
            "settings": settings_of(self.config),
            "best": self.best._asdict(),
            "peak": {"phase": peak.phase, "layer": peak.layer, "components": dict(peak.parts)},
            "largest": [list(tensor) for tensor in self.passes.trace.alive],
            "flop": total_flop(self.passes.trace),
            "passes_s": self.seconds,
        }
        return json.dumps(facts, indent=1)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(lines) for lines in (self.heading(), self.rows(), self.memory()))

    def heading(self) -> list[str]:
        """The lines about what was asked and the answer."""
        name, best = self.config.preset or "the model", self.best
        settings = " ".join(f"--set {key}={value}" for key, value in settings_of(self.config).items())
        took = "" if self.seconds is None else f", {duration(self.seconds)} for the passes of a step"
        return [
            f"{name} on one {self.device.name}: the longest sequence that trains is {best.tokens:,} tokens{took}",
            f"with {settings}" + (f" --offload {best.offload}" if best.offload else ""),
        ]

    def rows(self) -> list[str]:
        """The table of the choices."""
        cells = [
            [
                choice.offload or "none",
                f"{choice.tokens:,}" if choice.traced else f"about {choice.tokens:,}",
                size(choice.peak_bytes),
                size(choice.bytes_per_token),
                size(choice.host_bytes),
            ]
            for choice in self.choices
        ]
        return text_table(["offload", "tokens", "device", "a token", "host"], cells)

    def memory(self) -> list[str]:
        """Where each byte goes at the peak."""
        trace, peak = self.passes.trace, self.passes.trace.peak
        moment = {"phase": peak.phase, "layer": peak.layer, "op": peak.op}
        parts = [[name, size(amount), size(amount / self.best.tokens)] for name, amount in peak.parts.items() if amount]
        largest = [
            [f"{name} ({group})", size(amount), size(amount / self.best.tokens)]
            for name, group, amount in trace.alive[:12]
        ]
        host = "" if not self.passes.host_bytes else f"; {size(self.passes.host_bytes)} in the host's memory"
        lines = [f"{size(peak.bytes)} of {size(self.capacity_bytes)} at the peak, in {format_moment(moment)}{host}"]
        return [*lines, *text_table(["", "bytes", "a token"], [*parts, *largest])]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a longest run, by dotted name."""
    settings = {"data.seq_len": config.data.seq_len, "model.max_len": config.data.seq_len, "train.remat": "full"}
    settings |= {"train.batch": 1, "train.micro_batch": 1}
    of_chunks = {f"model.{name}": getattr(config.model, name, 0) for name in ("mlp_tokens", "layer_tokens")}
    return settings | {name: tokens for name, tokens in of_chunks.items() if tokens}


def set_length(config: RunConfig, tokens: int, offload: str, kind: str) -> RunConfig:
    """`config` for one row of so many tokens, by this offload on a device of this kind."""
    if math.prod(config.mesh.values()) > 1:
        raise ValueError(
            f"the longest sequence is asked for one device, and the mesh is {dict(config.mesh)}; leave mesh "
            f"out (--mesh)"
        )
    model: dict[str, Any] = {"max_len": tokens} if hasattr(config.model, "max_len") else {}
    chunk = getattr(config.model, "mlp_tokens", None)
    if chunk == 0 and getattr(config.model, "mlp_tiles", 1) == 1 and not hasattr(config.model, "n_experts"):
        model["mlp_tokens"] = TOKENS[kind]
    if getattr(config.model, "layer_tokens", None) == 0 and not hasattr(config.model, "n_experts"):
        chunk = max(LAYER_TOKENS[kind], -(-tokens // (MOST_CHUNKS * UNIT)) * UNIT)
        model |= {"layer_tokens": chunk} if config.train.compiled is not True else {}
    train = {"batch": 1, "micro_batch": 1, "remat": "full", "measure_every": 0, "memory_check": False}
    changes = {"model": model, "data": {"seq_len": tokens}, "train": train, "offload": offload}
    return apply_table(config, changes)


def trace_passes(config: RunConfig, target: Target) -> Passes:
    """Trace the forward and backward pass of a step, all layers but a few as copies of one."""
    stack, depth = extrapolate.deepest_stack(config.model)
    prefix, group, run = extrapolate.shape(config, depth)
    full = depth <= run + group
    step = run_step(config, {}, 0, target, 0 if full else run, short=True)
    extended = None if full else extrapolate.extend_layers(step.stays, stack, prefix, group, run, depth)
    if extended is None:
        step = step if full else run_step(config, {}, 0, target, short=True)
        trace = make_trace(step)
    else:
        segments = tuple(extrapolate.segment(step.stays, middle, (depth - run) // group + 1) for middle in extended[1])
        trace = make_trace(step, extended[0], tuple(sorted(segments, key=lambda s: (s.first, -s.last))), "passes alone")
    host = step.host_peak + (0 if extended is None else extrapolate.inputs_on_host(step.job, config, depth - run))
    return Passes(config.data.seq_len, trace.peak.bytes, host, trace)


def line(a: Passes, b: Passes, capacity: int, host: int | None) -> tuple[int, float]:
    """(the length where the line through two passes meets the memory, bytes a token)."""
    device_slope = (b.peak_bytes - a.peak_bytes) / (b.tokens - a.tokens)
    host_slope = (b.host_bytes - a.host_bytes) / (b.tokens - a.tokens)
    lengths = [b.tokens + (capacity - b.peak_bytes) / device_slope] if device_slope > 0 else []
    lengths += [b.tokens + (host - b.host_bytes) / host_slope] if host and host_slope > 0 else []
    return max(0, int(min(lengths, default=2 * b.tokens))), device_slope


def find(
    measure: Callable[[int], Passes], capacity: int, host: int | None, traces: dict[int, Passes]
) -> tuple[Passes, float]:
    """(the passes of the longest T that fits, bytes of a token there), for functions that increase with T."""

    def spare_fraction(candidate: Passes) -> float:
        """The part of the capacity that is left, of the device or of the host, whichever is less."""
        margins = [1.0 - candidate.peak_bytes / capacity]
        return min([*margins, 1.0 - candidate.host_bytes / host] if host else margins)

    previous_gap = math.inf  # the gap between the longest that fits and the shortest that does not, a step ago
    while True:
        fits = [tokens for tokens, candidate in traces.items() if spare_fraction(candidate) >= 0]
        low, high = max(fits), min((tokens for tokens in traces if tokens > max(fits)), default=0)
        # The two nearest lengths: where the function is convex, the line through them is that of what is at the peak.
        ends = sorted(traces, key=lambda tokens: abs(spare_fraction(traces[tokens])))[:2]
        aim, slope = line(traces[min(ends)], traces[max(ends)], capacity, host)
        if spare_fraction(traces[low]) < ROOM or high == low + UNIT:
            return traces[low], slope
        # A part of ROOM is left on purpose: a line is exact to rounding, and must not miss by a hair.
        aim = int(aim * (1 - ROOM / 4)) // UNIT * UNIT
        gap = high - low if high else math.inf
        # Another kernel serves on the other side of a length.
        if high and (gap > previous_gap / 2 or not low < aim < high):
            aim = low + max(1, (high - low) // UNIT // 2) * UNIT
        previous_gap, aim = gap, aim if aim > low else 2 * low
        traces[aim] = measure(aim)


def interpolate(
    offload: str, traces: dict[int, Passes], capacity: int, host: int | None, measure: Callable[[int], Passes]
) -> Choice:
    """The length where the line through two traced lengths meets what there is; 0 below UNIT tokens."""
    a, b = traces.values()
    tokens, slope = line(a, b, capacity, host)
    if tokens < a.tokens:
        a, b = traces.setdefault(UNIT, measure(UNIT)), a
        if a.peak_bytes > capacity or (host and a.host_bytes > host):
            return Choice(offload, 0, a.peak_bytes, a.host_bytes, 0.0, True)
        tokens, slope = line(a, b, capacity, host)
    tokens = tokens // UNIT * UNIT
    extra_tokens, host_slope = tokens - b.tokens, (b.host_bytes - a.host_bytes) / (b.tokens - a.tokens)
    return Choice(
        offload,
        tokens,
        b.peak_bytes + int(extra_tokens * slope),
        b.host_bytes + int(extra_tokens * host_slope),
        slope,
        False,
    )


def longest(config: RunConfig, device: Device, say: Callable[[str], None] = lambda stage: None) -> Longest:
    """The longest sequence that `config`'s model trains on one such device; raises ValueError for none."""
    device = with_host_memory(device, config)
    capacity, host = device.capacity_bytes, device.host_capacity_bytes(1)
    offloads = (config.offload,) if config.offload or device.kind == "cpu" else LADDER

    def measure(tokens: int, offload: str) -> Passes:
        say(f"tracing {tokens:,} tokens, offload {offload or 'none'}")
        return trace_passes(resolve_for(set_length(config, tokens, offload, device.kind), device), device.target)

    choices, traces, start = [], {}, START[device.kind]
    for offload in offloads:
        traces[offload] = {tokens: measure(tokens, offload) for tokens in (start, 2 * start)}
        choices.append(
            interpolate(offload, traces[offload], capacity, host, lambda t, offload=offload: measure(t, offload))
        )
    max_tokens = max(choice.tokens for choice in choices)
    if not max_tokens:
        smallest = min(choices, key=lambda choice: choice.peak_bytes)
        raise ValueError(
            f"the longest sequence: not even {UNIT} tokens fit: with offload {smallest.offload or 'none'} they need "
            f"{size(smallest.peak_bytes)} of {size(capacity)}; offload more, or name a device with more memory"
        )
    index = next(i for i, choice in enumerate(choices) if choice.tokens >= max_tokens * (1 - NEAR))
    offload = choices[index].offload
    passes, slope = find(lambda tokens: measure(tokens, offload), capacity, host, traces[offload])
    best = Choice(offload, passes.tokens, passes.peak_bytes, passes.host_bytes, slope, True)
    choices[index] = best
    seconds = predict(passes.trace, device).step_s if has_rates(device) else None
    return Longest(passes.trace.config, device, capacity, host, tuple(choices), best, passes, seconds)
