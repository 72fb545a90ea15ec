"""Reduce Figures to the tables of a device file: curves of few points, and one value for each size."""

from __future__ import annotations

import math
import statistics
from typing import Any

from fzero.planner.calibrate.timed import Figure
from fzero.planner.devices import Curve, Products

Figures = dict[str, dict[Any, Figure]]
STEP = 1.6  # sizes within this factor are merged into one point
DIGITS = 5  # significant digits of a figure


def round_rates(seconds: float) -> float:
    """Round seconds to DIGITS significant digits, as device files have them."""
    return float(f"{seconds:.{DIGITS}g}")


def curve_of(sizes: dict[float, Figure]) -> Curve:
    """The points (size, seconds) by size; sizes within a factor of STEP are merged into one, at the geometric means of
    both."""
    points: list[list[tuple[float, float]]] = []
    for size, each in sorted(sizes.items()):
        if points and size <= points[-1][0][0] * STEP:
            points[-1].append((size, each.s))
        else:
            points.append([(size, each.s)])
    means = [[statistics.geometric_mean(max(point[i], 1e-12) for point in group) for i in (0, 1)] for group in points]
    return tuple((round_rates(size), round_rates(seconds)) for size, seconds in means)


def products_of(found: dict[str, dict[tuple[int, ...], Figure]]) -> dict[str, Products]:
    """The rows (batch, m, n, k, seconds) by key; a layout of a dtype has rows of its own only if measured on most of
    the grid."""
    whole = {
        key for key in found if len(found[key]) > 0.5 * len(found.get(key.removesuffix("/nt").removesuffix("/tn"), {}))
    }
    out: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for key, shapes in found.items():
        plain = key.removesuffix("/nt").removesuffix("/tn")
        for shape, each in shapes.items():
            out.setdefault(key if key in whole else plain, {}).setdefault(shape, []).append(each.s)
    rows = {
        key: [(batch, m, n, k, round_rates(statistics.fmean(s))) for (batch, m, n, k), s in shapes.items()]
        for key, shapes in out.items()
    }
    return {key: tuple(sorted(table)) for key, table in rows.items()}


def join_curves(first: Figures, second: Figures, outside: bool = False) -> Figures:
    """Merge figures, preferring `first`; outside: of `second`, only sizes at least a factor of 2 outside those of
    `first`."""
    out = {key: dict(sizes) for key, sizes in first.items()}
    for key, sizes in second.items():
        have = out.setdefault(key, {})
        low, high = (min(have) / 2, max(have) * 2) if outside and have else (math.inf, -math.inf)
        for size, each in sizes.items():
            if not (outside and low <= size <= high):
                have.setdefault(size, each)
    return out
