"""Pairs of answers, of which one is preferred, as a corpus of examples; and texts with labels.

A line of the .jsonl file is {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages, as TRL
has them; without "prompt" it is what both answers begin with. What a frozen reference says of each answer is beside the
corpus:

reference-DIGEST/train.log_probs, val.log_probs    little-endian float64, one of each document
reference-DIGEST/meta.json                         digest: of the reference; sha256 of both files

A line of labels is {"text": "...", "label": "name"} or {"messages": [...], "label": 2}. Tokens at the end with which
`transformers` fills rows are left out. The number of the class follows the last token, as its target.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fzero.core.config_tables import Table
from fzero.core.files import writing
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_entries, nearest, parse_json, read_json, short
from fzero.data.chat import Chat, Encode, Example, Message, encode_spans, encoder, render
from fzero.data.examples import (
    Lengths,
    LineReader,
    Read,
    TooLong,
    expect_fits,
    lines_of,
    messages_of,
    prepare_examples,
    tools_of,
    truncate,
)
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import SPLITS, new_corpus, open_tokens, read_meta

NUMBERS = np.dtype("<f8")


def reference_folder(corpus: Path, digest: str) -> Path:
    """The folder of what the reference of this digest says."""
    return corpus / f"reference-{digest}"


def write_reference(corpus: Path, digest: str, log_probs: dict[str, np.ndarray]) -> None:
    """Write the log-probabilities [documents] of each split; the folder appears when it is complete."""
    with new_corpus(reference_folder(corpus, digest)) as folder:
        sums = {}
        for split in SPLITS:
            content = log_probs[split].astype(NUMBERS).tobytes()
            path = folder / f"{split}.log_probs"
            with writing(path, "new") as file:
                file.write(content)
            sums[split] = hashlib.sha256(content).hexdigest()
        write_text(folder, "meta.json", json.dumps({"digest": digest, "sha256": sums}, indent=2) + "\n")


def read_reference(corpus: str | Path, split: str, digest: str) -> np.ndarray:
    """The log-probabilities of a split's documents, float64 [documents]; raises ValueError naming a bad file."""
    folder = reference_folder(Path(corpus), digest)
    if not (folder / "meta.json").is_file():
        digests = sorted(path.name.removeprefix("reference-") for path in Path(corpus).glob("reference-*"))
        raise ValueError(
            f"{folder}: no such folder, so what the reference says of the pairs is not known (dpo.reference); there is "
            f"{', '.join(digests) or 'none'}; a new run computes it"
        )
    meta, path = read_json(folder / "meta.json"), folder / f"{split}.log_probs"
    expect_entries(meta, {"digest": str, "sha256": dict}, str(folder / "meta.json"))
    content = path.read_bytes() if path.is_file() else b""
    count = read_meta(corpus)["splits"][split]["documents"]
    if hashlib.sha256(content).hexdigest() != meta["sha256"].get(split) or len(content) != count * NUMBERS.itemsize:
        raise ValueError(f"{path}: missing, damaged, or of another corpus; remove {folder}, and a new run computes it")
    return np.frombuffer(content, NUMBERS)


ANSWERS = ("chosen", "rejected")
NO_TEMPLATE = (
    "the line has messages and the model no chat template (chat_template.jinja, or an entry of tokenizer_config.json); "
    "give a Chat (--chat-template FILE.jinja)"
)


def prepare_preferences(
    path: Path, out: Path, chat: Chat | None, tokenizer: Tokenizer, lengths: Lengths, seed: int = 0
) -> dict[str, Any]:
    """Prepare the pairs in the .jsonl file `path` in the new folder `out`; returns its meta.json."""
    encode = encoder(tokenizer)

    def read(row: Table) -> list[Example]:
        full_pair = pair_of(row, chat, encode, tokenizer.eos)
        expect_distinct(full_pair)
        pair = [truncate(example, lengths.example_limit(2)) for example in full_pair]
        expect_pair_fits(pair, lengths)
        return pair

    return prepare_examples(path, out, "pairs", LineReader(read, lengths.too_long), chat, tokenizer, seed=seed)


def expect_distinct(pair: list[Example]) -> None:
    """Raise ValueError for two answers that are equal; TooLong if they are so because they were cut."""
    if np.array_equal(pair[0].ids, pair[1].ids):
        if any(example.cut for example in pair):
            raise TooLong("chosen and rejected are equal when they are cut")
        raise ValueError("chosen and rejected are equal, so neither is preferred; leave the line out")


def expect_pair_fits(pair: list[Example], lengths: Lengths) -> None:
    """Raise ValueError for two equal answers, and TooLong for a pair beyond a row."""
    for name, example in zip(ANSWERS, pair):
        expect_fits(example, lengths, f"the {name} answer with its prompt")
    expect_distinct(pair)
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
            prompt = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts)))
            texts = [text[len(prompt) :] for text in texts]
        return [plain_example(encode, prompt, text, eos) for text in texts]
    if any(isinstance(value, str) for value in (prompt, *texts)):
        kinds = ", ".join(f"{name} {short(row[name])}" for name in ("prompt", *ANSWERS) if name in row)
        raise ValueError(f"prompt, chosen and rejected must be three texts or three lists of messages: {kinds}")
    answer_messages = [messages_of(row, name) for name in ANSWERS]
    if "prompt" in row:
        prompt_messages = messages_of(row, "prompt")
    else:
        prompt_messages = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answer_messages))]
        answer_messages = [answer[len(prompt_messages) :] for answer in answer_messages]
        if not prompt_messages:
            raise ValueError("the line has no 'prompt', and chosen and rejected do not begin with the same messages")
        if not all(answer_messages):
            raise ValueError("the line has no 'prompt', and one of chosen and rejected is no more than what both have")
    if chat is None:
        raise ValueError(NO_TEMPLATE)
    return [chat_example(chat, encode, prompt_messages, answer, tools_of(row)) for answer in answer_messages]


def plain_example(encode: Encode, prompt: str, text: str, eos: int) -> Example:
    """A text to be continued, and its continuation to learn, with the end of the document."""
    ids, counted, _ = encode_spans(encode, prompt + text, [(len(prompt), len(prompt) + len(text))], add_special=True)
    last = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else len(ids)  # a tokenizer may put its own end there
    return Example(np.append(ids[:last], np.array(eos, ids.dtype)), np.append(counted[:last], True))


def chat_example(
    chat: Chat, encode: Encode, prompt: list[Message], answer: list[Message], tools: list[Any] | None
) -> Example:
    """A conversation whose end after the prompt is to be learnt, up to the last eos."""
    prefix = render(chat, prompt, tools=tools, prompt=True)
    text = render(chat, [*prompt, *answer], tools=tools)
    if not text.startswith(prefix):
        raise ValueError(
            "the template renders the answer otherwise than after its own prompt for one; give a template that does not"
        )
    eos = chat.tokens.get("eos_token", "")
    end = text.rindex(eos) + len(eos) if eos and eos in text[len(prefix) :] else len(text)
    return encode_spans(encode, text[:end], [(len(prefix), end)])


def labels_of(path: Path) -> tuple[str, ...]:
    """The labels in a .jsonl file or a prepared corpus: numbers in order, else names in the alphabet's."""
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
    """The function from a line to its example, of a text with a label."""
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
    """The line that says how many texts each class has; raises ValueError for one in validation alone."""
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
