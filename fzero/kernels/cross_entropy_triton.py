"""The rows of cross_entropy_rows in Triton, a row a program: statistics, gradient, or both from one kernel, in place
where that is asked.

Columns are read a block at a time with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867,
algorithm 3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build

NONE, WRONG = -1, -2  # in place of a target: the token does not count; it counts, and there is no such column
NOT_COUNTED, NO_SUCH = tl.constexpr(NONE), tl.constexpr(WRONG)
HELD = 16384  # the longest row that a program holds in registers, and so reads once
# A longer row is read twice, and the second time from the second-level cache, if the rows in flight fit there: on an
# H200 (132 processors, 50 MB) two of 128 KiB each, V = 64K in bfloat16, are 34 MB, and so is one of 256 KiB, V = 128K,
# where two would be 68 MB and the gradient cost 6 bytes a logit in place of 4. The registers of the second
# configuration leave room for one program on a processor.
LOOPS = [{"BLOCK": block, "STAGES": 3, "num_warps": 16} for block in (8192, 16384)]
TWO_FIT = 65536  # columns


@triton.jit
def _tanh(x):
    # As 2 s(2x) - 1 it cancels near 0, where the series takes over.
    square = x * x
    series = x * (
        1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    )
    return tl.where(square < 0.09, series, tl.sigmoid(x * 2.0) * 2.0 - 1.0)


@triton.jit
def _read(ROW, at, inside, cap, CAP: tl.constexpr):
    """y at the positions `at`, and -inf where not inside."""
    y = tl.load(ROW + at, mask=inside, other=-float("inf")).to(tl.float32)
    if CAP:
        y = tl.where(inside, _tanh(y / cap) * cap, -float("inf"))
    return y


@triton.jit
def _write(ROW, at, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP: tl.constexpr):
    """The gradient at the positions `at`, of which the target's may be one; 0 for a token that does not count."""
    slope = tl.exp(y - lse) * (lse * z_loss * 2.0 + 1.0) - uniform - tl.where(at == at_target, 1.0 - smoothing, 0.0)
    if CAP:
        slope = slope * (1.0 - (y / cap) * (y / cap))
    tl.store(ROW + at, tl.where(counts, slope, 0.0).to(ROW.dtype.element_ty), mask=inside)


@triton.jit
def _positions(start, begin, end, BLOCK: tl.constexpr):
    """(positions of a block, whether each is of a group of 8 that lies wholly in the row)."""
    at = start + tl.arange(0, BLOCK)
    group = at // 8 * 8
    return at, (group >= begin) & (group + 8 <= end)


