"""Documents of like length together: batches of a few shapes, each of about as many tokens.

A batch has B T positions. Its rows are of one length L that divides T: B T / L rows, each with one document, or a piece
of one longer than T. In each epoch those of a length are drawn in another order and cut into batches; what is left over
goes to the next length, and the last batch is filled up with rows that count nowhere.

Ref: Khomenko et al. 2016, "Accelerating recurrent neural network training using sequence bucketing and multi-GPU data
parallelization", arXiv:1708.05604, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fzero.core import prng
from fzero.core.arguments import expect_fields
from fzero.data.packing import FILL, Batch, assemble, cut, fetch, sparse, within_documents
from fzero.data.token_stream import DRAWN, shuffled
from fzero.data.tokens import Tokens


class BatchPosition(NamedTuple):
    """Where a batch is."""

    epoch: int
    bucket: int  # the number of its length
    rows: int  # those of its length in the epoch before it


class Size(NamedTuple):
    """The size of a batch."""

    sequences: int
    tokens: int  # positions that are not filled up


@dataclass(frozen=True, eq=False)
class BucketStream:
    """Shuffled batches of rows of like length; `samples_at` depends on these values and its arguments only.

    A sample is a row of T positions, or the T / L rows of L that take its place, so that a batch is B samples of any
    length. A batch is one of TokenStream's, tokens, targets, documents and mask [B T / L, L]: the mask has the targets
    within a document, of a corpus of examples those that the model is to say.

    lengths: rising, each of which divides the last, T. Raises ValueError for lengths that do not, a batch below 1, and
    a corpus without a document of two tokens.

    >>> corpus = Tokens("by hand", np.arange(15, dtype=np.uint8), np.array([0, 3, 6, 10, 15]), 256, 0)
    >>> stream = BucketStream(corpus, lengths=(2, 4), batch=1)
    >>> sorted(sorted(stream.batch_at(step)["tokens"].tolist()) for step in range(3))
    [[[0, 1], [3, 4]], [[6, 7, 8, 0]], [[10, 11, 12, 13]]]
    """

    tokens: Tokens
    lengths: tuple[int, ...]
    batch: int  # B
    seed: int = 0

    def __post_init__(self) -> None:
        expect_fields(self)
        expect_lengths(self.lengths, self.seq_len)
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: wanted at least 1 sequence a step")
        if self.tokens.kind not in ("text", "chat"):
            raise ValueError(f"{self.tokens.name}: is a corpus of {self.tokens.kind}; buckets are of text, or of chat")
        if not sum(map(len, self.pieces)):
            raise ValueError(f"{self.tokens.name}: no document has two tokens, so that there is nothing to predict")

    @property
    def seq_len(self) -> int:
        """T, the positions of a sample."""
        return self.lengths[-1] if self.lengths else 0

    @functools.cached_property
    def pieces(self) -> list[np.ndarray]:
        """The ranges of positions, int64 [n, 2], of the documents of each length, as fzero/data/packing.py has them."""
        ranges = cut(within_documents(self.tokens), self.seq_len)
        bucket = np.searchsorted(self.lengths, ranges[:, 1] - ranges[:, 0])
        return [ranges[bucket == b] for b in range(len(self.lengths))]

    @functools.cached_property
    def entries(self) -> list[int]:
        """The documents that are in rows of each length in an epoch: its own, and those that the one before left."""
        counts, remainder = list[int](), 0
        for ranges, rows in zip(self.pieces, self.rows_of_batch):
            counts.append(len(ranges) + remainder)
            remainder = counts[-1] % rows
        return counts

    @functools.cached_property
    def rows_of_batch(self) -> list[int]:
        """The rows of a batch of each length."""
        return [self.batch * (self.seq_len // length) for length in self.lengths]

    @functools.cached_property
    def batches(self) -> list[int]:
        """The batches of each length in an epoch."""
        full_batches = [entries // rows for entries, rows in zip(self.entries, self.rows_of_batch)]
        return [*full_batches[:-1], -(-self.entries[-1] // self.rows_of_batch[-1])]

    @property
    def samples_per_epoch(self) -> int:
        """The samples of all batches of an epoch."""
        return sum(self.batches) * self.batch

    def batch_position(self, batch: int) -> BatchPosition:
        """Where batch number `batch` of the run is."""
        ends, epoch_batches = np.cumsum(self.batches), sum(self.batches)
        number = int(shuffled(self.seed, epoch_batches, batch, 1)[0])
        bucket = int(np.searchsorted(ends, number, side="right"))
        previous_batches = number - int(ends[bucket]) + self.batches[bucket]  # batches of its length
        return BatchPosition(batch // epoch_batches, bucket, previous_batches * self.rows_of_batch[bucket])

    def documents_of(self, epoch: int, bucket: int, indices: np.ndarray) -> np.ndarray:
        """The ranges, int64 [n, 2], of the documents at these places [n] in the order of a length in an epoch."""
        key = prng.fold_in(prng.fold_in(prng.fold_in(prng.key(self.seed), "bucket"), epoch), bucket)
        order = prng.permutation(key, self.entries[bucket], torch.from_numpy(indices)).numpy()
        is_local, out = order < len(self.pieces[bucket]), np.zeros((len(indices), 2), np.int64)
        out[is_local] = self.pieces[bucket][order[is_local]]
        if not is_local.all():
            begin = self.batches[bucket - 1] * self.rows_of_batch[bucket - 1]
            out[~is_local] = self.documents_of(epoch, bucket - 1, begin + order[~is_local] - len(self.pieces[bucket]))
        return out

    def sample_ranges(self, first: int, count: int) -> tuple[int, np.ndarray]:
        """(L, the ranges int64 [count T / L, 2]) of the rows of the samples `first` .. first + count - 1, which are of
        one batch; a row that is filled up has the range (0, 0)."""
        number, begin = divmod(first, self.batch)
        if first < 0 or count < 1 or begin + count > self.batch:
            raise ValueError(
                f"samples_at({first}, {count}): wanted first >= 0, and samples of one batch of {self.batch} "
                "(documents of one length)"
            )
        epoch, bucket, previous_rows = self.batch_position(number)
        length = self.lengths[bucket]
        rows_per_sample = self.seq_len // length
        low, high = previous_rows + begin * rows_per_sample, previous_rows + (begin + count) * rows_per_sample
        out, end = np.zeros((high - low, 2), np.int64), min(high, self.entries[bucket])
        for block in range(low // DRAWN, -(-end // DRAWN)):
            first, last = max(low, block * DRAWN), min(end, (block + 1) * DRAWN)
            block_ranges = _drawn(self, epoch, bucket, block)
            out[first - low : last - low] = block_ranges[first - block * DRAWN : last - block * DRAWN]
        return length, out

    def positions_at(self, first: int, count: int, coarse: bool = False) -> np.ndarray:
        """The positions, int64 [count T / L, L], of the rows of these samples; see fzero/data/packing.py. coarse: those
        at `sparse` places alone."""
        length, ranges = self.sample_ranges(first, count)
        positions = ranges[:, :1] + (sparse(length) if coarse else np.arange(length))
        return np.where(positions < ranges[:, 1:], positions, FILL)

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run, of one batch, as its rows."""
        positions = self.positions_at(first, count)
        out = assemble(self.tokens, positions)
        if self.tokens.loss_mask is None:
            return out
        loss_mask = self.tokens.loss_mask[np.maximum(positions, 0) + 1].astype(bool)
        return out | {"mask": out["mask"] & torch.from_numpy(loss_mask)}

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`."""
        return self.samples_at(step * self.batch, self.batch)

    def size_at(self, first: int) -> Size:
        """The size of the batch that begins with sample `first`."""
        _, ranges = self.sample_ranges(first, self.batch)
        lengths = ranges[:, 1] - ranges[:, 0]
        return Size(int((lengths > 0).sum()), int(lengths.sum()))

    def begin(self, first: int, count: int) -> bool:
        """Begin to fetch what these samples read, if the tokens are in an object store; returns whether all of it is on
        its way."""
        return fetch(self.tokens, lambda: self.positions_at(first, count, coarse=True))

    @property
    def filled(self) -> float:
        """The share of an epoch's positions that are filled up."""
        real_positions = sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in self.pieces)
        return 1 - real_positions / (self.samples_per_epoch * self.seq_len)


@functools.lru_cache(maxsize=32)
def _drawn(stream: BucketStream, epoch: int, bucket: int, block: int) -> np.ndarray:
    """The ranges of the documents from block * DRAWN on, of a length in an epoch; cached."""
    return stream.documents_of(
        epoch, bucket, np.arange(block * DRAWN, min((block + 1) * DRAWN, stream.entries[bucket]))
    )


def expect_lengths(lengths: Sequence[int], seq_len: int) -> None:
    """Raise ValueError for lengths of rows that do not rise to `seq_len`, or do not divide it."""
    rising = all(a < b for a, b in zip([0, *lengths], lengths))
    if not lengths or not rising or lengths[-1] != seq_len or any(seq_len % length for length in lengths):
        raise ValueError(
            f"the lengths of rows are {', '.join(map(str, lengths)) or 'none'}; they must rise, each divide the last, "
            f"and the last be {seq_len or 'that of a sample'}"
        )
