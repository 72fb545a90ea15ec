"""The experts of a block: how its tokens come to them and back, for every model that routes.

A block chooses (ids, weights) of its tokens as its model says, enters the tensor-parallel region with them
(`enter_routing`), and calls `mixture`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.comm.collectives import psum, pvary
from fzero.core.pytree import Tree
from fzero.kernels import moe
from fzero.models.base import Ctx
from fzero.models.layers import enter, sequence_axis

MOE_RULES = (
    (r"/moe/router$", "[L/pp, D, E]"),
    (r"/moe/w_(gate|up)$", "[L/pp, E/ep, D, F/tp]"),
    (r"/moe/w_down$", "[L/pp, E/ep, F/tp, D]"),
)
MOE_BIAS_RULE = (r"/moe/bias$", "[L/pp, E]")


def mixture(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, ctx: Ctx, capacity_factor: float = 0.0) -> Tensor:
    """Return sum_k weights_k expert_{ids_k}(x) of x [B, T, D], ids int64 and weights [B, T, k], inside the
    tensor-parallel region: under tp this rank's part of it.

    p: the experts' w_gate, w_up [E, D, F] and w_down [E, F, D], or this rank's units of them. capacity_factor: 0 for
    dropless; see `kernels.moe.capacity`.
    """
    if capacity_factor:
        return moe.capacity(p, x, ids, weights, capacity_factor, ctx.kernels)
    return moe.dropless(p, x, ids, weights, ctx.kernels)


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
