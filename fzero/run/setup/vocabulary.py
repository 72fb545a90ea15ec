"""The vocabulary of a run that starts from a model: tokens added to its tokenizer, and rows to its tables.

Where texts of a model begin and end is in files of its folder, which a run keeps and an export gives back:

tokenizer_config.json      special tokens, padding_side, model_max_length
special_tokens_map.json    special tokens
added_tokens.json          more of them, in folders of before
generation_config.json     the ids at which `generate` stops, and how it draws
additional_chat_templates  chat templates by name, beside chat_template.jinja
config.json                bos_token_id, eos_token_id, pad_token_id: in a run's environment.json, as token_ids

The config of a run that trains a model further: `fzero finetune` as a function; and its conversations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero import data as corpora
from fzero import models
from fzero.checkpoint import convert
from fzero.core import pytree
from fzero.core.config_tables import Table, check_type
from fzero.core.pytree import Tree
from fzero.core.text_parsing import expect_entries, parse_json, read_json, read_text_file
from fzero.data.chat import Chat, chat_files, encoder, end_tokens, read_chat, render, template_files
from fzero.data.examples import Lengths, describe_conversations
from fzero.data.tokenizers import ADDED, CONFIG, MAP, TOKENIZER, Tokenizer, json_tokenizer, load_tokenizer
from fzero.models import ModelConfig
from fzero.models.configs import ON, TABLES, DecoderConfig, LoRAConfig, body_of, head_of
from fzero.models.presets import with_vocab_size
from fzero.run import setup
from fzero.run.config import config_table
from fzero.run.config.config_checks import expect_rows
from fzero.run.config.objectives import Lines, objective_named
from fzero.run.config.run_config import Data, RunConfig
from fzero.run.setup import run_folder


def start_tokenizer(init: Path) -> Tokenizer:
    """The tokenizer of a run, or of a folder of another system; raises ValueError if it has none."""
    if run_folder.is_run(init):
        return run_folder.read_tokenizer(init)
    if convert.peft.is_adapter(init):
        return start_tokenizer(convert.peft.base_of(init))
    tokenizer = tokenizer_of(init, init / "config.json")
    if tokenizer is None:
        raise ValueError(f"{init}: has no tokenizer.json, so there is no text to read")
    return tokenizer


def start_pad(init: Path) -> int:
    """The token with which transformers fills the rows of the model in `init`."""
    if convert.peft.is_adapter(init):
        return start_pad(convert.peft.base_of(init))
    path = init / run_folder.ENVIRONMENT if run_folder.is_run(init) else init / "config.json"
    entries = read_json(path, wide=True)
    pad = entries.get("token_ids", entries).get("pad_token_id")
    return pad if isinstance(pad, int) and pad >= 0 else start_tokenizer(init).eos


def start_chat(init: Path, template: str = "") -> Chat | None:
    """The chat template of a run, a folder of another system or an adapter; None if there is none."""
    chat = read_chat(init)
    if chat is None and convert.peft.is_adapter(init):
        chat = start_chat(convert.peft.base_of(init))
    return Chat(read_text_file(template), chat.tokens if chat else {}) if template else chat


def tokenizer_of(folder: Path, hf_config: Path) -> Tokenizer | None:
    """The tokenizer in `folder` or beside a config.json, as AutoTokenizer loads it, None if there is none."""
    places = [source for source in (folder, hf_config.parent) if os.path.lexists(source / TOKENIZER)]
    source = (places or [folder])[0]
    config_folder = source if (source / CONFIG).is_file() else hf_config.parent
    content = corpora.read_tokenizer_json(source, config_folder)
    if content is None:
        return None
    recorded = read_json(hf_config, wide=True).get("eos_token_id")
    eos: Any = recorded[0] if isinstance(recorded, list) and recorded else recorded
    entry = f"eos_token_id of {hf_config}"
    if eos is None and (eos := corpora.special_tokens(config_folder).get("eos_token")) is not None:
        entry = f"eos_token of {config_folder / CONFIG}"
    return json_tokenizer(content, str(source / TOKENIZER), eos, entry)


GENERATION = "generation_config.json"
FILES = (CONFIG, MAP, ADDED, GENERATION)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def start_files(init: Path, *extra_folders: Path, templates: bool = True) -> dict[str, str]:
    """{name: content} of the FILES of what a run starts from; extra_folders: for what `init` lacks."""
    places = [init, *extra_folders]
    if convert.peft.is_adapter(init):
        return start_files(convert.peft.base_of(init), templates=templates) | files_in(init, templates=templates)
    return {name: text for folder in reversed(places) for name, text in files_in(folder, templates=templates).items()}


def with_added(files: dict[str, str], tokens: Sequence[str]) -> dict[str, str]:
    """The FILES with these tokens among the special ones of tokenizer_config.json."""
    if not tokens:
        return files
    tokenizer_config, named = (parse_json(files.get(name, "{}"), name, wide=True) for name in (CONFIG, MAP))
    named = {} if "added_tokens_decoder" in tokenizer_config else named
    return files | {
        CONFIG: json.dumps(corpora.add_special_tokens(tokenizer_config, named, tokens), indent=2, ensure_ascii=False)
        + "\n"
    }


def files_in(folder: Path, *, templates: bool = True) -> dict[str, str]:
    """{name: content} of the FILES in a folder, and of its additional_chat_templates."""
    files = {name: read_text_file(folder / name) for name in FILES if os.path.lexists(folder / name)}
    return files | (template_files(folder) if templates else {})


def start_ids(init: Path) -> dict[str, Any]:
    """{"token_ids": the ids of what a run starts from}, for its environment.json; {} without weights."""
    if convert.peft.is_adapter(init):
        return start_ids(convert.peft.base_of(init))
    if not run_folder.is_run(init):
        ids_of(init / GENERATION)  # which the run gets as it is
        return {"token_ids": ids_of(init / "config.json")}
    environment = run_folder.read_environment(init)
    return {"token_ids": environment["token_ids"]} if "token_ids" in environment else {}


def ids_of(path: Path) -> dict[str, Any]:
    """The entries of IDS in a config.json or a generation_config.json; raises ValueError for what is no id."""
    table = read_json(path, wide=True) if os.path.lexists(path) else {}
    entries = {name: table[name] for name in IDS if name in table}
    expect_entries(entries, {f"{name}?": int | list | None for name in IDS}, str(path))
    for name, value in entries.items():
        for token_id in value if isinstance(value, list) else ():
            expect_entries({name: token_id}, {name: int}, str(path))
    return entries


def run_ids(folder: Path) -> dict[str, Any]:
    """The ids in the config.json that a run's source has, or another system's folder itself; or {}."""
    return dict(start_ids(folder).get("token_ids", {}))


def listed(ids: Any) -> list[int]:
    """An entry of IDS as a list."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def stop_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text of the model in `folder`: a run, a folder of another system, or an adapter."""
    source = convert.peft.base_of(folder) if convert.peft.is_adapter(folder) else folder
    generation_ids, chat = ids_of(source / GENERATION), start_chat(folder)
    ids = [*listed(generation_ids.get("eos_token_id")), *listed(run_ids(folder).get("eos_token_id")), tokenizer.eos]
    ids += end_tokens(chat, tokenizer) if chat else []
    return [token_id for token_id in dict.fromkeys(ids) if token_id >= 0]


