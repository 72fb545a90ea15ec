"""Attention of a layer's queries on its keys and values, whole sequences on a rank or split by cp.

gather: keys and values of all ranks are gathered, and each block of queries works on the keys up to its end. ulysses:
ranks exchange tokens for heads, so that each has whole sequences of its heads, repeated key/value heads where needed,
and exchange the results back. ring: keys and values travel from rank to rank (kernels/attention_ring.py). hierarchical:
groups of neighbours exchange tokens for heads, and the ring is of groups. The first two compose with every transform;
the others are differentiated once.

Ref: Llama Team 2024, "The Llama 3 herd of models", arXiv:2407.21783, section 3.3.2 (gather); Jacobs et al. 2023,
"DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.comm.collectives import all_gather, all_to_all, psum, pvary
from fzero.core.pytree import Tree
from fzero.kernels.attention import Positions, attention
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_ring import ring_attention
from fzero.kernels.paged_attention import paged_attention
from fzero.kernels.rope import rope_frequencies, rope_qk
from fzero.kernels.rope_scaling import RopeScaling
from fzero.models.base import Ctx, pieces_of
from fzero.models.layers import enter_region, linear, norm, positions_of, row_parallel_linear
from fzero.sharding.context import largest_inner
from fzero.sharding.slices import narrow_part


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """Attention of q [B, T, H, K] on k and v [B, S, G, K] as [B, T, H, K]; over cp of T / cp tokens each."""
    if isinstance(ctx.tokens.placed, Tensor):
        ctx.kernels.refuse(f"attention over cp={ctx.mesh.cp.size}")
        assert ctx.split.context  # which says how
        return OVER_CP[ctx.split.context.form](q, k, v, pattern, ctx, **scores)
    return full_attention(q, k, v, pattern, ctx, **scores)


def full_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """`attend` on whole sequences."""
    documents = None if isinstance(ctx.tokens.documents, tuple) else ctx.tokens.documents
    return attention(q, k, v, pattern=pattern, documents=documents, impl=ctx.kernels["attention"], **scores)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """`attend` over cp by an all_gather of the keys and values of all ranks."""
    cp, size = ctx.mesh.cp, k.shape[-1]
    full = all_gather(torch.cat((k, v), -1), cp, 1, leaf="blocks/attn/kv")
    pieces = pieces_of(ctx)
    if pieces is not None and not pieces.contiguous:
        full = full.index_select(1, pieces.order(full.shape[1], q.device))
    k, v = full.split([size, full.shape[-1] - size], -1)
    if pieces is None:  # chosen by the batch
        return positional_attention(q, k, v, pattern, ctx, **scores)
    out, start = [], 0
    for first, number in pieces.ranges(cp.rank, full.shape[1]):
        end = first + number  # the queries are the last of the keys that they may see
        documents = None if isinstance(ctx.tokens.documents, tuple) else ctx.tokens.documents[:, :end]
        queries = q[:, start : start + number]
        options = {"pattern": pattern, "documents": documents, "impl": ctx.kernels["attention"], **scores}
        out.append(attention(queries, k[:, :end], v[:, :end], **options))
        start += number
    return torch.cat(out, 1) if len(out) > 1 else out[0]


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """`attend` over cp by heads: an all_to_all gives each rank whole sequences of its share of them."""
    cp, device, pieces = ctx.mesh.cp, q.device, pieces_of(ctx)
    assert pieces is not None  # attend looks
    groups = math.lcm(k.shape[2], cp.size)
    k, v = (x.repeat_interleave(groups // x.shape[2], 2) for x in (k, v))
    shares = [q.shape[2] // cp.size, groups // cp.size, groups // cp.size]
    mixed = torch.cat([x.unflatten(2, (cp.size, -1)) for x in (q, k, v)], 3).flatten(2, 3)
    full = all_to_all(mixed, cp, 2, 1, leaf="blocks/attn/qkv")
    tokens = full.shape[1]
    if not pieces.contiguous:
        full = full.index_select(1, pieces.order(tokens, device))
    q, k, v = full.split(shares, 2)
    if "sinks" in scores:
        scores["sinks"] = narrow_part(scores["sinks"], cp.rank, cp.size, 0)
    out = full_attention(q, k, v, pattern, ctx, **scores)
    if not pieces.contiguous:
        out = out.index_select(1, torch.cat([pieces.positions(rank, tokens, device) for rank in range(cp.size)]))
    return all_to_all(out, cp, 1, 2, leaf="blocks/attn/out")


def positional_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """Attention of this rank's queries on the keys of all ranks, by positions."""
    assert isinstance(ctx.tokens.placed, Tensor)  # attend looks
    query, key = ctx.tokens.placed[ctx.mesh.cp.rank], ctx.tokens.placed.flatten()
    positions = Positions(query, key)
    if isinstance(ctx.tokens.documents, Tensor):
        positions = Positions(query, key, ctx.tokens.documents[:, query], ctx.tokens.documents[:, key])
    return attention(q, k, v, positions=positions, pattern=pattern, impl=ctx.kernels["attention"], **scores)


