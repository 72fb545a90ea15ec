"""The sections of a run on what a step costs: memory, time, communication, and the ranks beside each other."""

from __future__ import annotations

from typing import Any

from fzero.report import bind
from fzero.report.parts import PAIR, Picture, Section, pair, table
from fzero.report.read import steady
from fzero.report.values import Quantity, RunReport, digits, ratio, shown, shown_ratio


def memory(run: RunReport) -> Section:
    """The section on the bytes of a rank over one step."""
    measured, plan = run.memory or {}, run.plan or {}
    if not measured and not plan.get("peak"):
        return Section("memory", "Memory", [])
    here, there = (value.get("peak") or {} for value in (measured, plan))
    parts_of = [peak.get("parts") or peak.get("components") or {} for peak in (there, here)]
    names = [
        n
        for n in [*(measured.get("components") or ()), *parts_of[0], *parts_of[1]]
        if parts_of[0].get(n) or parts_of[1].get(n)
    ]
    known = [bool(parts) for parts in parts_of]
    rows = []
    for name in dict.fromkeys(names):
        predicted, seen = (parts.get(name, 0) if there_is else None for parts, there_is in zip(parts_of, known))
        rows.append((name, *pair(Quantity(name, name, "bytes", predicted, seen, "", ""))))
    whole = {
        "peak_bytes": "**all, at the peak**",
        "gpu_peak_bytes": "**all, by the GPU's allocator**",
        "host_peak_bytes": "in the host's memory",
    }
    rows += [(whole[q.name], *pair(q)) for q in run.quantities if q.name in whole]
    rest = [(q.title.removeprefix("at rest: "), *pair(q)) for q in run.quantities if q.name.startswith("state/")]
    parts: list[Any] = []
    if measured.get("timeline") or plan.get("timeline"):
        alt = (
            "Bytes of live tensors of a rank over one step, stacked by component"
            if measured
            else "Predicted bytes of live tensors over one step"
        )
        peak = (
            f"; the measured peak is {shown(here['bytes'], 'bytes')} in {place_of(here)}" if here.get("bytes") else ""
        )
        line = (
            f"; predicted is {shown(plan['peak_bytes_per_rank'], 'bytes')}" if plan.get("peak_bytes_per_rank") else ""
        )
        overlay = " and the predicted sum as a line" if measured and plan.get("timeline") else ""
        parts.append(
            Picture("memory", f"Memory over a step, by component{overlay}", f"{alt}{peak}{line}.", bind.memory(run))
        )
    parts.append(table("memory", "Live tensors of a rank at the peak of a step", ("component", *PAIR), rows))
    places = [
        f"{kind} in {place_of(peak)}" for kind, peak in (("predicted", there), ("measured", here)) if peak.get("phase")
    ]
    if places:
        parts.append(f"The peak: {'; '.join(places)}.")
    if rest:
        parts.append(table("state", "State at rest, a rank", ("group", *PAIR), rest))
    allocator = measured.get("allocator_peak_bytes")
    beside = []
    if allocator:
        beside.append(f"torch's allocator {shown(allocator, 'bytes')}")
    if measured.get("rss_peak_bytes"):
        beside.append(f"the whole process {shown(measured['rss_peak_bytes'], 'bytes')}")
    if beside:
        parts.append(
            f"At most in use in the same step: {', '.join(beside)}."
            + (f" Not seen in the stack: {measured['not_seen']}." if measured.get("not_seen") else "")
        )
    return Section("memory", "Memory", [*parts, *by_allocator(run)])


def by_allocator(run: RunReport) -> list[str]:
    """A sentence on what a GPU's allocator keeps beyond its tensors, after the last step that measured it."""
    columns = ("step", "gpu_reserved_bytes", "gpu_peak_bytes", "gpu_reserved_ratio", "rss_peak_bytes")
    rows = [row for row in zip(*(run.series.get(name, ()) for name in columns)) if None not in row]
    if not rows:
        return []
    step, reserved, peak, times, host = rows[-1]
    return [
        f"After step {step:,} the GPU's allocator keeps {shown(reserved, 'bytes')}, {digits(times)} times the "
        f"{shown(peak, 'bytes')} that tensors have held at most since the row before; more than 1.1 times is lost "
        f"between blocks. The process has held at most {shown(host, 'bytes')} of the host's memory."
    ]


def place_of(moment: dict[str, Any]) -> str:
    """Format a moment of a step."""
    layer = moment.get("layer")
    op = moment.get("op")
    return f"{moment.get('phase') or 'the step'}{'' if layer is None else f', layer {layer}'}{f' ({op})' if op else ''}"


