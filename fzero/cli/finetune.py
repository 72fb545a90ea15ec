"""`fzero finetune`: train a model further on conversations, pairs of answers, or texts with labels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER, add_flags, is_written, table_of, tuning_flags
from fzero.cli.pretrain import RUN_FLAGS, Begin, bar_or_lines, finish, hang_s_of, prepare, refuse_flags
from fzero.cli.process import coordinated
from fzero.core.text_parsing import nearest
from fzero.core.torch_private import without_collection
from fzero.run.setup import warm_up

WORDS = ("dora", "vocabulary")


@click.command()
@click.option(
    "--init",
    type=FOLDER,
    metavar="FOLDER",
    help="Start from this model. A folder of Hugging Face transformers, a run, or an import.",
)
@click.option(
    "--objective",
    metavar="WHAT",
    help="What is learnt. chat (the default): what the assistant says; dpo: to prefer chosen answers to rejected ones; "
    "classify: the labels of texts; reward: a score for answers.",
)
@click.option(
    "--lora",
    metavar="rank=R,on=WHERE",
    help="Train low-rank factors beside frozen weights. on is attn, all (the default) or a regex of leaves; "
    "alpha=A is their scale times the rank (32); dora trains the norms of the columns too; vocabulary the embedding "
    "and the head.",
)
@click.option(
    "--quantize", metavar="KIND", help="Have weights of layers in nf4, int4 or int8. They are frozen: it needs --lora."
)
@click.option("--chat-template", metavar="FILE", help="A chat template (Jinja). Default: the model's own.")
@click.option(
    "--too-long",
    metavar="WHAT",
    help="What becomes of a line that is longer than --seq-len. error (the default), drop, or cut (its end is left "
    "out); lines and cuts are counted.",
)
@click.option(
    "--add-tokens",
    metavar="TOKENS",
    help="Special tokens for the tokenizer, and rows for them. <|a|>,<|b|>; template: those that the chat template "
    "writes and the vocabulary lacks.",
)
@tuning_flags
@partial(add_flags, options=RUN_FLAGS)
@click.option(
    "--prompt", metavar="TEXT", help="The text to continue. Here a message, which the model answers at the end."
)
def finetune(
    config_file: Path | None,
    settings: tuple[str, ...],
    mesh: str | None,
    objective: str | None,
    lora: str | None,
    quantize: str | None,
    chat_template: str | None,
    too_long: str | None,
    add_tokens: str | None,
    **arguments: Any,
) -> int:
    """Fine-tune a model on conversations or preferences, whole or with LoRA.

    The run is one of `fzero pretrain` in all else: its folder, resuming, meshes, offload, report."""
    begin, flags = Begin(**{name: arguments.pop(name) for name in Begin._fields}), arguments
    begin = begin._replace(prompt=begin.prompt or "")
    recipe_flags = {"objective": objective, "lora": lora, "quantize": quantize}
    recipe_flags |= {"chat-template": chat_template, "too-long": too_long, "add-tokens": add_tokens}
    refuse_flags(begin, {**flags, "config": config_file, "init": begin.init, **recipe_flags}, settings)
    table = table_of(config_file, settings, mesh, {**flags, "init": begin.init})
    if objective is not None:
        table["objective"] = objective
    if chat_template is not None:
        table.setdefault("data", {})["template"] = chat_template
    if too_long is not None:
        table.setdefault("data", {})["too_long"] = too_long
    if add_tokens is not None:
        table.setdefault("data", {})["add_tokens"] = add_tokens.split(",")
    if not begin.resume and table.get("data", {}).get("path") is None:
        raise ValueError(
            "fzero finetune needs conversations, pairs of answers, or texts with labels: --data FILE.jsonl"
        )
    adapters = parse_lora(lora) if lora is not None else None
    if quantize is not None and adapters is None:
        raise ValueError("--quantize needs --lora: frozen weights are in codes, and LoRA's factors are trained")
    warm_up.begin()

    with coordinated(hang_s_of(table, begin.out)) as coordinator, bar_or_lines() as (bar, line):
        with without_collection():
            from fzero.run.runner import loop
            from fzero.run.setup.watchdog import watch

        make = partial(config_of_flags, table, config_file, begin.init, adapters, quantize)
        with watch(coordinator):
            folder, ready = prepare(coordinator, begin, table, make, (bar, line), grow_vocabulary=False)
            stopped = loop.train(*ready) if ready is not None else 0
        return finish(coordinator, folder, stopped, line)


def parse_lora(text: str) -> dict[str, Any]:
    """The arguments of `tuned_config`'s lora in a text such as rank=16,on=attn.

    >>> parse_lora("rank=16,on=attn")
    {'rank': 16, 'alpha': 32.0, 'targets': 'attn', 'dora': False, 'vocabulary': False}
    """
    fields: dict[str, str] = {}
    parts = text.split(",")
    for item in parts:
        name, equals, value = item.partition("=")
        if item in WORDS and parts.count(item) == 1:
            continue
        if name not in ("rank", "on", "alpha") or not equals or not value or name in fields:
            raise ValueError(
                f"--lora {text}: {item!r} is not rank=R, on=attn|all|REGEX, alpha=A, dora or vocabulary, each once"
                f"{nearest(name, ('rank', 'on', 'alpha', *WORDS))}; write --lora rank=16,on=attn"
            )
        fields[name] = value
    try:
        rank, alpha = int(fields.get("rank", "16")), float(fields.get("alpha", "32"))
    except ValueError:
        raise ValueError(f"--lora {text}: rank is a whole number and alpha a number; write rank=16,alpha=32") from None
    words = {word: word in parts for word in WORDS}
    return {"rank": rank, "alpha": alpha, "targets": fields.get("on", "all"), **words}


def config_of_flags(
    table: dict[str, Any],
    config_file: Path | None,
    init: Path | None,
    adapters: dict[str, Any] | None,
    quantize: str | None,
) -> Any:
    """The RunConfig of a new run that starts from the model in `init`."""
    from fzero.run.config import unused_keys
    from fzero.run.setup.vocabulary import tuned_config

    if init is None:
        raise ValueError("fzero finetune needs a model: --init FOLDER")
    value = tuned_config(init, table, lora=adapters, quantize=quantize)
    if not is_written(config_file):
        unused_keys.refuse_unused(value, table)
        unused_keys.refuse_without_axis(value, table)
    return value