def ring_of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """`attend` over cp by a ring, of groups of ranks in form "hierarchical"."""
    assert isinstance(ctx.tokens.placed, Tensor)  # attend looks
    assert ctx.split.context
    cp, inner = ctx.mesh.cp, 1
    if ctx.split.context.form == "hierarchical":
        inner = ctx.split.context.inner or largest_inner(cp.size, k.shape[2])
    documents = None if isinstance(ctx.tokens.documents, tuple) else ctx.tokens.documents
    impl = ctx.kernels["attention"]
    options = {"documents": documents, "inner": inner, "pattern": pattern, "impl": impl, **scores}
    return ring_attention(q, k, v, cp, ctx.tokens.placed, leaf="blocks/attn/ring", **options)


OVER_CP: dict[str, Callable[..., Tensor]] = {
    "gather": gathered_attention,
    "ulysses": exchanged_attention,
    "ring": ring_of,
    "hierarchical": ring_of,
}


class Attention(NamedTuple):
    """How a layer attends, beside its weights."""

    heads: int  # of the whole model, as the next
    kv_heads: int
    pattern: Pattern = FULL
    frequencies: tuple[int, float, RopeScaling | None] | None = None  # (head_dim, theta, scaling) of RoPE
    eps: float = 0.0  # of the norms of queries and keys
    wide_norm: bool = False  # whether these run over all heads together
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    cap: float = 0.0  # of the scores


def queries_keys_values(p: Tree, x: Tensor, ctx: Ctx, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, K], k and v [B, T, G, K] of x [B, T, D], with biases, norms and RoPE of the model."""
    tp, kv_heads = ctx.mesh.tp, attention.kv_heads

    def local_heads(full: Tensor) -> Tensor:  # consecutive ranks share a head
        return narrow_part(full, tp.rank * kv_heads // tp.size, kv_heads, -1)

    is_shared = kv_heads < tp.size
    if is_shared:  # a norm of all heads needs all keys
        p = {
            **p,
            **{
                n: local_heads(p[n]) for n in ("w_v", "b_v", *(() if attention.wide_norm else ("w_k", "b_k"))) if n in p
            },
        }
    x = enter_region(x, ctx, "blocks/attn")
    q, k, v = (linear(x, p[f"w_{n}"], p.get(f"b_{n}"), ctx) for n in "qkv")
    if attention.wide_norm:
        q = norm_over_ranks(p["norm_q"], q, attention.eps, ctx)
        k = (
            local_heads(norm(p["norm_k"], k, attention.eps, ctx))
            if is_shared
            else norm_over_ranks(p["norm_k"], k, attention.eps, ctx)
        )
    q = rearrange(q, "b t (h k) -> b t h k", h=attention.heads // tp.size)
    k, v = (rearrange(t, "b t (g k) -> b t g k", g=max(1, kv_heads // tp.size)) for t in (k, v))
    if "norm_q" in p and not attention.wide_norm:
        q, k = norm(p["norm_q"], q, attention.eps, ctx), norm(p["norm_k"], k, attention.eps, ctx)
    if attention.frequencies is not None:
        angles = rope_frequencies(*attention.frequencies, x.device, x.dtype)
        q, k = rope_qk(q, k, positions_of(x, ctx), angles, impl=ctx.kernels["rope_qk"])
    return q, k, v


def attend_with_cache(
    q: Tensor, k: Tensor, v: Tensor, ctx: Ctx, attention: Attention, sinks: Tensor | None = None
) -> Tensor:
    """The result of attention [B, T, H, K]; with ctx.cache over its pages, into which k and v are written."""
    options: dict[str, Any] = {
        name: value for name, value in (("scale", attention.scale), ("cap", attention.cap)) if value
    }
    options |= {} if sinks is None else {"sinks": sinks}
    if not ctx.cache:
        return attend(q, k, v, attention.pattern, ctx, **options)
    ctx.cache.write(k, v)
    k_pages, v_pages = ctx.cache.pages[:2]
    return attend_pages(q, k_pages, v_pages, attention.pattern, ctx, **options)


def attend_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, pattern: Pattern, ctx: Ctx, **scores: Any) -> Tensor:
    """Attention of q [1, N, H, K] on the pages of ctx.cache, as [1, N, H, V]."""
    assert ctx.cache and isinstance(ctx.tokens.positions, Tensor)  # which a step gives
    rows = ctx.cache.table, ctx.cache.starts, ctx.tokens.positions
    impl = ctx.kernels["paged_attention"]
    if scales := ctx.cache.scales:
        scores["scales"] = scales[0], scales[-1]
    return paged_attention(q[0], k_pages, v_pages, *rows, pattern=pattern, impl=impl, **scores)[None]


def project_attention(p: Tree, out: Tensor, ctx: Ctx) -> Tensor:
    """Return what a layer adds to x for the result of attention: its product with p/w_o, and b_o."""
    return row_parallel_linear(rearrange(out, "b t h k -> b t (h k)"), p["w_o"], ctx, "blocks/attn", p.get("b_o"))


def norm_over_ranks(p: Tree, x: Tensor, eps: float, ctx: Ctx) -> Tensor:
    """RMSNorm over the last dim of all ranks of tp together: x [B, T, N / tp], p/scale [N / tp]."""
    tp = ctx.mesh.tp
    if tp.size == 1:
        return norm(p, x, eps, ctx)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = pvary(psum((wide * wide).sum(-1, keepdim=True), tp, leaf="blocks/attn/norm"), tp, leaf="blocks/attn/norm")
    normed = wide * torch.rsqrt(squares / (tp.size * x.shape[-1]) + eps)
    return normed.to(x.dtype) * p["scale"].to(x.dtype)
