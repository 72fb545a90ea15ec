"""Attention sinks: a logit of each query head that takes its share of the softmax and gives no value.

    out[t] = sum_s exp(x[t, s]) v[s] / (exp(sink) + sum_s exp(x[t, s]))      with the scores x of the keys that t sees

With lse the log-sum-exp of the scores, out is the one without a sink times sigmoid(lse - sink), and the log-sum-exp
with it is lse' = log(exp(lse) + exp(sink)). A backward pass that begins with out and the log-sum-exp,

    p = exp(x - lse),   ds = p (dp - g . out)

is that with sinks if it is given both as they are with the sink: a sink's own column has dp = 0. So every form that
has such passes, whole or over parts of the keys, serves sinks by a function of its results.

    dsink = - sum_t exp(sink - lse'[t]) (g[t] . out[t])

Ref: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", arXiv:2508.10925, section 2.3; Xiao et al. 2023, "Efficient
streaming language models with attention sinks", arXiv:2309.17453.

Shapes: out and g [B, T, H, K], lse [B, H, T] in float32 or wider, sinks [H] in any floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from fzero.kernels.op_function import Fused

Tensors = tuple[Tensor, ...]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The definition: the shares [B, G, R, T, S] of the keys by scores [B, G, R, T, S], of H = G R heads; with sinks
    they sum to less than 1.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).reshape(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks, from those without."""
    sinks = sinks.to(lse.dtype)[:, None]
    share = rearrange(torch.sigmoid(lse - sinks), "b h t -> b t h 1")
    return (out * share).to(out.dtype), torch.logaddexp(lse, sinks.expand(lse.shape))


def gradient(out: Tensor, lse: Tensor, g: Tensor, sinks: Tensor) -> Tensor:
    """The gradient by the sinks, in their dtype, for the gradient g of out; out and lse with the sinks."""
    owed = torch.einsum("bthk,bthk->bht", g.to(lse.dtype), out.to(lse.dtype))
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * owed).sum((0, 2)).to(sinks.dtype)


def attend_by(
    what: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[[Tensors, Tensors], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    sinks: Tensor | None = None,
) -> Tensor:
    """out by the passes of a form, differentiable once by q, k, v and the sinks.

    tensors: q, k, v and what is not differentiated. forward(*tensors) -> (out, lse).
    backward((*tensors, out, lse), (g,)) -> the gradients of q, k and v.
    """
    if sinks is None:
        return Fused(what, forward, backward, keep=lambda tensors, outputs: (*tensors, *outputs))(*tensors)

    def forward_with(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, *more)
        return with_sinks(out, lse, sinks)

    def backward_with(saved: Tensors, grads: Tensors) -> Tensors:
        q, k, v, sinks, *more, out, lse = saved
        return *backward((q, k, v, *more, out, lse), grads), gradient(out, lse, grads[0], sinks)

    q, k, v, *more = tensors
    fused = Fused(what, forward_with, backward_with, keep=lambda tensors, outputs: (*tensors, *outputs))
    return fused(q, k, v, sinks, *more)
