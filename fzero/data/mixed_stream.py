"""The rows of a mixture of corpora: which corpus a row is of is a closed form of its number.

Which of the corpus' rows follows from how many came before: each corpus keeps its order and epochs. So the rows of a
step are a pure function of (the mixture, the step).

Of two sources of weights c and 1 - c, floor(c m + 1/2) of the first m rows are of the first one. More are leaves of a
binary tree (Huffman's, so that shares along a path fall fast) whose nodes deal rows to their two sides; deviations are
below two rows, and all numbers are whole or fractions.

Ref: Beatty 1926, American Mathematical Monthly 33(3), problem 3173; Huffman 1952, Proceedings of the IRE 40(9).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.arguments import expect_fields
from fzero.data.mixture import Mixture
from fzero.data.packing import Batch, assemble
from fzero.data.remote_tokens import RemoteTokens
from fzero.data.token_stream import EpochRemainder, TokenStream, even_batches


@dataclass(frozen=True)
class Node:
    """Two sides that rows are dealt to; of the first m, (times * m + plus) // over go to the left."""

    left_child: Node | int
    right_child: Node | int
    times: int
    plus: int
    divisor: int

    def left_rows(self, rows: int) -> int:
        """How many of the first `rows` rows go to the left."""
        return min(rows, max(0, (self.times * rows + self.plus) // self.divisor))


def tree_of(weights: Sequence[Fraction], debts: Sequence[Fraction]) -> Node | int:
    """The tree that deals rows by these weights; debts: by how many rows each source is behind its share.

    >>> tree = tree_of([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], [Fraction(0)] * 3)
    >>> [source_of(tree, row)[0] for row in range(8)]
    [0, 1, 0, 2, 0, 1, 0, 2]
    """
    order = itertools.count()  # equal weights by their numbers
    heap: list[tuple[Fraction, int, Fraction, Node | int]] = [
        (weight, next(order), debts[i], i) for i, weight in enumerate(weights) if weight > 0
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, debt_a, left_child), (b, _, debt_b, right_child) = heapq.heappop(heap), heapq.heappop(heap)
        share = a / (a + b)
        plus = Fraction(1, 2) + debt_a - share * (debt_a + debt_b)
        divisor = math.lcm(share.denominator, plus.denominator)
        node = Node(left_child, right_child, int(share * divisor), int(plus * divisor), divisor)
        heapq.heappush(heap, (a + b, next(order), debt_a + debt_b, node))
    return heap[0][3]


def source_of(tree: Node | int, row: int) -> tuple[int, int]:
    """(the source of a row, how many rows before it are of the same one)."""
    while isinstance(tree, Node):
        left_count = tree.left_rows(row)
        if tree.left_rows(row + 1) > left_count:
            tree, row = tree.left_child, left_count
        else:
            tree, row = tree.right_child, row - left_count
    return tree, row


def counts_of(tree: Node | int, rows: int, sources: int) -> list[int]:
    """How many of the first `rows` rows are of each source."""
    counts, open_ = [0] * sources, [(tree, rows)]
    while open_:
        node, node_rows = open_.pop()
        if isinstance(node, Node):
            left_count = node.left_rows(node_rows)
            open_ += [(node.left_child, left_count), (node.right_child, node_rows - left_count)]
        else:
            counts[node] = node_rows
    return counts


@dataclass(frozen=True)
class MixtureSegment:
    """Rows that are dealt by one tree."""

    begin: int  # the first row
    start_counts: tuple[int, ...]  # rows of each source before it
    tree: Node | int | None  # None: all sources are used up

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows of all, at least `begin`, are of each source."""
        if self.tree is None:
            return list(self.start_counts)
        segment_counts = counts_of(self.tree, rows - self.begin, len(self.start_counts))
        return [start_count + count for start_count, count in zip(self.start_counts, segment_counts)]


def mixture_segments(
    periods: Sequence[tuple[int, Sequence[Fraction]]], limits: Sequence[int | None], largest: int = 1 << 62
) -> list[MixtureSegment]:
    """The stretches of all rows: a new one begins with every period, and where a source is used up."""
    starts, segments = [max(0, row) for row, _ in periods], list[MixtureSegment]()
    consumed, debts, begin, period = [0] * len(limits), [Fraction(0)] * len(limits), 0, 0
    while True:
        while period + 1 < len(periods) and starts[period + 1] <= begin:
            period += 1
        remaining = [None if m is None else m - g for m, g in zip(limits, consumed)]
        weights = [
            Fraction(0) if remainder == 0 else Fraction(w) for w, remainder in zip(periods[period][1], remaining)
        ]
        total = sum(weights)
        if not total:
            return [*segments, MixtureSegment(begin, tuple(consumed), None)]
        shares = [w / total for w in weights]
        tree = tree_of(shares, debts)
        segments.append(MixtureSegment(begin, tuple(consumed), tree))
        end = starts[period + 1] if period + 1 < len(periods) else largest
        rows = rows_to_exhaustion(tree, end - begin, remaining)
        if begin + rows >= largest:
            return segments
        counts = counts_of(tree, rows, len(limits))
        consumed = [g + c for g, c in zip(consumed, counts)]
        debts = [o + s * rows - c if s else o for o, s, c in zip(debts, shares, counts)]
        # A source that has given all is owed nothing any more: its part is the others' from here on.
        debts = [Fraction(0) if m is not None and g >= m else o for o, m, g in zip(debts, limits, consumed)]
        begin += rows


def rows_to_exhaustion(tree: Node | int, rows: int, remaining: Sequence[int | None]) -> int:
    """The rows, at most `rows`, after which the first source has given what is left of it."""

    def used(n: int) -> bool:
        return any(
            limit is not None and limit > 0 and c >= limit
            for c, limit in zip(counts_of(tree, n, len(remaining)), remaining)
        )

    if not used(rows):
        return rows
    low, high = 0, rows  # used(high), not used(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if used(middle) else (middle, high)
    return high


SOURCES = "sources"  # the entry of a batch: bool [B, sources], True for the source of a row


class MixedRemainder(NamedTuple):
    """What is left to read of a mixture's corpora, as `MixedStream.remainder_after` gives it."""

    remainders: tuple[EpochRemainder, ...]
    tokens: int  # positions of the run before
    read: tuple[int, ...]  # of those, each source's


class SourceRow(NamedTuple):
    """A row of a mixture."""

    source: int
    number: int  # of the source's samples


@dataclass(frozen=True, eq=False)
class MixedStream:
    """Shuffled rows of several corpora in proportion; `batch_at` and `samples_at` depend on these values and their
    arguments only.

    At every row the rows that each source has given differ from what its weights add up to by less than two. Each
    source is a TokenStream of its own, with its own order and epochs. A batch is one of TokenStream, and has
    `sources`, bool [B, sources]: of which source each row is.

    Raises ValueError for streams that are not the mixture's, and if a row is asked for after all sources have given
    what they may.

    >>> from fzero.data.tokens import Tokens
    >>> docs = np.array([0, 12])
    >>> texts = [TokenStream(Tokens(name, np.arange(12, dtype=np.uint8), docs, 256, 0), 2, 1) for name in ("a", "b")]
    >>> mixed = MixedStream(Mixture.parse("a:0.75,b:0.25"), tuple(texts), batch=4)
    >>> mixed.batch_at(0)["sources"].sum(0).tolist(), mixed.counts(400)
    ([3, 1], [300, 100])
    """

    mixture: Mixture
    streams: tuple[TokenStream, ...]
    batch: int
    remainder: MixedRemainder | None = None

    def __post_init__(self) -> None:
        expect_fields(self)
        if len(self.streams) != len(self.mixture.sources) or len({stream.seq_len for stream in self.streams}) != 1:
            lengths = ", ".join(str(stream.seq_len) for stream in self.streams)
            raise ValueError(
                f"the mixture has {len(self.mixture.sources)} sources and {len(self.streams)} streams, of rows "
                f"of {lengths or 'nothing'}; give a stream for each, all of one seq_len"
            )
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: wanted at least 1 sequence a step")

    @property
    def seq_len(self) -> int:
        """T, the tokens of a row."""
        return self.streams[0].seq_len

    @functools.cached_property
    def segments(self) -> list[MixtureSegment]:
        """The stretches of rows that are dealt alike."""
        start_tokens = 0 if self.remainder is None else self.remainder.tokens
        periods = [(-(-(token - start_tokens) // self.seq_len), weights) for token, weights in self.mixture.periods()]
        return mixture_segments(periods, [self.row_limit(i) for i in range(len(self.streams))])

    def row_limit(self, source: int) -> int | None:
        """The rows that a source has to give; None for no end."""
        limits, stream, remainder = self.mixture.sources[source], self.streams[source], self.remainder
        bounds = list[int]()
        if limits.epochs is not None:
            epoch = 0 if remainder is None else remainder.remainders[source].epoch + 1
            full_rows = (limits.epochs - epoch) * stream.samples_per_epoch
            bounds.append(len(stream.first_rows) + int(full_rows // 1))
        if limits.tokens is not None:
            bounds.append((limits.tokens - (0 if remainder is None else remainder.read[source])) // self.seq_len)
        return max(0, min(bounds)) if bounds else None

    @property
    def rows(self) -> int | None:
        """The rows of all sources together; None if they have no end."""
        last = self.segments[-1]
        return last.begin if last.tree is None else None

    def segment_at(self, row: int) -> MixtureSegment:
        """The stretch that a row is of."""
        return next(segment for segment in reversed(self.segments) if segment.begin <= row)

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows are of each source."""
        return self.segment_at(rows).counts(rows)

    def source_rows(self, first: int, count: int) -> list[SourceRow]:
        """Where each of these samples is from."""
        if self.rows is not None and first + count > self.rows:
            raise ValueError(
                f"the mixture has {self.rows:,} rows of {self.seq_len} tokens, as its sources end after their epochs "
                f"or tokens, and row {first + count:,} is asked for; raise their limits, or take fewer steps"
            )
        row_list = []
        for row in range(first, first + count):
            segment = self.segment_at(row)
            assert segment.tree is not None  # rows of the end are refused above
            source, segment_row = source_of(segment.tree, row - segment.begin)
            row_list.append(SourceRow(source, segment.start_counts[source] + segment_row))
        return row_list

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def source_slices(self, first: int, count: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        """(the source of each of these samples, (source, its first sample, how many) for each that has some)."""
        rows = self.source_rows(first, count)
        row_sources = np.array([row.source for row in rows])
        counts = zip(*np.unique(row_sources, return_counts=True))
        firsts = {row.source: row.number for row in reversed(rows)}  # a source's are one after the other
        return row_sources, [(int(source), firsts[int(source)], int(n)) for source, n in counts]

    def begin(self, first: int, count: int) -> bool:
        """Begin to fetch what these samples read of sources in object stores; returns whether all of it is on its
        way."""
        if not any(isinstance(stream.tokens.tokens, RemoteTokens) for stream in self.streams):
            return True
        return all(self.streams[source].begin(number, n) for source, number, n in self.source_slices(first, count)[1])

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch."""
        row_sources, pieces = self.source_slices(first, count)
        parts = [self.streams[source].samples_at(number, n) for source, number, n in pieces]
        # The rows of all parts, source by source, back in the order of the batch.
        order = torch.from_numpy(np.argsort(np.argsort(row_sources, kind="stable"), kind="stable"))
        joined = {name: torch.cat([batch[name] for batch in parts])[order] for name in parts[0]}
        return joined | {SOURCES: self.source_mask(row_sources)}

    def source_mask(self, row_sources: np.ndarray) -> Tensor:
        """bool [B, sources] of the numbers of sources [B]."""
        return torch.from_numpy(row_sources[:, None] == np.arange(len(self.streams)))

    def remainder_after(self, samples: int) -> MixedRemainder:
        """What is left to read after so many samples: the `rest` of a mixture that goes on from there."""
        counts, previous = self.counts(samples), self.remainder
        previous_read = (0,) * len(counts) if previous is None else previous.read
        return MixedRemainder(
            tuple(stream.remainder_after(count) for stream, count in zip(self.streams, counts)),
            (0 if previous is None else previous.tokens) + samples * self.seq_len,
            tuple(old + count * self.seq_len for old, count in zip(previous_read, counts)),
        )

    def eval_batches(self, max_rows: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) rows, unshuffled, as `fzero.data.eval_batches` gives them: equally many of each
        source, as far as it has them, evenly spaced."""
        available = [len(stream.rows) for stream in self.streams]
        quotas = even_shares(available, sum(available) if max_rows is None else max_rows)
        pairs = [(s, i * n // m) for s, (n, m) in enumerate(zip(available, quotas)) for i in range(m)]
        table = np.array(pairs)

        def batch_of(numbers: np.ndarray, real: np.ndarray) -> Batch:
            row_sources, rows = table[numbers].T
            parts = [
                assemble(self.streams[s].tokens, self.streams[s].rows.positions(rows[row_sources == s]))
                for s in np.unique(row_sources).tolist()
            ]  # pairs are source by source, so that the parts are in the order of the batch
            out = {name: torch.cat([batch[name] for batch in parts]) for name in parts[0]}
            return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None], SOURCES: self.source_mask(row_sources)}

        return even_batches(len(pairs), self.batch, None, share, batch_of)


def even_shares(available: Sequence[int], limit: int) -> list[int]:
    """How many of at most `limit` things each gives, as evenly as they go.

    >>> even_shares([1, 9, 9], 8)
    [1, 4, 3]
    """
    shares, remaining = [0] * len(available), limit
    while remaining and any(f < a for f, a in zip(shares, available)):
        open_ = [i for i, (f, a) in enumerate(zip(shares, available)) if f < a]
        increment = max(1, min(remaining // len(open_), min(available[i] - shares[i] for i in open_)))
        for i in open_[:remaining]:
            shares[i] += increment
            remaining -= increment
    return shares
