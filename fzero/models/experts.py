"""The experts of a block: how its tokens come to them and back, for every model that routes.

A block chooses (ids, weights), enters the tensor-parallel region with them (`enter_routing`), and calls `mixture`. Over
ep, each of whose N ranks has its share of the E experts, there are two linear maps there and their transposes back:
`gathered` gives every rank the tokens of all; `exchanged` sends a token to the ranks of its k experts alone, in rows of
which no rank has room for more than slack n k. Shapes are the same whatever is chosen.

The counts of each sequence travel with the activations, so that they are counted once, however the pass is recomputed
or cut; a bias balances the experts without a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather, psum, psum_scatter, pvary
from fzero.comm.communicator import Axis
from fzero.comm.rank_tables import start_exchange_rows
from fzero.core.gpu_copies import Future
from fzero.core.pytree import Tree
from fzero.kernels import moe
from fzero.kernels.registry import Op
from fzero.models.base import BIAS, DROPPED, ENTROPY, LOAD, Ctx
from fzero.models.batch import Batch
from fzero.models.layers import enter_region, sequence_axis
from fzero.models.tiled_linear import GATE_OPS
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


Overlap = Callable[[], Tensor] | None  # what is computed beside an exchange


class ExpertMixture(NamedTuple):
    """What of a mixture is no tensor. capacity_factor: 0 for dropless; see `kernels.moe.capacity`."""

    experts: int  # of all ranks
    capacity_factor: float = 0.0
    activation: str = "silu"  # of GATE_OPS


def mixture(
    p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, options: ExpertMixture, overlap: Overlap = None
) -> Tensor:
    """sum_k weights_k expert_{ids_k}(x) of x [B, T, D], ids and weights [B, T, k]; under tp a part of it."""
    # Dropless experts in float8 have scales of rows under either recipe: one scale of all rows would depend on which
    # tokens share a rank.
    tp = ctx.mesh.tp
    if "b_down" in p and tp.size > 1:  # whose ranks add it once together
        p = {**p, "b_down": p["b_down"] * float(tp.rank == 0)}
    if options.capacity_factor:
        ctx.kernels.refuse("a mixture with capacity_factor")
    if ctx.mesh.ep.size > 1:
        ctx.kernels.refuse(f"ep={ctx.mesh.ep.size}")
        return mixture_over_ep(p, x, ids, weights, ctx, options, overlap)
    gate = GATE_OPS[options.activation]
    if options.capacity_factor and not ctx.cache:  # while generating a token's experts depend on no batch
        return add_overlap(moe.capacity(p, x, ids, weights, options.capacity_factor, ctx.kernels, gate=gate), overlap)
    return add_overlap(moe.dropless(p, x, ids, weights, ctx.kernels, bool(ctx.matmul), gate), overlap)


def add_overlap(out: Tensor, overlap: Overlap) -> Tensor:
    """out and what `overlap` returns."""
    return out + overlap() if overlap else out


LEAF = "blocks/moe"


def mixture_over_ep(
    p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, options: ExpertMixture, overlap: Overlap
) -> Tensor:
    """`mixture` on a mesh with ep, p being this rank's experts."""
    ep = ctx.mesh.ep
    if not isinstance(ctx.split.experts, Experts):
        raise ValueError(
            f"ep={ep.size}: the ctx does not say how tokens come to experts; write Ctx(split=plan.split), or give "
            "loss the plan"
        )
    counts, gate = shares(options.experts, ep.size), GATE_OPS[options.activation]
    if options.capacity_factor:
        x, (ids, weights) = all_gather(x, ep, leaf=LEAF), gather_routing(ids, weights, ep)
        expert_range = sum(counts[: ep.rank]), options.experts
        out = moe.capacity(p, x, ids, weights, options.capacity_factor, ctx.kernels, expert_range, gate)
        return add_overlap(psum_scatter(out, ep, leaf=LEAF), overlap)
    k = ids.shape[-1]
    tokens = x.reshape(-1, x.shape[-1]), ids.reshape(-1, k), weights.reshape(-1, k)
    if ctx.split.experts.form == "gather":
        return add_overlap(gather_mixture(p, tokens, ctx, counts, gate).reshape(x.shape), overlap)
    out, overlap_out = exchange_mixture(p, tokens, ctx, counts, ctx.split.experts, gate, overlap)
    return out.reshape(x.shape) if overlap_out is None else out.reshape(x.shape) + overlap_out


def gather_routing(ids: Tensor, weights: Tensor, ep: Axis) -> tuple[Tensor, Tensor]:
    """The ids and weights of the tokens of all ranks of ep, by one collective."""
    packed = all_gather(torch.cat((weights, ids.to(weights.dtype)), -1), ep, leaf=f"{LEAF}/router")
    weights, ids = packed.chunk(2, -1)
    return ids.to(torch.int64), weights


Tokens = tuple[Tensor, Tensor, Tensor]  # x [n, D], ids and weights [n, k]


