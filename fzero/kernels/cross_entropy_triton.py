"""cross_entropy_rows in Triton, one row per program: statistics, gradient, or both from one kernel.

Columns are read a block at a time with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867,
algorithm 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.cross_entropy import NONE, WRONG
from fzero.kernels.custom_operator import tl, triton

NOT_COUNTED, NO_SUCH = tl.constexpr(NONE), tl.constexpr(WRONG)
HELD = 16384  # the longest row that a program holds in registers, and so reads only once
# A longer row is read twice, and the second time from the second-level cache, if the rows in flight fit there: on an
# H200 (132 processors, 50 MB) two of 128 KiB each, V = 64K in bfloat16, are 34 MB, and so is one of 256 KiB, V = 128K,
# where two would be 68 MB and the gradient cost 6 bytes a logit in place of 4. The registers of the second
# configuration leave room for one program on a processor.
LOOPS = [{"BLOCK": block, "STAGES": 3, "num_warps": 16} for block in (8192, 16384)]
TWO_FIT = 65536  # columns


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32."""
    # As 2 s(2x) - 1 it cancels near 0, where the series takes over.
    square = x * x
    series = x * (
        1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    )
    return tl.where(square < 0.09, series, tl.sigmoid(x * 2.0) * 2.0 - 1.0)


@triton.jit
def _read(ROW, positions, inside, cap, CAP: tl.constexpr):
    """Load y at the positions `positions`; -inf outside."""
    y = tl.load(ROW + positions, mask=inside, other=-float("inf")).to(tl.float32)
    if CAP:
        y = tl.where(inside, tanh(y / cap) * cap, -float("inf"))
    return y


@triton.jit
def _write(ROW, positions, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP: tl.constexpr):
    """Store the gradient at the positions `positions`, which may include the target's."""
    slope = (
        tl.exp(y - lse) * (lse * z_loss * 2.0 + 1.0) - uniform - tl.where(positions == at_target, 1.0 - smoothing, 0.0)
    )
    if CAP:
        slope = slope * (1.0 - (y / cap) * (y / cap))
    tl.store(ROW + positions, tl.where(counts, slope, 0.0).to(ROW.dtype.element_ty), mask=inside)


@triton.jit
def _positions(start, begin, end, BLOCK: tl.constexpr):
    """(positions of a block, whether each is in a whole aligned group of 8)."""
    positions = start + tl.arange(0, BLOCK)
    group = positions // 8 * 8
    return positions, (group >= begin) & (group + 8 <= end)


@triton.jit
def _base(m):
    """The value subtracted before exp: the maximum m, or 0 while m is -inf."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def _running(IN, begin, end, cap, CAP: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(maximum m, sums of exp(y - m), sum of y if SMOOTH) of the positions [begin, end) of a row."""
    m = tl.full((), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)  # one partial sum per position in the block
    total = tl.zeros((), tl.float32)
    for start in tl.range(0, end, BLOCK, num_stages=STAGES):
        positions, inside = _positions(start, begin, end, BLOCK)
        y = _read(IN, positions, inside, cap, CAP)
        larger = tl.maximum(m, tl.max(y, 0))
        # Sums by column of the block need no reduction in the loop but that of the maximum.
        sums = sums * tl.exp(m - _base(larger)) + tl.exp(y - _base(larger))
        m = larger
        if SMOOTH:
            total += tl.sum(tl.where(inside, y, 0.0), 0)
    return m, sums, total


