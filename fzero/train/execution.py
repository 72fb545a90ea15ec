"""How a loss and its gradient are computed: what changes speed and memory, and not the mathematics."""

from __future__ import annotations

from typing import NamedTuple

from fzero.core.autodiff import Remat
from fzero.core.precision import Policy
from fzero.kernels.registry import AUTO, Kernels
from fzero.offload import Nvme


class Execution(NamedTuple):
    """How a loss and its gradient are computed; see make_train_step."""

    policy: Policy
    remat: Remat = Remat()
    compiled: bool = False
    kernels: Kernels = AUTO
    prefetch: int = 1
    mlp_tiles: int = 1
    space: Nvme | None = None
    layers: int = 0  # of a plan: only the first so many layers are run; 0: all
