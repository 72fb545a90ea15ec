"""Pictures of bars: time by phase, communication by axis, and the ranks beside each other.

The picture of memory over a step: measured bytes stacked by component, and the predicted sum over them.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.figures import (
    BINS,
    BLACK,
    BLUE,
    COMPONENTS,
    DIM,
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
from fzero.report.values import scale_of


def memory(
    moments: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]], components: Sequence[str]
) -> Any:
    """Draw the live bytes over a step: measured, stacked by component, and the predicted sum as a line.

    moments: {"bytes", "parts": {component: bytes}, "phase"} in the order of the step; both records are stretched to its
    length."""
    figure, axes = blank(height=4.0)
    record = moments or predicted
    factor, unit = scale_of("bytes", max([m["bytes"] for m in (*moments, *predicted)], default=1))
    places = along(moments)
    stacked = [name for name in components if any(m["parts"].get(name) for m in record)]
    if moments:
        bottom = [0.0] * len(moments)
        for name in stacked:
            top = [b + m["parts"].get(name, 0) / factor for b, m in zip(bottom, moments)]
            band(axes, cell_edges(places), bottom, top, label=name, **look_of(name, COMPONENTS, stacked))
            bottom = top
    if predicted:
        axes.plot(
            *stairs(cell_edges(align(predicted, moments)), [m["bytes"] / factor for m in predicted]),
            **PREDICTED,
            label="predicted, all",
        )
    top = 1.12 * max([m["bytes"] for m in (*moments, *predicted)], default=1) / factor
    axes.set(
        xlabel="progress through the step's operators (%)",
        ylabel=f"live tensors of a rank ({unit})",
        xlim=(0, 100),
        ylim=(0, top),
    )
    name_phases(axes, cell_edges(along(record)), [m["phase"] for m in record])
    add_side_legend(axes)
    return figure


def cell_edges(places: Sequence[float]) -> list[float]:
    """The edges halfway between neighbouring `places`."""
    return [places[0], *((a + b) / 2 for a, b in itertools.pairwise(places)), places[-1]]


def along(moments: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each moment in the step, in percent of its operators if recorded, else of its moments."""
    if not moments:
        return []
    positions = [m.get("at", i) for i, m in enumerate(moments)]
    first, last = positions[0], positions[-1]
    return [100.0 * (x - first) / max(1, last - first) for x in positions]


