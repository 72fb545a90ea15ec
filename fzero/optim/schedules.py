"""Schedules: pure functions of the step, such as learning rates.

A schedule takes the number of steps made before (an int, or an integer tensor of any shape) and returns a float64
tensor of that shape. Peak, start and end may be tensors, so that schedules can be batched by torch.func.vmap too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import checked, expect_count, expect_hint
from fzero.core.config_tables import Allowed, one_of
from fzero.optim.base import Schedule

FINITE = Allowed(lambda x: isinstance(x, Tensor) or math.isfinite(x), "a finite number")
Value = Annotated[float | Tensor, FINITE]
Finite = Annotated[float, FINITE]
PartOfSteps = Annotated[Finite, Allowed(lambda x: 0 < x < 1, "a fraction of the steps in (0, 1)")]
AboveZero = Annotated[Finite, Allowed(lambda x: x > 0, "> 0")]
Steps = Annotated[int, Allowed(lambda n: n >= 1, "a whole number of steps >= 1")]
StepsFromZero = Annotated[int, Allowed(lambda n: n >= 0, "a whole number of steps >= 0")]


def time_of(step: Tensor | int) -> Tensor:
    """The step as float64, 0-dim for an int."""
    return step.to(torch.float64) if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float64)


def _fraction(step: Tensor | int, steps: int) -> Tensor:
    return (time_of(step) / steps).clamp(0.0, 1.0)


@checked()
def constant(value: Value) -> Schedule:
    """Return the schedule that has `value` at every step.

    Raises ValueError for a value that is not finite.

    >>> constant(3e-4)(1000)
    tensor(0.0003, dtype=torch.float64)
    """
    return lambda step: torch.zeros_like(time_of(step)) + value


@checked()
def linear(start: Value, end: Value, steps: Steps) -> Schedule:
    """Return the schedule that is linear from `start` at step 0 to `end` at step `steps`, and constant after it.

        start + (end - start) min(1, t / steps)

    Raises ValueError for steps below 1 and values that are not finite.

    >>> linear(1.0, 0.0, steps=4)(torch.arange(6)).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return lambda step: start + (end - start) * _fraction(step, steps)


