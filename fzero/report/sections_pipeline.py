"""The section on the schedule of a pipeline: the acts of one step as they were, and as `play` has them.

The picture of a pipeline's schedule over time: a row of bars for each rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fzero.report.elements import Picture, Section, table
from fzero.report.figures import BLUE, GREEN, ORANGE, SKY, WHITE, blank, look_of
from fzero.report.values import RunReport, digits, format_quantity, scale_of
from fzero.sharding.pipeline import Played, Schedule, feeds, play, read_schedule
from fzero.sharding.pipeline.table import KINDS

ACTS = {"F": (BLUE, ""), "B": (SKY, "//"), "I": (ORANGE, "\\\\"), "W": (GREEN, "---")}  # (colour, hatch)
PALEST = 0.45  # opacity of a rank's last chunk
LABELLED = 0.014  # least part of the step that an act with its label takes
LABEL = {
    "ha": "center",
    "va": "center",
    "fontsize": 7,
    "bbox": {"boxstyle": "round,pad=0.12", "facecolor": WHITE, "edgecolor": "none"},
}


def schedule_bars(s: Schedule, start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> Any:
    """Draw the acts of each rank from start to end, rank 0 at the top: those of `pipeline.play`, or measured ones.

    start, end: by rank, the seconds of the acts of its row. Acts that are long enough show their micro-batch; the later
    chunks of a rank are paler; G and D are left out.
    """
    figure, axes = blank(height=1.1 + 0.4 * len(s.rows))
    step = max(t for row in end for t in row)
    factor, unit = scale_of("s", step)
    names = [kind for kind in ACTS if any(act.kind == kind for row in s.rows for act in row)]
    named = set[str]()
    for rank, row in enumerate(s.rows):
        chunks = s.stages.chunks(rank)
        for kind, stage in ((kind, stage) for kind in names for stage in chunks):
            times = [(a, b) for act, a, b in zip(row, start[rank], end[rank]) if (act.kind, act.stage) == (kind, stage)]
            spans = [(a / factor, (b - a) / factor) for a, b in times]
            label, opacity = KINDS[kind] if kind not in named else None, 1.0
            if len(chunks) > 1:
                opacity -= (1 - PALEST) * chunks.index(stage) / (len(chunks) - 1)
            axes.broken_barh(spans, (rank - 0.4, 0.8), label=label, alpha=opacity, **look_of(kind, ACTS, names))
            named.add(kind)
        for act, a, b in zip(row, start[rank], end[rank]):
            if act.kind in ACTS and b - a >= LABELLED * step:
                axes.text((a + b) / 2 / factor, rank, str(act.micro_batch), **LABEL)
    axes.set(xlabel=f"time in the step ({unit})", ylabel="rank of pp", xlim=(0, step / factor))
    axes.set(yticks=range(len(s.rows)), ylim=(len(s.rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, handlelength=1.8)
    return figure


Times = Sequence[Sequence[float]]


def pipeline(run: RunReport) -> Section:
    """The section on the schedule of a pipeline; without parts for a run that recorded none."""
    if run.pipeline is None:
        return Section("pipeline", "Pipeline", [])
    s, start, end = read_schedule(run.pipeline["schedule"]), run.pipeline["start"], run.pipeline["end"]
    played, step = replay_schedule(s, start, end), step_of(end)
    measured_idle, theirs = bubbles(start, end, step), [idle / played.step for idle in played.idle]
    layers = [sum(len(s.stages.layers[stage]) for stage in s.stages.chunks(rank)) for rank in range(len(s.rows))]
    columns, planned = {"played": theirs, "measured": measured_idle}, planned_row(run, s)
    if planned is not None:
        columns = {"predicted": [entry["idle_s"] / planned["row_s"] for entry in planned["ranks"]], **columns}
    rows = [
        (str(rank), str(n), *(percent(fractions[rank]) for fractions in columns.values()))
        for rank, n in enumerate(layers)
    ]
    rows.append(
        ("**all**", str(sum(layers)), *(percent(statistics.fmean(fractions)) for fractions in columns.values()))
    )
    number, name = run.pipeline.get("step", 0), f"{s.name}, {s.parts} micro-batches"
    alt = "Acts of each rank of pp over one step: forwards and backwards with their micro-batch"
    worst = max(range(len(measured_idle)), key=lambda rank: measured_idle[rank])
    longest_idle = f"rank {worst} is idle for {percent(measured_idle[worst])}"
    return Section(
        "pipeline",
        "Pipeline",
        [
            Picture(
                "pipeline_measured",
                f"{name}: the passes of step {number:,}, measured",
                f"{alt}, measured; they take {format_quantity(step, 's')}, and {longest_idle}.",
                lambda: schedule_bars(s, start, end),
            ),
            Picture(
                "pipeline_played",
                f"{name}: the same by `play`",
                f"{alt}, played; they take {format_quantity(played.step, 's')}.",
                lambda: schedule_bars(s, played.start, played.end),
            ),
            table(
                "pipeline",
                "Bubble: the part of its passes' time in which a rank of pp is idle",
                ("rank of pp", "layers", *columns),
                rows,
            ),
            "Played: every act takes the median of its kind and stage, and a message the shortest time that one has "
            f"taken across that border in the step; the step then takes {format_quantity(played.step, 's')}, and took "
            f"{format_quantity(step, 's')}. What a rank waits for inside an act, such as a gather, is part of the act."
            + (
                ""
                if planned is None
                else f" Predicted: by `play` with the plan's acts, {format_quantity(planned['row_s'], 's')}."
            ),
        ],
    )


def planned_row(run: RunReport, s: Schedule) -> dict[str, Any] | None:
    """What the plan of a run says of its pipeline; None without a plan of this schedule that has times."""
    facts = (run.plan or {}).get("pipeline") or {}
    matches = (facts.get("schedule"), facts.get("micro_batches")) == (s.name, s.parts)
    return facts if matches and "row_s" in facts and len(facts["ranks"]) == len(s.rows) else None


def step_of(end: Times) -> float:
    """When the last act ended."""
    return max(t for row in end for t in row)


def bubbles(start: Times, end: Times, step: float) -> list[float]:
    """By rank the part of the step in which it was in no act."""
    return [1.0 - sum(b - a for a, b in zip(*row)) / step for row in zip(start, end)]


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
