"""Attention by blocks of queries, for CPUs.

Each block of queries is multiplied with the keys up to its end; the backward pass recomputes the probabilities from the
log-sum-exp (Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with whole rows, as a CPU's cache holds them), so
that of the outputs nothing but that is kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fzero.core.autodiff import Backward
from fzero.kernels.attention_pattern import FULL, Pattern, visible_mask
from fzero.kernels.cross_entropy_rows import cap_logits

MIN_BLOCK, MAX_BLOCKS = 128, 8
MAX_SCORES = 1 << 23  # of a head in a block of more than MIN_BLOCK queries: they are T x T / 8 up to T = 8192


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor:
    """`reference` by blocks of at least 128 queries, at most 8 of them up to T = 8192, for as many queries as
    keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = k.shape[2]
    q = rearrange(q, "b t (g r) k -> (b g) r t k", g=groups)
    k, v = (rearrange(x, "b s g k -> (b g) s k") for x in (k, v))
    out, _ = _Blocked.apply(q, k, v, documents, pattern, scale, cap)
    return rearrange(out, "(b g) r t k -> b t (g r) k", g=groups)


def _blocks(t: int, pattern: Pattern) -> list[tuple[int, int, int]]:
    """(first query, end of queries = end of keys, first key) of each block."""
    size = max(MIN_BLOCK, min(-(-t // MAX_BLOCKS), MAX_SCORES // max(1, t)))
    return [(i, min(i + size, t), pattern.first_key(i)) for i in range(0, t, size)]


def _scores(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int, int],
    pattern: Pattern,
    documents: Tensor | None,
    scale: float,
    cap: float,
) -> Tensor:
    """Masked scores [B G, R, queries, keys] of one block, in float32 or wider."""
    start, end, first = block
    s = torch.matmul(q[:, :, start:end].flatten(1, 2), k[:, first:end].transpose(1, 2))
    s = s.to(torch.promote_types(s.dtype, torch.float32)).view(q.shape[0], q.shape[1], end - start, end - first) * scale
    s, position = cap_logits(s, cap), torch.arange(first, end, device=q.device)
    mask = visible_mask(pattern, position[start - first :], position, documents)
    if documents is not None:
        mask = mask.repeat_interleave(q.shape[0] // documents.shape[0], 0)
    return s.masked_fill(~mask[:, None], float("-inf"))


class _Blocked(torch.autograd.Function):
    # q [N, R, T, K], k and v [N, T, K] with N = B G; returns out like q and the log-sum-exp [N, R, T].
    @staticmethod
    def forward(q, k, v, documents, pattern, scale, cap):
        outs, lses = [], []
        for block in _blocks(q.shape[2], pattern):
            s = _scores(q, k, block, pattern, documents, scale, cap)
            m = s.amax(-1, keepdim=True)
            p = torch.exp(s - m)
            total = p.sum(-1, keepdim=True)
            out = torch.matmul(p.to(v.dtype).flatten(1, 2), v[:, block[2] : block[1]]).view(*p.shape[:3], -1)
            outs.append((out / total).to(q.dtype))
            lses.append((m + torch.log(total)).squeeze(-1))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, documents, ctx.pattern, ctx.scale, ctx.cap = inputs
        ctx.has_documents = documents is not None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, output[1], *((documents,) if ctx.has_documents else ()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, lse, *documents = ctx.saved_tensors
        run = functools.partial(_blocked_backward, ctx.pattern, ctx.scale, ctx.cap)
        grads = Backward.apply("blocked attention", run, q, k, v, lse, grad, *documents)
        return *grads, None, None, None, None


def _blocked_backward(pattern, scale, cap, q, k, v, lse, grad, documents=None):
    dqs = []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for block in _blocks(q.shape[2], pattern):
        start, end, first = block
        s = _scores(q, k, block, pattern, documents, scale, cap)
        p = torch.exp(s - lse[:, :, start:end, None])
        g = grad[:, :, start:end].flatten(1, 2)
        dp = torch.matmul(g, v[:, first:end].transpose(1, 2)).view(p.shape)
        # From dp itself, as rows are whole, and not from out: the gradient of a query with one key is then exactly 0.
        weighed = p * dp
        ds = torch.addcmul(weighed, p, weighed.sum(-1, keepdim=True), value=-1.0) * scale
        if cap:  # the derivative of the cap, 0 where nothing is seen
            ds = ds * torch.where(s == float("-inf"), 0.0, 1.0 - (s / cap).square())
        ds = ds.to(q.dtype).flatten(1, 2)
        dv[:, first:end] += torch.matmul(p.to(g.dtype).flatten(1, 2).transpose(1, 2), g)
        dk[:, first:end] += torch.matmul(ds.transpose(1, 2), q[:, :, start:end].flatten(1, 2))
        dqs.append(torch.matmul(ds, k[:, first:end]).view(q.shape[0], q.shape[1], end - start, -1))
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)
