"""Attention under a block mask: flash attention over the blocks of keys that a block of queries sees.

The sums are those of attention_flash and attention_flash_backward. A program handles M queries of one head (keys, for
dk and dv), within one of the mask's units of UNIT rows, and goes through the units that the mask lists for it
(`BlockMask.lists`), N rows at a time. No two programs add to the same number, so a second run gives the same bits.

Names and shapes are those of attention_flash. START, UNITS: the lists of the mask, of one head or of all;
`head_rows`: rows of the lists of a head, 0 if all heads have the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.kernels.aot import Build, build
from fzero.kernels.attention_arguments import outputs_of
from fzero.kernels.attention_pattern import FORWARD_PRODUCTS, SPLIT_PRODUCTS
from fzero.kernels.attention_tiles import LN_2, LOG2_E, compact_rows, dot
from fzero.kernels.custom_operator import INTERPRETED, VERSION, operator, tl, triton

SIZES = ["t", "s", "heads", "share", "head_rows"]
LOG2_E_ = tl.constexpr(LOG2_E)


@triton.jit
def listed_rows(UNITS, slot, end, count, UNIT: tl.constexpr):
    """The rows of the listed units at the slots `slot`, UNIT each; -1 after the list's end or `count`."""
    # UNIT slots in a row read one entry of the list; `-1` of a slot after its end becomes a row of -1.
    unit = tl.load(UNITS + slot // UNIT, mask=slot < end, other=-1)
    rows = unit * UNIT + slot % UNIT
    return tl.where((unit >= 0) & (rows < count), rows, -1)


@triton.jit
def slots(START, row, UNIT: tl.constexpr):
    """(first, end) of the slots of a row of the lists."""
    # START has one more number than there are rows, where the last list ends.
    return tl.load(START + row) * UNIT, tl.load(START + row + 1) * UNIT


@triton.jit
def load_rows(base, rows, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of a matrix, `stride` apart, zeros for -1 and from column DIM on."""
    columns = tl.arange(0, WIDTH)[None, :]
    # In int64: rows are anywhere in the sequence, and row * stride may pass 2^31. Negative addresses are masked off.
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns
    return tl.load(pointers, mask=(rows >= 0)[:, None] & (columns < DIM), other=0.0)


@triton.jit
def load_numbers(base, rows):
    """Numbers of rows, 0 for -1."""
    return tl.load(base + rows, mask=rows >= 0, other=0)


@triton.jit
def visible_pairs(query, key, query_docs, key_docs, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The mask of pairs in listed units, broadcast; rows of -1 see nothing and are not seen."""
    mask = (query >= 0) & (key >= 0)
    if CAUSAL:
        mask = mask & (key <= query)
    if DOCUMENTS:
        mask = mask & (query_docs == key_docs)
    return mask


@triton.jit
def tile_rows(tile, count, M: tl.constexpr):
    """The rows of a tile, -1 from row `count` on."""
    rows = tile * M + tl.arange(0, M)
    return tl.where(rows < count, rows, -1)


@triton.jit(do_not_specialize=SIZES)
def _masked_forward(
    Q, K, V, OUT, LSE, DOCS, START, UNITS, t, s, heads, share, head_rows, scale, qb, qt, qh, kb, kt, kh, vb, vt, vh,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs are numbered (b * heads + h) * tiles + tile.
    tiles = tl.cdiv(t, M)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = row // heads, row % heads
    # h // share: runs of `share` query heads have one key/value head.
    K, V, DOCS = K + b * kb + h // share * kh, V + b * vb + h // share * vh, DOCS + b * t
    query = tile_rows(tile, t, M)
    q = load_rows(Q + b * qb + h * qh, query, qt, DIM, WIDTH)
    query_docs = load_numbers(DOCS, query) if DOCUMENTS else query
    # A tile lies within one unit of queries, number tile * M // UNIT. head_rows is 0 where all heads have one list.
    lo, end = slots(START, h * head_rows + tile * M // UNIT, UNIT)

    o, m, l = tl.zeros([M, WIDTH], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    # N slots at a time, from unit to unit of the list; the last step has slots after its end, whose scores are masked.
    for n in range(lo, end, N):
        key = listed_rows(UNITS, n + tl.arange(0, N), end, s, UNIT)
        key_docs = load_numbers(DOCS, key) if DOCUMENTS else key
        x = dot(q, tl.trans(load_rows(K, key, kt, DIM, WIDTH)), UPCAST)
        pair_mask = visible_pairs(
            query[:, None], key[None, :], query_docs[:, None], key_docs[None, :], CAUSAL, DOCUMENTS
        )
        # Masked in every step: units may be cut by the diagonal, by documents or by the end of the keys.
        x = tl.where(pair_mask, x, float("-inf"))
        # The scale is above 0, so the maximum of the scaled scores is the scaled maximum.
        higher = tl.maximum(m, tl.max(x, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # for a row that has seen no key yet
        p = tl.exp2(x * scale - base[:, None])
        shrink = tl.exp2(m - base)
        value = load_rows(V, key, vt, DIM, WIDTH)
        # p is rounded to v's dtype for the matrix units; the sums are in float32, that of l from p before the rounding.
        o = o * shrink[:, None] + dot(p.to(value.dtype), value, UPCAST)
        l = l * shrink + tl.sum(p, 1)
        m = higher

    # A query that sees no key has l = 0: out 0, lse -inf.
    o = o / tl.where(l == 0.0, 1.0, l)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    # OUT is contiguous [B, T, H, K], LSE [B, H, T].
    out = OUT + (b * t * heads + h) * DIM + query.to(tl.int64)[:, None] * (heads * DIM) + columns
    tl.store(out, o.to(OUT.dtype.element_ty), mask=(query >= 0)[:, None] & (columns < DIM))
    tl.store(LSE + row * t + query, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LN_2), mask=query >= 0)


@triton.jit(do_not_specialize=SIZES)
def _masked_dq(
    Q, K, V, OUT, LSE, G, DQ, DELTA, DOCS, START, UNITS, t, s, heads, share, head_rows, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs as in the forward pass.
    tiles = tl.cdiv(t, M)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = row // heads, row % heads
    K, V, DOCS = K + b * kb + h // share * kh, V + b * vb + h // share * vh, DOCS + b * t
    query, begin = tile_rows(tile, t, M), (b * t * heads + h) * DIM  # of G, OUT and DQ, contiguous [B, T, H, K]
    q = load_rows(Q + b * qb + h * qh, query, qt, DIM, WIDTH)
    g = load_rows(G + begin, query, heads * DIM, DIM, WIDTH)
    out = load_rows(OUT + begin, query, heads * DIM, DIM, WIDTH)
    query_docs = load_numbers(DOCS, query) if DOCUMENTS else query
    lse = load_numbers(LSE + row * t, query)
    # From the rounded out, in float32: sum_s p dp is g . out for whatever the forward pass returned.
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    # 0 for a query without keys: its scores are -inf, and -inf - -inf would be NaN. p is 0 then.
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E_)
    # `_masked_dkv`, launched after this kernel on the same stream, reads it.
    tl.store(DELTA + row * t + query, delta, mask=query >= 0)

    lo, end = slots(START, h * head_rows + tile * M // UNIT, UNIT)
    dq = tl.zeros([M, WIDTH], tl.float32)
    for n in range(lo, end, N):
        key = listed_rows(UNITS, n + tl.arange(0, N), end, s, UNIT)
        key_docs = load_numbers(DOCS, key) if DOCUMENTS else key
        k = load_rows(K, key, kt, DIM, WIDTH)
        pair_mask = visible_pairs(
            query[:, None], key[None, :], query_docs[:, None], key_docs[None, :], CAUSAL, DOCUMENTS
        )
        p = tl.exp2(tl.where(pair_mask, dot(q, tl.trans(k), UPCAST), float("-inf")) * scale - lse[:, None])
        dp = dot(g, tl.trans(load_rows(V, key, vt, DIM, WIDTH)), UPCAST)
        # ds is rounded to k's dtype for the matrix units; dq adds up in float32.
        dq += dot((p * (dp - delta[:, None])).to(k.dtype), k, UPCAST)
    columns = tl.arange(0, WIDTH)[None, :]
    pointers = DQ + begin + query.to(tl.int64)[:, None] * (heads * DIM) + columns
    # `scale` includes the factor log2(e) of exp2; LN_2 takes it out again.
    tl.store(pointers, (dq * (scale * LN_2)).to(DQ.dtype.element_ty), mask=(query >= 0)[:, None] & (columns < DIM))


@triton.jit(do_not_specialize=SIZES)
def _masked_dkv(
    Q, K, V, LSE, G, DELTA, DK, DV, DOCS, START, UNITS, t, s, heads, share, head_rows, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs are numbered (b * groups + group) * tiles + tile, of keys; scores are [keys, queries] here.
    tiles, groups = tl.cdiv(s, M), heads // share
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, group = row // groups, row % groups
    DOCS, key = DOCS + b * t, tile_rows(tile, s, M)
    k = load_rows(K + b * kb + group * kh, key, kt, DIM, WIDTH)
    v = load_rows(V + b * vb + group * vh, key, vt, DIM, WIDTH)
    key_docs = load_numbers(DOCS, key) if DOCUMENTS else key

    dk, dv = tl.zeros([M, WIDTH], tl.float32), tl.zeros([M, WIDTH], tl.float32)
    # All query heads of this key/value head in their order: no other program adds to these rows.
    for i in range(0, share):
        h = group * share + i
        # The lists are those of keys here: which units of queries see the unit of this tile.
        lo, end = slots(START, h * head_rows + tile * M // UNIT, UNIT)
        level = (b * heads + h) * t
        for n in range(lo, end, N):
            query = listed_rows(UNITS, n + tl.arange(0, N), end, t, UNIT)
            query_docs = load_numbers(DOCS, query) if DOCUMENTS else query
            q = load_rows(Q + b * qb + h * qh, query, qt, DIM, WIDTH)
            g = load_rows(G + (b * t * heads + h) * DIM, query, heads * DIM, DIM, WIDTH)
            lse = load_numbers(LSE + level, query)
            lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E_)
            pair_mask = visible_pairs(
                query[None, :], key[:, None], query_docs[None, :], key_docs[:, None], CAUSAL, DOCUMENTS
            )
            # Keys are rows, so that p and ds are left operands as they are. Queries after the list's end are masked,
            # and their g, q and delta are 0.
            p = tl.exp2(tl.where(pair_mask, dot(k, tl.trans(q), UPCAST), float("-inf")) * scale - lse[None, :])
            dv += dot(p.to(g.dtype), g, UPCAST)
            dp = dot(v, tl.trans(g), UPCAST)
            dk += dot((p * (dp - load_numbers(DELTA + level, query)[None, :])).to(q.dtype), q, UPCAST)
    columns = tl.arange(0, WIDTH)[None, :]
    offsets = (b * s * groups + group) * DIM + key.to(tl.int64)[:, None] * (groups * DIM) + columns
    mask = (key >= 0)[:, None] & (columns < DIM)
    # `scale` includes log2(e), which LN_2 takes out; dv has no scale.
    tl.store(DK + offsets, (dk * (scale * LN_2)).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + offsets, dv.to(DV.dtype.element_ty), mask=mask)


def config(kernel: str, unit: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """The rows M of a program and N of a step, and how it is launched, by the head dim rounded up."""
    keys = kernel == "_masked_dkv"  # with two accumulators
    # Float32 operands take twice the shared memory, and their products use no matrix units: the tiles are small.
    if dtype == torch.float32:
        return {"M": min(unit, 16 if keys else 32), "N": 16, "num_warps": 8, "num_stages": 2}
    rows = 32 if width > 128 or keys else 64
    return {"M": unit, "N": rows, "num_warps": 8 if width > 128 or (keys and width > 64) else 4, "num_stages": 2}


LISTS = "Tensor? documents, Tensor starts, Tensor units"
HOW = "int unit, bool causal, float scale"


def _launch(
    kernel: Any, tiled: Tensor, pointers: tuple[Any, ...], qkv: tuple[Tensor, Tensor, Tensor],
    lists: tuple[Tensor, Tensor, int], documents: Tensor | None, unit: int, causal: bool, scale: float,
) -> None:  # fmt: skip
    (q, k, v), (starts, units, head_rows) = qkv, lists
    (_, t, heads, dim), (s, groups) = q.shape, k.shape[1:3]
    width = max(16, triton.next_power_of_2(dim))
    blocks = config(kernel.fn.__name__, unit, width, q.dtype)
    # One program a tile of `tiled`: queries, or keys for dk and dv. Without documents the pointer DOCS is never read.
    kernel[(triton.cdiv(tiled.shape[1], blocks["M"]) * tiled.shape[0] * tiled.shape[2],)](
        *pointers, starts if documents is None else documents.to(torch.int32).contiguous(), starts, units, t, s, heads,
        heads // groups, head_rows, scale * LOG2_E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], CAUSAL=causal,
        DOCUMENTS=documents is not None, DIM=dim, WIDTH=width, UNIT=unit, UPCAST=INTERPRETED, **blocks,
    )  # fmt: skip


def _of_listed(products: int, q: Tensor, units: Tensor, unit: int, head_rows: int) -> int:
    b, _, heads, dim = q.shape
    return 2 * products * b * dim * unit**2 * len(units) * (1 if head_rows else heads)


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, documents: Any, starts: Tensor, units: Tensor, head_rows: int, unit: int,
    *arguments: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return _of_listed(FORWARD_PRODUCTS, q, units, unit, head_rows)


def _backward_flops(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Any, starts: Tensor, units: Tensor,
    head_rows: int, key_starts: Tensor, key_units: Tensor, key_head_rows: int, unit: int, *arguments: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    return _of_listed(SPLIT_PRODUCTS, q, units, unit, head_rows)


@operator(
    f"masked_forward(Tensor q, Tensor k, Tensor v, {LISTS}, int head_rows, {HOW}) -> (Tensor, Tensor)",
    outputs_of,
    flop=_forward_flops,
)
def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, starts: Tensor, units: Tensor, head_rows: int,
    unit: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by the lists of each row of units of queries."""
    out, lse = outputs_of(q)
    if q.numel():
        qkv = compact_rows(q), compact_rows(k), compact_rows(v)
        _launch(_masked_forward, q, (*qkv, out, lse), qkv, (starts, units, head_rows), documents, unit, causal, scale)
    return out, lse


def _gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator(
    f"masked_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {LISTS}, int head_rows, "
    f"Tensor key_starts, Tensor key_units, int key_head_rows, {HOW}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    flop=_backward_flops,
)
def masked_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None,
    starts: Tensor, units: Tensor, head_rows: int, key_starts: Tensor, key_units: Tensor, key_head_rows: int,
    unit: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) for the gradient g of out, by the lists of units of keys."""
    dq, dk, dv = _gradients(g, q, k, v)
    if q.numel() * k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    qkv = compact_rows(q), compact_rows(k), compact_rows(v)
    g, out, delta, arguments = g.contiguous(), out.contiguous(), torch.empty_like(lse), (documents, unit, causal, scale)
    _launch(_masked_dq, q, (*qkv, out, lse, g, dq, delta), qkv, (starts, units, head_rows), *arguments)
    _launch(_masked_dkv, k, (*qkv, lse, g, delta, dk, dv), qkv, (key_starts, key_units, key_head_rows), *arguments)
    return dq, dk, dv


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`: units of 16 to 64 rows, head dims, dtypes, masks."""
    types = "LSE:*fp32 DELTA:*fp32 DOCS:*i32 START:*i32 UNITS:*i32 scale:fp32"
    strides = tuple(x + y for x in "qkv" for y in "bth")
    for kernel in (_masked_forward, _masked_dq, _masked_dkv):
        for dim, unit, dtype, masked in (
            *((64, 16, "bf16", True), (64, 64, "bf16", True), (128, 16, "bf16", True), (128, 32, "bf16", True)),
            *((128, 64, "bf16", True), (96, 64, "bf16", False), (256, 64, "bf16", True)),
            *((64, 16, "fp32", True), (128, 64, "fp32", True)),
        ):
            width = triton.next_power_of_2(dim)
            blocks = config(kernel.__name__, unit, width, torch.float32 if dtype == "fp32" else torch.bfloat16)
            constants = {"CAUSAL": masked, "DOCUMENTS": masked, "DIM": dim, "WIDTH": width, "UNIT": unit}
            yield build(
                kernel,
                f"{dim} of {unit} {dtype}{' causal documents' * masked}",
                blocks,
                constants | {"UPCAST": False},
                types,
                f"*{dtype}",
                matrix=dtype != "fp32" and unit == 64,
                # Triton 3.6 reads lists and lse by so many narrow accesses that they are more than half in two kernels.
                wide=not masked and (VERSION != (3, 6) or kernel is _masked_dq),
                aligned=strides,
                # Two accumulators of K = 256 take half of the registers, as in `_flash_dkv`.
                spills=64 * (kernel is _masked_dkv and dim > 128),
            )