def export_entries(folder: Path, tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, str]]:
    """(the entries of IDS for config.json, {name: content} of files to write beside it) of an export."""
    ids, files, chat = run_ids(folder), files_in(folder), read_chat(folder)
    if chat is not None:
        config_entries = parse_json(files.get(CONFIG, "{}"), str(folder / CONFIG), wide=True)
        if "token_ids" not in run_folder.read_environment(folder):  # no class of transformers built its tokenizer
            config_entries = {"tokenizer_class": "PreTrainedTokenizerFast", **config_entries}
        files |= chat_files(chat, config_entries)
    if tokenizer is None:
        return ids, files
    stops = stop_ids(folder, tokenizer)
    entry = stops[0] if len(stops) == 1 else stops
    if GENERATION in files:
        config_entries = parse_json(files[GENERATION], str(folder / GENERATION), wide=True)
        if set(listed(config_entries.get("eos_token_id"))) != set(stops):
            files[GENERATION] = (
                json.dumps({**config_entries, "eos_token_id": entry}, indent=2, ensure_ascii=False) + "\n"
            )
        return {"eos_token_id": entry, **ids}, files
    if set(listed(ids.get("eos_token_id"))) != set(stops):
        ids["eos_token_id"] = entry
    return ids, files


TEMPLATE = "template"  # of data.add_tokens: the tokens that the chat template writes and the vocabulary lacks

