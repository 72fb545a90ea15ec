"""Cross entropy of given logits: the loss, and its gradient from the same softmax.

    loss = sum over the tokens that count of  m ((1 - s) (lse - y[t]) + s (lse - mean_v y[v]) + z lse^2),
    y = logits, or c tanh(logits / c),   lse = log sum_v exp(y[v])

with t a token's target, m its weight (1, or what a mask of numbers says), s the smoothing, z the weight of the z-loss
and c the cap. The forward pass computes the
gradient together with the loss, and the backward pass only scales it.
Ref: Szegedy et al. 2016, "Rethinking the Inception architecture", arXiv:1512.00567, section 7
(smoothing); Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, section 5 (z-loss); Gemma Team 2024, "Gemma 2",
arXiv:2408.00118, section 2.1 (cap).

Shapes: logits [N, V], targets int64 [N], mask [N], bool or the weights of the tokens (float, 0 or more), or None; the
loss is a scalar in float32 or wider.

Rows of logits, as the loss of cross_entropy needs them: three statistics of each row, and the gradient.

    statistics = (lse, y[t], sum_v y[v]),   y = logits, or c tanh(logits / c),   lse = log sum_v exp(y[v])
    gradient[v] = ((1 + 2 z lse) exp(y[v] - lse) - (1 - s) [v = t] - s / V) (1 - (y[v] / c)^2)

with t the target, z the weight of the z-loss, s the smoothing and c the cap. If the vocabulary is sharded, each rank
computes the statistics of its columns, and the gradient from those of all.

Shapes: logits and gradient [n, V], targets int64 [n], statistics [n, 3] in float32 or wider, in which the arithmetic
is. Here in plain torch, and in C++ for a CPU; in Triton in cross_entropy_triton.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import kernels
from fzero.core.autodiff import Function, needs_grad, run_backward
from fzero.core.compile_cache import CONTRACTED, have_compiler, library
from fzero.core.device import kind_of
from fzero.core.torch_private import TorchDispatchModeKey, get_dispatch_mode
from fzero.kernels.custom_operator import call_cpp, cap_logits, on_cuda, operator, triton_runs
from fzero.kernels.registry import Form, Op

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
    """cross_entropy.cpp, compiled when it is first used, and kept in Inductor's cache."""
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


IGNORE = -100  # torch's mark of a target that does not count; no negative one does
LARGE = 1 << 16  # logits from which the chunked form is faster than the reference, on a CPU and one thread
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LossOptions(NamedTuple):
    """The options of the loss that every form takes: ignore_index, z, s and c, 0 for none."""

    ignore_index: int = IGNORE
    z_loss: float = 0.0
    smoothing: float = 0.0
    cap: float = 0.0

    def terms(self, first: int, columns: int) -> Terms:
        """The Terms of the columns from `first` on, of a vocabulary of so many."""
        return Terms(*self[1:], first, columns)


def counted_tokens(targets: Tensor, mask: Tensor | None = None, ignore_index: int = IGNORE) -> Tensor:
    """Whether each token counts, bool: its mask is True and its target is neither negative nor `ignore_index`.

    >>> counted_tokens(torch.tensor([3, -100, 5]), torch.tensor([0.5, 0.5, 0.0]))
    tensor([0.5000, 0.0000, 0.0000])
    """
    counts = targets >= 0
    counts = counts if ignore_index < 0 else counts & (targets != ignore_index)
    return counts if mask is None else weighed(mask, counts) if mask.is_floating_point() else mask & counts


def number_of(counts: Tensor) -> Tensor:
    """The number of tokens that count, int64, or the sum of their weights, from `counted_tokens`."""
    # Rounded once, so that it hardly depends on how the tokens are cut.
    return counts.sum(dtype=torch.float64).to(counts.dtype) if counts.is_floating_point() else counts.sum()


def weighed(values: Tensor, counts: Tensor) -> Tensor:
    """The values of the tokens that count, times their weights if they have some; 0 of the others."""
    if counts.is_floating_point():
        return torch.where(counts != 0, values * counts, 0.0)
    return torch.where(counts, values, 0.0)


def weights_of(mask: Tensor | None) -> Tensor | None:
    """The weights of tokens that a mask has; None for one that says which count."""
    return mask if mask is not None and mask.is_floating_point() else None


def check_targets(targets: Tensor, columns: int, mask: Tensor | None = None, ignore_index: int = IGNORE) -> None:
    """Raise ValueError, naming the first position, if a target that counts is not in [0, columns).

    >>> check_targets(torch.tensor([[3, -100], [1, 8]]), columns=8)
    Traceback (most recent call last):
    ValueError: targets[1, 1] is 8; a target is in 0..7, or negative for a token that does not count
    """
    wrong = counted_tokens(targets, mask, ignore_index).bool() & (targets >= columns)
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"targets{index} is {int(targets[tuple(index)])}; a target is in 0..{columns - 1}, or negative for a token "
            "that does not count"
        )


def mark_targets(targets: Tensor, mask: Tensor | None, ignore_index: int, columns: int) -> Tensor:
    """The targets with NONE for tokens that do not count, and WRONG for those out of range that count."""
    classes = torch.where((targets >= 0) & (targets < columns), targets, WRONG)
    return torch.where(counted_tokens(targets, mask, ignore_index).bool(), classes, NONE).to(torch.int64)


