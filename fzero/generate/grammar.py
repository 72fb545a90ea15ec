"""Texts of a grammar: which tokens may come next, by the library llguidance (`pip install 'fzero[grammar]'`).

A `Grammar` is a plain value; a `GrammarState` is what has been drawn under it, and a token gives a new one.

Ref: Willard and Louf 2023, arXiv:2307.09702 (masks from an automaton); llguidance: Earley's parser over derivatives of
regular expressions. benchmarks/grammars.py compares it with xgrammar, whose masks take a third of its time and let
texts through that are not valid by allOf, and which needs triton.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core import packages
from fzero.core.arguments import checked, expect_fields
from fzero.core.config_tables import check_choice
from fzero.core.text_parsing import parse_json_value, short
from fzero.data.tokenizers import Tokenizer

KINDS = ("json", "regex", "choices")


@dataclass(frozen=True)
class Grammar:
    """What a text must be; `Grammar.json`, `Grammar.regex` and `Grammar.choices` make it.

    >>> Grammar.choices(["yes", "no"]).kind
    'choices'
    """

    kind: str  # one of KINDS
    text: str  # a JSON schema, a regular expression, or a JSON list of texts
    compact: bool = False  # of a schema: whether no space may stand between its elements

    def __post_init__(self) -> None:
        expect_fields(self)
        check_choice("grammar: kind", self.kind, KINDS)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str, *, compact: bool = False) -> Grammar:
        """JSON values of a schema, given as a dict or as JSON; raises ValueError for what is no JSON."""
        if isinstance(schema, str):
            schema = parse_json_value(schema, "grammar: the JSON schema")
        if not isinstance(schema, Mapping):
            raise ValueError(
                f'grammar: the JSON schema is {short(schema)}; it must be an object, such as {{"type": "integer"}}'
            )
        return cls("json", json.dumps(schema, ensure_ascii=False), compact)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression matches from end to end, in the syntax of Rust's regex: no look-around."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts; raises ValueError for none, and for an empty one."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(
                f"grammar: the choices are {short(texts)}; they must be texts, at least one and none empty"
            )
        return cls("choices", json.dumps(list(texts), ensure_ascii=False))


class GrammarTokens(NamedTuple):
    """A tokenizer as the library has it; made once, used by all grammars."""

    library: Any
    vocab_size: int
    ends: tuple[int, ...]  # the ids that end a text


class GrammarState(NamedTuple):
    """What has been drawn under a grammar. It never changes: `advance` gives another."""

    matcher: Any
    tokens: GrammarTokens
    accepting: bool  # whether the text so far is whole
    ended: bool  # whether nothing can follow it


class _Bytes:
    """The tokenizer of bytes as the library asks for one."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, eos: int) -> None:
        self.eos_token_id, self.special_token_ids = eos, [eos]
        self.tokens = [bytes([i]) for i in range(256)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@checked()
def grammar_tokens(tokenizer: Tokenizer | Any, *, eos: Sequence[int] = ()) -> GrammarTokens:
    """The tokens of a tokenizer of fzero, or of a fast one of transformers, about a second for 100,000 of them.

    eos: the ids that end a text, beside the tokenizer's. Raises ValueError without llguidance, and for a tokenizer
    that it cannot read.

    >>> from fzero.data.tokenizers import byte_tokenizer
    >>> grammar_tokens(byte_tokenizer()).vocab_size  # doctest: +SKIP
    256
    """
    library = _library()
    if isinstance(tokenizer, Tokenizer):
        source, vocab_size, first = tokenizer.json or _Bytes(tokenizer.eos), tokenizer.vocab_size, tokenizer.eos
    elif hasattr(tokenizer, "backend_tokenizer"):
        source, vocab_size, first = tokenizer.backend_tokenizer.to_str(), len(tokenizer), tokenizer.eos_token_id
    else:
        raise ValueError(
            f"grammar: the tokenizer is a {type(tokenizer).__name__}; it must be one of fzero.data, or a fast one of "
            "transformers"
        )
    ends: dict[int, None] = dict.fromkeys([*([] if first is None else [int(first)]), *eos])
    try:
        tokens = library.LLTokenizer(source, n_vocab=vocab_size, eos_token=list(ends))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"grammar: llguidance does not read this tokenizer: {short(str(error), 300)}") from None
    return GrammarTokens(tokens, vocab_size, tuple(ends))


def _library() -> Any:
    """llguidance; raises ValueError where it is missing."""
    try:
        return packages.load("llguidance", "a grammar")
    except ValueError:
        raise ValueError("a grammar needs the package llguidance; pip install 'fzero[grammar]'") from None


def start_grammar(grammar: Grammar, tokens: GrammarTokens) -> GrammarState:
    """The state before the first token; raises ValueError for a grammar that the library refuses, by its words.

    >>> from fzero.data.tokenizers import byte_tokenizer
    >>> tokens = grammar_tokens(byte_tokenizer())  # doctest: +SKIP
    >>> state = start_grammar(Grammar.choices(["yes", "no"]), tokens)  # doctest: +SKIP
    >>> bytes(grammar_mask(state).nonzero()[:, 0].tolist())  # doctest: +SKIP
    b'ny'
    """
    return _start(grammar, tokens)


@functools.lru_cache(maxsize=64)
def _start(grammar: Grammar, tokens: GrammarTokens) -> GrammarState:
    """The first state, once: what the library has learnt of a grammar serves all texts of it."""
    matcher_class = _library().LLMatcher
    if grammar.kind == "json":
        options = {"whitespace_flexible": False} if grammar.compact else None
        source = matcher_class.grammar_from_json_schema(grammar.text, overrides=options)
    else:
        texts = parse_json_value(grammar.text, "grammar: the choices") if grammar.kind == "choices" else []
        source = matcher_class.grammar_from_regex("|".join(map(_escape, texts)) if texts else grammar.text)
    return _state(
        matcher_class(tokens.library, source, log_level=0),
        tokens,
        f"grammar: {grammar.kind} {short(grammar.text)}",
    )


def _escape(text: str) -> str:
    """A text as a regular expression of Rust."""
    return "".join(rf"\x{{{ord(c):x}}}" if ord(c) < 128 and not c.isalnum() else c for c in text)


def _state(matcher: Any, tokens: GrammarTokens, subject: str) -> GrammarState:
    """The state of a matcher; raises ValueError with its error."""
    if matcher.is_error():
        message = re.sub(r"<(state|grammar)>.*", "", matcher.get_error(), flags=re.DOTALL).strip()
        raise ValueError(f"{subject}: {short(message, 300)}")
    return GrammarState(matcher, tokens, matcher.is_accepting(), matcher.is_stopped())


def grammar_mask(state: GrammarState) -> Tensor:
    """The tokens that may come next, bool [V] of the tokenizer; those that end the text if it is whole. Raises
    ValueError if there is none.
    """
    words = np.frombuffer(state.matcher.compute_bitmask(), np.uint8)
    bits = np.unpackbits(words, count=state.tokens.vocab_size, bitorder="little")
    if not state.accepting:
        bits[list(state.tokens.ends)] = 0
    if not bits.any():
        raise ValueError("grammar: the tokenizer has no token for what must come next")
    return torch.from_numpy(bits.view(np.bool_))


def advance(state: GrammarState, token: int) -> GrammarState:
    """The state behind one more token; raises ValueError for one that may not come."""
    matcher, subject = state.matcher.deep_copy(), f"grammar: the token {token} may not come here"
    if not matcher.consume_token(token):
        raise ValueError(f"{subject}; draw it by grammar_mask")
    return _state(matcher, state.tokens, subject)
