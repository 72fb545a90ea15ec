"""The experts of a block: how its tokens come to them and back, for every model that routes.

A block chooses (ids, weights) of its tokens as its model says, enters the tensor-parallel region with them
(`enter_routing`), and calls `mixture`. Over ep, each of whose N ranks has its share of the E experts (see
sharding.experts.shares) and n tokens of its own, there are two forms, both linear maps there and their transposes back.
`gathered` gives every rank the tokens of all; `exchanged` sends a token to the ranks of its k experts alone, in rows of
which no rank has room for more than slack n k. Shapes are the same whatever is chosen, so that blocks compile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, all_gather, psum, psum_scatter, pvary
from fzero.comm.exchanges import exchange_rows
from fzero.core.pytree import Tree
from fzero.kernels import moe
from fzero.kernels.registry import Op
from fzero.models.base import Ctx
from fzero.models.layers import GATES, enter, sequence_axis
from fzero.sharding.experts import Experts, shares

MOE_RULES = (
    (r"/moe/router$", "[L/pp, D, E]"),
    (r"/moe/w_(gate|up)$", "[L/pp, E/ep, D, F/tp]"),
    (r"/moe/w_down$", "[L/pp, E/ep, F/tp, D]"),
)
MOE_BIAS_RULE = (r"/moe/bias$", "[L/pp, E]")
EXPERT_BIAS_RULES = (
    (r"/moe/b_router$", "[L/pp, E]"),
    (r"/moe/b_(gate|up)$", "[L/pp, E/ep, F/tp]"),
    (r"/moe/b_down$", "[L/pp, E/ep, D] +tp"),
)
OF_EXPERTS = re.compile(r"/moe/[wb]_(gate|up|down)$")  # the leaves of which a token uses those of its experts


class Mixture(NamedTuple):
    """What of a mixture is no tensor. capacity_factor: 0 for dropless; see `kernels.moe.capacity`."""

    experts: int  # of all ranks
    capacity_factor: float = 0.0
    activation: str = "silu"  # of GATES


def mixture(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, how: Mixture) -> Tensor:
    """Return sum_k weights_k expert_{ids_k}(x) of x [B, T, D], ids int64 and weights [B, T, k], inside the
    tensor-parallel region: under tp this rank's part of it.

    p: the experts' w_gate, w_up [E, D, F] and w_down [E, F, D], or this rank's units of them; where they have biases
    b_gate, b_up [E, F] and b_down [E, D], the last whole. Where ctx.matmul is float8, dropless experts multiply as
    `kernels.moe_float8` says, with scales of rows under either recipe: one scale of all rows would depend on which
    tokens share a rank.
    """
    tp = ctx.mesh["tp"]
    if "b_down" in p and tp.size > 1:  # whose ranks add it once together
        p = {**p, "b_down": p["b_down"] * float(tp.rank == 0)}
    if ctx.mesh["ep"].size > 1:
        return over_ep(p, x, ids, weights, ctx, how)
    gate = GATES[how.activation]
    if how.capacity_factor:
        return moe.capacity(p, x, ids, weights, how.capacity_factor, ctx.kernels, gate=gate)
    return moe.dropless(p, x, ids, weights, ctx.kernels, bool(ctx.matmul), gate)


LEAF = "blocks/moe"


def over_ep(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, how: Mixture) -> Tensor:
    """`mixture` on a mesh with ep, p being this rank's experts.

    Communicates: see `gathered` and `exchanged`. Raises ValueError for a ctx that does not say which.
    """
    ep = ctx.mesh["ep"]
    if not isinstance(ctx.experts, Experts):
        raise ValueError(
            f"ep={ep.size}: the ctx does not say how tokens come to experts; write Ctx(experts=plan.experts), or give "
            "loss the plan"
        )
    counts, gate = shares(how.experts, ep.size), GATES[how.activation]
    if how.capacity_factor:
        x, (ids, weights) = all_gather(x, ep, leaf=LEAF), gather_routing(ids, weights, ep)
        own = sum(counts[: ep.rank]), how.experts
        out = moe.capacity(p, x, ids, weights, how.capacity_factor, ctx.kernels, own, gate)
        return psum_scatter(out, ep, leaf=LEAF)
    k = ids.shape[-1]
    tokens = x.reshape(-1, x.shape[-1]), ids.reshape(-1, k), weights.reshape(-1, k)
    if ctx.experts.form == "gather":
        return gathered(p, tokens, ctx, counts, gate).reshape(x.shape)
    return exchanged(p, tokens, ctx, counts, ctx.experts, gate).reshape(x.shape)


def gather_routing(ids: Tensor, weights: Tensor, ep: Axis) -> tuple[Tensor, Tensor]:
    """The ids and weights of the tokens of all ranks of ep, along the first dim, by one collective."""
    both = all_gather(torch.cat((weights, ids.to(weights.dtype)), -1), ep, leaf=f"{LEAF}/router")
    weights, ids = both.chunk(2, -1)
    return ids.to(torch.int64), weights


Tokens = tuple[Tensor, Tensor, Tensor]  # x [n, D], ids and weights [n, k]


def gathered(p: Tree, tokens: Tokens, ctx: Ctx, counts: Sequence[int], gate: Op) -> Tensor:
    """The mixture of tokens, [n, D], where each rank computes its experts for the tokens of all.

    counts: the experts of each rank.
    Communicates: an all_gather over ep of tokens, and one of ids and weights; a psum_scatter of the results. Backward
    their transposes.
    """
    ep, kernels = ctx.mesh["ep"], ctx.kernels
    x, (ids, weights) = all_gather(tokens[0], ep, leaf=LEAF), gather_routing(*tokens[1:], ep)
    first, count = sum(counts[: ep.rank]), counts[ep.rank]
    own = (ids >= first) & (ids < first + count)
    # Rows for the experts of other ranks are a last group, behind those that are multiplied.
    order, place, ends = moe.group(torch.where(own, ids - first, count), count + 1, impl=kernels["group"])
    rows = moe.permute(x, order, place, impl=kernels["permute"])
    y = feed_forward_before(p, rows, ends[:count], ctx, gate)
    out = moe.unpermute(y, torch.where(own, weights, 0.0), order, place, impl=kernels["unpermute"])
    return psum_scatter(out, ep, leaf=LEAF)


def exchanged(p: Tree, tokens: Tokens, ctx: Ctx, counts: Sequence[int], how: Experts, gate: Op) -> Tensor:
    """The mixture of tokens, [n, D], where each row of a token is sent to the rank of its expert, and its result back.

    counts: the experts of each rank.
    Communicates: an all_gather over ep of E counts of rows; the rows by `exchange_rows`, and back. Backward as many.
    Raises ValueError, on every rank of ep, if one is sent more rows than it has room for.
    """
    (x, ids, weights), ep, kernels = tokens, ctx.mesh["ep"], ctx.kernels
    count, (n, k) = counts[ep.rank], ids.shape
    order, place, ends = moe.group(ids, sum(counts), impl=kernels["group"])
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
    table = all_gather(sizes[None], ep, leaf=f"{LEAF}/counts").split(list(counts), 1)  # by rank: [sender, its expert]
    to_ranks = torch.stack([part.sum(-1) for part in table], 1)  # [sender, rank]
    room = how.room(n * k, ep.size * n * min(k, max(counts)))
    otherwise = f"use a larger slack than exchange:{how.slack:g}, or gather"
    rows = moe.permute(x, order, place, impl=kernels["permute"])
    rows = exchange_rows(rows, to_ranks, ep, room, leaf=LEAF, otherwise=otherwise)
    # What arrives is in the order of senders, and of experts in what each sends; with no expert behind it all.
    mine = table[ep.rank].reshape(-1)
    sender_expert = torch.searchsorted(mine.cumsum(0), torch.arange(room, device=x.device), right=True)
    expert = torch.where(sender_expert < len(mine), sender_expert % count, count)
    order_here, place_here, ends = moe.group(expert[:, None], count + 1, impl=kernels["group"])
    rows = moe.permute(rows, order_here, place_here, impl=kernels["permute"])
    y = feed_forward_before(p, rows, ends[:count], ctx, gate)
    y = moe.permute(y, place_here, order_here, impl=kernels["permute"])
    y = exchange_rows(y, to_ranks.t(), ep, n * k, leaf=LEAF)
    return moe.unpermute(y, weights, order, place, impl=kernels["unpermute"])


def feed_forward_before(p: Tree, rows: Tensor, ends: Tensor, ctx: Ctx, gate: Op) -> Tensor:
    """`moe.feed_forward` of the rows before the last of `ends`, and zeros behind them. What products leave there, in
    both passes, is thrown away."""
    used = (torch.arange(rows.shape[0], device=rows.device) < ends[-1])[:, None]
    y = moe.feed_forward(p, torch.where(used, rows, 0.0), ends, ctx.kernels, bool(ctx.matmul), gate)
    return torch.where(used, y, 0.0)


def enter_routing(ids: Tensor, weights: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, T, k], weights [B, T, k]) for use in a tensor-parallel region. Communicates: see
    `layers.enter`.
    """
    if sequence_axis(ctx).size == 1:
        return ids, enter(weights, ctx, "blocks/moe/router")
    # One collective in place of two: a floating-point number represents an expert's number exactly.
    both = enter(torch.cat((weights, ids.to(weights.dtype)), -1), ctx, "blocks/moe/router")
    weights, ids = both.chunk(2, -1)
    return ids.to(torch.int64), weights


def mean_over_positions(ctx: Ctx, *values: Tensor) -> Sequence[Tensor]:
    """The means over T [B, n] of values [B, T, n], or of this rank's tokens; the same on all ranks of tp and cp.

    Communicates: with sequence parallelism, one psum over tp of all of them; with cp one over cp, forward and backward.
    """
    axis, cp, leaf = sequence_axis(ctx), ctx.mesh["cp"], "blocks/moe/router"
    if axis.size == cp.size == 1:
        return [value.mean(1) for value in values]
    sums = psum(torch.cat(values, -1).sum(1) / (cp.size * axis.size * values[0].shape[1]), axis, leaf=leaf)
    sums = pvary(psum(sums, cp, leaf=leaf), cp, leaf=leaf)  # which weigh it by their own tokens
    return sums.split([value.shape[-1] for value in values], -1)
