"""The sections of a run on what a step costs: memory, time, communication, the pipeline, and its ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fzero.report import bars
from fzero.report.run_reader import steady
from fzero.report.values import (
    PAIR,
    Element,
    Number,
    Picture,
    Quantity,
    RunReport,
    digits,
    format_quantity,
    format_ratio,
    pair,
    ratio,
    table,
)
from fzero.sharding import pipeline as schedules
from fzero.sharding.pipeline import Played, Schedule, feeds, play

Times = Sequence[Sequence[float]]  # seconds of the acts of a pipeline, by rank


def pair_of(unit: str, predicted: Number | None, measured: Number | None) -> tuple[str, str, str]:
    """The cells of a predicted and a measured number, and their ratio."""
    return pair(Quantity("", "", unit, predicted, measured, "", ""))


# -- memory


def memory(run: RunReport) -> list[Element]:
    """The bytes of a rank over one step."""
    measured, plan = run.memory or {}, run.plan or {}
    planned_peak, measured_peak = (value.get("peak") or {} for value in (plan, measured))
    if not measured and not planned_peak:
        return []
    parts_of = [peak.get("parts") or peak.get("components") or {} for peak in (planned_peak, measured_peak)]
    names = dict.fromkeys([*(measured.get("components") or ()), *parts_of[0], *parts_of[1]])
    rows = [
        (name, *pair_of("bytes", *(parts.get(name, 0) if parts else None for parts in parts_of)))
        for name in names
        if any(parts.get(name) for parts in parts_of)
    ]
    peak_titles = {
        "peak_bytes": "**all, at the peak**",
        "gpu_peak_bytes": "**all, by the GPU's allocator**",
        "host_peak_bytes": "in the host's memory",
    }
    rows += [(peak_titles[q.name], *pair(q)) for q in run.quantities if q.name in peak_titles]
    state_rows = [(q.title.removeprefix("at rest: "), *pair(q)) for q in run.quantities if q.name.startswith("state/")]
    elements: list[Element] = []
    if measured.get("timeline") or plan.get("timeline"):
        overlay = " and the predicted sum as a line" if measured and plan.get("timeline") else ""
        title, alt = f"Memory over a step, by component{overlay}", memory_alt(run, measured_peak)
        elements.append(Picture("memory", title, alt, partial(bars.memory, run)))
    elements.append(table("memory", "Live tensors of a rank at the peak of a step", ("component", *PAIR), rows))
    peaks = {"predicted": planned_peak, "measured": measured_peak}
    places = [f"{kind} in {moment_text(peak)}" for kind, peak in peaks.items() if peak.get("phase")]
    if places:
        elements.append(f"The peak: {'; '.join(places)}.")
    if state_rows:
        elements.append(table("state", "State at rest, a rank", ("group", *PAIR), state_rows))
    counters = {"torch's allocator": "allocator_peak_bytes", "the whole process": "rss_peak_bytes"}
    totals = [f"{n} {format_quantity(measured[key], 'bytes')}" for n, key in counters.items() if measured.get(key)]
    if totals:
        unseen = f" Not seen in the stack: {measured['not_seen']}." if measured.get("not_seen") else ""
        elements.append(f"At most in use in the same step: {', '.join(totals)}.{unseen}")
    return [*elements, *by_allocator(run)]


def memory_alt(run: RunReport, peak: Mapping[str, Any]) -> str:
    """The alternative text of the picture of memory; peak: the measured one, {} without."""
    alt = "Predicted bytes of live tensors over one step"
    if run.memory:
        alt = "Bytes of live tensors of a rank over one step, stacked by component"
    if peak.get("bytes"):
        alt += f"; the measured peak is {format_quantity(peak['bytes'], 'bytes')} in {moment_text(peak)}"
    if planned := (run.plan or {}).get("peak_bytes_per_rank"):
        alt += f"; predicted is {format_quantity(planned, 'bytes')}"
    return f"{alt}."


def by_allocator(run: RunReport) -> list[Element]:
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


def moment_text(moment: Mapping[str, Any]) -> str:
    """Format a moment of a step."""
    layer, op = moment.get("layer"), moment.get("op")
    return f"{moment.get('phase') or 'the step'}{'' if layer is None else f', layer {layer}'}{f' ({op})' if op else ''}"


# -- time


def time(run: RunReport) -> list[Element]:
    """The seconds of a step by phase."""
    quantities = {q.name.removeprefix("time/"): q for q in run.quantities if q.name.startswith("time/")}
    if not quantities:
        return []
    measured = {name: q.measured for name, q in quantities.items() if q.measured is not None}
    total = sum(measured.values())
    shares = {name: f"{100 * seconds / total:.1f}%" for name, seconds in measured.items() if total}
    rows = [(name, *pair(q), shares.get(name, "-")) for name, q in quantities.items()]
    alt = "Time of a step by phase, stacked, predicted and measured"
    if measured:
        longest = max(measured, key=lambda name: measured[name])
        part, whole = (format_quantity(seconds, "s") for seconds in (measured[longest], total))
        alt += f"; the longest measured phase is {longest} with {part} of {whole}"
    elements: list[Element] = [Picture("time", "Time of a step by phase", f"{alt}.", partial(bars.time_bars, run))]
    if "phases.forward" in run.series:
        alt = (
            "Measured time of every step by phase, stacked, with evaluation and checkpoints; steps far above the "
            "others are cut off."
        )
        recorded = [f"{n:,}" for n, name in zip(run.series["step"], run.column("recorded")) if name is not None]
        slowed = f"; a recorder slowed step {', '.join(recorded)}" if recorded else ""
        title = f"Time of every step by phase (measured{slowed})"
        elements.append(Picture("time_steps", title, alt, partial(bars.time_steps, run)))
    title = "Time of a step by phase; phases exclude each other"
    elements.append(table("time", title, ("phase", *PAIR, "of the measured"), rows))
    if hidden := hidden_rows(run):
        title = (
            "Communication that was waited for (exposed), and from starts to waits (hidden; several at a time add up)"
        )
        elements.append(table("overlap", title, ("", *PAIR), hidden))
    return elements


def hidden_rows(run: RunReport) -> list[tuple[str, ...]]:
    """Rows of exposed and hidden seconds of communication by axis, predicted and measured."""
    rows, planned, indices = [], (run.plan or {}).get("time") or {}, steady(run.series, run.attempts)
    for axis in sorted({name.split(".")[1] for name in run.series if name.startswith("comm.")}):
        for kind in ("exposed", "hidden"):
            column = run.column(f"comm.{axis}.{kind}")
            values = [column[i] for i in indices if column[i] is not None]
            mean = sum(values) / len(values) if values else None
            rows.append((f"{axis}, {kind}", *pair_of("s", (planned.get(kind) or {}).get(axis), mean)))
    return rows


# -- communication

SMALL = 0.005  # fraction of the largest row; smaller ones are only in the table
Counts = tuple[int | None, ...]  # bytes predicted, measured, calls predicted, measured


def sent_bytes(run: RunReport) -> dict[tuple[str, str, str], Counts]:
    """{(axis, collective, phase): counts}; None if a record is missing."""
    records = ((run.plan or {}).get("comm"), run.ledger)
    keys = {row_key(row) for record in records if isinstance(record, list) for row in record}

    def sum_of(record: Any, key: tuple[str, str, str], column: str) -> int | None:
        return sum(row[column] for row in record if row_key(row) == key) if isinstance(record, list) else None

    columns = [(record, column) for column in ("bytes", "calls") for record in records]
    return {key: tuple(sum_of(record, key, column) for record, column in columns) for key in sorted(keys)}


def row_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the rows of a ledger are added up by."""
    return row["axis"], row["collective"], row["phase"]