def time(run: RunReport) -> Section:
    """The section on the seconds of a step by phase."""
    found = [q for q in run.quantities if q.name.startswith("time/")]
    if not found:
        return Section("time", "Time by phase", [])
    measured = {q.name.removeprefix("time/"): q.measured for q in found if q.measured is not None}
    total = sum(measured.values())
    rows = [
        (
            name := q.name.removeprefix("time/"),
            *pair(q),
            f"{100 * measured[name] / total:.1f}%" if name in measured and total else "-",
        )
        for q in found
    ]
    longest = max(measured, key=lambda name: measured[name]) if measured else ""
    alt = "Time of a step by phase, stacked, predicted and measured"
    if longest:
        alt += f"; the longest measured phase is {longest} with {shown(measured[longest], 's')} of {shown(total, 's')}"
    parts: list[Any] = [Picture("time", "Time of a step by phase", f"{alt}.", bind.time_bars(run))]
    if "phases.forward" in run.series:
        steps_alt = (
            "Measured time of every step by phase, stacked, with evaluation and checkpoints; steps far above the "
            "others are cut off."
        )
        recorded = [f"{n:,}" for n, how in zip(run.series["step"], run.series.get("recorded", ())) if how is not None]
        slowed = f"; a recorder slowed step {', '.join(recorded)}" if recorded else ""
        parts.append(
            Picture("time_steps", f"Time of every step by phase (measured{slowed})", steps_alt, bind.time_steps(run))
        )
    parts.append(
        table("time", "Time of a step by phase; phases exclude each other", ("phase", *PAIR, "of the measured"), rows)
    )
    hidden = hidden_rows(run)
    if hidden:
        parts.append(
            table(
                "overlap",
                "Communication that was waited for (exposed), and from starts to waits (hidden; several at a "
                "time add up)",
                ("", *PAIR),
                hidden,
            )
        )
    return Section("time", "Time by phase", parts)


def hidden_rows(run: RunReport) -> list[tuple[str, ...]]:
    """Rows of exposed and hidden seconds of communication by axis, predicted and measured."""
    rows, planned, kept = [], (run.plan or {}).get("time") or {}, steady(run.series, run.attempts)
    for axis in sorted({name.split(".")[1] for name in run.series if name.startswith("comm.")}):
        for kind in ("exposed", "hidden"):
            column = run.series.get(f"comm.{axis}.{kind}", [])
            known = [column[i] for i in kept if column and column[i] is not None]
            mean = sum(known) / len(known) if known else None
            rows.append(
                (f"{axis}, {kind}", *pair(Quantity("", "", "s", (planned.get(kind) or {}).get(axis), mean, "", "")))
            )
    return rows


def communication(run: RunReport) -> Section:
    """The section on the bytes that a rank sends in a step."""
    rows = bind.sent_bytes(run)
    if not rows:
        if run.ledger is None:
            return Section("communication", "Communication", [])
        return Section(
            "communication",
            "Communication",
            ["Nothing is communicated: one process, and its ledger of a step is empty."],
        )
    cells = [
        (
            f"{collective} over {axis}",
            phase,
            *(f"{n:,}" if n is not None else "-" for n in (p_calls, m_calls, p, m)),
            shown_ratio(ratio(p, m)),
        )
        for (axis, collective, phase), (p, m, p_calls, m_calls) in rows.items()
    ]
    total = [sum(known) if (known := [n for v in rows.values() if (n := v[i]) is not None]) else None for i in range(4)]
    cells.append(
        (
            "**all**",
            "",
            *(f"{total[i]:,}" if total[i] is not None else "-" for i in (2, 3, 0, 1)),
            shown_ratio(ratio(total[0], total[1])),
        )
    )
    head = (
        "collective",
        "phase",
        "calls, predicted",
        "calls, measured",
        "bytes, predicted",
        "bytes, measured",
        PAIR[2],
    )
    seen = total[1] if total[1] is not None else total[0]
    alt = (
        "Bytes that one rank sends in a step by collective, axis and phase, predicted beside measured; "
        f"{shown(seen, 'bytes')} in all."
    )
    picture = Picture(
        "communication",
        "Communication of a step, by axis and collective; what is under 0.5% of the largest is in the table alone",
        alt,
        bind.communication(run),
    )
    return Section(
        "communication",
        "Communication",
        [picture, table("communication", "Sent by one rank in a step (the ledger)", head, cells, left=2)],
    )


def stragglers(run: RunReport) -> Section:
    """The section on the times of the ranks."""
    found = bind.times_of_ranks(run)
    if found is None or len(found) < 2:
        return Section("stragglers", "Ranks", [])
    named = [
        (step, rank)
        for step, rank in zip(run.series["step"], run.series.get("ranks.straggler", ()))
        if rank is not None
    ]
    head = ("rank", "busy", "waiting for others", "data", "disk")
    rows = [(str(rank), *(shown(part, "s") for part in parts)) for rank, (parts, _) in enumerate(found)]
    slow = max(range(len(found)), key=lambda r: found[r][0][0])
    longest = f"rank {slow} is busy longest, {shown(found[slow][0][0], 's')}"
    alt = f"Seconds that each of {len(found)} ranks is busy in a step, with the range over the record; {longest}."
    counts = {rank: sum(r == rank for _, r in named) for rank in sorted({r for _, r in named})}
    verdict = "No rank was more than 5% behind the median of the others in any recorded stretch of steps."
    if counts:
        each = ", ".join(f"rank {rank} in {n}" for rank, n in counts.items())
        verdict = f"More than 5% behind the median of the others: {each} recorded stretches of steps."
    picture = Picture("stragglers", "Time that each rank is busy in a step (measured)", alt, bind.stragglers(run))
    return Section(
        "stragglers",
        "Ranks",
        [picture, table("stragglers", "Time of a step on each rank (measured, mean)", head, rows), verdict],
    )
