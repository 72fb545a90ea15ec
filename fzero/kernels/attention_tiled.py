"""Attention by tiles on a CPU, in C++ (attention_tiled.cpp), compiled when first used and kept in Inductor's cache.

The products of a tile, of 64 queries and 128 keys, use torch's `brgemm`; scores stay in the core's cache. Scores and
probabilities are rounded to the inputs' dtype once, before a product, and summed in float32 or wider. The bits do not
depend on the number of threads; at most B G threads have work.

Attention by blocks of queries, for CPUs.

Each block of queries is multiplied with the keys up to its end; the backward pass recomputes the probabilities from the
log-sum-exp (Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with whole rows, as a CPU's cache holds them).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.core import compile_cache
from fzero.core.compile_cache import have_compiler
from fzero.core.device import kind_of
from fzero.kernels import attention_pattern
from fzero.kernels.attention_arguments import Positions, Scoring, masked_scores, widened
from fzero.kernels.attention_pattern import FIELDS, FULL, Pattern
from fzero.kernels.custom_operator import Fused, address, cap_logits, operator

MIN_BLOCK, MAX_BLOCKS = 128, 8  # queries of a block, and blocks of a sequence
MAX_SCORES = 1 << 23  # of a head in a block of more than MIN_BLOCK queries: they are T x T / 8 up to T = 8192


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference` by blocks of at least 128 queries, at most 8 of them up to T = 8192."""
    scoring, groups = Scoring.of_call(q, pattern, scale, cap), k.shape[2]
    q = rearrange(q, "b t (g r) k -> (b g) r t k", g=groups)
    k, v = (rearrange(x, "b s g k -> (b g) s k") for x in (k, v))
    if sinks is not None:
        sinks = sinks.reshape(groups, -1).repeat(k.shape[0] // groups, 1)
    has_sinks, has_documents = sinks is not None, documents is not None

    def split(optional: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return optional[0] if has_sinks else None, optional[-1] if has_documents else None

    def forward(q: Tensor, k: Tensor, v: Tensor, *optional: Tensor) -> tuple[Tensor, Tensor]:
        return _blocked_forward(q, k, v, *split(optional), scoring)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *optional, lse = saved
        return _blocked_backward(q, k, v, *split(optional), lse, grads[0], scoring)

    fused = Fused("blocked attention", forward, backward, select_saved=lambda tensors, outs: (*tensors, outs[1]))
    out = fused(q, k, v, *(x for x in (sinks, documents) if x is not None))
    return rearrange(out, "(b g) r t k -> b t (g r) k", g=groups)


class Block(NamedTuple):
    """Some of the queries, the last T of S positions, and the keys that they may see."""

    queries: slice
    keys: slice
    offset: int  # S - T

    def query_rows(self, q: Tensor) -> Tensor:
        """The rows of these queries of q [N, R, T, ...]: [N, R queries, ...]."""
        return q[:, :, self.queries].flatten(1, 2)


def _blocks(t: int, s: int, pattern: Pattern) -> list[Block]:
    size, offset = max(MIN_BLOCK, min(-(-t // MAX_BLOCKS), MAX_SCORES // max(1, s))), s - t
    ends = [(i, min(i + size, t)) for i in range(0, t, size)]
    return [Block(slice(i, j), slice(pattern.first_key(i + offset), j + offset), offset) for i, j in ends]


def _scores(q: Tensor, k: Tensor, block: Block, documents: Tensor | None, scoring: Scoring) -> Tensor:
    """Masked scores [B G, R, queries, keys] of one block, in float32 or wider."""
    s = torch.matmul(widened(block.query_rows(q)), widened(k[:, block.keys]).transpose(1, 2))
    s = cap_logits(s.unflatten(1, (q.shape[1], -1)) * scoring.scale, scoring.cap)
    queries = range(block.queries.start + block.offset, block.queries.stop + block.offset)
    keys = range(block.keys.start, block.keys.stop)
    mask = Positions.of_last(queries, keys, documents, q.device).mask(scoring.pattern)
    if documents is not None:
        mask = mask.repeat_interleave(q.shape[0] // documents.shape[0], 0)
    return s.masked_fill(~mask[:, None], float("-inf"))


# q [N, R, T, K], k and v [N, S, K] with N = B G, sinks [N, R] or None; out like q and the log-sum-exp [N, R, T], both
# with the sinks.
def _blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for block in _blocks(q.shape[2], k.shape[1], scoring.pattern):
        s = _scores(q, k, block, documents, scoring)
        m = s.amax(-1, keepdim=True)
        sink = None if sinks is None else sinks.to(m.dtype)[..., None, None]
        m = m if sink is None else torch.maximum(m, sink)
        p = torch.exp(s - m)
        total = p.sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - m)
        out = torch.matmul(p.to(v.dtype).flatten(1, 2), v[:, block.keys]).view(*p.shape[:3], -1)
        outs.append((out / total).to(q.dtype))
        lses.append((m + torch.log(total)).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _blocked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    lse: Tensor,
    grad: Tensor,
    scoring: Scoring,
) -> tuple[Tensor, ...]:
    dqs, deltas = [], []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for block in _blocks(q.shape[2], k.shape[1], scoring.pattern):
        s, keys = _scores(q, k, block, documents, scoring), block.keys
        p = torch.exp(s - lse[:, :, block.queries, None])
        g = block.query_rows(grad)
        dp = torch.matmul(widened(g), widened(v[:, keys]).transpose(1, 2)).view(p.shape)
        # From dp itself, as rows are whole, and not from out: the gradient of a query with one key is then exactly 0.
        weighed = p * dp
        deltas.append(weighed.sum(-1, keepdim=True))
        ds = torch.addcmul(weighed, p, deltas[-1], value=-1.0) * scoring.scale
        if scoring.cap:  # the derivative of the cap, 0 where nothing is seen
            ds = ds * torch.where(s == float("-inf"), 0.0, 1.0 - (s / scoring.cap).square())
        ds = ds.flatten(1, 2)
        dv[:, keys] += torch.matmul(p.to(g.dtype).flatten(1, 2).transpose(1, 2), g)
        dk[:, keys] += torch.matmul(ds.transpose(1, 2), widened(block.query_rows(q)))
        dqs.append(torch.matmul(ds, widened(k[:, keys])).to(q.dtype).unflatten(1, (q.shape[1], -1)))
    grads = torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)
    if sinks is None:
        return grads
    share = torch.exp(sinks.to(lse.dtype)[..., None] - lse)
    return *grads, -(share * torch.cat(deltas, 2)[..., 0]).sum(-1).to(sinks.dtype)


# ---- of queries at any positions, whose keys may be a part of all ----------------------------------------------------


def _query_blocks(t: int) -> list[tuple[int, int]]:
    return [(start, min(start + MIN_BLOCK, t)) for start in range(0, t, MIN_BLOCK)]


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    # A compiled `cat` of one tensor keeps its strides, and an eager one does not.
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def blocked_forward_at(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], log-sum-exp [B, H, T]) in float32 or wider."""
    outs, lses = [], []
    for start, end in _query_blocks(q.shape[1]):
        pair_mask = positions.queries(start, end).mask(scoring.pattern)[:, None, None]
        scores, has_key = masked_scores(q[:, start:end], k, pair_mask, scoring), pair_mask.any(-1, keepdim=True)
        top = torch.where(has_key, scores.amax(-1, keepdim=True), 0.0)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bgrts,bsgk->bgrtk", p.to(v.dtype), v).to(p.dtype)
        outs.append(rearrange(torch.where(has_key, out / total, 0.0), "b g r t k -> b t (g r) k"))
        lses.append(rearrange(top + torch.log(total), "b g r t 1 -> b (g r) t"))
    return _concatenate(outs, 1), _concatenate(lses, 2)


def blocked_backward_at(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v, in float32 or wider, from out and the log-sum-exp of all keys."""
    groups, dqs = k.shape[2], []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    delta = torch.einsum("bthk,bthk->bht", g.to(lse.dtype), out.to(lse.dtype))
    for start, end in _query_blocks(q.shape[1]):
        pair_mask = positions.queries(start, end).mask(scoring.pattern)[:, None, None]
        scores = masked_scores(q[:, start:end], k, pair_mask, scoring)
        total, row_delta = (rearrange(x[:, :, start:end], "b (g r) t -> b g r t 1", g=groups) for x in (lse, delta))
        p = torch.exp(scores - torch.where(total == float("-inf"), 0.0, total))
        q_rows, g_rows = (rearrange(x[:, start:end], "b t (g r) k -> b g r t k", g=groups) for x in (q, g))
        ds = p * (torch.einsum("bgrtk,bsgk->bgrts", widened(g_rows), widened(v)) - row_delta) * scoring.scale
        if scoring.cap:  # the derivative of the cap, 0 where nothing is seen
            ds = ds * torch.where(scores == float("-inf"), 0.0, 1.0 - (scores / scoring.cap).square())
        dv += torch.einsum("bgrts,bgrtk->bsgk", p.to(g.dtype), g_rows)
        dk += torch.einsum("bgrts,bgrtk->bsgk", ds, widened(q_rows))
        dqs.append(rearrange(torch.einsum("bgrts,bsgk->bgrtk", ds, widened(k)), "b g r t k -> b t (g r) k"))
    return _concatenate(dqs, 1).to(lse.dtype), dk, dv


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
