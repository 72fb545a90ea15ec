"""The batch of rows of positions: what they read, fetched ahead where the tokens are in an object store."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fzero.data.packing import FILL
from fzero.data.remote_tokens import RemoteTokens
from fzero.data.tokens import Tokens

Batch = dict[str, Tensor]
SPARSE = 64  # positions of a row, of which one is looked at to find the pieces that it needs


def assemble(tokens: Tokens, positions: np.ndarray) -> Batch:
    """The batch of rows of positions [B, T]."""
    filled = positions == FILL
    fills, first = bool(filled.any()), np.ones(positions.shape, bool)
    first[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) & ~(filled[:, 1:] & filled[:, :-1])
    if tokens.sums is not None:
        _expect_sound(tokens, positions, first, filled)
    indices = np.where(filled, 0, positions) if fills else positions
    document = np.searchsorted(tokens.docs, indices, side="right")  # numbered from 1
    ids, targets = pairs(tokens.tokens, indices, first, filled if fills else None)
    mask = indices + 1 != tokens.docs[document]
    first[:, 1:] |= document[:, 1:] != document[:, :-1]
    if fills:
        ids, targets, mask = np.where(filled, tokens.eos, ids), np.where(filled, tokens.eos, targets), mask & ~filled
    return {
        "tokens": torch.from_numpy(ids.astype(np.int64)),
        "targets": torch.from_numpy(targets.astype(np.int64)),
        "documents": torch.from_numpy(np.cumsum(first, 1, dtype=np.int32) - 1),
        "mask": torch.from_numpy(mask),
    }


def pairs(
    tokens: np.ndarray | RemoteTokens, positions: np.ndarray, first: np.ndarray, filled: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens[at], tokens[at + 1]) of positions [B, T]; those of an object store are read run by run, each token once.

    first: where a run of positions begins. filled: which positions are filled up, None for none; what those have is not
    said."""
    if isinstance(tokens, np.ndarray):
        return tokens[positions], tokens[positions + 1]
    begins = np.flatnonzero(first)
    counts, firsts = np.diff(np.append(begins, first.size)), positions.ravel()[begins]
    places = begins + np.arange(len(begins))  # one token more is read of each run before
    if filled is None:
        read = np.empty(first.size + len(begins), tokens.dtype)
        tokens.read(read, places, firsts, counts + 1)
    else:
        read, runs = np.zeros(first.size + len(begins), tokens.dtype), ~filled.ravel()[begins]
        tokens.read(read, places[runs], firsts[runs], counts[runs] + 1)
    if len(begins) == len(positions):  # each row is a run
        row_reads = read.reshape(len(positions), -1)
        return row_reads[:, :-1], row_reads[:, 1:]
    offsets = np.arange(first.size) + np.cumsum(first) - 1
    return read[offsets].reshape(positions.shape), read[offsets + 1].reshape(positions.shape)


def _expect_sound(tokens: Tokens, positions: np.ndarray, first: np.ndarray, filled: np.ndarray) -> None:
    """Compare what rows read with its checksums. first: where a run of positions begins."""
    assert tokens.sums is not None
    begins = np.flatnonzero(first)
    sizes, starts = np.diff(np.append(begins, first.size)), positions.ravel()[begins]
    real_runs, size = ~filled.ravel()[begins], tokens.tokens.itemsize
    for length in np.unique(sizes[real_runs]).tolist():
        tokens.sums.expect(starts[real_runs & (sizes == length)] * size, (length + 1) * size)


@functools.lru_cache(maxsize=64)
def sparse(seq_len: int) -> np.ndarray:
    """The places of a row by which the pieces that it needs are found: evenly spaced ones, and the last.

    >>> sparse(130).tolist()
    [0, 64, 128, 129]
    """
    return np.append(np.arange(0, seq_len, SPARSE), seq_len - 1)


def fetch(tokens: Tokens, positions: Callable[[], np.ndarray]) -> bool:
    """Begin to fetch what rows read, if the tokens are in an object store; returns whether all of it is on its way.

    positions: gives the rows' positions at `sparse` places, int64 [n, m]; what others miss is fetched when it is
    read."""
    source = tokens.tokens
    if not isinstance(source, RemoteTokens):
        return True
    samples = positions()
    last = samples[:, -1]
    return source.begin(samples[samples != FILL], last[last != FILL] + 1)
