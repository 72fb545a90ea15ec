"""Flash attention, forward: the softmax runs over tiles of keys with a running maximum and sum; scores never go to
memory.

For a tile of queries and each tile of keys that any of them sees, with m the largest score so far and l the sum of
exponentials:

    x = scale q k^T,   m' = max(m, rowmax x),   p = exp(x - m')
    l = exp(m - m') l + rowsum p,   o = exp(m - m') o + p v

At the end out = o / l, and the log-sum-exp of the scores is m + log l, which the backward pass takes.
Ref: Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1.

Tiles of keys that no query of the tile sees are skipped; tiles that all its queries see completely need no mask. For
full, window and local patterns both bounds follow from positions, for documents from `document_bounds`. In strided and
fixed patterns the visible keys are scattered, so the loop tests each tile (`may_see`).

Names in the kernels: a program handles M queries of one head of one row of the batch, and loops over tiles of N keys.
Strides are xb (batch), xt (position), xh (head) of x in q, k, v; elements of a head are contiguous. `share` = H / G
query heads share a key/value head.

Shapes: q [B, T, H, K], k and v [B, S, G, K], out [B, T, H, K], lse float32 [B, H, T]. Query i is at position
query_start + i, key j at key_start + j, both at least 0. A query that sees nothing has out 0 and lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build
from fzero.kernels.op_function import INTERPRETED, operator
from fzero.kernels.optional_triton import tl, triton

# By the head dim rounded up to a power of two (or float32): tiles of M queries and N keys.
CONFIGS: dict[Any, list[tuning.Config]] = {
    64: [{"M": 128, "N": 64, "num_warps": 4, "num_stages": 3}, {"M": 128, "N": 128, "num_warps": 8, "num_stages": 2}],
    128: [{"M": 128, "N": 64, "num_warps": 8, "num_stages": 3}, {"M": 128, "N": 128, "num_warps": 8, "num_stages": 2}],
    256: [{"M": 128, "N": 64, "num_warps": 8, "num_stages": 2}],
    torch.float32: [{"M": 32, "N": 16, "num_warps": 8, "num_stages": 1}],
}
CHUNK = 512  # document numbers that `document_bounds` reads at a time
LOG2_E, LN_2 = math.log2(math.e), tl.constexpr(math.log(2.0))
FAR = tl.constexpr(2**31 - 1)  # larger than every position
# Triton specialises a kernel for integer arguments equal to 1 or divisible by 16; for these that would only multiply
# compilations.
SIZES = ["t", "s", "heads", "share", "query_start", "key_start", "size", "keep"]


@triton.jit
def tile(base, start, stride, count, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """The rows [start, start + ROWS) of a matrix [count, DIM], `stride` apart, with zeros up to WIDTH columns.

    WHOLE: all of these rows exist; else those from `count` on are zeros.
    """
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    # Element (r, c) is at base + (start + r) stride + c. The tile's start may exceed 2^31 and is in int64; offsets
    # inside a tile are int32. Masks: columns DIM to WIDTH are padding to a power of two; rows from `count` on are
    # beyond the sequence.
    at = base + tl.cast(start, tl.int64) * stride + (rows * stride + columns)
    if DIM == WIDTH:
        return tl.load(at) if WHOLE else tl.load(at, mask=rows < count - start, other=0.0)
    return tl.load(at, mask=(columns < DIM) if WHOLE else (columns < DIM) & (rows < count - start), other=0.0)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a b, accumulated in float32. UPCAST: convert the operands first, because the interpreter has no bfloat16
    arithmetic.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def visible_pairs(query, key, mine, theirs, end, size, keep, KIND: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The mask of `attention_pattern.visible_mask` for positions; documents `mine` of queries, `theirs` of keys; keys
    before position `end`.
    """
    mask = key <= tl.minimum(query, end - 1)
    if KIND == "window":
        mask = mask & (key > query - size)
    if KIND == "local":
        mask = mask & (key >= query // size * size)
    if KIND == "strided":
        mask = mask & ((key > query - size) | (key % size == query % size))
    if KIND == "fixed":
        mask = mask & ((key >= query // size * size) | (key % size >= size - keep))
    if DOCUMENTS:
        mask = mask & (mine == theirs)
    return mask


@triton.jit
def load_documents(DOCS, at, count, DOCUMENTS: tl.constexpr):
    """The document numbers of the rows `at` (0 from `count` on); without DOCUMENTS a value that is never used."""
    return tl.load(DOCS + at, mask=at < count, other=0) if DOCUMENTS else at


@triton.jit
def may_see(query, last_query, key, last_key, size, keep, KIND: tl.constexpr):
    """Whether any query in [query, last_query] may see any key in [key, last_key], in a strided or fixed pattern."""
    if KIND == "strided":  # a distance in [query - last_key, last_query - key] is below `size`, or a multiple of it
        return (query - last_key < size) | ((last_query - key) // size * size >= query - last_key)
    kept = tl.where(key % size >= size - keep, key, key // size * size + size - keep)  # the first from `key` on
    return (last_key >= query // size * size) | (kept <= last_key)


@triton.jit
def first_key(query, size, KIND: tl.constexpr):
    """The first key that `query` sees, as `Pattern.first_key`. In full, window and local patterns it sees every key
    from there to itself.
    """
    if KIND == "window":
        return tl.maximum(query - size + 1, 0)
    if KIND == "local":
        return query // size * size
    return tl.minimum(query, 0)


@triton.jit
def align_tiles(lo, a, z, hi, N: tl.constexpr):
    """Round `lo` down, `a` up and `z` down to multiples of N; [a, z) and [lo, hi) become empty ranges if nothing is
    between.
    """
    lo, hi = tl.where(lo < hi, lo // N * N, 0), tl.where(lo < hi, hi, 0)
    a = tl.minimum(tl.maximum((a + N - 1) // N * N, lo), hi)
    return lo, a, tl.maximum(tl.minimum(z, hi) // N * N, a), hi


@triton.jit
def key_tiles(first, last, s, key_start, size, REACH, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr):
    """The range of keys for queries at positions [first, last]: (lo, a, z, hi). Tiles cover [lo, hi); those in [a, z)
    need no mask.

    lo: the first key that the first query sees. a: the first key that all queries see. z: the end of the keys that the
    first query sees causally, so that all do. hi: the end of those that the last query sees.
    """
    lo = tl.maximum(first_key(first, size, KIND) - key_start, 0)
    a = tl.maximum(first_key(last, size, KIND) - key_start, 0)
    z = tl.minimum(tl.maximum(first + 1 - key_start, 0), s)
    hi = tl.minimum(tl.maximum(last + 1 - key_start, 0), s)
    if DOCUMENTS:
        lo, a = tl.maximum(lo, tl.load(REACH)), tl.maximum(a, tl.load(REACH + 1))
    return align_tiles(lo, a, z, hi, N)


@triton.jit(do_not_specialize=["nx", "ny", "shift"])
def _document_bounds(X, Y, OUT, nx, ny, shift, AFTER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """For a block of BLOCK positions of X [nx], find which part of Y [ny] holds the same documents; X's position i is
    Y's i + shift.

    One program handles block `i` of row `b` of the batch, and stores two numbers. Before (not AFTER), looking at Y up
    to the block's last position: the first index of these documents, and the index from which all entries belong to the
    block's one document. AFTER, looking at Y from the block's first position: the end of these documents, and the index
    up to which all belong to the block's one document.
    """
    tiles = tl.cdiv(nx, BLOCK)
    # Programs are numbered b * tiles + tile. Positions beyond nx repeat the last one, which does not change minimum and
    # maximum.
    i = tl.program_id(0) % tiles * BLOCK
    b = (tl.program_id(0) // tiles).to(tl.int64)
    mine = tl.load(X + b * nx + tl.minimum(i + tl.arange(0, BLOCK), nx - 1))
    least, most = tl.min(mine, 0), tl.max(mine, 0)
    lo, hi = tl.minimum(i, 0), tl.minimum(tl.maximum(tl.minimum(i + BLOCK, nx) + shift, 0), ny)
    if AFTER:
        lo, hi = tl.minimum(tl.maximum(i + shift, 0), ny), tl.maximum(ny, 0)
    reach, clean = (lo, hi) if AFTER else (hi, lo)
    for start in range(lo, hi, CHUNK):
        at = start + tl.arange(0, CHUNK)
        y = tl.load(Y + b * ny + at, mask=at < hi, other=0)
        same = (at < hi) & (y >= least) & (y <= most)
        other = (at < hi) & ((y != least) | (y != most))
        if AFTER:
            reach = tl.maximum(reach, tl.max(tl.where(same, at + 1, 0), 0))
            clean = tl.minimum(clean, tl.min(tl.where(other, at, FAR), 0))
        else:
            reach = tl.minimum(reach, tl.min(tl.where(same, at, FAR), 0))
            clean = tl.maximum(clean, tl.max(tl.where(other, at + 1, 0), 0))
    out = OUT + tl.program_id(0).to(tl.int64) * 2
    tl.store(out, reach)
    tl.store(out + 1, clean)


def document_bounds(
    x: Tensor | None, y: Tensor | None, shift: int, after: bool, block: int, dummy: Tensor
) -> tuple[Tensor, ...]:
    """Return (x, y, bounds int32 [B, NX / block, 2]) of documents x [B, NX] and y [B, NY]; without documents `dummy`
    three times.
    """
    if x is None or y is None:
        return dummy, dummy, dummy
    (b, nx), ny = x.shape, y.shape[1]
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty((b, triton.cdiv(nx, block), 2), dtype=torch.int32, device=x.device)
    _document_bounds[(b * out.shape[1],)](x, y, out, nx, ny, shift, AFTER=after, BLOCK=block, CHUNK=CHUNK, num_warps=4)
    return x, y, out


@triton.jit
def mask_of_keys(j, keys, queries, pattern, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr):
    """The mask [M, N] of the keys [j, j + N) that a tile of queries sees; tuples `keys`, `queries` and `pattern` as in
    `_flash_forward`.
    """
    _k, _kt, _v, _vt, s, key_start, docs = keys
    query, _first, _last, mine = queries
    size, keep = pattern
    at = j + tl.arange(0, N)
    theirs = load_documents(docs, at, s, DOCUMENTS)
    return visible_pairs(
        query[:, None],
        (at + key_start)[None, :],
        mine[:, None],
        theirs[None, :],
        s + key_start,
        size,
        keep,
        KIND,
        DOCUMENTS,
    )


@triton.jit
def needs_tile(j, keys, queries, pattern, KIND: tl.constexpr, N: tl.constexpr):
    """Whether a tile of queries may see any of the keys [j, j + N), in a strided or fixed pattern."""
    first, last, key = queries[1], queries[2], j + keys[5]
    return may_see(first, last, key, key + N - 1, pattern[0], pattern[1], KIND)


@triton.jit
def _forward_tiles(
    o, m, l, q, lo, hi, keys, queries, pattern, scale, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return (o, m, l) after the tiles of keys from `lo` to `hi`. m is in units of log 2, because the hardware computes
    exp2.
    """
    k, kt, v, vt, s, _key_start, _docs = keys
    for j in range(lo, hi, N):
        if (KIND != "strided" and KIND != "fixed") or needs_tile(j, keys, queries, pattern, KIND, N):
            x = dot(q, tl.trans(tile(k, j, kt, s, DIM, WIDTH, N, not MASKED)), UPCAST)
            if MASKED:
                x = tl.where(mask_of_keys(j, keys, queries, pattern, KIND, DOCUMENTS, N), x, float("-inf"))
            higher = tl.maximum(m, tl.max(x, 1) * scale)
            # For a row that has seen no key yet m is -inf, and -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
            p = tl.exp2(x * scale - base[:, None])
            shrink = tl.exp2(m - base)
            value = tile(v, j, vt, s, DIM, WIDTH, N, not MASKED)
            o = o * shrink[:, None] + dot(p.to(value.dtype), value, UPCAST)
            l = l * shrink + tl.sum(p, 1)
            m = higher
    return o, m, l


@triton.jit(do_not_specialize=SIZES)
def _flash_forward(
    Q, K, V, OUT, LSE, QDOCS, KDOCS, REACH, t, s, heads, share, query_start, key_start, size, keep, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs are numbered row * tiles + tile, with row = b * heads + h. Tiles run in reverse: causality gives the last
    # ones the most keys, and the longest programs should start first. `row` is int64, so that b * stride cannot
    # overflow.
    tiles = tl.cdiv(t, M)
    at = tiles - 1 - tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    b, h, i = row // heads, row % heads, at * M
    q = tile(Q + b * qb + h * qh, i, qt, t, DIM, WIDTH, M, False)
    keys = (K + b * kb + h // share * kh, kt, V + b * vb + h // share * vh, vt, s, key_start, KDOCS + b * s)
    rows = i + tl.arange(0, M)
    first, last = i + query_start, tl.minimum(i + M, t) - 1 + query_start
    queries = (rows + query_start, first, last, load_documents(QDOCS + b * t, rows, t, DOCUMENTS))
    pattern = (size, keep)

    o, m, l = tl.zeros([M, WIDTH], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    lo, a, z, hi = key_tiles(first, last, s, key_start, size, REACH + (b * tiles + at) * 2, KIND, DOCUMENTS, N)
    if KIND == "strided" or KIND == "fixed":
        o, m, l = _forward_tiles(
            o, m, l, q, lo, hi, keys, queries, pattern, scale, KIND, DOCUMENTS, DIM, WIDTH, N, True, UPCAST
        )
    else:
        if KIND != "full" or DOCUMENTS:
            o, m, l = _forward_tiles(
                o, m, l, q, lo, a, keys, queries, pattern, scale, KIND, DOCUMENTS, DIM, WIDTH, N, True, UPCAST
            )
        o, m, l = _forward_tiles(
            o, m, l, q, a, z, keys, queries, pattern, scale, KIND, DOCUMENTS, DIM, WIDTH, N, False, UPCAST
        )
        o, m, l = _forward_tiles(
            o, m, l, q, z, hi, keys, queries, pattern, scale, KIND, DOCUMENTS, DIM, WIDTH, N, True, UPCAST
        )

    o = o / tl.where(l == 0.0, 1.0, l)[:, None]  # a query that sees no key has l = 0: out 0, lse -inf
    # out is contiguous [B, T, H, K]: element (b, i + r, h, c) at ((b t + i + r) heads + h) DIM + c. lse is [B, H, T]:
    # row t + i + r.
    columns = tl.arange(0, WIDTH)
    out = OUT + (b * t + i) * heads * DIM + h * DIM + (tl.arange(0, M)[:, None] * heads * DIM + columns[None, :])
    tl.store(out, o.to(OUT.dtype.element_ty), mask=(rows < t)[:, None] & (columns < DIM)[None, :])
    tl.store(LSE + row * t + rows, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LN_2), mask=rows < t)


def config(kernel: str, configs: dict[Any, list[tuning.Config]], q: Tensor, kind: str) -> tuple[int, tuning.Config]:
    """Return (head dim rounded up to a power of two, configuration) of a kernel for queries `q`; of the sizes only K
    matters.
    """
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    default = configs[torch.float32 if q.dtype == torch.float32 else max(64, width)][0]
    return width, tuning.config(kernel, (width, q.dtype, kind), default, q.device)


def compact_rows(x: Tensor) -> Tensor:
    """Return `x` [B, T, H, K], or a contiguous copy if heads are not contiguous or offsets inside a tile could pass
    2^31.
    """
    return x if x.stride(3) == 1 and abs(x.stride(1)) < 2**22 else x.contiguous()


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, t, h, _k = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, t), dtype=torch.float32)


@operator(
    "flash_forward(Tensor q, Tensor k, Tensor v, Tensor? query_documents, Tensor? key_documents, str kind, int "
    "size, int keep, "
    "float scale, int query_start, int key_start) -> (Tensor, Tensor)",
    _outputs,
)
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    kind: str,
    size: int,
    keep: int,
    scale: float,
    query_start: int,
    key_start: int,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); pattern fields and positions as at the top of the file; documents int [B, T] and [B, S], or
    None.
    """
    (b, t, h, dim), s = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
    if b * t * h == 0:
        return out, lse
    q, k, v = compact_rows(q), compact_rows(k), compact_rows(v)
    width, blocks = config("_flash_forward", CONFIGS, q, kind)
    ids = document_bounds(query_documents, key_documents, query_start - key_start, False, blocks["M"], q)
    _flash_forward[(triton.cdiv(t, blocks["M"]) * b * h,)](
        q, k, v, out, lse, *ids, t, s, h, h // k.shape[2], query_start, key_start, size, keep, scale * LOG2_E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], KIND=kind, DOCUMENTS=query_documents is not None, DIM=dim,
        WIDTH=width,
        UPCAST=INTERPRETED, **blocks,
    )  # fmt: skip
    return out, lse


def signature(pointers: str, dtype: str) -> dict[str, str]:
    """The signature of a kernel for `aot`; pointers have `dtype` except for those listed here."""
    special = {"LSE": "*fp32", "DELTA": "*fp32", "H": "*fp32", "QDOCS": "*i32", "KDOCS": "*i32", "REACH": "*i32"}
    strides = [x + y for x in "qkv" for y in "bth"]
    constants = "KIND DOCUMENTS DIM WIDTH M N UPCAST"
    return (
        {name: special.get(name, f"*{dtype}") for name in pointers.split()}
        | dict.fromkeys(SIZES, "i32")
        | {"scale": "fp32"}
        | dict.fromkeys(strides, "i32")
        | dict.fromkeys(constants.split(), "constexpr")
    )


def each_build(
    kernel: str,
    pointers: str,
    configs: dict[Any, list[tuning.Config]],
    extra: dict[str, Any],
    spills: int = 0,
    wide_since: tuple[int, int] = (0, 0),
) -> Iterator[Build]:
    """The builds of a kernel: each configuration, and several masks; `spills`: bytes of spills allowed for the widest
    heads; `wide_since`: see Build.
    """
    strides = tuple(x + y for x in "qkv" for y in "bth")

    def build(
        dim: int, blocks: tuning.Config, dtype: str = "bf16", kind: str = "full", documents: bool = False
    ) -> Build:
        label = f"{kernel} {dim} {blocks['M']}x{blocks['N']} {dtype} {kind}{' documents' * documents}"
        constants = {
            "KIND": kind,
            "DOCUMENTS": documents,
            "DIM": dim,
            "WIDTH": triton.next_power_of_2(dim),
            "UPCAST": False,
        } | extra
        types = signature(pointers, dtype) | dict.fromkeys(extra, "constexpr")
        allowed = spills * (dim > 128)
        wide = not documents
        return Build(label, kernel, types, constants, blocks, dtype != "fp32", wide, strides, allowed, wide_since)

    for dim in (64, 128, 256):
        for blocks in configs[dim]:
            yield build(dim, blocks)
    yield build(96, configs[128][0])
    for kind, documents in (("full", True), ("window", False), ("fixed", True)):
        yield build(128, configs[128][0], kind=kind, documents=documents)
    yield build(128, configs[torch.float32][0], dtype="fp32")


def builds() -> Iterator[Build]:
    """The builds for `aot`."""
    yield from each_build("_flash_forward", "Q K V OUT LSE QDOCS KDOCS REACH", CONFIGS, {})
    numbers = {"X": "*i32", "Y": "*i32", "OUT": "*i32", "nx": "i32", "ny": "i32", "shift": "i32"}
    constants = dict.fromkeys(("AFTER", "BLOCK", "CHUNK"), "constexpr")
    for after in (False, True):
        values = {"AFTER": after, "BLOCK": 128, "CHUNK": CHUNK}
        yield Build(
            f"_document_bounds {'after' if after else 'before'}",
            "_document_bounds",
            numbers | constants,
            values,
            {"num_warps": 4},
            wide=False,
        )
