"""Attention over pages on GPUs: flash attention whose tiles of keys are read through the rows' block tables.

The sums are those of attention_flash. A program has M pairs of a query and a head, of one row and one key/value head:
the `share` = H / G query heads of it read a tile of its keys once. Nothing on the host depends on the rows' lengths:

- Short rows, of at most LIMIT queries (decoding, guesses): a program for SPLIT keys, so that few rows fill a GPU too
  (Dao et al. 2023, "Flash-Decoding for long-context inference"); `_join_splits` joins their softmaxes.
- Longer rows (prefill): a program goes through all keys. Row r's tiles begin at number starts[r] share // M + r, which
  leaves no fewer than it needs; a program searches for its row, and a number too many ends at once.

Codes become numbers of q's dtype as they are read; a key's scale is a factor of its scores, a value's one of its
weights.

M and LIMIT follow from the heads, SPLIT from their size; splits and tiles begin at fixed positions. So the bits of a
row depend on no other row. Shapes are those of paged_attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.attention_arguments import PAGE_CODES, PATTERN, Scoring
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_tiles import LN_2, LOG2_E, align_tiles, dot, first_key, key_tiles, may_see, visible_pairs
from fzero.kernels.cross_entropy_triton import tanh
from fzero.kernels.custom_operator import INTERPRETED, operator, tl, triton, triton_runs

MAX_POSITION = 2**30  # the kernels compute positions in 32 bits
MAX_KEY, MAX_VALUE = 576, 512
WIDTHS = 64, 128, 256, 512
# By the larger of two widths (of keys and of values), also of float32: tiles of M pairs and N keys, M at most.
SHORT, LONG = (
    {
        (width, wide): tuning.ConfigTable(f"_paged_attention {rows} {'float32 ' * wide}{width}")
        for width in WIDTHS
        for wide in (False, True)
    }
    for rows in ("short", "long")
)
JOINED = 16  # splits that `_join_splits` reads at a time
LOG2_E_ = tl.constexpr(LOG2_E)
TWO_120 = tl.constexpr(2.0**120)
ROWS = tl.constexpr(256)  # that a program looks at together when it searches for its own
SIZES = ["rows", "splits", "by_token", "table_row", "size", "global_count", "near", "seed"]


@triton.jit
def _row_of(STARTS, tile, rows, SHARE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    """The last row whose tiles begin at number `tile` or before."""
    # Counted, not searched by halves: the loads do not wait for each other.
    count = tl.minimum(tile, 0)
    for j in range(0, rows, BLOCK):
        row = j + tl.arange(0, BLOCK)
        begin = tl.load(STARTS + row, mask=row < rows, other=0) * SHARE // M + row
        count += tl.sum(((begin <= tile) & (row < rows)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _columns(lines, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """The columns from FIRST on of the lines at addresses [N], 0 from DIM on and, unless WHOLE, of lines not valid."""
    columns = FIRST + tl.arange(0, WIDTH)[None, :]
    pointers = lines[:, None] + columns
    if FIRST + WIDTH <= DIM:
        return tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=(columns < DIM) if WHOLE else valid[:, None] & (columns < DIM), other=0.0)


@triton.jit
def _numbers(codes, CODES: tl.constexpr, dtype: tl.constexpr):
    """The numbers of codes, which every dtype of a head has: int8, or the bytes of e4m3; others as they are."""
    if CODES == "fp8_e4m3":
        # The bits behind the sign are float32's, 20 to the left, but for the bias of the exponent: a factor of 2^120.
        bits = codes.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * TWO_120).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def _pages_of(TABLE, key, end, TOKENS: tl.constexpr):
    """The pages of the positions `key` of a row, 0 from `end` on."""
    return tl.load(TABLE + key // TOKENS, mask=key < end, other=0)


@triton.jit
def _page_tiles(
    o, m, l, q, lo, hi, end, queries, pages, scales, pattern, scale, cap, KIND: tl.constexpr, RANDOM: tl.constexpr,
    CAP: tl.constexpr, DIM: tl.constexpr, BULK: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    UPCAST: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """(o, m, l) after the tiles of keys from `lo` to `hi`; m in units of log 2, as the hardware has exp2."""
    K, V, TABLE, kp, kt, vp, vt = pages
    KEY_SCALES, VALUE_SCALES, groups = scales
    query, first, last = queries
    # The pages of a tile are read while the tile before it is computed: loads that wait for loads are not overlapped.
    page = _pages_of(TABLE, lo + tl.arange(0, N), end, TOKENS)
    for j in range(lo, hi, N):
        key, number = j + tl.arange(0, N), page.to(tl.int64)
        page = _pages_of(TABLE, key + N, end, TOKENS)
        # Within [lo, hi) a scattered pattern has tiles of which no query sees a key; the other patterns have none.
        if (KIND != "strided" and KIND != "fixed" and KIND != "bigbird") or may_see(
            first, last, j, j + N - 1, pattern, KIND, RANDOM
        ):
            # Lines from `end` on are of no position of the row: of another request, or never written.
            valid, line = key < end, (key % TOKENS).to(tl.int64)
            keys = K + number * kp + line * kt
            scale_line = (number * TOKENS + line) * groups
            # Of a size that is no power of two, the largest one below it, and what is left.
            bulk = _numbers(_columns(keys, valid, 0, BULK, DIM, not MASKED), CODES, q[0].dtype)
            x = dot(q[0], tl.trans(bulk), UPCAST)
            if REST:
                rest = _numbers(_columns(keys, valid, BULK, REST, DIM, not MASKED), CODES, q[0].dtype)
                x += dot(q[1], tl.trans(rest), UPCAST)
            if CODES != "":
                x *= tl.load(KEY_SCALES + scale_line, mask=valid, other=0.0)[None, :]
            x = tanh(x * scale) * cap if CAP else x * scale
            if MASKED:
                seen = visible_pairs(query[:, None], key[None, :], 0, 0, end, pattern, KIND, RANDOM, False)
                x = tl.where(seen, x, float("-inf"))
            higher = tl.maximum(m, tl.max(x, 1))
            # For a query that has seen no key yet m is -inf, and -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
            p = tl.exp2(x - base[:, None])
            shrink = tl.exp2(m - base)
            values = V + number * vp + line * vt
            value = bulk
            if not SHARED:
                value = _numbers(_columns(values, valid, 0, WIDTH, VALUE, not MASKED), CODES, q[0].dtype)
            weights = p
            if CODES != "":
                weights = p * tl.load(VALUE_SCALES + scale_line, mask=valid, other=0.0)[None, :]
            # They are rounded to v's dtype for the matrix units; the sums are in float32, that of l from p as it was.
            o = o * shrink[:, None] + dot(weights.to(value.dtype), value, UPCAST)
            l = l * shrink + tl.sum(p, 1)
            m = higher
    return o, m, l


@triton.jit(do_not_specialize=SIZES)
def _paged_attention(
    Q, K, V, KEY_SCALES, VALUE_SCALES, OUT, SCALES, SINKS, TABLE, STARTS, POSITIONS, rows, splits, by_token,
    table_row, size, global_count, near, seed, RANDOM: tl.constexpr, scale, cap, qt, qh, kp, kt, kg, vp, vt, vg,
    KIND: tl.constexpr, CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
    BULK: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr,
    TOKENS: tl.constexpr, LIMIT: tl.constexpr, IS_SHORT: tl.constexpr, PARTS: tl.constexpr, LSE: tl.constexpr,
    SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    # Programs (tile, key/value head, split). With PARTS, OUT is what `_join_splits` reads, float32; with LSE, SCALES is
    # the log-sum-exp of each query's scores and sink, float32 [queries, heads].
    tile, group, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1) * SHARE
    if IS_SHORT:
        TILES: tl.constexpr = (LIMIT * SHARE + M - 1) // M
        row, i = tile // TILES, tile % TILES * M
    else:
        row = _row_of(STARTS, tile, rows, SHARE, M, ROWS)
        i = (tile - tl.load(STARTS + row) * SHARE // M - row) * M
    start, stop = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    count = stop - start
    if ((count <= LIMIT) != IS_SHORT) | (i >= count * SHARE):
        return
    # A row's positions are consecutive, the last one that of its last key.
    position = tl.load(POSITIONS + start).to(tl.int32)
    end = position + count
    begin = (first_key(position, size, KIND) // SPLIT + tl.program_id(2)) * SPLIT if IS_SHORT else 0
    if begin >= end:
        return
    pair = i + tl.arange(0, M)
    valid, token, head = pair < count * SHARE, (start + pair // SHARE).to(tl.int64), group * SHARE + pair % SHARE
    lines = Q + token * qt + head * qh
    q = (_columns(lines, valid, 0, BULK, DIM, False),)
    if REST:
        q = (q[0], _columns(lines, valid, BULK, REST, DIM, False))
    first, last = position + i // SHARE, tl.minimum(position + (i + M - 1) // SHARE, end - 1)
    queries = (position + pair // SHARE, first, last)
    scales = (KEY_SCALES + group, VALUE_SCALES + group, tl.num_programs(1))
    pages = (K + group * kg, V + group * vg, TABLE + row.to(tl.int64) * table_row, kp, kt, vp, vt)
    pattern = (size, global_count, near, seed)
    lo, a, z, hi = key_tiles(first, last, end, 0, size, TABLE, KIND, False, N)

    o, m, l = tl.zeros([M, WIDTH], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if IS_SHORT:
        lo, a, z, hi = align_tiles(tl.maximum(lo, begin), a, z, tl.minimum(hi, begin + SPLIT), N)
    # One loop with a mask for few tiles, for scattered patterns, and where the registers do for no three.
    ONE: tl.constexpr = IS_SHORT or WIDTH > 256 or (KIND != "full" and KIND != "window" and KIND != "local")
    if ONE:
        a = hi
    # [lo, a): not every query sees every key, at the left edge of the pattern.
    if ONE or KIND != "full":
        o, m, l = _page_tiles(
            o, m, l, q, lo, a, end, queries, pages, scales, pattern, scale, cap, KIND, RANDOM, CAP, DIM, BULK, REST,
            VALUE, WIDTH, SHARED, TOKENS, N, True, UPCAST, CODES,
        )  # fmt: skip
    if not ONE:
        o, m, l = _page_tiles(
            o, m, l, q, a, z, end, queries, pages, scales, pattern, scale, cap, KIND, RANDOM, CAP, DIM, BULK, REST,
            VALUE, WIDTH, SHARED, TOKENS, N, False, UPCAST, CODES,
        )  # fmt: skip
        o, m, l = _page_tiles(
            o, m, l, q, z, hi, end, queries, pages, scales, pattern, scale, cap, KIND, RANDOM, CAP, DIM, BULK, REST,
            VALUE, WIDTH, SHARED, TOKENS, N, True, UPCAST, CODES,
        )  # fmt: skip

    columns = tl.arange(0, WIDTH)
    if PARTS:
        # [queries, heads, splits, VALUE] and, of (m, l), [queries, heads, splits, 2].
        slot = pair // SHARE + tl.where(by_token != 0, start, row * LIMIT)
        part = (slot.to(tl.int64) * heads + head) * splits + tl.program_id(2)
        tl.store(SCALES + part * 2, m, mask=valid)
        tl.store(SCALES + part * 2 + 1, l, mask=valid)
        tl.store(OUT + part[:, None] * VALUE + columns, o, mask=valid[:, None] & (columns < VALUE)[None, :])
    else:
        if HAS_SINKS:
            l += tl.exp2(tl.load(SINKS + head).to(tl.float32) * LOG2_E_ - m)
        if LSE:
            tl.store(SCALES + token * heads + head, (m + tl.log2(l)) * LN_2, mask=valid)
        out = OUT + (token * heads + head)[:, None] * VALUE + columns
        o = o / l[:, None]
        tl.store(out, o.to(OUT.dtype.element_ty), mask=valid[:, None] & (columns < VALUE)[None, :])


@triton.jit(do_not_specialize=["heads", "splits", "by_token", "size"])
def _join_splits(
    PARTS, SCALES, OUT, SINKS, STARTS, POSITIONS, heads, splits, by_token, size, KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the softmaxes of a short row's splits: a program for each row and query head."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    count = stop - start
    if (count == 0) | (count > LIMIT):
        return
    position = tl.load(POSITIONS + start).to(tl.int32)
    # The splits that the row has, counted from its first one, as in `_paged_attention`.
    live = tl.cdiv(position + count, SPLIT) - first_key(position, size, KIND) // SPLIT
    columns = tl.arange(0, WIDTH)
    slot = tl.where(by_token != 0, start, row * LIMIT).to(tl.int64)
    for i in range(0, count):
        o, m, l = tl.zeros([WIDTH], tl.float32), float("-inf"), 0.0
        for j in range(0, live, BLOCK):
            split = j + tl.arange(0, BLOCK)
            part = ((slot + i) * heads + head) * splits + split
            valid = split < live
            maxima = tl.load(SCALES + part * 2, mask=valid, other=float("-inf"))
            sums = tl.load(SCALES + part * 2 + 1, mask=valid, other=0.0)
            mask = valid[:, None] & (columns < VALUE)[None, :]
            parts = tl.load(PARTS + part[:, None] * VALUE + columns[None, :], mask=mask, other=0.0)
            higher = tl.maximum(m, tl.max(maxima, 0))
            # A query sees no key of some splits, and of the first ones perhaps of none yet.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp2(maxima - base), tl.exp2(m - base)
            o = o * shrink + tl.sum(parts * weights[:, None], 0)
            l = l * shrink + tl.sum(sums * weights, 0)
            m = higher
        if HAS_SINKS:
            l += tl.exp2(tl.load(SINKS + head).to(tl.float32) * LOG2_E_ - m)
        out = OUT + ((start + i).to(tl.int64) * heads + head) * VALUE + columns
        tl.store(out, (o / l).to(OUT.dtype.element_ty), mask=columns < VALUE)


def _flops(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, *arguments: Any, out_val: Any = None) -> int:
    keys = table.shape[1] * k_pages.shape[1]
    return 2 * q.shape[0] * q.shape[1] * (q.shape[2] + v_pages.shape[-1]) * keys


def _empty(q: Tensor, k_pages: Tensor, v_pages: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], v_pages.shape[-1]))


def _widths(dim: int, value: int) -> dict[str, int]:
    """The constants of the sizes of keys and values: BULK, a power of two, and REST of a key, WIDTH of a value."""
    bulk = max(16, triton.next_power_of_2(dim + 1) // 2)
    rest = max(16, triton.next_power_of_2(dim - bulk)) if dim > bulk else 0
    return {"DIM": dim, "BULK": bulk, "REST": rest, "VALUE": value, "WIDTH": max(16, triton.next_power_of_2(value))}


def _blocks(table: Sequence[tuning.Config], share: int, codes: str) -> tuning.Config:
    """The first row of a table; of that for short rows M is at most the pairs of four queries and a key/value head."""
    blocks = dict(table[0])
    if codes:  # whose numbers need registers
        blocks["M"] = min(blocks["M"], 64)
    if "SPLIT" in blocks:
        blocks["M"] = min(blocks["M"], max(16, triton.next_power_of_2(4 * share)))
    return blocks


@operator(
    "paged_attention_tiles(Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor starts, Tensor positions, "
    f"Tensor? sinks, {PATTERN}, float cap, Tensor? key_scales=None, Tensor? value_scales=None) -> Tensor",
    _empty,
    flop=_flops,
)
def paged_attention_tiles(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor,
    sinks: Tensor | None, pattern: list[int], scale: float, cap: float, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out [N, H, V]; pattern: its `numbers`; scales: of codes."""
    tensors = q, k_pages, v_pages, *(x for x in (key_scales, value_scales) if x is not None)
    call = _Call(tensors, (table, starts, positions), sinks, pattern, (scale, cap))
    out, (rows, width) = q.new_zeros((*q.shape[:2], v_pages.shape[-1])), table.shape  # 0: of queries behind the rows
    if out.numel() * rows * width == 0:
        return out
    short, long = (call.blocks(of_kind) for of_kind in (SHORT, LONG))
    limit, split = max(1, short["M"] // call.share), short["SPLIT"]
    splits = triton.cdiv(width * k_pages.shape[1], split)
    if call.mask.kind in ("window", "local"):  # the keys of `limit` queries side by side
        splits = min(splits, (call.mask.size + limit - 3) // split + 2)
    by_token = len(q) <= rows * limit
    if len(q) > limit:
        call.launch(call.tiles(long), out, None, long, LIMIT=limit, SPLIT=split)
    grid = rows * triton.cdiv(limit * call.share, short["M"]), k_pages.shape[2], splits
    if splits == 1:
        call.launch(grid, out, None, short, LIMIT=limit, SPLIT=split)
        return out
    shape = (len(q) if by_token else rows * limit), q.shape[1], splits
    scales, parts = (torch.empty((*shape, x), dtype=torch.float32, device=q.device) for x in (2, out.shape[-1]))
    call.launch(grid, parts, scales, short, splits, by_token, PARTS=True, LIMIT=limit, SPLIT=split)
    _join_splits[(rows, q.shape[1])](
        parts, scales, out, out if sinks is None else sinks, *call.rows[1:], q.shape[1], splits, int(by_token),
        call.mask.size, KIND=call.mask.kind, HAS_SINKS=sinks is not None, VALUE=out.shape[-1],
        WIDTH=call.sizes["WIDTH"], BLOCK=JOINED, LIMIT=limit, SPLIT=split,
    )  # fmt: skip
    return out


def attend_in_order(
    tensors: Sequence[Tensor],
    rows: Sequence[Tensor],
    sinks: Tensor | None,
    pattern: list[int],
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """(out [N, H, V], the log-sum-exp of each query's scores and sink, float32 [N, H]) in one order for each query.

    tensors: q and the pages; rows: table, starts, positions. Every row is a long one, so that a query's bits do not
    depend on the number of queries of its row either: the order is that of the tiles of keys, from position 0 on.
    """
    call, q = _Call(tensors, rows, sinks, pattern, (scale, cap)), tensors[0]
    out = q.new_zeros((*q.shape[:2], tensors[2].shape[-1]))
    lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
    if out.numel() * rows[0].numel():
        blocks = call.blocks(LONG)
        call.launch(call.tiles(blocks), out, lse, blocks, LIMIT=0, SPLIT=1)
    return out, lse


class _Call:
    """What the launches share."""

    def __init__(
        self, tensors: Sequence[Tensor], rows: Sequence[Tensor], sinks: Tensor | None, pattern: list[int],
        scores: tuple[float, float],
    ) -> None:  # fmt: skip
        (q, k, v), scales = tensors[:3], tensors[3:]
        self.codes = PAGE_CODES[k.dtype] if scales else ""
        k, v = (x.view(torch.uint8) if self.codes == "fp8_e4m3" else x for x in (k, v))
        self.scales = [x.contiguous() for x in scales]
        self.tensors, self.rows = ((q if q.stride(2) == 1 else q.contiguous()), k, v), [x.contiguous() for x in rows]
        self.sinks, self.mask, (self.scale, self.cap) = sinks, Pattern.of_numbers(pattern), scores
        self.sizes, self.share = _widths(q.shape[2], v.shape[-1]), q.shape[1] // k.shape[2]
        same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
        self.shared = same and v.shape[-1] == self.sizes["BULK"]

    def blocks(self, tables: Mapping[tuple[int, bool], Sequence[tuning.Config]]) -> tuning.Config:
        """The block sizes by the sizes of the heads."""
        q, key = self.tensors[0], max(64, self.sizes["BULK"], self.sizes["WIDTH"])
        return _blocks(tuning.rows(tables[key, q.dtype == torch.float32], q.device), self.share, self.codes)

    def tiles(self, blocks: tuning.Config) -> tuple[int, int]:
        """The programs of longer rows."""
        q, k, _ = self.tensors
        return len(q) * self.share // blocks["M"] + len(self.rows[0]), k.shape[2]

    def launch(
        self, grid: tuple[int, ...], out: Tensor, scales: Tensor | None, blocks: tuning.Config, splits: int = 1,
        by_token: bool = False, PARTS: bool = False, *, LIMIT: int, SPLIT: int,
    ) -> None:  # fmt: skip
        """One launch: scales, for `_join_splits` with PARTS, else the log-sum-exp; None for neither."""
        (q, k, v), (table, starts, positions), is_short = self.tensors, self.rows, "SPLIT" in blocks
        sinks = out if self.sinks is None else self.sinks.contiguous()
        numbers = self.scale / self.cap if self.cap else self.scale * LOG2_E, self.cap * LOG2_E
        _paged_attention[grid](
            q, k, v, *(self.scales or (out, out)), out, out if scales is None else scales, sinks,
            table, starts, positions, len(table), splits,
            int(by_token), table.shape[1], *self.mask.sizes, *numbers, *q.stride()[:2], *k.stride()[:3],
            *v.stride()[:3], KIND=self.mask.kind, CAP=self.cap > 0, HAS_SINKS=self.sinks is not None, SHARE=self.share,
            SHARED=self.shared, TOKENS=k.shape[1], IS_SHORT=is_short, PARTS=PARTS,
            LSE=scales is not None and not PARTS, UPCAST=INTERPRETED, CODES=self.codes, **self.sizes,
            **blocks | {"LIMIT": LIMIT, "SPLIT": SPLIT},
        )  # fmt: skip


def attend_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor, *,
    pattern: Pattern = FULL, scale: float | None = None, cap: float = 0.0, sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The operation by the kernels."""
    scoring = Scoring.of_call(q, pattern, scale, cap)
    return paged_attention_tiles(
        q, k_pages, v_pages, table, starts, positions, sinks, scoring.numbers, float(scoring.scale), float(cap),
        *(scales or ()),
    )  # fmt: skip


def refuse_sizes(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The reason why the kernels do not take heads of these sizes; "" if they do."""
    if q.shape[-1] <= MAX_KEY and v.shape[-1] <= MAX_VALUE:
        return ""
    sizes = f"{q.shape[-1]} and {v.shape[-1]}"
    return f"heads have {sizes} numbers; it takes keys up to {MAX_KEY} and values up to {MAX_VALUE}"


def serves(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, *tensors: Tensor,
    sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> str:  # fmt: skip
    """The reason why the kernels do not take a call; "" if they do."""
    coded = scales is not None and k_pages.dtype in PAGE_CODES
    kinds = k_pages.dtype == v_pages.dtype and (coded or q.dtype == k_pages.dtype)
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not kinds:
        dtypes = f"{q.dtype}, {k_pages.dtype} and {v_pages.dtype}"
        return f"the dtypes are {dtypes}; it takes three of float32, bfloat16 or float16, or codes with scales"
    if reason := refuse_sizes(q, k_pages, v_pages):
        return reason
    if k_pages.stride(-1) != 1 or v_pages.stride(-1) != 1:
        return "the numbers of a head do not lie side by side in the pages"
    if table.shape[1] * k_pages.shape[1] > MAX_POSITION:
        return "the pages of a row have more than 2^30 positions"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_pages, v_pages)):
        return "it has no gradient"
    return triton_runs(q, k_pages, v_pages, table, *tensors, *([] if sinks is None else [sinks]))


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    strides = "qt", "qh", "kp", "kt", "kg", "vp", "vt", "vg"

    def attention(
        dim: int, value: int, share: int, is_short: bool, dtype: str = "bf16", kind: str = "full", codes: str = ""
    ) -> Build:  # fmt: skip
        sizes = _widths(dim, value)
        table = (SHORT if is_short else LONG)[max(64, sizes["BULK"], sizes["WIDTH"]), dtype == "fp32"]
        blocks = _blocks(table.for_gpu(gpu), share, codes)
        shared = dim > 256
        constants = {
            **sizes, "KIND": kind, "RANDOM": 3 * (kind == "bigbird"), "CAP": dim == 256, "HAS_SINKS": kind == "window",
            "SHARE": share, "SHARED": shared, "TOKENS": 16, "LIMIT": max(1, blocks["M"] // share) if is_short else 4,
            "IS_SHORT": is_short, "PARTS": is_short, "LSE": share == 1, "SPLIT": 256, "UPCAST": False, "CODES": codes,
        }  # fmt: skip
        types = "SCALES:*fp32 TABLE:*i32 STARTS:*i32 POSITIONS:*i64 scale:fp32 cap:fp32"
        types += " OUT:*fp32" * is_short + " KEY_SCALES:*fp32 VALUE_SCALES:*fp32" * bool(codes)
        types += {"": "", "int8": " K:*i8 V:*i8", "fp8_e4m3": " K:*u8 V:*u8"}[codes]
        label = (
            f"{'short' if is_short else 'long'} {dim} {blocks['M']}x{blocks['N']} share {share} {dtype} {codes or kind}"
        )
        # A tile of 16 to 32 rows takes the matrix units of an A100 on an H100 too.
        checks = {"matrix": dtype != "fp32" and blocks["M"] >= 64, "wide": (not sizes["REST"] or shared) and not codes}
        return build(_paged_attention, label, blocks, constants, types, f"*{dtype}", aligned=strides, **checks)

    for is_short in (False, True):
        for dim, value, share in ((64, 64, 1), (96, 96, 4), (128, 128, 4), (256, 256, 2), (576, 512, 128)):
            yield attention(dim, value, share, is_short)
        for kind in ("window", "fixed", "bigbird"):
            yield attention(128, 128, 8, is_short, kind=kind)
        for dim, value in ((64, 64), (128, 128), (576, 512)):
            yield attention(dim, value, 4, is_short, "fp32")
        for codes in PAGE_CODES.values():
            yield attention(128, 128, 4, is_short, codes=codes)
    for value in (128, 512):
        constants = {
            "KIND": "full", "HAS_SINKS": True, "VALUE": value, "WIDTH": value, "LIMIT": 4, "SPLIT": 256,
            "BLOCK": JOINED,
        }  # fmt: skip
        types = "PARTS:*fp32 SCALES:*fp32 STARTS:*i32 POSITIONS:*i64"
        yield build(_join_splits, f"{value}", {"num_warps": 4}, constants, types, wide=False)
