"""The parts that the kernels of flash attention share: reading a tile, products, which keys a tile of queries sees; and
the configuration and builds of such a kernel.

Tiles of keys that no query of a tile sees are skipped; tiles that all its queries see completely need no mask. For
full, window and local patterns both bounds follow from positions, for documents from `document_bounds`. In strided and
fixed patterns the visible keys are scattered, so the loop tests each tile (`may_see`).
Names and shapes are those of attention_flash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import chips, tuning
from fzero.kernels.aot import Build
from fzero.kernels.optional_triton import tl, triton

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


def tables(kernel: str) -> dict[Any, Sequence[tuning.Config]]:
    """The configurations of a kernel, by the head dim rounded up to a power of two, or by float32: tiles of M queries
    and N keys.
    """
    by_width: dict[Any, Sequence[tuning.Config]] = {w: chips.Table(f"{kernel} {w}") for w in (64, 128, 256)}
    return by_width | {torch.float32: chips.Table(f"{kernel} float32")}


def config(kernel: str, configs: dict[Any, Sequence[tuning.Config]], q: Tensor, kind: str) -> tuple[int, tuning.Config]:
    """Return (head dim rounded up to a power of two, configuration) of a kernel for queries `q`; of the sizes only K
    matters.
    """
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    rows = tuning.rows(configs[torch.float32 if q.dtype == torch.float32 else max(64, width)], q.device)
    return width, tuning.config(kernel, (width, q.dtype, kind), rows[0], q.device)


def compact_rows(x: Tensor) -> Tensor:
    """Return `x` [B, T, H, K], or a contiguous copy if heads are not contiguous or offsets inside a tile could pass
    2^31.
    """
    return x if x.stride(3) == 1 and abs(x.stride(1)) < 2**22 else x.contiguous()


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
    extra: dict[str, Any],
    gpu: str,
    spills: int = 0,
    wide_since: tuple[int, int] = (0, 0),
) -> Iterator[Build]:
    """The builds of a kernel: each configuration, and several masks; `spills`: bytes of spills allowed for the widest
    heads; `wide_since`: see Build.
    """
    strides = tuple(x + y for x in "qkv" for y in "bth")
    rows = {width: chips.Table(f"{kernel} {width}").on(gpu) for width in (64, 128, 256, "float32")}

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
        for blocks in rows[dim]:
            yield build(dim, blocks)
    yield build(96, rows[128][0])
    for kind, documents in (("full", True), ("window", False), ("fixed", True)):
        yield build(128, rows[128][0], kind=kind, documents=documents)
    yield build(128, rows["float32"][0], dtype="fp32")


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
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
