"""Pairs of answers, of which one is preferred, as a corpus of examples: of each pair the chosen answer with its prompt,
then the rejected one.

A line of the .jsonl file is {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages, as TRL
has them. "prompt" may be left out: then it is what both answers begin with. Texts are taken as they are, and an answer
ends with the end-of-document token; messages are rendered by the chat template, to which "tools" is given.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from fzero.core.foreign import short
from fzero.core.tables import Table
from fzero.data.chat import Chat, Encode, Example, Message, encode_spans, encoder, render
from fzero.data.conversations import messages_of, tools_of
from fzero.data.examples import Lengths, LineReader, TooLong, cut_to, expect_fits, prepare_examples
from fzero.data.tokenizers import Tokenizer

ANSWERS = ("chosen", "rejected")
NO_TEMPLATE = (
    "the line has messages and the model no chat template (chat_template.jinja, or an entry of tokenizer_config.json); "
    "give a Chat (--chat-template FILE.jinja)"
)


def prepare_preferences(
    path: Path, out: Path, chat: Chat | None, tokenizer: Tokenizer, lengths: Lengths, seed: int = 0
) -> dict[str, Any]:
    """Prepare the pairs in the .jsonl file `path` in the new folder `out`; returns the content of its meta.json.

    chat: the template for messages; None takes texts only. Raises ValueError as `prepare_examples`, and naming a line
    that lacks an answer, whose answers are equal, that the template refuses, or that is too long: both answers, each
    with the prompt, share a row.
    """
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        whole = pair_of(row, chat, encode, tokenizer.eos)
        expect_unlike(whole)
        pair = [cut_to(example, lengths.part(2)) for example in whole]
        expect_pair_fits(pair, lengths)
        return pair

    return prepare_examples(path, out, "pairs", LineReader(read, lengths.too_long), chat, tokenizer, seed=seed)


def expect_unlike(pair: list[Example]) -> None:
    """Raise ValueError for two answers that are equal; TooLong if they are so because they were cut."""
    if np.array_equal(pair[0].ids, pair[1].ids):
        if any(example.cut for example in pair):
            raise TooLong("chosen and rejected are equal when they are cut")
        raise ValueError("chosen and rejected are equal, so neither is preferred; leave the line out")


def expect_pair_fits(pair: list[Example], lengths: Lengths) -> None:
    """Raise ValueError for two answers that are equal, and TooLong for those that are so for a row together."""
    for name, example in zip(ANSWERS, pair):
        expect_fits(example, lengths, f"the {name} answer with its prompt")
    expect_unlike(pair)
    if (need := sum(len(example.ids) - 1 for example in pair)) > lengths.row:
        raise TooLong(
            f"the two answers, each with the prompt, take {need:,} positions of a row and data.seq_len is "
            f"{lengths.row:,}; use a seq_len of {need} or more (--seq-len), up to model.max_len={lengths.model:,}, "
            "or too_long of drop or cut (--too-long)"
        )


def pair_of(row: Table, chat: Chat | None, encode: Encode, eos: int) -> list[Example]:
    """The chosen and the rejected example of a line; raises ValueError."""
    for name in ANSWERS:
        if name not in row:
            raise ValueError(f"the line has no {name!r}; it has {', '.join(row) or 'nothing'}")
    prompt, texts = row.get("prompt"), [row[name] for name in ANSWERS]
    if all(isinstance(text, str) for text in texts) and (prompt is None or isinstance(prompt, str)):
        if prompt is None:
            prompt = "".join(a for a, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*texts)))
            texts = [text[len(prompt) :] for text in texts]
        return [plain_example(encode, prompt, text, eos) for text in texts]
    if any(isinstance(part, str) for part in (prompt, *texts)):
        kinds = ", ".join(f"{name} {short(row[name])}" for name in ("prompt", *ANSWERS) if name in row)
        raise ValueError(f"prompt, chosen and rejected must be three texts or three lists of messages: {kinds}")
    answers = [messages_of(row, name) for name in ANSWERS]
    if "prompt" in row:
        before = messages_of(row, "prompt")
    else:
        before = [a for a, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*answers))]
        answers = [answer[len(before) :] for answer in answers]
        if not before:
            raise ValueError("the line has no 'prompt', and chosen and rejected do not begin with the same messages")
        if not all(answers):
            raise ValueError("the line has no 'prompt', and one of chosen and rejected is no more than what both have")
    if chat is None:
        raise ValueError(NO_TEMPLATE)
    return [chat_example(chat, encode, before, answer, tools_of(row)) for answer in answers]


def plain_example(encode: Encode, prompt: str, text: str, eos: int) -> Example:
    """A text to be continued, and its continuation to learn, with the end of the document."""
    ids, counted, _ = encode_spans(encode, prompt + text, [(len(prompt), len(prompt) + len(text))], whole=True)
    last = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else len(ids)  # a tokenizer may put its own end there
    return Example(np.append(ids[:last], np.array(eos, ids.dtype)), np.append(counted[:last], True))


def chat_example(
    chat: Chat, encode: Encode, prompt: list[Message], answer: list[Message], tools: list[Any] | None
) -> Example:
    """A conversation whose end, all that comes after the prompt, is to be learnt, up to the last eos_token."""
    before = render(chat, prompt, tools=tools, prompt=True)
    text = render(chat, [*prompt, *answer], tools=tools)
    if not text.startswith(before):
        raise ValueError(
            "the template renders the answer otherwise than after its own prompt for one; give a template that does not"
        )
    eos = chat.tokens.get("eos_token", "")
    end = text.rindex(eos) + len(eos) if eos and eos in text[len(before) :] else len(text)
    return encode_spans(encode, text[:end], [(len(before), end)])
