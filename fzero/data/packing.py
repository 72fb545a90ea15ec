"""How the documents of a corpus fill rows of T positions: ranges of positions in, rows of positions out.

Position i stands for token i as an input and token i + 1 as its target. Ranges are int64 [n, 2], begins and ends, in
rising order and apart; positions that are filled up are FILL.

    stream     the ranges laid end to end and cut every T positions: nothing is filled up, most documents are cut
    best-fit   ranges longer than T are cut every T positions, the pieces put into rows where they fit best, whole:
               no other document is cut, and what is left of a row is filled up

Ref: Ding et al. 2024, "Fewer truncations improve language modeling", arXiv:2404.10830, section 3.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fzero.data.remote_tokens import RemoteTokens
from fzero.data.tokens import Tokens

FILL = -1  # in place of a position
WINDOW = 1 << 16  # pieces, in the order of the corpus, that are packed together


class Packing(Protocol):
    """The rows that ranges of positions make."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def positions(self, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """The positions, int64 [n, T], of the rows of these numbers [n], or [n, m] at `places` [m] of a row."""
        ...

    def unread(self, read: np.ndarray) -> np.ndarray:
        """The ranges of the positions that no row of `read` (bool [rows]) has."""
        ...


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Which documents share a row of `capacity` positions: best fit, the longest first.

    >>> pack(np.array([3, 5, 2, 4]), 7)
    [[1, 2], [0, 3]]
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a conversation needs {lengths.max():,} positions and a row has {capacity:,} (data.seq_len)")
    rows: list[list[int]] = []
    free_rows: dict[int, list[int]] = {}  # positions left -> rows
    free_bits = 0  # a bit for each key of `left` with rows
    for i in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[i])
        fits = free_bits >> need
        free = need + (fits & -fits).bit_length() - 1 if fits else capacity
        if fits:
            row = free_rows[free].pop()
            if not free_rows[free]:
                free_bits &= ~(1 << free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        free_rows.setdefault(free - need, []).append(row)
        free_bits |= 1 << (free - need)
    return [sorted(row) for row in rows]


def full_range(tokens: Tokens) -> np.ndarray:
    """All positions of a corpus, as one range: the last token is only a target."""
    return np.array([[0, len(tokens.tokens) - 1]], np.int64)


def within_documents(tokens: Tokens) -> np.ndarray:
    """The ranges of the positions whose target is in their own document."""
    ranges = np.stack([tokens.docs[:-1], tokens.docs[1:] - 1], 1).astype(np.int64)
    return ranges[ranges[:, 0] < ranges[:, 1]]


def intersect(ranges: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the common ranges of two lists [m, 2], the number in `bounds` of each [m]).

    >>> intersect(np.array([[0, 5], [6, 9]]), np.array([[1, 3], [4, 8]]))[0].tolist()
    [[1, 3], [4, 5], [6, 8]]
    """
    first = np.searchsorted(bounds[:, 1], ranges[:, 0], side="right")
    counts = np.maximum(np.searchsorted(bounds[:, 0], ranges[:, 1], side="left") - first, 0)
    range_index = np.repeat(np.arange(len(ranges)), counts)
    bound_index = np.arange(len(range_index)) - np.repeat(np.cumsum(counts) - counts, counts) + first[range_index]
    return np.stack(
        [
            np.maximum(ranges[range_index, 0], bounds[bound_index, 0]),
            np.minimum(ranges[range_index, 1], bounds[bound_index, 1]),
        ],
        1,
    ), bound_index


def merge_ranges(ranges: np.ndarray) -> np.ndarray:
    """The same positions in rising order, ranges that touch as one.

    >>> merge_ranges(np.array([[4, 6], [0, 2], [2, 3]])).tolist()
    [[0, 3], [4, 6]]
    """
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    edges = np.ones(len(ranges) + 1, bool)
    edges[1:-1] = ranges[1:, 0] != ranges[:-1, 1]
    return np.stack([ranges[edges[:-1], 0], ranges[edges[1:], 1]], 1)


