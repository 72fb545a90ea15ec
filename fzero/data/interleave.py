"""Which of several sources a row of a mixture is of: a closed form of the row's number and the weights.

Two sources of weights c and 1 - c: among the first m rows are floor(c m + 1/2) of the first one, which rises by 0 or 1
a row and is never more than half a row from its share. More sources are leaves of a binary tree whose inner nodes deal
the rows that come to them to their two sides in that way. The tree is Huffman's, so that the products of shares along a
path fall fast, and what the nodes of a path are off adds up to less than two rows, however many sources there are. All
numbers are whole or fractions of whole numbers, so that no row is ever rounded to another source.
Ref: Beatty 1926, American Mathematical Monthly 33(3), problem 3173; Huffman 1952, Proceedings of the IRE 40(9).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Node:
    """Two sides that the rows of a node are dealt to; a side is a node or the number of a source.

    Of the first m rows (times * m + plus) // over go to the left, at least 0 and at most m.
    """

    left: Node | int
    right: Node | int
    times: int
    plus: int
    over: int

    def on_left(self, rows: int) -> int:
        """How many of the first `rows` rows go to the left."""
        return min(rows, max(0, (self.times * rows + self.plus) // self.over))


def tree_of(weights: Sequence[Fraction], owed: Sequence[Fraction]) -> Node | int:
    """The tree that deals rows by these weights, of which one is above 0, to the sources with a weight.

    owed: by how many rows each source is behind its share, or, below 0, ahead of it. The first rows make that up.

    >>> tree = tree_of([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], [Fraction(0)] * 3)
    >>> [source_of(tree, row)[0] for row in range(8)]
    [0, 1, 0, 2, 0, 1, 0, 2]
    """
    order = itertools.count()  # equal weights by their numbers
    heap: list[tuple[Fraction, int, Fraction, Node | int]] = [
        (weight, next(order), owed[i], i) for i, weight in enumerate(weights) if weight > 0
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, owed_a, left), (b, _, owed_b, right) = heapq.heappop(heap), heapq.heappop(heap)
        share = a / (a + b)
        plus = Fraction(1, 2) + owed_a - share * (owed_a + owed_b)
        over = math.lcm(share.denominator, plus.denominator)
        node = Node(left, right, int(share * over), int(plus * over), over)
        heapq.heappush(heap, (a + b, next(order), owed_a + owed_b, node))
    return heap[0][3]


def source_of(tree: Node | int, row: int) -> tuple[int, int]:
    """(the source of a row, how many rows before it are of the same one)."""
    while isinstance(tree, Node):
        before = tree.on_left(row)
        if tree.on_left(row + 1) > before:
            tree, row = tree.left, before
        else:
            tree, row = tree.right, row - before
    return tree, row


def counts_of(tree: Node | int, rows: int, sources: int) -> list[int]:
    """How many of the first `rows` rows are of each source."""
    found, open_ = [0] * sources, [(tree, rows)]
    while open_:
        node, its = open_.pop()
        if isinstance(node, Node):
            left = node.on_left(its)
            open_ += [(node.left, left), (node.right, its - left)]
        else:
            found[node] = its
    return found


@dataclass(frozen=True)
class Stretch:
    """Rows that are dealt by one tree."""

    begin: int  # the first row
    given: tuple[int, ...]  # rows of each source before it
    tree: Node | int | None  # None: all sources are used up

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows of all, at least `begin`, are of each source."""
        if self.tree is None:
            return list(self.given)
        here = counts_of(self.tree, rows - self.begin, len(self.given))
        return [before + found for before, found in zip(self.given, here)]


def stretches_of(
    periods: Sequence[tuple[int, Sequence[Fraction]]], most: Sequence[int | None], largest: int = 1 << 62
) -> list[Stretch]:
    """The stretches of all rows: a new one begins with every period, and where a source is used up.

    periods: (first row, the weights from there on), the first at row 0, in rising order. most: the rows that each
    source has to give, None for no end; when they are given the others share its weight. Where no source with a weight
    is left the last stretch has no tree. Each begins with what the one before it was off, so deviations do not add up.
    """
    starts, found = [max(0, row) for row, _ in periods], list[Stretch]()
    given, owed, begin, at = [0] * len(most), [Fraction(0)] * len(most), 0, 0
    while True:
        while at + 1 < len(periods) and starts[at + 1] <= begin:
            at += 1
        left = [None if m is None else m - g for m, g in zip(most, given)]
        weights = [Fraction(0) if rest == 0 else Fraction(w) for w, rest in zip(periods[at][1], left)]
        total = sum(weights)
        if not total:
            return [*found, Stretch(begin, tuple(given), None)]
        shares = [w / total for w in weights]
        tree = tree_of(shares, owed)
        found.append(Stretch(begin, tuple(given), tree))
        end = starts[at + 1] if at + 1 < len(periods) else largest
        rows = rows_until_used(tree, end - begin, left)
        if begin + rows >= largest:
            return found
        counts = counts_of(tree, rows, len(most))
        given = [g + c for g, c in zip(given, counts)]
        owed = [o + s * rows - c if s else o for o, s, c in zip(owed, shares, counts)]
        # A source that has given all is owed nothing any more: its part is the others' from here on.
        owed = [Fraction(0) if m is not None and g >= m else o for o, m, g in zip(owed, most, given)]
        begin += rows


def rows_until_used(tree: Node | int, rows: int, left: Sequence[int | None]) -> int:
    """The rows, at most `rows`, after which the first source has given what is left of it."""

    def used(n: int) -> bool:
        return any(rest is not None and rest > 0 and c >= rest for c, rest in zip(counts_of(tree, n, len(left)), left))

    if not used(rows):
        return rows
    low, high = 0, rows  # used(high), not used(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if used(middle) else (middle, high)
    return high
