"""The picture of memory over a step: measured bytes stacked by component, and the predicted sum over them."""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.report.figures import COMPONENTS, DIM, PREDICTED, band, blank, legend_beside, look_of, stairs
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
        below = [0.0] * len(moments)
        for name in stacked:
            top = [b + m["parts"].get(name, 0) / factor for b, m in zip(below, moments)]
            band(axes, between(places), below, top, label=name, **look_of(name, COMPONENTS, stacked))
            below = top
    if predicted:
        axes.plot(
            *stairs(between(align(predicted, moments)), [m["bytes"] / factor for m in predicted]),
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
    name_phases(axes, between(along(record)), [m["phase"] for m in record])
    legend_beside(axes)
    return figure


def between(places: Sequence[float]) -> list[float]:
    """The edges halfway between neighbouring `places`."""
    return [places[0], *((a + b) / 2 for a, b in itertools.pairwise(places)), places[-1]]


def along(moments: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each moment in the step, in percent of its operators if recorded, else of its moments."""
    if not moments:
        return []
    at = [m.get("at", i) for i, m in enumerate(moments)]
    first, last = at[0], at[-1]
    return [100.0 * (x - first) / max(1, last - first) for x in at]


def align(predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each predicted moment in the measured step.

    A moment with a measured counterpart (same place and operator) has its position, others are interpolated between
    such ones. If fewer than two moments have one, positions are the predicted step's own.
    """
    own, places = along(predicted), along(measured)
    keys = [[(m["phase"], m.get("layer"), m.get("op")) for m in record] for record in (predicted, measured)]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    common = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]
    if len(common) < 2:
        return own
    at = {own[i]: places[j] for i, j in common}  # of several at one position, the last
    x, y = zip(*sorted({0.0: 0.0, 100.0: 100.0, **at}.items()))

    def moved(place: float) -> float:
        n = min(max(bisect.bisect_right(x, place), 1), len(x) - 1)
        return y[n - 1] + (y[n] - y[n - 1]) * (place - x[n - 1]) / (x[n] - x[n - 1])

    return [moved(place) for place in own]


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
