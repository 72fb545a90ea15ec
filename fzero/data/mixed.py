"""The rows of a mixture of corpora: which corpus a row is of is a closed form of its number (fzero/data/interleave.py),
and which of the corpus' rows follows from how many of its rows came before: each keeps its order and its epochs.

So the rows of a step are a pure function of (the mixture, the step), whatever the mesh and the resumes, and of each
corpus every row comes once in an epoch of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.kinds import expect_fields
from fzero.data.assemble import Batch, assemble
from fzero.data.interleave import Stretch, source_of, stretches_of
from fzero.data.mixture import Mixture
from fzero.data.remote import RemoteTokens
from fzero.data.stream import Rest, TokenStream, even_batches

SOURCES = "sources"  # the entry of a batch: bool [B, sources], True for the source of a row


class MixedRest(NamedTuple):
    """What is left to read of a mixture's corpora, as `MixedStream.rest_after` gives it."""

    rests: tuple[Rest, ...]
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
    rest: MixedRest | None = None

    def __post_init__(self) -> None:
        expect_fields(self)
        if len(self.streams) != len(self.mixture.sources) or len({one.seq_len for one in self.streams}) != 1:
            lengths = ", ".join(str(one.seq_len) for one in self.streams)
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
    def stretches(self) -> list[Stretch]:
        """The stretches of rows that are dealt alike."""
        before = 0 if self.rest is None else self.rest.tokens
        periods = [(-(-(token - before) // self.seq_len), weights) for token, weights in self.mixture.periods()]
        return stretches_of(periods, [self.most(i) for i in range(len(self.streams))])

    def most(self, source: int) -> int | None:
        """The rows that a source has to give; None for no end."""
        its, stream, rest = self.mixture.sources[source], self.streams[source], self.rest
        found = list[int]()
        if its.epochs is not None:
            begun = 0 if rest is None else rest.rests[source].epoch + 1
            whole = (its.epochs - begun) * stream.samples_per_epoch
            found.append(len(stream.first_rows) + int(whole // 1))
        if its.tokens is not None:
            found.append((its.tokens - (0 if rest is None else rest.read[source])) // self.seq_len)
        return max(0, min(found)) if found else None

    @property
    def rows(self) -> int | None:
        """The rows of all sources together; None if they have no end."""
        last = self.stretches[-1]
        return last.begin if last.tree is None else None

    def stretch_at(self, row: int) -> Stretch:
        """The stretch that a row is of."""
        return next(one for one in reversed(self.stretches) if one.begin <= row)

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows are of each source."""
        return self.stretch_at(rows).counts(rows)

    def source_rows(self, first: int, count: int) -> list[SourceRow]:
        """Where each of these samples is from."""
        if self.rows is not None and first + count > self.rows:
            raise ValueError(
                f"the mixture has {self.rows:,} rows of {self.seq_len} tokens, as its sources end after their epochs "
                f"or tokens, and row {first + count:,} is asked for; raise their limits, or take fewer steps"
            )
        found = []
        for row in range(first, first + count):
            stretch = self.stretch_at(row)
            assert stretch.tree is not None  # rows of the end are refused above
            source, before = source_of(stretch.tree, row - stretch.begin)
            found.append(SourceRow(source, stretch.given[source] + before))
        return found

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def parts_of(self, first: int, count: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        """(the source of each of these samples, (source, its first sample, how many) for each that has some)."""
        rows = self.source_rows(first, count)
        of = np.array([row.source for row in rows])
        counts = zip(*np.unique(of, return_counts=True))
        firsts = {row.source: row.number for row in reversed(rows)}  # a source's are one after the other
        return of, [(int(source), firsts[int(source)], int(n)) for source, n in counts]

    def begin(self, first: int, count: int) -> bool:
        """Begin to fetch what these samples read of sources in object stores; returns whether all of it is on its
        way."""
        if not any(isinstance(stream.tokens.tokens, RemoteTokens) for stream in self.streams):
            return True
        return all(self.streams[source].begin(number, n) for source, number, n in self.parts_of(first, count)[1])

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch."""
        of, pieces = self.parts_of(first, count)
        parts = [self.streams[source].samples_at(number, n) for source, number, n in pieces]
        # The rows of all parts, source by source, back in the order of the batch.
        back = torch.from_numpy(np.argsort(np.argsort(of, kind="stable"), kind="stable"))
        joined = {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}
        return joined | {SOURCES: self.marked(of)}

    def marked(self, of: np.ndarray) -> Tensor:
        """bool [B, sources] of the numbers of sources [B]."""
        return torch.from_numpy(of[:, None] == np.arange(len(self.streams)))

    def rest_after(self, samples: int) -> MixedRest:
        """What is left to read after so many samples: the `rest` of a mixture that goes on from there."""
        counts, before = self.counts(samples), self.rest
        was = (0,) * len(counts) if before is None else before.read
        return MixedRest(
            tuple(stream.rest_after(count) for stream, count in zip(self.streams, counts)),
            (0 if before is None else before.tokens) + samples * self.seq_len,
            tuple(old + count * self.seq_len for old, count in zip(was, counts)),
        )

    def eval_batches(self, most: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) rows, unshuffled, as `fzero.data.eval_batches` gives them: equally many of each
        source, as far as it has them, evenly spaced."""
        available = [len(stream.rows) for stream in self.streams]
        wanted = even_shares(available, sum(available) if most is None else most)
        pairs = [(s, i * n // m) for s, (n, m) in enumerate(zip(available, wanted)) for i in range(m)]
        table = np.array(pairs)

        def batch_of(numbers: np.ndarray, real: np.ndarray) -> Batch:
            of, rows = table[numbers].T
            parts = [
                assemble(self.streams[s].tokens, self.streams[s].rows.positions(rows[of == s]))
                for s in np.unique(of).tolist()
            ]  # pairs are source by source, so that the parts are in the order of the batch
            out = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None], SOURCES: self.marked(of)}

        return even_batches(len(pairs), self.batch, None, share, batch_of)


def even_shares(available: Sequence[int], most: int) -> list[int]:
    """How many of at most `most` things each gives: equally many, as far as it has them, the first ones one more.

    >>> even_shares([1, 9, 9], 8)
    [1, 4, 3]
    """
    found, left = [0] * len(available), most
    while left and any(f < a for f, a in zip(found, available)):
        open_ = [i for i, (f, a) in enumerate(zip(found, available)) if f < a]
        each = max(1, min(left // len(open_), min(available[i] - found[i] for i in open_)))
        for i in open_[:left]:
            found[i] += each
            left -= each
    return found
