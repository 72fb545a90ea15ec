"""LAMB: Adam's direction, scaled per layer to the size of the weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.pytree import Tree
from fzero.kernels.optim_leaf import safe_sqrt
from fzero.optim.adamw import Correction, adam_scalars
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import layer_dims, layer_pieces, leafwise, moment
from fzero.optim.sharded_leaves import ShardedLeaves, layer_norm2, on_shards
from fzero.sharding.slices import STACKED


class LambState(NamedTuple):
    """The state of `lamb`.

    >>> lamb().init({"w": torch.zeros(2)})
    LambState(count=tensor(0), m={'w': tensor([0., 0.])}, v={'w': tensor([0., 0.])})
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # mean of gradients, like the params
    v: Tree  # mean of squared gradients, like the params


@checked(**OPTIMIZER)
def lamb(
    lr: LearningRate = 1e-3,
    b1: Beta = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-6,
    *,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    stacked: str | None = STACKED,
    state_dtype: torch.dtype | None = None,
    ratios: tuple[float, float] = (0.0, math.inf),
    correction: Correction = "moments",
) -> GradientTransformation:
    """Return LAMB: Adam's direction, scaled per layer so that the update is lr times as long as the weights.

    r = m̂ / (√v̂ + eps) + λ p;  u = -lr (||p|| / ||r||) r,  with m̂ and v̂ as in `adamw`.

    The norms are of a leaf; for a leaf whose name the regex `stacked` matches, of each layer along its leading dim.
    If either norm is zero the ratio is 1 (φ of the paper is the identity).
    ratios: the least and the largest ratio (DeepSpeed's: 0.01, 10). correction: as of `adamw` (DeepSpeed's: "rate").
    lr: a number, a 0-dim tensor, or a schedule. weight_decay: λ. mask: which leaves decay (a regex over names, a
    predicate (name, leaf), None for all). state_dtype: of m and v, None for the param's.
    Communicates: two numbers per layer and axis that shards it.
    Raises ValueError for numbers out of range.

    >>> tx, params = lamb(0.1), {"w": torch.tensor([3.0, 4.0])}
    >>> updates, state = tx.update({"w": torch.tensor([0.2, -7.0])}, tx.init(params), params)
    >>> updates["w"].norm() / params["w"].norm()
    tensor(0.1000)

    Ref: You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv:1904.00962,
    algorithm 2.
    """
    check_ratios("lamb", ratios)
    decays = decay_predicate(mask)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        def info(name: str, p: Tensor) -> tuple[str, float, int]:
            return name, weight_decay if decays(name, p) else 0.0, layer_dims("lamb", stacked, name, p.dim())

        def step(
            g: Tensor, slots: tuple, p: Tensor, scalars: tuple, details: tuple[str, float, int]
        ) -> tuple[Tensor, tuple]:
            (rate, correct1, root_correct2), (m, v), (name, decay, lead) = scalars, slots, details
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
            r = (m / correct1) / (safe_sqrt(v) / root_correct2 + eps)
            r = r + decay * p if decay else r
            p_norm, r_norm = layer_norm2(shards, name, p, lead), layer_norm2(shards, name, r, lead)
            nonzero = (p_norm > 0) & (r_norm > 0)
            ratio = torch.where(nonzero, (p_norm / torch.where(nonzero, r_norm, 1.0)).clamp(*ratios), 1.0)
            return -rate * ratio * r, (m, v)

        return leafwise(
            LambState,
            [moment(state_dtype)] * 2,
            lambda count: adam_scalars(lr, b1, b2, count, correction),
            step,
            info=info,
            pieces=layer_pieces(stacked, shards.parts),
            check=check_mask("lamb", mask),
            vary=shards.vary,
        )

    return on_shards(make, needs="matrix")


def check_ratios(owner: str, ratios: tuple[float, float]) -> None:
    """Raise ValueError for bounds of a ratio of norms of which no ratio is."""
    low, high = ratios
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"{owner}: ratios are {ratios}; the least must be 0 or more, and the largest not below it")
