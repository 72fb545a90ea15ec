"""How a model's tokens are spread over its experts: the counts of a step by layer and expert, and the bias that
balances them without a loss.

The counts of each sequence travel with the activations, so that they are those of the forward pass, once, however it is
recomputed, split into micro-batches or cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.models.base import Ctx
from fzero.models.batch import Batch
from fzero.models.experts import mean_over_positions
from fzero.models.layers import sequence_axis

# "load" [B, L, E]: the tokens of each expert; "entropy" [B, L]: of the shares, summed over tokens, in nats
Counts = dict[str, Tensor]
LOAD, ENTROPY, DROPPED, BIAS = "load", "entropy", "dropped", "bias"


def no_counts(x: Tensor, layers: int, experts: int, ctx: Ctx) -> Counts:
    """The counts before the first of so many layers with experts, of the sequences x [B, T, D]."""
    wide = torch.promote_types(ctx.dtype, torch.float32)
    load = torch.zeros(x.shape[0], layers, experts, dtype=wide, device=x.device)
    return {LOAD: load, ENTROPY: load[..., 0].clone()}


def count(counts: Counts, ids: Tensor, shares: Tensor, first: int, ctx: Ctx, *more: Tensor) -> tuple[Counts, list[Any]]:
    """(the counts with those of this layer, the means over T of [load, shares, *more] [B, n]).

    ids: int64 [B, T, k], the experts of this rank's tokens. shares: [B, T, E], each expert's probability or share of
    the scores, which sum to 1. first: the number of the first layer with experts. more: further values [B, T, n].
    Communicates: see `mean_over_positions`.
    """
    assert isinstance(ctx.layer, Tensor)  # a block is called by a stack, with its number
    layers, experts = counts[LOAD].shape[1:]
    chosen = (ids[..., None] == torch.arange(experts, device=ids.device)).sum(-2).to(shares.dtype)
    known = shares.detach()
    entropy = -(known * known.clamp_min(torch.finfo(known.dtype).tiny).log()).sum(-1, keepdim=True)
    means: Sequence[Tensor] = mean_over_positions(ctx, chosen, shares, *more, entropy)
    positions = ids.shape[1] * sequence_axis(ctx).size * ctx.mesh["cp"].size
    here = (torch.arange(layers, device=ids.device) == ctx.layer - first).to(shares.dtype)
    load = torch.round(means[0].detach() * positions)  # a number of tokens again, exactly
    entropy = means[-1].detach() * positions
    new = {LOAD: counts[LOAD] + here[:, None] * load[:, None], ENTROPY: counts[ENTROPY] + here * entropy}
    return new, list(means[:-1])


def tables(stack: str, counts: Counts, room: int = 0) -> dict[str, Tensor]:
    """The sums over sequences for `Loss.tables`: STACK/moe/load [L, E] and STACK/moe/entropy [L].

    room: the tokens of a sequence that an expert takes; the others are STACK/moe/dropped [L, E]. 0: it takes all.
    """
    found = {LOAD: counts[LOAD], ENTROPY: counts[ENTROPY]}
    if room:
        found[DROPPED] = (counts[LOAD] - room).clamp_min(0.0)
    return {f"{stack}/moe/{name}": value.detach().to(torch.float64).sum(0) for name, value in found.items()}


def positions_of_batch(batch: Batch, ctx: Ctx) -> int:
    """The positions T of a whole sequence, of a batch as a head sees it."""
    return batch["targets"].shape[-1] * ctx.mesh["cp"].size


def balance_by_bias(stack: str, rate: float) -> dict[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None]:
    """The rule for `Model.after` by which the bias [L, E] of a stack's routers goes up for an expert with fewer tokens
    than the mean of its layer, and down for one with more, by `rate`; 0: it stays.

    Ref: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", arXiv:2408.15664,
    algorithm 1.
    """

    def move(bias: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
        load = sums[f"{stack}/moe/{LOAD}"]
        return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)

    return {f"{stack}/moe/{BIAS}": move if rate else None}
