"""Bounds of numbers: refused outside of them, by name, value and what is allowed."""

from __future__ import annotations

import math

INF = math.inf
Bounds = tuple[float, bool, float]  # the lower bound, whether it is allowed, and the upper bound, which is not
POSITIVE: Bounds = (0.0, False, INF)
COUNT: Bounds = (0, True, INF)
RATE: Bounds = (0.0, True, INF)
FRACTION: Bounds = (0.0, True, 1.0)
SIZE: Bounds = (1, True, INF)


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """Raise ValueError if `value` is outside of `bounds`, or not a number.

    >>> check_bounds("lr", -1.0, RATE)
    Traceback (most recent call last):
    ValueError: lr is -1.0; it must be at least 0
    """
    low, included, high = bounds
    if not (low <= value if included else low < value) or not value < high:
        most = "2^64" if high == 2**64 else f"{high:g}"
        above = f" and below {most}" if high < INF else "" if math.isfinite(value) else ", and a finite number"
        raise ValueError(f"{name} is {value!r}; it must be {'at least' if included else 'above'} {low:g}{above}")