def reference(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    overwrite: bool = False,
    compiled: bool = True,
    **options: Any,
) -> Tensor:
    """The loss, summed over the tokens that count: those whose mask is True and whose target is neither negative nor
    `ignore_index`. A mask of numbers has the weight of each, by which its loss is multiplied; one of 0 does not count.

    options: those of LossOptions. overwrite: the logits are given up, and may
    hold the gradient afterwards; there is then one backward pass. compiled: whether the form by blocks runs compiled. A
    target that counts and is not below V makes the loss NaN in every form: no form waits for a device to look;
    `check_targets` does, on request.
    """
    ignore_index, z_loss, smoothing, cap = LossOptions(**options)
    targets = mark_targets(targets, mask, ignore_index, logits.shape[-1])
    y = cap_logits(widen(logits), cap)
    lse = torch.logsumexp(y, -1)
    losses = lse - torch.gather(y, -1, torch.where(targets >= 0, targets, 0)[:, None])[:, 0]
    if smoothing:
        losses = (1.0 - smoothing) * losses + smoothing * (lse - y.mean(-1))
    if z_loss:
        losses = losses + z_loss * lse.square()
    losses = torch.where(targets == WRONG, math.nan, losses)
    if (weights := weights_of(mask)) is not None:
        losses = losses * weights.to(losses.dtype)
    return torch.where(targets == NONE, 0.0, losses).sum()


def total_loss(statistics: Tensor, targets: Tensor, terms: Terms, weights: Tensor | None = None) -> Tensor:
    """The loss from the statistics [N, 3] of whole rows, targets as from `mark_targets`, and tokens' weights [N]."""
    lse, at_target, sums = statistics.unbind(-1)
    losses = lse - at_target
    if terms.smoothing:
        losses = losses + (terms.smoothing * at_target - terms.uniform * sums)
    if terms.z_loss:
        losses = losses + terms.z_loss * lse.square()
    if weights is not None:
        losses = losses * weights.to(losses.dtype)
    return torch.where(targets != NONE, losses, 0.0).sum()


@dataclass(frozen=True)
class ValueAndGradients:
    """A scalar function of tensors that computes its gradients together with its value."""

    # make(*tensors) -> (value, gradients of the first tensors, None for those not needed); the gradients are freed
    # after use. repeatable: whether `make` may be called once more, for a second backward pass through the same graph.
    label: str
    make: Callable[..., tuple[Any, tuple[Tensor | None, ...]]]
    repeatable: bool = True
    saved_gradients: list[tuple[Tensor | None, ...]] = field(default_factory=list)

    def __call__(self, *tensors: Tensor) -> Any:
        """The value. Differentiable once; see `autodiff.Backward`."""
        return _ValueAndGradients.apply(self, *tensors)

    def scale(self, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients times `grad`; empty tensors for those not needed."""
        if not self.saved_gradients and not self.repeatable:
            raise RuntimeError(
                f"{self.label}: with overwrite=True the logits are gone, so there is no second backward pass"
            )
        gradients = self.saved_gradients.pop() if self.saved_gradients else self.make(*tensors)[1]
        return tuple(grad.new_empty(0) if g is None else scale_(g, grad) for g in gradients)


class _ValueAndGradients(Function):
    @staticmethod
    def forward(ahead: ValueAndGradients, *tensors: Tensor) -> Any:
        value, gradients = ahead.make(*tensors)
        ahead.saved_gradients.append(gradients)
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        ctx.ahead, *tensors = inputs
        ctx.wanted = [g is not None for g in ctx.ahead.saved_gradients[-1]]
        ctx.others = len(tensors) - len(ctx.wanted)
        ctx.save_for_backward(*(tensors if ctx.ahead.repeatable else ()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = run_backward(ctx.ahead.label, ctx.ahead.scale, grad, *ctx.saved_tensors)
        return None, *(g if needed else None for g, needed in zip(gradients, ctx.wanted)), *([None] * ctx.others)


def _by_rows(
    form: str,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    overwrite: bool = False,
    compiled: bool = True,
    **options: Any,
) -> Tensor:
    loss_options = LossOptions(**options)
    terms = loss_options.terms(0, logits.shape[-1])
    row_form = form if form == "triton" else "compiled" if compiled else "eager"

    def make(logits: Tensor, targets: Tensor, *weights: Tensor, write: bool = True) -> tuple[Tensor, tuple[Tensor]]:
        statistics, gradient = rows_of(logits, targets, None, terms, write, row_form, overwrite)
        if weights and write:
            gradient.mul_(weights[0][:, None])
        return total_loss(statistics, targets, terms, *weights), (gradient,)

    targets, weights = mark_targets(targets, mask, loss_options.ignore_index, terms.columns), weights_of(mask)
    tensors = (logits, targets) if weights is None else (logits, targets, weights)
    if not needs_grad(logits):
        return make(*tensors, write=False)[0]
    return ValueAndGradients("cross_entropy", make, repeatable=not overwrite)(*tensors)


def _supports(logits: Tensor, targets: Tensor, mask: Tensor | None = None, **options: Any) -> str:
    if logits.dtype not in DTYPES:
        return f"the logits are {logits.dtype}; it takes float32, bfloat16 or float16"
    return triton_runs(logits, targets, *(() if mask is None else (mask,)))


def _prefers(logits: Tensor, *tensors: Any, **options: Any) -> str:
    return (
        ""
        if logits.numel() >= LARGE
        else f"on less than {LARGE} logits its overhead, a fifth of a millisecond, is above what it saves"
    )


cross_entropy = Op(
    "cross_entropy",
    reference,
    Form("triton", functools.partial(_by_rows, "triton"), supports=_supports, prefers=on_cuda),
    Form("chunked", functools.partial(_by_rows, "chunked"), prefers=_prefers),
    flops=lambda logits, *rest, **options: 8 * logits.numel(),
    bytes=lambda logits, *rest, **options: 2 * logits.numel() * logits.element_size(),
)