AT_A_TIME = ("mlp_tiles", "mlp_tokens", "layer_tokens")  # how much of a layer is computed at a time: no sizes


class StartModel(NamedTuple):
    """The model of a run that starts from another."""

    preset: str  # of the run that it starts from, or ""
    config: ModelConfig
    table: Table  # of the run, without the model
    new_tokens: bool  # whether there are tokens that the model has not learnt


def start_model(init: Path, table: Table) -> StartModel:
    """The model of a run that starts from `init`, with the tokens that `table` asks for; raises ValueError."""
    table, sizes = dict(table), check_type("model", table.get("model", {}), dict)
    if "preset" in table or set(sizes) - {"vocab_size", *AT_A_TIME}:
        raise ValueError(
            "--init sets the model's sizes; leave out --model and model.* but for a larger model.vocab_size, and "
            f"{', '.join(AT_A_TIME)}"
        )
    table.pop("model", None)
    preset, model = setup.weights.start_sizes(init)
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
    """The tokenizer of what a run starts from with the tokens of `data.add_tokens`; raises ValueError."""
    tokenizer = start_tokenizer(init)
    return (
        corpora.add_tokens(tokenizer, tokens_to_add(init, tokenizer, new_tokens, template)) if new_tokens else tokenizer
    )


def tokens_to_add(init: Path, tokenizer: Tokenizer, new_tokens: Sequence[str], template: str) -> list[str]:
    """The tokens of `grown_tokenizer`."""
    corpora.expect_json(tokenizer)
    chat, tokens = start_chat(init, template), list[str]()
    for text in new_tokens:
        if text == TEMPLATE and chat is None:
            raise ValueError(
                f"data.add_tokens has {TEMPLATE} and {init} has no chat template; give one, or name the tokens: "
                "--chat-template FILE.jinja"
            )
        tokens += corpora.missing_tokens(chat, tokenizer) if chat is not None and text == TEMPLATE else [text]
    return list(dict.fromkeys(tokens))


def added_tokens(data: Data, init: Path) -> list[str]:
    """The tokens that a run's tokenizer gets."""
    return tokens_to_add(init, start_tokenizer(init), data.add_tokens, data.template) if data.add_tokens else []


def start_texts(data: Data, init: Path) -> dict[str, str]:
    """The files of `start_files` that a run starts from, with the tokens that it adds."""
    files = start_files(init, templates=not data.template)
    return with_added(files, added_tokens(data, init))


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
        lacking += corpora.missing_tokens(chat, tokenizer)
    if lacking or not tokenizer.json:
        raise ValueError(
            f"{corpus}: was prepared with a tokenizer without {lacking[0] if lacking else data.add_tokens[0]}, which "
            "data.add_tokens has; give the file of its lines: --data FILE.jsonl"
        )


def growth_lines(config: RunConfig, base_model: ModelConfig, params: Tree) -> list[str]:
    """The lines that say how tables of the model become those of the run."""
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


def prepare_for(config: RunConfig, out: Path, say: Callable[[str], None], init: Path | None) -> Path:
    """Prepare the conversations at `data.path` in `out` by the tokenizer and template of `init`; return it."""
    path = Path(config.data.path)
    if path.suffix != ".jsonl":
        raise ValueError(
            f"data.path is {config.data.path!r} and objective is {config.objective}; give a .jsonl file with a "
            f"{config.task.line} a line, or a folder that was prepared of one: --data FILE.jsonl"
        )
    if init is None:
        raise ValueError(f"objective is {config.objective}, which starts from a model: --init FOLDER")
    base_tokenizer, template = start_tokenizer(init), config.data.template
    chat, tokenizer = start_chat(init, template), grown_tokenizer(init, config.data.add_tokens, template)
    expect_rows(config, tokenizer.vocab_size, f"the tokenizer of {init}")
    if config.data.add_tokens:
        say(added_line(base_tokenizer, tokenizer, config.data.add_tokens))
    for line in corpora.auto_tokenizer.missing_lines(chat, tokenizer, f"--add-tokens {TEMPLATE}"):
        say(line)
    say(f"preparing {path} ({tokenizer.name}) in {out}")
    lengths = Lengths(config.data.seq_len, config.model.max_len, config.data.too_long)
    lines = Lines(path, out, init, chat, tokenizer, lengths, config.train.seed, head_of(config.model))
    meta, remarks = config.task.prepare(lines)
    for line in remarks:
        say(line)
    say(describe_conversations(meta))
    return out


