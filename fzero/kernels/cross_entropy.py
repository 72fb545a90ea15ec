"""Linear layer and cross entropy in one: the logits of a few hundred tokens at a time, never of all.

    loss = sum_n mask[n] (log sum_v exp(x[n] . w[v]) - x[n] . w[target[n]])

`reference` defines it. `chunked` makes, for each chunk of tokens, the logits, the loss and at once the gradients of x and w from the same
softmax, as the loss is linear in what the backward pass hands it: dx = (p - 1[target]) w, dw = (p - 1[target])^T x.
Ref: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009, section 3; the chunks by tokens.

Shapes: x [N, D], w [V, D], targets int64 [N], mask bool [N]; the loss is a float32 (or float64) scalar.

Under tensor parallelism w is a rank's own rows [V/tp, D] of the vocabulary and the rest is the same on all ranks: so is the loss, dw is
of the own rows, and dx is this rank's part of a sum (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3). What the ranks tell
each other of a token is two numbers: the log-sum-exp of its logits here, and its target's logit where that is here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero.autodiff import Backward, first_order, needs_grad
from fzero.collectives import Axis, all_gather, psum
from fzero.compile import jit

CHUNK_BYTES = 1 << 25  # of logits alive at once
WHOLE = Axis("tp")  # of size 1: all of the vocabulary is here


def reference(x: Tensor, w: Tensor, targets: Tensor, mask: Tensor, axis: Axis = WHOLE) -> Tensor:
    """The definition, with all logits; the softmax in float32 or wider. `axis` shards the vocabulary.

    Communicates: an all_gather of float32 [N], and a psum of float32 [2, N].
    """
    logits = x @ w.to(x.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if axis.size > 1:
        return _sharded_reference(logits, targets, mask, axis)
    at_target = torch.gather(logits, -1, targets[:, None])[:, 0]
    return torch.where(mask, torch.logsumexp(logits, -1) - at_target, 0.0).sum()


def _sharded_reference(logits: Tensor, targets: Tensor, mask: Tensor, axis: Axis) -> Tensor:
    column, own = _column(targets, logits.shape[-1], axis)
    # The largest logit serves the range of exp only; the loss does not depend on it, and nor does any derivative.
    m = all_gather(logits.detach().amax(-1)[None], axis, leaf="head").amax(0)
    at_target = torch.where(own, torch.gather(logits, -1, column[:, None])[:, 0], 0.0)
    total, at_target = psum(torch.stack((torch.exp(logits - m[:, None]).sum(-1), at_target)), axis, leaf="head")
    return torch.where(mask, m + torch.log(total) - at_target, 0.0).sum()


def _column(targets: Tensor, columns: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """(each target's column [n] among those here, 0 where another rank has it; whether it is here)."""
    column = targets - axis.rank * columns
    own = (column >= 0) & (column < columns)
    return torch.where(own, column, 0), own


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_sum_exp(logits: Tensor) -> Tensor:
    m = logits.amax(-1, keepdim=True)
    return m + torch.log(torch.exp(logits - m).sum(-1, keepdim=True))


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [n, 1] of each token, log-sum-exp [n, 1]) of a chunk, in float32 or wider."""
    logits = _wide(logits)
    lse = _log_sum_exp(logits)
    return lse - torch.gather(logits, -1, targets[:, None]), lse


def _statistics(logits: Tensor, column: Tensor, own: Tensor) -> Tensor:
    """What the other ranks must know of the logits here [n, V/tp]: their log-sum-exp, and the target's, as [1, n, 2]."""
    logits = _wide(logits)
    at_target = torch.where(own[:, None], torch.gather(logits, -1, column[:, None]), 0.0)
    return torch.cat((_log_sum_exp(logits), at_target), -1)[None]