def communication(run: RunReport) -> list[Element]:
    """The bytes that a rank sends in a step."""
    rows = sent_bytes(run)
    if not rows:
        return (
            ["Nothing is communicated: one process, and its ledger of a step is empty."]
            if run.ledger is not None
            else []
        )
    columns = [[n for n in column if n is not None] for column in zip(*rows.values())]
    total = [sum(column) if column else None for column in columns]
    cells = [
        (name, phase, *("-" if n is None else f"{n:,}" for n in (p_calls, m_calls, p, m)), format_ratio(ratio(p, m)))
        for (name, phase), (p, m, p_calls, m_calls) in [
            *(((f"{collective} over {axis}", phase), counts) for (axis, collective, phase), counts in rows.items()),
            (("**all**", ""), total),
        ]
    ]
    head = (
        "collective",
        "phase",
        "calls, predicted",
        "calls, measured",
        "bytes, predicted",
        "bytes, measured",
        PAIR[2],
    )
    alt = (
        "Bytes that one rank sends in a step by collective, axis and phase, predicted beside measured; "
        f"{format_quantity(total[1] if total[1] is not None else total[0], 'bytes')} in all."
    )
    largest = {key: max(p or 0, m or 0) for key, (p, m, *_) in rows.items()}
    drawn = [
        (f"{collective} over {axis}, {phase or 'outside phases'}", *rows[axis, collective, phase][:2])
        for axis, collective, phase in sorted(rows, key=lambda key: -largest[key])
        if largest[axis, collective, phase] >= SMALL * max(largest.values())
    ]
    title = "Communication of a step, by axis and collective; what is under 0.5% of the largest is in the table alone"
    return [
        Picture("communication", title, alt, partial(bars.communication, drawn)),
        table("communication", "Sent by one rank in a step (the ledger)", head, cells, text_columns=2),
    ]


