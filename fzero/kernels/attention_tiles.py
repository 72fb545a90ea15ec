"""The parts that the kernels of flash attention share: reading a tile, products, visible keys, and builds.

Tiles of keys that no query of a tile sees are skipped; tiles that all its queries see completely need no mask. For
full, window and local patterns both bounds follow from positions, for documents from `document_bounds`; in strided,
fixed and bigbird patterns the loop tests each tile (`may_see`). Names and shapes are those of attention_flash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.attention_pattern import FIELDS, KINDS
from fzero.kernels.custom_operator import tl, triton

LOG2_E, LN_2 = math.log2(math.e), tl.constexpr(math.log(2.0))
FAR = tl.constexpr(2**31 - 1)  # larger than every position
BLOCKS = tl.constexpr(128)  # of queries in a tile, of which a bigbird pattern's random blocks are looked at
# Triton specialises a kernel for integer arguments equal to 1 or divisible by 16; for these that would only multiply
# compilations. The number of random blocks is a constant: a loop over them would carry a mask in registers.
SIZES = ["t", "s", "heads", "share", "query_start", "key_start", *(name for name in FIELDS if name != "random")]


@triton.jit
def tile(base, start, stride, count, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """The rows [start, start + ROWS) of a matrix [count, DIM], `stride` apart, 0 up to WIDTH columns."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    # Element (r, c) is at base + (start + r) stride + c. The tile's start may exceed 2^31 and is in int64; offsets
    # inside a tile are int32. Masks: columns DIM to WIDTH are padding to a power of two; rows from `count` on are
    # beyond the sequence.
    pointers = base + tl.cast(start, tl.int64) * stride + (rows * stride + columns)
    if DIM == WIDTH:
        return tl.load(pointers) if WHOLE else tl.load(pointers, mask=rows < count - start, other=0.0)
    return tl.load(pointers, mask=(columns < DIM) if WHOLE else (columns < DIM) & (rows < count - start), other=0.0)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a b, accumulated in float32; UPCAST: convert first, as the interpreter has no bfloat16 arithmetic."""
    # "ieee": float32 operands are multiplied exactly, not rounded to TF32.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def mix(x):
    """attention_pattern's `mix`, of uint32."""
    # uint32 products wrap, as those of the definition are cut to 32 bits.
    x = ((x >> 16) ^ x) * 0x45D9F3B
    x = ((x >> 16) ^ x) * 0x45D9F3B
    return (x >> 16) ^ x


@triton.jit
def random_block(block, i, pattern):
    """`Pattern.random_block` of int32."""
    _size, global_count, near, seed = pattern
    salt = mix(tl.cast(seed, tl.uint32) + tl.cast(i + 1, tl.uint32) * 0x9E3779B9)
    candidates = tl.maximum(block - (near - 1 + global_count), 1)
    # Unsigned, because the remainder of a negative int32 would be negative.
    return global_count + (mix(block.to(tl.uint32) ^ salt) % candidates.to(tl.uint32)).to(tl.int32)