@dataclass(frozen=True, eq=False)
class Stream:
    """Ranges laid end to end, cut every T positions; the remainder is in no row."""

    ranges: np.ndarray
    seq_len: int  # T

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each range ends among all laid end to end."""
        return np.cumsum(self.ranges[:, 1] - self.ranges[:, 0])

    @property
    def total(self) -> int:
        """The number of positions."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return self.total // self.seq_len

    def positions(self, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """The positions [n, T], or [n, m], of these rows."""
        offsets = rows[:, None] * self.seq_len + (np.arange(self.seq_len) if places is None else places)
        if len(self.ranges) == 1:
            return offsets + self.ranges[0, 0]
        index = np.searchsorted(self.ends, offsets, side="right")
        return offsets - self.ends[index] + self.ranges[index, 1]

    def unread(self, read: np.ndarray) -> np.ndarray:
        """The ranges that no row of `read` has, the end that is in no row among them."""
        rows = np.flatnonzero(~read)
        laid = np.stack([rows * self.seq_len, (rows + 1) * self.seq_len], 1)
        laid = merge_ranges(np.concatenate([laid, [[len(self) * self.seq_len, self.total]]]))
        begins = self.ends - (self.ranges[:, 1] - self.ranges[:, 0])
        unread_ranges, index = intersect(laid[laid[:, 0] < laid[:, 1]], np.stack([begins, self.ends], 1))
        return merge_ranges(unread_ranges + (self.ranges[index, 0] - begins[index])[:, None])


@dataclass(frozen=True, eq=False)
class BestFit:
    """Pieces of documents of at most T positions, those of a window of WINDOW pieces in rows together, whole."""

    ranges: np.ndarray
    seq_len: int  # T
    tokens: Tokens
    window: int = WINDOW

    @functools.cached_property
    def pieces(self) -> np.ndarray:
        """The ranges of the pieces, those of each row one after the other."""
        return self._packed[0]

    @functools.cached_property
    def _packed(self) -> tuple[np.ndarray, np.ndarray]:
        """(the pieces, row by row; where each row begins among them, and the end)."""
        pieces = cut(intersect(self.ranges, within_documents(self.tokens))[0], self.seq_len)
        order, counts = [], []
        for begin in range(0, len(pieces), self.window):
            window_pieces = pieces[begin : begin + self.window]
            rows = pack(window_pieces[:, 1] - window_pieces[:, 0], self.seq_len)
            order += [begin + i for row in rows for i in row]
            counts += [len(row) for row in rows]
        return pieces[np.array(order, np.int64)], np.cumsum([0, *counts])

    def __len__(self) -> int:
        return len(self._packed[1]) - 1

    def positions(self, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """The positions [n, T], or [n, m], of these rows."""
        pieces, begins = self._packed
        out = np.full((len(rows), self.seq_len), FILL, np.int64)
        for r, row in enumerate(rows.tolist()):
            offset = 0
            for first, end in pieces[begins[row] : begins[row + 1]].tolist():
                out[r, offset : offset + end - first] = np.arange(first, end)
                offset += end - first
        return out if places is None else out[:, places]

    def unread(self, read: np.ndarray) -> np.ndarray:
        """The ranges that no row of `read` has, with neighbours joined."""
        pieces, begins = self._packed
        return merge_ranges(pieces[~np.repeat(read, np.diff(begins))])


def cut(ranges: np.ndarray, size: int) -> np.ndarray:
    """The ranges, those that are longer than `size` cut every `size` positions.

    >>> cut(np.array([[0, 5], [6, 8]]), 2).tolist()
    [[0, 2], [2, 4], [4, 5], [6, 8]]
    """
    counts = -(-(ranges[:, 1] - ranges[:, 0]) // size)
    index = np.repeat(np.arange(len(ranges)), counts)
    begins = ranges[index, 0] + size * (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.stack([begins, np.minimum(begins + size, ranges[index, 1])], 1)


PACKINGS: dict[str, Callable[[np.ndarray, int, Tokens], Packing]] = {
    "stream": lambda ranges, seq_len, tokens: Stream(ranges, seq_len),
    "best-fit": BestFit,
}


class Figures(NamedTuple):
    """What a packing makes of a corpus."""

    rows: int
    cut: float  # the share of documents that are in more than one row
    needless: float  # the share of documents that are, and would fit into one
    filled: float  # the share of positions that are filled up


def figures(tokens: Tokens, packing: str, seq_len: int) -> Figures:
    """What a packing makes of a corpus.

    >>> docs = np.array([0, 4, 7, 12])
    >>> corpus = Tokens("by hand", np.zeros(12, np.uint8), docs, 256, 0)
    >>> figures(corpus, "stream", 5).cut, figures(corpus, "best-fit", 5).cut
    (0.6666666666666666, 0.0)
    """
    documents = within_documents(tokens)
    rows = PACKINGS[packing](full_range(tokens), seq_len, tokens)
    pieces = rows.pieces if isinstance(rows, BestFit) else intersect(cut(full_range(tokens), seq_len), documents)[0]
    parts = np.bincount(np.searchsorted(documents[:, 0], pieces[:, 0], side="right") - 1, minlength=len(documents))
    short, document_count = documents[:, 1] - documents[:, 0] <= seq_len, max(1, len(documents))
    real_positions = int((pieces[:, 1] - pieces[:, 0]).sum()) if packing == "best-fit" else len(rows) * seq_len
    capacity = len(rows) * seq_len
    filled = (capacity - real_positions) / max(1, capacity)
    return Figures(
        len(rows),
        float((parts > 1).sum() / document_count),
        float(((parts > 1) & short).sum() / document_count),
        filled,
    )


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
    """(tokens[at], tokens[at + 1]) of positions [B, T]; filled: which are filled up, None for none."""
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
    """Evenly spaced positions of a row, and the last, by which its pieces are found.

    >>> sparse(130).tolist()
    [0, 64, 128, 129]
    """
    return np.append(np.arange(0, seq_len, SPARSE), seq_len - 1)


def fetch(tokens: Tokens, positions: Callable[[], np.ndarray]) -> bool:
    """Begin to fetch what rows read, if the tokens are remote; returns whether all of it is on its way."""
    source = tokens.tokens
    if not isinstance(source, RemoteTokens):
        return True
    samples = positions()
    last = samples[:, -1]
    return source.begin(samples[samples != FILL], last[last != FILL] + 1)


TOO_LONG = ("error", "drop", "cut")
