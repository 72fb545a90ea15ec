"""The longest sequence that a model trains on one device: `fzero plan --ask longest`.

Every tensor of a step is affine in the length T, so the peak of its passes is the largest of some lines. They are
traced at two lengths; the length at which the line meets the capacity is traced, and so on from the two nearest ones,
until a traced length fits and leaves less than ROOM of the capacity. The update comes after the passes, when their
activations are gone, and its memory does not depend on T; it is not traced.

One rank, one row a micro-batch, remat "full", and loss, MLP and each layer for some tokens at a time. On a GPU the
offload of each of LADDER is tried, which leaves less and less on the device, unless the config has one; a CPU has no
other memory. Only the longest of these is traced at its length, the others are where their lines end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.core.device import Target
from fzero.planner import extrapolate
from fzero.planner.devices import Device
from fzero.planner.format import duration, place, size, table
from fzero.planner.plan import resolve_for, with_host_memory
from fzero.planner.plan_report import has_rates, total_flop
from fzero.planner.step_trace import Trace, make_trace, run_step
from fzero.planner.timing import predict
from fzero.run.config import RunConfig
from fzero.run.config_table import apply_table

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
    """The answer: each choice of an offload, and the passes of the one with the longest sequence; `print` shows a page.

    The least offload is the best of those whose lengths are within NEAR of the longest.
    """

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
            "largest": [list(one) for one in self.passes.trace.alive],
            "flop": total_flop(self.passes.trace),
            "passes_s": self.seconds,
        }
        return json.dumps(facts, indent=1)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(lines) for lines in (self.heading(), self.rows(), self.memory()))

    def heading(self) -> list[str]:
        """The lines about what was asked and the answer."""
        name, best = self.config.preset or "the model", self.best
        given = " ".join(f"--set {key}={value}" for key, value in settings_of(self.config).items())
        took = "" if self.seconds is None else f", {duration(self.seconds)} for the passes of a step"
        return [
            f"{name} on one {self.device.name}: the longest sequence that trains is {best.tokens:,} tokens{took}",
            f"with {given}" + (f" --offload {best.offload}" if best.offload else ""),
        ]

    def rows(self) -> list[str]:
        """The table of the choices."""
        cells = [
            [
                one.offload or "none",
                f"{one.tokens:,}" if one.traced else f"about {one.tokens:,}",
                size(one.peak_bytes),
                size(one.bytes_per_token),
                size(one.host_bytes),
            ]
            for one in self.choices
        ]
        return table(["offload", "tokens", "device", "a token", "host"], cells)

    def memory(self) -> list[str]:
        """Where each byte goes at the peak."""
        trace, peak = self.passes.trace, self.passes.trace.peak
        moment = {"phase": peak.phase, "layer": peak.layer, "op": peak.op}
        parts = [[name, size(of), size(of / self.best.tokens)] for name, of in peak.parts.items() if of]
        largest = [[f"{name} ({group})", size(of), size(of / self.best.tokens)] for name, group, of in trace.alive[:12]]
        host = "" if not self.passes.host_bytes else f"; {size(self.passes.host_bytes)} in the host's memory"
        lines = [f"{size(peak.bytes)} of {size(self.capacity_bytes)} at the peak, in {place(moment)}{host}"]
        return [*lines, *table(["", "bytes", "a token"], [*parts, *largest])]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a longest run, by dotted name."""
    found = {"data.seq_len": config.data.seq_len, "model.max_len": config.data.seq_len, "train.remat": "full"}
    found |= {"train.batch": 1, "train.micro_batch": 1}
    of_chunks = {f"model.{name}": getattr(config.model, name, 0) for name in ("mlp_tokens", "layer_tokens")}
    return found | {name: tokens for name, tokens in of_chunks.items() if tokens}


