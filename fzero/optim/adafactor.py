"""Adafactor: second moments kept as a row and a column per matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.optim.base import GradientTransformation, Schedule, check_number, lr_at
from fzero.optim.leafwise import Slot, layer_dims, layer_norm2, layer_pieces, leafwise, rms_of
from fzero.optim.rules import Mask, check_mask, masked
from fzero.pytree import Tree
from fzero.sharding.spec import Spec


class AdafactorState(NamedTuple):
    """State of `adafactor`."""

    count: Tensor  # int64 0-dim: steps made
    row: Tree  # mean of g² over the last dim, [..., D] for a matrix [..., D, F]; for a vector that of each element
    col: Tree  # mean of g² over the last dim but one, [..., F]; for a vector one unused zero (per layer, if stacked)


class Leaf(NamedTuple):
    """What a leaf is to Adafactor."""

    lead: int  # leading dims that count layers, 0 or 1
    factored: bool
    eps1: float
    decay: float


def adafactor(
    lr: float | Tensor | Schedule = 1e-2,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    clip: float = 1.0,
    *,
    weight_decay: float = 0.0,
    mask: Mask = None,
    stacked: str | None = r"^blocks/",
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Adafactor with the meaning of torch.optim.Adafactor.

    β = 1 - t^beta2_decay;  R = β R + (1 - β) mean(g², last dim);  C = β C + (1 - β) mean(g², last dim but one);
    V = R Cᵀ / max(mean(R), eps1);  U = g / max(√V, eps1);  α = max(eps2, rms(p)) min(lr, 1/√t);
    u = -α U / max(1, rms(U) / clip) - lr λ p,  with t = count + 1.

    A leaf of two dims or more is factored over its last two, the dims before them are a batch (E experts); a vector
    keeps V whole.
    A leaf whose name the regex `stacked` matches is L leaves along its leading dim: they share no row, column or rms,
    and a stacked bias [L, D] is L vectors. eps1 None is the machine epsilon of the param's dtype.
    state_dtype: of row and col, None for the param's. `spec` reads the number of dims off each Spec: name all dims, or
    none.
    Differs from the paper as torch does: means in place of sums, eps1 inside the quotients and not added to g², lr as
    the cap of the relative step (the paper: 1e-2), decoupled weight decay.
    Raises ValueError for numbers out of range.

    Ref: Shazeer and Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost", arXiv:1804.04235,
    algorithms 4 and 5.
    """
    check_number("adafactor", lr=lr, eps2=eps2, weight_decay=weight_decay, **({} if eps1 is None else {"eps1": eps1}))
    check_number("adafactor", low=1.0, clip=clip)
    if not beta2_decay <= 0:
        raise ValueError(f"adafactor: beta2_decay is {beta2_decay!r}; it must be <= 0, such as -0.8")
    decays = masked(mask)

    def info(name: str, p: Tensor) -> Leaf:
        lead = layer_dims("adafactor", stacked, name, p)
        small = torch.finfo(p.dtype).eps if eps1 is None else eps1
        return Leaf(lead, p.dim() - lead >= 2, small, weight_decay if decays(name, p) else 0.0)

    def scalars(count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t, rate = (count + 1).to(torch.float64), lr_at(lr, count)
        return rate, t**beta2_decay, torch.minimum(rate, t.rsqrt())

    def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, leaf: Leaf) -> tuple[Tensor, tuple]:
        (rate, fresh, relative), (row, col) = scalars, slots
        square = g * g
        if leaf.factored:
            row = row + fresh * (square.mean(-1) - row)
            col = col + fresh * (square.mean(-2) - col)
            v = row.unsqueeze(-1) * col.unsqueeze(-2) / row.mean(-1)[..., None, None].clamp(min=leaf.eps1)
        else:
            v = row = row + fresh * (square - row)
        u = g * v.clamp(min=leaf.eps1**2).rsqrt()
        alpha = rms_of(layer_norm2(p, leaf.lead), p, leaf.lead).clamp(min=eps2) * relative
        u = -(alpha / (rms_of(layer_norm2(u, leaf.lead), u, leaf.lead) / clip).clamp(min=1.0)) * u
        return u - (rate * leaf.decay) * p if leaf.decay else u, (row, col)

    def row_init(name: str, p: Tensor) -> Tensor:
        return p.new_zeros(p.shape[:-1] if info(name, p).factored else p.shape, dtype=state_dtype)

    def col_init(name: str, p: Tensor) -> Tensor:
        leaf = info(name, p)
        shape = (*p.shape[:-2], p.shape[-1]) if leaf.factored else p.shape[: leaf.lead]
        return p.new_zeros(shape, dtype=state_dtype)

    # By the number of dims named; Spec() stays Spec() whatever the leaf.
    def spec_lead(name: str, spec: Spec) -> int:
        return layer_dims("adafactor", stacked, name, torch.empty((0,) * len(spec.dims))) if spec.dims else 0

    def row_spec(name: str, spec: Spec) -> Spec:
        factored = len(spec.dims) - spec_lead(name, spec) >= 2
        return replace(spec, dims=spec.dims[:-1] if factored else spec.dims)

    def col_spec(name: str, spec: Spec) -> Spec:
        lead = spec_lead(name, spec)
        factored = len(spec.dims) - lead >= 2
        return replace(spec, dims=(*spec.dims[:-2], spec.dims[-1]) if factored else spec.dims[:lead])

    return leafwise(
        AdafactorState,
        [Slot(row_init, row_spec), Slot(col_init, col_spec)],
        scalars,
        step,
        info=info,
        pieces=layer_pieces(stacked),
        needs="matrix",
        check=check_mask("adafactor", mask),
    )
