"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.optim.base import GradientTransformation, Schedule, check_number, lr_at
from fzero.optim.leafwise import leafwise, moment
from fzero.optim.rules import Mask, check_mask, masked
from fzero.pytree import Tree


class LionState(NamedTuple):
    """State of `lion`."""

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # momentum, like the params


def lion(
    lr: float | Tensor | Schedule = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Lion: u = -lr (sign(b1 m + (1 - b1) g) + λ p);  m = b2 m + (1 - b2) g.

    mask: which leaves decay (a regex over names, a predicate (name, leaf), None for all). state_dtype: of m, None for
    the param's.
    Raises ValueError for numbers out of range.

    Ref: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm 2.
    """
    check_number("lion", lr=lr, weight_decay=weight_decay)
    check_number("lion", high=1.0, b1=b1, b2=b2)
    decays = masked(mask)

    def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, decay: float) -> tuple[Tensor, tuple]:
        (rate,), (m,) = scalars, slots
        direction = (b1 * m + (1 - b1) * g).sign()
        direction = direction + decay * p if decay else direction
        return -rate * direction, (b2 * m + (1 - b2) * g,)

    return leafwise(
        LionState,
        [moment(state_dtype)],
        lambda count: (lr_at(lr, count),),
        step,
        info=lambda name, p: weight_decay if decays(name, p) else 0.0,
        check=check_mask("lion", mask),
    )
