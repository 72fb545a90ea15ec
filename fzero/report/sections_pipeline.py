"""The section on the schedule of a pipeline: the acts of one step as they were, and as `play` has them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fzero.report.figures_pipeline import schedule_bars
from fzero.report.parts import Picture, Section, table
from fzero.report.values import RunReport, digits, shown
from fzero.sharding.pipeline import Played, Schedule, feeds, play, read_schedule

Times = Sequence[Sequence[float]]


def pipeline(run: RunReport) -> Section:
    """The section on the schedule of a pipeline; without parts for a run that recorded none."""
    if run.pipeline is None:
        return Section("pipeline", "Pipeline", [])
    s, start, end = read_schedule(run.pipeline["schedule"]), run.pipeline["start"], run.pipeline["end"]
    played, step = played_as(s, start, end), step_of(end)
    ours, theirs = bubbles(start, end, step), [idle / played.step for idle in played.idle]
    layers = [sum(len(s.stages.layers[stage]) for stage in s.stages.chunks(rank)) for rank in range(len(s.rows))]
    columns, planned = {"played": theirs, "measured": ours}, planned_row(run, s)
    if planned is not None:
        columns = {"predicted": [one["idle_s"] / planned["row_s"] for one in planned["ranks"]], **columns}
    rows = [(str(rank), str(n), *(percent(found[rank]) for found in columns.values())) for rank, n in enumerate(layers)]
    rows.append(("**all**", str(sum(layers)), *(percent(statistics.fmean(found)) for found in columns.values())))
    number, name = run.pipeline.get("step", 0), f"{s.name}, {s.parts} micro-batches"
    alt = "Acts of each rank of pp over one step: forwards and backwards with their micro-batch"
    worst = max(range(len(ours)), key=lambda rank: ours[rank])
    return Section(
        "pipeline",
        "Pipeline",
        [
            Picture(
                "pipeline_measured",
                f"{name}: the passes of step {number:,}, measured",
                f"{alt}, measured; they take {shown(step, 's')}, and rank {worst} is idle for {percent(ours[worst])}.",
                lambda: schedule_bars(s, start, end),
            ),
            Picture(
                "pipeline_played",
                f"{name}: the same by `play`",
                f"{alt}, played; they take {shown(played.step, 's')}.",
                lambda: schedule_bars(s, played.start, played.end),
            ),
            table(
                "pipeline",
                "Bubble: the part of its passes' time in which a rank of pp is idle",
                ("rank of pp", "layers", *columns),
                rows,
            ),
            "Played: every act takes the median of its kind and stage, and a message the shortest time that one has "
            f"taken across that border in the step; the step then takes {shown(played.step, 's')}, and took "
            f"{shown(step, 's')}. What a rank waits for inside an act, such as a gather, is part of the act."
            + (
                ""
                if planned is None
                else f" Predicted: by `play` with the plan's acts, {shown(planned['row_s'], 's')}."
            ),
        ],
    )


def planned_row(run: RunReport, s: Schedule) -> dict[str, Any] | None:
    """What the plan of a run says of its pipeline; None without a plan of this schedule that has times."""
    facts = (run.plan or {}).get("pipeline") or {}
    same = (facts.get("schedule"), facts.get("micro_batches")) == (s.name, s.parts)
    return facts if same and "row_s" in facts and len(facts["ranks"]) == len(s.rows) else None


def step_of(end: Times) -> float:
    """When the last act ended."""
    return max(t for row in end for t in row)


def bubbles(start: Times, end: Times, step: float) -> list[float]:
    """By rank the part of the step in which it was in no act."""
    return [1.0 - sum(b - a for a, b in zip(*row)) / step for row in zip(start, end)]


def played_as(s: Schedule, start: Times, end: Times) -> Played:
    """The schedule played with the times of its measured acts."""
    spans: dict[str, list[list[float]]] = {}
    when: dict[Any, tuple[float, float]] = {}
    for row, starts, ends in zip(s.rows, start, end):
        for act, a, b in zip(row, starts, ends):
            spans.setdefault(act.kind, [[] for _ in s.stages.ranks])[act.stage].append(b - a)
            when[act] = (a, b)
    # A stage whose backwards are of another kind than those of others has none of this one.
    cost = {kind: [statistics.median(times) if times else 0.0 for times in found] for kind, found in spans.items()}
    wire: list[list[float]] = [[] for _ in s.stages.ranks[1:]]
    for source, target in feeds(s).items():
        if s.stages.ranks[source.stage] != s.stages.ranks[target.stage]:
            wire[min(source.stage, target.stage)].append(max(0.0, when[target][0] - when[source][1]))
    return play(s, cost, [min(times, default=0.0) for times in wire])


def percent(part: float) -> str:
    """A part as a percentage."""
    return f"{digits(100 * part, 3)}%"