# -- a pipeline


def pipeline(run: RunReport) -> list[Element]:
    """The schedule of a pipeline, the acts of one step as they were and as `play` has them; [] if unrecorded."""
    if run.pipeline is None:
        return []
    s, start, end = schedules.read_schedule(run.pipeline["schedule"]), run.pipeline["start"], run.pipeline["end"]
    played, step = replay_schedule(s, start, end), max(t for row in end for t in row)
    measured_idle = [1.0 - sum(b - a for a, b in zip(*row)) / step for row in zip(start, end)]
    layers = [sum(len(s.stages.layers[stage]) for stage in s.stages.chunks(rank)) for rank in range(len(s.rows))]
    columns, planned = (
        {"played": [idle / played.step for idle in played.idle], "measured": measured_idle},
        planned_row(run, s),
    )
    if planned is not None:
        columns = {"predicted": [entry["idle_s"] / planned["row_s"] for entry in planned["ranks"]], **columns}
    rows = [
        (str(rank), str(n), *(percent(fractions[rank]) for fractions in columns.values()))
        for rank, n in enumerate(layers)
    ]
    means = [percent(statistics.fmean(fractions)) for fractions in columns.values()]
    rows.append(("**all**", str(sum(layers)), *means))
    name = f"{s.name}, {s.parts} micro-batches"
    alt = "Acts of each rank of pp over one step: forwards and backwards with their micro-batch"
    worst = max(range(len(measured_idle)), key=lambda rank: measured_idle[rank])
    took, replayed = format_quantity(step, "s"), format_quantity(played.step, "s")
    note = (
        "Played: every act takes the median of its kind and stage, and a message the shortest time that one has "
        f"taken across that border in the step; the step then takes {replayed}, and took {took}. "
        "What a rank waits for inside an act, such as a gather, is part of the act."
    )
    if planned is not None:
        note += f" Predicted: by `play` with the plan's acts, {format_quantity(planned['row_s'], 's')}."
    return [
        Picture(
            "pipeline_measured",
            f"{name}: the passes of step {run.pipeline.get('step', 0):,}, measured",
            f"{alt}, measured; they take {took}, and rank {worst} is idle for {percent(measured_idle[worst])}.",
            partial(bars.schedule_bars, s, start, end),
        ),
        Picture(
            "pipeline_played",
            f"{name}: the same by `play`",
            f"{alt}, played; they take {replayed}.",
            partial(bars.schedule_bars, s, played.start, played.end),
        ),
        table(
            "pipeline",
            "Bubble: the part of its passes' time in which a rank of pp is idle",
            ("rank of pp", "layers", *columns),
            rows,
        ),
        note,
    ]