@checked()
def polynomial(start: Value, end: Value, steps: Steps, power: AboveZero) -> Schedule:
    """Return the schedule that goes from `start` to `end` as a power of the steps left, and is constant after `steps`.

        end + (start - end) (1 - min(1, t / steps))^power

    Raises ValueError for steps below 1, a power that is not above 0, and values that are not finite.

    >>> polynomial(1.0, 0.0, steps=4, power=2)(torch.arange(6)).tolist()
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    return lambda step: end + (start - end) * (1 - _fraction(step, steps)) ** power


@checked()
def cosine(start: Value, steps: Steps, end: Value = 0.0) -> Schedule:
    """Return the schedule that follows half a cosine from `start` at step 0 to `end` at step `steps`, then is constant.

        end + (start - end) (1 + cos(π min(1, t / steps))) / 2

    Raises ValueError for steps below 1 and values that are not finite.

    >>> [round(cosine(1.0, steps=6)(t).item(), 4) for t in (0, 2, 3, 4, 6, 9)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    Ref: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, equation 5, without restarts.
    """
    return lambda step: end + (start - end) * (1 + torch.cos(math.pi * _fraction(step, steps))) / 2


@checked()
def exponential(start: Value, rate: AboveZero, steps: Steps) -> Schedule:
    """Return the schedule that begins at `start` and is multiplied by `rate` every `steps` steps, without an end.

        start rate^(t / steps)

    Raises ValueError for steps below 1, a rate that is not above 0, and values that are not finite.

    >>> [round(exponential(1.0, rate=0.5, steps=10)(t).item(), 4) for t in (0, 10, 15, 20)]
    [1.0, 0.5, 0.3536, 0.25]
    """
    return lambda step: start * torch.exp(time_of(step) / steps * math.log(rate))


@checked()
def inverse_sqrt(start: Value, scale: Steps) -> Schedule:
    """Return the schedule that falls from `start` like one over the square root of the step.

        start √(scale / (t + scale))

    `warmup(inverse_sqrt(peak, w), w)` is peak min(t / w, √(w / t)), the schedule of Vaswani et al. 2017,
    arXiv:1706.03762, section 5.3.
    Raises ValueError for a scale below 1 and a start that is not finite.

    >>> inverse_sqrt(1.0, scale=100)(torch.tensor([0, 300, 1500])).tolist()
    [1.0, 0.5, 0.25]
    """
    return lambda step: start * (scale / (time_of(step).clamp(min=0.0) + scale)).sqrt()


@checked()
def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return the schedule that follows the first of `schedules` before step boundaries[0], then the second, and so on.

    Each of them counts from its own first step: the second is at its step 0 at step boundaries[0].
    Raises ValueError unless there is one boundary fewer than schedules and the boundaries are >= 0 and ascend.

    >>> join([constant(1.0), linear(1.0, 0.0, steps=2)], [3])(torch.arange(6)).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join: {len(schedules)} schedules and {len(boundaries)} boundaries; there must be one boundary "
            "between each two schedules"
        )
    for i, boundary in enumerate(boundaries):
        expect_hint(f"join: boundaries[{i}]", boundary, StepsFromZero)
    if list(boundaries) != sorted(boundaries):
        raise ValueError(f"join: boundaries are {list(boundaries)}; they must ascend")

    def schedule(step: Tensor | int) -> Tensor:
        t = time_of(step)
        value = schedules[0](t)
        for successor, boundary in zip(schedules[1:], boundaries):
            value = torch.where(t < boundary, value, successor(t - boundary))
        return value

    return schedule


@checked()
def by_tokens(schedule: Schedule, rates: Sequence[tuple[int, int]]) -> Schedule:
    """Return `schedule`, a function of the tokens before a step, as a function of the steps before it.

    rates: (the first step of a part of the run, the tokens of each of its steps), as a batch or a length that grows
    makes several parts. Raises ValueError unless the first begins at step 0, the others after one another, and all have
    tokens.

    >>> by_tokens(linear(1.0, 0.0, steps=80), [(0, 10), (2, 20)])(torch.arange(6)).tolist()
    [1.0, 0.875, 0.75, 0.5, 0.25, 0.0]
    """
    begins = [begin for begin, _ in rates]
    for begin, rate in rates:
        expect_hint("by_tokens: begin", begin, StepsFromZero)
        expect_hint("by_tokens: rate", rate, Steps)
    if not begins or begins[0] != 0 or any(not a < b for a, b in itertools.pairwise(begins)):
        raise ValueError(f"by_tokens: rates begin at the steps {begins}; they must ascend from 0")
    steeper = [rate - previous for (_, rate), previous in zip(rates, [0, *(rate for _, rate in rates)])]

    def of_step(step: Tensor | int) -> Tensor:
        t = time_of(step)
        tokens = t * steeper[0]
        for begin, increase in zip(begins[1:], steeper[1:]):
            tokens = tokens + (t - begin).clamp(min=0.0) * increase
        return schedule(tokens)

    return of_step


@checked()
def warmup(schedule: Schedule, steps: StepsFromZero, start: Value = 0.0) -> Schedule:
    """Return `schedule` after a warmup: a straight line from `start` at step 0 to `schedule(0)` at step `steps`.

    From step `steps` on `schedule` runs, counting from 0. With steps=0 it is `schedule` itself.
    Raises ValueError for negative steps and a start that is not finite.

    >>> warmup(linear(1.0, 0.0, steps=2), steps=4)(torch.arange(7)).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    """
    if steps == 0:
        return schedule

    def rise(step: Tensor | int) -> Tensor:
        x = _fraction(step, steps)
        return start + (schedule(torch.zeros_like(x)) - start) * x

    return join([rise, schedule], [steps])


@checked()
def warmup_cosine(peak: Value, warmup_steps: StepsFromZero, steps: Steps, end: Value = 0.0) -> Schedule:
    """Return the schedule of a warmup from 0 to `peak` in `warmup_steps`, and a cosine to `end` at step `steps`.

    steps: of the whole run, warmup included; see `warmup` and `cosine`.
    Raises ValueError when the warmup is not shorter than the run.

    >>> schedule = warmup_cosine(1.0, warmup_steps=2, steps=8)
    >>> [round(schedule(t).item(), 4) for t in (0, 1, 2, 4, 5, 6, 8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if warmup_steps >= steps:
        raise ValueError(
            f"warmup_cosine: warmup_steps={warmup_steps} leaves nothing of steps={steps}; it must be smaller"
        )
    return warmup(cosine(peak, steps - warmup_steps, end), warmup_steps)


@checked()
def one_cycle(
    peak: Value,
    steps: Steps,
    rise: PartOfSteps = 0.3,
    start_div: Finite = 25.0,
    end_div: Finite = 1e4,
) -> Schedule:
    """Return the schedule that rises along a cosine to `peak` at step rise · steps, then falls along one to the end.

    It begins at peak / start_div, and is peak / (start_div · end_div) from step `steps` on.
    Raises ValueError when `rise` is outside (0, 1) or a divisor is not positive.
    Differs from torch.optim.lr_scheduler.OneCycleLR: its phases end one step earlier (at rise · steps - 1 and
    steps - 1).

    >>> schedule = one_cycle(1.0, steps=10)
    >>> [round(schedule(t).item(), 6) for t in (0, 3, 10)]
    [0.04, 1.0, 4e-06]

    Ref: Smith and Topin 2018, "Super-convergence", arXiv:1708.07120.
    """
    if not (start_div > 0 and end_div > 0):
        raise ValueError(f"one_cycle: start_div is {start_div!r} and end_div is {end_div!r}; both must be > 0")
    low, top = peak / start_div, rise * steps

    def schedule(step: Tensor | int) -> Tensor:
        t = time_of(step)
        ascent = low + (peak - low) * (1 - torch.cos(math.pi * (t / top).clamp(0.0, 1.0))) / 2
        x = ((t - top) / (steps - top)).clamp(0.0, 1.0)
        descent = low / end_div + (peak - low / end_div) * (1 + torch.cos(math.pi * x)) / 2
        return torch.where(t < top, ascent, descent)

    return schedule


# The part of peak - end that is left when the fraction x of the decay is over.
_DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - x.sqrt(),
    "cosine": lambda x: (1 + torch.cos(math.pi * x)) / 2,
}


LR_SCALE = "lr_scale"  # the name of the factor in a state


@checked()
def wsd(
    peak: Value,
    steps: Steps,
    warmup_steps: StepsFromZero,
    decay_steps: StepsFromZero,
    *,
    end: Value = 0.0,
    decay: Annotated[str, one_of(_DECAYS)] = "linear",
) -> Schedule:
    """Return the warmup-stable-decay schedule: linear from 0 to `peak`, constant, then down to `end` at step `steps`.

    steps: of the whole run. warmup_steps: the first ones, which rise. decay_steps: the last ones, which fall.

    With x the fraction of the decay that is over, the remaining fraction of peak - end is 1 - x ("linear"), 1 - √x
    ("sqrt") or (1 + cos πx) / 2 ("cosine").
    Raises ValueError when warmup and decay are longer than the run, and for an unknown decay.

    >>> wsd(1.0, steps=8, warmup_steps=2, decay_steps=4)(torch.arange(9)).tolist()
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]

    Ref: Hu et al. 2024, "MiniCPM", arXiv:2404.06395, section 4; Hägele et al. 2024, arXiv:2405.18392, for 1 - √x.
    """
    if warmup_steps + decay_steps > steps:
        raise ValueError(
            f"wsd: warmup_steps={warmup_steps} and decay_steps={decay_steps} are longer than steps={steps}; "
            f"shorten one by {warmup_steps + decay_steps - steps}"
        )
    if decay_steps == 0:
        return warmup(constant(peak), warmup_steps)

    def fall(step: Tensor | int) -> Tensor:
        return end + (peak - end) * _DECAYS[decay](_fraction(step, decay_steps))

    return join([warmup(constant(peak), warmup_steps), fall], [steps - decay_steps])


class Intervals(NamedTuple):
    """Which steps sum, from step `freeze` on: each `every`-th; with `double` the distance doubles up to `every`.

    >>> intervals = Intervals(freeze=2, every=4, double=4)
    >>> [count for count in range(2, 18) if intervals.sums(torch.tensor(count))]
    [2, 3, 4, 5, 7, 9, 13, 17]
    """

    freeze: int
    every: int
    double: int = 0

    def check(self, owner: str) -> Intervals:
        """The same, if they go together."""
        expect_count(f"{owner}: sum_every", self.every)
        expect_count(f"{owner}: sum_double", self.double, minimum=0)
        if self.double and (self.double % self.every or self.every & (self.every - 1)):
            raise ValueError(
                f"{owner}: sum_double is {self.double} and sum_every {self.every}; the latter must be a power of two, "
                "and divide the former"
            )
        return self

    def sums(self, count: Tensor) -> Tensor:
        """Whether the step after `count` others sums."""
        step = count - self.freeze
        if not self.double:
            return (step + 1) % self.every == 0
        length = (2 ** (step // self.double).clamp(0, 30)).clamp(max=self.every)
        return (step % self.double + 1) % length == 0

    def count_sums(self, steps: int) -> int:
        """The sums from step `freeze` up to the end of a run of so many steps.

        >>> Intervals(freeze=2, every=4, double=4).count_sums(18)
        8
        """
        remaining, total, length = max(0, steps - self.freeze), 0, 1 if self.double else self.every
        while length < self.every and remaining > self.double:
            total, remaining, length = total + self.double // length, remaining - self.double, 2 * length
        return total + remaining // length


RISES = ("log", "linear")
