"""Loss spikes: a running mean and deviation of the loss, as part of the state, and losses far above them.

With the losses x_1, x_2, ... and the rate r_t = max(1/t, r), where |d| estimates the deviation of normal noise and the
root makes up for the error of the mean (Finch 2009, "Incremental calculation of weighted mean and variance",
section 9, has the like for squares):

    d = x_t - mean;  mean += r_t d;  dev = (1 - r_t) dev + r_t sqrt(1 - r_t) sqrt(pi/2) |d|

and r = min(8 / window, 1/3), or 1 / window if larger. So each of the first losses has the same weight, and from then on
the last `window` of them have all of it but exp(-8): with r = 1 / window a third of the weight would be older, and the
first losses of a run would hide spikes for hundreds of steps. Squares would remember an outlier twice as long.

A loss above mean + sigmas dev of those before it is a spike, where dev is a thousandth of the mean at least. It enters
as a loss of ENTRY deviations: then the bound grows by 15% a step at the most with a window of 100, and a loss that
diverges faster is a spike at every step, where an entry as large as the bound lets it follow. To leave out the update
of such a step, and the 6 sigmas, are `SkipStepOptimizer` of OLMo-core (olmo_core/optim/skip_step_optimizer.py), which
keeps the last 128 losses themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import check_bounds
from fzero.train.execution import SIGMAS, WARMUP, WINDOW
from fzero.train.state import LossStats

MIN_DEVIATION = (1e-3, 1e-12)  # deviation: a part of the mean, and what it is of a mean of 0
ENTRY = 2.4  # deviations above the mean, as which a spike enters the statistics
FIRST = 8  # losses after which an outlier enters as a spike does, in the warm-up too


@dataclass(frozen=True)
class Spike:
    """The rule by which a loss is a spike: it exceeds the mean of the losses before it by `sigmas` standard deviations.

    window: the number of losses that mean and deviation remember; older ones have 0.03% of the weight, with a window
    below 24 more. warmup: the number of losses that are seen before the first one is judged, at least 1.
    Raises ValueError unless sigmas is above 0 and below 10^6, window at least 2, warmup at least 1, both below 10^9.

    >>> from fzero.train.state import init_stats
    >>> stats, rule = init_stats(), Spike(sigmas=6.0, warmup=3)
    >>> for loss in (2.0, 2.2, 1.9, 9.0):
    ...     is_spike, stats = rule.judge(stats, torch.tensor(loss))
    >>> is_spike
    tensor(True)
    """

    sigmas: float = 6.0
    window: int = 100
    warmup: int = 50

    def __post_init__(self) -> None:
        expect_fields(self)
        for name, bounds in (("sigmas", SIGMAS), ("window", WINDOW), ("warmup", WARMUP)):
            check_bounds(f"Spike: {name}", getattr(self, name), bounds)

    @property
    def rate(self) -> float:
        """The least weight of a loss that enters the statistics.

        >>> Spike(window=100).rate, Spike(window=2).rate
        (0.08, 0.5)
        """
        return max(1.0 / self.window, min(8.0 / self.window, 1.0 / 3.0))

    def judge(self, stats: LossStats, loss: Tensor) -> tuple[Tensor, LossStats]:
        """(whether `loss` is a spike, a bool scalar; the statistics after it). Pure, without branches: it vmaps.

        A spike enters the statistics as a loss of ENTRY deviations: one of them moves them little, and if all losses
        have risen for good by 30 deviations, the bound follows within some thirteen steps, by 1,000 within 40. A loss
        that is not finite is a spike, and does not enter."""
        x = loss.detach().to(torch.float64)
        fraction, floor = MIN_DEVIATION
        deviation = torch.maximum(stats.var.sqrt(), (fraction * stats.mean.abs()).clamp(min=floor))
        outlier = (stats.count >= min(FIRST, self.warmup)) & ~(x <= stats.mean + self.sigmas * deviation)
        rate = torch.clamp(1.0 / (stats.count + 1).to(torch.float64), min=self.rate)
        d = torch.where(outlier, torch.minimum(x - stats.mean, ENTRY * deviation), x - stats.mean)
        spread = (1.0 - rate) * torch.where(outlier, deviation, stats.var.sqrt())
        spread = spread + rate * (1.0 - rate).sqrt() * math.sqrt(math.pi / 2) * d.abs()
        new = LossStats(stats.mean + rate * d, spread.square(), stats.count + 1)
        enters = torch.isfinite(x)
        return outlier & (stats.count >= self.warmup), LossStats(
            *(torch.where(enters, next_value, previous) for next_value, previous in zip(new, stats))
        )
