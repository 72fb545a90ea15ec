"""The vocabulary of a run that starts from a model: tokens added to its tokenizer, and rows to its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core import pytree
from fzero.core.config_tables import Table, check_type
from fzero.core.pytree import Tree
from fzero.data.auto_tokenizer import add_tokens, expect_json, missing_tokens
from fzero.data.chat import read_chat
from fzero.data.tokenizers import Tokenizer, load_tokenizer
from fzero.models import ModelConfig
from fzero.models.lora import TABLES, LoRAConfig
from fzero.models.presets import with_vocab_size
from fzero.run import special_token_files, weights
from fzero.run.config import Data, RunConfig
from fzero.run.special_token_files import start_chat, start_tokenizer

TEMPLATE = "template"  # of data.add_tokens: the tokens that the chat template writes and the vocabulary lacks

AT_A_TIME = ("mlp_tiles", "mlp_tokens", "layer_tokens")  # how much of a layer is computed at a time: no sizes


class StartModel(NamedTuple):
    """The model of a run that starts from another."""

    preset: str  # of the run that it starts from, or ""
    config: ModelConfig
    table: Table  # of the run, without the model
    new_tokens: bool  # whether there are tokens that the model has not learnt


def start_model(init: Path, table: Table) -> StartModel:
    """The model of a run that starts from `init`: the sizes of that model, with the tokens that `table` asks for.

    Raises ValueError for other sizes, for fewer tokens than the model or its tokenizer with `data.add_tokens` has, and
    as `load_start`, `start_tokenizer`, `add_tokens`.
    """
    table, sizes = dict(table), check_type("model", table.get("model", {}), dict)
    if "preset" in table or set(sizes) - {"vocab_size", *AT_A_TIME}:
        raise ValueError(
            "--init sets the model's sizes; leave out --model and model.* but for a larger model.vocab_size, and "
            f"{', '.join(AT_A_TIME)}"
        )
    table.pop("model", None)
    preset, model = weights.start_sizes(init)
    model = computed_by(model, {name: value for name, value in sizes.items() if name in AT_A_TIME})
    data = check_type("data", table.get("data", {}), dict)
    new_tokens = check_type("data.add_tokens", data.get("add_tokens", ()), tuple[str, ...])
    need = model.vocab_size
    if new_tokens:
        need = max(need, grown_tokenizer(init, new_tokens, data.get("template", "")).vocab_size)
    size = check_type("model.vocab_size", sizes.get("vocab_size", need), int)
    if model.vocab_size <= size < need:
        raise ValueError(
            f"model.vocab_size is {size} and the tokenizer has {need} tokens with those of data.add_tokens; leave it "
            f"out, or give {need} or more"
        )
    larger = with_vocab_size(model, size)
    if new_tokens and isinstance(larger, LoRAConfig):
        larger = replace(larger, vocabulary=True)
    return StartModel(preset, larger, table, bool(new_tokens) or size > model.vocab_size)


def computed_by(config: Any, values: Mapping[str, Any]) -> Any:
    """The config of a model with these of AT_A_TIME; raises ValueError for one that it does not have."""
    if not values:
        return config
    if hasattr(config, "base"):
        return replace(config, base=computed_by(config.base, values))
    for name, value in values.items():
        if not hasattr(config, name):
            raise ValueError(f"model.{name} is {value!r}, and the model of --init has no such value; leave it out")
        check_type(f"model.{name}", value, int)
    return replace(config, **values)


def grown_tokenizer(init: Path, new_tokens: Sequence[str], template: str) -> Tokenizer:
    """The tokenizer of what a run starts from with the tokens of `data.add_tokens`, by the chat template
    `data.template` or the model's.

    Raises ValueError as `start_tokenizer` and `add_tokens`, and for "template" where there is no template.
    """
    tokenizer = start_tokenizer(init)
    return add_tokens(tokenizer, tokens_to_add(init, tokenizer, new_tokens, template)) if new_tokens else tokenizer


def tokens_to_add(init: Path, tokenizer: Tokenizer, new_tokens: Sequence[str], template: str) -> list[str]:
    """The tokens of `grown_tokenizer`."""
    expect_json(tokenizer)
    chat, tokens = start_chat(init, template), list[str]()
    for text in new_tokens:
        if text == TEMPLATE and chat is None:
            raise ValueError(
                f"data.add_tokens has {TEMPLATE} and {init} has no chat template; give one, or name the tokens: "
                "--chat-template FILE.jinja"
            )
        tokens += missing_tokens(chat, tokenizer) if chat is not None and text == TEMPLATE else [text]
    return list(dict.fromkeys(tokens))


def added_tokens(data: Data, init: Path) -> list[str]:
    """The tokens that a run's tokenizer gets."""
    return tokens_to_add(init, start_tokenizer(init), data.add_tokens, data.template) if data.add_tokens else []


