"""What the value of a key may be: refused otherwise, by name, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, NamedTuple

from fzero.core.text_parsing import nearest, short

INF = math.inf
# The lower bound, whether it is allowed, the upper bound, and, where it is allowed as well, True.
Bounds = tuple[float, bool, float] | tuple[float, bool, float, bool]
POSITIVE: Bounds = (0.0, False, INF)
COUNT: Bounds = (0, True, INF)
RATE: Bounds = (0.0, True, INF)
FRACTION: Bounds = (0.0, True, 1.0)
SIZE: Bounds = (1, True, INF)
SEED: Bounds = (0, True, 2**64)
STAGE: Bounds = (0, True, 4)  # of ZeRO
LENGTH: Bounds = (1, True, 1e9)  # of a sequence, in tokens
MEMORY_GB: Bounds = (0.0, False, 1e6)
FLOAT32_LARGEST = 3.4e38  # numbers without another upper bound are below it: float32 has no more
WHOLE = 2**63  # whole numbers without another upper bound are below it: more does not fit into a tensor or a file
POWERS: dict[float, str] = {2**63: "2^63", 2**64: "2^64"}


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """Raise ValueError if `value` is outside of `bounds`, or not a number.

    >>> check_bounds("lr", -1.0, RATE)
    Traceback (most recent call last):
    ValueError: lr is -1.0; it must be at least 0
    """
    low, with_low, high = bounds[:3]
    with_high, endless = len(bounds) == 4 and bounds[3], high == INF
    if endless:
        high = WHOLE if isinstance(value, int) else FLOAT32_LARGEST
    if (low <= value if with_low else low < value) and (value <= high if with_high else value < high):
        return
    upper_text = f" and {'at most' if with_high else 'below'} {_shown(high)}"
    if endless:  # an end that no number reaches is named to those alone which are beyond it
        upper_text = ", and a finite number" if not math.isfinite(value) else upper_text if value >= high else ""
    raise ValueError(
        f"{name} is {short(value)}; it must be {'at least' if with_low else 'above'} {_shown(low)}{upper_text}"
    )


def _shown(bound: float) -> str:
    """The text of a bound, short where that is the same number."""
    text = POWERS.get(bound) or format(bound, "g")
    return text if bound in POWERS or float(text) == bound else repr(bound)


class Within(NamedTuple):
    """Of a number: its bounds."""

    bounds: Bounds


class Allowed(NamedTuple):
    """Of an argument or a field: the values that it may have, and the words for them; None passes.

    >>> Allowed(lambda n: n >= 1, "at least 1").check("sgd: steps", 0)
    Traceback (most recent call last):
    ValueError: sgd: steps is 0; it must be at least 1
    """

    holds: Callable[[Any], bool]
    words: str

    def check(self, label: str, value: Any) -> None:
        """Raise ValueError, naming the argument by `label`, unless it may have this value."""
        if value is not None and not self.holds(value):
            raise ValueError(f"{label} is {value!r}; it must be {self.words}")


def one_of(names: Iterable[Any], words: str = "") -> Allowed:
    """The rule that a value is one of these."""
    choices = tuple(names)
    return Allowed(lambda value: value in choices, words or f"one of {', '.join(map(str, choices))}")


def at_least(low: int) -> Allowed:
    """The rule of a whole number."""
    return Allowed(lambda number: number >= low, f"a whole number of at least {low}")


def power_of_two(low: int, high: int) -> Allowed:
    """The rule of a power of two from `low` to `high`."""
    return Allowed(lambda n: low <= n <= high and not n & (n - 1), f"a power of two from {low} to {high}")


AtLeastOne = Annotated[int, at_least(1)]


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError naming the nearest choice if `value` is not among `choices`."""
    if value not in choices:
        texts = [str(choice).lower() if isinstance(choice, bool) else choice for choice in choices]
        raise ValueError(f"{name} is {value!r}{nearest(str(value), texts)}; it must be one of {', '.join(texts)}")


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The function that refuses what `parse` refuses, except an empty text."""
    return lambda text: parse(text) if text else None


# Types of numbers with their bounds.
Amount = Annotated[int, Within((1, True, 1e12))]
Count = Annotated[int, Within(COUNT)]
Size = Annotated[int, Within(SIZE)]
Rate = Annotated[float, Within(RATE)]
Positive = Annotated[float, Within(POSITIVE)]
Fraction = Annotated[float, Within(FRACTION)]
Share = Annotated[float, Within((0.0, False, 1.0))]
