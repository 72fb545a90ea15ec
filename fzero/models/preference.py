"""Fine-tuning by what people prefer: direct preference optimization (DPO), and heads of scores for rewards and classes.

Ref: Rafailov et al. 2023, "Direct preference optimization", arXiv:2305.18290, equation 7; Mitchell 2023, "A note on DPO
with noisy preferences", for `smoothing`.

The loss of a model by how much of a token's document stands before it.

A head of scores stands in place of the vocabulary's. The scores of a text are those at its last token, as
transformers' models `...ForSequenceClassification` have them.

Ref: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.2, for classes;
Ouyang et al. 2022, "Training language models to follow instructions with human feedback", arXiv:2203.02155, equation 1,
for rewards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.comm.collectives import psum, pvary
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.config_tables import Allowed
from fzero.core.pytree import Tree
from fzero.kernels.cross_entropy import counted_tokens, number_of, weighed
from fzero.kernels.linear_cross_entropy import token_losses
from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, leaf_shapes, with_still_leaves
from fzero.models.batch import sums_by_source
from fzero.models.configs import SCORE, DecoderConfig, ScoreConfig, head_of
from fzero.models.forward import loss
from fzero.models.layers import DimSplit, document_positions, enter_region, expect_divisible
from fzero.sharding import Mesh, Rules
from fzero.sharding.slices import narrow_part


@checked()
def dpo(
    model: Model,
    beta: Annotated[float, Allowed(lambda x: 0 < x < math.inf, "a positive number, such as 0.1")] = 0.1,
    smoothing: Annotated[float, Allowed(lambda x: 0 <= x < 0.5, "in [0, 0.5)")] = 0.0,
) -> Model:
    """Return the model with the loss of pairs of answers, of which one is preferred.

        z = beta ((p(chosen) - r(chosen)) - (p(rejected) - r(rejected)))
        loss of a pair = -(1 - smoothing) log sigmoid(z) - smoothing log sigmoid(-z)

    with p the log-probability of an answer, summed over its tokens, and r that of the frozen reference. The loss of a
    step is the mean over its pairs, as their number is `num_tokens`.

    beta: how far the model may move away from the reference; the smaller, the further. smoothing: the fraction of pairs
    whose preference is taken to be wrong, in [0, 0.5).
    A row of the batch holds whole pairs: with documents int [B, T] that count from 0 in each row, 2 k is the chosen
    answer of a pair with its prompt and 2 k + 1 the rejected one; mask bool [B, T] has the tokens of the answers, and
    reference float [B, T] sums up to r over a document. `extra` has accuracy (the pairs with z > 0), margin (z), and
    the two terms of z, reward_chosen and reward_rejected.

    Raises ValueError for a beta that is not a positive number, a smoothing out of range, and a model that was made from
    a module.

    >>> from fzero import models, random
    >>> model = dpo(models.build(models.MLPConfig()))
    >>> params = models.init_params(model, random.key(0))
    >>> batch = {"tokens": torch.tensor([[5, 6, 5, 7]]), "targets": torch.tensor([[6, 8, 7, 9]])}
    >>> batch |= {"mask": torch.ones(1, 4, dtype=torch.bool), "documents": torch.tensor([[0, 0, 1, 1]])}
    >>> reference = {"reference": log_probs_of(batch, answer_log_probs(model, params, batch))}
    >>> models.loss(model, params, batch | reference, models.Ctx()).total  # ln 2: the model is its own reference
    tensor(0.6931)
    """
    expect_losses("dpo", model)

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        expect_no_weights("dpo", batch)
        for name in ("documents", "reference"):
            if name not in batch:
                raise ValueError(f"dpo: the batch has no {name!r}; it has {', '.join(sorted(batch))}")
        gains = sum_over_cp(answer_sums(model, params, x, batch, ctx), ctx) - sum_by_document(batch["reference"], batch)
        return preference_loss(beta * gains, batch, ctx, torch.promote_types(ctx.dtype, torch.float32), smoothing)

    full_entries = (*model.traits.whole_entries, "reference")  # whose sums are of documents
    return with_still_leaves(model)._replace(head=head).with_traits(whole_entries=full_entries)


def preference_loss(rewards: Tensor, batch: Batch, ctx: Ctx, dtype: torch.dtype, smoothing: float = 0.0) -> Loss:
    """The loss of pairs from the rewards [B, S] of the documents of each row, as in `dpo`."""
    tokens = counted_tokens(batch["targets"], batch.get("mask"))
    counted = sum_over_cp(sum_by_document(tokens, batch, local_positions(ctx)), ctx) > 0
    pair = counted[:, 0::2] & counted[:, 1::2] & (ctx.mesh.cp.rank == 0)
    chosen, rejected = (torch.where(pair, rewards[:, i::2], 0.0) for i in (0, 1))
    z = chosen - rejected
    losses = -(1.0 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)

    def total(values: Tensor) -> Tensor:
        return torch.where(pair, values, 0.0).sum().to(dtype)

    sums = {"accuracy": z > 0, "margin": z, "reward_chosen": chosen, "reward_rejected": rejected}
    return Loss(total(losses), pair.sum(), {name: total(value) for name, value in sums.items()})


def expect_no_weights(subject: str, batch: Batch) -> None:
    """Raise ValueError for a batch whose mask has weights."""
    if "mask" in batch and batch["mask"].is_floating_point():
        raise ValueError(
            f"{subject}: batch['mask'] is {batch['mask'].dtype}, the weights of targets, and its loss is of pairs; "
            "give batch['mask'].bool()"
        )


def expect_replaceable_head(subject: str, model: Model) -> None:
    """Raise ValueError if no other head can be put on the model."""
    if model.features is None:
        raise ValueError(
            f"{subject}: the model has a loss of its own, as a module and a head for scores have; take a model of "
            "fzero.models (huggingface.load_hf), or write the loss as a function"
        )


def expect_losses(subject: str, model: Model) -> None:
    """Raise ValueError if nothing gives the losses of the model's tokens."""
    if model.traits.token_losses is None:
        expect_replaceable_head(subject, model)
        if not {"head/w", "embed/tokens"} & leaf_shapes(model).keys():
            raise ValueError(
                f"{subject}: the model has no leaf head/w or embed/tokens, by which a head multiplies its features; "
                "give one of them this name, or write the loss as a function"
            )


