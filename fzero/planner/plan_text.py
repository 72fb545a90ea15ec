"""The text that `print(report)` shows of a plan, and the number formats that plans, searches and answers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import text_table
from fzero.sharding.spec import HOST_MEMORY

PlanReport = Any  # fzero.planner.plan.PlanReport, whose module imports this one
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size(amount: float) -> str:
    """Format a number of bytes with three digits and a unit.

    >>> size(1_640_000_000), size(-312), size(0)
    ('1.64 GB', '-312 B', '0')
    """
    return quantity(amount, "B") if amount else "0"


def quantity(amount: float, unit: str = "") -> str:
    """Format a number with three digits and the prefix of its unit.

    >>> quantity(3.21e15, "FLOP"), quantity(1e12), quantity(12.0, "s")
    ('3.21 PFLOP', '1 T', '12 s')
    """
    for power, prefix in UNITS:
        if abs(amount) >= 0.9995 * power:
            return f"{digits(amount / power)} {prefix}{unit}"
    return f"{digits(amount)} {unit}".strip()


def digits(value: float) -> str:
    """Format a number with three digits, without an exponent.

    >>> digits(1234.5), digits(12.34), digits(0.01234), digits(2.0)
    ('1,234', '12.3', '0.0123', '2')
    """
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3 if abs(value) >= 0.1 else 4}f}"
    return text.rstrip("0").rstrip(".") or "0"


def duration(seconds: float) -> str:
    """Format seconds.

    >>> duration(0.0123), duration(4.56), duration(7200), duration(200_000)
    ('12.3 ms', '4.56 s', '2 h', '2.31 days')
    """
    for power, unit in ((86400.0, "days"), (3600.0, "h"), (100.0, "min")):
        if seconds >= 1.5 * power:
            return f"{digits(seconds / (60.0 if unit == 'min' else power))} {unit}"
    return (
        f"{digits(seconds)} s"
        if seconds >= 1
        else f"{digits(1e3 * seconds)} ms"
        if seconds >= 1e-3
        else f"{digits(1e6 * seconds)} us"
    )


def percent(fraction: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.4321), percent(0.05), percent(0.001)
    ('43%', '5%', '0.1%')
    """
    return f"{100 * fraction:.0f}%" if fraction >= 0.02 or not fraction else f"{100 * fraction:.1f}%"


def listing(values: Mapping[str, float], words: Any = size, limit: int = 8) -> str:
    """Format the nonzero sizes, largest first: "name 1.2 GB, other 3 MB"."""
    entries = sorted(((name, value) for name, value in values.items() if value), key=lambda entry: -entry[1])
    return ", ".join(f"{name or 'between'} {words(value)}" for name, value in entries[:limit]) or "nothing"


def format_moment(moment: Mapping[str, Any]) -> str:
    """Format a moment of a step: "backward, layer 3, at aten.mm"."""
    layer = "" if moment["layer"] is None else f", layer {moment['layer']}"
    op = ", at " + ".".join(moment["op"].split(".")[:2]) if moment["op"] else ""  # without the name of its overload
    return f"{moment['phase'] or 'between phases'}{layer}{op}"


def page(r: PlanReport) -> str:
    """Format the whole report, on one screen."""
    blocks = [heading(r), memory(r), communication(r), computation(r)]
    if r.step_s is not None:
        blocks.append(step_time(r))
    if r.pipeline:
        blocks.append(pipeline(r))
    if r.days is not None:
        blocks.append(budget(r))
    blocks += [["note: " + note for note in r.notes]] if r.notes else []
    return "\n\n".join("\n".join(lines) for lines in blocks)


