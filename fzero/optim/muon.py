"""Muon: momentum, orthogonalised by Newton-Schulz iterations, for the weight matrices of hidden layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.newton_schulz import COEFFICIENTS, newton_schulz
from fzero.optim.base import GradientTransformation, Schedule, check_number, lr_at
from fzero.optim.leafwise import layer_dims, layer_pieces, leafwise, moment
from fzero.optim.masks import Mask, check_mask, masked
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves


class MuonState(NamedTuple):
    """State of `muon`."""

    count: Tensor  # int64 0-dim: steps made
    momentum: Tree  # B, like the params


class Leaf(NamedTuple):
    """What a leaf is to Muon."""

    name: str
    lead: int  # leading dims that count layers, 0 or 1
    scale: float
    decay: float


def muon(
    lr: float | Tensor | Schedule = 1e-3,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    mask: Mask = None,
    adjust: str = "original",
    weights: str = "in_out",
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.float32,
    stacked: str | None = r"^blocks/",
    state_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> GradientTransformation:
    """Muon with the meaning of torch.optim.Muon, on the last two dims of each leaf; the dims before them are a batch.

    B = μ B + (1 - μ) g;  O = newton_schulz((1 - μ) g + μ B) with Nesterov, else newton_schulz(B);  u = -lr s O - lr λ
    p.

    adjust: "original" is s = √max(1, out/in); "match_rms_adamw" is s = 0.2 √max(out, in), with which AdamW's lr and
    decay serve.
    weights: "in_out" for weights [in, out] (x @ w, the models here), "out_in" for those of torch.nn.Linear, as
    torch.optim.Muon takes.
    ns_dtype: of the iterations; float32 unless asked (torch: bfloat16 always, which fast bfloat16 matrix units reward).
    mask: which leaves decay. state_dtype: of B, None for the param's.
    The iterations are on whole matrices, of one layer at a time, so their bits do not depend on how leaves are sharded.
    impl: of newton_schulz ("triton" is for ns_dtype bfloat16 on CUDA).
    Communicates: on the axes that shard a matrix, the direction of each layer to the rank that iterates on it, and the
    result back; where the layers do not divide by the ranks, every rank gathers the direction and iterates itself.
    Raises ValueError for a leaf that is not a matrix (a stacked bias [L, D] is L vectors; give it another optimizer by
    `by_label`), an unknown adjust or weights, and numbers out of range.

    Ref: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    scalable for LLM training", arXiv:2502.16982, section 2.2.
    """
    check_number("muon", lr=lr, weight_decay=weight_decay, ns_eps=ns_eps)
    check_number("muon", high=1.0, momentum=momentum)
    check_number("muon", low=1, high=100, ns_steps=ns_steps)
    if adjust not in ("original", "match_rms_adamw"):
        raise ValueError(f"muon: adjust is {adjust!r}; it must be 'original' or 'match_rms_adamw'")
    if weights not in ("in_out", "out_in"):
        raise ValueError(f"muon: weights is {weights!r}; it must be 'in_out' for weights [in, out] or 'out_in' for [out, in]")
    decays = masked(mask)

    def on(shards: ShardedLeaves) -> GradientTransformation:
        def info(name: str, p: Tensor) -> Leaf:
            lead = layer_dims("muon", stacked, name, p.dim())
            if p.dim() - lead < 2:
                kind = "a stack of vectors" if p.dim() == 2 else "no matrix"
                raise ValueError(
                    f"muon: {name} of shape {tuple(p.shape)} is {kind}; give it another optimizer: "
                    "by_label({'muon': ..., 'adamw': ...}, rules)"
                )
            d_in, d_out = (p.shape[d] * shards.parts(name, (d,)) for d in ((-2, -1) if weights == "in_out" else (-1, -2)))
            scale = math.sqrt(max(1.0, d_out / d_in)) if adjust == "original" else 0.2 * math.sqrt(max(d_out, d_in))
            return Leaf(name, lead, scale, weight_decay if decays(name, p) else 0.0)

        def orthogonal(x: Tensor) -> Tensor:
            return newton_schulz(x, ns_steps, dtype=ns_dtype, coefficients=ns_coefficients, eps=ns_eps, impl=impl)

        def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, leaf: Leaf) -> tuple[Tensor, tuple]:
            (rate,), (b,) = scalars, slots
            b = b + (1 - momentum) * (g - b)
            direction = g + momentum * (b - g) if nesterov else b
            each = (lambda x: torch.cat([orthogonal(layer) for layer in x.split(1)])) if leaf.lead else orthogonal
            u = -(rate * leaf.scale) * shards.on_matrices(leaf.name, direction, each).to(g.dtype)
            return u - (rate * leaf.decay) * p if leaf.decay else u, (b,)

        return leafwise(
            MuonState,
            [moment(state_dtype)],
            lambda count: (lr_at(lr, count),),
            step,
            info=info,
            pieces=layer_pieces(stacked, shards.parts),
            needs="matrix" if shards is WHOLE else "elementwise",
            check=check_mask("muon", mask),
        )._replace(on=on)

    return on(WHOLE)
