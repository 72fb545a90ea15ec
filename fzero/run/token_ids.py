"""The tokens that a config names, by their texts or their ids, as ids of a corpus."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fzero.data.tokenizers import load_tokenizer
from fzero.data.tokens import read_meta


def token_ids(key: str, text: str, corpus: Path, form: str) -> list[int]:
    """The ids of the tokens in `text`, the value of `key`: texts of tokens, ids, and ranges of ids such as 32000-32099,
    with commas between them.

    form: what the value is, for the texts of errors. Raises ValueError for an id that the vocabulary does not reach, a
    range that falls, and a token that the corpus' tokenizer does not have.
    """
    id_list, size = list[int](), read_meta(corpus)["vocab_size"]
    id_of: Callable[[str], int | None] | None = None
    for item in text.split(","):
        if ids := re.fullmatch(r"(\d+)(?:-(\d+))?", item, re.ASCII):
            first, last = int(ids[1]), int(ids[2] or ids[1])
            if not first <= last < size:
                raise ValueError(f"{key} is {text!r} and has {item}; ids of {corpus} are below {size}, in rising order")
            id_list += range(first, last + 1)
            continue
        id_of = id_of or known_tokens(corpus)
        if id_of is None:
            raise ValueError(f"{key} is {text!r}; of bytes give ids, such as 253,254,255, or leave it out")
        if (token_id := id_of(item)) is None:
            raise ValueError(f"{key} is {text!r} and the tokenizer of {corpus} has no token {item!r}; it is {form}")
        id_list.append(token_id)
    return id_list


def sentinel_ids(key: str, text: str, corpus: Path, form: str) -> list[int]:
    """The ids of tokens that stand for something else than text, as `token_ids`; raises ValueError also for one that
    ends documents, and one that comes twice."""
    ids, eos = token_ids(key, text, corpus, form), read_meta(corpus)["eos"]
    if eos in ids:
        raise ValueError(
            f"{key} is {text!r} and the tokenizer of {corpus} ends documents with one of them ({eos}); it is {form}"
        )
    if len(set(ids)) < len(ids):
        twice = next(token_id for token_id in ids if ids.count(token_id) > 1)
        raise ValueError(f"{key} is {text!r}, which has the token {twice} twice; it is {form}")
    return ids


def known_tokens(corpus: Path) -> Callable[[str], int | None] | None:
    """The function from the text of a token of a corpus to its id, None for one that it does not have; None if its
    tokens are bytes."""
    tokenizer = load_tokenizer(corpus)
    if not tokenizer.json:
        return None
    from tokenizers import Tokenizer as Library

    return Library.from_str(tokenizer.json).token_to_id
