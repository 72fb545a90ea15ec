"""Adafactor: second moments kept as a row and a column per matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked, expect_floating
from fzero.core.config_tables import Allowed
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, LearningRate, NotNegative, NumberIn, lr_at
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import Slot, layer_dims, layer_pieces, leafwise, without_partial
from fzero.optim.sharded_leaves import ShardedLeaves, on_shards, rms
from fzero.sharding.slices import STACKED
from fzero.sharding.spec import Spec


class AdafactorState(NamedTuple):
    """The state of `adafactor`: D + F numbers for a matrix [D, F] (Adam: 2 D F).

    >>> state = adafactor().init({"w": torch.zeros(4, 6)})
    >>> state.row["w"].shape, state.col["w"].shape
    (torch.Size([4]), torch.Size([6]))
    """

    count: Tensor  # int64 0-dim: steps made
    row: Tree  # mean of g² over the last dim, [..., D] for a matrix [..., D, F]; for a vector that of each element
    col: Tree  # mean of g² over the last dim but one, [..., F]; for a vector one unused zero (per layer, if stacked)


class AdafactorLeaf(NamedTuple):
    """Adafactor's settings for a leaf."""

    name: str
    lead: int  # leading dims that count layers, 0 or 1
    factored: bool
    eps1: float
    decay: float
    shape: tuple[int, ...]  # of all of it


@checked(**OPTIMIZER)
def adafactor(
    lr: LearningRate = 1e-2,
    beta2_decay: Annotated[float, Allowed(lambda decay: decay <= 0, "<= 0, such as -0.8")] = -0.8,
    eps1: Annotated[float | None, NumberIn()] = None,
    eps2: NotNegative = 1e-3,
    clip: Annotated[float, NumberIn(low=1.0)] = 1.0,
    *,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    stacked: str | None = STACKED,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return Adafactor, as torch.optim.Adafactor: of the second moments it keeps a row and a column per matrix.

    β = 1 - t^beta2_decay;  R = β R + (1 - β) mean(g², last dim);  C = β C + (1 - β) mean(g², last dim but one);
    V = R Cᵀ / max(mean(R), eps1);  U = g / max(√V, eps1);  α = max(eps2, rms(p)) min(lr, 1/√t);
    u = -α U / max(1, rms(U) / clip) - lr λ p,  with t = count + 1.

    A leaf of two dims or more is factored over its last two, the dims before them are a batch (E experts); a vector
    keeps V whole. eps1: None is the machine epsilon of the param's dtype.
    weight_decay, mask: λ, and which leaves decay (a regex over names, a predicate (name, leaf), None for all).
    stacked: a regex; a leaf whose name it matches is L leaves along its leading dim: they share no row, column or rms,
    and a stacked bias [L, D] is L vectors.
    state_dtype: of row and col, None for the param's. `spec` takes Specs that name all dims, or none.
    On sharded leaves means are over whole dims, so that row and col are sharded like the dims they have, and whole on
    the ranks that share the dim they lack.
    Communicates: per axis that shards a dim of a layer, the means over that dim, and three numbers.
    Differs from the paper as torch does: means in place of sums, eps1 inside the quotients and not added to g², lr as
    the cap of the relative step (the paper: 1e-2), decoupled weight decay.
    Raises ValueError for numbers out of range.

    >>> tx, params = adafactor(0.01), {"w": torch.full((2, 2), 5.0)}
    >>> updates, state = tx.update({"w": torch.ones(2, 2)}, tx.init(params), params)
    >>> updates["w"][0]  # lr is relative to the root mean square of the leaf, which is 5
    tensor([-0.0500, -0.0500])

    Ref: Shazeer and Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost", arXiv:1804.04235,
    algorithms 4 and 5.
    """
    decays = decay_predicate(mask)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        def mean(leaf: AdafactorLeaf, x: Tensor, dim: int, leaf_dim: int) -> Tensor:  # over dim `of` of the leaf
            return shards.psum(leaf.name, x.mean(dim) * (x.shape[dim] / max(1, leaf.shape[leaf_dim])), (leaf_dim,))

        def info(name: str, p: Tensor) -> AdafactorLeaf:
            lead = layer_dims("adafactor", stacked, name, p.dim())
            small, decay = torch.finfo(p.dtype).eps if eps1 is None else eps1, weight_decay if decays(name, p) else 0.0
            return AdafactorLeaf(name, lead, p.dim() - lead >= 2, small, decay, shards.shape(name, tuple(p.shape)))

        def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, leaf: AdafactorLeaf) -> tuple[Tensor, tuple]:
            (rate, fresh, relative), (row, col) = scalars, slots
            square = g * g
            if leaf.factored:
                row, col = (x + fresh * (mean(leaf, square, d, leaf_dim=d) - x) for d, x in ((-1, row), (-2, col)))
                sums = mean(leaf, row, -1, leaf_dim=-2)[..., None, None].clamp(min=leaf.eps1)
                v = row.unsqueeze(-1) * col.unsqueeze(-2) / sums
            else:
                v = row = row + fresh * (square - row)
            u = g * v.clamp(min=leaf.eps1**2).rsqrt()
            alpha = rms(shards, leaf.name, p, leaf.lead).clamp(min=eps2) * relative
            u = -(alpha / (rms(shards, leaf.name, u, leaf.lead) / clip).clamp(min=1.0)) * u
            return u - (rate * leaf.decay) * p if leaf.decay else u, (row, col)

        return leafwise(
            AdafactorState,
            [_slot(_row_dims, stacked, state_dtype), _slot(_col_dims, stacked, state_dtype)],
            lambda count: _rates(lr_at(lr, count), (count + 1).to(torch.float64), beta2_decay),
            step,
            info=info,
            pieces=layer_pieces(stacked, shards.parts),
            check=check_mask("adafactor", mask),
            vary=shards.vary,
        )

    return on_shards(make, needs="matrix")


def _rates(lr: Tensor, t: Tensor, beta2_decay: float) -> tuple[Tensor, Tensor, Tensor]:
    return lr, t**beta2_decay, torch.minimum(lr, t.rsqrt())


# The dims of row and col, from a leaf's sizes or its spec's dims.
def _row_dims(dims: tuple, lead: int) -> tuple:
    return dims[:-1] if len(dims) - lead >= 2 else dims


def _col_dims(dims: tuple, lead: int) -> tuple:
    return (*dims[:-2], dims[-1]) if len(dims) - lead >= 2 else dims[:lead]


def _slot(state_dims: Callable[[tuple, int], tuple], stacked: str | None, state_dtype: torch.dtype | None) -> Slot:
    expect_floating("state_dtype", state_dtype)

    def init(name: str, p: Tensor) -> Tensor:
        return p.new_zeros(
            state_dims(tuple(p.shape), layer_dims("adafactor", stacked, name, p.dim())), dtype=state_dtype
        )

    def spec(name: str, spec: Spec) -> Spec:
        # Spec() is replicated whatever the number of dims.
        lead = layer_dims("adafactor", stacked, name, len(spec.dims)) if spec.dims else 0
        return without_partial(spec.with_dims(state_dims(spec.dims, lead)))

    return Slot(init, spec)
