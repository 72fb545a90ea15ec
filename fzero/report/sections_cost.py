"""The sections of a run on what a step costs: memory, time, communication, and the ranks beside each other."""

from __future__ import annotations

from typing import Any

from fzero.report import run_pictures
from fzero.report.elements import PAIR, Picture, Section, pair, table
from fzero.report.run_reader import steady
from fzero.report.values import Quantity, RunReport, digits, format_quantity, format_ratio, ratio


def memory(run: RunReport) -> Section:
    """The section on the bytes of a rank over one step."""
    measured, plan = run.memory or {}, run.plan or {}
    if not measured and not plan.get("peak"):
        return Section("memory", "Memory", [])
    measured_peak, planned_peak = (value.get("peak") or {} for value in (measured, plan))
    parts_of = [peak.get("parts") or peak.get("components") or {} for peak in (planned_peak, measured_peak)]
    names = [
        n
        for n in [*(measured.get("components") or ()), *parts_of[0], *parts_of[1]]
        if parts_of[0].get(n) or parts_of[1].get(n)
    ]
    present = [bool(parts) for parts in parts_of]
    rows = []
    for name in dict.fromkeys(names):
        predicted, actual = (
            parts.get(name, 0) if is_recorded else None for parts, is_recorded in zip(parts_of, present)
        )
        rows.append((name, *pair(Quantity(name, name, "bytes", predicted, actual, "", ""))))
    peak_titles = {
        "peak_bytes": "**all, at the peak**",
        "gpu_peak_bytes": "**all, by the GPU's allocator**",
        "host_peak_bytes": "in the host's memory",
    }
    rows += [(peak_titles[q.name], *pair(q)) for q in run.quantities if q.name in peak_titles]
    state_rows = [(q.title.removeprefix("at rest: "), *pair(q)) for q in run.quantities if q.name.startswith("state/")]
    parts: list[Any] = []
    if measured.get("timeline") or plan.get("timeline"):
        alt = (
            "Bytes of live tensors of a rank over one step, stacked by component"
            if measured
            else "Predicted bytes of live tensors over one step"
        )
        peak = (
            f"; the measured peak is {format_quantity(measured_peak['bytes'], 'bytes')} in {moment_text(measured_peak)}"
            if measured_peak.get("bytes")
            else ""
        )
        line = (
            f"; predicted is {format_quantity(plan['peak_bytes_per_rank'], 'bytes')}"
            if plan.get("peak_bytes_per_rank")
            else ""
        )
        overlay = " and the predicted sum as a line" if measured and plan.get("timeline") else ""
        parts.append(
            Picture(
                "memory", f"Memory over a step, by component{overlay}", f"{alt}{peak}{line}.", run_pictures.memory(run)
            )
        )
    parts.append(table("memory", "Live tensors of a rank at the peak of a step", ("component", *PAIR), rows))
    places = [
        f"{kind} in {moment_text(peak)}"
        for kind, peak in (("predicted", planned_peak), ("measured", measured_peak))
        if peak.get("phase")
    ]
    if places:
        parts.append(f"The peak: {'; '.join(places)}.")
    if state_rows:
        parts.append(table("state", "State at rest, a rank", ("group", *PAIR), state_rows))
    allocator = measured.get("allocator_peak_bytes")
    totals = []
    if allocator:
        totals.append(f"torch's allocator {format_quantity(allocator, 'bytes')}")
    if measured.get("rss_peak_bytes"):
        totals.append(f"the whole process {format_quantity(measured['rss_peak_bytes'], 'bytes')}")
    if totals:
        parts.append(
            f"At most in use in the same step: {', '.join(totals)}."
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
        f"After step {step:,} the GPU's allocator keeps {format_quantity(reserved, 'bytes')}, {digits(times)} times "
        f"the {format_quantity(peak, 'bytes')} that tensors have held at most since the row before; more than 1.1 "
        f"times is lost between blocks. The process has held at most {format_quantity(host, 'bytes')} of the host's "
        "memory."
    ]


def moment_text(moment: dict[str, Any]) -> str:
    """Format a moment of a step."""
    layer = moment.get("layer")
    op = moment.get("op")
    return f"{moment.get('phase') or 'the step'}{'' if layer is None else f', layer {layer}'}{f' ({op})' if op else ''}"


