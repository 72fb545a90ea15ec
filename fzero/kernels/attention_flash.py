"""Flash attention, forward: the softmax runs over tiles of keys with a running maximum and sum.

For a tile of queries and each tile of keys that any of them sees, with m the largest score so far and l the sum of
exponentials:

    x = scale q k^T,   m' = max(m, rowmax x),   p = exp(x - m')
    l = exp(m - m') l + rowsum p,   o = exp(m - m') o + p v

At the end out = o / l, and the log-sum-exp of the scores is m + log l. Which tiles are visited is in attention_tiles.
Ref: Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1.

Names in the kernels: a program handles M queries of one head of one row of the batch, and loops over tiles of N keys.
Strides are xb (batch), xt (position), xh (head) of x in q, k, v; elements of a head are contiguous. `share` = H / G
query heads share a key/value head.

Shapes: q [B, T, H, K], k and v [B, S, G, K], out [B, T, H, K], lse float32 [B, H, T]. Query i is at position
query_start + i, key j at key_start + j, both at least 0; `_at`: at positions that are given. A query that sees nothing
has out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import attention_pattern
from fzero.kernels.aot import Build
from fzero.kernels.attention_arguments import DOCUMENTS, PATTERN, outputs_of
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.attention_spans import ALL, NONE, SOME, KernelPositions, run_end, span_of
from fzero.kernels.attention_tiles import (
    LN_2,
    LOG2_E,
    SIZES,
    attention_builds,
    compact_rows,
    config,
    dot,
    key_tiles,
    load_documents,
    load_positions,
    mask_of_keys,
    needs_tile,
    tables,
    tile,
)
from fzero.kernels.custom_operator import INTERPRETED, operator, tl, triton

# By the head dim rounded up to a power of two (or float32): tiles of M queries and N keys.
CONFIGS = tables("_flash_forward")


@triton.jit
def _forward_tiles(
    o, m, l, q, lo, hi, keys, queries, pattern, scale, KIND: tl.constexpr, RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(o, m, l) after the tiles of keys from `lo` to `hi`; m in units of log 2, as the hardware has exp2."""
    k, kt, v, vt, s, _key_start, _docs = keys
    for j in range(lo, hi, N):
        # Within [lo, hi) a scattered pattern has tiles of which no query sees a key; the other patterns have none.
        if (
            AT
            or (KIND != "strided" and KIND != "fixed" and KIND != "bigbird")
            or needs_tile(j, keys, queries, pattern, KIND, RANDOM, N)
        ):
            # Scores [M, N] without the scale, which is above 0 (`serves`): the maximum of the scaled ones is the scaled
            # maximum, and x is multiplied once, inside exp2.
            x = dot(q, tl.trans(tile(k, j, kt, s, DIM, WIDTH, N, not MASKED)), UPCAST)
            if MASKED:
                x = tl.where(mask_of_keys(j, keys, queries, pattern, KIND, RANDOM, DOCUMENTS, AT, N), x, float("-inf"))
            higher = tl.maximum(m, tl.max(x, 1) * scale)
            # For a row that has seen no key yet m is -inf, and -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
            p = tl.exp2(x * scale - base[:, None])
            # What is summed so far was relative to the old maximum, and is 0 for a row that had none (exp2 of -inf).
            shrink = tl.exp2(m - base)
            value = tile(v, j, vt, s, DIM, WIDTH, N, not MASKED)
            # The product takes p as rounded to v's dtype, in which the matrix units multiply; both sums are in float32,
            # and l takes p as it was before.
            o = o * shrink[:, None] + dot(p.to(value.dtype), value, UPCAST)
            l = l * shrink + tl.sum(p, 1)
            m = higher
    return o, m, l


