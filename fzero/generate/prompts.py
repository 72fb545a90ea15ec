"""The prompts of a call, what they share, and a completion: values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import AtLeastOne, Count, check_choice
from fzero.generate.drafts import Draft
from fzero.generate.grammar import Grammar, GrammarTokens
from fzero.generate.pages import CACHES, PAGE_TOKENS
from fzero.generate.sampling import Sampling
from fzero.kernels.registry import Kernels

Guess = Callable[[Sequence[int], int], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, how its tokens are drawn, and what is wanted beside them.

    >>> Prompt((1, 2), Sampling(0.0, max_tokens=3)).number
    0
    """

    ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    number: Count = 0  # of its draws' keys: the same number, seed and ids give the same tokens in any batch
    log_probs: bool = False  # whether those of its own tokens are wanted
    grammar: Grammar | None = None  # what its text must be; with GenerateOptions(grammar_tokens=...)
    skip: frozenset[int] = frozenset()  # the samples that are not made, as they are there already

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))


@dataclass(frozen=True)
class GenerateOptions:
    """What all prompts of a call share.

    >>> GenerateOptions(rows=4).page_tokens
    16
    """

    rows: AtLeastOne = 32  # sequences that run at a time
    tokens: AtLeastOne = 512  # of a step: those that draw, and chunks of prompts
    pages: AtLeastOne | None = None  # None: as many as the longest `rows` sequences need
    page_tokens: AtLeastOne = PAGE_TOKENS
    prefixes: bool = True  # whether prompts that begin alike share pages
    kernels: str = "auto"  # the form of each operation; "canonical": log-probs are the bits of training's
    cache: str = "auto"  # what keys and values are in: "int8" and "fp8" (e4m3) with a scale for each position and head
    vocab_size: AtLeastOne | None = None  # only ids below are drawn
    ends: tuple[int, ...] = ()  # the ids that end a text
    decode: Decode | None = None  # the text of ids, of the tokenizer: for stop texts, and the text of a completion
    grammar_tokens: GrammarTokens | None = None  # of the tokenizer, for prompts with a grammar
    guesses: Count = 0  # tokens of a sequence that one step may verify, see `lookup`
    guess: Guess | None = None  # (ids so far, most) -> ids that may follow; None: `lookup`
    draft: Draft | None = None  # a smaller model that guesses them
    device: str | None = None  # of the computation; None: that of the parameters, or cpu if none is in memory

    def __post_init__(self) -> None:
        expect_fields(self)
        check_choice("cache", self.cache, CACHES)
        if self.cache != "auto":
            Kernels.parse(self.kernels).refuse(f"a cache in {self.cache}")
        if self.draft is not None and self.guess is not None:
            raise ValueError("GenerateOptions: guess and draft are there; give one of them")
        if self.draft is not None and not self.guesses:
            raise ValueError(
                "GenerateOptions: guesses is 0, and draft guesses; give the tokens that a step verifies, as 4"
            )


class Completion(NamedTuple):
    """What was drawn after a prompt.

    log_probs are of the model's whole distribution at temperature 1; drawn_log_probs of the one that was drawn from,
    behind penalties, temperature and limits; mass is what top_k, top_p and min_p left of it. All are natural
    logarithms, one for each drawn token. alternatives: the likeliest (id, log-prob) of each. prompt_log_probs: of the
    prompt's tokens but its first, if asked for.

    >>> Completion(0, 0, (7, 2), "a text", "stop id", (-1.5, -0.5), (-1.0, -0.25), (1.0, 0.9)).finish
    'stop id'
    """

    number: int  # of the prompt
    sample: int
    ids: tuple[int, ...]  # the one that ended the text too
    text: str  # without what ended it; "" without `decode`
    finish: str  # why it ended: "stop id", "stop text" or "length"
    log_probs: tuple[float, ...]
    drawn_log_probs: tuple[float, ...]
    mass: tuple[float, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
