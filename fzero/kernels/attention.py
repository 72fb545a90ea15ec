"""Causal attention with patterns and document masks.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s]      over the s that query t may see

A query sees the keys at positions up to its own, of its own document, that the pattern lets it see. `reference` defines this. `blocked`
goes by blocks of queries against the keys up to the block's end, and recomputes the probabilities in the backward pass from the
log-sum-exp (Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with whole rows, as a CPU's cache holds them).

Shapes: q [B, T, H, K], k and v [B, S, G, K] with H a multiple of G, out [B, T, H, K]; the queries are the last T of the S positions.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fzero.autodiff import Backward, first_order

MIN_BLOCK, MAX_BLOCKS = 128, 8


@dataclass(frozen=True)
class Pattern:
    """Which earlier positions a query sees: "full" (all), or one of these, with `size` and `keep` in tokens.

    window: the last `size`, itself among them (Beltagy et al. 2020). local: those in its own block of `size`.
    strided: the last `size`, and each `size`-th before. fixed: those in its own block of `size`, and the last `keep` of every block
    (Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2-4.3).
    """

    kind: str = "full"
    size: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "local", "strided", "fixed"):
            raise ValueError(f"attention pattern {self.kind!r} is unknown; use full, window, local, strided or fixed")
        if self.kind != "full" and self.size < 1:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at least 1")
        if self.kind == "fixed" and not 1 <= self.keep <= self.size:
            raise ValueError(f"attention pattern fixed: keep is {self.keep}; it must be in [1, size = {self.size}]")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of a text: "full", "window:SIZE", "local:SIZE", "strided:SIZE" or "fixed:SIZE:KEEP"."""
        form = re.fullmatch(r"(\w+)(?::(\d+))?(?::(\d+))?", text)
        if form is None:
            raise ValueError(f"attention pattern {text!r} is not of the form full, window:SIZE or fixed:SIZE:KEEP")
        return cls(form[1], int(form[2] or 0), int(form[3] or 0))

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at position `query` sees the key at position `key` (broadcast; causality included)."""
        causal, distance = key <= query, query - key
        if self.kind == "window":
            return causal & (distance < self.size)
        if self.kind == "local":
            return causal & (query // self.size == key // self.size)
        if self.kind == "strided":
            return causal & ((distance < self.size) | (distance % self.size == 0))
        if self.kind == "fixed":
            return causal & ((query // self.size == key // self.size) | (key % self.size >= self.size - self.keep))
        return causal

    def first_key(self, query: int) -> int:
        """No query from position `query` on sees a key before this one."""
        if self.kind == "window":
            return max(0, query - self.size + 1)
        return query // self.size * self.size if self.kind == "local" else 0


FULL = Pattern()


def visible(pattern: Pattern, query: Tensor, key: Tensor, documents: Tensor | None) -> Tensor:
    """The mask (bool [1 or B, len(query), len(key)]) of the positions `query` and `key` (int64 vectors).

    documents: int [B, S], the document of each of the S positions, or None.
    """
    mask = pattern.sees(query[:, None], key[None, :])[None]
    if documents is None:
        return mask
    return mask & (documents[:, query, None] == documents[:, None, key])


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition: all scores, masked, a softmax in float32 or wider. Shapes as at the top of the file."""
    t, s, groups = q.shape[1], k.shape[1], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    key = torch.arange(s, device=q.device)
    mask = visible(pattern, key[s - t :], key, documents)
    q = rearrange(q, "b t (g r) k -> b g r t k", g=groups)
    scores = torch.einsum("bgrtk,bsgk->bgrts", q, k) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    out = torch.einsum("bgrts,bsgk->btgrk", torch.softmax(scores, -1).to(v.dtype), v)
    return rearrange(out, "b t g r k -> b t (g r) k")


def blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`reference` by blocks of queries: at most 8 of them, of at least 128 queries; equal queries and keys in number."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = k.shape[2]
    q = rearrange(q, "b t (g r) k -> (b g) r t k", g=groups)
    k, v = (rearrange(x, "b s g k -> (b g) s k") for x in (k, v))
    out, _ = _Blocked.apply(q, k, v, documents, pattern, scale)
    return rearrange(out, "(b g) r t k -> b t (g r) k", g=groups)


