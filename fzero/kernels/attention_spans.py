"""Where the queries and keys of flash attention are, and which tiles of them meet.

In order: positions count up from query_start and key_start; what has the documents of a tile is found before
(`document_bounds`). AT: positions lie in memory, in any order. A program looks at each tile that it could meet by the
least and the largest of its positions and documents (`spans`, `look`); neighbouring tiles that need the same are one
loop. Names and shapes are those of attention_flash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.attention_tiles import FAR, may_see
from fzero.kernels.custom_operator import tl, triton

NONE, SOME, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of the pairs of two tiles
CHUNK = 512  # document numbers that `document_bounds` reads at a time


@triton.jit
def span_of(START, DOCS, rows, count, AT: tl.constexpr, DOCUMENTS: tl.constexpr):
    """(least position, largest, least document, largest) of the rows below `count`; of documents with AT alone."""
    # In order the rows of a tile count up from START; the last one may be beyond the end.
    valid, first, last = rows < count, tl.min(rows, 0) + START, tl.minimum(tl.max(rows, 0), count - 1) + START
    if AT:
        positions = tl.load(START + rows, mask=valid, other=0)
        # FAR and -FAR never win the minimum and the maximum, so rows beyond the end do not count.
        first, last = tl.min(tl.where(valid, positions, FAR), 0), tl.max(tl.where(valid, positions, -FAR), 0)
        if DOCUMENTS:
            documents = tl.load(DOCS + rows, mask=valid, other=0)
            return first, last, tl.min(tl.where(valid, documents, FAR), 0), tl.max(tl.where(valid, documents, -FAR), 0)
    return first, last, first, last


@triton.jit
def tile_coverage(
    SPANS,
    j,
    count,
    span,
    pattern,
    KIND: tl.constexpr,
    RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    N: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """How a tile with the span `span` meets the tile of rows [j, j + N): NONE, SOME or ALL pairs; -1: no tile."""
    # Four int32 for each tile of N rows, from `spans`.
    tile_span = SPANS + j // N * 4
    valid = j < count
    first, last = tl.load(tile_span, mask=valid, other=0), tl.load(tile_span + 1, mask=valid, other=0)
    size, global_count, near, _seed = pattern
    query, last_query, key, last_key = span[0], span[1], first, last
    if OF_KEYS:
        query, last_query, key, last_key = first, last, span[0], span[1]
    # The earliest key against the latest query, and the latest key against the earliest query. A tile that reaches
    # beyond the end always takes its mask, which hides the rows that do not exist.
    any_pair, all_pairs = key <= last_query, (last_key <= query) & (j + N <= count)
    # Bounds by the spans alone: of queries in between nothing is known, so SOME may turn out to be no pair, never the
    # reverse.
    if KIND == "window":
        any_pair = any_pair & (query - last_key < size)
    if KIND == "local":
        any_pair = any_pair & (query // size <= last_key // size)
    if KIND == "strided" or KIND == "fixed" or KIND == "bigbird":
        any_pair = any_pair & may_see(query, last_query, key, last_key, pattern, KIND, RANDOM)
    if KIND == "window" or KIND == "strided":
        # The largest distance of the two spans is within the window.
        all_pairs = all_pairs & (last_query - key < size)
    if KIND == "local" or KIND == "fixed":
        all_pairs = all_pairs & (last_query // size == key // size)
    if KIND == "bigbird":
        all_pairs = all_pairs & ((last_query // size - key // size < near) | (last_key // size < global_count))
    if DOCUMENTS:
        min_document = tl.load(tile_span + 2, mask=valid, other=0)
        max_document = tl.load(tile_span + 3, mask=valid, other=0)
        any_pair = any_pair & (min_document <= span[3]) & (span[2] <= max_document)
        # Both tiles are of one document; that it is the same one follows from any_pair.
        all_pairs = all_pairs & (min_document == max_document) & (span[2] == span[3])
    return tl.where(valid, tl.where(any_pair, tl.where(all_pairs, ALL, SOME), NONE), -1)


@triton.jit
def run_end(
    coverage: tl.constexpr, SPANS, j, count, span, pattern, KIND: tl.constexpr, RANDOM: tl.constexpr,
    DOCUMENTS: tl.constexpr, N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """The end of the tiles from j on of which `look` says `coverage`."""
    # -1 from `count` on is no coverage, so the loop ends there.
    while tile_coverage(SPANS, j, count, span, pattern, KIND, RANDOM, DOCUMENTS, N, OF_KEYS) == coverage:
        j += N
    return j


@triton.jit(do_not_specialize=["n"])
def _tile_spans(AT, DOCS, OUT, n, DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """The span of each tile of BLOCK positions of a row, int32 [B, tiles, 4]."""
    tiles = tl.cdiv(n, BLOCK)
    i = tl.program_id(0) % tiles * BLOCK
    b = (tl.program_id(0) // tiles).to(tl.int64)
    span = span_of(AT + b * n, DOCS + b * n, i + tl.arange(0, BLOCK), n, True, DOCUMENTS)
    # Program number b * tiles + tile is the number of the tile in OUT.
    out = OUT + tl.program_id(0).to(tl.int64) * 4
    tl.store(out, span[0])
    tl.store(out + 1, span[1])
    tl.store(out + 2, span[2])
    tl.store(out + 3, span[3])


def spans(positions: Tensor, documents: Tensor | None, block: int) -> Tensor:
    """The spans of tiles of `block` rows, int32 [B, tiles, 4], of positions and documents int32 [B, n]."""
    b, n = positions.shape
    out = torch.empty((b, triton.cdiv(n, block), 4), dtype=torch.int32, device=positions.device)
    # Without documents the pointer is never read.
    docs, has_documents = (positions, False) if documents is None else (documents, True)
    _tile_spans[(b * out.shape[1],)](positions, docs, out, n, DOCUMENTS=has_documents, BLOCK=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["nx", "ny", "shift"])
def _document_bounds(X, Y, OUT, nx, ny, shift, AFTER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """For a block of BLOCK positions of X [nx], find which part of Y [ny] holds the same documents."""
    # X's position i is Y's i + shift. One program handles block `i` of row `b`, and stores two numbers. Before (not
    # AFTER), looking at Y up to the block's last position: the first index of these documents, and the index from which
    # all entries belong to the block's one document. AFTER, from the block's first position: the end of these
    # documents, and the index up to which all belong to the one document.
    tiles = tl.cdiv(nx, BLOCK)
    # Programs are numbered b * tiles + tile. Positions beyond nx repeat the last one, which does not change minimum and
    # maximum.
    i = tl.program_id(0) % tiles * BLOCK
    b = (tl.program_id(0) // tiles).to(tl.int64)
    documents = tl.load(X + b * nx + tl.minimum(i + tl.arange(0, BLOCK), nx - 1))
    min_document, max_document = tl.min(documents, 0), tl.max(documents, 0)
    # Causal: keys up to the block's last position, [0, hi), in Y's indices (X's plus shift). AFTER: queries from its
    # first position on. tl.minimum(i, 0) is 0, and tl.maximum(ny, 0) ny, as a loop's bounds.
    lo, hi = tl.minimum(i, 0), tl.minimum(tl.maximum(tl.minimum(i + BLOCK, nx) + shift, 0), ny)
    if AFTER:
        lo, hi = tl.minimum(tl.maximum(i + shift, 0), ny), tl.maximum(ny, 0)
    # Before anything is seen: no entry has these documents, and all belong to the one document.
    reach, clean = (lo, hi) if AFTER else (hi, lo)
    for start in range(lo, hi, CHUNK):
        indices = start + tl.arange(0, CHUNK)
        y = tl.load(Y + b * ny + indices, mask=indices < hi, other=0)
        # A document between the least and the largest may be of neither: `matching` is an upper bound, as is needed.
        matching = (indices < hi) & (y >= min_document) & (y <= max_document)
        foreign = (indices < hi) & ((y != min_document) | (y != max_document))
        if AFTER:
            reach = tl.maximum(reach, tl.max(tl.where(matching, indices + 1, 0), 0))
            clean = tl.minimum(clean, tl.min(tl.where(foreign, indices, FAR), 0))
        else:
            reach = tl.minimum(reach, tl.min(tl.where(matching, indices, FAR), 0))
            clean = tl.maximum(clean, tl.max(tl.where(foreign, indices + 1, 0), 0))
    out = OUT + tl.program_id(0).to(tl.int64) * 2
    tl.store(out, reach)
    tl.store(out + 1, clean)


def document_bounds(
    x: Tensor | None, y: Tensor | None, shift: int, ahead: bool, block: int, dummy: Tensor
) -> tuple[Tensor, ...]:
    """(x, y, bounds int32 [B, NX / block, 2]) of documents x [B, NX], y [B, NY]; `dummy` without documents."""
    if x is None or y is None:
        return dummy, dummy, dummy
    (b, nx), ny = x.shape, y.shape[1]
    x, y = x.contiguous(), y.contiguous()
    # Two numbers a block: reach and clean.
    out = torch.empty((b, triton.cdiv(nx, block), 2), dtype=torch.int32, device=x.device)
    _document_bounds[(b * out.shape[1],)](x, y, out, nx, ny, shift, AFTER=ahead, BLOCK=block, CHUNK=CHUNK, num_warps=4)
    return x, y, out


class KernelPositions(NamedTuple):
    """Where queries and keys are: the positions of the first or all of them, and their documents or None."""

    query: int | Tensor
    key: int | Tensor
    query_documents: Tensor | None
    key_documents: Tensor | None

    def small(self) -> KernelPositions:
        """The same as contiguous int32 tensors."""

        def short(x: Any) -> Any:
            return x.to(torch.int32).contiguous() if isinstance(x, Tensor) else x

        return KernelPositions(
            short(self.query), short(self.key), short(self.query_documents), short(self.key_documents)
        )

    @property
    def starts(self) -> tuple[int | Tensor, int | Tensor]:
        """A kernel's query_start and key_start."""
        return self.query, self.key

    @property
    def options(self) -> dict[str, bool]:
        """The constants of a kernel."""
        return {"DOCUMENTS": self.query_documents is not None, "AT": isinstance(self.query, Tensor)}

    def of_queries(self, blocks: tuning.Config, dummy: Tensor) -> tuple[Tensor, ...]:
        """QDOCS, KDOCS and REACH of a kernel of which each program has a tile of M queries."""
        query_documents, key_documents = self.query_documents, self.key_documents
        if isinstance(self.key, Tensor):
            return (*self._documents(dummy), spans(self.key, key_documents, blocks["N"]))
        assert isinstance(self.query, int)  # both are, or neither
        return document_bounds(query_documents, key_documents, self.query - self.key, False, blocks["M"], dummy)

    def of_keys(self, blocks: tuning.Config, dummy: Tensor) -> tuple[Tensor, ...]:
        """The same of a kernel of which each program has a tile of N keys."""
        query_documents, key_documents = self.query_documents, self.key_documents
        if isinstance(self.query, Tensor):
            return (*self._documents(dummy), spans(self.query, query_documents, blocks["M"]))
        assert isinstance(self.key, int)  # both are, or neither
        key_documents, query_documents, reach = document_bounds(
            key_documents, query_documents, self.key - self.query, True, blocks["N"], dummy
        )
        return query_documents, key_documents, reach

    def _documents(self, dummy: Tensor) -> tuple[Tensor, ...]:
        return tuple(dummy if x is None else x for x in (self.query_documents, self.key_documents))


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for ahead in (False, True):
        constants = {"AFTER": ahead, "BLOCK": 128, "CHUNK": CHUNK}
        yield build(
            _document_bounds, "after" if ahead else "before", {"num_warps": 4}, constants, default="*i32", wide=False
        )
    constants = {"DOCUMENTS": True, "BLOCK": 128}
    yield build(_tile_spans, "", {"num_warps": 4}, constants, default="*i32", wide=False)
