"""Momentum alone: stochastic gradient descent, with Nesterov's form of it and L2 weight decay; and Lion, by the sign of
an interpolated momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.pytree import Tree
from fzero.kernels.optim_multi_tensor import lion as kernel
from fzero.kernels.optim_multi_tensor import lion_step
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative, lr_at
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import Bits, Block, Rounding, leafwise, moment, storage, with_kernel


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


class SGDState(NamedTuple):
    """The state of `sgd`.

    >>> sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
    SGDState(count=tensor(0), momentum={'w': tensor([0., 0.])})
    """

    count: Tensor  # int64 0-dim: steps made
    momentum: Tree  # B, like the params; () without momentum


@checked(**OPTIMIZER)
def sgd(
    lr: LearningRate,
    momentum: Beta = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return stochastic gradient descent, as torch.optim.SGD without dampening.

    g = g + λ p;  B = μ B + g;  u = -lr (g + μ B) with Nesterov, -lr B with momentum, -lr g without.

    lr: a number, a 0-dim tensor, or a schedule. momentum: μ. weight_decay: λ.
    mask: which leaves decay (a regex over names, a predicate (name, leaf), None for all). state_dtype: of B, None for
    the param's.
    Raises ValueError for numbers out of range and for Nesterov without momentum.

    >>> tx, params, grads = sgd(0.1, momentum=0.9), {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> updates, state = tx.update(grads, state, params)
    >>> updates["w"], state.momentum["w"]  # -0.1 (0.9 · 2 + 2)
    (tensor([-0.3800]), tensor([3.8000]))

    Ref: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", section 2.
    """
    if nesterov and momentum == 0:
        raise ValueError("sgd: nesterov=True needs a momentum; give momentum in (0, 1), such as 0.9")
    decays = decay_predicate(mask)

    def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, decay: Any) -> tuple[Tensor, tuple]:
        (rate,) = scalars
        g = g + decay * p if decay else g
        if momentum == 0:
            return -rate * g, ()
        b = momentum * slots[0] + g
        return -rate * (g + momentum * b if nesterov else b), (b,)

    return leafwise(
        SGDState,
        [moment(state_dtype)] if momentum else [],
        lambda count: (lr_at(lr, count),),
        step,
        info=lambda name, p: weight_decay if decays(name, p) else 0.0,
        check=check_mask("sgd", mask),
    )
