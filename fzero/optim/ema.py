"""Exponential moving average of weights, as a value beside the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.optim.base import check_number


def ema_init(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """A copy of the parameters (in `dtype`, None: their own), the average's first value.

    It starts at the parameters and not at zero, so the average needs no bias correction. It has the parameters'
    structure, and so their specs.
    """
    return pytree.map(lambda p: torch.empty_like(p, dtype=dtype).copy_(p.detach()), params)


def ema_update(ema: Tree, params: Tree, decay: float | Tensor) -> Tree:
    """decay * ema + (1 - decay) * params, each leaf in the dtype of `ema`.

    A change smaller than half a unit in the last place is lost: keep `ema` in float32 where decay is near 1.
    Raises ValueError for a decay outside [0, 1).
    """
    check_number("ema_update", high=1.0, decay=decay)
    return pytree.map(lambda e, p: (e + (p.to(e.dtype) - e) * (1 - decay)).to(e.dtype), ema, params)