def answer_model(model: Model) -> Model:
    """The model whose loss has `answer_sums` as extra["log_probs"], which add up over cp."""

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        sums = answer_sums(model, params, x, batch, ctx)
        return Loss(sums.sum(), torch.ones_like(sums[0, 0]), {"log_probs": sums})

    return with_still_leaves(model)._replace(head=head)


@checked()
def answer_log_probs(model: Model, params: Tree, batch: Batch, ctx: Ctx = Ctx()) -> Tensor:  # noqa: B008
    """Return the log-probability of the answer in each document of each row, float64 [B, S]: the sum over the tokens
    that count. On one process.

    batch: that of `dpo`, without reference. S is even and above T; a row has fewer documents, and the rest is 0.

    >>> from fzero import models, random
    >>> model = models.build(models.MLPConfig(vocab_size=8))
    >>> batch = {"tokens": torch.tensor([[5, 6, 5]]), "targets": torch.tensor([[6, 2, 7]])}
    >>> batch |= {"mask": torch.ones(1, 3, dtype=torch.bool), "documents": torch.tensor([[0, 0, 1]])}
    >>> sums = answer_log_probs(model, models.init_params(model, random.key(0)), batch)
    >>> (sums < 0).tolist()
    [[True, True, False, False]]
    """
    return loss(answer_model(model), params, batch, ctx).extra["log_probs"]


def log_probs_of(batch: Batch, sums: Tensor) -> Tensor:
    """The entry `reference` [B, T] of a batch from the sums of its documents [B, S]."""
    documents = batch["documents"].long()
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(first, sums.gather(1, documents), 0.0)


