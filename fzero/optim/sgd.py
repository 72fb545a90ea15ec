"""Stochastic gradient descent with momentum, Nesterov's form of it, and L2 weight decay."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.pytree import Tree
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative, lr_at
from fzero.optim.leafwise import leafwise, moment
from fzero.optim.masks import Mask, check_mask, decay_predicate


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
