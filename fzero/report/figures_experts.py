"""The picture of the tokens that each expert gets, over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.report.figures import blank, format_counts

MOST_ROWS = 256  # of a picture: layers of more experts are shown by as many as fit


def load_map(steps: Sequence[int], load: Sequence[Sequence[Sequence[float]]]) -> Any:
    """Draw the share of each expert over its layer's mean as a map: a row for an expert, the layers below each other.

    load: [steps][layers][experts].
    """
    layers, experts = len(load[0]), len(load[0][0])
    shown = range(0, layers, max(1, -(-layers * experts // MOST_ROWS)))
    rows = [[one[i][e] * experts / (sum(one[i]) or 1.0) for one in load] for i in shown for e in range(experts)]
    figure, axes = blank(height=1.5 + min(4.0, 0.16 * len(rows)))
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    most = max(2.0, *(value for row in rows for value in row))
    look: dict[str, Any] = {"cmap": "cividis", "vmin": 0.0, "vmax": most, "rasterized": True}
    mesh = axes.pcolormesh(edges, [i - 0.5 for i in range(len(rows) + 1)], rows, **look)
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = -(-len(shown) // 16)
    axes.set_yticks(range(0, len(rows), experts * every), [f"layer {i}" for i in shown][::every])
    axes.set(xlabel="step (number)", ylabel="experts of each layer")
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label="tokens over the layer's mean", pad=0.02)
    return figure
