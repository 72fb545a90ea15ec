"""Conversations as a corpus of examples.

A line of the .jsonl file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content":
"..."}, ...]}, and optionally "tools", which the template is given. A conversation may become several documents (see
`spans_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.core.foreign import short
from fzero.core.tables import Table
from fzero.data.chat import Chat, Example, Message, encoder, examples_of
from fzero.data.examples import Lengths, LineReader, cut_to, expect_fits, prepare_examples
from fzero.data.tokenizers import Tokenizer


def prepare_conversations(
    path: Path, out: Path, chat: Chat, tokenizer: Tokenizer, lengths: Lengths, seed: int = 0
) -> dict[str, Any]:
    """Prepare the conversations in the .jsonl file `path` in the new folder `out`; returns the content of meta.json.

    Raises ValueError as `prepare_examples`, and naming a line that lacks a key, has no assistant turn, that the
    template refuses, or that is longer than `lengths`.
    """
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        whole = examples_of(chat, encode, messages_of(row, "messages"), tools=tools_of(row))
        cut = [cut_to(example, lengths.part(1)) for example in whole]
        found = [example for example in cut if example.counted[1:].any()] or cut[:1]  # turns that are left
        for example in found:
            expect_fits(example, lengths, "the conversation")
        return found

    return prepare_examples(path, out, "chat", LineReader(read, lengths.too_long), chat, tokenizer, seed=seed)


def describe_conversations(meta: Mapping[str, Any]) -> str:
    """The lines that tell a user what was prepared of conversations or pairs of answers."""
    pairs = ("pairs of answers", 2)
    kinds = {"chat": ("conversations", 1), "labels": ("texts", 1), "pairs": pairs, "ranked": pairs}
    what, each = kinds[meta["kind"]]
    lines = [
        f"{split}: {of['documents'] // each:,} {what}, {of['tokens']:,} tokens, {of['said']:,} of them to learn; "
        f"the longest has {of['longest']:,}"
        for split, of in meta["splits"].items()
    ]
    if passed := meta.get("too_long"):
        lines.append(f"too long: {passed['dropped']:,} lines dropped, {passed['cut']:,} texts cut")
    return "\n".join(lines)


def tools_of(row: Table) -> list[Any] | None:
    """The tools of a row; raises ValueError if they are no list."""
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools is {short(tools)}; it must be a list")
    return tools


def messages_of(row: Table, key: str) -> list[Message]:
    """The messages of a row under this key; raises ValueError naming one that has no role."""
    if key not in row:
        raise ValueError(f"the line has no {key!r}; it has {', '.join(row) or 'nothing'}")
    found = row[key]
    if not isinstance(found, list) or not found:
        raise ValueError(f"{key} is {short(found)}; it must be a list of messages")
    for i, message in enumerate(found, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            where = f"message {i}" if key == "messages" else f"message {i} of {key}"
            raise ValueError(f'{where} is {short(message)}; it must be {{"role": "user", "content": "..."}}')
        content, calls = message.get("content", ""), message.get("tool_calls") or message.get("function_call")
        if not isinstance(content, str) and not (content is None and calls):
            where = f"message {i}" if key == "messages" else f"message {i} of {key}"
            kinds = "null, without a call of a tool" if content is None else short(content)
            fix = "join its parts of text" if isinstance(content, list) else "write its text, or leave the line out"
            raise ValueError(
                f"the content of {where}, of the {message['role']}, is {kinds}; it must be one text: {fix}"
            )
    return found
