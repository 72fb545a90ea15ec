"""Flash attention, backward: recomputes the probabilities from the log-sum-exp, tile by tile.

With g the gradient of out, and x = scale q k^T as in the forward pass:

    p = exp(x - lse),   delta = rowsum(g out),   ds = p (g v^T - delta)
    dv = p^T g,   dq = scale ds k,   dk = scale ds^T q

`_flash_dq`: a program per tile of queries loops over keys, for dq; it also writes delta. `_flash_dkv`: a program per
tile of keys loops over queries of all heads that share them, for dk and dv. No two programs add to the same number, so
a second run gives the same bits; the price is that x and g v^T are computed twice.
Ref: Dao 2023, "FlashAttention-2",
arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import attention_pattern
from fzero.kernels.aot import Build
from fzero.kernels.attention_arguments import DOCUMENTS, PATTERN
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.attention_spans import ALL, NONE, SOME, KernelPositions, run_end, span_of
from fzero.kernels.attention_tiles import (
    FAR,
    LN_2,
    LOG2_E,
    SIZES,
    align_tiles,
    attention_builds,
    compact_rows,
    config,
    dot,
    key_tiles,
    load_documents,
    load_positions,
    mask_of_keys,
    may_see,
    needs_tile,
    tables,
    tile,
    visible_pairs,
)
from fzero.kernels.custom_operator import INSTALLED, INTERPRETED, VERSION, operator, tl, triton

# As in the forward pass: tiles of M queries and N keys.
QUERY_CONFIGS = tables("_flash_dq")
KEY_CONFIGS = tables("_flash_dkv")
LOG2_E_ = tl.constexpr(LOG2_E)
# Before 3.7 Triton loads a vector as a product's columns have it: 4 bytes at a time, and all of it in each warp. What
# `gather` takes it loads once, and spreads it through shared memory, as later versions do.
OLD = tl.constexpr(INSTALLED and VERSION < (3, 7))


@triton.jit
def _dq_tiles(
    dq, q, g, lse, delta, lo, hi, keys, queries, pattern, scale, KIND: tl.constexpr, RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dq / scale after the tiles of keys from `lo` to `hi`."""
    k, kt, v, vt, s, _key_start, _docs = keys
    for j in range(lo, hi, N):
        if (
            AT
            or (KIND != "strided" and KIND != "fixed" and KIND != "bigbird")
            or needs_tile(j, keys, queries, pattern, KIND, RANDOM, N)
        ):
            # Read once for two products: the scores, and dq.
            key = tile(k, j, kt, s, DIM, WIDTH, N, not MASKED)
            x = dot(q, tl.trans(key), UPCAST)
            if MASKED:
                x = tl.where(mask_of_keys(j, keys, queries, pattern, KIND, RANDOM, DOCUMENTS, AT, N), x, float("-inf"))
            # The probabilities themselves, as lse holds the maximum and the sum: no running maximum is needed. A score
            # of -inf gives 0.
            p = tl.exp2(x * scale - lse[:, None])
            dp = dot(g, tl.trans(tile(v, j, vt, s, DIM, WIDTH, N, not MASKED)), UPCAST)
            # ds is rounded to k's dtype for the matrix units, as p is in the forward pass; dq adds up in float32.
            dq += dot((p * (dp - delta[:, None])).to(key.dtype), key, UPCAST)
    return dq