@triton.jit
def _cross_entropy(
    LOGITS, OUT, TARGETS, STATISTICS, stride, out_stride, columns, first, z_loss, smoothing, uniform, cap,
    GIVEN: tl.constexpr, WRITE: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, RAGGED: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program per row; column v of the row is element row * stride + v.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + row)
    # RAGGED rows may begin anywhere. IN and TO point to the last multiple of 8 elements at or before the row, and
    # positions count from there: column v is position begin + v. Groups of 8 positions are then aligned, and wide
    # accesses are possible; `_positions` masks off groups that are not entirely inside [begin, end), and the (at most
    # 16) columns of those are handled separately as the edge.
    begin = (row * stride % 8).to(tl.int32) if RAGGED else 0
    end = begin + columns
    IN = LOGITS + tl.multiple_of(row * stride - begin, 8)
    TO = OUT + tl.multiple_of(row * out_stride - begin, 8)
    in_range = (target >= first) & (target < first + columns)
    at_target = target - first + begin
    if RAGGED:
        # The edge: lanes 0 to 7 are the first group (if the row begins inside it), lanes 8 to 15 the last,
        # incomplete group.
        lane = tl.arange(0, 16)
        edge = tl.where(lane < 8, lane, end // 8 * 8 + lane - 8)
        valid_lanes = (lane >= tl.where(begin > 0, 0, 8)) & (lane < tl.where(begin > 0, tl.where(end < 8, 8, 16), 16))
        on_edge = valid_lanes & (edge >= begin) & (edge < end)
        y_edge = _read(IN, edge, on_edge, cap, CAP)
    if HELD:
        positions, inside = _positions(0, begin, end, BLOCK)
        y = _read(IN, positions, inside, cap, CAP)
    if GIVEN:
        lse = tl.load(STATISTICS + row * 3)
    else:
        # Read before the first reduction: its barrier separates this read from any write in place.
        y_target = _read(IN, at_target, in_range, cap, CAP)
        if HELD:
            m = tl.max(y, 0)
            sums = tl.exp(y - _base(m))
            total = tl.sum(tl.where(inside, y, 0.0), 0) if SMOOTH else 0.0
        else:
            m, sums, total = _running(IN, begin, end, cap, CAP, SMOOTH, BLOCK, STAGES)
        s = tl.sum(sums, 0)
        if RAGGED:
            # The edge joins as one more block would.
            larger = tl.maximum(m, tl.max(y_edge, 0))
            s = s * tl.exp(m - _base(larger)) + tl.sum(tl.exp(y_edge - _base(larger)), 0)
            total += tl.sum(tl.where(on_edge, y_edge, 0.0), 0)
            m = larger
        lse = _base(m) + tl.log(s)
        tl.store(STATISTICS + row * 3, lse)
        tl.store(STATISTICS + row * 3 + 1, tl.where(in_range, y_target, tl.where(target == NO_SUCH, float("nan"), 0.0)))
        tl.store(STATISTICS + row * 3 + 2, total)
    if WRITE:
        counts = target != NOT_COUNTED
        if HELD:
            _write(TO, positions, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)
        else:
            blocks = tl.cdiv(end, BLOCK)
            for step in tl.range(0, blocks, num_stages=STAGES):
                # Backwards, because the blocks read last are still in the cache.
                positions, inside = _positions((blocks - 1 - step) * BLOCK, begin, end, BLOCK)
                y = _read(IN, positions, inside, cap, CAP)
                _write(TO, positions, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)
        if RAGGED:
            _write(TO, edge, on_edge, y_edge, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)


def _configs(columns: int, ragged: bool) -> tuple[bool, list[tuning.Config]]:
    """(whether a program holds its row in registers, the possible block sizes, best first)."""
    span = columns + 7 * ragged
    if span > HELD:
        return False, LOOPS if columns <= TWO_FIT else LOOPS[::-1]
    block = max(128, triton.next_power_of_2(span))
    return True, [{"BLOCK": block, "STAGES": 1, "num_warps": min(16, max(1, block // 512))}]


def launch(
    logits: Tensor,
    out: Tensor | None,
    targets: Tensor,
    statistics: Tensor | None,
    first: int,
    weights: tuple[float, float, float, float],
) -> Tensor:
    """The statistics [n, 3], computed if not given; writes the gradient into `out`, maybe the logits."""
    n, columns = logits.shape
    has_statistics = statistics is not None
    if not has_statistics:
        statistics = torch.empty((n, 3), dtype=torch.float32, device=logits.device)
    if n and (out is not None or not has_statistics):
        output = logits if out is None else out
        stride, out_stride = (x.stride(0) if n > 1 else 0 for x in (logits, output))
        assert logits.stride(1) == 1 == output.stride(1) or columns == 1
        assert statistics.is_contiguous() and (stride - out_stride) % 8 == 0
        ragged = stride % 8 != 0 or columns % 8 != 0
        resident, configs = _configs(columns, ragged)
        flags: dict[str, Any] = {
            "GIVEN": has_statistics,
            "WRITE": out is not None,
            "CAP": weights[3] != 0.0,
            "SMOOTH": weights[1] != 0.0,
            "RAGGED": ragged,
        }
        arguments = (logits, output, targets.contiguous(), statistics, stride, out_stride, columns, first, *weights)
        tuning.launch(
            _cross_entropy, lambda _: (n,), arguments, configs, shape=(columns, logits.dtype), **flags, HELD=resident
        )
    return statistics


@triton.jit
def _scale(X, FACTOR, n, BLOCK: tl.constexpr):
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(X + offsets, mask=offsets < n, other=0.0).to(tl.float32)
            tl.store(X + offsets, (x * factor).to(X.dtype.element_ty), mask=offsets < n)


def scale_by_kernel_(x: Tensor, factor: Tensor) -> None:
    """As `scale_`, without waiting for the device, where the factor is."""
    _scale[(min(1024, triton.cdiv(x.numel(), 4096)),)](x, factor, x.numel(), BLOCK=4096, num_warps=8)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    types = "TARGETS:*i64 STATISTICS:*fp32 z_loss:fp32 smoothing:fp32 uniform:fp32 cap:fp32"
    passes = {"both": (0, 1, 0), "both, all terms": (0, 1, 1), "statistics": (0, 0, 0), "gradient": (1, 1, 0)}
    for columns in (256, 16384, 50257, 128256):
        ragged = columns % 8 != 0
        resident, configs = _configs(columns, ragged)
        aligned = () if ragged else ("stride", "out_stride", "columns")
        for pass_name, (has_statistics, write, terms) in passes.items():
            constants = {"GIVEN": has_statistics, "WRITE": write, "CAP": terms, "SMOOTH": terms}
            constants |= {"RAGGED": ragged, "HELD": resident}
            for config in configs if terms else configs[:1]:
                label = f"{columns} {pass_name} {config['BLOCK']}"
                # For short rows most accesses are the few to single numbers.
                yield build(_cross_entropy, label, config, constants, types, aligned=aligned, wide=columns > 16384)
    yield build(_scale, "", {"BLOCK": 4096, "num_warps": 8}, {}, "FACTOR:*fp32 n:i64", aligned=("n",))
