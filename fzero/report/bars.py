"""Pictures of one step: memory by component, time by phase, bytes sent, acts of a pipeline, busy ranks."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fzero.report.compare import value_of
from fzero.report.figures import (
    BINS,
    BLACK,
    BLUE,
    COMPONENTS,
    DIM,
    GREEN,
    ORANGE,
    PHASES,
    PREDICTED,
    SKY,
    WHITE,
    add_side_legend,
    band,
    blank,
    format_counts,
    look_of,
    stairs,
)
from fzero.report.values import RunReport, format_quantity, scale_of
from fzero.sharding.pipeline import Schedule
from fzero.sharding.pipeline.table import KINDS

Moments = Sequence[Mapping[str, Any]]  # {"bytes", "parts": {component: bytes}, "phase"} in the order of a step

# -- memory


def memory(run: RunReport) -> Any:
    """Draw the live bytes over a step: measured, stacked by component, and the predicted sum as a line."""
    moments, predicted = ((record or {}).get("timeline") or () for record in (run.memory, run.plan))
    names = [*((run.memory or {}).get("components") or COMPONENTS), *(name for m in moments for name in m["parts"])]
    record = moments or predicted
    figure, axes = blank(height=4.0)
    most = max([m["bytes"] for m in (*moments, *predicted)], default=1)
    factor, unit = scale_of("bytes", most)
    stacked = [name for name in dict.fromkeys(names) if any(m["parts"].get(name) for m in record)]
    edges, bottom = cell_edges(along(record)), [0.0] * len(moments)
    for name in stacked if moments else ():
        top = [b + m["parts"].get(name, 0) / factor for b, m in zip(bottom, moments)]
        band(axes, edges, bottom, top, label=name, **look_of(name, COMPONENTS, stacked))
        bottom = top
    if predicted:
        line = stairs(cell_edges(align(predicted, moments)), [m["bytes"] / factor for m in predicted])
        axes.plot(*line, **PREDICTED, label="predicted, all")
    axes.set(xlabel="progress through the step's operators (%)", ylabel=f"live tensors of a rank ({unit})")
    axes.set(xlim=(0, 100), ylim=(0, 1.12 * most / factor))
    name_phases(axes, edges, [m["phase"] for m in record])
    add_side_legend(axes)
    return figure


def cell_edges(places: Sequence[float]) -> list[float]:
    """The edges halfway between neighbouring `places`."""
    return [places[0], *((a + b) / 2 for a, b in itertools.pairwise(places)), places[-1]]


def along(moments: Moments) -> list[float]:
    """The position of each moment in the step, in percent of its operators."""
    if not moments:
        return []
    positions = [m.get("at", i) for i, m in enumerate(moments)]
    first, last = positions[0], positions[-1]
    return [100.0 * (x - first) / max(1, last - first) for x in positions]


def align(predicted: Moments, measured: Moments) -> list[float]:
    """The position of each predicted moment in the measured step, interpolated between common ones."""
    positions, places = along(predicted), along(measured)
    keys = [[(m["phase"], m.get("layer"), m.get("op")) for m in record] for record in (predicted, measured)]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    common = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]
    if len(common) < 2:
        return positions
    anchors = {0.0: 0.0, 100.0: 100.0, **{positions[i]: places[j] for i, j in common}}  # of several, the last
    x, y = zip(*sorted(anchors.items()))
    return np.interp(positions, x, y).tolist()


def name_phases(axes: Any, edges: Sequence[float], phases: Sequence[str]) -> None:
    """Write the names of the phases along the top, but of short ones."""
    begins = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]]
    ends = [*(edges[i] for i in begins[1:]), 100.0]
    named = [right - edges[i] > 1.1 * len(phases[i]) + 1 for i, right in zip(begins, ends)]  # a letter is about 1% wide
    look = {"ha": "center", "va": "top", "fontsize": 8, "transform": axes.get_xaxis_transform()}
    for n, (i, right) in enumerate(zip(begins, ends)):
        if i and (named[n] or named[n - 1]):
            axes.axvline(edges[i], color=DIM, linewidth=0.6, linestyle=":")
        if named[n]:
            axes.text((edges[i] + right) / 2, 0.97, phases[i], **look)


# -- time


def time_bars(run: RunReport) -> Any:
    """Draw the seconds of a step by phase: one stacked bar measured, one predicted."""
    bars = {}
    for kind in ("predicted", "measured"):
        times = {q.name: getattr(q, kind) for q in run.quantities if q.name.startswith("time/")}
        parts = {name.removeprefix("time/"): seconds for name, seconds in times.items() if seconds is not None}
        bars |= {kind: parts} if parts else {}
    figure, axes = blank(height=1.3 + 0.55 * len(bars))
    factor, unit = scale_of("s", max(sum(parts.values()) for parts in bars.values()))
    names = in_order({name for parts in bars.values() for name in parts})
    for y, parts in enumerate(bars.values()):
        offset = 0.0
        for name in names:
            width = parts.get(name, 0.0) / factor
            axes.barh(y, width, 0.62, left=offset, label=None if y else name, **look_of(name, PHASES, names))
            offset += width
    axes.set(xlabel=f"time of a step ({unit})", ylabel="")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, handlelength=1.8)
    return figure


def in_order(phases: set[str]) -> list[str]:
    """The names of phases, known ones in their order first."""
    return [*(name for name in PHASES if name in phases), *sorted(phases - set(PHASES))]


def step_phases(run: RunReport) -> tuple[list[int], dict[str, list[float | None]]]:
    """(steps that recorded phases, {phase: its seconds in each}). On a GPU few steps have."""
    indices = [i for i, value in enumerate(run.series["phases.forward"]) if value is not None]
    phases = {
        name.removeprefix("phases."): [values[i] for i in indices]
        for name, values in run.series.items()
        if name.startswith("phases.")
    }
    return [run.series["step"][i] for i in indices], phases


def time_steps(run: RunReport) -> Any:
    """Draw the measured seconds of each step by phase, stacked; many steps are averaged in bins."""
    steps, phases = step_phases(run)
    walls = [sum(values[i] or 0.0 for values in phases.values()) for i in range(len(steps))]
    ceiling = highest_shown(walls)
    slow_steps = [(wall, step) for wall, step in zip(walls, steps) if wall > ceiling]
    figure, axes = blank(height=3.5)
    factor, unit = scale_of("s", ceiling)
    names = in_order({name for name, values in phases.items() if any(values)})
    size = -(-len(steps) // BINS)
    groups = [range(i, min(i + size, len(steps))) for i in range(0, len(steps), size)]
    edges, bottom = [*(steps[group[0]] - 0.5 for group in groups), steps[-1] + 0.5], [0.0] * len(groups)
    for name in names:
        means = [sum(phases[name][i] or 0.0 for i in group) / len(group) for group in groups]
        top = [b + y / factor for b, y in zip(bottom, means)]
        band(axes, edges, bottom, top, label=name, **look_of(name, PHASES, names))
        bottom = top
    axes.set(xlabel="step (number)", ylabel=f"time ({unit})", ylim=(0, ceiling / factor), xlim=(edges[0], edges[-1]))
    if slow_steps:
        longest, step = max(slow_steps)
        note = f"{len(slow_steps)} of {len(walls):,} steps are longer; the longest, step {step:,}, "
        axes.set_title(note + format_quantity(longest, "s"), fontsize=8.5, loc="left")
    format_counts(axes.xaxis)
    add_side_legend(axes)
    return figure


def highest_shown(values: Sequence[float]) -> float:
    """The end of an axis for `values`: above their 95th percentile, at most three times their median.

    >>> highest_shown([1.0] * 30 + [9.0]), highest_shown([2.0, 4.0, 4.0])
    (1.1, 4.2)
    """
    ordered = sorted(values)
    near = ordered[max(0, len(ordered) - 1 - max(1, len(ordered) // 20))]
    ceiling = min(1.1 * near, 3 * ordered[len(ordered) // 2])
    return ceiling if ordered[-1] > ceiling > 0 else 1.05 * ordered[-1]


def stragglers(times: Sequence[tuple[Sequence[float], tuple[float, float]]]) -> Any:
    """Draw the seconds that each rank is busy in a step, with their range: `times` as `times_of_ranks`."""
    seconds = [parts[0] for parts, _ in times]
    figure, axes = blank(height=3.2)
    factor, unit = scale_of("s", max(seconds))
    errors = [[max(0.0, (s - low) / factor) for s, (_, (low, _)) in zip(seconds, times)]]
    errors += [[max(0.0, (high - s) / factor) for s, (_, (_, high)) in zip(seconds, times)]]
    ranks, heights = range(len(times)), [s / factor for s in seconds]
    axes.bar(ranks, heights, 0.6, facecolor=SKY, edgecolor=BLACK, linewidth=0.6, hatch="//")
    axes.errorbar(ranks, heights, yerr=errors, fmt="none", ecolor=BLACK, capsize=4, linewidth=1)
    axes.set(xlabel="rank (number)", ylabel=f"busy in a step, mean ({unit})", ylim=(0, None))
    if len(ranks) <= 32:
        axes.set_xticks(list(ranks))
    axes.grid(axis="x", visible=False)
    return figure


# -- pairs of bars


def communication(rows: Sequence[tuple[Any, ...]]) -> Any:
    """Draw the bytes that a rank sends in a step: two bars for each (name, predicted, measured)."""
    factor, unit = scale_of("bytes", max(max(p or 0, m or 0) for _, p, m in rows))
    scaled = [(name, *(None if n is None else n / factor for n in pair)) for name, *pair in rows]
    return paired_bars(scaled, f"sent by one rank in a step ({unit})")


def speeds(runs: Sequence[RunReport]) -> Any:
    """Draw tokens per second of several runs, predicted and measured."""
    rows = [(run.name, value_of(run, "tokens_per_s", predicted=True), value_of(run, "tokens_per_s")) for run in runs]
    figure = paired_bars(rows, "throughput (tokens/s)")
    format_counts(figure.axes[0].xaxis)
    return figure


def paired_bars(rows: Sequence[tuple[Any, ...]], quantity: str) -> Any:
    """Draw bars of (name, predicted, measured) from top to bottom; a column without values is left out."""
    figure, axes = blank(height=1.4 + 0.5 * len(rows))
    looks = {1: ("predicted", {"facecolor": WHITE, "hatch": "////"}), 2: ("measured", {"facecolor": BLUE})}
    kinds = [index for index in looks if any(row[index] is not None for row in rows)]
    for index in kinds:
        label, look = looks[index]
        offset = 0.0 if len(kinds) == 1 else 0.2 * (2 * index - 3)
        places = [len(rows) - 1 - i - offset for i in range(len(rows))]
        widths = [row[index] or 0.0 for row in rows]
        axes.barh(places, widths, 0.38, label=label, linewidth=0.6, edgecolor=BLACK, **look)
    axes.set(xlabel=quantity, ylabel="")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1])
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


# -- a pipeline

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
    """Draw the acts of each rank from start to end, rank 0 at the top, of a play or as measured."""
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