def _sharded_losses(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """`_losses` from the statistics [tp, n, 2] of all ranks."""
    lse = _log_sum_exp(statistics[:, :, 0].T)
    return lse - statistics[:, :, 1].sum(0)[:, None], lse


def _total(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[:, None], losses, 0.0).sum()


def _softmax(logits: Tensor, losses: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, softmax - 1 at the target [n, 1], softmax [n, V]), both in the dtype of the logits and 0 where a token does not count."""
    mask = mask[:, None]
    softmax = torch.exp(logits.to(lse.dtype) - torch.where(mask, lse, float("inf")))
    at_target = torch.where(mask, torch.expm1(-losses), 0.0)
    return torch.where(mask, losses, 0.0).sum(), at_target.to(logits.dtype), softmax.to(logits.dtype)


def _loss_only(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return _total(_losses(logits, targets)[0], mask)


def _loss_and_softmax(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _softmax(logits, *_losses(logits, targets), mask)


def _sharded_loss_only(statistics: Tensor, mask: Tensor) -> Tensor:
    return _total(_sharded_losses(statistics)[0], mask)


def _sharded_loss_and_softmax(logits: Tensor, statistics: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _softmax(logits, *_sharded_losses(statistics), mask)


_COMPILED = {f: jit(f) for f in (_loss_only, _loss_and_softmax, _statistics, _sharded_loss_only, _sharded_loss_and_softmax)}


def _form(f: Callable, compiled: bool) -> Callable:
    return _COMPILED[f] if compiled else f


def _chunk_loss(logits: Tensor, targets: Tensor, mask: Tensor, axis: Axis, compiled: bool) -> Tensor:
    if axis.size == 1:
        return _form(_loss_only, compiled)(logits, targets, mask)
    statistics = _form(_statistics, compiled)(logits, *_column(targets, logits.shape[-1], axis))
    return _form(_sharded_loss_only, compiled)(all_gather(statistics, axis, leaf="head"), mask)


def _chunk_loss_and_gradient(logits: Tensor, targets: Tensor, mask: Tensor, axis: Axis, compiled: bool) -> tuple[Tensor, Tensor]:
    """(loss, its gradient by the logits, in their dtype)."""
    # At the target one element a row, afterwards: comparing every column with it would cost about as much as the softmax.
    row = torch.arange(targets.shape[0], device=targets.device)
    if axis.size == 1:
        loss, at_target, gradient = _form(_loss_and_softmax, compiled)(logits, targets, mask)
        gradient[row, targets] = at_target[:, 0]
        return loss, gradient
    column, own = _column(targets, logits.shape[-1], axis)
    statistics = all_gather(_form(_statistics, compiled)(logits, column, own), axis, leaf="head")
    loss, at_target, gradient = _form(_sharded_loss_and_softmax, compiled)(logits, statistics, mask)
    gradient[row, column] = torch.where(own, at_target[:, 0], gradient[row, column])
    return loss, gradient


@dataclass(frozen=True)
class _Box:
    """The gradients from the forward pass to the backward pass, which takes them out so that they are freed when used."""

    axis: Axis
    compiled: bool
    wants_x: bool
    wants_w: bool
    gradients: list[tuple[Tensor | None, Tensor | None]] = field(default_factory=list)


def _run(box: _Box, x: Tensor, w: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows = max(1, CHUNK_BYTES // (x.dtype.itemsize * w.shape[0]))
    weight = w.to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=x.device)
    dx = torch.empty_like(x) if box.wants_x else None
    dw = None
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        logits = x[part] @ weight.T
        if not (box.wants_x or box.wants_w):
            loss = loss + _chunk_loss(logits, targets[part], mask[part], box.axis, box.compiled)
            continue
        chunk_loss, dlogits = _chunk_loss_and_gradient(logits, targets[part], mask[part], box.axis, box.compiled)
        loss = loss + chunk_loss
        del logits
        if dx is not None:
            torch.mm(dlogits, weight, out=dx[part])
        if box.wants_w:
            if dw is None:
                dw = dlogits.T @ x[part]
                dw = dw if rows >= x.shape[0] else dw.to(wide)  # several parts are summed in float32 or wider
            elif dw.dtype == x.dtype:
                dw.addmm_(dlogits.T, x[part])
            else:
                dw += dlogits.T @ x[part]
        del dlogits
    if box.wants_w:
        dw = torch.zeros_like(w) if dw is None else dw.to(w.dtype)
    return loss, dx, dw


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(box: _Box, x: Tensor, w: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        loss, dx, dw = _run(box, x, w, targets, mask)
        box.gradients.append((dx, dw))
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.box = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dx, dw = Backward.apply("chunked cross entropy", functools.partial(_gradients, ctx.box), grad, *ctx.saved_tensors)
        return None, dx if ctx.box.wants_x else None, dw if ctx.box.wants_w else None, None, None


def _gradients(box: _Box, grad: Tensor, x: Tensor, w: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw) of the forward pass, or made again; one that is not wanted is empty."""
    dx, dw = box.gradients.pop() if box.gradients else _run(box, x, w, targets, mask)[1:]
    return tuple(t.new_empty(0) if d is None else d.mul_(grad) for d, t in ((dx, x), (dw, w)))


def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, mask: Tensor, *, axis: Axis = WHOLE, compiled: bool = True) -> Tensor:
    """`reference`, in the fastest form that serves: chunked where it is differentiated at most once.

    axis: the axis that shards the vocabulary; `targets` and `x` are the same on all its ranks, w is this rank's rows, and the gradient of
    x is this rank's part of a sum. compiled: whether the softmax of a chunk runs compiled.
    Peak memory beside the gradients: 32 MB of logits and as much of their gradient, or those of one token.
    Communicates: one all_gather of float32 [n, 2] for each chunk of n tokens; nothing on an axis of size 1.
    """
    if not first_order():
        return reference(x, w, targets, mask, axis)
    box = _Box(axis, compiled, *(needs_grad(t) for t in (x, w)))
    return _Chunked.apply(box, x, w, targets, mask) if box.wants_x or box.wants_w else _run(box, x, w, targets, mask)[0]
