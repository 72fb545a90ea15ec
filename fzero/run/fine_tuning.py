"""The config of a run that trains a model further: `fzero finetune` as a function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero import models
from fzero.core.config_tables import Table
from fzero.models.decoder_config import DecoderConfig
from fzero.models.lora import ON
from fzero.models.presets import body_of
from fzero.models.score import head_of
from fzero.run import config_table
from fzero.run.config import RunConfig
from fzero.run.objectives import objective_named
from fzero.run.special_token_files import start_pad
from fzero.run.vocabulary import start_model


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
    """The regex of the weights that get factors: targets, or what "attn" and "all" stand for in the model."""
    body = body_of(model.config)
    if targets in ON and isinstance(body, DecoderConfig):
        from fzero.models.decoder import linear_targets

        return linear_targets(body, targets == "attn")
    return ON.get(targets, targets)


def with_head(init: Path, table: Table, sizes: models.ModelConfig) -> models.ModelConfig:
    """The config of the model in `init` with the head that the objective trains, of the labels that the data has, if it
    lacks one. Raises ValueError for a model that has LoRA below it."""
    objective = objective_named(table.get("objective"))
    if not objective.head or head_of(sizes) is not None:
        return sizes
    if isinstance(sizes, models.LoRAConfig):
        raise ValueError(
            f"objective is {objective.name} and {init} has LoRA without a head of scores; merge it first: fzero export "
            f"{init} --out FOLDER"
        )
    return objective.with_head(models.build(sizes), start_pad(init), table.get("data", {}).get("path")).config
