"""Which keys a query of causal attention sees: the pattern, and documents packed in one row."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LONGEST = 10**9  # tokens
KINDS = ("full", "window", "local", "strided", "fixed")  # in the order of attention_tiled.cpp


@dataclass(frozen=True)
class Pattern:
    """An attention pattern: which earlier positions a query sees. "full": all; the others have `size` and `keep` in
    tokens.

    window: the last `size`, itself among them (Beltagy et al. 2020). local: those in its own block of `size`. strided:
    the last `size`, and each `size`-th before. fixed: those in its own block of `size`, and the last `keep` of every
    block (Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2-4.3).
    """

    kind: str = "full"
    size: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"attention pattern {self.kind!r} is unknown; use full, window, local, strided or fixed")
        if self.kind != "full" and self.size < 1:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at least 1")
        if self.size > LONGEST:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at most {LONGEST:,}")
        if self.kind == "fixed" and not 1 <= self.keep <= self.size:
            raise ValueError(f"attention pattern fixed: keep is {self.keep}; it must be in [1, size = {self.size}]")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of a text: "full", "window:SIZE", "local:SIZE", "strided:SIZE" or "fixed:SIZE:KEEP"."""
        form = re.fullmatch(r"(\w+)(?::(\d+))?(?::(\d+))?", text)
        if form is None:
            raise ValueError(f"attention pattern {text!r} is not of the form full, window:SIZE or fixed:SIZE:KEEP")
        return cls(form[1], int(form[2] or 0), int(form[3] or 0))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        return ":".join(str(part) for part in (self.kind, self.size, self.keep) if part)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at position `query` sees the key at position `key` (broadcast; causality included)."""
        causal, distance = key <= query, query - key
        if self.kind == "window":
            return causal & (distance < self.size)
        if self.kind == "local":
            return causal & (query // self.size == key // self.size)
        if self.kind == "strided":
            return causal & ((distance < self.size) | (distance % self.size == 0))
        if self.kind == "fixed":
            return causal & ((query // self.size == key // self.size) | (key % self.size >= self.size - self.keep))
        return causal

    def first_key(self, query: int) -> int:
        """The first key that any query at position `query` or later sees."""
        if self.kind == "window":
            return max(0, query - self.size + 1)
        return query // self.size * self.size if self.kind == "local" else 0

    def keys_seen(self, query: np.ndarray, end: np.ndarray | int) -> np.ndarray:
        """The number of keys before position `end` that the query at position `query` sees, int64, for each of several
        (broadcast).
        """
        end = np.minimum(end, query + 1)
        if self.kind == "full":
            return end
        size = self.size
        # Where the near keys begin.
        own = query // size * size if self.kind in ("local", "fixed") else np.maximum(0, query - size + 1)
        near, earlier = np.maximum(0, end - own), np.minimum(end, own)
        if self.kind == "strided":
            return near + np.maximum(0, earlier - query % size + size - 1) // size
        if self.kind == "fixed":
            return near + earlier // size * self.keep + np.maximum(0, earlier % size - (size - self.keep))
        return near

    def pairs(self, start: int, queries: int, end: int) -> int:
        """The number of pairs of a query at positions start to start + queries - 1 and a key before position `end` that
        it sees.

        >>> Pattern("window", 2).pairs(0, 4, 4)
        7
        """
        return int(self.keys_seen(np.arange(start, start + queries), end).sum())


FULL = Pattern()


def pairs_by_query(pattern: Pattern, documents: np.ndarray) -> np.ndarray:
    """The number of keys that the query at each position sees, int64 [B, T], of the documents int [B, T] of rows.

    >>> pairs_by_query(FULL, np.array([[5, 5, 5, 2, 2]]))
    array([[1, 2, 3, 1, 2]])
    """
    return np.stack([_pairs_of_row(pattern, row) for row in documents])


def _pairs_of_row(pattern: Pattern, documents: np.ndarray) -> np.ndarray:
    query, edges = np.arange(len(documents)), np.flatnonzero(np.diff(documents)) + 1
    starts, ends = np.concatenate(([0], edges)), np.concatenate((edges, [len(documents)]))
    seen = pattern.keys_seen(query, query + 1) - pattern.keys_seen(query, np.repeat(starts, ends - starts))
    earlier: dict[int, list[tuple[int, int]]] = {}  # by document, the runs of its positions so far
    for start, end in zip(starts.tolist(), ends.tolist()):
        runs, own = earlier.setdefault(int(documents[start]), []), query[start:end]
        for first, last in runs:
            seen[start:end] += pattern.keys_seen(own, last) - pattern.keys_seen(own, first)
        runs.append((start, end))
    return seen


def visible_mask(pattern: Pattern, query: Tensor, key: Tensor, documents: Tensor | None) -> Tensor:
    """The mask (bool [1 or B, len(query), len(key)]) of the positions `query` and `key` (int64 vectors).

    documents: int [B, S], the document of each of the S positions, or None.
    """
    mask = pattern.sees(query[:, None], key[None, :])[None]
    if documents is None:
        return mask
    return mask & (documents[:, query, None] == documents[:, None, key])