@triton.jit(do_not_specialize=SIZES)
def _flash_forward(
    Q, K, V, OUT, LSE, QDOCS, KDOCS, REACH, t, s, heads, share, query_start, key_start, size, global_count, near,
    seed, RANDOM: tl.constexpr, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, AT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs are numbered row * tiles + tile, with row = b * heads + h. Tiles run in reverse: causality gives the last
    # ones the most keys, and the longest programs should start first. `row` is int64, so that b * stride cannot
    # overflow.
    tiles = tl.cdiv(t, M)
    tile_index = tiles - 1 - tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    b, h, i = row // heads, row % heads, tile_index * M
    # Read once, and used for every tile of keys.
    q = tile(Q + b * qb + h * qh, i, qt, t, DIM, WIDTH, M, False)
    if AT:
        # Pointers to int32 positions, [B, T] and [B, S]: now to those of this row of the batch.
        query_start, key_start = query_start + b * t, key_start + b * s
    # h // share: runs of `share` query heads have one key/value head.
    keys = (K + b * kb + h // share * kh, kt, V + b * vb + h // share * vh, vt, s, key_start, KDOCS + b * s)
    rows = i + tl.arange(0, M)
    span = span_of(query_start, QDOCS + b * t, rows, t, AT, DOCUMENTS)
    query_docs = load_documents(QDOCS + b * t, rows, t, DOCUMENTS)
    queries = (load_positions(query_start, rows, t, AT), span, query_docs)
    pattern = (size, global_count, near, seed)

    # The state of the softmax: output [M, WIDTH] and sum before the division, and the maximum in units of log 2.
    o, m, l = tl.zeros([M, WIDTH], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if AT:
        # Four numbers a tile of keys. j begins as 0 in the type of i, as a loop's variable keeps its type.
        SPANS, j = REACH + b * tl.cdiv(s, N) * 4, tl.minimum(i, 0)
        while j < s:
            # Tiles from j on, in runs of the same coverage: [j, a) needs no mask, [a, z) does, and what follows is not
            # seen. A run may be empty.
            a = run_end(ALL, SPANS, j, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
            o, m, l = _forward_tiles(
                o, m, l, q, j, a, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, False,
                UPCAST,
            )  # fmt: skip
            z = run_end(SOME, SPANS, a, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
            o, m, l = _forward_tiles(
                o, m, l, q, a, z, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, True,
                UPCAST,
            )  # fmt: skip
            j = run_end(NONE, SPANS, z, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
    # Which pairs are seen has no left and right edge: every tile of the range is tested, and takes a mask.
    elif KIND == "strided" or KIND == "fixed" or KIND == "bigbird":
        lo, _a, _z, hi = key_tiles(
            span[0], span[1], s, key_start, size, REACH + (b * tiles + tile_index) * 2, KIND, DOCUMENTS, N
        )
        o, m, l = _forward_tiles(
            o, m, l, q, lo, hi, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, True, UPCAST
        )
    else:
        lo, a, z, hi = key_tiles(
            span[0], span[1], s, key_start, size, REACH + (b * tiles + tile_index) * 2, KIND, DOCUMENTS, N
        )
        # [lo, a): at the left edge some queries do not see a key any more. All see those from 0 on where neither a
        # pattern nor a document ends.
        if KIND != "full" or DOCUMENTS:
            o, m, l = _forward_tiles(
                o, m, l, q, lo, a, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, True,
                UPCAST,
            )  # fmt: skip
        o, m, l = _forward_tiles(
            o, m, l, q, a, z, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, False, UPCAST
        )
        o, m, l = _forward_tiles(
            o, m, l, q, z, hi, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N, True, UPCAST
        )

    # The division of the softmax, once for all tiles.
    o = o / tl.where(l == 0.0, 1.0, l)[:, None]  # a query that sees no key has l = 0: out 0, lse -inf
    # out is contiguous [B, T, H, K]: element (b, i + r, h, c) at ((b t + i + r) heads + h) DIM + c. lse is [B, H, T]:
    # row t + i + r.
    columns = tl.arange(0, WIDTH)
    out = OUT + (b * t + i) * heads * DIM + h * DIM + (tl.arange(0, M)[:, None] * heads * DIM + columns[None, :])
    tl.store(out, o.to(OUT.dtype.element_ty), mask=(rows < t)[:, None] & (columns < DIM)[None, :])
    tl.store(LSE + row * t + rows, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LN_2), mask=rows < t)


def _wide_outputs(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = outputs_of(q)
    return out.to(torch.float32), lse


@operator(
    f"flash_forward(Tensor q, Tensor k, Tensor v, {DOCUMENTS}, {PATTERN}, int query_start, int key_start) -> "
    "(Tensor, Tensor)",
    outputs_of,
    flop=attention_pattern.flash(attention_pattern.FORWARD_PRODUCTS),
)
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    pattern: list[int],
    scale: float,
    query_start: int,
    key_start: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse); pattern: its `numbers`; documents int [B, T] and [B, S], or None."""
    places = KernelPositions(query_start, key_start, query_documents, key_documents)
    return _forward(q, k, v, places, pattern, scale, q.dtype)


@operator(
    f"flash_forward_at(Tensor q, Tensor k, Tensor v, Tensor query, Tensor key, {DOCUMENTS}, {PATTERN}) -> "
    "(Tensor, Tensor)",
    _wide_outputs,
    flop=attention_pattern.flash_at(attention_pattern.FORWARD_PRODUCTS),
)
def flash_forward_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Tensor,
    key: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse), both float32, of queries at `query` on keys at `key`, int [B, T] and [B, S] below 2^30."""
    places = KernelPositions(query, key, query_documents, key_documents).small()
    return _forward(q, k, v, places, pattern, scale, torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, places: KernelPositions, pattern: Sequence[int], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    (b, t, h, dim), s, mask_pattern = q.shape, k.shape[1], Pattern.of_numbers(pattern)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
    if b * t * h == 0:
        return out, lse
    q, k, v = compact_rows(q), compact_rows(k), compact_rows(v)
    width, blocks = config("_flash_forward", CONFIGS, q, mask_pattern.kind, places.options["AT"])
    _flash_forward[(triton.cdiv(t, blocks["M"]) * b * h,)](
        q, k, v, out, lse, *places.of_queries(blocks, q), t, s, h, h // k.shape[2], *places.starts, *mask_pattern.sizes,
        scale * LOG2_E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], KIND=mask_pattern.kind, DIM=dim, WIDTH=width,
        UPCAST=INTERPRETED, **places.options, **blocks,
    )  # fmt: skip
    return out, lse


def serves(q: Tensor, k: Tensor, v: Tensor, scale: float | None, cap: float) -> str:
    """The reason why the kernels do not take q, k and v; "" if they do."""
    (b, _, h, dim), (_, s, groups, _) = q.shape, k.shape
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}; it takes three of float32, bfloat16 or float16"
    if v.shape != k.shape or k.shape != (b, s, groups, dim) or h % max(1, groups) or dim > 256:
        return (
            f"the shapes are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; it takes head dims up to 256, "
            "keys and values alike"
        )
    if scale is not None and scale <= 0.0:
        return f"scale is {scale}; it must be above 0"
    return "it does not cap scores" if cap else ""


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    yield from attention_builds(_flash_forward, gpu)
