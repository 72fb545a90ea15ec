"""Pictures over the tokens and steps of a run: loss, throughput, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.figures import BLUE, GREY, PREDICTED, VERMILION, blank, format_counts, thin_out
from fzero.report.plots import smooth


def loss(tokens: Sequence[int], train: Sequence[float | None], val: Sequence[float | None]) -> Any:
    """Draw losses over tokens seen: each step, a running mean, and validation."""
    figure, axes = blank()
    known = [(x, y) for x, y in zip(tokens, train) if y is not None]
    if known:
        x, y = zip(*known)
        every, which = thin_out(len(x))
        axes.plot(x[::every], y[::every], color=GREY, linewidth=0.7, label=f"training, {which}")
        axes.plot(x[::every], smooth(y)[::every], color=BLUE, linewidth=1.8, label="training, running mean")
    seen = [(x, y) for x, y in zip(tokens, val) if y is not None]
    if seen:
        axes.plot(
            *zip(*seen),
            linestyle="--",
            marker="o",
            markersize=4.5,
            color=VERMILION,
            label=f"validation (last {seen[-1][1]:.3f})",
        )
    axes.set(xlabel="tokens seen (tokens)", ylabel="loss (nats per token)")
    format_counts(axes.xaxis)
    if known or seen:
        axes.legend(frameon=False)
    return figure


def throughput(
    tokens: Sequence[int], rate: Sequence[float], mfu: Sequence[float | None], predicted: float | None
) -> Any:
    """Draw tokens per second of each step, their running mean and the prediction, with MFU as a second scale."""
    figure, axes = blank()
    every, which = thin_out(len(tokens))
    axes.plot(tokens[::every], rate[::every], color=GREY, linewidth=0.7, label=f"measured, {which}")
    axes.plot(tokens[::every], smooth(rate)[::every], color=BLUE, linewidth=1.8, label="measured, running mean")
    if predicted is not None:
        axes.axhline(predicted, **PREDICTED, label="predicted")
    axes.set(xlabel="tokens seen (tokens)", ylabel="throughput (tokens/s)")
    axes.set_ylim(bottom=0, top=1.08 * max([*rate, predicted or 0.0]) or 1.0)
    format_counts(axes.xaxis)
    format_counts(axes.yaxis)
    known = [(a, b) for a, b in zip(rate, mfu) if a and b is not None]
    if known and known[-1][1]:
        percent = 100 * known[-1][1] / known[-1][0]  # MFU is proportional to the rate, so one curve serves two scales
        other = axes.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent))
        other.set_ylabel("model FLOPs utilisation (%)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def norms(steps: Sequence[int], table: Mapping[str, Sequence[float | None]], what: str) -> Any:
    """Draw the norms of each layer over the steps as a map of their logarithm; `what` is "gradient" or "parameter"."""
    from matplotlib.colors import LogNorm

    figure, axes = blank(height=1.5 + min(3.5, 0.28 * len(table)))
    values = [[float("nan") if v is None or v <= 0 else v for v in row] for row in table.values()]
    known = sorted(v for row in values for v in row if v == v) or [1.0]
    low, high = known[0], known[-1]
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    shading = {"cmap": "cividis", "norm": LogNorm(low, high if high > low else low * 10), "rasterized": True}
    mesh = axes.pcolormesh(edges, [i - 0.5 for i in range(len(values) + 1)], values, **shading)
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = -(-len(table) // 16)
    axes.set_yticks(range(0, len(table), every), list(table)[::every])
    axes.set(xlabel="step (number)", ylabel="part of the model")
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label=f"{what} norm (L2)", pad=0.02)
    return figure
