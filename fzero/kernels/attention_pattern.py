"""Which keys a query of causal attention sees, the pattern and documents packed in one row; and the FLOPs of
attention's operators by the (query, key) pairs that their pattern leaves.

Documents are never counted off. A formula takes what its operator takes, and `out_val`, the result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

LONGEST = 10**9  # tokens
MOST_RANDOM = 64  # blocks
KINDS = {  # and the numbers of their texts; in the order of attention_tiled.cpp
    "full": (),
    "window": ("size",),
    "local": ("size",),
    "strided": ("size",),
    "fixed": ("size", "global_count"),
    "bigbird": ("size", "near", "global_count", "random", "seed"),
}
NUMBERS = tuple(KINDS)
FIELDS = ("size", "global_count", "near", "seed", "random")  # of a pattern, in the order in which operators take them
IndexLike = TypeVar("IndexLike", Tensor, np.ndarray, int)
_WORD = 2**32 - 1


@dataclass(frozen=True)
class Pattern:
    """An attention pattern: which earlier positions a query sees. "full": all; the others have `size`, in tokens.

    window: the last `size`, itself among them (Beltagy et al. 2020). local: those in its own block of `size`. strided:
    the last `size`, and each `size`-th before. fixed: those in its own block of `size`, and the last `global_count`
    tokens of every block (Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2-4.3).

    bigbird: by blocks of `size`, those in the last `near` blocks, its own among them, in the first `global_count`
    blocks of the sequence, and in `random` others of the blocks before (Zaheer et al. 2020, "Big Bird",
    arXiv:2007.14062, section 2; here causal, so that the first blocks too see what is before them alone). See
    `random_block`.
    """

    kind: str = "full"
    size: int = 0
    global_count: int = 0
    near: int = 0
    random: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            *kinds, last = KINDS
            raise ValueError(f"attention pattern {self.kind!r} is unknown; use {', '.join(kinds)} or {last}")
        for name, value in zip(FIELDS, self.sizes):
            if name not in KINDS[self.kind] and value:
                owners = " and ".join(kind for kind, names in KINDS.items() if name in names)
                raise ValueError(f"attention pattern {self.kind}: {name} is {value}; it is a number of {owners} alone")
        if self.kind != "full" and self.size < 1:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at least 1")
        if self.size > LONGEST:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at most {LONGEST:,}")
        if self.kind == "fixed" and not 1 <= self.global_count <= self.size:
            raise ValueError(
                f"attention pattern fixed: global_count is {self.global_count}; it must be in [1, size = {self.size}]"
            )
        if self.kind == "bigbird":
            ranges = {
                "near": (1, LONGEST),
                "global_count": (0, LONGEST),
                "random": (0, MOST_RANDOM),
                "seed": (0, 2**31 - 1),
            }
            for name, (min_value, max_value) in ranges.items():
                if not min_value <= (value := getattr(self, name)) <= max_value:
                    raise ValueError(
                        f"attention pattern bigbird: {name} is {value}; it must be in [{min_value}, {max_value:,}]"
                    )

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of a text: "full", "window:SIZE", "local:SIZE", "strided:SIZE", "fixed:SIZE:KEEP" or
        "bigbird:SIZE:NEAR:KEEP:RANDOM:SEED", without SEED of 0.
        """
        kind, *numbers = text.split(":")
        names = KINDS.get(kind, FIELDS)
        if not re.fullmatch(r"\w+(:\d+)*", text) or len(numbers) > len(names):
            raise ValueError(
                f"attention pattern {text!r} is not of the form full, window:SIZE, fixed:SIZE:KEEP or "
                "bigbird:SIZE:NEAR:KEEP:RANDOM:SEED"
            )
        return cls(kind, **dict(zip(names, map(int, numbers))))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        values = [str(getattr(self, name)) for name in KINDS[self.kind]]
        return ":".join((self.kind, *(values if self.seed or self.kind != "bigbird" else values[:-1])))

    @property
    def sizes(self) -> list[int]:
        """Its numbers in the order of FIELDS, those that its kind has not 0."""
        return [getattr(self, name) for name in FIELDS]

    @property
    def numbers(self) -> list[int]:
        """The pattern in numbers, for operators."""
        return [NUMBERS.index(self.kind), *self.sizes]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Pattern:
        """The pattern whose `numbers` these are."""
        return cls(NUMBERS[numbers[0]], **dict(zip(FIELDS, numbers[1:])))

    def random_block(self, block: IndexLike, i: int) -> IndexLike:
        """The i-th random block of bigbird's queries in each `block`, by a hash of (seed, i, block)."""
        candidates = block - (self.near - 1 + self.global_count)
        candidates = candidates + (1 - candidates) * (candidates < 1)  # at least 1
        return self.global_count + mix(block ^ mix((self.seed + (i + 1) * 0x9E3779B9) & _WORD)) % candidates

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at position `query` sees the key at position `key` (broadcast; causality included)."""
        causal, distance = key <= query, query - key
        if self.kind == "window":
            return causal & (distance < self.size)
        if self.kind == "local":
            return causal & (query // self.size == key // self.size)
        if self.kind == "strided":
            return causal & ((distance < self.size) | (distance % self.size == 0))
        if self.kind == "fixed":
            return causal & (
                (query // self.size == key // self.size) | (key % self.size >= self.size - self.global_count)
            )
        if self.kind == "bigbird":
            query_block, block = query // self.size, key // self.size
            mask = (block < self.global_count) | (query_block - block < self.near)
            for i in range(self.random):
                mask = mask | (block == self.random_block(query_block, i))
            return causal & mask
        return causal

    def first_key(self, query: int) -> int:
        """The first key that any query at position `query` or later sees."""
        if self.kind == "window":
            return max(0, query - self.size + 1)
        return query // self.size * self.size if self.kind == "local" else 0

    def count_visible(self, query: np.ndarray, end: np.ndarray | int) -> np.ndarray:
        """The number of keys before position `end` that the query at position `query` sees, int64."""
        end = np.minimum(end, query + 1)
        if self.kind == "full":
            return end
        if self.kind == "bigbird":
            return self._count_in_blocks(query, end)
        size = self.size
        # Where the near keys begin.
        near_start = query // size * size if self.kind in ("local", "fixed") else np.maximum(0, query - size + 1)
        near, earlier = np.maximum(0, end - near_start), np.minimum(end, near_start)
        if self.kind == "strided":
            return near + np.maximum(0, earlier - query % size + size - 1) // size
        if self.kind == "fixed":
            return (
                near + earlier // size * self.global_count + np.maximum(0, earlier % size - (size - self.global_count))
            )
        return near

    def _count_in_blocks(self, query: np.ndarray, end: np.ndarray) -> np.ndarray:
        query_block, first = query // self.size, self.global_count * self.size
        near_start = np.maximum((query_block - self.near + 1) * self.size, first)
        total = np.minimum(end, first) + np.maximum(0, end - near_start)
        chosen: list[np.ndarray] = []
        for i in range(self.random):
            block = self.random_block(query_block, i)
            new = block <= query_block - self.near
            for previous in chosen:
                new = new & (block != previous)
            total = total + new * np.clip(end - block * self.size, 0, self.size)
            chosen.append(block)
        return total

    def pairs(self, start: int, queries: int, end: int) -> int:
        """The number of pairs of one of `queries` queries from `start` on and a key before `end` that it sees.

        >>> Pattern("window", 2).pairs(0, 4, 4)
        7
        """
        return int(self.count_visible(np.arange(start, start + queries), end).sum())


FULL = Pattern()


def mix(x: IndexLike) -> IndexLike:
    """A hash of numbers below 2^32, of as many bits, by Mueller 2012, stackoverflow.com/a/12996028."""
    # No product has more than 59 bits.
    for _ in range(2):
        x = ((x >> 16 ^ x) * 0x45D9F3B) & _WORD
    return x >> 16 ^ x


def pairs_by_query(pattern: Pattern, documents: np.ndarray) -> np.ndarray:
    """The number of keys that each query sees, int64 [B, T], of documents int [B, T].

    >>> pairs_by_query(FULL, np.array([[5, 5, 5, 2, 2]]))
    array([[1, 2, 3, 1, 2]])
    """
    return np.stack([_pairs_of_row(pattern, row) for row in documents])


def _pairs_of_row(pattern: Pattern, documents: np.ndarray) -> np.ndarray:
    query, edges = np.arange(len(documents)), np.flatnonzero(np.diff(documents)) + 1
    starts, ends = np.concatenate(([0], edges)), np.concatenate((edges, [len(documents)]))
    counts = pattern.count_visible(query, query + 1) - pattern.count_visible(query, np.repeat(starts, ends - starts))
    earlier: dict[int, list[tuple[int, int]]] = {}  # by document, the runs of its positions so far
    for start, end in zip(starts.tolist(), ends.tolist()):
        runs, queries = earlier.setdefault(int(documents[start]), []), query[start:end]
        for first, last in runs:
            counts[start:end] += pattern.count_visible(queries, last) - pattern.count_visible(queries, first)
        runs.append((start, end))
    return counts


# Products of [queries, K] by [K, keys], or of the same size, that a kernel makes of each pair of positions.
FORWARD_PRODUCTS = 2  # q k^T, p v
BACKWARD_PRODUCTS = 5  # q k^T again, g v^T, and those that give dq, dk and dv
SPLIT_PRODUCTS = 7  # in two kernels, one for dq and one for dk and dv: q k^T and g v^T are made in both


@functools.lru_cache(maxsize=1024)
def pairs(pattern: Pattern, queries: int, keys: int, first: int = 0) -> int:
    """How many (query, key) pairs a pattern leaves; query i is at first + i.

    >>> pairs(FULL, 4, 4)
    10
    """
    if pattern == FULL:  # sum of min(keys, position + 1)
        full_rows = min(max(0, keys - first), queries)  # queries that see up to themselves
        return full_rows * first + full_rows * (full_rows + 1) // 2 + (queries - full_rows) * keys
    return pattern.pairs(first, queries, keys)


def _pattern_of(arguments: Sequence[Any]) -> Pattern:
    """That of an operator's arguments, which are its numbers."""
    return Pattern.of_numbers(next(x for x in arguments if isinstance(x, list | tuple)))


