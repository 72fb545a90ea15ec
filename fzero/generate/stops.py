"""The text of a sequence while its tokens are drawn, and where it ends: a pure value, token by token.

A character whose bytes are of several tokens waits for all of them, and so does text that may be the beginning of a
stop text. What has been given out is never taken back, and the whole is the same however a text is split into tokens
and however many of them come at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fzero.generate.sampling import Sampling

UNKNOWN = "\ufffd"  # what decoders write for bytes that are no character yet
SPAN = 8  # tokens decoded again with each new one, at least: what a decoder writes may depend on those before
LONGEST = 64  # of the characters UNKNOWN at the end that wait
STOP_ID, STOP_TEXT, LENGTH = "stop id", "stop text", "length"  # reasons to end


class StopRules(NamedTuple):
    """What ends a sequence."""

    decode: Callable[[Sequence[int]], str]  # the text of some ids is a beginning of that with more behind
    ids: frozenset[int] = frozenset()  # ids that end it; they are no part of the text
    texts: tuple[str, ...] = ()  # texts that end it
    include: bool = False  # whether the stop text is a part of the text
    min_tokens: int = 0  # the text of the tokens before this one is no part of a stop text
    max_tokens: int | None = None


class StopState(NamedTuple):
    """A sequence so far."""

    ids: tuple[int, ...] = ()  # the last ones
    stable: int = 0  # so many of them end with a whole character
    complete: int = 0  # the most of them that do
    written: int = 0  # characters of their text that are in `pending` or were given out
    pending: str = ""  # text that may begin a stop text
    token_count: int = 0  # so far
    reason: str = ""  # why it has ended: STOP_ID, STOP_TEXT or LENGTH; "" while it has not


class Streamed(NamedTuple):
    """What some more tokens give."""

    state: StopState
    text: str  # the text that is certain now, behind that given out before
    used: int  # how many of the tokens are of the sequence; less than all if it has ended before


def stop_rules(
    sampling: Sampling, decode: Callable[[Sequence[int]], str], *, eos: Sequence[int] = (), longest: int | None = None
) -> StopRules:
    """The rules of a request. decode: of its tokenizer; eos: the ids that end a text of the model; longest: the most
    tokens that it has room for.

    >>> stop_rules(Sampling(stop=("END",), stop_ids=(3,)), bytes.decode, eos=(0,), longest=9).max_tokens
    9
    """
    ids = {*sampling.stop_ids, *(() if sampling.ignore_eos else eos)}
    lengths = [n for n in (sampling.max_tokens, longest) if n is not None]
    max_tokens = min(lengths) if lengths else None
    return StopRules(decode, frozenset(ids), sampling.stop, sampling.include_stop, sampling.min_tokens, max_tokens)


def start_text(rules: StopRules, prompt: Sequence[int] = ()) -> StopState:
    """The state before the first token. prompt: its last ids, behind which some tokenizers write a space.

    >>> start_text(StopRules(lambda ids: bytes(ids).decode())).token_count
    0
    """
    last_ids = tuple(map(int, prompt[-SPAN - 3 :]))
    for partial in range(4):  # tokens of a character that is not whole at the end
        stable_ids = last_ids[: len(last_ids) - partial]
        for start in range(max(0, len(stable_ids) - SPAN), len(stable_ids)):
            text = rules.decode(stable_ids[start:])
            if text and UNKNOWN not in (text[0], text[-1]):
                stable = len(stable_ids) - start
                return StopState(last_ids[start:], stable, stable, len(text))
    # A prompt that is no whole character: what comes behind it is.
    text = rules.decode(last_ids) if len(last_ids) < 4 else ""
    return StopState(last_ids if text and not text.strip(UNKNOWN) else ())


def feed(rules: StopRules, state: StopState, ids: Sequence[int]) -> Streamed:
    """The state, and the new text, behind more tokens. Raises ValueError if the sequence has ended.

    >>> rules = StopRules(lambda ids: bytes(ids).decode(errors="replace"), texts=("END",))
    >>> streamed = feed(rules, start_text(rules), b"A g\\xc3")
    >>> streamed.text, feed(rules, streamed.state, b"\\xa8ne ENDE").text
    ('A g', 'ène ')
    """
    if state.reason:
        raise ValueError(f"the sequence has ended ({state.reason}); no tokens come behind that")
    texts = []
    for used, token in enumerate(ids, 1):
        state, text = _feed_one(rules, state, int(token))
        texts.append(text)
        if state.reason:
            return Streamed(state, "".join(texts), used)
    return Streamed(state, "".join(texts), len(ids))


def _feed_one(rules: StopRules, state: StopState, token: int) -> tuple[StopState, str]:
    """(the state, the new text) behind one token."""
    token_count = state.token_count + 1
    reason = STOP_ID if token in rules.ids else LENGTH if token_count == rules.max_tokens else ""
    ids = state.ids if reason == STOP_ID else (*state.ids, token)
    decoded = rules.decode(ids)
    text = decoded.rstrip(UNKNOWN)
    complete = len(ids) if len(text) == len(decoded) else state.complete
    if reason and complete < len(ids):
        # By itself: some tokenizers write UNKNOWN for the whole characters before one that was cut, too.
        text = rules.decode(ids[:complete]) + rules.decode(ids[complete:])
    elif len(decoded) - len(text) > LONGEST:
        text = decoded
    pending = state.pending + text[state.written :]
    new_text, pending, matched = _cut(rules, pending, ended=bool(reason), early=token_count < rules.min_tokens)
    reason = STOP_TEXT if matched else reason
    state = StopState(ids, state.stable, complete, max(state.written, len(text)), pending, token_count, reason)
    if len(text) == len(decoded) and len(ids) - state.stable >= SPAN:
        last_ids = ids[state.stable :]
        if length := len(rules.decode(last_ids)):
            state = state._replace(ids=last_ids, stable=len(last_ids), complete=len(last_ids), written=length)
    return state, new_text


def _cut(rules: StopRules, text: str, *, ended: bool, early: bool) -> tuple[str, str, bool]:
    """(text to give out, text that waits, whether a stop text is there), the one that ends first."""
    if early or not rules.texts:
        return text, "", False
    places = [(start + len(stop), start) for stop in rules.texts if (start := text.find(stop)) >= 0]
    if places:
        end, start = min(places)
        return text[: end if rules.include else start], "", True
    overlap = 0 if ended else max(_overlap(text, stop) for stop in rules.texts)
    return text[: len(text) - overlap], text[len(text) - overlap :], False


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of the text that begin a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
