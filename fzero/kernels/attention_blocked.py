"""Attention by blocks of queries, for CPUs.

Each block of queries is multiplied with the keys up to its end; the backward pass recomputes the probabilities from the
log-sum-exp (Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with whole rows, as a CPU's cache holds them), so
that of the outputs nothing but that is kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.core.autodiff import Function, run_backward
from fzero.kernels.attention_arguments import widened
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
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference` by blocks of at least 128 queries, at most 8 of them up to T = 8192; at most as many queries as
    keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = k.shape[2]
    q = rearrange(q, "b t (g r) k -> (b g) r t k", g=groups)
    k, v = (rearrange(x, "b s g k -> (b g) s k") for x in (k, v))
    if sinks is not None:
        sinks = sinks.reshape(groups, -1).repeat(k.shape[0] // groups, 1)
    out, _ = _Blocked.apply(q, k, v, sinks, documents, pattern, scale, cap)
    return rearrange(out, "(b g) r t k -> b t (g r) k", g=groups)


class Block(NamedTuple):
    """Some of the queries, the last T of S positions, and the keys that they may see."""

    queries: slice
    keys: slice
    offset: int  # S - T

    def query_rows(self, q: Tensor) -> Tensor:
        """The rows of these queries of q [N, R, T, ...], for all R heads: [N, R queries, ...]."""
        return q[:, :, self.queries].flatten(1, 2)


def _blocks(t: int, s: int, pattern: Pattern) -> list[Block]:
    size, offset = max(MIN_BLOCK, min(-(-t // MAX_BLOCKS), MAX_SCORES // max(1, s))), s - t
    ends = [(i, min(i + size, t)) for i in range(0, t, size)]
    return [Block(slice(i, j), slice(pattern.first_key(i + offset), j + offset), offset) for i, j in ends]


def _scores(
    q: Tensor,
    k: Tensor,
    block: Block,
    pattern: Pattern,
    documents: Tensor | None,
    scale: float,
    cap: float,
) -> Tensor:
    """Masked scores [B G, R, queries, keys] of one block, in float32 or wider."""
    s = torch.matmul(widened(block.query_rows(q)), widened(k[:, block.keys]).transpose(1, 2))
    s = s.unflatten(1, (q.shape[1], -1)) * scale
    s, keys = cap_logits(s, cap), torch.arange(block.keys.start, block.keys.stop, device=q.device)
    query = keys[block.queries.start + block.offset - block.keys.start :]  # the last of these keys
    mask = visible_mask(pattern, query, keys, documents)
    if documents is not None:
        mask = mask.repeat_interleave(q.shape[0] // documents.shape[0], 0)
    return s.masked_fill(~mask[:, None], float("-inf"))


class _Blocked(Function):
    # q [N, R, T, K], k and v [N, S, K] with N = B G, sinks [N, R] or None; returns out like q and the log-sum-exp
    # [N, R, T], both with the sinks.
    @staticmethod
    def forward(q, k, v, sinks, documents, pattern, scale, cap):
        outs, lses = [], []
        for block in _blocks(q.shape[2], k.shape[1], pattern):
            s = _scores(q, k, block, pattern, documents, scale, cap)
            m = s.amax(-1, keepdim=True)
            if sinks is not None:
                sink = sinks.to(m.dtype)[..., None, None]
                m = torch.maximum(m, sink)
            p = torch.exp(s - m)
            total = p.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(sink - m)
            out = torch.matmul(p.to(v.dtype).flatten(1, 2), v[:, block.keys]).view(*p.shape[:3], -1)
            outs.append((out / total).to(q.dtype))
            lses.append((m + torch.log(total)).squeeze(-1))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, *optional, ctx.pattern, ctx.scale, ctx.cap = inputs
        ctx.has = [x is not None for x in optional]  # sinks, documents
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, output[1], *(x for x in optional if x is not None))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, lse, *optional = ctx.saved_tensors
        run = functools.partial(_blocked_backward, ctx.pattern, ctx.scale, ctx.cap, ctx.has)
        grads = run_backward("blocked attention", run, q, k, v, lse, grad, *optional)
        return *grads, *([] if ctx.has[0] else [None]), None, None, None, None


def _blocked_backward(pattern, scale, cap, has_optional, q, k, v, lse, grad, *optional):
    sinks = optional[0] if has_optional[0] else None
    documents = optional[-1] if has_optional[1] else None
    dqs, deltas = [], []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for block in _blocks(q.shape[2], k.shape[1], pattern):
        s, keys = _scores(q, k, block, pattern, documents, scale, cap), block.keys
        p = torch.exp(s - lse[:, :, block.queries, None])
        g = block.query_rows(grad)
        dp = torch.matmul(widened(g), widened(v[:, keys]).transpose(1, 2)).view(p.shape)
        # From dp itself, as rows are whole, and not from out: the gradient of a query with one key is then exactly 0.
        weighed = p * dp
        deltas.append(weighed.sum(-1, keepdim=True))
        ds = torch.addcmul(weighed, p, deltas[-1], value=-1.0) * scale
        if cap:  # the derivative of the cap, 0 where nothing is seen
            ds = ds * torch.where(s == float("-inf"), 0.0, 1.0 - (s / cap).square())
        ds = ds.flatten(1, 2)
        dv[:, keys] += torch.matmul(p.to(g.dtype).flatten(1, 2).transpose(1, 2), g)
        dk[:, keys] += torch.matmul(ds.transpose(1, 2), widened(block.query_rows(q)))
        dqs.append(torch.matmul(ds, widened(k[:, keys])).to(q.dtype).unflatten(1, (q.shape[1], -1)))
    grads = torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)
    if sinks is None:
        return grads
    share = torch.exp(sinks.to(lse.dtype)[..., None] - lse)
    return *grads, -(share * torch.cat(deltas, 2)[..., 0]).sum(-1).to(sinks.dtype)
