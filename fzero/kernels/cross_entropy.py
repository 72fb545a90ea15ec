"""Cross entropy of given logits: the loss, and its gradient from the same softmax.

    loss = sum over the tokens that count of  m ((1 - s) (lse - y[t]) + s (lse - mean_v y[v]) + z lse^2),
    y = logits, or c tanh(logits / c),   lse = log sum_v exp(y[v])

with t a token's target, m its weight (1, or what a mask of numbers says), s the smoothing, z the weight of the z-loss
and c the cap. The forward pass computes the
gradient together with the loss, and the backward pass only scales it. The arithmetic of a row of logits is in
cross_entropy_rows.
Ref: Szegedy et al. 2016, "Rethinking the Inception architecture", arXiv:1512.00567, section 7
(smoothing); Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, section 5 (z-loss); Gemma Team 2024, "Gemma 2",
arXiv:2408.00118, section 2.1 (cap).

Shapes: logits [N, V], targets int64 [N], mask [N], bool or the weights of the tokens (float, 0 or more), or None; the
loss is a scalar in float32 or wider.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.autodiff import Function, needs_grad, run_backward
from fzero.kernels.cross_entropy_rows import NONE, WRONG, Terms, rows_of, scale_, widen
from fzero.kernels.custom_operator import cap_logits, on_cuda, triton_runs
from fzero.kernels.registry import Form, Op

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