def gather_mixture(p: Tree, tokens: Tokens, ctx: Ctx, counts: Sequence[int], gate: Op) -> Tensor:
    """The mixture of tokens, [n, D], where each rank computes its experts for the tokens of all."""
    ep, kernels = ctx.mesh.ep, ctx.kernels
    x, (ids, weights) = all_gather(tokens[0], ep, leaf=LEAF), gather_routing(*tokens[1:], ep)
    first, count = sum(counts[: ep.rank]), counts[ep.rank]
    is_local = (ids >= first) & (ids < first + count)
    # Rows for the experts of other ranks are a last group, behind those that are multiplied.
    order, inverse, ends = moe.group(torch.where(is_local, ids - first, count), count + 1, impl=kernels["group"])
    rows = moe.permute(x, order, inverse, impl=kernels["permute"])
    y = feed_forward_prefix(p, rows, ends[:count], ctx, gate)
    out = moe.unpermute(y, torch.where(is_local, weights, 0.0), order, inverse, impl=kernels["unpermute"])
    return psum_scatter(out, ep, leaf=LEAF)


class TokenChunk(NamedTuple):
    """Tokens whose rows are exchanged together, their order and its inverse, and the rows by rank of ep."""

    x: Tensor  # [n, D]
    weights: Tensor  # [n, k]
    order: Tensor
    inverse: Tensor
    rows: Sequence[Tensor]  # by rank of ep those for its experts [sender, expert]

    def to_ranks(self) -> Tensor:
        """The numbers of rows [sender, rank]."""
        return torch.stack([counts.sum(-1) for counts in self.rows], 1)


def exchange_mixture(
    p: Tree, tokens: Tokens, ctx: Ctx, counts: Sequence[int], dispatch: Experts, gate: Op, overlap: Overlap
) -> tuple[Tensor, Tensor | None]:
    """The mixture of tokens, [n, D], whose rows go to the ranks of their experts, and what `overlap` gives."""
    ep, kernels = ctx.mesh.ep, ctx.kernels
    if dispatch.parts > len(tokens[0]):
        raise ValueError(f"experts: parts is {dispatch.parts}, and a rank has {len(tokens[0])} tokens; use fewer parts")
    split = [t.tensor_split(dispatch.parts) for t in tokens]
    grouped = [moe.group(ids, sum(counts), impl=kernels["group"]) for ids in split[1]]
    sizes = torch.stack([torch.diff(ends, prepend=ends.new_zeros(1)) for *_, ends in grouped]).to(torch.int64)
    table = all_gather(sizes[None], ep, leaf=f"{LEAF}/counts")  # [sender, part, expert]
    rows = [table[:, i].split(list(counts), 1) for i in range(dispatch.parts)]
    parts = [
        TokenChunk(x, w, order, inverse, row_counts)
        for x, w, (order, inverse, _), row_counts in zip(split[0], split[2], grouped, rows)
    ]
    arrivals, results, overlap_out = [send_rows(parts[0], ctx, counts, dispatch)], list[Future[Tensor]](), None
    for i, chunk in enumerate(parts):
        arrivals += [send_rows(next_chunk, ctx, counts, dispatch) for next_chunk in parts[i + 1 : i + 2]]
        overlap_out = overlap() if overlap and i == 0 else overlap_out
        y = run_experts(p, arrivals[i].wait(), chunk.rows[ep.rank], ctx, gate)
        results.append(start_exchange_rows(y, chunk.to_ranks().t(), ep, chunk.order.numel(), leaf=LEAF))
    impl = kernels["unpermute"]
    out = [
        moe.unpermute(y.wait(), chunk.weights, chunk.order, chunk.inverse, impl=impl)
        for chunk, y in zip(parts, results)
    ]
    return torch.cat(out) if len(out) > 1 else out[0], overlap_out


def send_rows(chunk: TokenChunk, ctx: Ctx, counts: Sequence[int], dispatch: Experts) -> Future[Tensor]:
    """The start of the exchange of a part's rows, which arrive in the order of senders, then experts."""
    ep, (n, k) = ctx.mesh.ep, chunk.weights.shape
    rows = moe.permute(chunk.x, chunk.order, chunk.inverse, impl=ctx.kernels["permute"])
    capacity = dispatch.row_capacity(n * k, ep.size * n * min(k, max(counts)))
    otherwise = f"use a larger slack than exchange:{dispatch.slack:g}, or gather"
    return start_exchange_rows(rows, chunk.to_ranks(), ep, capacity, leaf=LEAF, otherwise=otherwise)


def run_experts(p: Tree, rows: Tensor, arrived: Tensor, ctx: Ctx, gate: Op) -> Tensor:
    """The results of this rank's experts for rows that arrived by `sent`, in their order. arrived: [sender, expert]."""
    count, kernels = arrived.shape[1], ctx.kernels
    ends = arrived.reshape(-1).cumsum(0)
    sender_expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    expert = torch.where(sender_expert < len(ends), sender_expert % count, count)  # no expert behind them all
    order, inverse, ends = moe.group(expert[:, None], count + 1, impl=kernels["group"])
    rows = moe.permute(rows, order, inverse, impl=kernels["permute"])
    y = feed_forward_prefix(p, rows, ends[:count], ctx, gate)
    return moe.permute(y, inverse, order, impl=kernels["permute"])


