"""A larger vocabulary for a model: its tables get rows for the ids that they lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.models.decoders.config import DecoderConfig
from fzero.models.lora import TABLES, LoRAConfig
from fzero.models.presets import ModelConfig
from fzero.models.weights import ConfigOver


@checked()
def grow_vocabulary(config: ModelConfig, params: Tree, vocab_size: int) -> tuple[ModelConfig, Tree]:
    """Return (the config of the model with `vocab_size` tokens, its parameters): `params` whose tables of the
    vocabulary, embed/tokens [V, D] and of an untied head head/w [V, D], have that many rows.

    A new row is the mean of the old ones, so that a new token begins as an average one: it gets a probability near
    1/V, and those of the others hardly change (Hewitt 2021, "Initializing new word embeddings for pretrained language
    models"). `resize_token_embeddings(mean_resizing=True)` of transformers draws rows around that mean, with 1e-9 of
    the old rows' covariance. Sums are in float32 or wider. params: whole (not sharded). Of LoRA the tables are trained
    from then on, whole, beside the factors. Raises ValueError for fewer rows than there are.

    >>> from fzero import models, random
    >>> config = models.MLPConfig(vocab_size=8)
    >>> params = models.init_params(models.build(config), random.key(0))
    >>> larger, grown = grow_vocabulary(config, params, 10)
    >>> larger.vocab_size, grown["embed"]["tokens"].shape
    (10, torch.Size([10, 32]))
    >>> grown["head"]["w"][9].allclose(params["head"]["w"].mean(0))
    True
    """
    larger = with_vocab_size(config, vocab_size)
    return larger, pytree.from_named(grow_tables(pytree.named_leaves(params), vocab_size), params)


def with_vocab_size(config: Any, vocab_size: int) -> Any:
    """The config of a model with so many tokens, below adapters too; of LoRA the tables are then trained. Raises
    ValueError for fewer than it has."""
    if vocab_size < config.vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab_size} and the model has {config.vocab_size} tokens; rows are added only, so "
            f"give {config.vocab_size} or more"
        )
    if vocab_size == config.vocab_size:
        return config
    if isinstance(config, DecoderConfig):
        raise ValueError(
            f"transformers' code computes {config.architecture}, whose tables of {config.vocab_size} tokens fzero does "
            f"not make larger, and {vocab_size} are needed; call model.resize_token_embeddings({vocab_size}) in "
            "transformers, save the folder, and start from that"
        )
    if not isinstance(config, ConfigOver):
        return replace(config, vocab_size=vocab_size)
    config = replace(config, base=with_vocab_size(config.base, vocab_size))
    return replace(config, vocabulary=True) if isinstance(config, LoRAConfig) else config


def grow_tables(named: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The leaves by name, those of the vocabulary with so many rows; new ones are the mean of the old ones."""

    def grow(name: str, leaf: Tensor) -> Tensor:
        rows = vocab_size - leaf.shape[0] if name in TABLES else 0
        if rows <= 0:
            return leaf
        mean = leaf.mean(0, dtype=torch.promote_types(leaf.dtype, torch.float32)).to(leaf.dtype)
        return torch.cat([leaf, mean.expand(rows, -1)])

    return {name: grow(name, leaf) for name, leaf in named.items()}
