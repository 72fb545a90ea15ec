"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.pytree import Tree
from fzero.kernels.optim_multi_tensor import lion as kernel
from fzero.kernels.optim_multi_tensor import lion_step
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative, lr_at
from fzero.optim.masks import Mask
from fzero.optim.moment_storage import Bits, Block, Rounding, storage, with_kernel


class LionState(NamedTuple):
    """The state of `lion`.

    >>> lion().init({"w": torch.zeros(2)})
    LionState(count=tensor(0), m={'w': tensor([0., 0.])})
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # momentum, like the params


class Lion8State(NamedTuple):
    """The state of `lion` with state_bits=8: see fzero.kernels.optim_lowbit.

    Leaves that stay in float32 have no scales.

    >>> state = lion(state_bits=8, block=256).init({"w": torch.zeros(16, 512)})
    >>> state.m["w"].dtype, state.m_scale["w"].shape
    (torch.uint8, torch.Size([16, 2]))
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # codes (uint8) of the momentum, like the params
    m_scale: Tree  # float32, one for each block of a row: [..., blocks]


@checked(**OPTIMIZER)
def lion(
    lr: LearningRate = 1e-4,
    b1: Beta = 0.9,
    b2: Beta = 0.99,
    *,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    state_bits: Bits = None,
    block: Block = 256,
    seed: int = 0,
    impl: str = "auto",
) -> GradientTransformation:
    """Return Lion: every element moves by lr in the direction of the sign of a momentum.

    u = -lr (sign(b1 m + (1 - b1) g) + λ p);  m = b2 m + (1 - b2) g.

    lr: a number, a 0-dim tensor, or a schedule. weight_decay: λ. mask: which leaves decay (a regex over names, a
    predicate (name, leaf), None for all). state_dtype: of m, None for the param's.
    rounding, state_bits, block, seed, impl: as in `adamw`.
    Raises ValueError for numbers out of range, and for state options that do not go together.

    >>> tx, params = lion(0.1), {"w": torch.tensor([1.0, 1.0])}
    >>> updates, state = tx.update({"w": torch.tensor([30.0, -0.2])}, tx.init(params), params)
    >>> updates["w"]
    tensor([-0.1000,  0.1000])

    Ref: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm 2.
    """
    encoding = storage("lion", state_dtype, state_bits, block, rounding, seed)
    numbers = {"b1": b1, "b2": b2, "weight_decay": weight_decay, "mask": mask, "impl": impl}
    scalars = lambda count: (lr_at(lr, count),)  # noqa: E731
    return with_kernel("lion", kernel, lion_step, (LionState, Lion8State), 1, scalars, encoding=encoding, **numbers)
