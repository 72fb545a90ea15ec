"""Rows of logits, as the loss of cross_entropy needs them: three statistics of each row, and the gradient.

    statistics = (lse, y[t], sum_v y[v]),   y = logits, or c tanh(logits / c),   lse = log sum_v exp(y[v])
    gradient[v] = ((1 + 2 z lse) exp(y[v] - lse) - (1 - s) [v = t] - s / V) (1 - (y[v] / c)^2)

with t the target, z the weight of the z-loss, s the smoothing and c the cap. If the vocabulary is sharded, each rank
computes the statistics of its columns, and the gradient from those of all.

Shapes: logits and gradient [n, V], targets int64 [n], statistics [n, 3] in float32 or wider, in which the arithmetic
is. Here in plain torch, and in C++ for a CPU; in Triton in cross_entropy_triton.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import kernels
from fzero.core.compile_cache import CONTRACTED, have_compiler, library
from fzero.core.device import kind_of
from fzero.core.torch_private import TorchDispatchModeKey, get_dispatch_mode
from fzero.kernels.custom_operator import call_cpp, cap_logits, operator

NONE, WRONG = -1, -2  # replace a target: the token does not count; it counts, but the vocabulary has no such column

BLOCK_BYTES = 1 << 20  # of float32 logits that plain torch works on at a time, on a CPU
NATIVE = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}  # what the C++ takes


class Terms(NamedTuple):
    """The weights of the loss's terms, and which columns of the vocabulary this rank has."""

    z_loss: float
    smoothing: float
    cap: float
    first: int  # the number of this rank's first column
    columns: int  # of the whole vocabulary

    @property
    def uniform(self) -> float:
        """The smoothing's share of a column."""
        return self.smoothing / self.columns


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- in torch --------------------------------------------------------------------------------------------------------


def log_sum_exp(y: Tensor) -> Tensor:
    """[n, 1] of y [n, V]."""
    m = y.amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    return m + torch.log(torch.exp(y - m).sum(-1, keepdim=True))


def _block(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms) -> Tensor:
    """The statistics [n, 3], computed if not given; writes the gradient into `out`."""
    y = cap_logits(widen(logits), terms.cap)
    column = targets[:, None] - terms.first
    in_range = (targets[:, None] >= 0) & (column >= 0) & (column < logits.shape[1])
    column = torch.where(in_range, column, 0)
    if statistics is None:
        at_target = torch.where(in_range, y.gather(1, column), torch.where(targets[:, None] == WRONG, math.nan, 0.0))
        statistics = torch.cat((log_sum_exp(y), at_target, y.sum(-1, keepdim=True)), -1)
    if out is not None:
        lse = statistics[:, :1]
        slope = torch.exp(y - lse) * (1.0 + 2.0 * terms.z_loss * lse) - terms.uniform
        _write_targets(slope, y, lse, column, in_range, terms)
        if terms.cap:
            slope = slope * (1.0 - (y / terms.cap).square())
        out.copy_(torch.where(targets[:, None] == NONE, 0.0, slope))
    return statistics


def _write_targets(slope: Tensor, y: Tensor, lse: Tensor, column: Tensor, in_range: Tensor, terms: Terms) -> None:
    """Overwrite the slope in the targets' columns: p - 1 by expm1, accurate near 1."""
    log_p = y.gather(1, column) - lse
    target_slope = (
        torch.expm1(log_p) + torch.exp(log_p) * (2.0 * terms.z_loss * lse) + (terms.smoothing - terms.uniform)
    )
    slope.scatter_(1, column, torch.where(in_range, target_slope, slope.gather(1, column)))


def _by_torch(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms) -> Tensor:
    """As `_block`, by blocks of rows on a CPU, so that temporaries are small."""
    n, columns = logits.shape
    rows = max(1, BLOCK_BYTES // (4 * columns)) if kind_of(logits) == "cpu" else max(1, n)
    chunks = [logits.new_empty((0, 3), dtype=torch.promote_types(logits.dtype, torch.float32))]
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        block_out, block_statistics = (None if x is None else x[block] for x in (out, statistics))
        chunks.append(_block(logits[block], block_out, targets[block], block_statistics, terms))
    return torch.cat(chunks)


# ---- in C++, on a CPU ------------------------------------------------------------------------------------------------


class _RowsShape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ["n", "columns", "stride", "out_stride", "first", "threads", "given"]
    ] + [(name, ctypes.c_double) for name in ["z_loss", "smoothing", "uniform", "cap"]]


def _library() -> ctypes.CDLL:
    """cross_entropy_rows.cpp, compiled when it is first used, and kept in Inductor's cache."""
    return library(__file__, CONTRACTED)


