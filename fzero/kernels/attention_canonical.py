"""Attention in one order for each query: what a query gets depends on its own document alone, not on the
queries and documents beside it, the number of threads, or where its keys lie.

    out[t] = sum_s p[t, s] v[s] / sum_s p[t, s],   p[t, s] = exp(x[t, s] - max_s x[t, s])     with the scores x

Scores and results are chains of fused multiply-adds in float32, over the head's numbers and over the keys in order; the
sum of p has sixteen lanes by the key's position in its document. So a document alone, in a packed row, in chunks, and a
request in pages have the same bits. The C++ is attention_canonical.cpp. On a GPU the order is that of tiles of keys
(paged_attention_triton.py), to which a sequence is a row of pages too, and there are no documents.

Shapes: those of `attention` and `paged_attention`, in float32 or bfloat16; values may be of another size than keys.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import compile_cache
from fzero.core.device import kind_of
from fzero.kernels import attention_pattern, paged_attention_triton
from fzero.kernels.attention_arguments import PAGE_CODES
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.custom_operator import call_cpp, operator, rows_run

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PAGE = 16  # positions
SIZES = ("b", "t", "s", "h", "g", "k", "v", "kind", "size", "keep", "page", "pages", "threads")


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("row", "token", "head")]


class _CanonicalShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        *((name, _Strides) for name in ("q", "keys", "values")),
    ]


def _with_side_by_side(x: Tensor) -> Tensor:
    """x with the numbers of a head side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _numbers(pattern: list[int]) -> tuple[int, int, int]:
    """(kind, size, keep) of a pattern."""
    return pattern[0], pattern[1], pattern[2]