def planned_row(run: RunReport, s: Schedule) -> dict[str, Any] | None:
    """What the plan of a run says of its pipeline, with times; or None."""
    facts = (run.plan or {}).get("pipeline") or {}
    matches = (facts.get("schedule"), facts.get("micro_batches")) == (s.name, s.parts)
    return facts if matches and "row_s" in facts and len(facts["ranks"]) == len(s.rows) else None


def replay_schedule(s: Schedule, start: Times, end: Times) -> Played:
    """The schedule played with the times of its measured acts."""
    spans: dict[str, list[list[float]]] = {}
    act_times: dict[Any, tuple[float, float]] = {}
    for row, starts, ends in zip(s.rows, start, end):
        for act, a, b in zip(row, starts, ends):
            spans.setdefault(act.kind, [[] for _ in s.stages.ranks])[act.stage].append(b - a)
            act_times[act] = (a, b)
    # A stage whose backwards are of another kind than those of others has none of this one.
    cost = {
        kind: [statistics.median(times) if times else 0.0 for times in stage_times]
        for kind, stage_times in spans.items()
    }
    wire: list[list[float]] = [[] for _ in s.stages.ranks[1:]]
    for source, target in feeds(s).items():
        if s.stages.ranks[source.stage] != s.stages.ranks[target.stage]:
            wire[min(source.stage, target.stage)].append(max(0.0, act_times[target][0] - act_times[source][1]))
    return play(s, cost, [min(times, default=0.0) for times in wire])


def percent(fraction: float) -> str:
    """A part as a percentage."""
    return f"{digits(100 * fraction, 3)}%"


# -- the ranks

RANK_TIMES = ("busy_s", "comm_s", "data_s", "io_s")


def times_of_ranks(run: RunReport) -> list[tuple[tuple[float, ...], tuple[float, float]]] | None:
    """For each rank (mean seconds of RANK_TIMES in a step, range of its busy seconds); None if unrecorded."""
    s = run.series
    counts = s.get("ranks.steps", [])
    indices = [i for i, n in enumerate(counts) if n]
    begins = {a.get("first_step", 0) for a in run.attempts} | {s["step"][0] - 1}
    later = [i for i in indices if s["step"][i] - counts[i] not in begins]
    indices = later or indices
    if not indices:
        return None
    times = []
    for rank in range(len(s["ranks.busy_s"][indices[0]])):
        usable = [i for i in indices if len(s["ranks.busy_s"][i]) > rank]
        steps = sum(counts[i] for i in usable)
        means = tuple(sum(s[f"ranks.{kind}"][i][rank] for i in usable) / steps for kind in RANK_TIMES)
        busy = sorted(s["ranks.busy_s"][i][rank] / counts[i] for i in usable)
        times.append((means, (busy[0], busy[-1])))
    return times


def stragglers(run: RunReport) -> list[Element]:
    """The times of the ranks."""
    times = times_of_ranks(run)
    if times is None or len(times) < 2:
        return []
    head = ("rank", "busy", "waiting for others", "data", "disk")
    rows = [(str(rank), *(format_quantity(seconds, "s") for seconds in parts)) for rank, (parts, _) in enumerate(times)]
    slow = max(range(len(times)), key=lambda r: times[r][0][0])
    alt = (
        f"Seconds that each of {len(times)} ranks is busy in a step, with the range over the record; rank {slow} is "
        f"busy longest, {rows[slow][1]}."
    )
    named = [rank for rank in run.column("ranks.straggler") if rank is not None]
    verdict = "No rank was more than 5% behind the median of the others in any recorded stretch of steps."
    if named:
        summary = ", ".join(f"rank {rank} in {named.count(rank)}" for rank in sorted(set(named)))
        verdict = f"More than 5% behind the median of the others: {summary} recorded stretches of steps."
    title = "Time that each rank is busy in a step (measured)"
    return [
        Picture("stragglers", title, alt, partial(bars.stragglers, times)),
        table("stragglers", "Time of a step on each rank (measured, mean)", head, rows),
        verdict,
    ]
