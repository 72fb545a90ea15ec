"""Which keys a query of causal attention sees, the pattern and documents packed in one row; and FLOPs of the operators
that multiply matrices, by what they are called with.

fzero's attention counts the (query, key) pairs that its pattern leaves; documents are never counted off. A formula
takes what its operator takes, and `out_val`, the result.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import check_bounds
from fzero.core.graph_passes import product as product
from fzero.core.text_parsing import nearest

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


def symmetric(x: Tensor, *arguments: Any, out_val: Any = None) -> int:
    """Of a triangle of x x^T."""
    batch, m, k = x.shape
    return batch * m * (m + 1) * k  # its diagonal included, and mirrored


def tiled_layer(x: Tensor, params: Sequence[Tensor], *arguments: Any, out_val: Any = None) -> int:
    """Of x [N, D] and each matrix of a tiled layer."""
    return 2 * x.shape[0] * sum(p.numel() for p in params if p.dim() == 2)


def tiled_layer_backward(
    x: Tensor, params: Sequence[Tensor], dy: Tensor, kind: str, tiles: int, tokens: int, impl: str, frozen: bool,
    out_val: Any = None,
) -> int:  # fmt: skip
    """A gradient by inputs and one by weights, and of an MLP its hidden units again."""
    *inner, last = (p.numel() for p in params if p.dim() == 2)
    return 2 * x.shape[0] * ((2 - frozen) * (sum(inner) + last) + sum(inner))


SCALINGS = ("llama3", "yarn", "yarn_whole")


@dataclass(frozen=True)
class RopeScaling:
    """The settings of a scaling of RoPE, which divides the frequencies of long wavelengths by `factor`.

    Wavelengths above original_max_len / low_freq_factor are scaled, those below original_max_len / high_freq_factor are
    not, with a transition between. kind: "llama3", whose transition is linear in 1 / wavelength; "yarn", where it is
    linear in the number of the pair, and attention's scores are multiplied by `score_factor`; "yarn_whole", the same
    with both ends of the transition rounded outwards to whole pairs, as most models have it.

    >>> from fzero.kernels import rope_frequencies
    >>> rope_frequencies(4, 10000.0, RopeScaling(factor=8.0))[0]  # a short wavelength keeps its frequency
    tensor(1.)

    Ref: Grattafiori et al. 2024, "The Llama 3 herd of models", arXiv:2407.21783, section 3.4.2; Peng et al. 2023,
    "YaRN", arXiv:2309.00071, sections 3.2 and 3.4.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    kind: str = "llama3"

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """The scaling that divides all frequencies: every wavelength is above one position."""
        return cls(factor, 1.0, 2.0, 1)

    @classmethod
    def parse(cls, text: str) -> RopeScaling | None:
        """The scaling of a text: linear:FACTOR, KIND:FACTOR:LENGTH with the length before it (original_max_len), or
        KIND:FACTOR:LENGTH:LOW:HIGH, with KIND llama3, yarn or yarn_whole; None for none. The inverse of str.

        >>> str(RopeScaling.parse("linear:4")), str(RopeScaling.parse("llama3:8:8192"))
        ('linear:4', 'llama3:8:8192')
        """
        kind, *numbers = text.split(":")
        try:
            if text == "none":
                return None
            if kind == "linear" and len(numbers) == 1:
                return cls.linear(float(numbers[0]))
            if kind in SCALINGS and len(numbers) in (2, 4):
                low, high = (float(x) for x in numbers[2:] or USUAL_ENDS[kind])
                return cls(float(numbers[0]), low, high, int(numbers[1]), kind)
        except ValueError as error:
            raise ValueError(f"the scaling of RoPE is {text!r}: {error}") from None
        raise ValueError(
            f"the scaling of RoPE is {text!r}; it must be linear:FACTOR, llama3:FACTOR:LENGTH or yarn:FACTOR:LENGTH "
            "with the length that the model was trained with before, or none"
        )

    def __str__(self) -> str:
        factor, *ends = (repr(x).removesuffix(".0") for x in (self.factor, self.low_freq_factor, self.high_freq_factor))
        if self == RopeScaling.linear(self.factor):
            return f"linear:{factor}"
        return ":".join(
            [self.kind, factor, str(self.original_max_len), *(ends if ends != USUAL_ENDS[self.kind] else [])]
        )

    @property
    def is_linear(self) -> bool:
        """Whether it divides all frequencies."""
        return self.kind == "llama3" and 2.0 * math.pi * self.low_freq_factor > self.original_max_len

    @property
    def score_factor(self) -> float:
        """The factor of attention's scores: of "yarn" that of equation 22, for queries and for keys; else 1."""
        return 1.0 if self.kind == "llama3" else (0.1 * math.log(self.factor) + 1.0) ** 2

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.kind not in SCALINGS:
            raise ValueError(f"kind is {self.kind!r}{nearest(self.kind, SCALINGS)}; it must be {' or '.join(SCALINGS)}")
        check_bounds("factor", self.factor, (1, True, 1e6))
        check_bounds("low_freq_factor", self.low_freq_factor, (0.0, False, 1e6))
        check_bounds("high_freq_factor", self.high_freq_factor, (0.0, False, 1e6))
        check_bounds("original_max_len", self.original_max_len, (1, True, 1e9))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor:g}; it must be above low_freq_factor="
                f"{self.low_freq_factor:g}"
            )


USUAL_ENDS = {"llama3": ["1", "4"], "yarn": ["1", "32"], "yarn_whole": ["1", "32"]}