@triton.jit
def visible_pairs(
    query, key, query_docs, key_docs, end, pattern, KIND: tl.constexpr, RANDOM: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """The mask of `Positions.mask`; pattern: (size, keep, near, seed), RANDOM: its number of random blocks."""
    size, global_count, near, _seed = pattern
    # Causality and the end of the keys in one comparison; broadcast to [M, N] (or [N, M]).
    mask = key <= tl.minimum(query, end - 1)
    if KIND == "window":
        mask = mask & (key > query - size)
    if KIND == "local":
        mask = mask & (key >= query // size * size)
    if KIND == "strided":
        mask = mask & ((key > query - size) | (key % size == query % size))
    if KIND == "fixed":
        mask = mask & ((key >= query // size * size) | (key % size >= size - global_count))
    if KIND == "bigbird":
        query_block, block = query // size, key // size
        pair_mask = (block < global_count) | (query_block - block < near)
        for i in tl.static_range(RANDOM):
            pair_mask = pair_mask | (block == random_block(query_block, i, pattern))
        mask = mask & pair_mask
    if DOCUMENTS:
        mask = mask & (query_docs == key_docs)
    return mask


@triton.jit
def load_positions(START, rows, count, AT: tl.constexpr):
    """The positions of the rows `rows`: START + at, or with AT from memory, else FAR."""
    return tl.load(START + rows, mask=rows < count, other=FAR) if AT else rows + START


@triton.jit
def load_documents(DOCS, rows, count, DOCUMENTS: tl.constexpr):
    """The document numbers of the rows `rows`, 0 from `count` on."""
    return tl.load(DOCS + rows, mask=rows < count, other=0) if DOCUMENTS else rows


@triton.jit
def may_see(query, last_query, key, last_key, pattern, KIND: tl.constexpr, RANDOM: tl.constexpr):
    """Whether any query in [query, last_query] may see any key in [key, last_key], in a scattered pattern."""
    # Of bigbird True if the queries are in more than BLOCKS blocks, which a tile of theirs in order is not.
    size, global_count, near, _seed = pattern
    if KIND == "strided":  # a distance in [query - last_key, last_query - key] is below `size`, or a multiple of it
        return (query - last_key < size) | ((last_query - key) // size * size >= query - last_key)
    if KIND == "bigbird":
        first, query_block, last_query_block = key // size, query // size, last_query // size
        overlap = (
            (first < global_count)
            | (query_block - last_key // size < near)
            | (last_query_block - query_block >= BLOCKS)
        )
        # BLOCKS blocks from the first query's on; those after the last query's do not count.
        blocks = query_block + tl.arange(0, BLOCKS)
        hits = blocks < 0
        for i in tl.static_range(RANDOM):
            block = random_block(blocks, i, pattern)
            hits = hits | ((block >= first) & (block <= last_key // size))
        return overlap | (tl.max((hits & (blocks <= last_query_block)).to(tl.int32), 0) > 0)
    # The first from `key` on.
    first_global = tl.where(key % size >= size - global_count, key, key // size * size + size - global_count)
    # Of fixed: a key of the first query's own block or later, or one that an earlier block keeps.
    return (last_key >= query // size * size) | (first_global <= last_key)


@triton.jit
def first_key(query, size, KIND: tl.constexpr):
    """The first key that `query` sees, as `Pattern.first_key`."""
    if KIND == "window":
        return tl.maximum(query - size + 1, 0)
    if KIND == "local":
        return query // size * size
    # 0, in the type of `query`.
    return tl.minimum(query, 0)


@triton.jit
def align_tiles(lo, a, z, hi, N: tl.constexpr):
    """Round `lo` down, `a` up and `z` down to multiples of N; both ranges are empty if nothing is between."""
    # An empty range becomes [0, 0). `hi` is not rounded: the last tile is masked by the number of rows.
    lo, hi = tl.where(lo < hi, lo // N * N, 0), tl.where(lo < hi, hi, 0)
    # Only tiles that lie in [a, z) as a whole need no mask, so the range shrinks at both ends; the clamps keep lo <= a
    # <= z <= hi.
    a = tl.minimum(tl.maximum((a + N - 1) // N * N, lo), hi)
    return lo, a, tl.maximum(tl.minimum(z, hi) // N * N, a), hi


@triton.jit
def key_tiles(first, last, s, key_start, size, REACH, KIND: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr):
    """The range of keys for queries at [first, last]: (lo, a, z, hi); tiles in [a, z) need no mask."""
    # lo: the first key that the first query sees. a: the first key that all queries see. z: the end of the keys that
    # the first query sees causally, so that all do. hi: the end of those that the last query sees.
    lo = tl.maximum(first_key(first, size, KIND) - key_start, 0)
    a = tl.maximum(first_key(last, size, KIND) - key_start, 0)
    z = tl.minimum(tl.maximum(first + 1 - key_start, 0), s)
    hi = tl.minimum(tl.maximum(last + 1 - key_start, 0), s)
    if DOCUMENTS:
        # Two numbers a tile of queries, see `document_bounds`: the first key of its documents, and from where all keys
        # are of its one document.
        lo, a = tl.maximum(lo, tl.load(REACH)), tl.maximum(a, tl.load(REACH + 1))
    return align_tiles(lo, a, z, hi, N)


@triton.jit
def mask_of_keys(
    j,
    keys,
    queries,
    pattern,
    KIND: tl.constexpr,
    RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    AT: tl.constexpr,
    N: tl.constexpr,
):
    """The mask [M, N] of the keys [j, j + N) that a tile of queries sees."""
    _k, _kt, _v, _vt, s, key_start, docs = keys
    query, _span, query_docs = queries
    rows = j + tl.arange(0, N)
    key_docs = load_documents(docs, rows, s, DOCUMENTS)
    return visible_pairs(
        query[:, None],
        load_positions(key_start, rows, s, AT)[None, :],
        query_docs[:, None],
        key_docs[None, :],
        FAR if AT else s + key_start,
        pattern,
        KIND,
        RANDOM,
        DOCUMENTS,
    )


@triton.jit
def needs_tile(j, keys, queries, pattern, KIND: tl.constexpr, RANDOM: tl.constexpr, N: tl.constexpr):
    """Whether a tile of queries may see any of the keys [j, j + N)."""
    # keys[5] is key_start: scattered patterns are tested this way only where keys are in order.
    span, key = queries[1], j + keys[5]
    return may_see(span[0], span[1], key, key + N - 1, pattern, KIND, RANDOM)


def tables(kernel: str) -> dict[Any, Sequence[tuning.Config]]:
    """The configurations of a kernel, by the head dim rounded up, or by float32, and by names of masks."""
    configs: dict[Any, Sequence[tuning.Config]] = {}
    for name, key in ((64, 64), (128, 128), (256, 256), ("float32", torch.float32)):
        configs[key] = tuning.ConfigTable(f"{kernel} {name}")
        for mask in ("at", *KINDS):
            if (table_name := f"{kernel} {name} {mask}") in tuning.listed()[tuning.DEFAULT]["blocks"]["rows"]:
                configs[key, mask] = tuning.ConfigTable(table_name)
    return configs


def table_of(
    configs: dict[Any, Sequence[tuning.Config]], width: Any, kind: str, has_positions: bool
) -> Sequence[tuning.Config]:
    """Of the `tables` that of a head dim's width (or float32), with positions in memory (AT) or not."""
    matches = [(width, name) for name in ("at" * has_positions, kind) if (width, name) in configs]
    return configs[matches[0] if matches else width]


def config(
    kernel: str, configs: dict[Any, Sequence[tuning.Config]], q: Tensor, kind: str, has_positions: bool
) -> tuple[int, tuning.Config]:
    """(head dim rounded up to a power of two, configuration) of a kernel for queries `q`."""
    # Not below 16, the least size of a product of the matrix units.
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    key = torch.float32 if q.dtype == torch.float32 else max(64, width)
    rows = tuning.rows(table_of(configs, key, kind, has_positions), q.device)
    return width, tuning.config(kernel, (width, q.dtype, kind, has_positions), rows[0], q.device)


def compact_rows(x: Tensor) -> Tensor:
    """`x` [B, T, H, K], or a copy if heads are not contiguous or offsets inside a tile could pass 2^31."""
    # Tiles have less than 2^9 rows, so that offsets within one, row * stride, stay below 2^31.
    return x if x.stride(3) == 1 and abs(x.stride(1)) < 2**22 else x.contiguous()


def attention_builds(kernel: Any, gpu: str, spills: int = 0) -> Iterator[Build]:
    """The builds of a kernel: each configuration, and several masks; `spills`: bytes allowed."""
    strides = tuple(x + y for x in "qkv" for y in "bth")
    configs = tables(kernel.__name__)
    results = {"DQ", "DK", "DV"} & {*kernel.arg_names} or {"OUT"}  # float32 at positions in memory

    def rows(width: Any, kind: str = "full", has_positions: bool = False) -> Sequence[tuning.Config]:
        table = table_of(configs, width, kind, has_positions)
        return table.for_gpu(gpu) if isinstance(table, tuning.ConfigTable) else table

    def of_dim(
        dim: int,
        blocks: tuning.Config,
        dtype: str = "bf16",
        kind: str = "full",
        documents: bool = False,
        has_positions: bool = False,
    ) -> Build:
        variant = f"{kind}{' documents' * documents}{' at' * has_positions}"
        constants = {
            "KIND": kind,
            "DOCUMENTS": documents,
            "AT": has_positions,
            "DIM": dim,
            "WIDTH": triton.next_power_of_2(dim),
            "UPCAST": False,
            "RANDOM": 3 * (kind == "bigbird"),
        }
        types = "LSE:*fp32 DELTA:*fp32 QDOCS:*i32 KDOCS:*i32 REACH:*i32 scale:fp32"
        if has_positions:
            types += " query_start:*i32 key_start:*i32" + "".join(f" {name}:*fp32" for name in results)
        label = f"{dim} {blocks['M']}x{blocks['N']} {dtype} {variant}"
        wide, checks = not documents and not has_positions, {"aligned": strides, "spills": spills * (dim > 128)}
        return build(kernel, label, blocks, constants, types, f"*{dtype}", matrix=dtype != "fp32", wide=wide, **checks)

    for dim in (64, 128, 256):
        for blocks in rows(dim):
            yield of_dim(dim, blocks)
    yield of_dim(96, rows(128)[0])
    for kind, documents in (("full", True), ("window", False), ("fixed", True)):
        yield of_dim(128, rows(128, kind)[0], kind=kind, documents=documents)
    for dim in (64, 128):
        for has_positions in (False, True):
            yield of_dim(
                dim, rows(dim, "bigbird", has_positions)[0], kind="bigbird", documents=True, has_positions=has_positions
            )
    yield of_dim(128, rows(torch.float32)[0], dtype="fp32")
    for dim, kind, documents in (
        (64, "full", True),
        (128, "full", False),
        (128, "fixed", True),
        (256, "window", True),
    ):
        yield of_dim(dim, rows(dim, kind, True)[0], kind=kind, documents=documents, has_positions=True)
    yield of_dim(128, rows(torch.float32, has_positions=True)[0], dtype="fp32", documents=True, has_positions=True)
