"""Batches as a pure function of (seed, step): the only state of the data is a number, the samples seen so far."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.arguments import checked
from fzero.core.kinds import expect_fields
from fzero.data.tokens import Tokens

Batch = dict[str, Tensor]
DRAWN = 4096  # samples drawn together, which takes no longer than drawing one


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Shuffled windows of a packed corpus; `batch_at` and `samples_at` depend on these values and their arguments only.

    Window w holds the tokens w T .. w T + T of the documents laid end to end, so every token but the first is a target
    once in an epoch (the last (N - 1) mod T tokens never are). Sample n is window permutation(n mod S) of epoch n //
    S, where S = (N - 1) // T windows and the permutation is drawn from (seed, epoch): within an epoch no window comes
    twice, whatever the batch sizes.

    A batch is a dict:
        tokens     int64 [B, T]  the inputs
        targets    int64 [B, T]  the tokens one position later
        documents  int32 [B, T]  0 at first, one more at each later document start: attend within equal numbers only
        mask       bool  [B, T]  the targets that count: False where the target is the first token of the next document,
                                 which nothing before it tells; the end of a document is to be predicted and counts

    Raises ValueError for a size below 1, and when the corpus is shorter than one window.
    """

    tokens: Tokens
    seq_len: int  # T
    batch: int  # B
    seed: int = 0

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: wanted at least 1 sequence a step")
        _windows(self.tokens, self.seq_len)

    @property
    def samples_per_epoch(self) -> int:
        """S, the number of windows."""
        return len(_windows(self.tokens, self.seq_len))

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch; [count, T] instead of [B, T].

        A run that has seen n samples resumes with samples_at(n, any count); a rank asks for its own part of a step.
        """
        return _assemble(self.tokens, self.seq_len, shuffled(self.seed, self.samples_per_epoch, first, count))

    def eval_batches(self, most: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) windows, as the function `eval_batches` gives them."""
        return eval_batches(self.tokens, self.seq_len, self.batch, most, share)