def of_pairs(products: int, q: Tensor, count: int) -> int:
    """Of `products` products of each of `count` pairs, for every head of q [B, T, H, K]."""
    b, _, h, k = q.shape
    return 2 * products * b * h * k * count


def tiled(products: int) -> Callable[..., int]:
    """Of queries that are the last of the keys, or spread evenly over positions."""

    def formula(
        q: Tensor, k: Tensor, v: Tensor, query: Tensor | None, *arguments: Any, out_val: Any = None, **kwargs: Any
    ) -> int:
        pattern, t, s = _pattern_of((*arguments, *kwargs.values())), q.shape[1], k.shape[1]
        if query is None:
            return of_pairs(products, q, pairs(pattern, t, s, s - t))
        return spread(products, q, k, pattern)

    return formula


def spread(products: int, q: Tensor, k: Tensor, pattern: Pattern) -> int:
    """Of queries that are spread evenly over the positions of the keys."""
    return of_pairs(products, q, pairs(pattern, k.shape[1], k.shape[1]) * q.shape[1] // k.shape[1])


def flash_at(products: int, first: int = 0) -> Callable[..., int]:
    """Of flash attention at positions in memory, whose arguments have q from number `first` on."""

    def formula(*arguments: Any, out_val: Any = None) -> int:
        q, k = arguments[first : first + 2]
        return spread(products, q, k, _pattern_of(arguments))

    return formula


def ring(products: int) -> Callable[..., int]:
    """Of a rank whose work is the mean of the ranks'."""

    def formula(q: Tensor, *arguments: Any, out_val: Any = None, **kwargs: Any) -> int:
        inputs = (*arguments, *kwargs.values())
        positions = next(x for x in inputs if isinstance(x, Tensor) and x.dim() == 2 and x.dtype == torch.int64)
        tokens = positions.numel()
        visible = pairs(_pattern_of(inputs), tokens, tokens)
        return of_pairs(products, q, visible // positions.shape[0])

    return formula


def visible_pairs(q: Tensor, k: Tensor, pattern: Pattern, query_start: int, key_start: int) -> int:
    """How many pairs of queries from query_start on and keys from key_start on a pattern leaves."""
    if pattern == FULL:
        return pairs(pattern, q.shape[1], k.shape[1], query_start - key_start)
    upto = pairs(pattern, q.shape[1], key_start + k.shape[1], query_start)
    return upto - pairs(pattern, q.shape[1], key_start, query_start)


def flash(products: int, first: int = 0) -> Callable[..., int]:
    """Of flash attention in order, likewise; its last arguments are where queries and keys begin."""

    def formula(*arguments: Any, out_val: Any = None) -> int:
        q, k = arguments[first : first + 2]
        return of_pairs(products, q, visible_pairs(q, k, _pattern_of(arguments), *arguments[-2:]))

    return formula


def attention_chunk(q: Tensor, k: Tensor, v: Tensor, documents: Any, *arguments: Any, out_val: Any = None) -> int:
    """Of the queries of a chunk on the keys of one."""
    return of_pairs(FORWARD_PRODUCTS, q, visible_pairs(q, k, _pattern_of(arguments), *arguments[:2]))


def attention_chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, g: Any, documents: Any, *arguments: Any, out_val: Any = None
) -> int:
    """Of their backward pass."""
    products = SPLIT_PRODUCTS if arguments[2] == "triton" else BACKWARD_PRODUCTS
    return of_pairs(products, q, visible_pairs(q, k, _pattern_of(arguments), *arguments[:2]))


def library(products: int, first: int = 0) -> Callable[..., int]:
    """Of causal attention by a library, likewise."""

    def formula(*arguments: Any, out_val: Any = None) -> int:
        q, k = arguments[first : first + 2]
        return of_pairs(products, q, pairs(FULL, q.shape[1], k.shape[1]))

    return formula