def start_texts(data: Data, init: Path) -> dict[str, str]:
    """The files of `special_token_files` that a run starts from, with the tokens that it adds."""
    files = special_token_files.start_files(init, templates=not data.template)
    return special_token_files.with_added(files, added_tokens(data, init))


def missing_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """The tokens that a tokenizer has no id for."""
    ids = ids_in(tokenizer)
    return [text for text in tokens if text not in ids] if ids else []


def ids_in(tokenizer: Tokenizer) -> dict[str, int]:
    """{token: its id} of a tokenizer.json; {} for bytes."""
    from tokenizers import Tokenizer as Library

    return Library.from_str(tokenizer.json).get_vocab(with_added_tokens=True) if tokenizer.json else {}


def added_line(base_tokenizer: Tokenizer, new_tokenizer: Tokenizer, new_tokens: Sequence[str]) -> str:
    """The line that says which tokens a tokenizer got, and which it had."""
    old, new = ids_in(base_tokenizer), ids_in(new_tokenizer)
    got = [f"{text} ({new[text]})" for text in sorted(set(new) - set(old), key=new.__getitem__)]
    present_tokens = [f"{text} ({old[text]})" for text in new_tokens if text in old]
    parts = [f"added to the tokenizer: {', '.join(got) or 'no token, as it has all'}"]
    return "; ".join([*parts, *([f"there before: {', '.join(present_tokens)}"] if present_tokens else [])])


def expect_added(data: Data, corpus: Path) -> None:
    """Raise ValueError if a corpus that was prepared before lacks a token that is to be added."""
    if not data.add_tokens:
        return
    tokenizer, chat = load_tokenizer(corpus), read_chat(corpus)
    lacking = missing_of(tokenizer, [text for text in data.add_tokens if text != TEMPLATE])
    if TEMPLATE in data.add_tokens and chat is not None:
        lacking += missing_tokens(chat, tokenizer)
    if lacking or not tokenizer.json:
        raise ValueError(
            f"{corpus}: was prepared with a tokenizer without {lacking[0] if lacking else data.add_tokens[0]}, which "
            "data.add_tokens has; give the file of its lines: --data FILE.jsonl"
        )


def growth_lines(config: RunConfig, base_model: ModelConfig, params: Tree) -> list[str]:
    """The lines that say how the tables of the model that a run starts from become those of the run."""
    old, new, model = base_model.vocab_size, config.model.vocab_size, config.model
    names = [name for name in pytree.names(params) if name in TABLES]
    lines = []
    if new > old:
        lines.append(f"{' and '.join(names)}: {new - old:,} new rows after {old:,}, each the mean of those")
    elif config.data.add_tokens:
        lines.append(f"{' and '.join(names)}: no new rows, as the {old:,} that are there have the added tokens' ids")
    if lines and isinstance(model, LoRAConfig):
        lines.append("they are trained whole, beside the factors of LoRA (PEFT's modules_to_save)")
    return lines
