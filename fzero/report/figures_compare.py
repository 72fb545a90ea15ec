"""Pictures that compare several runs: losses, speeds, and the scaling of speed with ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.report.figures import GREY, LINES, blank, format_counts, thin_out
from fzero.report.figures_bars import paired_bars
from fzero.report.plots import smooth


def losses(runs: Sequence[tuple[str, Sequence[int], Sequence[float | None], Sequence[float | None]]]) -> Any:
    """Draw running means of training loss, and marks of validation loss, of runs (name, tokens, training,
    validation)."""
    figure, axes = blank(height=4.0)
    for i, (name, tokens, train, val) in enumerate(runs):
        colour, style, marker = LINES[i % len(LINES)]
        known = [(x, y) for x, y in zip(tokens, train) if y is not None]
        if known:
            x, y = zip(*known)
            every, _ = thin_out(len(x))
            axes.plot(x[::every], smooth(y)[::every], color=colour, linestyle=style, linewidth=1.6, label=name)
        seen = [(x, y) for x, y in zip(tokens, val) if y is not None]
        if seen:
            label = None if known else name
            axes.plot(
                *zip(*seen),
                linestyle="none",
                marker=marker,
                markersize=6,
                markerfacecolor="none",
                color=colour,
                label=label,
            )
    axes.set(xlabel="tokens seen (tokens)", ylabel="loss (nats per token)")
    format_counts(axes.xaxis)
    axes.legend(
        frameon=False, title="lines: training, running mean; marks: validation", title_fontsize=8, alignment="left"
    )
    return figure


def speeds(rows: Sequence[tuple[str, float | None, float | None]]) -> Any:
    """Draw tokens per second of several runs: two bars for each (name, predicted, measured)."""
    figure = paired_bars(rows, "throughput (tokens/s)")
    format_counts(figure.axes[0].xaxis)
    return figure


def scaling(series: Sequence[tuple[str, Sequence[int], Sequence[float], Sequence[float]]]) -> Any:
    """Draw tokens per second and efficiency over ranks: a series (name, ranks, tokens/s, efficiency as a fraction) a
    line."""
    figure, (left, right) = blank(1, 2, height=3.6)
    for i, (name, ranks, rate, efficiency) in enumerate(series):
        colour, style, marker = LINES[i % len(LINES)]
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 6, "linewidth": 1.6}
        left.plot(ranks, rate, **look, label=name)
        first = rate[0] / ranks[0]
        left.plot(
            ranks,
            [first * n for n in ranks],
            color=GREY,
            linewidth=1.0,
            linestyle=(0, (1, 2)),
            label="as many times as ranks" if i == 0 else None,
        )
        right.plot(ranks, [100 * e for e in efficiency], **look)
    right.axhline(100, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
    ticks = sorted({n for _, ranks, _, _ in series for n in ranks})
    left.set(xlabel="ranks (number)", ylabel="throughput (tokens/s)", ylim=(0, None))
    right.set(
        xlabel="ranks (number)",
        ylabel="scaling efficiency (%)",
        ylim=(0, max(110, *(105 * e for _, _, _, es in series for e in es))),
    )
    for axes in (left, right):
        axes.set_xticks(ticks)
    format_counts(left.yaxis)
    left.legend(frameon=False, fontsize=8)
    return figure
