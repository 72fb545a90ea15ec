"""Pictures that compare several runs: losses, speeds, and the scaling of speed with ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.report.figures import DIM, GREY, LINES, blank, every_mark, format_counts, thin_out
from fzero.report.figures_bars import paired_bars
from fzero.report.plots import smooth

Losses = tuple[str, Sequence[int], Sequence[float | None], Sequence[float | None]]


def losses(
    runs: Sequence[Losses], marks: Sequence[Sequence[int]] = (), common: int | None = None, unit: str = "token"
) -> Any:
    """Draw running means of training loss, and marks of validation loss, of runs (name, tokens, training, validation),
    in nats per unit.

    marks: where attempts of each run begin. common: the tokens that all have seen, if some have seen more."""
    figure, axes = blank(height=4.0)
    handles = []
    for i, (name, tokens, train, val) in enumerate(runs):
        colour, style, marker = LINES[i % len(LINES)]
        train_points = [(x, y) for x, y in zip(tokens, train) if y is not None]
        val_points = [(x, y) for x, y in zip(tokens, val) if y is not None]
        artists = []
        if train_points:
            x, y = zip(*train_points)
            every, _ = thin_out(len(x))
            artists += axes.plot(
                x[::every], smooth(y)[::every], color=colour, linestyle=style, linewidth=1.6, label=name
            )
        if val_points:
            look = {"linestyle": "none", "marker": marker, "markersize": 6, "markerfacecolor": "none", "color": colour}
            artists += axes.plot(
                *zip(*val_points), **look, markevery=every_mark(val_points), label=f"{name}, validation"
            )
        handles += artists[:1]
        for x in marks[i] if marks else ():
            axes.axvline(x, color=colour, linewidth=0.8, linestyle=(0, (2, 2)))
    if common is not None:
        axes.axvline(common, color=DIM, linewidth=1.0)
        text_style = {"ha": "right", "va": "bottom", "rotation": 90, "transform": axes.get_xaxis_transform()}
        axes.text(common, 0.02, "seen by all", fontsize=7.5, color=DIM, **text_style)
    axes.set(xlabel="tokens seen (tokens)", ylabel=f"loss (nats per {unit})")
    format_counts(axes.xaxis)
    title = "lines: training, running mean; marks: validation" + "; dashed: an attempt begins" * any(map(len, marks))
    axes.legend(handles=handles, frameon=False, title=title, title_fontsize=8, alignment="left")
    return figure


def speeds(rows: Sequence[tuple[str, float | None, float | None]]) -> Any:
    """Draw tokens per second of several runs: two bars for each (name, predicted, measured)."""
    figure = paired_bars(rows, "throughput (tokens/s)")
    format_counts(figure.axes[0].xaxis)
    return figure


def scaling(series: Sequence[tuple[str, Sequence[int], Sequence[float], Sequence[float]]]) -> Any:
    """Draw tokens per second and efficiency over ranks: a series (name, ranks, tokens/s, efficiency as a fraction) a
    line."""
    figure, (rate_axes, right) = blank(1, 2, height=3.6)
    for i, (name, ranks, rate, efficiency) in enumerate(series):
        colour, style, marker = LINES[i % len(LINES)]
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 6, "linewidth": 1.6}
        rate_axes.plot(ranks, rate, **look, label=name)
        first = rate[0] / ranks[0]
        rate_axes.plot(
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
    rate_axes.set(xlabel="ranks (number)", ylabel="throughput (tokens/s)", ylim=(0, None))
    right.set(
        xlabel="ranks (number)",
        ylabel="scaling efficiency (%)",
        ylim=(0, max(110, *(105 * e for _, _, _, es in series for e in es))),
    )
    for axes in (rate_axes, right):
        axes.set_xticks(ticks)
    format_counts(rate_axes.yaxis)
    rate_axes.legend(frameon=False, fontsize=8)
    return figure
