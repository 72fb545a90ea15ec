"""1-bit LAMB: ranks send signs of their momentum, and the sizes of LAMB's updates follow from the warm-up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative
from fzero.optim.lamb import check_ratios
from fzero.optim.leafwise import Slot, layer_dims
from fzero.optim.masks import Mask
from fzero.optim.onebit import AtLeastOne, Direction, Method, Moments, Numbers, Scale, SignCorrection, one_bit, warm_up
from fzero.optim.sharded_leaves import ShardedLeaves, layer_norm2
from fzero.sharding.slices import STACKED
from fzero.sharding.spec import Spec

AVERAGE = 0.9  # of the ratios of the warm-up: the weight of those before
RATIOS = (0.01, 10.0)  # the smallest and the largest ratio of norms
FACTORS = (0.5, 4.0)  # of a ratio, once v stays
CHANGE = 0.1  # the most that a factor changes in a step, as a part of itself


@checked(**OPTIMIZER)
def onebit_lamb(
    lr: LearningRate = 1e-3,
    b1: Beta = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-6,
    *,
    freeze: AtLeastOne,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    stacked: str | None = STACKED,
    clip: NotNegative = 0.0,
    scale: Scale = "rms",
    ratios: tuple[float, float] = RATIOS,
    correction: SignCorrection = "moments",
) -> GradientTransformation:
    """Return 1-bit LAMB: LAMB for `freeze` steps; then v stays, and ranks exchange the signs of their momentum.

    Until then as `lamb`, with ratios c = ||p|| / ||r|| within `ratios`, of which c̄ = 0.9 c̄ + 0.1 c is kept for each
    layer. From then on m is summed as in `onebit_adam`, whose state, plan ("grads=1bit") and arguments it has, and

    w = b2 w + (1 - b2) ((m - b1 m') / (1 - b1))², with m' the m before, begins at v, and ŵ is corrected
    for all steps, as v̂ is for those of the warm-up;  r₀ = m̂ / (√v̂ + eps);
    r = r₀ + λ p;  q = min(1, ||r₀|| / ||r||);  f = q max((√v̂ + eps) / (√ŵ + eps)) + 1 - q, in [0.5, 4], and within 10%
    of the f before;  u = -lr c̄ f r.

    Norms and the largest quotient are of a leaf, or of each layer of one that `stacked` matches.
    Communicates: as `onebit_adam`, and three numbers per layer and axis that shards it.
    Raises ValueError for numbers out of range.

    >>> tx, params = onebit_lamb(0.1, freeze=10), {"w": torch.tensor([3.0, 4.0])}
    >>> updates, state = tx.update({"w": torch.tensor([0.2, -7.0])}, tx.init(params), params)
    >>> updates["w"].norm() / params["w"].norm()  # the first step is LAMB's
    tensor(0.1000)

    Ref: Li et al. 2021, "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
    speed", arXiv:2104.06069, algorithm 1, with the numbers of DeepSpeed's. Each block of signs has a scale of its own
    here, where DeepSpeed's has one for all layers, and makes their momenta alike first.
    """

    def of_layers(value: float) -> Slot:
        def init(name: str, p: Tensor) -> Tensor:
            lead = layer_dims("onebit_lamb", stacked, name, p.dim())
            return p.new_full((*p.shape[:lead], *[1] * (p.dim() - lead)), value)

        def spec(name: str, param_spec: Spec) -> Spec:
            lead = layer_dims("onebit_lamb", stacked, name, len(param_spec.dims))
            return Spec(
                (*param_spec.dims[:lead], *[()] * (len(param_spec.dims) - lead)), rows=param_spec.rows if lead else ()
            )

        return Slot(init, spec)

    extra = {
        "fresh": Slot(lambda name, p: torch.zeros_like(p), lambda name, param_spec: param_spec),
        "ratio": of_layers(0.0),
        "factor": of_layers(1.0),
    }
    check_ratios("onebit_lamb", ratios)
    numbers = Numbers(lr, b1, b2, eps, weight_decay, clip, scale, correction)
    method = Method(*warm_up(freeze), lamb_direction(numbers, stacked, ratios), extra)
    return one_bit("onebit_lamb", numbers, method, mask)


def lamb_direction(numbers: Numbers, stacked: str | None, ratios: tuple[float, float]) -> Direction:
    """The direction of 1-bit LAMB, scaled to the size of its layer."""
    b1, b2, eps = numbers.b1, numbers.b2, numbers.eps

    def direction(x: Moments, extra: dict[str, Any], shards: ShardedLeaves) -> Tensor:
        lead = layer_dims("onebit_lamb", stacked, x.name, x.p.dim())
        fresh, average, last = (extra[key][x.name] for key in ("fresh", "ratio", "factor"))
        root = (x.v / x.correct2).sqrt() + eps
        first = torch.where(x.v > 0, (x.m / x.correct1) / root, 0.0)
        r = first + x.decay * x.p if x.decay else first
        size = layer_norm2(shards, x.name, r, lead)
        if x.full:
            fresh.copy_(x.v)
            weights = layer_norm2(shards, x.name, x.p, lead)
            nonzero = (weights > 0) & (size > 0)
            ratio = torch.where(nonzero, (weights / torch.where(nonzero, size, 1.0)).clamp(*ratios), 1.0)
            average.copy_(torch.where(nonzero, AVERAGE * average + (1 - AVERAGE) * ratio, average))
            return ratio * r
        assert x.previous_m is not None  # as the method has an `extra`
        fresh.mul_(b2).add_(((x.m - b1 * x.previous_m) / (1 - b1)).square_(), alpha=1 - b2)
        quotient = root / ((fresh / x.correct_all).sqrt() + eps)
        dims = tuple(range(lead, x.p.dim()))
        factor = shards.amax(x.name, quotient.amax(dims, keepdim=True) if dims else quotient, dims)
        if x.decay:
            share = (layer_norm2(shards, x.name, first, lead) / torch.where(size > 0, size, 1.0)).clamp(max=1.0)
            factor = factor * share + (1 - share)
        factor = torch.minimum(torch.maximum(factor.clamp(*FACTORS), last * (1 - CHANGE)), last * (1 + CHANGE))
        last.copy_(factor)
        return average * factor * r

    return direction
