"""The special tokens that a model's folder names: in special_tokens_map.json, tokenizer_config.json, added_tokens.json,
or by the class of its tokenizer in `transformers`, as AutoTokenizer takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.foreign import read_json
from fzero.data.tokenizer_classes import CLASSES, class_of

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderTokens(NamedTuple):
    """The tokens that a folder names apart from its vocabulary. A token is its text, or a table with its flags."""

    class_name: str  # as in tokenizer_classes.class_of
    about: dict[str, Any]  # tokenizer_config.json
    named: dict[str, Any]  # bos_token and the like
    extra: list[Any]  # special tokens without a name
    listed: dict[int, dict[str, Any]]  # by id, of added_tokens_decoder, else of added_tokens.json
    complete: bool  # whether no others of tokenizer.json are taken


def special_tokens(folder: Path) -> dict[str, str]:
    """{name: text} of the special tokens that a folder names; raises ValueError naming a file that is no JSON."""
    return {name: text_of(token) for name, token in read_tokens(folder).named.items()}


def text_of(token: Any) -> str:
    """The text of a token."""
    return token["content"] if isinstance(token, dict) else token


def is_token(value: Any) -> bool:
    """Whether an entry of a file is a token."""
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def take_named(entries: dict[str, Any]) -> dict[str, Any]:
    """The extra_special_tokens of entries that have names, which are taken out."""
    extra = entries.get("extra_special_tokens")
    return dict(entries.pop("extra_special_tokens")) if isinstance(extra, dict) else {}


def read_tokens(folder: Path) -> FolderTokens:
    """The tokens of a folder, in the order in which AutoTokenizer takes its files."""
    about = read_json(folder / CONFIG, wide=True) if (folder / CONFIG).is_file() else {}
    class_name = class_of(folder, about)
    builder = CLASSES.get(class_name)
    entries, listed = dict(about), about.get("added_tokens_decoder")
    if not entries.get("extra_special_tokens"):
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens", None)
    apart = take_named(entries)
    named = {**(builder.tokens if builder else {}), **apart, **entries}
    if (folder / MAP).is_file() and "added_tokens_decoder" not in about:
        first, more = entries.get("extra_special_tokens"), read_json(folder / MAP, wide=True)
        entries |= more
        if isinstance(first, list) and isinstance(more.get("extra_special_tokens"), list):
            entries["extra_special_tokens"] = [*first, *more["extra_special_tokens"]]
        apart |= take_named(entries)
        named |= apart | more
    extra = entries.get("extra_special_tokens") or entries.get("additional_special_tokens")
    order = dict.fromkeys([*SPECIAL, *(name for name in named if name.endswith("_token")), *apart])
    named = {name: named[name] for name in order if is_token(named.get(name))}
    extra = [one for one in extra if is_token(one)] if isinstance(extra, list) else []
    by_id: dict[int, dict[str, Any]] = {}
    if isinstance(listed, dict):
        tables = {i: token for i, token in listed.items() if isinstance(token, dict) and is_token(token)}
        by_id = {int(i): token for i, token in tables.items() if i.isdecimal()}
    elif "added_tokens_decoder" not in about and (folder / ADDED).is_file():
        special = {text_of(token) for token in (*named.values(), *extra)}
        for text, i in read_json(folder / ADDED, wide=True).items():
            if isinstance(i, int):
                by_id[i] = {"content": text, "special": text in special, "normalized": text not in special}
    return FolderTokens(class_name, about, named, extra, by_id, "added_tokens_decoder" in about)


def with_special(about: dict[str, Any], beside: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """A tokenizer_config.json in whose list of special tokens without a name these are, too; beside: the
    special_tokens_map.json that is read beside it."""
    keys = ("extra_special_tokens", "additional_special_tokens")
    lists = (of.get(key) for of in (about, beside) for key in keys)
    extra = next((one for one in lists if isinstance(one, list) and one), [])
    listed = about.get("added_tokens_decoder")
    there = [*extra, *(listed.values() if isinstance(listed, dict) else ()), *about.values(), *beside.values()]
    texts = {text_of(one) for one in there if is_token(one)}
    new = [text for text in tokens if text not in texts]
    return {**about, keys[not isinstance(about.get(keys[0]), list)]: [*extra, *new]} if new else about