def feed_forward_prefix(p: Tree, rows: Tensor, ends: Tensor, ctx: Ctx, gate: Op) -> Tensor:
    """`moe.feed_forward` of the rows before the last of `ends`, and zeros behind them."""
    used = (torch.arange(rows.shape[0], device=rows.device) < ends[-1])[:, None]
    y = moe.feed_forward(p, torch.where(used, rows, 0.0), ends, ctx.kernels, bool(ctx.matmul), gate)
    return torch.where(used, y, 0.0)


def enter_routing(ids: Tensor, weights: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, T, k], weights [B, T, k]) for use in a tensor-parallel region."""
    if sequence_axis(ctx).size == 1:
        return ids, enter_region(weights, ctx, "blocks/moe/router")
    # One collective in place of two: a floating-point number represents an expert's number exactly.
    packed = enter_region(torch.cat((weights, ids.to(weights.dtype)), -1), ctx, "blocks/moe/router")
    weights, ids = packed.chunk(2, -1)
    return ids.to(torch.int64), weights


def mean_over_positions(ctx: Ctx, *values: Tensor) -> Sequence[Tensor]:
    """The means over T [B, n] of values [B, T, n] or of this rank's tokens; the same on ranks of tp and cp."""
    axis, cp, leaf = sequence_axis(ctx), ctx.mesh.cp, "blocks/moe/router"
    if axis.size == cp.size == 1:
        return [value.mean(1) for value in values]
    sums = psum(torch.cat(values, -1).sum(1) / (cp.size * axis.size * values[0].shape[1]), axis, leaf=leaf)
    sums = pvary(psum(sums, cp, leaf=leaf), cp, leaf=leaf)  # which weigh it by their own tokens
    return sums.split([value.shape[-1] for value in values], -1)


# "load" [B, L, E]: the tokens of each expert; "entropy" [B, L]: of the shares, summed over tokens, in nats
Counts = dict[str, Tensor]


def no_counts(x: Tensor, layers: int, experts: int, ctx: Ctx) -> Counts:
    """The counts before the first of so many layers with experts, of the sequences x [B, T, D]."""
    wide = torch.promote_types(ctx.dtype, torch.float32)
    load = torch.zeros(x.shape[0], layers, experts, dtype=wide, device=x.device)
    return {LOAD: load, ENTROPY: load[..., 0].clone()}


def count(
    counts: Counts, ids: Tensor, shares: Tensor, first: int, ctx: Ctx, *extras: Tensor
) -> tuple[Counts, list[Any]]:
    """(the counts with those of this layer, the means over T of [load, shares, *more] [B, n])."""
    assert isinstance(ctx.layer, Tensor)  # a block is called by a stack, with its number
    layers, experts = counts[LOAD].shape[1:]
    chosen = (ids[..., None] == torch.arange(experts, device=ids.device)).sum(-2).to(shares.dtype)
    probs = shares.detach()
    entropy = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1, keepdim=True)
    means: Sequence[Tensor] = mean_over_positions(ctx, chosen, shares, *extras, entropy)
    positions = ids.shape[1] * sequence_axis(ctx).size * ctx.mesh.cp.size
    is_layer = (torch.arange(layers, device=ids.device) == ctx.layer - first).to(shares.dtype)
    load = torch.round(means[0].detach() * positions)  # a number of tokens again, exactly
    entropy = means[-1].detach() * positions
    new = {LOAD: counts[LOAD] + is_layer[:, None] * load[:, None], ENTROPY: counts[ENTROPY] + is_layer * entropy}
    return new, list(means[:-1])


def tables(stack: str, counts: Counts, capacity: int = 0) -> dict[str, Tensor]:
    """The sums over sequences for `Loss.tables`: STACK/moe/load [L, E], /entropy [L] and /dropped [L, E]."""
    totals = {LOAD: counts[LOAD], ENTROPY: counts[ENTROPY]}
    if capacity:
        totals[DROPPED] = (counts[LOAD] - capacity).clamp_min(0.0)
    return {f"{stack}/moe/{name}": value.detach().to(torch.float64).sum(0) for name, value in totals.items()}


def positions_of_batch(batch: Batch, ctx: Ctx) -> int:
    """The positions T of a whole sequence, of a batch as a head sees it."""
    return batch["targets"].shape[-1] * ctx.mesh.cp.size


def balance_by_bias(stack: str, rate: float) -> dict[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None]:
    """The rule for `ModelTraits.leaf_rules` that moves the bias [L, E] by `rate` towards an even load."""

    # Ref: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", arXiv:2408.15664,
    # algorithm 1.
    def move(bias: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
        load = sums[f"{stack}/moe/{LOAD}"]
        return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)

    return {f"{stack}/moe/{BIAS}": move if rate else None}
