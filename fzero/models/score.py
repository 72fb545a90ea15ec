"""A head of scores in place of the vocabulary's: classes of whole texts, and rewards.

The scores of a text are those at its last token, as transformers' models `...ForSequenceClassification` have them.

Ref: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.2, for classes;
Ouyang et al. 2022, "Training language models to follow instructions with human feedback", arXiv:2203.02155, equation 1,
for rewards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.kernels.cross_entropy import counted_tokens, number_of, weighed
from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, with_still_leaves
from fzero.models.configs import SCORE, DecoderConfig, ScoreConfig, head_of
from fzero.models.layers import DimSplit, enter_region, expect_divisible
from fzero.models.preference import (
    expect_no_weights,
    expect_replaceable_head,
    local_positions,
    preference_loss,
    sum_by_document,
    sum_over_cp,
)
from fzero.sharding import Mesh, Rules
from fzero.sharding.slices import narrow_part


@checked()
def classify(model: Model, labels: Sequence[str], pad: int = -1) -> Model:
    """Return the model with a head that tells classes of texts: the leaf head/score [C, D] in place of the head's
    weights, and the loss of one class for each text.

        loss of a text = -log softmax(h score^T)[class], h [D] the normalised activations at its last token

    labels: the names of the C classes. pad: see `ScoreConfig`. In a batch, the token that counts (mask bool [B, T]) is
    the last of each text, and its target is the number of the text's class; rows may hold several texts, told apart by
    documents. So `num_tokens` is the number of texts, and the loss of a step the mean over them. `extra` has accuracy:
    the texts whose class has the highest score. `logits` gives the scores [B, T, C] of the texts up to each token.
    Under tp the score is split along D.

    Raises ValueError for fewer than two classes, names that are not different, a model made from a module, and a
    decoder of transformers' code that has no class `...ForSequenceClassification` there.

    >>> from fzero import models, random
    >>> model = classify(models.build(models.MLPConfig(vocab_size=8)), ["bad", "good"])
    >>> params = models.init_params(model, random.key(0))
    >>> batch = {"tokens": torch.tensor([[5, 6, 5]]), "targets": torch.tensor([[0, 0, 1]])}
    >>> batch |= {"mask": torch.tensor([[False, False, True]])}
    >>> int(models.loss(model, params, batch, models.Ctx()).num_tokens)
    1
    """
    if len(labels) < 2:
        raise ValueError(f"classify: labels is {list(labels)}; there must be two classes or more")
    return scored(model, ScoreConfig(model.config, tuple(labels), pad))


@checked()
def reward(model: Model, pad: int = -1) -> Model:
    """Return the model with a head that gives texts a score: the leaf head/score [1, D] in place of the head's weights,
    and the loss of pairs of answers, of which one is preferred (Bradley and Terry 1952).

        z = s(chosen) - s(rejected);   loss of a pair = -log sigmoid(z)

    with s the score at the last token of an answer after its prompt. pad: see `ScoreConfig`. A row of the batch holds
    whole pairs, as those of `models.dpo`; the token that counts is the last of each answer. `num_tokens` is the number
    of pairs, and `extra` has accuracy (the pairs with z > 0), margin (z), reward_chosen and reward_rejected. `logits`
    gives the scores [B, T, 1] of the texts up to each token.

    Raises ValueError as `classify`.

    >>> from fzero import models
    >>> model = models.build(models.MLPConfig())
    >>> models.num_params(reward(model)) - models.num_params(model)  # [1, 32] in place of [256, 32]
    -8160
    """
    return scored(model, ScoreConfig(model.config, (), pad))


def scored(model: Model, config: ScoreConfig) -> Model:
    """Return the model with the head of `config`."""
    if isinstance(model.config, DecoderConfig):
        from fzero.models.decoder import trunk

        model = trunk(model.config)
    if head_of(model.config) is not None:
        raise ValueError("the model has a head of scores already; give it the model without")
    expect_replaceable_head("classify" if config.labels else "reward", model)
    outputs, std = len(config.labels) or 1, getattr(config, "init_std", 0.02)

    def init(make: MakeLeaf) -> Tree:
        def without_head(name: str, *leaf: Any, **options: Any) -> Any:
            return None if name == "head/w" else make(name, *leaf, **options)

        tree = model.init(without_head)
        head_leaves = {name: leaf for name, leaf in tree.get("head", {}).items() if name != "w"}
        return {**tree, "head": {**head_leaves, "score": make(SCORE, (outputs, config.d_model), std)}}

    def scores(params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        assert model.features is not None  # expect_replaceable_head
        tp, h = ctx.mesh.tp, enter_region(model.features(params, x, ctx), ctx, "head")
        local = narrow_part(h, tp.rank, tp.size, 2)
        partial_scores = F.linear(local, params["head"]["score"].to(local.dtype))
        return psum(partial_scores.to(torch.promote_types(partial_scores.dtype, torch.float32)), tp, leaf=SCORE)

    def rules(mesh: Mesh) -> Rules[str]:
        expect_divisible(mesh, DimSplit(SCORE, 1, config.d_model, "d_model"))
        # The rule of the vocabulary's head has no leaf any more, unless it is the embedding's too.
        names = pytree.names(init(lambda name, shape, std, mean=0.0, dtype=None: name))
        base_rules = [rule for rule in model.rules(mesh) if any(re.search(rule[0], name) for name in names)]
        return ((f"^{SCORE}$", "[C, D/tp]"), *base_rules)

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        values = scores(params, x, ctx)
        return class_loss(values, batch) if config.labels else reward_loss(values[..., 0], batch, ctx)

    base = with_still_leaves(model)
    shared = model.shared if model.traits.foreign else ()  # the head was beside an embedding
    return base._replace(config=config, init=init, head=head, logits=scores, rules=rules, shared=shared, features=None)


def class_loss(scores: Tensor, batch: Batch) -> Loss:
    """Return the loss of `classify` from scores [B, T, C]."""
    counted = counted_tokens(batch["targets"], batch.get("mask"))
    targets = torch.where(counted.bool(), batch["targets"], 0).long()
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)
    right = weighed((scores.argmax(-1) == targets).to(scores.dtype), counted)
    return Loss(weighed(losses, counted).sum(), number_of(counted), {"accuracy": right.sum().to(scores.dtype)})


def reward_loss(scores: Tensor, batch: Batch, ctx: Ctx) -> Loss:
    """Return the loss of `reward` from scores [B, T], or those of this rank's tokens."""
    if "documents" not in batch:
        raise ValueError(f"reward: the batch has no 'documents'; it has {', '.join(sorted(batch))}")
    expect_no_weights("reward", batch)
    counted = counted_tokens(batch["targets"], batch.get("mask"))
    rewards = sum_by_document(torch.where(counted, scores, 0.0), batch, local_positions(ctx))
    return preference_loss(sum_over_cp(rewards, ctx), batch, ctx, scores.dtype)
