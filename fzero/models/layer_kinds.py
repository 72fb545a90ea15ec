"""The kinds of layers of a stack: each has its attention pattern and the base of its RoPE."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fzero.kernels.attention import Pattern

MOST_LAYERS = 100_000  # of a period


class LayerKind(NamedTuple):
    """How a layer attends. theta: the base of its RoPE, which is then not scaled; 0 for no positions, None for the
    model's.
    """

    pattern: Pattern
    theta: float | None = None

    def __str__(self) -> str:
        """The text that `parse_layers` takes."""
        return str(self.pattern) + ("" if self.theta is None else f"@{self.theta!r}".removesuffix(".0"))


def parse_layers(text: str) -> tuple[LayerKind, ...]:
    """The kinds of the layers of a period: layer i is of the kind number i modulo their count.

    text: PATTERN, PATTERN@THETA or COUNT*PATTERN@THETA, several separated by commas; a pattern as `Pattern.parse` has
    it. Raises ValueError for another text.

    >>> [str(kind) for kind in parse_layers("2*window:512@10000,full")]
    ['window:512@10000', 'window:512@10000', 'full']
    """
    kinds: list[LayerKind] = []
    for entry in text.split(","):
        form = re.fullmatch(r"(?:(\d{1,6})\*)?([^*@]*)(?:@(.+))?", entry.strip())
        if form is None:
            raise ValueError(f"pattern {entry.strip()!r} is not of the form PATTERN, PATTERN@THETA or COUNT*PATTERN")
        pattern, theta = Pattern.parse(form[2]), None if form[3] is None else _theta(form[3])
        kinds += [LayerKind(pattern, theta)] * _count(form[1])
        if len(kinds) > MOST_LAYERS:
            raise ValueError(f"pattern {text[:40]!r}... has a period of more than {MOST_LAYERS:,} layers")
    return tuple(kinds)


def _count(text: str | None) -> int:
    if text is not None and int(text) < 1:
        raise ValueError(f"pattern: COUNT is {text}; it must be at least 1")
    return 1 if text is None else int(text)


def _theta(text: str) -> float:
    try:
        theta = float(text)
    except ValueError:
        theta = math.nan
    if not 0.0 <= theta < 1e30:
        raise ValueError(f"pattern: THETA is {text!r}; it must be a number of at least 0 and below 1e30")
    return theta


def layers_text(kinds: Sequence[LayerKind]) -> str:
    """The shortest text of layers of these kinds: of one period, if they repeat.

    >>> layers_text(parse_layers("window:8,full,window:8,full,window:8"))
    'window:8,full'
    """
    runs = [(str(kind), len(list(run))) for kind, run in groupby(kinds[: _period(kinds)])]
    return ",".join(f"{count}*{kind}" if count > 1 else kind for kind, count in runs)


def _period(kinds: Sequence[LayerKind]) -> int:
    """The smallest n with kinds[i] == kinds[i % n] for all i, in one step a layer.

    Ref: Knuth, Morris & Pratt 1977, "Fast pattern matching in strings", section 2.
    """
    ends = [0] * len(kinds)  # the length of the longest beginning that ends at i, other than all up to there
    for i in range(1, len(kinds)):
        n = ends[i - 1]
        while n and kinds[i] != kinds[n]:
            n = ends[n - 1]
        ends[i] = n + (kinds[i] == kinds[n])
    return len(kinds) - ends[-1]
