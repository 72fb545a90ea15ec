"""Pictures of bars: time by phase, communication by axis, and the ranks beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.figures import (
    BINS,
    BLACK,
    BLUE,
    PHASES,
    SKY,
    WHITE,
    band,
    blank,
    format_counts,
    legend_beside,
    look_of,
)
from fzero.report.values import scale_of


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
        left = 0.0
        for name in names:
            width = parts.get(name, 0.0) / factor
            axes.barh(y, width, 0.62, left=left, label=None if y else name, **look_of(name, PHASES, names))
            left += width
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
    edges, below = [*(steps[group[0]] - 0.5 for group in groups), steps[-1] + 0.5], [0.0] * len(groups)
    for name in names:
        means = [sum(phases[name][i] or 0.0 for i in group) / len(group) for group in groups]
        top = [b + y / factor for b, y in zip(below, means)]
        band(axes, edges, below, top, label=name, **look_of(name, PHASES, names))
        below = top
    axes.set(xlabel="step (number)", ylabel=f"time ({unit})", ylim=(0, ceiling / factor), xlim=(edges[0], edges[-1]))
    axes.set_title(note, fontsize=8.5, loc="left")
    format_counts(axes.xaxis)
    legend_beside(axes)
    return figure


def communication(rows: Sequence[tuple[str, int | None, int | None]]) -> Any:
    """Draw the bytes that a rank sends in a step: two bars for each (what, predicted, measured)."""
    factor, unit = scale_of("bytes", max([max(p or 0, m or 0) for _, p, m in rows], default=1))
    return paired_bars(
        [(name, p if p is None else p / factor, m if m is None else m / factor) for name, p, m in rows],
        f"sent by one rank in a step ({unit})",
    )


def paired_bars(rows: Sequence[tuple[str, float | None, float | None]], what: str) -> Any:
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
    axes.set(xlabel=what, ylabel="")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1])
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def stragglers(ranks: Sequence[int], seconds: Sequence[float], spread: Sequence[tuple[float, float]], what: str) -> Any:
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
    axes.set(xlabel="rank (number)", ylabel=f"{what} ({unit})", ylim=(0, None))
    if len(ranks) <= 32:
        axes.set_xticks(list(ranks))
    axes.grid(axis="x", visible=False)
    return figure
