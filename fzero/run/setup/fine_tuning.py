"""The config of a run that trains a model further: `fzero finetune` as a function; and its conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fzero import data, models
from fzero.core.config_tables import Table
from fzero.data.chat import encoder, read_chat, render
from fzero.data.examples import Lengths, describe_conversations
from fzero.data.tokenizers import Tokenizer
from fzero.models.configs import ON, DecoderConfig, body_of, head_of
from fzero.run.config import config_table
from fzero.run.config.config_checks import expect_rows
from fzero.run.config.objectives import Lines, objective_named
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import run_folder
from fzero.run.setup.vocabulary import (
    TEMPLATE,
    added_line,
    grown_tokenizer,
    start_chat,
    start_model,
    start_pad,
    start_tokenizer,
    stop_ids,
)


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
    for line in data.auto_tokenizer.missing_lines(chat, tokenizer, f"--add-tokens {TEMPLATE}"):
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
    """(the ids [N] to generate after, the ids that end the text) for a prompt to the model of the run in `folder`."""
    stops = stop_ids(folder, tokenizer)
    if not chat:
        foreign = "token_ids" in run_folder.read_environment(folder)
        return encoder(tokenizer)(text, add_special=True)[0] if foreign else tokenizer.encode(text), stops
    template = read_chat(folder)
    if template is None:
        raise ValueError(f"{folder}: has no chat template (chat_template.jinja); give --no-chat to continue a text")
    return encoder(tokenizer)(render(template, [{"role": "user", "content": text}], prompt=True))[0], stops


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