def align(predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each predicted moment in the measured step.

    A moment with a measured counterpart (same place and operator) has its position, others are interpolated between
    such ones. If fewer than two moments have one, positions are the predicted step's own.
    """
    positions, places = along(predicted), along(measured)
    keys = [[(m["phase"], m.get("layer"), m.get("op")) for m in record] for record in (predicted, measured)]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    common = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]
    if len(common) < 2:
        return positions
    anchors = {positions[i]: places[j] for i, j in common}  # of several at one position, the last
    x, y = zip(*sorted({0.0: 0.0, 100.0: 100.0, **anchors}.items()))

    def interpolate(position: float) -> float:
        n = min(max(bisect.bisect_right(x, position), 1), len(x) - 1)
        return y[n - 1] + (y[n] - y[n - 1]) * (position - x[n - 1]) / (x[n] - x[n - 1])

    return [interpolate(position) for position in positions]


def name_phases(axes: Any, edges: Sequence[float], phases: Sequence[str]) -> None:
    """Write the names of the phases along the top, with lines between them; phases too short for a name get none."""
    begins = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]]
    ends = [*(edges[i] for i in begins[1:]), 100.0]
    named = [right - edges[i] > 1.1 * len(phases[i]) + 1 for i, right in zip(begins, ends)]  # a letter is about 1% wide
    for n, (i, right) in enumerate(zip(begins, ends)):
        if i and (named[n] or named[n - 1]):
            axes.axvline(edges[i], color=DIM, linewidth=0.6, linestyle=":")
        if named[n]:
            axes.text(
                (edges[i] + right) / 2,
                0.97,
                phases[i],
                ha="center",
                va="top",
                fontsize=8,
                transform=axes.get_xaxis_transform(),
            )


def time_bars(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Any:
    """Draw the seconds of a step by phase: one stacked bar measured, one predicted."""
    bars = [(name, parts) for name, parts in (("predicted", predicted), ("measured", measured)) if parts]
    figure, axes = blank(height=1.3 + 0.55 * len(bars))
    total = max(sum(parts.values()) for _, parts in bars)
    factor, unit = scale_of("s", total)
    names = [
        name
        for name in [*PHASES, *sorted({*measured, *predicted} - set(PHASES))]
        if name in measured or name in predicted
    ]
    for y, (_, parts) in enumerate(bars):
        offset = 0.0
        for name in names:
            width = parts.get(name, 0.0) / factor
            axes.barh(y, width, 0.62, left=offset, label=None if y else name, **look_of(name, PHASES, names))
            offset += width
    axes.set(xlabel=f"time of a step ({unit})", ylabel="")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.grid(axis="y", visible=False)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False, handlelength=1.8
    )
    return figure


def time_steps(
    steps: Sequence[int], phases: Mapping[str, Sequence[float | None]], ceiling: float, note: str = ""
) -> Any:
    """Draw the measured seconds of each step by phase, stacked; many steps are averaged in bins. Bars are cut at
    `ceiling`, and `note` says above them which ones."""
    figure, axes = blank(height=3.5)
    factor, unit = scale_of("s", ceiling)
    names = [name for name in [*PHASES, *sorted(set(phases) - set(PHASES))] if any(phases.get(name, ()))]
    size = -(-len(steps) // BINS)
    groups = [range(i, min(i + size, len(steps))) for i in range(0, len(steps), size)]
    edges, bottom = [*(steps[group[0]] - 0.5 for group in groups), steps[-1] + 0.5], [0.0] * len(groups)
    for name in names:
        means = [sum(phases[name][i] or 0.0 for i in group) / len(group) for group in groups]
        top = [b + y / factor for b, y in zip(bottom, means)]
        band(axes, edges, bottom, top, label=name, **look_of(name, PHASES, names))
        bottom = top
    axes.set(xlabel="step (number)", ylabel=f"time ({unit})", ylim=(0, ceiling / factor), xlim=(edges[0], edges[-1]))
    axes.set_title(note, fontsize=8.5, loc="left")
    format_counts(axes.xaxis)
    add_side_legend(axes)
    return figure


def communication(rows: Sequence[tuple[str, int | None, int | None]]) -> Any:
    """Draw the bytes that a rank sends in a step: two bars for each (what, predicted, measured)."""
    factor, unit = scale_of("bytes", max([max(p or 0, m or 0) for _, p, m in rows], default=1))
    return paired_bars(
        [(name, p if p is None else p / factor, m if m is None else m / factor) for name, p, m in rows],
        f"sent by one rank in a step ({unit})",
    )


def paired_bars(rows: Sequence[tuple[str, float | None, float | None]], quantity: str) -> Any:
    """Draw bars of (name, predicted, measured) from top to bottom; a column without values is left out."""
    figure, axes = blank(height=1.4 + 0.5 * len(rows))
    kinds = [
        (index, label, look)
        for index, label, look in (
            (1, "predicted", {"facecolor": WHITE, "hatch": "////", "edgecolor": BLACK}),
            (2, "measured", {"facecolor": BLUE, "edgecolor": BLACK}),
        )
        if any(row[index] is not None for row in rows)
    ]
    for index, label, look in kinds:
        offset = 0.0 if len(kinds) == 1 else 0.2 * (2 * index - 3)
        places = [len(rows) - 1 - i - offset for i in range(len(rows))]
        axes.barh(places, [row[index] or 0.0 for row in rows], 0.38, label=label, linewidth=0.6, **look)
    axes.set(xlabel=quantity, ylabel="")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1])
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def stragglers(
    ranks: Sequence[int], seconds: Sequence[float], spread: Sequence[tuple[float, float]], quantity: str
) -> Any:
    """Draw the seconds of a step on each rank, with their range."""
    figure, axes = blank(height=3.2)
    factor, unit = scale_of("s", max(seconds))
    errors = [
        [(s - low) / factor for s, (low, _) in zip(seconds, spread)],
        [(high - s) / factor for s, (_, high) in zip(seconds, spread)],
    ]
    errors = [[max(0.0, e) for e in side] for side in errors]
    axes.bar(ranks, [s / factor for s in seconds], 0.6, facecolor=SKY, edgecolor=BLACK, linewidth=0.6, hatch="//")
    axes.errorbar(ranks, [s / factor for s in seconds], yerr=errors, fmt="none", ecolor=BLACK, capsize=4, linewidth=1)
    axes.set(xlabel="rank (number)", ylabel=f"{quantity} ({unit})", ylim=(0, None))
    if len(ranks) <= 32:
        axes.set_xticks(list(ranks))
    axes.grid(axis="x", visible=False)
    return figure
