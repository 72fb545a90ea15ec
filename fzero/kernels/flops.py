"""FLOPs of the operators that multiply matrices, by what they are called with.

fzero's attention counts the (query, key) pairs that its pattern leaves; documents are never counted off. A formula
takes what its operator takes, and `out_val`, the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core.graph_passes import product as product
from fzero.kernels.attention_pattern import FULL, Pattern

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