def answer_sums(model: Model, params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Tensor:
    """Return `answer_log_probs` from the activations after the last block; over cp the sums of this rank's tokens."""
    losses = losses_by_token(model, params, x, batch, ctx)
    return sum_by_document(-losses, batch, local_positions(ctx))


def losses_by_token(model: Model, params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Tensor:
    """The cross-entropy of each target, times its weight, [B, T], from the last activations."""
    if model.traits.token_losses is not None:
        return model.traits.token_losses(params, x, batch, ctx)
    assert model.features is not None  # expect_losses
    h = enter_region(model.features(params, x, ctx), ctx, "head")
    name = "head/w" if "w" in params.get("head", {}) else "embed/tokens"
    w, words = pytree.named_leaves(params)[name], leaf_shapes(model)[name][0]
    targets, mask = batch["targets"], batch["mask"].reshape(-1) if "mask" in batch else None
    cap = getattr(model.config, "logit_cap", 0.0)
    options = {"axis": ctx.mesh.tp, "columns": words, "cap": cap}
    ctx.kernels.refuse("the log-probability of a preference")
    losses = token_losses(h.reshape(-1, h.shape[-1]), w, targets.reshape(-1), mask, **options)
    return losses.reshape(targets.shape)


def local_positions(ctx: Ctx) -> Tensor | None:
    """The positions of this rank's tokens over cp, int64 [T / cp]; None where it has whole sequences."""
    return ctx.tokens.positions if isinstance(ctx.tokens.positions, Tensor) else None


def sum_over_cp(sums: Tensor, ctx: Ctx) -> Tensor:
    """The sums over the ranks of cp, for results that differ between them."""
    cp = ctx.mesh.cp
    return pvary(psum(sums, cp, leaf="loss"), cp, leaf="loss")


def sum_by_document(values: Tensor, batch: Batch, positions: Tensor | None = None) -> Tensor:
    """The sums of values [B, T] over the documents of each row, float64 [B, S] with S even and above T."""
    # In float64 they are added in one order on a CPU, and on a GPU too: accumulation by index sorts there.
    documents = batch["documents"].long()
    size = documents.shape[1] // 2 * 2 + 2
    documents = documents if positions is None else documents.index_select(1, positions)
    rows = torch.arange(documents.shape[0], device=documents.device)[:, None].expand(documents.shape)
    zeros = torch.zeros(documents.shape[0], size, dtype=torch.float64, device=documents.device)
    return zeros.index_put((rows, documents), values.to(torch.float64), accumulate=True)


RANGES = 8  # of positions, at most


@checked()
def by_position(model: Model) -> Model:
    """Return the model with its cross entropy as the loss, and with the sums of it over ranges of positions in `extra`:
    loss/E in nats and tokens/E for each end E of `position_ranges`, float64.

    The position of a token is the number of tokens of its document before it in its row: what attention sees. Without
    `documents` in the batch a row is one document. For evaluations: each token's loss is found by itself, which is no
    form that training has kernels for.

    Raises ValueError for a model that was made from a module.

    >>> from fzero import models, random
    >>> model = by_position(models.build(models.MLPConfig(vocab_size=8)))
    >>> batch = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "targets": torch.tensor([[1, 2, -100, 3]])}
    >>> extra = models.loss(model, models.init_params(model, random.key(0)), batch, models.Ctx()).extra
    >>> {name: int(value) for name, value in extra.items() if name.startswith("tokens")}
    {'tokens/1': 1, 'tokens/2': 1, 'tokens/4': 1}
    """
    expect_losses("by_position", model)

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
        losses = losses_by_token(model, params, x, batch, ctx).reshape(-1).double()
        counts, position = counted_tokens(targets, mask), document_offsets(batch["targets"], ctx)
        ends = position_ranges(position.shape[-1])
        # Of sequences split over cp a rank has the losses of some positions.
        if isinstance(ctx.tokens.positions, Tensor):
            position = position.index_select(-1, ctx.tokens.positions)
        edges = torch.tensor(ends, device=losses.device)
        bucket = torch.bucketize(position, edges, right=True).expand(batch["targets"].shape).reshape(-1)
        extra = {}
        for i, end in enumerate(ends):
            in_bucket = bucket == i
            extra[f"loss/{end}"] = torch.where(in_bucket, losses, 0.0).sum()
            extra[f"tokens/{end}"] = torch.where(in_bucket, counts.double(), 0.0).sum()
        return Loss(losses.sum(), number_of(counts), extra | sums_by_source(batch, losses, counts))

    return model._replace(head=head)


def document_offsets(targets: Tensor, ctx: Ctx) -> Tensor:
    """The position in its document of each token of whole sequences, int64 [B, T] or [1, T]."""
    if isinstance(ctx.tokens.documents, tuple):
        split = 1 if isinstance(ctx.tokens.positions, tuple) else ctx.mesh.cp.size
        return torch.arange(targets.shape[-1] * split, device=targets.device)[None]
    return document_positions(ctx.tokens.documents)


def position_ranges(seq_len: int) -> tuple[int, ...]:
    """The ends of at most RANGES ranges of positions: powers of two, and T.

    >>> position_ranges(256), position_ranges(12)
    ((2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 12))
    """
    ends = [seq_len]
    end = 1 << (seq_len - 1).bit_length()
    while end > 1 and len(ends) < RANGES:
        end >>= 1
        ends.insert(0, end)
    return tuple(ends)


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
