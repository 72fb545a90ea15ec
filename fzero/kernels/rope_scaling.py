"""The settings of a scaling of RoPE, for contexts longer than those that a model was trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import check_bounds
from fzero.core.text_parsing import nearest

USUAL_ENDS = {"llama3": ["1", "4"], "yarn": ["1", "32"], "yarn_whole": ["1", "32"]}
SCALINGS = tuple(USUAL_ENDS)


@dataclass(frozen=True)
class RopeScaling:
    """The settings of a scaling of RoPE, which divides the frequencies of long wavelengths by `factor`.

    Wavelengths above original_max_len / low_freq_factor are scaled, those below original_max_len / high_freq_factor are
    not, with a transition between. kind: "llama3", whose transition is linear in 1 / wavelength; "yarn", where it is
    linear in the number of the pair, and attention's scores are multiplied by `score_factor`; "yarn_whole", the same
    with both ends of the transition rounded outwards to whole pairs, as most models have it.

    >>> from fzero.kernels import rope_frequencies
    >>> rope_frequencies(4, 10000.0, RopeScaling(factor=8.0))[0]  # a short wavelength keeps its frequency
    tensor(1.)

    Ref: Grattafiori et al. 2024, "The Llama 3 herd of models", arXiv:2407.21783, section 3.4.2; Peng et al. 2023,
    "YaRN", arXiv:2309.00071, sections 3.2 and 3.4.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    kind: str = "llama3"

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """The scaling that divides all frequencies: every wavelength is above one position."""
        return cls(factor, 1.0, 2.0, 1)

    @classmethod
    def parse(cls, text: str) -> RopeScaling | None:
        """The scaling of a text: linear:FACTOR, KIND:FACTOR:LENGTH with the length before it (original_max_len), or
        KIND:FACTOR:LENGTH:LOW:HIGH, with KIND llama3, yarn or yarn_whole; None for none. The inverse of str.

        >>> str(RopeScaling.parse("linear:4")), str(RopeScaling.parse("llama3:8:8192"))
        ('linear:4', 'llama3:8:8192')
        """
        kind, *numbers = text.split(":")
        try:
            if text == "none":
                return None
            if kind == "linear" and len(numbers) == 1:
                return cls.linear(float(numbers[0]))
            if kind in SCALINGS and len(numbers) in (2, 4):
                low, high = (float(x) for x in numbers[2:] or USUAL_ENDS[kind])
                return cls(float(numbers[0]), low, high, int(numbers[1]), kind)
        except ValueError as error:
            raise ValueError(f"the scaling of RoPE is {text!r}: {error}") from None
        raise ValueError(
            f"the scaling of RoPE is {text!r}; it must be linear:FACTOR, llama3:FACTOR:LENGTH or yarn:FACTOR:LENGTH "
            "with the length that the model was trained with before, or none"
        )

    def __str__(self) -> str:
        factor, *ends = (repr(x).removesuffix(".0") for x in (self.factor, self.low_freq_factor, self.high_freq_factor))
        if self == RopeScaling.linear(self.factor):
            return f"linear:{factor}"
        return ":".join(
            [self.kind, factor, str(self.original_max_len), *(ends if ends != USUAL_ENDS[self.kind] else [])]
        )

    @property
    def is_linear(self) -> bool:
        """Whether it divides all frequencies."""
        return self.kind == "llama3" and 2.0 * math.pi * self.low_freq_factor > self.original_max_len

    @property
    def score_factor(self) -> float:
        """The factor of attention's scores: of "yarn" that of equation 22, for queries and for keys; else 1."""
        return 1.0 if self.kind == "llama3" else (0.1 * math.log(self.factor) + 1.0) ** 2

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.kind not in SCALINGS:
            raise ValueError(f"kind is {self.kind!r}{nearest(self.kind, SCALINGS)}; it must be {' or '.join(SCALINGS)}")
        check_bounds("factor", self.factor, (1, True, 1e6))
        check_bounds("low_freq_factor", self.low_freq_factor, (0.0, False, 1e6))
        check_bounds("high_freq_factor", self.high_freq_factor, (0.0, False, 1e6))
        check_bounds("original_max_len", self.original_max_len, (1, True, 1e9))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor:g}; it must be above low_freq_factor="
                f"{self.low_freq_factor:g}"
            )
