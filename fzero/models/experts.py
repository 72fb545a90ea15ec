"""The experts of a block: how its tokens come to them and back, for every model that routes.

A block chooses (ids, weights) of its tokens as its model says, enters the tensor-parallel region with them
(`enter_routing`), and calls `mixture`. Over ep, each of whose N ranks has its share of the E experts (see
sharding.experts.shares) and n tokens of its own, there are two forms, both linear maps there and their transposes back.
`gathered` gives every rank the tokens of all; `exchanged` sends a token to the ranks of its k experts alone, in rows of
which no rank has room for more than slack n k. Shapes are the same whatever is chosen, so that blocks compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, all_gather, psum, psum_scatter, pvary
from fzero.comm.exchanges import start_exchange_rows
from fzero.core.future import Future
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


Beside = Callable[[], Tensor] | None  # what is computed beside an exchange


class Mixture(NamedTuple):
    """What of a mixture is no tensor. capacity_factor: 0 for dropless; see `kernels.moe.capacity`."""

    experts: int  # of all ranks
    capacity_factor: float = 0.0
    activation: str = "silu"  # of GATES


def mixture(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, how: Mixture, beside: Beside = None) -> Tensor:
    """Return sum_k weights_k expert_{ids_k}(x) of x [B, T, D], ids int64 and weights [B, T, k], inside the
    tensor-parallel region: under tp this rank's part of it.

    beside: returns [B, T, D], which is added; an exchange computes it while the tokens are on their way.

    p: the experts' w_gate, w_up [E, D, F] and w_down [E, F, D], or this rank's units of them; where they have biases
    b_gate, b_up [E, F] and b_down [E, D], the last whole. Where ctx.matmul is float8, dropless experts multiply as
    `kernels.moe_float8` says, with scales of rows under either recipe: one scale of all rows would depend on which
    tokens share a rank.
    """
    tp = ctx.mesh["tp"]
    if "b_down" in p and tp.size > 1:  # whose ranks add it once together
        p = {**p, "b_down": p["b_down"] * float(tp.rank == 0)}
    if ctx.mesh["ep"].size > 1:
        return over_ep(p, x, ids, weights, ctx, how, beside)
    gate = GATES[how.activation]
    if how.capacity_factor:
        return plus(moe.capacity(p, x, ids, weights, how.capacity_factor, ctx.kernels, gate=gate), beside)
    return plus(moe.dropless(p, x, ids, weights, ctx.kernels, bool(ctx.matmul), gate), beside)


def plus(out: Tensor, beside: Beside) -> Tensor:
    """out and what `beside` returns."""
    return out + beside() if beside else out


LEAF = "blocks/moe"


def over_ep(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, how: Mixture, beside: Beside) -> Tensor:
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
        return plus(psum_scatter(out, ep, leaf=LEAF), beside)
    k = ids.shape[-1]
    tokens = x.reshape(-1, x.shape[-1]), ids.reshape(-1, k), weights.reshape(-1, k)
    if ctx.experts.form == "gather":
        return plus(gathered(p, tokens, ctx, counts, gate).reshape(x.shape), beside)
    out, more = exchanged(p, tokens, ctx, counts, ctx.experts, gate, beside)
    return out.reshape(x.shape) if more is None else out.reshape(x.shape) + more


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


class Part(NamedTuple):
    """Tokens whose rows are exchanged together: x [n, D], weights [n, k], the order of their rows and its inverse (see
    `moe.group`), and by rank of ep the rows for its experts [sender, expert]."""

    x: Tensor
    weights: Tensor
    order: Tensor
    place: Tensor
    rows: Sequence[Tensor]

    def to_ranks(self) -> Tensor:
        """The numbers of rows [sender, rank]."""
        return torch.stack([part.sum(-1) for part in self.rows], 1)


def exchanged(
    p: Tree, tokens: Tokens, ctx: Ctx, counts: Sequence[int], how: Experts, gate: Op, beside: Beside
) -> tuple[Tensor, Tensor | None]:
    """The mixture of tokens, [n, D], where each row of a token is sent to the rank of its expert, and its result back;
    and what `beside` gives, which is computed while the first rows are on their way.

    counts: the experts of each rank. The tokens may be in parts: while the experts compute those of one, the rows of
    the next one are on their way, and the results of the one before.
    Communicates: an all_gather over ep of E counts of rows of each part; the rows by `exchange_rows`, and back.
    Backward as many. Raises ValueError, on every rank of ep, if one is sent more rows than it has room for.
    """
    ep, kernels = ctx.mesh["ep"], ctx.kernels
    if how.parts > len(tokens[0]):
        raise ValueError(f"experts: parts is {how.parts}, and a rank has {len(tokens[0])} tokens; use fewer parts")
    split = [t.tensor_split(how.parts) for t in tokens]
    grouped = [moe.group(ids, sum(counts), impl=kernels["group"]) for ids in split[1]]
    sizes = torch.stack([torch.diff(ends, prepend=ends.new_zeros(1)) for *_, ends in grouped]).to(torch.int64)
    table = all_gather(sizes[None], ep, leaf=f"{LEAF}/counts")  # [sender, part, expert]
    rows = [table[:, i].split(list(counts), 1) for i in range(how.parts)]
    parts = [Part(x, w, order, place, to) for x, w, (order, place, _), to in zip(split[0], split[2], grouped, rows)]
    there, back, more = [sent(parts[0], ctx, counts, how)], list[Future[Tensor]](), None
    for i, part in enumerate(parts):
        there += [sent(one, ctx, counts, how) for one in parts[i + 1 : i + 2]]
        more = beside() if beside and i == 0 else more
        y = computed(p, there[i].wait(), part.rows[ep.rank], ctx, gate)
        back.append(start_exchange_rows(y, part.to_ranks().t(), ep, part.order.numel(), leaf=LEAF))
    impl = kernels["unpermute"]
    out = [moe.unpermute(y.wait(), part.weights, part.order, part.place, impl=impl) for part, y in zip(parts, back)]
    return torch.cat(out) if len(out) > 1 else out[0], more


def sent(part: Part, ctx: Ctx, counts: Sequence[int], how: Experts) -> Future[Tensor]:
    """The start of the exchange of a part's rows, which arrive in the order of senders, and of experts in what each
    sends."""
    ep, (n, k) = ctx.mesh["ep"], part.weights.shape
    rows = moe.permute(part.x, part.order, part.place, impl=ctx.kernels["permute"])
    room = how.room(n * k, ep.size * n * min(k, max(counts)))
    otherwise = f"use a larger slack than exchange:{how.slack:g}, or gather"
    return start_exchange_rows(rows, part.to_ranks(), ep, room, leaf=LEAF, otherwise=otherwise)


def computed(p: Tree, rows: Tensor, arrived: Tensor, ctx: Ctx, gate: Op) -> Tensor:
    """The results of this rank's experts for rows that arrived by `sent`, in their order. arrived: [sender, expert]."""
    count, kernels = arrived.shape[1], ctx.kernels
    ends = arrived.reshape(-1).cumsum(0)
    sender_expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    expert = torch.where(sender_expert < len(ends), sender_expert % count, count)  # no expert behind them all
    order, place, ends = moe.group(expert[:, None], count + 1, impl=kernels["group"])
    rows = moe.permute(rows, order, place, impl=kernels["permute"])
    y = feed_forward_before(p, rows, ends[:count], ctx, gate)
    return moe.permute(y, place, order, impl=kernels["permute"])


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
