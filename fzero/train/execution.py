"""How a loss and its gradient are computed: what changes speed and memory, and not the mathematics."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.core.autodiff import Remat
from fzero.kernels.registry import AUTO, Kernels


@dataclass(frozen=True)
class Execution:
    """What changes the speed and the memory of a step, and of its numbers at most the rounding.

    remat: which activations are computed again in the backward pass: "none", "full", "every:K" (layers) or "selective:F" (keep at most
        the fraction F); or a Remat.
    compiled: whether blocks and losses are compiled.
    kernels: the form of each hot operation, such as "reference" or "auto,attention=blocked" (see fzero.kernels.registry); or a Kernels.
    prefetch: layers whose parameters are gathered, or read, ahead of use, so that prefetch + 1 layers are whole at a time.
    norms: whether `metrics.squares` are the sums of squares of each leaf of the gradient, for norms by layer (see fzero.run.measure.norms).

    Texts are parsed here. Raises ValueError for a text that is none of these, and a prefetch below 0.

    >>> Execution(remat="every:2").remat.every
    2
    """

    remat: Remat | str = "none"
    compiled: bool = False
    kernels: Kernels | str = AUTO
    prefetch: int = 1
    norms: bool = False
    mlp_tiles: int = 1
    _layers: int = 0  # of a plan, which learns of all layers from a few: only the first ones are run, 0: all

    def __post_init__(self) -> None:
        if isinstance(self.remat, str):
            object.__setattr__(self, "remat", Remat.parse(self.remat))
        if isinstance(self.kernels, str):
            object.__setattr__(self, "kernels", Kernels.parse(self.kernels))
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; it must be at least 0")
