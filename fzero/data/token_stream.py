"""Batches as a pure function of (seed, step): the only state of the data is a number, the samples seen so far.

Windows of text, or rows of whole documents: conversations share a row as far as they fit, and a token attends to its
own document only. The two answers of a pair stand in one row.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.arguments import checked, expect_fields
from fzero.core.pytree import nearest
from fzero.data.packing import PACKINGS, Batch, Packing, assemble, fetch, full_range, pack, sparse
from fzero.data.remote_tokens import IS_NEEDED
from fzero.data.tokens import Tokens

DRAWN = 4096  # samples drawn together, which takes no longer than drawing one


class EpochRemainder(NamedTuple):
    """What is left to read of an epoch, as `TokenStream.remainder_after` gives it."""

    epoch: int
    ranges: np.ndarray  # int64 [n, 2]: the positions left, see fzero/data/packing.py


@runtime_checkable
class RowOrder(Protocol):
    """An order of the rows of each epoch, such as Curriculum."""

    @property
    def ranked(self) -> np.ndarray: ...  # its rows

    def complete(self, epoch: int) -> bool:
        """Whether the order of this epoch is the permutation."""
        ...

    def numbers(self, seed: int, epoch: int, begin: int, end: int) -> np.ndarray:
        """The rows of the samples [begin, end) of an epoch, int64."""
        ...


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Shuffled rows of a corpus; `batch_at` and `samples_at` depend on these values and their arguments only.

    packing says what a row is. "stream": row w holds the tokens w T .. w T + T of the documents laid end to end, so
    every token but the first is a target once in an epoch (the last (N - 1) mod T tokens never are). "best-fit": whole
    documents, as many as fit; those of more than T + 1 tokens are cut into pieces of T targets and a shorter one. Every
    token but a document's first is a target once in an epoch, and what is left of a row is filled up with `eos`, which
    counts nowhere (see fzero/data/packing.py).

    Sample n is row permutation(n mod S) of epoch n // S, where S is the number of rows and the permutation is drawn
    from (seed, epoch): within an epoch no row comes twice, whatever the batch sizes.

    curriculum: the order of an epoch in which easy rows come first (see fzero/data/curriculum.py), None for the
    permutation.

    remainder: what another stream of the corpus left of an epoch. The first samples are the rows of that, and whole
    epochs follow: so a run goes on with another seq_len, and reads each token of that epoch once all the same.

    A batch is a dict:
        tokens     int64 [B, T]  the inputs
        targets    int64 [B, T]  the tokens one position later
        documents  int32 [B, T]  0 at first, one more at each later document start: attend within equal numbers only
        mask       bool  [B, T]  the targets that count: False where the target is the first token of the next document,
                                 which nothing before it tells; the end of a document is to be predicted and counts

    Raises ValueError for a size below 1, an unknown packing, and when the corpus is shorter than one row.

    >>> docs = np.array([0, 4, 7, 12])
    >>> corpus = Tokens("by hand", np.arange(1, 13, dtype=np.uint8), docs, 256, 0)
    >>> TokenStream(corpus, seq_len=5, batch=1, packing="best-fit").samples_per_epoch
    2
    """

    tokens: Tokens
    seq_len: int  # T
    batch: int  # B
    seed: int = 0
    packing: str = "stream"
    remainder: EpochRemainder | None = None
    curriculum: RowOrder | None = None

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: wanted at least 1 sequence a step")
        expect_rows(self.tokens, self.seq_len, self.packing)
        if self.curriculum is not None and (
            self.remainder is not None or len(self.curriculum.ranked) != len(self.rows)
        ):
            raise ValueError(
                f"the curriculum orders {len(self.curriculum.ranked):,} rows and the stream has "
                f"{'what is left of an epoch' if self.remainder is not None else f'{len(self.rows):,}'}; analyze the "
                "rows of this seq_len and packing"
            )

    @functools.cached_property
    def rows(self) -> Packing:
        """The rows of an epoch."""
        return PACKINGS[self.packing](full_range(self.tokens), self.seq_len, self.tokens)

    @functools.cached_property
    def first_rows(self) -> Packing:
        """The rows of `rest`."""
        ranges = np.zeros((0, 2), np.int64) if self.remainder is None else self.remainder.ranges
        return PACKINGS[self.packing](ranges, self.seq_len, self.tokens)

    @property
    def samples_per_epoch(self) -> int:
        """S, the number of rows."""
        return len(self.rows)

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch; [count, T] instead of [B, T].

        A run that has seen n samples resumes with samples_at(n, any count); a rank asks for its own part of a step.
        """
        return assemble(self.tokens, self.positions_at(first, count))

    def positions_at(self, first: int, count: int, places: np.ndarray | None = None) -> np.ndarray:
        """The positions, int64 [count, T], that the rows of these samples have in the corpus, as fzero/data/packing.py
        numbers them; with `places` [m], those of a row that are wanted, [count, m]."""
        _expect_samples(first, count)
        first_count, positions = len(self.first_rows), []
        if self.remainder is not None and first < first_count:
            begin = self.remainder.epoch * first_count + first
            numbers = shuffled(self.seed, first_count, begin, min(count, first_count - first))
            positions.append(self.first_rows.positions(numbers, places))
        if first + count > first_count:
            size = self.samples_per_epoch
            begin = max(first - first_count, 0) + (0 if self.remainder is None else (self.remainder.epoch + 1) * size)
            numbers = self.numbers_of(begin, first + count - max(first, first_count))
            positions.append(self.rows.positions(numbers, places))
        return np.concatenate(positions) if len(positions) > 1 else positions[0]

    def numbers_of(self, first: int, count: int) -> np.ndarray:
        """The rows, int64 [count], that the samples `first` .. first + count - 1 of whole epochs are."""
        if self.curriculum is None:
            return shuffled(self.seed, self.samples_per_epoch, first, count)
        row_numbers, size = [], self.samples_per_epoch
        for epoch in range(first // size, (first + count - 1) // size + 1):
            begin, end = max(first, epoch * size), min(first + count, (epoch + 1) * size)
            if self.curriculum.complete(epoch):
                row_numbers.append(shuffled(self.seed, size, begin, end - begin))
            else:
                row_numbers.append(self.curriculum.numbers(self.seed, epoch, begin - epoch * size, end - epoch * size))
        return np.concatenate(row_numbers)

    def begin(self, first: int, count: int) -> bool:
        """Begin to fetch what these samples read, if the tokens are in an object store; returns whether all of it is on
        its way."""
        return fetch(self.tokens, lambda: self.positions_at(first, count, sparse(self.seq_len)))

    def remainder_after(self, samples: int) -> EpochRemainder:
        """What is left to read of the epoch after so many samples: the `rest` of a stream that goes on from there.

        It draws the order of that epoch: five seconds for a million rows.

        >>> corpus = Tokens("by hand", np.arange(13, dtype=np.uint8), np.array([0, 13]), 256, 0)
        >>> before = TokenStream(corpus, seq_len=2, batch=1)
        >>> after = TokenStream(corpus, seq_len=4, batch=1, remainder=before.remainder_after(2))
        >>> read = [before.samples_at(0, 2), after.samples_at(0, 2)]
        >>> sorted(token for batch in read for token in batch["tokens"].flatten().tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        """
        first_count = len(self.first_rows)
        if self.remainder is not None and samples <= first_count:
            rows, epoch, read_count = self.first_rows, self.remainder.epoch, samples
        else:
            rows, previous_epoch = self.rows, -1 if self.remainder is None else self.remainder.epoch
            ended = max(samples - first_count - 1, 0) // len(rows)  # an epoch that is read to its end is not begun anew
            epoch, read_count = previous_epoch + 1 + ended, samples - first_count - ended * len(rows)
        read = np.zeros(len(rows), bool)
        if read_count:
            begin, is_first = epoch * len(rows), rows is self.first_rows
            numbers = (
                shuffled(self.seed, len(rows), begin, read_count) if is_first else self.numbers_of(begin, read_count)
            )
            read[numbers] = True
        return EpochRemainder(epoch, rows.unread(read))

    def eval_batches(self, max_rows: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) rows, as the function `eval_batches` gives them."""
        return even_rows(self.tokens, self.rows, self.batch, max_rows, share)


def _expect_samples(first: int, count: int) -> None:
    if first < 0 or count < 1:
        raise ValueError(f"samples_at({first}, {count}): wanted first >= 0 and count >= 1")


def shuffled(seed: int, per_epoch: int, first: int, count: int) -> np.ndarray:
    """Which of `per_epoch` things the samples first .. first + count - 1 are: each once in an epoch, shuffled."""
    _expect_samples(first, count)
    return _shuffled(seed, per_epoch, first, count) if count <= DRAWN else _draw(seed, per_epoch, first, count)


def _draw(seed: int, per_epoch: int, first: int, count: int) -> np.ndarray:
    chunks = []
    for epoch in range(first // per_epoch, (first + count - 1) // per_epoch + 1):
        begin, end = max(first - epoch * per_epoch, 0), min(first + count - epoch * per_epoch, per_epoch)
        for block in range(begin // DRAWN, (end - 1) // DRAWN + 1):
            block_rows = _drawn(seed, epoch, per_epoch, block)
            chunks.append(block_rows[max(begin - block * DRAWN, 0) : end - block * DRAWN])
    out = torch.cat(chunks).numpy()
    out.flags.writeable = False
    return out


_shuffled = functools.lru_cache(maxsize=64)(_draw)  # asked for twice: when its tokens are fetched, and when it is read


@checked()
def eval_batches(
    tokens: Tokens,
    seq_len: int,
    batch: int,
    max_windows: int | None = None,
    share: tuple[int, int] = (0, 1),
    packing: str = "stream",
) -> Iterator[Batch]:
    """The batches of min(max_windows, S) rows, unshuffled, the same ones every time; None means all S.

    The rows are evenly spaced over the corpus, because its first ones may all be one document. The last batch is
    filled up to [batch, T] with rows whose mask is all False: every batch has one shape, and sums of losses and
    counts stay right.
    share: (k, n) gives the batches k, k + n, k + 2 n, ..., filled up by such batches until all n shares have as many.
    packing: as of TokenStream.

    Raises ValueError as TokenStream does.
    """
    expect_rows(tokens, seq_len, packing)
    return even_rows(tokens, PACKINGS[packing](full_range(tokens), seq_len, tokens), batch, max_windows, share)


def even_rows(
    tokens: Tokens, rows: Packing, batch: int, max_rows: int | None, share: tuple[int, int]
) -> Iterator[Batch]:
    """The batches of min(most, all) evenly spaced rows of a corpus, as `eval_batches` says."""

    def batch_of(numbers: np.ndarray, real: np.ndarray) -> Batch:
        out = assemble(tokens, rows.positions(numbers))
        return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None]}

    return even_batches(len(rows), batch, max_rows, share, batch_of)


def even_batches(
    available: int,
    batch: int,
    max_rows: int | None,
    share: tuple[int, int],
    assemble: Callable[[np.ndarray, np.ndarray], Batch],
) -> Iterator[Batch]:
    """`assemble(numbers [batch], whether each is a sample)` of evenly spaced things, in batches."""
    if batch < 1 or (max_rows is not None and max_rows < 1):
        raise ValueError(f"batch={batch}, max_windows={max_rows}: wanted at least 1 of each")
    count = available if max_rows is None else min(max_rows, available)

    def batch_from(first: int) -> Batch:
        number = np.arange(first, first + batch)
        return assemble(np.minimum(number, count - 1) * available // count, number < count)

    index, shares = share
    return map(batch_from, range(index * batch, -(-count // (batch * shares)) * batch * shares, batch * shares))


def prefetch(
    batch_at: Callable[[int], Any], first_step: int = 0, depth: int = 2
) -> Generator[tuple[int, Any], None, None]:
    """Yield (step, batch_at(step)) for step = first_step, first_step + 1, ..., prepared by a background thread up to
    `depth` ahead.

    One more may be in preparation. An exception of batch_at is raised here, at its step, after the batches before it.
    Closing the generator ends the thread, as does dropping its last reference or ending the program; use
    `contextlib.closing`.

    >>> with contextlib.closing(prefetch(lambda step: {"step": step}, first_step=10)) as batches:
    ...     next(batches)
    (10, {'step': 10})
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: wanted at least 1 batch ahead")
    return _prefetch(batch_at, first_step, depth)


def _prefetch(batch_at: Callable[[int], Any], step: int, depth: int) -> Generator[tuple[int, Any], None, None]:
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def is_needed() -> bool:
        # A daemon thread would be killed inside a torch operation at exit, which aborts the process; an ordinary one
        # that waits would keep the program from ending. So this is an ordinary one that checks whether to end.
        return not stop.is_set() and threading.main_thread().is_alive()

    def work(step: int) -> None:
        error = None
        IS_NEEDED.set(is_needed)
        while error is None and is_needed():
            try:
                batch = batch_at(step)
            except BaseException as caught:  # raised again in the consumer
                batch, error = None, caught
            while is_needed():
                with contextlib.suppress(queue.Full):
                    ready.put((batch, error), timeout=0.05)
                    break
            step += 1

    thread = threading.Thread(target=work, args=(step,), name="fzero-prefetch")
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            yield step, batch
            step += 1
    finally:
        stop.set()
        thread.join()


def expect_rows(tokens: Tokens, seq_len: int, packing: str) -> None:
    """Raise ValueError if a corpus makes no row of so many tokens, and for an unknown packing."""
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: wanted at least 1 token")
    if packing not in PACKINGS:
        near = nearest(packing, PACKINGS)
        raise ValueError(f"packing={packing!r}{near}: it must be one of {', '.join(PACKINGS)}")
    if packing == "stream" and len(tokens.tokens) < seq_len + 1:
        raise ValueError(
            f"{tokens.name}: {len(tokens.tokens)} tokens are fewer than one window of seq_len + 1 = {seq_len + 1}; "
            f"use seq_len <= {max(len(tokens.tokens) - 1, 1)} or a larger corpus"
        )
    if packing != "stream" and not bool((np.diff(tokens.docs) > 1).any()):
        raise ValueError(f"{tokens.name}: no document has two tokens, so that there is nothing to predict")


@functools.lru_cache(maxsize=8)
def _drawn(seed: int, epoch: int, windows: int, block: int) -> Tensor:
    """The windows of the samples from block * DRAWN on, of an epoch with `windows` of them; cached."""
    index = torch.arange(block * DRAWN, min((block + 1) * DRAWN, windows))
    return prng.permutation(prng.fold_in(prng.key(seed), epoch), windows, index)


PAIRED = ("pairs", "ranked")  # the kinds of corpora in which two documents belong together


@dataclass(frozen=True, eq=False)
class RowStream:
    """Shuffled rows of a corpus of examples; a batch is one of TokenStream's, with a mask of what is to be said."""

    tokens: Tokens
    seq_len: int  # T
    batch: int  # B
    seed: int = 0
    reference: np.ndarray | None = None  # float64 [documents]

    def __post_init__(self) -> None:
        assert self.tokens.loss_mask is not None  # a corpus of examples
        _ = self.rows

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """The documents of each row."""
        lengths, group_size = np.diff(self.tokens.docs) - 1, 2 if self.tokens.kind in PAIRED else 1
        rows = pack(lengths.reshape(-1, group_size).sum(1), self.seq_len)
        return [[i * group_size + j for i in row for j in range(group_size)] for row in rows]

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch."""
        return self.assemble_rows(shuffled(self.seed, len(self.rows), first, count))

    def sample_documents(self, first: int, count: int) -> list[list[int]]:
        """The numbers of the documents in each of these samples."""
        return [self.rows[row] for row in shuffled(self.seed, len(self.rows), first, count).tolist()]

    def assemble_rows(self, rows: np.ndarray) -> Batch:
        """The rows of these numbers as one batch."""
        shape = (len(rows), self.seq_len)
        tokens, targets = np.full(shape, self.tokens.eos), np.full(shape, self.tokens.eos)
        documents, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        reference_entry = {} if self.reference is None else {"reference": np.zeros(shape)}
        for r, row in enumerate(rows.tolist()):
            offset = 0
            for number, i in enumerate(self.rows[row]):
                ids, loss_mask = self._document(i)
                end = offset + len(ids) - 1
                tokens[r, offset:end], targets[r, offset:end], mask[r, offset:end] = ids[:-1], ids[1:], loss_mask[1:]
                documents[r, offset:end] = number
                if self.reference is not None:
                    reference_entry["reference"][r, offset] = self.reference[i]
                offset = end
            documents[r, offset:] = len(self.rows[row])
        out = {"tokens": tokens, "targets": targets, "documents": documents, "mask": mask, **reference_entry}
        return {name: torch.from_numpy(leaf) for name, leaf in out.items()}

    def _document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.tokens.docs[i : i + 2].tolist()
        if self.tokens.sums is not None:
            size = self.tokens.tokens.itemsize
            self.tokens.sums.expect(np.array([start * size]), (end - start) * size)
        assert self.tokens.loss_mask is not None
        return self.tokens.tokens[start:end], self.tokens.loss_mask[start:end]

    def eval_batches(self, max_rows: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) rows, unshuffled, as `fzero.data.eval_batches` gives windows."""

        def assemble(rows: np.ndarray, real: np.ndarray) -> Batch:
            out = self.assemble_rows(rows)
            return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None]}

        return even_batches(len(self.rows), self.batch, max_rows, share, assemble)