@triton.jit
def _base(m):
    """What is taken off before exp: the maximum, unless there is none yet."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def _cross_entropy(
    LOGITS,
    OUT,
    TARGETS,
    STATISTICS,
    stride,
    out_stride,
    columns,
    first,
    z_loss,
    smoothing,
    uniform,
    cap,
    GIVEN: tl.constexpr,
    WRITE: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    RAGGED: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + row)
    # Positions count from a multiple of 8 elements, so that accesses are of 16 bytes wherever a row begins.
    begin = (row * stride % 8).to(tl.int32) if RAGGED else 0
    end = begin + columns
    IN = LOGITS + tl.multiple_of(row * stride - begin, 8)
    TO = OUT + tl.multiple_of(row * out_stride - begin, 8)
    own = (target >= first) & (target < first + columns)
    at_target = target - first + begin
    if RAGGED:
        # What is in no whole group: the row's first few columns, and its last.
        lane = tl.arange(0, 16)
        edge = tl.where(lane < 8, lane, end // 8 * 8 + lane - 8)
        some = (lane >= tl.where(begin > 0, 0, 8)) & (lane < tl.where(begin > 0, tl.where(end < 8, 8, 16), 16))
        on_edge = some & (edge >= begin) & (edge < end)
        y_edge = _read(IN, edge, on_edge, cap, CAP)
    if HELD:
        at, inside = _positions(0, begin, end, BLOCK)
        y = _read(IN, at, inside, cap, CAP)
    if GIVEN:
        lse = tl.load(STATISTICS + row * 3)
    else:
        # Before the first reduction, whose barrier is then between this read and any write.
        y_target = _read(IN, at_target, own, cap, CAP)
        if HELD:
            m = tl.max(y, 0)
            sums = tl.exp(y - _base(m))
            total = tl.sum(tl.where(inside, y, 0.0), 0) if SMOOTH else 0.0
        else:
            m = tl.full((), -float("inf"), tl.float32)
            sums = tl.zeros((BLOCK,), tl.float32)  # by position in the block
            total = tl.zeros((), tl.float32)
            for start in tl.range(0, end, BLOCK, num_stages=STAGES):
                at, inside = _positions(start, begin, end, BLOCK)
                y = _read(IN, at, inside, cap, CAP)
                larger = tl.maximum(m, tl.max(y, 0))
                sums = sums * tl.exp(m - _base(larger)) + tl.exp(y - _base(larger))
                m = larger
                if SMOOTH:
                    total += tl.sum(tl.where(inside, y, 0.0), 0)
        s = tl.sum(sums, 0)
        if RAGGED:
            larger = tl.maximum(m, tl.max(y_edge, 0))
            s = s * tl.exp(m - _base(larger)) + tl.sum(tl.exp(y_edge - _base(larger)), 0)
            total += tl.sum(tl.where(on_edge, y_edge, 0.0), 0)
            m = larger
        lse = _base(m) + tl.log(s)
        tl.store(STATISTICS + row * 3, lse)
        tl.store(STATISTICS + row * 3 + 1, tl.where(own, y_target, tl.where(target == NO_SUCH, float("nan"), 0.0)))
        tl.store(STATISTICS + row * 3 + 2, total)
    if WRITE:
        counts = target != NOT_COUNTED
        if HELD:
            _write(TO, at, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)
        else:
            blocks = tl.cdiv(end, BLOCK)
            for back in tl.range(0, blocks, num_stages=STAGES):
                # From the end: what was read last is still in the cache.
                at, inside = _positions((blocks - 1 - back) * BLOCK, begin, end, BLOCK)
                y = _read(IN, at, inside, cap, CAP)
                _write(TO, at, inside, y, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)
        if RAGGED:
            _write(TO, edge, on_edge, y_edge, at_target, counts, lse, z_loss, smoothing, uniform, cap, CAP)


def _configs(columns: int, ragged: bool) -> tuple[bool, list[tuning.Config]]:
    """(whether a program holds its row, the block sizes there are, the best first)."""
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
    """The statistics [n, 3], made where they are not given; the gradient goes into `out`, which may be the logits.

    Rows may be anywhere, and their columns are side by side. first: the number of the first column. weights: z, s, s /
    V and c.
    """
    n, columns = logits.shape
    given = statistics is not None
    if not given:
        statistics = torch.empty((n, 3), dtype=torch.float32, device=logits.device)
    if n and (out is not None or not given):
        to = logits if out is None else out
        stride, out_stride = (x.stride(0) if n > 1 else 0 for x in (logits, to))
        assert logits.stride(1) == 1 == to.stride(1) or columns == 1
        assert statistics.is_contiguous() and (stride - out_stride) % 8 == 0
        ragged = stride % 8 != 0 or columns % 8 != 0
        held, configs = _configs(columns, ragged)
        flags = {
            "GIVEN": given,
            "WRITE": out is not None,
            "CAP": weights[3] != 0.0,
            "SMOOTH": weights[1] != 0.0,
            "RAGGED": ragged,
        }
        arguments = (logits, to, targets.contiguous(), statistics, stride, out_stride, columns, first, *weights)
        tuning.launch(
            _cross_entropy, lambda _: (n,), arguments, configs, shape=(columns, logits.dtype), **flags, HELD=held
        )
    return statistics


@triton.jit
def _scale(X, FACTOR, n, BLOCK: tl.constexpr):
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(X + at, mask=at < n, other=0.0).to(tl.float32)
            tl.store(X + at, (x * factor).to(X.dtype.element_ty), mask=at < n)


def scale_by_kernel_(x: Tensor, factor: Tensor) -> None:
    """`scale_` where all is on the device, which alone knows the factor: few programs, that end at once for 1."""
    _scale[(min(1024, triton.cdiv(x.numel(), 4096)),)](x, factor, x.numel(), BLOCK=4096, num_warps=8)


def builds() -> Iterator[Build]:
    """What `aot` compiles."""
    pointers = {"LOGITS": "*bf16", "OUT": "*bf16", "TARGETS": "*i64", "STATISTICS": "*fp32"}
    numbers = dict.fromkeys(("stride", "out_stride", "columns", "first"), "i32")
    weights = dict.fromkeys(("z_loss", "smoothing", "uniform", "cap"), "fp32")
    flags = ("GIVEN", "WRITE", "CAP", "SMOOTH", "RAGGED", "HELD", "BLOCK", "STAGES")
    signature = pointers | numbers | weights | dict.fromkeys(flags, "constexpr")
    passes = {"both": (0, 1, 0), "both, all terms": (0, 1, 1), "statistics": (0, 0, 0), "gradient": (1, 1, 0)}
    for columns in (256, 16384, 50257, 128256):
        ragged = columns % 8 != 0
        held, configs = _configs(columns, ragged)
        for what, (given, write, terms) in passes.items():
            constants = {"GIVEN": given, "WRITE": write, "CAP": terms, "SMOOTH": terms, "RAGGED": ragged, "HELD": held}
            aligned = () if ragged else ("stride", "out_stride", "columns")
            for config in configs if terms else configs[:1]:
                label = f"_cross_entropy {columns} {what} {config['BLOCK']}"
                # Of a short row the few accesses to single numbers are the most.
                yield Build(
                    label, "_cross_entropy", signature, constants, config, aligned=aligned, wide=columns > 16384
                )
    signature = {"X": "*bf16", "FACTOR": "*fp32", "n": "i64", "BLOCK": "constexpr"}
    yield Build("_scale", "_scale", signature, {}, {"BLOCK": 4096, "num_warps": 8}, aligned=("n",))
