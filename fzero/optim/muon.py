"""Muon: momentum, orthogonalised by Newton-Schulz iterations, for the weight matrices of hidden layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.config_tables import Allowed, one_of
from fzero.core.pytree import Tree
from fzero.kernels.newton_schulz import COEFFICIENTS, newton_schulz
from fzero.optim.base import (
    Beta,
    GradientTransformation,
    LearningRate,
    NotNegative,
    NumberIn,
    lr_at,
)
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import layer_dims, layer_pieces, leafwise, moment
from fzero.optim.sharded_leaves import ShardedLeaves, on_shards
from fzero.sharding.slices import STACKED

WEIGHTS = "'in_out' for weights [in, out] or 'out_in' for [out, in]"


class MuonState(NamedTuple):
    """The state of `muon`.

    >>> muon().init({"w": torch.zeros(1, 2)})
    MuonState(count=tensor(0), momentum={'w': tensor([[0., 0.]])})
    """

    count: Tensor  # int64 0-dim: steps made
    momentum: Tree  # B, like the params


class MuonLeaf(NamedTuple):
    """Muon's settings for a leaf."""

    name: str
    lead: int  # leading dims that count layers, 0 or 1
    scale: float
    decay: float


FINITE = Allowed(lambda numbers: all(map(math.isfinite, numbers)), "three finite numbers")
FLOATING = Allowed(lambda dtype: dtype.is_floating_point, "floating-point, such as torch.float32")


@checked(**OPTIMIZER)
def muon(
    lr: LearningRate = 1e-3,
    momentum: Beta = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: NotNegative = 0.1,
    mask: Mask = None,
    adjust: Annotated[str, one_of(("original", "match_rms_adamw"), "'original' or 'match_rms_adamw'")] = "original",
    weights: Annotated[str, one_of(("in_out", "out_in"), WEIGHTS)] = "in_out",
    ns_steps: Annotated[int, NumberIn(1, 100)] = 5,
    ns_coefficients: Annotated[tuple[float, float, float], FINITE] = COEFFICIENTS,
    ns_eps: NotNegative = 1e-7,
    ns_dtype: Annotated[torch.dtype, FLOATING] = torch.float32,
    stacked: str | None = STACKED,
    state_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> GradientTransformation:
    """Return Muon, as torch.optim.Muon: the update is the momentum with all its singular values brought close to 1.

    B = μ B + (1 - μ) g;  O = newton_schulz((1 - μ) g + μ B) with Nesterov, else newton_schulz(B);
    u = -lr s O - lr λ p.

    It works on the last two dims of each leaf; the dims before them are a batch.
    lr: a number, 0-dim tensor or schedule. momentum: μ. weight_decay: λ. mask: the leaves that decay (see `adamw`).
    adjust: "original" is s = √max(1, out/in); "match_rms_adamw" is s = 0.2 √max(out, in), with which AdamW's lr and
    decay serve. weights: "in_out" for weights [in, out] (x @ w, the models here), "out_in" for those of
    torch.nn.Linear, as torch.optim.Muon takes.
    ns_steps, ns_coefficients, ns_eps: the iterations, see `newton_schulz`. ns_dtype: of the iterations (torch: always
    bfloat16). stacked: a regex; a leaf whose name it matches has layers along its leading dim. state_dtype: of B, None
    for the param's.
    impl: of newton_schulz ("triton" is for ns_dtype bfloat16 on CUDA). It takes whole matrices, of one layer at a time,
    so its bits do not depend on how leaves are sharded.
    Communicates: on the axes that shard a matrix, the direction of each layer to the rank that iterates on it, and the
    result back; if the layers do not divide by the ranks, every rank gathers the direction and iterates itself.
    Raises ValueError for a leaf that is not a matrix (a stacked bias [L, D] is L vectors; give it another optimizer by
    `by_label`), an unknown adjust or weights, and numbers out of range.

    >>> tx, params = muon(1.0, weight_decay=0.0), {"w": torch.zeros(2, 2)}
    >>> updates, state = tx.update({"w": torch.tensor([[5.0, 0.0], [0.0, -1.0]])}, tx.init(params), params)
    >>> torch.linalg.svdvals(updates["w"]).round()  # of the gradient they are 5 and 1
    tensor([1., 1.])

    Ref: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025,
    arXiv:2502.16982, section 2.2.
    """
    fixed = {"dtype": ns_dtype, "coefficients": ns_coefficients, "eps": ns_eps, "impl": impl}
    decays, orthogonal = decay_predicate(mask), partial(newton_schulz, steps=ns_steps, **fixed)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        def info(name: str, p: Tensor) -> MuonLeaf:
            _expect_matrix(name, p, lead := layer_dims("muon", stacked, name, p.dim()))
            last = (-2, -1) if weights == "in_out" else (-1, -2)
            d_in, d_out = (max(1, shards.shape(name, tuple(p.shape))[d]) for d in last)
            scale = math.sqrt(max(1.0, d_out / d_in)) if adjust == "original" else 0.2 * math.sqrt(max(d_out, d_in))
            return MuonLeaf(name, lead, scale, weight_decay if decays(name, p) else 0.0)

        def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, leaf: MuonLeaf) -> tuple[Tensor, tuple]:
            (rate,), (b,) = scalars, slots
            b = b + (1 - momentum) * (g - b)
            direction = g + momentum * (b - g) if nesterov else b
            transform = (lambda x: torch.cat([orthogonal(layer) for layer in x.split(1)])) if leaf.lead else orthogonal
            u = -(rate * leaf.scale) * shards.on_matrices(leaf.name, direction, transform).to(g.dtype)
            return u - (rate * leaf.decay) * p if leaf.decay else u, (b,)

        return leafwise(
            MuonState,
            [moment(state_dtype)],
            lambda count: (lr_at(lr, count),),
            step,
            info=info,
            pieces=layer_pieces(stacked, shards.parts),
            check=check_mask("muon", mask),
            vary=shards.vary,
        )

    return on_shards(make, needs="matrix")


def _expect_matrix(name: str, p: Tensor, lead: int) -> None:
    if p.dim() - lead < 2:
        kind = "a stack of vectors" if p.dim() == 2 else "no matrix"
        raise ValueError(
            f"muon: {name} of shape {tuple(p.shape)} is {kind}; give it another optimizer: "
            "by_label({'muon': ..., 'adamw': ...}, rules)"
        )