def shuffled(seed: int, per_epoch: int, first: int, count: int) -> np.ndarray:
    """Which of `per_epoch` things the samples `first` .. first + count - 1 are, int64 [count]: all of them once in an
    epoch, in an order drawn from (seed, epoch)."""
    if first < 0 or count < 1:
        raise ValueError(f"samples_at({first}, {count}): wanted first >= 0 and count >= 1")
    found = []
    for epoch in range(first // per_epoch, (first + count - 1) // per_epoch + 1):
        begin, end = max(first - epoch * per_epoch, 0), min(first + count - epoch * per_epoch, per_epoch)
        for block in range(begin // DRAWN, (end - 1) // DRAWN + 1):
            drawn = _drawn(seed, epoch, per_epoch, block)
            found.append(drawn[max(begin - block * DRAWN, 0) : end - block * DRAWN])
    return torch.cat(found).numpy()


@checked()
def eval_batches(
    tokens: Tokens, seq_len: int, batch: int, max_windows: int | None = None, share: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """The batches of min(max_windows, S) windows, unshuffled, the same ones every time; None means all S.

    The windows are evenly spaced over the corpus, because its first ones may all be one document. The last batch is
    filled up to [batch, T] with windows whose mask is all False: every batch has one shape, and sums of losses and
    counts stay right.
    share: (k, n) gives the batches k, k + n, k + 2 n, ..., filled up by such batches until all n shares have as many.

    Raises ValueError as TokenStream does.
    """
    available = len(_windows(tokens, seq_len))

    def assemble(windows: np.ndarray, real: np.ndarray) -> Batch:
        out = _assemble(tokens, seq_len, windows)
        return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None]}

    return even_batches(available, batch, max_windows, share, assemble)


def even_batches(
    available: int,
    batch: int,
    most: int | None,
    share: tuple[int, int],
    assemble: Callable[[np.ndarray, np.ndarray], Batch],
) -> Iterator[Batch]:
    """`assemble(numbers [batch], whether each is one of the samples or fills up)` of min(most, available) evenly spaced
    things, in batches, as `eval_batches` says."""
    if batch < 1 or (most is not None and most < 1):
        raise ValueError(f"batch={batch}, max_windows={most}: wanted at least 1 of each")
    count = available if most is None else min(most, available)

    def batch_from(first: int) -> Batch:
        number = np.arange(first, first + batch)
        return assemble(np.minimum(number, count - 1) * available // count, number < count)

    own, shares = share
    return map(batch_from, range(own * batch, -(-count // (batch * shares)) * batch * shares, batch * shares))


def prefetch(
    batch_at: Callable[[int], Any], first_step: int = 0, depth: int = 2
) -> Generator[tuple[int, Any], None, None]:
    """Yield (step, batch_at(step)) for step = first_step, first_step + 1, ..., prepared by a background thread up to
    `depth` ahead.

    One more may be in preparation. An exception of batch_at is raised here, at its step, after the batches before it.
    Closing the generator ends the thread, as does dropping its last reference or ending the program; use
    `contextlib.closing`.

    >>> with contextlib.closing(prefetch(stream.batch_at, first_step=10)) as batches:
    ...     for step, batch in batches: ...
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: wanted at least 1 batch ahead")
    return _prefetch(batch_at, first_step, depth)


def _prefetch(batch_at: Callable[[int], Any], step: int, depth: int) -> Generator[tuple[int, Any], None, None]:
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def wanted() -> bool:
        # A daemon thread would be killed inside a torch operation at exit, which aborts the process; an ordinary one
        # that waits would keep the program from ending. So this is an ordinary one that checks whether to end.
        return not stop.is_set() and threading.main_thread().is_alive()

    def work(step: int) -> None:
        error = None
        while error is None and wanted():
            try:
                batch = batch_at(step)
            except BaseException as caught:  # raised again in the consumer
                batch, error = None, caught
            while wanted():
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


def _windows(tokens: Tokens, seq_len: int) -> np.ndarray:
    """The view [S, T + 1] of the token file, with window w at token w T; raises ValueError if S would be 0."""
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: wanted at least 1 token")
    if len(tokens.tokens) < seq_len + 1:
        raise ValueError(
            f"{tokens.name}: {len(tokens.tokens)} tokens are fewer than one window of seq_len + 1 = {seq_len + 1}; "
            f"use seq_len <= {max(len(tokens.tokens) - 1, 1)} or a larger corpus"
        )
    return np.lib.stride_tricks.sliding_window_view(tokens.tokens, seq_len + 1)[::seq_len]


@functools.lru_cache(maxsize=8)
def _drawn(seed: int, epoch: int, windows: int, block: int) -> Tensor:
    """The windows of the samples from block * DRAWN on, of an epoch with `windows` of them; cached."""
    index = torch.arange(block * DRAWN, min((block + 1) * DRAWN, windows))
    return prng.permutation(prng.fold_in(prng.key(seed), epoch), windows, index)


def _assemble(tokens: Tokens, seq_len: int, windows: np.ndarray) -> Batch:
    if tokens.sums is not None:
        size = tokens.tokens.itemsize
        tokens.sums.expect(windows * (seq_len * size), (seq_len + 1) * size)
    ids = torch.from_numpy(_windows(tokens, seq_len)[windows].astype(np.int64))
    positions = windows[:, None] * seq_len + np.arange(seq_len + 1)
    document = torch.from_numpy(np.searchsorted(tokens.docs, positions, side="right"))  # [B, T + 1], numbered from 1
    return {
        "tokens": ids[:, :-1].contiguous(),
        "targets": ids[:, 1:].contiguous(),
        "documents": (document[:, :-1] - document[:, :1]).int(),
        "mask": document[:, 1:] == document[:, :-1],
    }