def _blocks(t: int, pattern: Pattern) -> list[tuple[int, int, int]]:
    """(first query, end of queries = end of keys, first key) of each block."""
    size = max(MIN_BLOCK, -(-t // MAX_BLOCKS))
    return [(i, min(i + size, t), pattern.first_key(i)) for i in range(0, t, size)]


def _scores(q: Tensor, k: Tensor, block: tuple[int, int, int], pattern: Pattern, documents: Tensor | None, scale: float) -> Tensor:
    """Masked scores [B G, R, queries, keys] of one block, in float32 or wider."""
    start, end, first = block
    s = torch.matmul(q[:, :, start:end].flatten(1, 2), k[:, first:end].transpose(1, 2))
    s = s.to(torch.promote_types(s.dtype, torch.float32)).view(q.shape[0], q.shape[1], end - start, end - first) * scale
    position = torch.arange(first, end, device=q.device)
    mask = visible(pattern, position[start - first :], position, documents)
    if documents is not None:
        mask = mask.repeat_interleave(q.shape[0] // documents.shape[0], 0)
    return s.masked_fill(~mask[:, None], float("-inf"))


class _Blocked(torch.autograd.Function):
    # q [N, R, T, K], k and v [N, T, K] with N = B G; returns out like q and the log-sum-exp [N, R, T].
    @staticmethod
    def forward(q, k, v, documents, pattern, scale):
        outs, lses = [], []
        for block in _blocks(q.shape[2], pattern):
            s = _scores(q, k, block, pattern, documents, scale)
            m = s.amax(-1, keepdim=True)
            p = torch.exp(s - m)
            total = p.sum(-1, keepdim=True)
            out = torch.matmul(p.to(v.dtype).flatten(1, 2), v[:, block[2] : block[1]]).view(*p.shape[:3], -1)
            outs.append((out / total).to(q.dtype))
            lses.append((m + torch.log(total)).squeeze(-1))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, documents, ctx.pattern, ctx.scale = inputs
        ctx.has_documents = documents is not None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, *((documents,) if ctx.has_documents else ()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, out, lse, *documents = ctx.saved_tensors
        run = functools.partial(_blocked_backward, ctx.pattern, ctx.scale)
        grads = Backward.apply("blocked attention", run, q, k, v, out, lse, grad, *documents)
        return *grads, None, None, None


def _blocked_backward(pattern, scale, q, k, v, out, lse, grad, documents=None):
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dqs = []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for block in _blocks(q.shape[2], pattern):
        start, end, first = block
        s = _scores(q, k, block, pattern, documents, scale)
        p = torch.exp(s - lse[:, :, start:end, None])
        g = grad[:, :, start:end].flatten(1, 2)
        dp = torch.matmul(g, v[:, first:end].transpose(1, 2)).view(p.shape)
        ds = (p * (dp - delta[:, :, start:end, None]) * scale).to(q.dtype).flatten(1, 2)
        dv[:, first:end] += torch.matmul(p.to(g.dtype).flatten(1, 2).transpose(1, 2), g)
        dk[:, first:end] += torch.matmul(ds.transpose(1, 2), q[:, :, start:end].flatten(1, 2))
        dqs.append(torch.matmul(ds, k[:, first:end]).view(q.shape[0], q.shape[1], end - start, -1))
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


def fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """`reference` without pattern or documents, by torch's own fused kernel; equal queries and keys in number."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern = FULL, documents: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """`reference`, in the fastest form that serves where it is differentiated at most once and T = S > 1.

    Measured on a CPU, forward and backward: blocked takes 0.5 to 1.0 of fused's time up to T = 1024, and more beyond.
    """
    t = q.shape[1]
    if not first_order() or t != k.shape[1] or t == 1:
        return reference(q, k, v, pattern=pattern, documents=documents, scale=scale)
    if pattern == FULL and documents is None and (t > MIN_BLOCK * MAX_BLOCKS or q.device.type == "cuda"):
        return fused(q, k, v, scale=scale)
    return blocked(q, k, v, pattern=pattern, documents=documents, scale=scale)
