"""DeepSpeed's schedules, step for step.

DeepSpeed sets the learning rate after each update, from an iteration that begins at -1: before update t (0 for the
first) it is that of iteration t - 1, and the first two updates have the rate that the warmup begins with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fzero.core.arguments import checked
from fzero.optim.base import Schedule
from fzero.optim.schedules import Value, check_steps, check_values, time_of

RISES = ("log", "linear")


@checked()
def warmup_lr(peak: Value, warmup_steps: int = 1000, *, start: Value = 0.0, rise: str = "log") -> Schedule:
    """Return DeepSpeed's WarmupLR: from `start` to `peak` in warmup_steps W (at least 2), then constant.

    With i = t - 1 the rate is start + (peak - start) r, where r is log(i + 1) / log W for rise="log" and i / W for
    rise="linear" while i < W, and 1 after it; for i = -1 it is `start`.
    Raises ValueError for warmup_steps below 1, another rise, and values that are not finite.

    >>> [round(warmup_lr(1.0, 4)(t).item(), 4) for t in range(7)]
    [0.0, 0.0, 0.5, 0.7925, 1.0, 1.0, 1.0]
    """
    warm = _warmup("warmup_lr", peak, warmup_steps, start, rise)
    return lambda step: warm(time_of(step) - 1, lambda i: torch.ones_like(i))


@checked()
def warmup_decay_lr(peak: Value, warmup_steps: int, steps: int, *, start: Value = 0.0, rise: str = "log") -> Schedule:
    """Return DeepSpeed's WarmupDecayLR: `warmup_lr`, then linear from `peak` down to `start` at iteration `steps` N.

    After the warmup r is max(0, (N - i) / max(1, N - W)).
    Raises ValueError as `warmup_lr` does, and for steps below 1.

    >>> [round(warmup_decay_lr(1.0, 2, 6, rise="linear")(t).item(), 4) for t in range(8)]
    [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    check_steps("warmup_decay_lr", 1, steps=steps)
    warm, least = _warmup("warmup_decay_lr", peak, warmup_steps, start, rise), max(2, warmup_steps)
    return lambda step: warm(time_of(step) - 1, lambda i: ((steps - i) / max(1.0, steps - least)).clamp(min=0.0))


@checked()
def warmup_cosine_lr(
    peak: Value, warmup_steps: int, steps: int, *, start: float = 0.0, end: float = 1e-4, rise: str = "log"
) -> Schedule:
    """Return DeepSpeed's WarmupCosineLR: from start · peak to `peak` in W steps, then half a cosine to end · peak.

    After the warmup the rate is peak (end + (1 - end) (1 + cos π x) / 2) with x = min(1, (i - W + 1) / max(1, N - W)):
    one iteration beyond the peak where it begins. At iteration -1 it is 0.
    start, end: fractions of the peak. Raises ValueError as `warmup_decay_lr` does.

    >>> [round(warmup_cosine_lr(1.0, 2, 6, end=0.0, rise="linear")(t).item(), 4) for t in range(8)]
    [0.0, 0.0, 0.5, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    check_steps("warmup_cosine_lr", 1, steps=steps)
    check_values("warmup_cosine_lr", end=end)
    warm, least = _warmup("warmup_cosine_lr", 1.0, warmup_steps, start, rise), max(2, warmup_steps)

    def after(i: Tensor) -> Tensor:
        x = ((i - least + 1) / max(1, steps - least)).clamp(max=1.0)
        low = (end + (1 - end) * (1 + torch.cos(math.pi * x)) / 2).clamp(min=0.0)
        return (low - start) / (1 - start)  # `warm` makes it start + (1 - start) r

    def schedule(step: Tensor | int) -> Tensor:
        i = time_of(step) - 1
        return torch.where(i < 0, 0.0, peak * warm(i, after))

    return schedule


def _warmup(owner: str, peak: Value, warmup_steps: int, start: Value, rise: str) -> Callable[..., Tensor]:
    # (iteration, r of iterations after the warmup) -> start + (peak - start) r
    check_steps(owner, 1, warmup_steps=warmup_steps)
    check_values(owner, peak=peak, start=start)
    if rise not in RISES:
        raise ValueError(f"{owner}: rise is {rise!r}; it must be one of {', '.join(RISES)}")
    steps = max(2, warmup_steps)

    def rate(i: Tensor, after: Callable[[Tensor], Tensor]) -> Tensor:
        now = i.clamp(min=0.0)
        risen = torch.log(now + 1) / math.log(steps) if rise == "log" else now / steps
        return start + (peak - start) * torch.where(now < steps, risen, after(now))

    return rate
