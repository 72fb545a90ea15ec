"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.optim_multi_tensor import lion as kernel
from fzero.kernels.optim_multi_tensor import lion_step
from fzero.optim.base import GradientTransformation, Schedule, check_number, lr_at
from fzero.optim.masks import Mask
from fzero.optim.moment_storage import storage, with_kernel


class LionState(NamedTuple):
    """State of `lion`."""

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # momentum, like the params


class Lion8State(NamedTuple):
    """State of `lion` in 8 bits: see fzero.kernels.optim_lowbit. Leaves that stay in float32 have no scales."""

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # codes (uint8) of the momentum, like the params
    m_scale: Tree  # float32, one for each block of a row: [..., blocks]


def lion(
    lr: float | Tensor | Schedule = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    state_bits: int | None = None,
    block: int = 256,
    seed: int = 0,
    impl: str = "auto",
) -> GradientTransformation:
    """Lion: u = -lr (sign(b1 m + (1 - b1) g) + λ p);  m = b2 m + (1 - b2) g.

    mask: which leaves decay (a regex over names, a predicate (name, leaf), None for all). state_dtype: of m, None for
    the param's. rounding, state_bits, block, seed, impl: as in `adamw`.
    Raises ValueError for numbers out of range, and for state options that do not go together.

    Ref: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm 2.
    """
    check_number("lion", lr=lr, weight_decay=weight_decay)
    check_number("lion", high=1.0, b1=b1, b2=b2)
    kept = storage("lion", state_dtype, state_bits, block, rounding, seed)
    numbers = {"b1": b1, "b2": b2, "weight_decay": weight_decay, "mask": mask, "impl": impl}
    scalars = lambda count: (lr_at(lr, count),)  # noqa: E731
    return with_kernel("lion", kernel, lion_step, (LionState, Lion8State), 1, scalars, kept=kept, **numbers)