def at_length(config: RunConfig, tokens: int, offload: str, kind: str) -> RunConfig:
    """`config` for one row of so many tokens, by this offload on a device of this kind.

    Raises ValueError for a mesh of several ranks, and what a config of such values raises.
    """
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
    before, group, run = extrapolate.shape(config, depth)
    whole = depth <= run + group
    step = run_step(config, {}, 0, target, 0 if whole else run, short=True)
    found = None if whole else extrapolate.deeper(step.stays, stack, before, group, run, depth)
    if found is None:
        step = step if whole else run_step(config, {}, 0, target, short=True)
        trace = make_trace(step)
    else:
        segments = tuple(extrapolate.segment(step.stays, each, (depth - run) // group + 1) for each in found[1])
        trace = make_trace(step, found[0], tuple(sorted(segments, key=lambda s: (s.first, -s.last))), "passes alone")
    host = step.host_peak + (0 if found is None else extrapolate.inputs_on_host(step.job, config, depth - run))
    return Passes(config.data.seq_len, trace.peak.bytes, host, trace)


def line(a: Passes, b: Passes, capacity: int, host: int | None) -> tuple[int, float]:
    """(the length at which the line through two passes meets what the device or its host holds, bytes of a token)."""
    each = (b.peak_bytes - a.peak_bytes) / (b.tokens - a.tokens)
    there = (b.host_bytes - a.host_bytes) / (b.tokens - a.tokens)
    lengths = [b.tokens + (capacity - b.peak_bytes) / each] if each > 0 else []
    lengths += [b.tokens + (host - b.host_bytes) / there] if host and there > 0 else []
    return max(0, int(min(lengths, default=2 * b.tokens))), each


def find(
    measure: Callable[[int], Passes], capacity: int, host: int | None, seen: dict[int, Passes]
) -> tuple[Passes, float]:
    """(the passes of the longest T that fits, bytes of a token there), for functions that increase with T.

    seen: two lengths, or more, of which one fits; those that are measured are added. Where the functions do not
    increase everywhere it is a length that fits while the next one does not.
    """

    def left(one: Passes) -> float:
        """The part of the capacity that is left, of the device or of the host, whichever is less."""
        rooms = [1.0 - one.peak_bytes / capacity]
        return min([*rooms, 1.0 - one.host_bytes / host] if host else rooms)

    before = math.inf  # the gap between the longest that fits and the shortest that does not, a step ago
    while True:
        fits = [tokens for tokens, one in seen.items() if left(one) >= 0]
        low, high = max(fits), min((tokens for tokens in seen if tokens > max(fits)), default=0)
        # The two nearest lengths: where the function is convex, the line through them is that of what is at the peak.
        ends = sorted(seen, key=lambda tokens: abs(left(seen[tokens])))[:2]
        aim, each = line(seen[min(ends)], seen[max(ends)], capacity, host)
        if left(seen[low]) < ROOM or high == low + UNIT:
            return seen[low], each
        # A part of ROOM is left on purpose: a line is exact to rounding, and must not miss by a hair.
        aim = int(aim * (1 - ROOM / 4)) // UNIT * UNIT
        gap = high - low if high else math.inf
        if high and (gap > before / 2 or not low < aim < high):  # another kernel serves on the other side of a length
            aim = low + max(1, (high - low) // UNIT // 2) * UNIT
        before, aim = gap, aim if aim > low else 2 * low
        seen[aim] = measure(aim)


def on_a_line(
    offload: str, seen: dict[int, Passes], capacity: int, host: int | None, measure: Callable[[int], Passes]
) -> Choice:
    """The length where the line through two traced lengths meets what there is; 0 if not even UNIT tokens fit.

    What does not grow with T may be above the line of what does, so a length below the traced ones is that of the chord
    from UNIT tokens on, which is added to `seen`.
    """
    a, b = seen.values()
    tokens, each = line(a, b, capacity, host)
    if tokens < a.tokens:
        a, b = seen.setdefault(UNIT, measure(UNIT)), a
        if a.peak_bytes > capacity or (host and a.host_bytes > host):
            return Choice(offload, 0, a.peak_bytes, a.host_bytes, 0.0, True)
        tokens, each = line(a, b, capacity, host)
    tokens = tokens // UNIT * UNIT
    more, there = tokens - b.tokens, (b.host_bytes - a.host_bytes) / (b.tokens - a.tokens)
    return Choice(offload, tokens, b.peak_bytes + int(more * each), b.host_bytes + int(more * there), each, False)


def longest(config: RunConfig, device: Device, say: Callable[[str], None] = lambda stage: None) -> Longest:
    """The longest sequence that `config`'s model trains on one such device.

    Raises ValueError if none does, and for a config that a run would refuse.
    """
    device = with_host_memory(device, config)
    capacity, host = device.capacity_bytes, device.host_capacity_bytes(1)
    offloads = (config.offload,) if config.offload or device.kind == "cpu" else LADDER

    def measure(tokens: int, offload: str) -> Passes:
        say(f"tracing {tokens:,} tokens, offload {offload or 'none'}")
        return trace_passes(resolve_for(at_length(config, tokens, offload, device.kind), device), device.target)

    choices, seen, start = [], {}, START[device.kind]
    for offload in offloads:
        seen[offload] = {tokens: measure(tokens, offload) for tokens in (start, 2 * start)}
        choices.append(
            on_a_line(offload, seen[offload], capacity, host, lambda t, offload=offload: measure(t, offload))
        )
    most = max(choice.tokens for choice in choices)
    if not most:
        least = min(choices, key=lambda choice: choice.peak_bytes)
        raise ValueError(
            f"the longest sequence: not even {UNIT} tokens fit: with offload {least.offload or 'none'} they need "
            f"{size(least.peak_bytes)} of {size(capacity)}; offload more, or name a device with more memory"
        )
    at = next(i for i, choice in enumerate(choices) if choice.tokens >= most * (1 - NEAR))
    offload = choices[at].offload
    passes, each = find(lambda tokens: measure(tokens, offload), capacity, host, seen[offload])
    best = Choice(offload, passes.tokens, passes.peak_bytes, passes.host_bytes, each, True)
    choices[at] = best
    seconds = predict(passes.trace, device).step_s if has_rates(device) else None
    return Longest(passes.trace.config, device, capacity, host, tuple(choices), best, passes, seconds)
