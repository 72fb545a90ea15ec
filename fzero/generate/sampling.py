"""How the tokens of a request are drawn, and when it ends, as one checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import COUNT, FRACTION, POSITIVE, RATE, SEED, SIZE, Allowed, Bounds, check_bounds

Finite = Annotated[float, Allowed(math.isfinite, "a finite number")]
CLOSED_FRACTION: Bounds = (*FRACTION[:3], True)
BOUNDS: dict[str, Bounds] = {
    **{"temperature": RATE, "top_k": COUNT, "top_p": (0.0, False, 1.0, True), "min_p": CLOSED_FRACTION},
    **{"repetition": POSITIVE, "min_tokens": COUNT, "max_tokens": SIZE, "n": SIZE, "seed": SEED, "alternatives": COUNT},
}


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits, in this order: bias; repetition, frequency and presence penalties; what
    min_tokens and a grammar forbid; temperature; min_p; top_k; top_p. Checked: raises ValueError.

    It is the order of vLLM. Transformers has min_p behind top_p: what min_p leaves is what top_p counts here.

    >>> Sampling(0.7, top_p=0.9, stop=("\\n\\n",)).top_k
    0
    >>> Sampling(0.0, top_k=5)
    Traceback (most recent call last):
    ValueError: top_k is 5 and temperature 0, which takes the likeliest token; leave top_k out, or give a temperature \
above 0

    Ref: top_p: Holtzman et al. 2020, section 3.1; min_p: Nguyen et al. 2024, arXiv:2407.01082; repetition: Keskar et
    al. 2019, arXiv:1909.05858, section 4.1.
    """

    temperature: float = 1.0  # the logits are divided by it; 0 takes the likeliest token
    top_k: int = 0  # draw among the k likeliest, and those that are as likely as the last; 0: all
    top_p: float = 1.0  # among the fewest whose probabilities add up to it
    min_p: float = 0.0  # among those at least so likely beside the likeliest
    # above 1: of a token of prompt or text so far, a logit above 0 is divided by it and one below multiplied
    repetition: float = 1.0
    presence: Finite = 0.0  # subtracted from the logit of a token that the text so far has; the prompt does not count
    frequency: Finite = 0.0  # the same for each time that it has it
    bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to the logits of these ids
    stop_ids: tuple[int, ...] = ()  # ids that end the text, beside the model's end of text
    stop: tuple[str, ...] = ()  # texts that end it
    include_stop: bool = False  # whether the text has the stop text
    ignore_eos: bool = False  # whether the model's end of text does not end it
    min_tokens: int = 0  # before so many drawn tokens, no id that ends the text is drawn
    max_tokens: int | None = None  # the most drawn tokens; None: what the model has room for
    n: int = 1  # samples a prompt
    seed: int = 0  # of all its draws, with the numbers of request, sample and position
    alternatives: int = 0  # the log-probabilities of so many likeliest tokens beside each drawn one

    def __post_init__(self) -> None:
        expect_fields(self)
        object.__setattr__(self, "bias", dict(self.bias))
        for name, bounds in BOUNDS.items():
            if getattr(self, name) is not None:
                check_bounds(name, getattr(self, name), bounds)
        for number, token in enumerate(self.stop_ids):
            check_bounds(f"stop_ids[{number}]", token, COUNT)
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0 or self.min_p):
            name = "top_k" if self.top_k else "top_p" if self.top_p < 1.0 else "min_p"
            raise ValueError(
                f"{name} is {getattr(self, name)} and temperature 0, which takes the likeliest token; leave {name} "
                "out, or give a temperature above 0"
            )
        for token, value in self.bias.items():
            if type(token) is not int or token < 0 or not value < math.inf:
                raise ValueError(
                    f"bias has {token!r}: {value!r}; it must be a token's id and a number, or -inf, which forbids it"
                )
        for number, text in enumerate(self.stop):
            if not text:
                raise ValueError(f"stop[{number}] is empty, which would end every text at once; leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; it must be at most that"
            )

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def limits(self) -> bool:
        """Whether it draws among some of the tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def expect_vocabulary(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError if an id of `bias` or `stop_ids` is not below vocab_size.

    >>> expect_vocabulary(Sampling(stop_ids=(300,)), 256)
    Traceback (most recent call last):
    ValueError: stop_ids has 300; the vocabulary has the ids 0 to 255
    """
    for name, ids in (("bias", sampling.bias), ("stop_ids", sampling.stop_ids)):
        for token in ids:
            if token >= vocab_size:
                raise ValueError(f"{name} has {token}; the vocabulary has the ids 0 to {vocab_size - 1}")