def _sinks_of(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.to(torch.float32).contiguous()


HOW = "Tensor? sinks, int[] pattern, float scale, float cap"


def _outputs(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty((b, t, h, v.shape[-1])), q.new_empty((b, h, t), dtype=torch.float32)


@operator(
    f"attention_canonical(Tensor q, Tensor k, Tensor v, Tensor? documents, {HOW}) -> (Tensor, Tensor)",
    _outputs,
    flop=attention_pattern.tiled(attention_pattern.FORWARD_PRODUCTS),
)
def canonical_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    pattern: list[int],
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, V], the log-sum-exp of each query's scores and sink, float32 [B, H, T])."""
    if q.is_cuda:
        assert documents is None  # see `supports`
        return on_pages(q, k, v, sinks, pattern, scale, cap)
    q, k, v = map(_with_side_by_side, (q, k, v))
    out, lse = _outputs(q, k, v)
    (b, t, h, size), (_, s, g, _) = q.shape, k.shape
    threads = torch.get_num_threads()
    sizes = b, t, s, h, g, size, v.shape[-1], *_numbers(pattern), 0, 0, threads
    shape = _CanonicalShape(*sizes, scale, cap, *(_Strides(*x.stride()[:3]) for x in (q, k, v)))
    documents = None if documents is None else documents.to(torch.int64).contiguous()
    if out.numel():
        run = getattr(compile_cache.library(__file__, compile_cache.EXACT), f"attention_{TYPES[q.dtype]}")
        call_cpp(run, (q, k, v, _sinks_of(sinks), documents, out, lse), ctypes.byref(shape))
    return out, lse


def on_pages(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: list[int], scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """`canonical_forward` by the kernel of pages, whose bits those of a step of generation are."""
    (b, t, _, _), s = q.shape, k.shape[1]
    k, v = (F.pad(x, (0, 0, 0, 0, 0, -s % PAGE)).reshape(-1, PAGE, *x.shape[2:]) for x in (k, v))
    table = torch.arange(len(k), dtype=torch.int32, device=q.device).view(b, -1)
    starts = torch.arange(b + 1, dtype=torch.int32, device=q.device) * t
    positions = torch.arange(s - t, s, device=q.device).repeat(b)
    pages = (q.flatten(0, 1), k, v), (table, starts, positions)
    out, lse = paged_attention_triton.attend_in_order(*pages, sinks, pattern, scale, cap)
    return out.unflatten(0, (b, t)), lse.unflatten(0, (b, t)).transpose(1, 2).contiguous()


@operator(
    f"paged_attention_canonical(Tensor q, Tensor k, Tensor v, Tensor table, Tensor starts, Tensor positions, {HOW}, "
    "Tensor? key_scales=None, Tensor? value_scales=None) -> Tensor",
    lambda q, k, v, *arguments: q.new_empty((*q.shape[:2], v.shape[-1])),
    flop=lambda q, k, v, table, *rest, out_val, **options: (
        2 * (q.numel() + out_val.numel()) * table.shape[1] * k.shape[1]
    ),
    by_shape=True,
)
def paged_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    starts: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    pattern: list[int],
    scale: float,
    cap: float,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """out [N, H, V] of queries whose keys and values lie in pages; scales: of those in codes."""
    if q.is_cuda:
        pages = (q, k, v), (table, starts, positions)
        return paged_attention_triton.attend_in_order(*pages, sinks, pattern, scale, cap)[0]
    q, k, v = map(_with_side_by_side, (q, k, v))
    (n, h, size), (_, page, g, _) = q.shape, k.shape
    out, lse = q.new_empty((n, h, v.shape[-1])), q.new_empty((n, h), dtype=torch.float32)
    table, starts, positions = table.contiguous(), starts.contiguous(), positions.contiguous()
    sizes = len(starts) - 1, n, 0, h, g, size, v.shape[-1], *_numbers(pattern), page, table.shape[1]
    strides = _Strides(0, *q.stride()[:2]), *(_Strides(*x.stride()[:3]) for x in (k, v))
    shape = _CanonicalShape(*sizes, torch.get_num_threads(), scale, cap, *strides)
    if out.numel():
        name = f"paged_{TYPES[q.dtype]}_{(TYPES | PAGE_CODES)[k.dtype]}"
        run = getattr(compile_cache.library(__file__, compile_cache.EXACT), name)
        scales = (None if x is None else x.contiguous() for x in (key_scales, value_scales))
        tensors = q, k, v, *scales, _sinks_of(sinks), table, starts, positions, out, lse
        call_cpp(run, tensors, ctypes.byref(shape))
    return out


def supports_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    starts: Tensor,
    positions: Tensor,
    *,
    pattern: Pattern = FULL,
    **options: Any,
) -> str:
    """The reason why `paged_forward` does not serve a call; "" if it does."""
    for name, x, dtype in (("table", table, torch.int32), ("starts", starts, torch.int32)):
        if x.dtype != dtype:
            return f"{name} is {x.dtype}; it takes {dtype}"
    if positions.dtype != torch.int64:
        return f"positions are {positions.dtype}; it takes torch.int64"
    coded = kind_of(q) == "cpu" and k_pages.dtype == v_pages.dtype and k_pages.dtype in PAGE_CODES
    k, v = (q, q) if coded else (k_pages, v_pages)
    return _refuse(q, k, v, pattern) or rows_run(q, k_pages, v_pages, table, starts, positions)


def _refuse(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> str:
    if q.dtype not in TYPES or not q.dtype == k.dtype == v.dtype:
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}; it takes three of float32 or bfloat16"
    if kind_of(q) == "cuda":
        return paged_attention_triton.refuse_sizes(q, k, v)
    return "the pattern is bigbird" if pattern.kind == "bigbird" else ""


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Any = None,
    mask: Any = None,
    **options: Any,
) -> str:
    """The reason why the canonical form of `attention` does not serve a call; "" if it does."""
    if positions is not None or mask is not None:
        return f"{'positions' if mask is None else 'a block mask'} is given; it takes queries in order"
    if documents is not None and kind_of(q) == "cuda":
        return "there are documents, which it takes on a CPU alone"
    return _refuse(q, k, v, pattern) or rows_run(q, k, v)