def heading(r: PlanReport) -> list[str]:
    """The lines about the run and its device."""
    c, t = r.config, r.config.train
    name = c.preset or "the model"
    options = [
        c.precision.policy,
        c.optim.name + ("" if c.optim.states == "full" else f" ({c.optim.states} states)"),
        f"remat {t.remat}",
    ]
    options += [f"offload {c.offload}"] * bool(c.offload) + ["sequence parallel"] * c.sequence
    options += ["compiled blocks" if t.compiled else "blocks not compiled"]
    rate_source = "measured" if r.device.measured else "from data sheets" if r.device.flops else "no rates"
    return [
        f"{name}: {quantity(r.num_params)} parameters, ZeRO stage {c.zero} on {mesh_text(r.mesh)}; "
        f"{', '.join(options)}",
        f"a step: {t.batch:,} sequences of {c.data.seq_len:,} = {r.tokens_per_step:,} tokens, {r.micro_batches} "
        f"micro-batch{'es' * (r.micro_batches > 1)} of {t.micro_batch} on each data rank",
        f"a rank: {r.device.name} ({rate_source}), {r.ranks} rank{'s' * (r.ranks > 1)}, {r.ranks_on_node} to a node",
    ]


def memory(r: PlanReport) -> list[str]:
    """The lines about memory: whether the run fits, with what margin, and the allocations at the peak."""
    d, share = r.device, r.ranks_on_node if r.device.kind == "cpu" else 1
    verdict = f"fits, {size(r.margin_bytes)} to spare" if r.fits else f"DOES NOT FIT: {r.too_much()}"
    largest = [f"{name} ({component}) {size(n)}" for name, component, n in r.peak["largest"][:3]]
    lines = [
        f"memory of a rank: {size(r.peak_bytes_per_rank)} of {size(r.capacity_bytes)}: {verdict}; most of it: "
        f"{r.memory_binds}",
        (
            f"  capacity   {size(d.memory_bytes)} - {size(d.reserved_bytes)} reserved - "
            f"{size(r.allocator_bytes * share)} for the allocator"
        )
        + (f", shared by {share}" if share > 1 else ""),
        f"  at rest    {size(r.state_bytes_per_rank)}: {listing(r.state_bytes)}",
    ]
    if any(r.state_elsewhere.values()):
        host = (
            f"; in the host's memory at most {size(r.host_peak_bytes)} a rank, "
            f"{size(r.host_peak_bytes * r.ranks_on_node)} a node"
        )
        host += f" of {size(r.host_capacity_bytes * r.ranks_on_node)}" if r.host_capacity_bytes is not None else ""
        lines.append(f"  elsewhere  {listing(r.state_elsewhere)}{host if r.state_elsewhere[HOST_MEMORY] else ''}")
    lines += [
        f"  peak       in {format_moment(r.peak)}: {listing(r.peak['components'])}",
        f"  largest    {', '.join(largest)}",
        f"  phases     {', '.join(f'{name} {size(n)}' for name, n in r.phases.items() if name)}",
    ]
    return lines


