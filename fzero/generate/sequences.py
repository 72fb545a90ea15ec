"""The samples of prompts while their tokens are drawn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fzero.generate.grammar import GrammarState, advance, grammar_mask, start_grammar
from fzero.generate.page_pool import Ids
from fzero.generate.pages import text_sizes
from fzero.generate.prompts import Completion, GenerateOptions, Prompt
from fzero.generate.rows import DrawRow
from fzero.generate.sampling import expect_vocabulary
from fzero.generate.stops import StopRules, StopState, feed, start_text, stop_rules
from fzero.models import Model


@dataclass
class SampleText:
    """A sample of a prompt while it is made."""

    prompt: Prompt
    sample: int
    new_tokens: int
    rules: StopRules
    state: StopState
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    columns: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)  # of the prompt's tokens, by position
    grammar: GrammarState | None = None
    grammar_path: dict[Ids, tuple[GrammarState, Tensor] | None] = field(default_factory=dict)  # see `follow`

    def draw_row(self, guessed: Sequence[int]) -> DrawRow:
        """The draw of the token behind the drawn ones and these guesses."""
        guesses = tuple(guessed)
        output = (*self.ids, *guesses)
        position = len(self.prompt.ids) + len(output)
        numbers = position, self.prompt.number, self.sample
        path = self.follow(guesses) if self.grammar else None
        return DrawRow(self.prompt.sampling, *numbers, self.prompt.ids, output, tuple(self.rules.ids), path and path[1])

    def follow(self, guesses: Ids) -> tuple[GrammarState, Tensor] | None:
        """The grammar's state behind guesses, and its mask; None if one is forbidden, or only an end may follow."""
        assert self.grammar is not None
        if not guesses and not self.grammar_path:
            self.grammar_path[()] = self.grammar, grammar_mask(self.grammar)
        if guesses not in self.grammar_path:
            path, self.grammar_path[guesses] = self.follow(guesses[:-1]), None
            with contextlib.suppress(ValueError):
                if path and guesses[-1] not in self.rules.ids:
                    state = advance(path[0], guesses[-1])
                    mask, bias = grammar_mask(state), self.prompt.sampling.bias
                    excluded = (*self.rules.ids, *(i for i, value in bias.items() if value == -math.inf))
                    choices = mask.clone()
                    choices[[i for i in excluded if i < len(mask)]] = False
                    if choices.any():
                        self.grammar_path[guesses] = state, mask
        return self.grammar_path[guesses]

    def allowed(self, guesses: Ids) -> Ids:
        """The first guesses, behind which a draw goes on."""
        counts = (i for i in range(len(guesses)) if self.grammar and self.follow(guesses[: i + 1]) is None)
        return guesses[: next(counts, len(guesses))]

    def add(self, token: int, numbers: Sequence[float], alternatives: tuple[tuple[int, float], ...]) -> None:
        """One more token."""
        self.ids.append(token)
        self.grammar_path.clear()
        for column, number in zip(self.columns, numbers):
            column.append(number)
        if self.prompt.sampling.alternatives:
            self.alternatives.append(alternatives[: self.prompt.sampling.alternatives])
        self.state, text, _ = feed(self.rules, self.state, [token])
        self.texts.append(text)
        if self.grammar is not None and not self.state.reason:
            self.grammar = advance(self.grammar, token)

    def completion(self) -> Completion:
        """The value of an ended sequence."""
        log_probs, drawn_log_probs, mass = map(tuple, self.columns)
        scores = tuple(self.scores[i] for i in range(1, len(self.prompt.ids))) if self.prompt.log_probs else ()
        return Completion(
            number=self.prompt.number,
            sample=self.sample,
            ids=tuple(self.ids),
            text="".join(self.texts),
            finish=self.state.reason,
            log_probs=log_probs,
            drawn_log_probs=drawn_log_probs,
            mass=mass,
            alternatives=tuple(self.alternatives),
            prompt_log_probs=scores,
        )


def expect_tokens(label: str, ids: Ids, vocab: int) -> None:
    """Raise ValueError for an id outside of the vocabulary."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"{label} has the token {token!r}; the model has the ids 0 to {vocab - 1}")


def _expect_prompt(prompt: Prompt, options: GenerateOptions, vocab: int, max_len: int) -> None:
    """Raise ValueError for a prompt that cannot be continued."""
    label, count = f"prompt {prompt.number}", prompt.sampling.max_tokens or 1
    if not prompt.ids:
        raise ValueError(f"{label} has no tokens; give at least one")
    expect_tokens(label, prompt.ids, vocab)
    remaining = max_len - len(prompt.ids)
    if remaining < count:
        fix = f"ask for at most {remaining}, or shorten it" if remaining > 0 else "shorten it"
        raise ValueError(f"{label}: {len(prompt.ids)} tokens and {count} more do not fit max_len={max_len}; {fix}")
    expect_vocabulary(prompt.sampling, vocab)
    if prompt.sampling.stop and options.decode is None:
        raise ValueError(
            f"{label} has stop texts, and nothing says what the text of ids is; give "
            "GenerateOptions(decode=tokenizer.decode)"
        )
    if prompt.grammar is not None and options.grammar_tokens is None:
        raise ValueError(
            f"{label} has a grammar, and nothing says what its tokens are; give "
            "GenerateOptions(grammar_tokens=generate.grammar_tokens(tokenizer))"
        )


def sequences_of(model: Model, prompts: Sequence[Prompt], options: GenerateOptions) -> list[SampleText]:
    """The samples of all prompts; raises ValueError for a prompt that cannot be continued."""
    vocab, max_len = text_sizes(model)
    numbers = [prompt.number for prompt in prompts]
    if len({*numbers}) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"two prompts have the number {twice}, which their draws depend on; number them, 0, 1, ...")
    sequences = []
    for prompt in prompts:
        _expect_prompt(prompt, options, min(options.vocab_size or vocab, vocab), max_len)
        remaining, grammar = max_len - len(prompt.ids), None
        rules = stop_rules(prompt.sampling, options.decode or (lambda ids: ""), eos=options.ends, longest=remaining)
        if prompt.grammar and options.grammar_tokens:  # behind a whole text nothing else comes
            rules = rules._replace(ids=rules.ids | {*options.grammar_tokens.ends})
            grammar = start_grammar(prompt.grammar, options.grammar_tokens)
        state, new_tokens = start_text(rules, prompt.ids), prompt.sampling.max_tokens or remaining
        samples = sorted({*range(prompt.sampling.n)} - prompt.skip)
        sequences += [SampleText(prompt, i, new_tokens, rules, state, grammar=grammar) for i in samples]
    return sequences