@triton.jit(do_not_specialize=SIZES)
def _flash_dq(
    Q, K, V, OUT, LSE, G, DQ, DELTA, QDOCS, KDOCS, REACH, t, s, heads, share, query_start, key_start,
    size, global_count, near, seed, RANDOM: tl.constexpr, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, AT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, M)
    tile_index = tiles - 1 - tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    b, h, i = row // heads, row % heads, tile_index * M
    rows, columns = i + tl.arange(0, M), tl.arange(0, WIDTH)
    q = tile(Q + b * qb + h * qh, i, qt, t, DIM, WIDTH, M, False)
    if AT:
        # Pointers to int32 positions, [B, T] and [B, S]: now to those of this row of the batch.
        query_start, key_start = query_start + b * t, key_start + b * s
    keys = (K + b * kb + h // share * kh, kt, V + b * vb + h // share * vh, vt, s, key_start, KDOCS + b * s)
    span = span_of(query_start, QDOCS + b * t, rows, t, AT, DOCUMENTS)
    query_docs = load_documents(QDOCS + b * t, rows, t, DOCUMENTS)
    queries = (load_positions(query_start, rows, t, AT), span, query_docs)
    pattern = (size, global_count, near, seed)

    # G, OUT and DQ are contiguous [B, T, H, K]: this head begins at `begin`, and its rows are heads * DIM apart.
    begin = (b * t * heads + h) * DIM
    g = tile(G + begin, i, heads * DIM, t, DIM, WIDTH, M, False)
    out = tile(OUT + begin, i, heads * DIM, t, DIM, WIDTH, M, False)
    # In float32 from the rounded out: sum_s p dp is g . out for whatever out the forward pass returned.
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    # A query that sees no key has lse -inf. Its scores are masked, and -inf - 0 gives p = 0, where -inf + inf would be
    # NaN. Rows from t on are read as 0, and not stored.
    lse = tl.load(LSE + row * t + rows, mask=rows < t, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E_)
    # `_flash_dkv` reads it afterwards: its launch follows on the same stream.
    tl.store(DELTA + row * t + rows, delta, mask=rows < t)

    dq = tl.zeros([M, WIDTH], tl.float32)
    if AT:
        SPANS, j = REACH + b * tl.cdiv(s, N) * 4, tl.minimum(i, 0)
        while j < s:
            a = run_end(ALL, SPANS, j, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
            dq = _dq_tiles(
                dq, q, g, lse, delta, j, a, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
                False, UPCAST,
            )  # fmt: skip
            z = run_end(SOME, SPANS, a, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
            dq = _dq_tiles(
                dq, q, g, lse, delta, a, z, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
                True, UPCAST,
            )  # fmt: skip
            j = run_end(NONE, SPANS, z, s, span, pattern, KIND, RANDOM, DOCUMENTS, N, False)
    elif KIND == "strided" or KIND == "fixed" or KIND == "bigbird":
        lo, _a, _z, hi = key_tiles(
            span[0], span[1], s, key_start, size, REACH + (b * tiles + tile_index) * 2, KIND, DOCUMENTS, N
        )
        dq = _dq_tiles(
            dq, q, g, lse, delta, lo, hi, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
            True, UPCAST,
        )  # fmt: skip
    else:
        lo, a, z, hi = key_tiles(
            span[0], span[1], s, key_start, size, REACH + (b * tiles + tile_index) * 2, KIND, DOCUMENTS, N
        )
        if KIND != "full" or DOCUMENTS:
            dq = _dq_tiles(
                dq, q, g, lse, delta, lo, a, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
                True, UPCAST,
            )  # fmt: skip
        dq = _dq_tiles(
            dq, q, g, lse, delta, a, z, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
            False, UPCAST,
        )  # fmt: skip
        dq = _dq_tiles(
            dq, q, g, lse, delta, z, hi, keys, queries, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, N,
            True, UPCAST,
        )  # fmt: skip
    pointers = DQ + begin + (i.to(tl.int64) * heads * DIM) + (tl.arange(0, M)[:, None] * heads * DIM + columns[None, :])
    # `scale` includes the factor log2(e) of exp2; LN_2 takes it out again.
    tl.store(
        pointers, (dq * (scale * LN_2)).to(DQ.dtype.element_ty), mask=(rows < t)[:, None] & (columns < DIM)[None, :]
    )


@triton.jit
def query_tiles(first, last, t, query_start, size, REACH, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, M: tl.constexpr):
    """The range of queries for keys at [first, last]: (lo, a, z, hi) as in `key_tiles`."""
    # Causality: the first key is seen from its own position on (lo), all keys from that of the last one on (a). The
    # first key is the first that a window or a block leaves behind (z), the last key the last (hi).
    lo = tl.minimum(tl.maximum(first - query_start, 0), t)
    a = tl.maximum(last - query_start, 0)
    z = tl.minimum(tl.maximum(end_query(first, size, KIND) - query_start, 0), t)
    hi = tl.minimum(tl.maximum(end_query(last, size, KIND) - query_start, 0), t)
    if DOCUMENTS:
        # Two numbers a tile of keys, see `document_bounds` with AFTER: where its documents end, and up to where all are
        # of its one document.
        hi, z = tl.minimum(hi, tl.load(REACH)), tl.minimum(z, tl.load(REACH + 1))
    return align_tiles(lo, a, z, hi, M)


@triton.jit
def end_query(key, size, KIND: tl.constexpr):
    """The end of the queries that see `key`, in full, window and local patterns."""
    if KIND == "window":
        return key + size
    if KIND == "local":
        return (key // size + 1) * size
    # FAR in the type of `key`: no end.
    return tl.maximum(key, FAR)


@triton.jit
def load_values(base, offsets, count, WHOLE: tl.constexpr):
    """Load base[at] for the columns of a product; unless WHOLE (all exist), zeros from `count` on."""
    values = tl.load(base + offsets) if WHOLE else tl.load(base + offsets, mask=offsets < count, other=0.0)
    return tl.gather(values, tl.arange(0, offsets.shape[0]), 0) if OLD else values


@triton.jit
def _dkv_tiles(
    dk, dv, k, v, lo, count, skip, queries, keys, pattern, scale, KIND: tl.constexpr, RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv) after `count` tiles of queries of each of the `share` heads, from `lo` on."""
    # Queries from skip[0] on are moved by skip[1], which jumps over a range that another call handles. Scores are
    # [keys, queries] here.
    q, qt, qh, g, gt, lse, delta, t, query_start, docs, share = queries
    key, span, end, key_docs = keys
    for step in range(0, count * share):  # step = head * count + tile
        h, i = tl.cast(step // count, tl.int64), lo + step % count * M
        i = tl.where(i < skip[0], i, i + skip[1])
        if (
            AT
            or (KIND != "strided" and KIND != "fixed" and KIND != "bigbird")
            or may_see(i + query_start, i + query_start + M - 1, span[0], span[1], pattern, KIND, RANDOM)
        ):
            rows = i + tl.arange(0, M)
            query = tile(q + h * qh, i, qt, t, DIM, WIDTH, M, not MASKED)
            # Keys are the rows of x, so that p and ds are left operands of dv and dk as they are, and only q and g are
            # turned.
            x = dot(k, tl.trans(query), UPCAST)
            # In units of log 2, as x * scale is.
            level = load_values(lse + h * t, rows, t, not MASKED) * LOG2_E_
            if MASKED:
                query_docs = load_documents(docs, rows, t, DOCUMENTS)
                mask = visible_pairs(
                    load_positions(query_start, rows, t, AT)[None, :],
                    key[:, None],
                    query_docs[None, :],
                    key_docs[:, None],
                    end,
                    pattern,
                    KIND,
                    RANDOM,
                    DOCUMENTS,
                )
                x = tl.where(mask, x, float("-inf"))
                # Of a query that sees no key: x is -inf as well, and -inf + inf would be NaN.
                level = tl.where(level == float("-inf"), 0.0, level)
            p = tl.exp2(x * scale - level[None, :])
            # G is contiguous [B, T, H, K]: from head to head DIM elements. Rows from t on are zeros in g, and add
            # nothing to dv.
            grad = tile(g + h * DIM, i, gt, t, DIM, WIDTH, M, not MASKED)
            dv += dot(p.to(grad.dtype), grad, UPCAST)
            dp = dot(v, tl.trans(grad), UPCAST)
            d = load_values(delta + h * t, rows, t, not MASKED)
            # All of g, delta and q are 0 in rows from t on, so neither do they add to dk.
            dk += dot((p * (dp - d[None, :])).to(query.dtype), query, UPCAST)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _flash_dkv(
    Q, K, V, LSE, G, DELTA, DK, DV, QDOCS, KDOCS, REACH, t, s, heads, share, query_start, key_start, size, global_count,
    near, seed, RANDOM: tl.constexpr, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, AT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs are numbered row * tiles + tile, with row = b * groups + group: a tile of N keys of one key/value head.
    # Its query heads are h to h + share - 1; `level` is the start of their rows in LSE and DELTA [B, H, T].
    tiles, groups = tl.cdiv(s, N), heads // share
    tile_index = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    b, group, j = row // groups, row % groups, tile_index * N
    rows, columns = j + tl.arange(0, N), tl.arange(0, WIDTH)
    # Both stay in registers while the queries pass.
    k = tile(K + b * kb + group * kh, j, kt, s, DIM, WIDTH, N, False)
    v = tile(V + b * vb + group * vh, j, vt, s, DIM, WIDTH, N, False)
    if AT:
        # Pointers to int32 positions, [B, T] and [B, S]: now to those of this row of the batch.
        query_start, key_start = query_start + b * t, key_start + b * s
    span = span_of(key_start, KDOCS + b * s, rows, s, AT, DOCUMENTS)
    key_docs = load_documents(KDOCS + b * s, rows, s, DOCUMENTS)
    # With AT positions say nothing about where the keys end; masked rows have the position FAR, after every query's.
    keys = (load_positions(key_start, rows, s, AT), span, FAR if AT else s + key_start, key_docs)
    pattern = (size, global_count, near, seed)
    # One program adds up all query heads of its key/value head, in their order: no two programs write to the same dk.
    h = group * share
    level = (b * heads + h) * t
    queries = (
        Q + b * qb + h * qh, qt, qh, G + (b * t * heads + h) * DIM, heads * DIM, LSE + level, DELTA + level, t,
        query_start, QDOCS + b * t,
        share,
    )  # fmt: skip

    dk, dv = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    if AT:
        # Four numbers a tile of M queries; i begins as 0 in the type of j.
        SPANS, i = REACH + b * tl.cdiv(t, M) * 4, tl.minimum(j, 0)
        while i < t:
            # Nothing is jumped over here: `skip` is a run's end and 0.
            a = run_end(ALL, SPANS, i, t, span, pattern, KIND, RANDOM, DOCUMENTS, M, True)
            dk, dv = _dkv_tiles(
                dk, dv, k, v, i, (a - i) // M, (a, 0), queries, keys, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM,
                WIDTH, M, False, UPCAST,
            )  # fmt: skip
            z = run_end(SOME, SPANS, a, t, span, pattern, KIND, RANDOM, DOCUMENTS, M, True)
            dk, dv = _dkv_tiles(
                dk, dv, k, v, a, tl.cdiv(tl.minimum(z, t) - tl.minimum(a, t), M // 2), (z, 0), queries, keys, pattern,
                scale, KIND, RANDOM, DOCUMENTS, AT, DIM, WIDTH, M // 2, True, UPCAST,
            )  # fmt: skip
            i = run_end(NONE, SPANS, z, t, span, pattern, KIND, RANDOM, DOCUMENTS, M, True)
    else:
        lo, a, z, hi = query_tiles(
            span[0], span[1], t, query_start, size, REACH + (b * tiles + tile_index) * 2, KIND, DOCUMENTS, M // 2
        )
        full_tiles = (z - a) // M
        if KIND == "strided" or KIND == "fixed" or KIND == "bigbird":
            full_tiles = 0
        # Masked tiles have M / 2 queries: a mask needs registers, and smaller tiles waste less work at the edges.
        # The masked tiles of [lo, hi): all but the 2 full_tiles half tiles from a on, over which `skip` jumps.
        count = tl.cdiv(hi - lo, M // 2) - full_tiles * 2
        dk, dv = _dkv_tiles(
            dk, dv, k, v, lo, count, (a, full_tiles * M), queries, keys, pattern, scale, KIND, RANDOM, DOCUMENTS, AT,
            DIM, WIDTH, M // 2, True, UPCAST,
        )  # fmt: skip
        if KIND != "strided" and KIND != "fixed" and KIND != "bigbird":
            dk, dv = _dkv_tiles(
                dk, dv, k, v, a, full_tiles, (hi, 0), queries, keys, pattern, scale, KIND, RANDOM, DOCUMENTS, AT, DIM,
                WIDTH, M, False, UPCAST,
            )  # fmt: skip
    # DK and DV are contiguous [B, S, G, K]: element (b, j + r, group, c) at ((b s + j + r) groups + group) DIM + c.
    offsets = ((b * s + j) * groups + group) * DIM + (tl.arange(0, N)[:, None] * groups * DIM + columns[None, :])
    mask = (rows < s)[:, None] & (columns < DIM)[None, :]
    tl.store(DK + offsets, (dk * (scale * LN_2)).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + offsets, dv.to(DV.dtype.element_ty), mask=mask)


def _gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _wide_gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))


@operator(
    f"flash_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {DOCUMENTS}, "
    f"{PATTERN}, int query_start, int key_start) -> (Tensor, Tensor, Tensor)",
    _gradients,
    flop=attention_pattern.flash(attention_pattern.SPLIT_PRODUCTS, 1),
)
def flash_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    pattern: list[int],
    scale: float,
    query_start: int,
    key_start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) for the gradient g of out; the other arguments as in `flash_forward`."""
    places = KernelPositions(query_start, key_start, query_documents, key_documents)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return _backward(g, (q, k, v), (out, lse), places, pattern, scale, grads)


@operator(
    "flash_backward_at(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor query, Tensor key, "
    f"{DOCUMENTS}, {PATTERN}) -> (Tensor, Tensor, Tensor)",
    _wide_gradients,
    flop=attention_pattern.flash_at(attention_pattern.SPLIT_PRODUCTS, 1),
)
def flash_backward_at(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float32 for the gradient g of out; out and lse are those over all keys."""
    places = KernelPositions(query, key, query_documents, key_documents).small()
    grads = tuple(torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    return _backward(g, (q, k, v), (out, lse), places, pattern, scale, grads)


Three = tuple[Tensor, ...]


def _backward(
    g: Tensor,
    inputs: Three,
    outputs: tuple[Tensor, Tensor],
    places: KernelPositions,
    pattern: Sequence[int],
    scale: float,
    grads: Three,
) -> Any:
    (q, k, v), (out, lse), (dq, dk, dv), mask_pattern = inputs, outputs, grads, Pattern.of_numbers(pattern)
    (b, t, heads, dim), (s, groups) = q.shape, k.shape[1:3]
    if b * t * s * heads == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # The kernels compute addresses in g and out without strides.
    q, k, v, g, out = compact_rows(q), compact_rows(k), compact_rows(v), g.contiguous(), out.contiguous()
    # Made by the first kernel, read by the second.
    delta = torch.empty_like(lse)
    sizes = (t, s, heads, heads // groups, *places.starts, *mask_pattern.sizes, scale * LOG2_E)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    options = {"KIND": mask_pattern.kind, **places.options, "DIM": dim, "UPCAST": INTERPRETED}

    width, blocks = config("_flash_dq", QUERY_CONFIGS, q, mask_pattern.kind, places.options["AT"])
    _flash_dq[(triton.cdiv(t, blocks["M"]) * b * heads,)](
        q, k, v, out, lse, g, dq, delta, *places.of_queries(blocks, q), *sizes,
        *strides, **options, WIDTH=width, **blocks,
    )  # fmt: skip
    width, blocks = config("_flash_dkv", KEY_CONFIGS, q, mask_pattern.kind, places.options["AT"])
    _flash_dkv[(triton.cdiv(s, blocks["N"]) * b * groups,)](
        q, k, v, lse, g, delta, dk, dv, *places.of_keys(blocks, q), *sizes, *strides, **options, WIDTH=width, **blocks
    )
    return dq, dk, dv


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    yield from attention_builds(_flash_dq, gpu)
    # With K = 256 two accumulators take half of the registers, so the compiler spills some addresses that are constant
    # in the loop.
    yield from attention_builds(_flash_dkv, gpu, spills=64)
