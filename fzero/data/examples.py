"""Convert lines to token files: a corpus whose documents are examples, with a byte for each token to be said.

A line of the .jsonl file of conversations is {"messages": [{"role": "user", "content": "..."}, ...]}, and optionally
"tools". A conversation may become several documents (see `spans_of`).
"""

from __future__ import annotations

import codecs
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.config_tables import Table
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_regular, parse_json, short
from fzero.data.chat import Chat, Example, Message, encoder, examples_of, write_chat
from fzero.data.checksums import SummedFile, write_sums
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import FORMAT, SPLITS, VERSION, new_corpus, token_dtype, write_meta

VAL_FRACTION = 0.05  # of the lines, for validation


class TooLong(ValueError):
    """An example that is longer than its row, or has nothing to learn when it is cut."""


class Lengths(NamedTuple):
    """How long an example may be, in positions: one less than its tokens."""

    row: int  # data.seq_len
    model: int  # the positions of the model
    too_long: str = "error"  # what becomes of a longer one, one of TOO_LONG

    def example_limit(self, parts: int) -> int | None:
        """The positions of one of so many examples that share a row; None: uncut."""
        return self.row // parts if self.too_long == "cut" else None


Read = Callable[[Table], list[Example]]  # a line's JSON object -> its examples; raises ValueError


class LineReader(NamedTuple):
    """How lines are read, and what becomes of those that are TooLong."""

    read: Read
    too_long: str = "error"


def prepare_examples(
    path: Path,
    out: Path,
    kind: str,
    reader: LineReader,
    chat: Chat | None,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    labels: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Prepare the .jsonl file `path` in the new folder `out`; returns the content of its meta.json."""
    expect_regular(path)
    read, too_long = reader
    draws = [draw_of(line, seed) for _, line in lines_of(path)]
    dropped = set[int]() if too_long == "error" else long_line_numbers(path, read)
    fit = {draw for (number, _), draw in zip(lines_of(path), draws) if number not in dropped}
    if len(fit) < 2:
        dropped_text = (
            f", without {len(dropped):,} that are too long: use a larger seq_len (--seq-len)" if dropped else ""
        )
        raise ValueError(
            f"{path}: training and validation need at least two lines that differ, and it has {len(fit)}{dropped_text}"
        )
    low, high, threshold, cut = min(fit), max(fit), VAL_FRACTION * 2**64, 0
    counts = {split: {"tokens": 0, "documents": 0, "said": 0, "longest": 0} for split in SPLITS}
    dtype = token_dtype(tokenizer.vocab_size)
    with new_corpus(out) as folder, ExitStack() as stack:
        files = {
            split: [stack.enter_context(closing(SummedFile(folder / f"{split}.{x}"))) for x in ("bin", "docs", "said")]
            for split in SPLITS
        }
        for (number, line), draw in zip(lines_of(path), draws):
            if number in dropped:
                continue
            split = "val" if draw == low or (draw < threshold and draw != high) else "train"
            bins, docs, masks = files[split]
            for example in _examples(f"{path}:{number}", line, read):
                docs.write(struct.pack("<Q", counts[split]["tokens"]))
                bins.write(example.ids.astype(dtype, copy=False).tobytes())
                masks.write(example.counted.astype(np.uint8).tobytes())
                example_counts = {"tokens": len(example.ids), "documents": 1, "said": int(example.counted[1:].sum())}
                counts[split] |= {name: counts[split][name] + n for name, n in example_counts.items()}
                counts[split]["longest"] = max(counts[split]["longest"], len(example.ids))
                cut += example.cut
        for split, (_, docs, _) in files.items():
            docs.write(struct.pack("<Q", counts[split]["tokens"]))
        stack.close()
        sums = {split: write_sums(folder / f"{split}.sums", parts_files) for split, parts_files in files.items()}
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "kind": kind,
            **tokenizer.meta(),
            "splits": counts,
            "sums": sums,
            "source": {"names": [str(path)], "lines": len(draws)},
            "seed": seed,
            **({"labels": list(labels)} if labels else {}),
            **({"too_long": {"dropped": len(dropped), "cut": cut}} if too_long != "error" else {}),
        }
        if tokenizer.json:
            write_text(folder, "tokenizer.json", tokenizer.json)
        if chat is not None:
            write_chat(folder, chat)
        write_meta(folder, meta, out)
    return meta


def long_line_numbers(path: Path, read: Read) -> set[int]:
    """The numbers of the lines that `read` finds TooLong."""
    numbers = set[int]()
    for number, line in lines_of(path):
        try:
            _examples(f"{path}:{number}", line, read)
        except TooLong:
            numbers.add(number)
    return numbers


def truncate(example: Example, positions: int | None) -> Example:
    """The first positions of an example; all of a shorter one, or for None."""
    if positions is None or len(example.ids) - 1 <= positions:
        return example
    return Example(example.ids[: positions + 1], example.counted[: positions + 1], cut=True)


def expect_fits(example: Example, lengths: Lengths, subject: str) -> None:
    """Raise ValueError for an example without a token to learn, and TooLong for one that is."""
    if not example.counted[1:].any():
        kind, condition = (
            (TooLong, f" when {subject} is cut to {len(example.ids):,} tokens") if example.cut else (ValueError, "")
        )
        raise kind(f"no token of the assistant's is left to learn{condition}")
    if (need := len(example.ids) - 1) > lengths.model:
        raise TooLong(
            f"{subject} has {need + 1:,} tokens and the model takes {lengths.model:,} positions "
            "(model.max_len); shorten it, or use too_long of drop or cut (--too-long)"
        )
    if need > lengths.row:
        raise TooLong(
            f"{subject} has {need + 1:,} tokens and data.seq_len is {lengths.row:,}; use a seq_len of {need} or "
            f"more (--seq-len), or "
            "too_long of drop or cut (--too-long)"
        )


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the lines of a file that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def draw_of(line: bytes, seed: int) -> int:
    """Hash a line to a number in [0, 2^64)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + line.strip()).digest()[:8], "big")