def cpp_serves(logits: Tensor) -> bool:
    """Whether the C++ serves these logits."""
    return kind_of(logits) == "cpu" and logits.dtype in NATIVE and have_compiler()


def _by_cpp(logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms) -> Tensor:
    """As `_block`; rows of any stride, columns side by side."""
    n, columns = logits.shape
    has_statistics = statistics is not None
    if not has_statistics:
        statistics = torch.empty((n, 3), dtype=torch.promote_types(logits.dtype, torch.float32))
    targets, output = targets.contiguous(), logits if out is None else out
    assert (
        (logits.stride(1) == 1 == output.stride(1) or columns == 1)
        and statistics.is_contiguous()
        and targets.dtype == torch.int64
    )
    sizes = (n, columns, logits.stride(0), output.stride(0), terms.first, torch.get_num_threads(), has_statistics)
    shape = _RowsShape(*sizes, terms.z_loss, terms.smoothing, terms.uniform, terms.cap)
    tensors, run = (logits, out, targets, statistics), getattr(_library(), f"rows_{NATIVE[logits.dtype]}")
    call_cpp(run, tensors, ctypes.byref(shape))
    return statistics


# ---- as operators ----------------------------------------------------------------------------------------------------


def _run(
    logits: Tensor, out: Tensor | None, targets: Tensor, statistics: Tensor | None, terms: Terms, form: str
) -> Tensor:
    if form == "triton":
        weights = (terms.z_loss, terms.smoothing, terms.uniform, terms.cap)
        return kernels.cross_entropy_triton.launch(logits, out, targets, statistics, terms.first, weights)
    run = _by_cpp if form == "compiled" and cpp_serves(logits) else _by_torch
    return run(logits, out, targets, statistics, terms)


_ARGUMENTS = (
    "Tensor targets, Tensor? statistics, float z_loss, float smoothing, float cap, int first, int columns, bool "
    "write, str form"
)


def _fake_statistics(logits: Tensor, statistics: Tensor | None) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((logits.shape[0], 3) if statistics is None else (0,), dtype=wide)


def _fake(logits: Tensor, targets: Tensor, statistics: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake_statistics(logits, statistics), logits.new_empty(logits.shape if arguments[-2] else (0,))


@operator(f"cross_entropy_rows(Tensor logits, {_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
def cross_entropy_rows(
    logits: Tensor, targets: Tensor, statistics: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """(statistics, if they are not given; gradient [n, V], if `write`) of rows of logits."""
    *terms, write, form = arguments
    logits = logits.contiguous()
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if write else None
    new_statistics = _run(logits, out, targets, statistics, Terms(*terms), form)
    returned_statistics = new_statistics if statistics is None else new_statistics.new_empty(0)
    return returned_statistics, logits.new_empty(0) if out is None else out


@operator(
    f"cross_entropy_rows_(Tensor(a!) logits, {_ARGUMENTS}) -> Tensor",
    lambda logits, _, statistics, *rest: _fake_statistics(logits, statistics),
)
def cross_entropy_rows_(logits: Tensor, targets: Tensor, statistics: Tensor | None, *arguments: Any) -> Tensor:
    """`cross_entropy_rows` with the gradient in the place of the logits."""
    *terms, write, form = arguments
    new_statistics = _run(logits, logits if write else None, targets, statistics, Terms(*terms), form)
    return new_statistics if statistics is None else new_statistics.new_empty(0)


def rows_of(
    logits: Tensor, targets: Tensor, statistics: Tensor | None, terms: Terms, write: bool, form: str, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """(statistics [n, 3] of the columns here, gradient [n, V] for the statistics given or made)."""
    if overwrite and logits.stride(1) == 1 and not is_tracing():
        new_statistics = cross_entropy_rows_(logits, targets, statistics, *terms, write, form)
        gradient = logits
        if write:
            torch.autograd.graph.increment_version(
                logits
            )  # so that autograd complains if something else has saved them
    else:
        new_statistics, gradient = cross_entropy_rows(logits, targets, statistics, *terms, write, form)
    return (new_statistics if statistics is None else statistics), gradient


def is_tracing() -> bool:
    """Whether a graph is being traced, which must hold no operator that writes into its inputs."""
    return get_dispatch_mode(TorchDispatchModeKey.PROXY) is not None


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x by the scalar `factor` in place; a factor of 1 does not touch memory."""
    if type(x) is not Tensor or is_tracing() or x.numel() == 0 or x.dtype == torch.float64:
        return x.mul_(factor)
    if x.is_cuda and x.is_contiguous():
        kernels.cross_entropy_triton.scale_by_kernel_(x, factor)
        return x
    return x if x.device.type == "cpu" and float(factor) == 1.0 else x.mul_(factor)
