"""Rows of a layer that can be read, written, summed and updated apart, wherever a leaf rests and whatever its dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

PAGE = 4096  # bytes: what a direct transfer to or from a disk begins and ends at
MOST = 1 << 22  # elements of a piece


def pieces(shape: tuple[int, ...], most: int = MOST) -> list[tuple[int, int]]:
    """Ranges of the first dim of a layer of `shape`, of at most about `most` elements each, that begin at pages in every dtype."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if rows * row <= most:
        return [(0, rows)]
    step = PAGE // math.gcd(PAGE, row)
    length = max(step, most // row // step * step)
    return [(at, min(at + length, rows)) for at in range(0, rows, length)]


def walk(x: Any, stacked: bool) -> Iterator[tuple[int, Tensor]]:
    """(layer, rows of it) for all pieces of a leaf, in order: a tensor, or one that streams itself by a method of this name."""
    if not isinstance(x, Tensor):
        yield from x.walk()
        return
    for i, layer in enumerate(x if stacked else [x]):
        for start, end in pieces(tuple(layer.shape)):
            yield i, layer[start:end] if layer.dim() else layer