def _examples(location: str, line: bytes, read: Read) -> list[Example]:
    """The examples of a line; `location` begins the texts of errors."""
    row = parse_json(line, location, wide=True)
    try:
        return read(row)
    except ValueError as error:
        kind = TooLong if isinstance(error, TooLong) else ValueError
        raise kind(f"{location}: {error}") from None


def prepare_conversations(
    path: Path, out: Path, chat: Chat, tokenizer: Tokenizer, lengths: Lengths, seed: int = 0
) -> dict[str, Any]:
    """Prepare the conversations in the .jsonl file `path` in the new folder `out`; returns its meta.json."""
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        full = examples_of(chat, encode, messages_of(row, "messages"), tools=tools_of(row))
        cut = [truncate(example, lengths.example_limit(1)) for example in full]
        examples = [example for example in cut if example.counted[1:].any()] or cut[:1]  # turns that are left
        for example in examples:
            expect_fits(example, lengths, "the conversation")
        return examples

    return prepare_examples(path, out, "chat", LineReader(read, lengths.too_long), chat, tokenizer, seed=seed)


def describe_conversations(meta: Mapping[str, Any]) -> str:
    """The lines that tell a user what was prepared of conversations or pairs of answers."""
    pairs = ("pairs of answers", 2)
    kinds = {"chat": ("conversations", 1), "labels": ("texts", 1), "pairs": pairs, "ranked": pairs}
    label, divisor = kinds.get(meta["kind"], ("examples", 1))
    lines = [
        f"{split}: {counts['documents'] // divisor:,} {label}, {counts['tokens']:,} tokens, {counts['said']:,} of them "
        f"to learn; the longest has {counts['longest']:,}"
        for split, counts in meta["splits"].items()
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
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key} is {short(messages)}; it must be a list of messages")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            location = f"message {i}" if key == "messages" else f"message {i} of {key}"
            raise ValueError(f'{location} is {short(message)}; it must be {{"role": "user", "content": "..."}}')
        content, calls = message.get("content", ""), message.get("tool_calls") or message.get("function_call")
        if not isinstance(content, str) and not (content is None and calls):
            location = f"message {i}" if key == "messages" else f"message {i} of {key}"
            kinds = "null, without a call of a tool" if content is None else short(content)
            fix = "join its parts of text" if isinstance(content, list) else "write its text, or leave the line out"
            raise ValueError(
                f"the content of {location}, of the {message['role']}, is {kinds}; it must be one text: {fix}"
            )
    return messages
