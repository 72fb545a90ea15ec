"""Pictures over the tokens and steps of a run: loss, throughput, norms, and the small ones of the first screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.figures import (
    BLUE,
    DIM,
    GREY,
    LINES,
    PREDICTED,
    VERMILION,
    blank,
    every_mark,
    format_counts,
    thin_out,
)
from fzero.report.plots import smooth
from fzero.report.values import digits, perplexity

Marks = Sequence[tuple[float, int]]  # (place on the x axis, number) of the attempts after the first
NAMED_MARKS = 8  # most attempts with their numbers beside their lines
Curve = tuple[str, Sequence[float], Sequence[float | None]]  # name, x, y


def loss(
    tokens: Sequence[int],
    train: Sequence[float | None],
    val: Sequence[float | None],
    marks: Marks = (),
    unit: str = "token",
) -> Any:
    """Draw losses over tokens seen, in nats per unit: each step, a running mean, and validation; `marks`: where
    attempts begin."""
    figure, axes = blank()
    train_points = [(x, y) for x, y in zip(tokens, train) if y is not None]
    if train_points:
        x, y = zip(*train_points)
        every, thinning = thin_out(len(x))
        axes.plot(x[::every], y[::every], color=GREY, linewidth=0.7, label=f"training, {thinning}")
        axes.plot(x[::every], smooth(y)[::every], color=BLUE, linewidth=1.8, label="training, running mean")
    val_points = [(x, y) for x, y in zip(tokens, val) if y is not None]
    if val_points:
        last = val_points[-1][1]
        spread = f", perplexity {digits(perplexity(last), 3)}" if unit == "token" else ""
        axes.plot(
            *zip(*val_points),
            linestyle="--",
            marker="o",
            markersize=4.5,
            markevery=every_mark(val_points),
            color=VERMILION,
            label=f"validation (last {last:.3f}{spread})",
        )
    axes.set(xlabel="tokens seen (tokens)", ylabel=f"loss (nats per {unit})")
    format_counts(axes.xaxis)
    mark_attempts(axes, marks)
    if train_points or val_points:
        axes.legend(frameon=False)
    return figure


def throughput(
    tokens: Sequence[int],
    rate: Sequence[float],
    mfu: Sequence[float | None],
    predicted: float | None,
    marks: Marks = (),
) -> Any:
    """Draw tokens per second of each step, their running mean and the prediction, with MFU as a second scale; `marks`:
    where attempts begin."""
    figure, axes = blank()
    every, thinning = thin_out(len(tokens))
    axes.plot(tokens[::every], rate[::every], color=GREY, linewidth=0.7, label=f"measured, {thinning}")
    axes.plot(tokens[::every], smooth(rate)[::every], color=BLUE, linewidth=1.8, label="measured, running mean")
    if predicted is not None:
        axes.axhline(predicted, **PREDICTED, label="predicted")
    axes.set(xlabel="tokens seen (tokens)", ylabel="throughput (tokens/s)")
    axes.set_ylim(bottom=0, top=1.08 * max([*rate, predicted or 0.0]) or 1.0)
    format_counts(axes.xaxis)
    format_counts(axes.yaxis)
    mark_attempts(axes, marks)
    mfu_pairs = [(a, b) for a, b in zip(rate, mfu) if a and b is not None]
    if mfu_pairs and mfu_pairs[-1][1]:
        # MFU is proportional to the rate, so one curve serves two scales.
        percent = 100 * mfu_pairs[-1][1] / mfu_pairs[-1][0]
        mfu_axis = axes.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent))
        mfu_axis.set_ylabel("model FLOPs utilisation (%)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def mark_attempts(axes: Any, marks: Marks) -> None:
    """Draw a line where each attempt begins, with its number if there are few."""
    for x, number in marks:
        axes.axvline(x, color=DIM, linewidth=0.8, linestyle=(0, (2, 2)))
        if len(marks) <= NAMED_MARKS:
            text_style = {"rotation": 90, "ha": "right", "va": "bottom", "transform": axes.get_xaxis_transform()}
            axes.text(x, 0.02, f"attempt {number}", fontsize=7.5, color=DIM, **text_style)


def small(curves: Sequence[Curve], x: str, y: str, marks: Marks = (), points: Sequence[Curve] = ()) -> Any:
    """Draw a picture of the first screen, a line for each of `curves` and marks for each of `points` in the same order,
    over axes named `x` and `y`. The picture with points of several runs has their names."""
    figure, axes = blank(width=2.9, height=2.1)
    for i, (name, places, values) in enumerate(curves):
        colour, style, _ = LINES[i % len(LINES)]
        every, _ = thin_out(len(places))
        axes.plot(places[::every], values[::every], color=colour, linestyle=style, linewidth=1.5, label=name)
    for i, (name, places, values) in enumerate(points):
        colour, _, marker = LINES[(i + (len(points) == 1)) % len(LINES)]
        look = {"color": colour, "linestyle": "none", "marker": marker, "markersize": 4}
        axes.plot(places, values, **look, markevery=every_mark(values), label=name)
    axes.set(xlabel=x, ylabel=y)
    format_counts(axes.xaxis)
    if "(tokens/s)" in y:
        axes.set_ylim(bottom=0)
        format_counts(axes.yaxis)
    if len(points) > 1:
        axes.legend(handles=axes.lines[: len(curves)], frameon=False, fontsize=6.5, loc="upper right")
    axes.locator_params(axis="x", nbins=3)
    axes.locator_params(axis="y", nbins=5)
    mark_attempts(axes, marks)
    return figure


def loss_by_position(curves: Sequence[tuple[str, Sequence[int], Sequence[float]]], unit: str = "token") -> Any:
    """Draw the mean losses in ranges of positions, a line for each evaluation of `curves`: its name, the ranges' ends,
    the losses. Each range stands at its end, on an axis of powers of two."""
    figure, axes = blank()
    for i, (name, ends, values) in enumerate(curves):
        colour, style, marker = LINES[i % len(LINES)]
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4.5}
        axes.plot(ends, values, linewidth=1.5, label=name, **look)
    axes.set_xscale("log", base=2)
    every = sorted({end for _, ends, _ in curves for end in ends})
    axes.set_xticks(every[:: -(-len(every) // 12)])
    axes.set(xlabel="position in its document, up to (tokens)", ylabel=f"validation loss (nats per {unit})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False)
    return figure


def norms(steps: Sequence[int], table: Mapping[str, Sequence[float | None]], kind: str) -> Any:
    """Draw the norms of each layer over the steps as a map of their logarithm; `kind` is "gradient" or "parameter"."""
    from matplotlib.colors import LogNorm

    figure, axes = blank(height=1.5 + min(3.5, 0.28 * len(table)))
    values = [[float("nan") if v is None or v <= 0 else v for v in row] for row in table.values()]
    finite = sorted(v for row in values for v in row if v == v) or [1.0]
    low, high = finite[0], finite[-1]
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    shading = {"cmap": "cividis", "norm": LogNorm(low, high if high > low else low * 10), "rasterized": True}
    mesh = axes.pcolormesh(edges, [i - 0.5 for i in range(len(values) + 1)], values, **shading)
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = -(-len(table) // 16)
    axes.set_yticks(range(0, len(table), every), list(table)[::every])
    axes.set(xlabel="step (number)", ylabel="part of the model")
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label=f"{kind} norm (L2)", pad=0.02)
    return figure