def communication(r: PlanReport) -> list[str]:
    """The lines about the bytes that one rank sends, and moves to and from disks and the host."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in r.comm:
        totals = sums.setdefault((row["axis"], row["collective"]), [0, 0])
        totals[0] += row["bytes"]
        totals[1] += row["calls"]
    total = sum(r.comm_bytes_per_axis.values())
    lines = [f"communication: a rank sends {size(total)} a step" if total else "communication: none"]
    for axis, n in sorted(r.comm_bytes_per_axis.items(), key=lambda entry: -entry[1]):
        parts = sorted(
            (
                (b, f"{collective} {size(b)} in {calls:,} calls")
                for (a, collective), (b, calls) in sums.items()
                if a == axis
            ),
            reverse=True,
        )
        lines.append(f"  {axis:<10} {size(n)}: {', '.join(text for _, text in parts)}")
    for name, transfer in r.traffic.items():
        lines.append(f"  {name:<10} {size(transfer['read'])} read, {size(transfer['write'])} written, by a rank")
    return lines


def computation(r: PlanReport) -> list[str]:
    """The lines about the FLOPs of a step."""
    excess = r.flop_per_step / r.model_flop_per_step - 1 if r.model_flop_per_step else 0.0
    update = r.flop_per_step - r.pass_flop_per_step
    update_text = f"; {quantity(update, 'FLOP')} of a step are the optimizer's" if update else ""
    return [
        (
            f"computation: {quantity(r.flop_per_step, 'FLOP')} a step, {quantity(r.flop_per_step / r.ranks, 'FLOP')} "
            f"a rank{update_text}"
        ),
        f"  {100 * excess:+.0f}% on the model's {quantity(r.model_flop_per_step, 'FLOP')} (6N + 12LTD; "
        f"{quantity(r.model_flop_per_step_causal, 'FLOP')} with causal attention)",
    ]


def step_time(r: PlanReport) -> list[str]:
    """The lines about the predicted step time and its parts."""
    t, step = r.time, r.step_s

    def of_step(seconds: float) -> str:
        return f"{duration(seconds)} ({percent(seconds / step)})" if seconds else "0"

    use = (
        f"MFU {percent(r.mfu)} ({percent(r.mfu_causal)} causal), HFU {percent(r.hfu)}"
        if r.mfu is not None
        else "MFU unknown"
    )
    lines = [
        f"time: {duration(step)} a step, predicted ({format_range(r.step_s_range)}); {t['binds']} binds",
        f"  {quantity(r.tokens_per_s)} tokens/s, {quantity(r.tokens_per_s / r.ranks)} a device; {use}",
        f"  phases     {listing(t['phases'], of_step)}",
        f"  bound by   {listing(t['bound'], of_step)}; most in {listing(t['kinds'], of_step, 4)}",
    ]
    for axis in {**t["exposed"], **t["hidden"]}:
        lines.append(
            f"  {axis:<10} {of_step(t['exposed'].get(axis, 0.0))} exposed, {duration(t['hidden'].get(axis, 0.0))} "
            "hidden"
        )
    for name, waited in t["waiting"].items():
        lines.append(f"  {name:<10} {of_step(waited)} waited for, {duration(t['moving'].get(name, 0.0))} busy")
    return lines


def pipeline(r: PlanReport) -> list[str]:
    """The lines about the ranks of pp: their layers, memory and time."""
    facts, timed = r.pipeline, "row_s" in r.pipeline
    chunks = f", {facts['chunks']} chunks a rank" if facts["chunks"] > 1 else ""
    boundary = max(facts["boundary_bytes"], default=0)
    lines = [f"pipeline: {facts['schedule']} of {len(facts['ranks'])} ranks{chunks}, layers {facts['layout']}"]
    if timed:
        wire = max(facts["wire_s"], default=0.0)
        lines[0] += f"; idle at least {percent(facts['bubble_s'] / r.step_s)} of the step"
        lines.append(f"  messages   {size(boundary)} from stage to stage, {duration(wire)} on their way")
        if facts["layout_by_cost"] != facts["layout"]:
            lines.append(f"  layout     by the cost of layers, embedding and head: --layout {facts['layout_by_cost']}")
    else:
        lines.append(f"  messages   {size(boundary)} from stage to stage")
    header = ("rank", "layers", "in flight", "state", "peak", *(("computes", "idle") if timed else ()))
    rows = [
        (
            str(row["rank"]),
            "+".join(map(str, row["layers"])),
            str(row["in_flight"]),
            size(row["state_bytes"]),
            size(row["peak_bytes"]),
            *((duration(row["busy_s"]), percent(row["idle_s"] / facts["row_s"])) if timed else ()),
        )
        for row in facts["ranks"]
    ]
    visible = [i for i in range(len(rows)) if i == 0 or i == len(rows) - 1 or rows[i][1:] != rows[i - 1][1:]]
    return [*lines, *("  " + line for line in text_table(header, [rows[i] for i in visible], text=()))]


def format_range(seconds: tuple[float, float]) -> str:
    """Format a range of durations.

    >>> format_range((90.0, 150.0))
    '90 s to 2.5 min'
    """
    return " to ".join(duration(value) for value in seconds)


def budget(r: PlanReport) -> list[str]:
    """The lines about the time and cost of a number of tokens."""
    min_s, max_s = (r.days * 86400 * factor for factor in r.device.step_range)
    steps = r.tokens / r.tokens_per_step
    price = (
        f"{r.cost:,.0f} at {r.price_per_hour:g} an hour"
        if r.cost is not None
        else "give --price-per-gpu-hour for the cost"
    )
    return [
        (
            f"{quantity(r.tokens)} tokens: {steps:,.0f} steps, {duration(r.days * 86400)} "
            f"({format_range((min_s, max_s))}), {r.device_hours:,.0f} device hours; {price}"
        )
    ]
