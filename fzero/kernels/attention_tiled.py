"""Attention by tiles on a CPU, in C++ (attention_tiled.cpp), compiled when first used and kept in Inductor's cache.

The products of a tile, of 64 queries and 128 keys, use torch's `brgemm`; scores stay in the core's cache. Scores and
probabilities are rounded to the inputs' dtype once, before a product, and summed in float32 or wider. The bits do not
depend on the number of threads; at most B G threads have work.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import compile_cache
from fzero.core.compile_cache import have_compiler
from fzero.core.device import kind_of
from fzero.kernels import attention_pattern
from fzero.kernels.attention_pattern import FIELDS
from fzero.kernels.custom_operator import address, operator

DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
SHORT = 64  # queries below which plain products are as fast


class _AttentionShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("b", "t", "s", "h", "g", "k")),
        *((name, ctypes.c_int64) for name in ("kind", *FIELDS, "threads", "wide")),
        ("scale", ctypes.c_double),
        ("cap", ctypes.c_double),
    ]


class _PositionPointers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "query_documents", "key_documents")]


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    return compile_cache.library(__file__, compile_cache.CONTRACTED, f"OF_{DTYPES[dtype]}")


@functools.cache
def has_small_products(dtype: torch.dtype) -> bool:
    """Whether torch's products of small tiles, `brgemm`, take this dtype here."""
    # float32 from AVX2 on, bfloat16 from AVX-512's or AMX's units for it on. For others torch hands float32 to the
    # BLAS.
    return dtype in (torch.bfloat16, torch.float32) and bool(getattr(_library(dtype), f"works_{DTYPES[dtype]}")())


def _threads(k: Tensor) -> int:
    """The threads of a call: each has work of at least one key/value head of a row."""
    return max(1, min(torch.get_num_threads(), k.shape[0] * k.shape[2]))


def _run(
    direction: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    pattern: list[int],
    factors: tuple[float, float],
    wide: bool,
) -> None:
    """places: int64 positions and documents of queries and keys, contiguous or None."""
    if q.numel() and k.numel():
        (b, t, h, dim), (_, s, g, _) = q.shape, k.shape
        shape = _AttentionShape(b, t, s, h, g, dim, *pattern, _threads(k), wide, *factors)
        positions = ctypes.byref(_PositionPointers(*map(address, places)))
        pointers = [ctypes.c_void_p(address(x)) for x in (q, k, v, *tensors)]
        run = getattr(_library(q.dtype), f"{direction}_{DTYPES[q.dtype]}")
        run(*pointers[:3], positions, *pointers[3:], ctypes.byref(shape))


WHERE = "Tensor? query, Tensor? key, Tensor? query_documents, Tensor? key_documents"
HOW = "int[] pattern, float scale, float cap, bool wide"


def _outputs(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide, (b, t, h, _) = torch.promote_types(q.dtype, torch.float32), q.shape
    return q.new_empty(q.shape, dtype=wide if arguments[-1] else q.dtype), q.new_empty((b, h, t), dtype=wide)


@operator(
    f"tiled_forward(Tensor q, Tensor k, Tensor v, {WHERE}, {HOW}) -> (Tensor, Tensor)",
    _outputs,
    flop=attention_pattern.tiled(attention_pattern.FORWARD_PRODUCTS),
)
def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    pattern: list[int],
    scale: float,
    cap: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], the log-sum-exp of each query's scores [B, H, T] in float32 or wider)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = _outputs(q, wide)
    _run("forward", q, k, v, (query, key, query_documents, key_documents), (out, lse), pattern, (scale, cap), wide)
    return out, lse


def _gradients(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    separate = not arguments[-1] and wide != q.dtype  # else the sums are made in dk and dv
    buffer = q.new_empty((_threads(k) if separate else 0, 2, k.shape[1], k.shape[3]), dtype=wide)
    dtype = wide if arguments[-1] else q.dtype
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    return dq, dk, dv, buffer


@operator(
    f"tiled_backward(Tensor q, Tensor k, Tensor v, {WHERE}, Tensor out, Tensor lse, Tensor g, {HOW}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    flop=attention_pattern.tiled(attention_pattern.BACKWARD_PRODUCTS),
)
def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    g: Tensor,
    pattern: list[int],
    scale: float,
    cap: float,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients by q, k and v for the gradient g of out, and the memory of the sums of dk and dv."""
    q, k, v, out, lse, g = (x.contiguous() for x in (q, k, v, out, lse, g))
    results = _gradients(q, k, v, wide)
    places, tensors = (query, key, query_documents, key_documents), (out, lse, g, *results)
    _run("backward", q, k, v, places, tensors, pattern, (scale, cap), wide)
    return results


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Any = None,
    mask: Any = None,
    scale: float | None = None,
    **options: Any,
) -> str:
    """The reason why it does not serve a call; "" if it does."""
    if mask is not None:
        return "it has no block masks"
    if positions is None and q.shape[1] > k.shape[1]:
        return f"the shapes are {list(q.shape)} and {list(k.shape)}; it takes at most as many queries as keys"
    (b, _, h, dim), (_, s, groups, _) = q.shape, k.shape
    if any(kind_of(x) != "cpu" for x in (q, k, v)):
        return "a tensor is not on the CPU"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}; it takes three of bfloat16, float32 or float64"
    if v.shape != k.shape or k.shape != (b, s, groups, dim) or h % max(1, groups):
        return (
            f"the shapes are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; it takes as many values as keys, "
            "and heads that the key heads divide"
        )
    if q.dtype == torch.bfloat16 and dim % 2:
        return f"the head dim is {dim}; in bfloat16 it must be even"
    if scale is not None and scale <= 0.0:
        return f"scale is {scale}; it must be above 0"
    return "" if have_compiler() else "there is no C++ compiler"


def prefers(q: Tensor, *tensors: Tensor, **options: object) -> str:
    """Why "auto" should not take it; measured 1.1 to 2.6 times as fast as torch's own fused attention."""
    # Measured on a Xeon with AMX, forward and backward: 2.0 to 2.6 times as fast as torch's own in bfloat16 at T from
    # 256 to 2048, and 1.3 to 1.7 times in float32; on an EPYC with AVX2 alone 1.1 to 1.6 times in float32.
    if q.shape[1] < SHORT:
        return f"there are fewer than {SHORT} queries"
    if not has_small_products(q.dtype):
        return f"torch has no small products in {q.dtype} on this CPU"
    return ""
