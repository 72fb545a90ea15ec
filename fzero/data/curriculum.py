"""An order of a corpus' rows in which easy ones come first: each row once in an epoch, all the same.

A curriculum allows, at a step, the rows whose number (fzero/data/analysis.py) is among the lowest part. The next row is
any of those that are allowed and not yet read; where all are read, the easiest one left is allowed too. So an order is
a function of (the numbers, the schedule, the seed, the epoch).

Ref: Li et al. 2022, "DeepSpeed data efficiency", arXiv:2212.03597, section 3.1, whose schedules these are; there rows
are drawn again when the allowed ones are used up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fzero.core import prng
from fzero.core.arguments import expect_fields

FORM = (
    "a schedule is linear, root:DEGREE, or discrete:PART@WHEN,... with parts of the rows from parts of the curriculum "
    "on, such as discrete:0.3@0.25,0.6@0.5"
)
MOST_DEGREE = 64  # of a root: beyond it a schedule is a step
DRAWN = 1 << 16  # samples whose random words are drawn together


class Piece(NamedTuple):
    """Samples that steps of one size consume."""

    first: int  # sample
    begin: int  # progress (steps or tokens of the run) before the step of that sample
    batch: int  # samples of a step
    step_progress: int  # progress of a step


@dataclass(frozen=True)
class Growth:
    """The part of the rows that is allowed, from `start` at first to all after `length` (steps or tokens).

    root:r has start + (1 - start) (progress / length)^(1 / r), linear is root:1, discrete has the parts that are given,
    each from a part of the length on. Numbers of rows are exact, so that they are the same on every machine.

    Raises ValueError for a text that is no schedule, and a start or length out of range.

    >>> [Growth("linear", Fraction("0.1"), 10).allowed(1000, progress) for progress in (0, 5, 10)]
    [100, 550, 1000]
    >>> [Growth("root:2", Fraction("0.1"), 100).allowed(1000, progress) for progress in (0, 25, 100)]
    [100, 550, 1000]
    """

    schedule: str
    start: Fraction
    length: int

    def __post_init__(self) -> None:
        expect_fields(self)
        if not 0 < self.start <= 1:
            raise ValueError(f"curriculum_start is {float(self.start):g}; it must be above 0 and at most 1")
        if self.length < 1:
            raise ValueError(f"the curriculum's length is {self.length}; it must be 1 or more")
        if self.degree == 0:
            parts = [self.start, *(fraction for fraction, _ in self.steps), Fraction(1)]
            whens = [Fraction(0), *(start for _, start in self.steps), Fraction(1)]
            if any(a >= b for a, b in pairwise(whens)) or any(a > b for a, b in pairwise(parts)):
                raise ValueError(
                    f"curriculum_schedule is {self.schedule!r}; its parts rise from curriculum_start={self.start} to "
                    "1, each from a later part of the curriculum on, above 0 and below 1"
                )

    @functools.cached_property
    def degree(self) -> int:
        """The degree of the root; 0 for given parts."""
        name, _, argument = self.schedule.partition(":")
        if self.schedule == "linear":
            return 1
        if name == "root" and argument.isdecimal() and 1 <= int(argument) <= MOST_DEGREE:
            return int(argument)
        if name == "discrete" and argument:
            return 0
        raise ValueError(f"curriculum_schedule is {self.schedule!r}; {FORM}")

    @functools.cached_property
    def steps(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """(part of the rows, part of the length from which it is allowed) of each step of a discrete schedule."""
        pairs = []
        for text in self.schedule.partition(":")[2].split(","):
            fraction, _, start = text.partition("@")
            try:
                pairs.append((Fraction(fraction), Fraction(start)))
            except (ValueError, ZeroDivisionError):
                raise ValueError(f"curriculum_schedule is {self.schedule!r}: {text!r} is no part; {FORM}") from None
        return tuple(pairs)

    def allowed(self, rows: int, progress: int) -> int:
        """How many of the rows are allowed after so much progress, at least one."""
        if progress >= self.length:
            return rows
        min_rows = max(1, math.ceil(self.start * rows))
        if self.degree == 0:
            fractions = [fractions for fractions, start in self.steps if start * self.length <= progress]
            return max(min_rows, math.ceil(fractions[-1] * rows)) if fractions else min_rows
        growable, r = rows - min_rows, self.degree
        target = progress * growable**r  # the smallest x with x^r * length >= wanted
        x = min(growable, int(growable * (progress / self.length) ** (1 / r)))
        while x**r * self.length < target:
            x += 1
        while x and (x - 1) ** r * self.length >= target:
            x -= 1
        return min_rows + x


@dataclass(frozen=True, eq=False)
class Curriculum:
    """The order of a stream's rows by a growth over their numbers.

    ranked: the rows from the easiest on, int32 [S]; those of one number in their own order. pieces: which
    progress a sample is read at, in rising order, the first at sample 0. An epoch that begins before all rows are
    allowed is drawn once on every rank, in a second for a million rows; an order takes 4 bytes a row, of which two are
    kept.

    >>> values = np.array([3.0, 1.0, 2.0, 0.0], np.float32)
    >>> own = Curriculum(rank(values), Growth("linear", Fraction("0.5"), 4), (Piece(0, 0, 1, 1),))
    >>> sorted(own.numbers(0, 0, 0, 2).tolist()), sorted(own.numbers(0, 0, 0, 4).tolist())
    ([1, 3], [0, 1, 2, 3])
    """

    ranked: np.ndarray
    growth: Growth
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        expect_fields(self)

    @classmethod
    def by_values(cls, values: np.ndarray, growth: Growth, pieces: tuple[Piece, ...]) -> Curriculum:
        """The order of rows that have these numbers."""
        return cls(rank(values), growth, pieces)

    def sample_progress(self, samples: np.ndarray) -> np.ndarray:
        """The progress before the step that each of these samples is of, int64."""
        firsts, begins, batches, step_progress = np.array(self.pieces, np.int64).T
        index = np.searchsorted(firsts, samples, side="right") - 1
        return begins[index] + (samples - firsts[index]) // batches[index] * step_progress[index]

    def allowed_rows(self, samples: np.ndarray) -> np.ndarray:
        """How many rows are allowed at each of these samples of the stream, in rising order; int64."""
        progress, counts = np.unique(self.sample_progress(samples), return_counts=True)
        return np.repeat([self.growth.allowed(len(self.ranked), step) for step in progress.tolist()], counts)

    def complete(self, epoch: int) -> bool:
        """Whether all rows are allowed from the beginning of this epoch on."""
        first = np.array([epoch * len(self.ranked)])
        return int(self.allowed_rows(first)[0]) == len(self.ranked)

    def numbers(self, seed: int, epoch: int, begin: int, end: int) -> np.ndarray:
        """The rows of the samples [begin, end) of an epoch, int64."""
        return _order(self, seed, epoch)[begin:end].astype(np.int64)


def rank(values: np.ndarray) -> np.ndarray:
    """The rows from the lowest number on, int32 [S]. Raises ValueError for 2^31 rows and more.

    >>> rank(np.array([3.0, 1.0, 1.0], np.float32)).tolist()
    [1, 2, 0]
    """
    if len(values) >= 1 << 31:
        raise ValueError(f"a curriculum orders fewer than 2^31 rows, and there are {len(values):,}")
    return np.argsort(values, kind="stable").astype(np.int32)


@functools.lru_cache(maxsize=2)
def _order(curriculum: Curriculum, seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch in the order that they are read: Durstenfeld's shuffle (1964) of a growing pile."""
    size, key = len(curriculum.ranked), prng.fold_in(prng.fold_in(prng.key(seed), "curriculum"), epoch)
    places = np.arange(size, dtype=np.int32)  # those from n on and below what is allowed are the pile
    view = memoryview(places)
    for begin in range(0, size, DRAWN):
        n = np.arange(begin, min(size, begin + DRAWN))
        pile = np.maximum(curriculum.allowed_rows(epoch * size + n), n + 1) - n
        words = prng.bits(key, (len(n),), first=begin).numpy()
        for i, j in zip(n.tolist(), (n + (words * pile >> 32)).tolist()):
            view[i], view[j] = view[j], view[i]
    return curriculum.ranked[places]
