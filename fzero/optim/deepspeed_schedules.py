"""DeepSpeed's schedules, step for step.

It sets the rate after each update, from an iteration that begins at -1: before update t (0 for the first) it is that of
iteration t - 1, and the first two updates have the warmup's first rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from fzero.core.arguments import checked
from fzero.core.config_tables import one_of
from fzero.optim.base import Beta, NotNegative, Schedule
from fzero.optim.schedules import RISES, Finite, Steps, StepsFromZero, Value, time_of

Rise = Annotated[str, one_of(RISES)]


@checked()
def warmup_lr(peak: Value, warmup_steps: Steps = 1000, *, start: Value = 0.0, rise: Rise = "log") -> Schedule:
    """Return DeepSpeed's WarmupLR: from `start` to `peak` in warmup_steps W (at least 2), then constant.

    With i = t - 1 the rate is start + (peak - start) r, where r is log(i + 1) / log W for rise="log" and i / W for
    rise="linear" while i < W, and 1 after it; for i = -1 it is `start`.
    Raises ValueError for warmup_steps below 1, another rise, and values that are not finite.

    >>> [round(warmup_lr(1.0, 4)(t).item(), 4) for t in range(7)]
    [0.0, 0.0, 0.5, 0.7925, 1.0, 1.0, 1.0]
    """
    warm = _warmup(peak, warmup_steps, start, rise)
    return lambda step: warm(time_of(step) - 1, lambda i: torch.ones_like(i))


@checked()
def warmup_decay_lr(
    peak: Value, warmup_steps: Steps, steps: Steps, *, start: Value = 0.0, rise: Rise = "log"
) -> Schedule:
    """Return DeepSpeed's WarmupDecayLR: `warmup_lr`, then linear from `peak` down to `start` at iteration `steps` N.

    After the warmup r is max(0, (N - i) / max(1, N - W)).
    Raises ValueError as `warmup_lr` does, and for steps below 1.

    >>> [round(warmup_decay_lr(1.0, 2, 6, rise="linear")(t).item(), 4) for t in range(8)]
    [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warm, ramp_steps = _warmup(peak, warmup_steps, start, rise), max(2, warmup_steps)
    return lambda step: warm(time_of(step) - 1, lambda i: ((steps - i) / max(1.0, steps - ramp_steps)).clamp(min=0.0))


@checked()
def warmup_cosine_lr(
    peak: Value, warmup_steps: Steps, steps: Steps, *, start: Finite = 0.0, end: Finite = 1e-4, rise: Rise = "log"
) -> Schedule:
    """Return DeepSpeed's WarmupCosineLR: from start · peak to `peak` in W steps, then half a cosine to end · peak.

    After the warmup the rate is peak (end + (1 - end) (1 + cos π x) / 2) with x = min(1, (i - W + 1) / max(1, N - W)):
    one iteration beyond the peak where it begins. At iteration -1 it is 0.
    start, end: fractions of the peak. Raises ValueError as `warmup_decay_lr` does.

    >>> [round(warmup_cosine_lr(1.0, 2, 6, end=0.0, rise="linear")(t).item(), 4) for t in range(8)]
    [0.0, 0.0, 0.5, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    warm, ramp_steps = _warmup(1.0, warmup_steps, start, rise), max(2, warmup_steps)

    def decay(i: Tensor) -> Tensor:
        x = ((i - ramp_steps + 1) / max(1, steps - ramp_steps)).clamp(max=1.0)
        low = (end + (1 - end) * (1 + torch.cos(math.pi * x)) / 2).clamp(min=0.0)
        return (low - start) / (1 - start)  # `warm` makes it start + (1 - start) r

    def schedule(step: Tensor | int) -> Tensor:
        i = time_of(step) - 1
        return torch.where(i < 0, 0.0, peak * warm(i, decay))

    return schedule


@checked()
def cycle_lr(
    low: Value, peak: Value, rise: Steps, fall: Steps, *, decay_rate: NotNegative = 0.0, decay_steps: StepsFromZero = 0
) -> Schedule:
    """Return DeepSpeed's OneCycle: linear from `low` to `peak` in `rise` steps, and back in `fall` steps.

    After them it is low / (1 + decay_rate n / decay_steps), n steps later; `low` without decay_steps.
    Raises ValueError for rise or fall below 1, a negative decay, and values that are not finite.

    >>> [round(cycle_lr(1.0, 3.0, 2, 2, decay_rate=1.0, decay_steps=2)(t).item(), 4) for t in range(7)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 0.6667, 0.5]
    """
    height, divisor = _cycle(rise, fall, decay_rate, decay_steps)
    return lambda step: (low + (peak - low) * height(step)) / divisor(step)


@checked()
def cycle_momentum(low: Beta, high: float, rise: Steps, fall: Steps) -> Schedule:
    """Return the momentum of DeepSpeed's OneCycle, `high` where the rate of `cycle_lr` is low, and `low` at its peak.

    It is `high` after the cycle, and `low` at step 0, as there.
    Raises ValueError as `cycle_lr` does, and for values outside of [0, 1).

    >>> [round(cycle_momentum(0.8, 0.9, 2, 2)(t).item(), 4) for t in range(6)]
    [0.8, 0.85, 0.8, 0.85, 0.9, 0.9]
    """
    if not low <= high < 1:
        raise ValueError(f"cycle_momentum: high is {high}; it must be from low={low} to below 1")
    height, _ = _cycle(rise, fall)
    return lambda step: torch.where(time_of(step) < 1, low, high - (high - low) * height(step))


def _cycle(rise: int, fall: int, decay_rate: float = 0.0, decay_steps: int = 0) -> tuple[Schedule, Schedule]:
    # (from 0 to 1 and back to 0, 1 + the decay of the steps after it)
    def height(step: Tensor | int) -> Tensor:
        t = time_of(step)
        return torch.minimum(t / rise, (rise + fall - t) / fall).clamp(min=0.0)

    def divisor(step: Tensor | int) -> Tensor:
        overrun = (time_of(step) - rise - fall).clamp(min=0.0)
        return 1 + decay_rate * overrun / decay_steps if decay_steps else torch.ones_like(overrun)

    return height, divisor


def _warmup(peak: Value, warmup_steps: int, start: Value, rise: str) -> Callable[..., Tensor]:
    # (iteration, r of iterations after the warmup) -> start + (peak - start) r
    steps = max(2, warmup_steps)

    def rate(i: Tensor, decay: Callable[[Tensor], Tensor]) -> Tensor:
        iteration = i.clamp(min=0.0)
        risen = torch.log(iteration + 1) / math.log(steps) if rise == "log" else iteration / steps
        return start + (peak - start) * torch.where(iteration < steps, risen, decay(iteration))

    return rate
