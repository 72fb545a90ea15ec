"""Rows of logits, as the loss of cross_entropy needs them: three statistics of each row, and the gradient of the loss.

    statistics = (lse, y[t], sum_v y[v]),   y = logits, or c tanh(logits / c),   lse = log sum_v exp(y[v])
    gradient[v] = ((1 + 2 z lse) exp(y[v] - lse) - (1 - s) [v = t] - s / V) (1 - (y[v] / c)^2)

with t the target, z the weight of the z-loss, s the smoothing and c the cap. Where a vocabulary is sharded each rank makes the
statistics of its columns, and the gradient from those of all.
Ref: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.

Shapes: logits and gradient [n, V], targets int64 [n], statistics [n, 3] in float32 or wider, in which the arithmetic is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fzero.compile import jit
from fzero.kernels import tuning
from fzero.kernels.aot import Build
from fzero.kernels.function import operator

NONE, WRONG = -1, -2  # in place of a target: the token does not count; it counts, and there is no such column
NOT_COUNTED, NO_SUCH = tl.constexpr(NONE), tl.constexpr(WRONG)
BLOCK_BYTES = 1 << 20  # of float32 logits, for a thread at a time: they stay in its cache for the three passes over them

HELD = 16384  # the longest row that a program holds in registers, and so reads once
# A longer row is read twice, and the second time from the second-level cache, if the rows in flight fit there: on an H200 (132 processors,
# 50 MB) two of 128 KiB each, V = 64K in bfloat16, are 34 MB, and so is one of 256 KiB, V = 128K, where two would be 68 MB and the gradient
# cost 6 bytes a logit in place of 4. The registers of the second configuration leave room for one program on a processor.
LOOPS = ((65536, {"BLOCK": 8192, "STAGES": 3, "num_warps": 16}), (math.inf, {"BLOCK": 16384, "STAGES": 3, "num_warps": 16}))


class Terms(NamedTuple):
    """What the loss is made of, and which columns of the vocabulary are here."""

    z_loss: float
    smoothing: float
    cap: float
    first: int  # the number of the first column that is here
    columns: int  # of the whole vocabulary

    @property
    def uniform(self) -> float:
        """The smoothing's share of a column."""
        return self.smoothing / self.columns


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), or x where cap is 0."""
    return torch.tanh(x / cap) * cap if cap else x


# ---- in torch, by blocks of rows --------------------------------------------------------------------------------------


def log_sum_exp(y: Tensor) -> Tensor:
    """[n, 1] of y [n, V]."""
    m = y.amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    return m + torch.log(torch.exp(y - m).sum(-1, keepdim=True))


def _block(logits: Tensor, out: Any, lse: Any, targets: Tensor, terms: Terms, write: bool) -> tuple[Tensor, ...]:
    """(log-sum-exp [n, 1], sum [n, 1]) of a block of rows, where `lse` is () and not given.

    write: the gradient but for the targets' columns goes into `out`, or the logits where `out` is ().
    """
    y = capped(wide(logits), terms.cap)
    made = ()
    if isinstance(lse, tuple):
        lse = log_sum_exp(y)
        made = (lse, y.sum(-1, keepdim=True) if terms.smoothing else torch.zeros_like(lse))
    if write:
        # A token that does not count is left out by numbers of its row, and not by a choice at each column.
        counts = targets[:, None] != NONE
        slope = torch.exp(y - torch.where(counts, lse, math.inf))
        if terms.z_loss:
            slope = slope * (1.0 + 2.0 * terms.z_loss * lse)
        if terms.smoothing:
            slope = slope - counts.to(slope.dtype) * terms.uniform
        if terms.cap:
            slope = slope * (1.0 - (y / terms.cap).square())
        (logits if isinstance(out, tuple) else out).copy_(slope)
    return made


_COMPILED_BLOCK = jit(_block)


def _put_targets(out: Tensor, statistics: Tensor, column: Tensor, own: Tensor, terms: Terms) -> None:
    """Write the gradient at the targets, an element a row: to compare every column with it would cost a third of the softmax."""
    lse, at_target, _ = statistics.split(1, -1)
    slope = torch.expm1(at_target - lse)
    if terms.z_loss:
        slope = slope + torch.exp(at_target - lse) * (2.0 * terms.z_loss * lse)
    if terms.smoothing:
        slope = slope + (terms.smoothing - terms.uniform)
    if terms.cap:
        slope = slope * (1.0 - (at_target / terms.cap).square())
    at = torch.arange(out.shape[0], device=out.device), column[:, 0]
    out[at] = torch.where(own, slope.to(out.dtype), out.gather(1, column))[:, 0]  # scatter_ takes 85 us an element in bfloat16


def _by_blocks(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms, compiled: bool) -> Tensor:
    """The statistics [n, 3], made where they are not given; the gradient goes into `out`, which may be the logits."""
    n, columns = logits.shape
    column = targets[:, None] - terms.first
    own = (targets[:, None] >= 0) & (column >= 0) & (column < columns)
    column = torch.where(own, column, 0)
    at_target = capped(wide(logits.gather(1, column)), terms.cap)  # now, as the logits may be overwritten
    at_target = torch.where(own, at_target, torch.where(targets[:, None] == WRONG, math.nan, 0.0))
    run = _COMPILED_BLOCK if compiled else _block
    fits = max(1, BLOCK_BYTES // (4 * columns))
    rows = torch.get_num_threads() << (fits.bit_length() - 1)  # powers of two, as a last block of another size is another program
    made = []
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        into = () if out is None or out is logits else out[part]
        lse = () if statistics is None else statistics[part, :1]
        made.append(run(logits[part], into, lse, targets[part], terms, out is not None))
    if statistics is None:
        lse, sums = [torch.cat(parts) for parts in zip(*made)] or [at_target, at_target]
        statistics = torch.cat((lse, at_target, sums), -1)
    if out is not None:
        _put_targets(out, statistics, column, own, terms)
    return statistics


# ---- in Triton, a row a program ---------------------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    # As 2 s(2x) - 1 it cancels near 0, where the series takes over.
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
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


def _config(columns: int, ragged: bool, logits: Tensor) -> tuple[bool, tuning.Config]:
    """(whether a program holds its row, block sizes)."""
    span = columns + 7 * ragged
    if span > HELD:
        default = next(config for most, config in LOOPS if columns <= most)
        return False, tuning.config("_cross_entropy", (columns, logits.dtype), default, logits.device)
    block = max(128, triton.next_power_of_2(span))
    return True, {"BLOCK": block, "STAGES": 1, "num_warps": min(16, max(1, block // 512))}


def _by_kernel(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms) -> Tensor:
    """As `_by_blocks`; rows of any stride, columns side by side."""
    n, columns = logits.shape
    given = statistics is not None
    if not given:
        statistics = torch.empty((n, 3), dtype=torch.float32, device=logits.device)
    if n and (out is not None or not given):
        to = logits if out is None else out
        stride, out_stride = (x.stride(0) if n > 1 else 0 for x in (logits, to))
        assert logits.stride(1) == 1 == to.stride(1) and statistics.is_contiguous() and (stride - out_stride) % 8 == 0
        ragged = stride % 8 != 0 or columns % 8 != 0
        held, config = _config(columns, ragged, logits)
        shape = (stride, out_stride, columns, terms.first)
        weights = (terms.z_loss, terms.smoothing, terms.uniform, terms.cap)
        flags = {"GIVEN": given, "WRITE": out is not None, "CAP": terms.cap != 0.0, "SMOOTH": terms.smoothing != 0.0, "RAGGED": ragged}
        _cross_entropy[(n,)](logits, to, targets.contiguous(), statistics, *shape, *weights, **flags, HELD=held, **config)
    return statistics


# ---- both as operators ------------------------------------------------------------------------------------------------


def _run(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms, form: str) -> Tensor:
    if form == "triton":
        return _by_kernel(logits, out, targets, statistics, terms)
    return _by_blocks(logits, out, targets, statistics, terms, form == "compiled")


_ARGUMENTS = "Tensor targets, Tensor? statistics, float z_loss, float smoothing, float cap, int first, int columns, bool write, str form"


def _fake_statistics(logits: Tensor, statistics: Tensor | None) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((logits.shape[0], 3) if statistics is None else (0,), dtype=wide)


def _fake(logits: Tensor, targets: Tensor, statistics: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_statistics(logits, statistics), logits.new_empty(logits.shape if rest[-2] else (0,))


@operator(f"cross_entropy_rows(Tensor logits, {_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
def cross_entropy_rows(logits: Tensor, targets: Tensor, statistics: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """(statistics, where they are not given; gradient [n, V], where `write`) of rows of logits."""
    *terms, write, form = rest
    logits = logits.contiguous() if form == "triton" else logits
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if write else None
    made = _run(logits, out, targets, statistics, Terms(*terms), form)
    return (made if statistics is None else made.new_empty(0)), logits.new_empty(0) if out is None else out


@operator(
    f"cross_entropy_rows_(Tensor(a!) logits, {_ARGUMENTS}) -> Tensor",
    lambda logits, _, statistics, *rest: _fake_statistics(logits, statistics),
)
def cross_entropy_rows_(logits: Tensor, targets: Tensor, statistics: Tensor | None, *rest: Any) -> Tensor:
    """`cross_entropy_rows` with the gradient in the place of the logits."""
    *terms, write, form = rest
    made = _run(logits, logits if write else None, targets, statistics, Terms(*terms), form)
    return made if statistics is None else made.new_empty(0)


def rows_of(
    logits: Tensor, targets: Tensor, statistics: Tensor | None, terms: Terms, write: bool, form: str, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """(statistics [n, 3] of the columns here, gradient [n, V] for the statistics given, or else for those made).

    targets: as `known` gives them. write: whether the gradient is wanted; it is empty otherwise. overwrite: the gradient may take the
    place of the logits. form: "triton", "compiled" or "eager".
    """
    if overwrite and (form != "triton" or logits.stride(1) == 1) and not tracing():
        made = cross_entropy_rows_(logits, targets, statistics, *terms, write, form)
        gradient = logits
    else:
        made, gradient = cross_entropy_rows(logits, targets, statistics, *terms, write, form)
    return (made if statistics is None else statistics), gradient


def tracing() -> bool:
    """Whether a graph is being traced, which must hold no operator that writes into its inputs."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


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


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x times the scalar `factor`, in place. Memory is not touched for a factor of 1, as it is for a loss that is itself differentiated."""
    if type(x) is not Tensor or tracing() or x.numel() == 0 or x.dtype == torch.float64:
        return x.mul_(factor)
    if x.is_cuda and x.is_contiguous():
        scale_by_kernel_(x, factor)
        return x
    return x if x.device.type == "cpu" and float(factor) == 1.0 else x.mul_(factor)


def builds() -> Iterator[Build]:
    """What `aot` compiles."""
    pointers = {"LOGITS": "*bf16", "OUT": "*bf16", "TARGETS": "*i64", "STATISTICS": "*fp32"}
    numbers = dict.fromkeys(("stride", "out_stride", "columns", "first"), "i32")
    numbers |= dict.fromkeys(("z_loss", "smoothing", "uniform", "cap"), "fp32")
    flags = ("GIVEN", "WRITE", "CAP", "SMOOTH", "RAGGED", "HELD", "BLOCK", "STAGES")
    signature = pointers | numbers | dict.fromkeys(flags, "constexpr")
    meta = torch.empty(0, dtype=torch.bfloat16)
    for columns in (256, 16384, 32000, 50257, 128256):
        ragged = columns % 8 != 0
        held, config = _config(columns, ragged, meta)
        for what, given, write, options in (
            ("both", 0, 1, 0),
            ("both, all terms", 0, 1, 1),
            ("statistics", 0, 0, 0),
            ("gradient", 1, 1, 0),
        ):
            if columns == 32000 and what != "both":
                continue
            constants = {"GIVEN": given, "WRITE": write, "CAP": options, "SMOOTH": options, "RAGGED": ragged, "HELD": held}
            aligned = ("stride", "out_stride", "columns") if not ragged else ()
            yield Build(
                f"_cross_entropy {columns} {what}", "_cross_entropy", signature, constants, config, aligned=aligned, wide=columns > 16384
            )
    signature = {"X": "*bf16", "FACTOR": "*fp32", "n": "i64", "BLOCK": "constexpr"}
    yield Build("_scale", "_scale", signature, {}, {"BLOCK": 4096, "num_warps": 8}, aligned=("n",))