def time(run: RunReport) -> Section:
    """The section on the seconds of a step by phase."""
    quantities = [q for q in run.quantities if q.name.startswith("time/")]
    if not quantities:
        return Section("time", "Time by phase", [])
    measured = {q.name.removeprefix("time/"): q.measured for q in quantities if q.measured is not None}
    total = sum(measured.values())
    rows = [
        (
            name := q.name.removeprefix("time/"),
            *pair(q),
            f"{100 * measured[name] / total:.1f}%" if name in measured and total else "-",
        )
        for q in quantities
    ]
    longest = max(measured, key=lambda name: measured[name]) if measured else ""
    alt = "Time of a step by phase, stacked, predicted and measured"
    if longest:
        part, whole = (format_quantity(seconds, "s") for seconds in (measured[longest], total))
        alt += f"; the longest measured phase is {longest} with {part} of {whole}"
    parts: list[Any] = [Picture("time", "Time of a step by phase", f"{alt}.", run_pictures.time_bars(run))]
    if "phases.forward" in run.series:
        steps_alt = (
            "Measured time of every step by phase, stacked, with evaluation and checkpoints; steps far above the "
            "others are cut off."
        )
        recorded = [
            f"{n:,}" for n, recorder in zip(run.series["step"], run.series.get("recorded", ())) if recorder is not None
        ]
        slowed = f"; a recorder slowed step {', '.join(recorded)}" if recorded else ""
        parts.append(
            Picture(
                "time_steps", f"Time of every step by phase (measured{slowed})", steps_alt, run_pictures.time_steps(run)
            )
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
    rows, planned, indices = [], (run.plan or {}).get("time") or {}, steady(run.series, run.attempts)
    for axis in sorted({name.split(".")[1] for name in run.series if name.startswith("comm.")}):
        for kind in ("exposed", "hidden"):
            column = run.series.get(f"comm.{axis}.{kind}", [])
            values = [column[i] for i in indices if column and column[i] is not None]
            mean = sum(values) / len(values) if values else None
            rows.append(
                (f"{axis}, {kind}", *pair(Quantity("", "", "s", (planned.get(kind) or {}).get(axis), mean, "", "")))
            )
    return rows


def communication(run: RunReport) -> Section:
    """The section on the bytes that a rank sends in a step."""
    rows = run_pictures.sent_bytes(run)
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
            format_ratio(ratio(p, m)),
        )
        for (axis, collective, phase), (p, m, p_calls, m_calls) in rows.items()
    ]
    total = [
        sum(counts) if (counts := [n for v in rows.values() if (n := v[i]) is not None]) else None for i in range(4)
    ]
    cells.append(
        (
            "**all**",
            "",
            *(f"{total[i]:,}" if total[i] is not None else "-" for i in (2, 3, 0, 1)),
            format_ratio(ratio(total[0], total[1])),
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
    sent = total[1] if total[1] is not None else total[0]
    alt = (
        "Bytes that one rank sends in a step by collective, axis and phase, predicted beside measured; "
        f"{format_quantity(sent, 'bytes')} in all."
    )
    picture = Picture(
        "communication",
        "Communication of a step, by axis and collective; what is under 0.5% of the largest is in the table alone",
        alt,
        run_pictures.communication(run),
    )
    return Section(
        "communication",
        "Communication",
        [picture, table("communication", "Sent by one rank in a step (the ledger)", head, cells, text_columns=2)],
    )


def stragglers(run: RunReport) -> Section:
    """The section on the times of the ranks."""
    times = run_pictures.times_of_ranks(run)
    if times is None or len(times) < 2:
        return Section("stragglers", "Ranks", [])
    named = [
        (step, rank)
        for step, rank in zip(run.series["step"], run.series.get("ranks.straggler", ()))
        if rank is not None
    ]
    head = ("rank", "busy", "waiting for others", "data", "disk")
    rows = [(str(rank), *(format_quantity(seconds, "s") for seconds in parts)) for rank, (parts, _) in enumerate(times)]
    slow = max(range(len(times)), key=lambda r: times[r][0][0])
    longest = f"rank {slow} is busy longest, {format_quantity(times[slow][0][0], 's')}"
    alt = f"Seconds that each of {len(times)} ranks is busy in a step, with the range over the record; {longest}."
    counts = {rank: sum(r == rank for _, r in named) for rank in sorted({r for _, r in named})}
    verdict = "No rank was more than 5% behind the median of the others in any recorded stretch of steps."
    if counts:
        summary = ", ".join(f"rank {rank} in {n}" for rank, n in counts.items())
        verdict = f"More than 5% behind the median of the others: {summary} recorded stretches of steps."
    picture = Picture(
        "stragglers", "Time that each rank is busy in a step (measured)", alt, run_pictures.stragglers(run)
    )
    return Section(
        "stragglers",
        "Ranks",
        [picture, table("stragglers", "Time of a step on each rank (measured, mean)", head, rows), verdict],
    )
