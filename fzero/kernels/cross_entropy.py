"""Linear layer and cross entropy in one: the logits of a few hundred tokens at a time, never of all.

    loss = sum_n mask[n] (log sum_v exp(x[n] . w[v]) - x[n] . w[target[n]])

`reference` defines it. `chunked` makes, for each chunk of tokens, the logits, the loss and at once the gradients of x and w from the same
softmax, as the loss is linear in what the backward pass hands it: dx = (p - 1[target]) w, dw = (p - 1[target])^T x.
Ref: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009, section 3; the chunks by tokens.

Shapes: x [N, D], w [V, D], targets int64 [N], mask bool [N]; the loss is a float32 (or float64) scalar.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero.autodiff import Backward, first_order, needs_grad
from fzero.compile import jit

CHUNK_BYTES = 1 << 25  # of logits alive at once


def reference(x: Tensor, w: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """The definition, with all logits; the softmax in float32 or wider."""
    logits = x @ w.to(x.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    at_target = torch.gather(logits, -1, targets[:, None])[:, 0]
    return torch.where(mask, torch.logsumexp(logits, -1) - at_target, 0.0).sum()


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [n, 1] of each token, log-sum-exp [n, 1]) of a chunk, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    m = logits.amax(-1, keepdim=True)
    lse = m + torch.log(torch.exp(logits - m).sum(-1, keepdim=True))
    return lse - torch.gather(logits, -1, targets[:, None]), lse


def _loss_only(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[:, None], _losses(logits, targets)[0], 0.0).sum()


def _loss_and_softmax(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, softmax - 1 at the target [n, 1], softmax [n, V]), both in the dtype of the logits and 0 where a token does not count."""
    losses, lse = _losses(logits, targets)
    mask = mask[:, None]
    softmax = torch.exp(logits.to(lse.dtype) - torch.where(mask, lse, float("inf")))
    at_target = torch.where(mask, torch.expm1(-losses), 0.0)
    return torch.where(mask, losses, 0.0).sum(), at_target.to(logits.dtype), softmax.to(logits.dtype)


def _loss_and_gradient(logits: Tensor, targets: Tensor, mask: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    """(loss, its gradient by the logits, in their dtype)."""
    loss, at_target, gradient = (_compiled_loss_and_softmax if compiled else _loss_and_softmax)(logits, targets, mask)
    # One element a row, afterwards: comparing every column with the target would cost about as much as the softmax.
    gradient[torch.arange(targets.shape[0], device=targets.device), targets] = at_target[:, 0]
    return loss, gradient


_compiled_loss_only, _compiled_loss_and_softmax = jit(_loss_only), jit(_loss_and_softmax)


@dataclass(frozen=True)
class _Box:
    """The gradients from the forward pass to the backward pass, which takes them out so that they are freed when used."""

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
            loss = loss + (_compiled_loss_only if box.compiled else _loss_only)(logits, targets[part], mask[part])
            continue
        chunk_loss, dlogits = _loss_and_gradient(logits, targets[part], mask[part], box.compiled)
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


def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, mask: Tensor, *, compiled: bool = True) -> Tensor:
    """`reference`, in the fastest form that serves: chunked where it is differentiated at most once.

    compiled: whether the softmax of a chunk runs compiled.
    Peak memory beside the gradients: 32 MB of logits and as much of their gradient, or those of one token.
    """
    if not first_order():
        return reference(x, w, targets, mask)
    box = _Box(compiled, *(needs_grad(t) for t in (x, w)))
    return _Chunked.apply(box, x, w, targets, mask) if box.wants_x or box.wants_w else _run(box, x, w, targets, mask)[0]