def answers_messages(config: RunConfig, folder: Path) -> bool:
    """Whether the run's model answers a prompt as a message."""
    return config.task.examples and (config.task.of_tokens or read_chat(folder) is not None)


def prompt_ids(folder: Path, tokenizer: Tokenizer, text: str, *, chat: bool) -> tuple[np.ndarray, list[int]]:
    """(the ids [N] to generate after, the ids that end the text) for a prompt to the model in `folder`."""
    ends = stop_ids(folder, tokenizer)
    if chat and start_chat(folder) is None:
        raise ValueError(f"{folder}: has no chat template (chat_template.jinja); give --no-chat to continue a text")
    if chat:
        return message_ids(folder, tokenizer, [{"role": "user", "content": text}]), ends
    return text_ids(folder, tokenizer, text), ends


def text_ids(folder: Path, tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids [N] of a text to continue; transformers' own tokenizers begin it as they do there."""
    foreign = "token_ids" in start_ids(folder)
    return encoder(tokenizer)(text, add_special=True)[0] if foreign else tokenizer.encode(text)


def message_ids(folder: Path, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The ids [N] of a conversation, up to the assistant's next turn; raises ValueError without a chat template."""
    template = start_chat(folder)
    if template is None:
        raise ValueError(f"{folder}: has no chat template (chat_template.jinja); give a text to continue")
    return encoder(tokenizer)(render(template, messages, prompt=True))[0]


def tuned_config(
    init: str | Path, table: Table, *, lora: Mapping[str, Any] | None = None, quantize: str | None = None
) -> RunConfig:
    """The RunConfig of a new run that starts from the model in `init`: a run, a folder of transformers, an adapter.

    table: the values that differ from the preset, as in a config file; objective is chat unless it says another. lora:
    arguments of `models.lora` ({} for its defaults), whose targets may be "attn" or "all"; None trains what the model
    trains; with new tokens the embedding and the head are trained too. quantize: nf4, int4 or int8, in which LoRA's
    frozen weights are kept. `train_run(folder, config, init=init)` trains it. Raises ValueError for values that do not
    go together, and for a model that has LoRA already.
    """
    init = Path(init)
    if quantize is not None and lora is None:
        raise ValueError("weights in codes are frozen, so quantize needs lora")
    _, sizes, table, new_tokens = start_model(init, table)
    sizes = with_head(init, table, sizes)
    if lora is not None:
        if isinstance(sizes, models.LoRAConfig):
            raise ValueError(
                f"--lora: {init} has LoRA already, which is trained on without --lora; for new factors merge it first: "
                f"fzero export {init} --out FOLDER"
            )
        model = models.build(sizes)
        lora = {**lora, "targets": lora_targets(model, lora.get("targets", "all"))}
        if quantize is not None:
            options = {"targets": lora["targets"]} if "targets" in lora else {}
            model = models.quantized(model, quantize, **options)
        sizes = models.lora(model, **{**lora, "vocabulary": new_tokens or lora.get("vocabulary", False)}).config
    suffix = "-lora" if isinstance(sizes, models.LoRAConfig) else ""
    preset = objective_named(table.get("objective")).preset + suffix
    value = config_table.from_table({**table, "preset": preset}, sizes)
    if not value.task.examples:
        raise ValueError("objective is text, which fzero pretrain learns: use that with --init")
    return value


def lora_targets(model: models.Model, targets: str) -> str:
    """The regex of the weights that get factors, of "attn" and "all" too."""
    body = body_of(model.config)
    if targets in ON and isinstance(body, DecoderConfig):
        from fzero.models.decoder import linear_targets

        return linear_targets(body, targets == "attn")
    return ON.get(targets, targets)


def with_head(init: Path, table: Table, sizes: models.ModelConfig) -> models.ModelConfig:
    """The config of the model in `init` with the head that the objective trains, if it lacks one."""
    objective = objective_named(table.get("objective"))
    if not objective.head or head_of(sizes) is not None:
        return sizes
    if isinstance(sizes, models.LoRAConfig):
        raise ValueError(
            f"objective is {objective.name} and {init} has LoRA without a head of scores; merge it first: fzero export "
            f"{init} --out FOLDER"
        )
    return objective.with_head(models.build(sizes), start_pad(init), table.get("data", {}).get("path")).config
