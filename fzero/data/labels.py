"""Texts with labels, and pairs of answers for a reward, as a corpus of examples whose last token alone counts.

A line of the .jsonl file of labels is {"text": "...", "label": "name"} or {"messages": [...], "label": 2}; messages are
rendered by the chat template, up to its last eos_token. Texts are taken as they are. Tokens at the end of a text with
which `transformers` fills rows are left out, as its models leave them out. In the corpus the number of the class
follows the text's last token, as that token's target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fzero.core.config_tables import Table
from fzero.core.text_parsing import nearest, parse_json, short
from fzero.data.chat import Chat, Encode, Example, encoder, render
from fzero.data.examples import Lengths, Read, expect_fits, lines_of, messages_of, tools_of
from fzero.data.preferences import NO_TEMPLATE, expect_distinct, expect_pair_fits, pair_of
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import SPLITS, open_tokens, read_meta


def labels_of(path: Path) -> tuple[str, ...]:
    """The labels in a .jsonl file, or of a prepared corpus: numbers in their order, else names in that of the alphabet.

    Raises ValueError naming the line that has none, or one of another kind; and for a single one.
    """
    if (path / "meta.json").is_file():
        return tuple(read_meta(path).get("labels", ()))
    labels: set[str | int] = set()
    for number, line in lines_of(path):
        location = f"{path}:{number}"
        label = label_in(parse_json(line, location, wide=True), location)
        if labels and type(label) is not type(next(iter(labels))):
            kinds = f"{short(label)} and {short(next(iter(labels)))}"
            raise ValueError(f"{location}: labels must be all names or all numbers; there are {kinds}")
        labels.add(label)
    if len(labels) == 1:
        raise ValueError(
            f"{path}: all lines have the label {short(next(iter(labels)))}; to tell classes there must be two or more"
        )
    return tuple(str(label) for label in sorted(labels))  # pyright: ignore[reportArgumentType]  (of one kind)


def label_in(row: Table, location: str = "") -> str | int:
    """The label of a line; raises ValueError, which begins with `location`."""
    begin = f"{location}: " if location else ""
    if "label" not in row:
        raise ValueError(f"{begin}the line has no 'label'; it has {', '.join(row) or 'nothing'}")
    label = row["label"]
    if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
        raise ValueError(f'{begin}label is {short(label)}; it must be a name or a number, such as "good" or 2')
    return label


def number_of(label: str | int, labels: Sequence[str]) -> int:
    """The number of a label's class; raises ValueError if there is none.

    >>> number_of("good", ("bad", "good")), number_of(3, ("1", "3")), number_of(1, ("LABEL_0", "LABEL_1"))
    (1, 1, 1)
    """
    for name in (str(label), f"LABEL_{label}"):
        if name in labels:
            return labels.index(name)
    names = ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")
    raise ValueError(
        f"label is {short(label)}{nearest(str(label), labels)}, which is no class of the model; it has {names}"
    )


def text_ids(row: Table, chat: Chat | None, encode: Encode, pad: int) -> np.ndarray:
    """The ids [N] of a line's text or messages, without those of `pad` at the end; raises ValueError."""
    if "text" in row:
        if "messages" in row or not isinstance(row["text"], str):
            raise ValueError(f"the line must have a text or messages: text is {short(row['text'])}")
        return strip_pad(encode(row["text"], add_special=True)[0], pad)
    if "messages" not in row:
        raise ValueError(f"the line has no 'text' and no 'messages'; it has {', '.join(row) or 'nothing'}")
    messages = messages_of(row, "messages")
    if chat is None:
        raise ValueError(NO_TEMPLATE)
    text, eos = render(chat, messages, tools=tools_of(row)), chat.tokens.get("eos_token", "")
    text = text[: text.rindex(eos) + len(eos)] if eos and eos in text else text
    return strip_pad(encode(text)[0], pad)


def strip_pad(ids: np.ndarray, pad: int) -> np.ndarray:
    """The ids without those of `pad` at the end; raises ValueError if none is left.

    >>> strip_pad(np.array([5, 0, 6, 0, 0]), 0).tolist()
    [5, 0, 6]
    """
    real_indices = np.flatnonzero(ids != pad)
    if not len(real_indices):
        raise ValueError("the text is empty; leave the line out")
    return ids[: real_indices[-1] + 1]


def scored_example(ids: np.ndarray, target: int) -> Example:
    """A text whose last token alone counts, with this target."""
    counted = np.zeros(len(ids) + 1, bool)
    counted[-1] = True
    return Example(np.append(ids, np.array(target, ids.dtype)), counted)


def labels_reader(chat: Chat | None, tokenizer: Tokenizer, lengths: Lengths, labels: Sequence[str], pad: int) -> Read:
    """The function from a line to its example, of a text with a label.

    Raises ValueError for more classes than tokens."""
    if len(labels) > tokenizer.vocab_size:
        raise ValueError(f"there are {len(labels):,} labels, more than tokens of the model ({tokenizer.vocab_size:,})")
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        number = number_of(label_in(row), labels)
        ids = text_ids(row, chat, encode, pad)
        positions = lengths.example_limit(1)
        example = scored_example(ids[:positions], number)._replace(cut=positions is not None and len(ids) > positions)
        expect_fits(example, lengths, "the text")
        return [example]

    return read


def ranked_reader(chat: Chat | None, tokenizer: Tokenizer, lengths: Lengths, pad: int) -> Read:
    """The function from a line to its two examples, of a pair of answers."""
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        answer_ids = [strip_pad(example.ids, pad) for example in pair_of(row, chat, encode, tokenizer.eos)]
        expect_distinct([scored_example(ids, 0) for ids in answer_ids])
        positions = lengths.example_limit(2)
        cut = [positions is not None and len(ids) > positions for ids in answer_ids]
        pair = [scored_example(ids[:positions], 0)._replace(cut=is_cut) for ids, is_cut in zip(answer_ids, cut)]
        expect_pair_fits(pair, lengths)
        return pair

    return read


def expect_label_coverage(path: Path, corpus: Path, labels: Sequence[str]) -> str:
    """Return the line that says how many texts each class has, in training and validation.

    Raises ValueError for a class that only lines for validation have.
    """
    counts = {split: _counts(corpus, split, len(labels)) for split in SPLITS}
    for name, train, val in zip(labels, counts["train"], counts["val"]):
        if val and not train:
            raise ValueError(
                f"{path}: the label {short(name)} is on {val} of the lines for validation and on none for training; "
                "give more lines with it, or leave it out"
            )
    label_counts = ", ".join(f"{name} {n:,} + {m:,}" for name, n, m in zip(labels, counts["train"], counts["val"]))
    max_share = max(counts["train"]) / max(1, sum(counts["train"]))
    texts = f"texts to train + to validate: {label_counts}"
    return f"{len(labels)} labels, with {texts}; the commonest is {max_share:.0%}"


def _counts(corpus: Path, split: str, classes: int) -> list[int]:
    tokens = open_tokens(corpus, split)
    return np.bincount(tokens.tokens[tokens.docs[1:] - 1], minlength=classes).tolist()
