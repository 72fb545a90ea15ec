"""The forward pass of a layered Model, from a batch to its loss or logits, on one process or on a rank of a mesh.

Which tokens each rank of cp has, where the documents of a batch balance the work, is an int64 tensor that one operator
makes on the host; all ranks of cp have the same batch, and choose alike. A stack over the ranks of pp is a function
that composes with torch.func; training runs train/pipeline_executor.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero.comm.collectives import ppermute, psum
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree
from fzero.core.stack import NO_REMAT, Block, depth, in_turn, stack
from fzero.kernels.attention_pattern import Pattern, pairs_by_query
from fzero.kernels.cross_entropy import counted_tokens, number_of
from fzero.kernels.custom_operator import operator
from fzero.kernels.linear_cross_entropy import linear_cross_entropy
from fzero.models.base import Ctx, Loss, Model, pieces_of, stacks_of
from fzero.models.batch import (
    FULL_ENTRIES,
    SOURCES,
    WRONG,
    Batch,
    check_batch,
    has_tokens,
    mark_wrong,
    select_tokens,
    sums_by_source,
)
from fzero.models.config_values import parse_layers
from fzero.sharding import Plan
from fzero.sharding.context import balanced, blocks_of, in_blocks
from fzero.sharding.prefetch import unshard_block, unshard_tree


def patterns_of(config: Any) -> list[str]:
    """The attention patterns of a model's layers, of each period of them."""
    return [str(kind.pattern) for kind in parse_layers(getattr(config, "pattern", "full"))]


def _shape(tokens: Tensor, documents: Tensor | None, ranks: int, patterns: list[str]) -> Tensor:
    return tokens.new_empty((ranks, tokens.shape[-1] // ranks), dtype=torch.int64)


def _batch_examples(
    info: Any,
    in_dims: tuple[Any, ...],
    tokens: Tensor,
    documents: Tensor | None,
    ranks: int,
    patterns: list[str],
) -> tuple[Tensor, int | None]:
    """The rule of vmap: every example chooses by its own documents; without documents all choose alike."""
    of_tokens, of_documents = in_dims[:2]
    tokens = tokens if of_tokens is None else tokens.select(of_tokens, 0)  # which alone have no say
    if documents is None or of_documents is None:
        return balanced_positions(tokens, documents, ranks, patterns), None
    chosen = [
        balanced_positions(tokens, example_documents, ranks, patterns)
        for example_documents in documents.unbind(of_documents)
    ]
    return torch.stack(chosen), 0


@operator(
    "balanced_positions(Tensor tokens, Tensor? documents, int ranks, str[] patterns) -> Tensor",
    _shape,
    batched=_batch_examples,
)
def balanced_positions(tokens: Tensor, documents: Tensor | None, ranks: int, patterns: list[str]) -> Tensor:
    """The positions of each rank's tokens, int64 [ranks, T / ranks], by `balanced` blocks."""
    count = tokens.shape[-1]
    rows = np.zeros((1, count), np.int64) if documents is None else documents.cpu().numpy()
    work = sum(pairs_by_query(Pattern.parse(text), rows).sum(0) for text in patterns)
    blocks = blocks_of(count, ranks)
    pieces = balanced(in_blocks(np.asarray(work), blocks), ranks)
    return torch.stack([pieces.positions(rank, count) for rank in range(ranks)]).to(tokens.device)


def stack_over_pp(
    apply: Callable[..., Any],
    name: str,
    blocks: Sequence[Block],
    layers: Tree,
    x: Any,
    ctx: Any,
    first: int,
    plan: Plan,
) -> tuple[Any, int]:
    """A stack of layers over the ranks of pp: (x after it, the number of the layer behind it)."""
    # apply: (blocks, layers, x, number of the first layer) -> x, for the layers that a rank holds. first: the number of
    # the stack's first layer.
    # Stage by stage x goes on to the next stage's rank. What the other ranks hold meanwhile is nobody's, and they send
    # it around too: all ranks run the same collectives over pp, also in the backward pass and under transforms.
    assert plan.stages is not None
    axis = plan.mesh.pp
    leaves = [leaf for leaf_name, leaf in plan.leaves.items() if leaf_name.startswith(f"{name}/")]
    rows, end = leaves[0].params.rows[axis.rank], first + leaves[0].shape[0]
    for stage, numbers in enumerate(plan.stages.layers):
        low, high = max(first, numbers[0]), min(end, numbers[-1] + 1)
        if low >= high:
            continue
        step = plan.stages.ranks[stage] - plan.stages.ranks[stage - 1] if stage and low == numbers[0] else 0
        if step:
            turn = [(rank, (rank + step) % axis.size) for rank in range(axis.size)]
            x = pytree.map(lambda leaf, turn=turn: ppermute(leaf, axis, turn, leaf="x"), x)
        if plan.stages.ranks[stage] == axis.rank:
            row, shift = rows.index(low - first), (low - first) % len(blocks)
            local_layers = pytree.map(lambda leaf, row=row, n=high - low: leaf[row : row + n], layers)
            x = apply((*blocks[shift:], *blocks[:shift]), local_layers, x, low)
        else:
            x = depend_on(x, [*pytree.leaves(layers), *pytree.leaves(ctx)])
    return x, end


def depend_on(x: Any, sources: Sequence[Any]) -> Any:
    """x, to the bit, as a function also of `sources`: with their batches, and gradients of 0."""
    tensors = [leaf for leaf in (*pytree.leaves(x), *sources) if isinstance(leaf, Tensor)]

    def add_dependence(leaf: Tensor) -> Tensor:
        empty = [tensor.flatten()[:0].to(leaf.dtype).sum() for tensor in tensors]
        return leaf * (1 + sum(empty[1:], empty[0]))

    return pytree.map(add_dependence, x)


def under_plan(ctx: Ctx, plan: Plan) -> Ctx:
    """The ctx of functions whose parameters rest as `plan` says, with its mesh and options."""
    dtype = torch.promote_types(ctx.dtype, plan.policy.compute)
    return ctx._replace(mesh=plan.mesh, dtype=dtype, split=plan.split)


def sequence_parts(ctx: Ctx) -> int:
    """The number of parts that sequence parallelism cuts a sequence into."""
    return ctx.mesh.tp.size if ctx.split.sequence else 1


def check(model: Model, batch: Batch, ctx: Ctx) -> None:
    """Raise ValueError if a batch of whole sequences does not fit the model, or cannot be split as ctx says."""
    parts, cp = sequence_parts(ctx), ctx.mesh.cp.size
    check_batch(model.config, batch, parts if cp == 1 else 1)
    if cp > 1:
        if not ctx.split.context:
            raise ValueError(f"cp={cp}: the ctx does not say how; write Ctx(split=plan.split), or give loss the plan")
        ctx.split.context.expect_divisible(cp, batch["tokens"].shape[-1], parts)


def prepare(model: Model, batch: Batch, ctx: Ctx) -> Ctx:
    """Return the ctx of a batch of whole sequences: with its documents, its first row, this rank's positions and what
    the model's `prepare` makes of it."""
    cp, layout = ctx.mesh.cp, ctx.tokens
    if model.traits.foreign:
        ctx.kernels.refuse("a model of foreign code")
    if ctx.split.context:
        tokens, pieces = batch["tokens"], pieces_of(ctx)
        if pieces is None:
            placed = balanced_positions(tokens, batch.get("documents"), cp.size, patterns_of(model.config))
        else:
            ranks = range(cp.size)
            placed = torch.stack([pieces.positions(rank, tokens.shape[-1], tokens.device) for rank in ranks])
        layout = layout._replace(placed=placed, positions=placed[cp.rank])
    if has_tokens(model.config):
        layout = layout._replace(documents=batch.get("documents", ()), first=batch.get("first", layout.first))
    ctx = ctx._replace(tokens=layout)
    return ctx if model.prepare is None else ctx._replace(prepared=model.prepare(batch, ctx))


def localize_batch(model: Model, batch: Batch, ctx: Ctx) -> Batch:
    """The part of a batch of whole sequences that embedding and head see: this rank's tokens."""
    if not isinstance(ctx.tokens.positions, tuple):
        batch = select_tokens(batch, ctx.tokens.positions, (*FULL_ENTRIES, *model.traits.whole_entries))
    return mark_wrong(model.config, batch)


def flag_invalid(out: Loss, batch: Batch) -> Loss:
    """The loss of a batch, NaN if a value of that batch is wrong."""
    wrong = batch.get(WRONG)
    return out if wrong is None else out._replace(total=torch.where(wrong, math.nan, out.total))


def transform(
    model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None, *, remat: Remat = NO_REMAT
) -> Any:
    """The activations after the last block; with pp those on the last stage's rank."""
    x = model.embed(unshard_segment(model, "embed", params, plan, ctx), batch, ctx)
    first = 0

    def apply(blocks: tuple[Block, ...], layers: Tree, x: Any, first: int) -> Any:
        return stack(blocks, layers, x, ctx, remat=remat, compiled=ctx.compiled, first=first)

    for layer_stack in stacks_of(model):
        if layer_stack.join is not None:
            x = layer_stack.join(unshard_segment(model, layer_stack.join_name, params, plan, ctx), x, batch, ctx)
        blocks, layers = in_turn(layer_stack.block), params[layer_stack.name]
        if plan is not None and ctx.mesh.size > 1:
            blocks = tuple(unshard_block(f, plan, layer_stack.name) for f in blocks)
        if plan is None or plan.stages is None:
            x = apply(blocks, layers, x, first)
            first += depth(layers)
        else:
            x, first = stack_over_pp(apply, layer_stack.name, blocks, layers, x, ctx, first, plan)
    return x


def unshard_segment(model: Model, segment: str, params: Tree, plan: Plan | None, ctx: Ctx) -> Tree:
    """Return the parameters that "embed", "head" or a join uses, gathered from the shards at rest."""
    if plan is None or ctx.mesh.size == 1:
        return params
    shared = model.shared if segment != "embed" else ()
    used = {
        name: leaf
        for name, leaf in pytree.named_leaves(params).items()
        if name.startswith(f"{segment}/") or name in shared
    }
    return unshard_tree(pytree.nest(used), plan)


def loss(
    model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None, *, remat: Remat = NO_REMAT
) -> Loss:
    """Return the loss of a batch, as sums: embed, the stack of blocks, head.

    batch: tokens and targets int64 [B, T]; optional mask [B, T] (bool, or float: the weight of each target, by which
    its loss is multiplied, and whose sum num_tokens is), documents int [B, T], first int64 scalar. total is in nats;
    NaN if a token or target is outside of the vocabulary, or a weight negative or not finite (see `check_tokens`).
    plan: on a mesh, `params` are this rank's shards at rest and the batch is this rank's part. The sums are then this
    rank's too: equal on the ranks of tp and pp, to be summed over dp, rp and cp; the gradients with respect to `params`
    are complete and in their layout. The ctx's mesh and split are then the plan's, whatever it has
    itself, and its dtype if that is wider. Composes with torch.func.

    Communicates: with a plan, the gathers of the parameters (backward the sums of their gradients), the model's tensor
    parallelism, and under pp the activations of every stage. Raises ValueError if the batch does not fit the model (see
    check_batch).

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
    >>> params = models.init_params(model, random.key(0))
    >>> int(loss(model, params, {"tokens": tokens, "targets": tokens}, Ctx()).num_tokens)
    8
    """
    if plan is not None:
        ctx = under_plan(ctx, plan)
    if ctx.split.experts:
        experts = replace(ctx.split.experts, slack=math.inf)  # a loss cannot be computed again
        ctx = ctx._replace(split=ctx.split._replace(experts=experts))
    check(model, batch, ctx)
    ctx = prepare(model, batch, ctx)
    batch = localize_batch(model, batch, ctx)
    x = transform(model, params, batch, ctx, plan, remat=remat)
    out = flag_invalid(model.head(unshard_segment(model, "head", params, plan, ctx), x, batch, ctx), batch)
    if plan is None or plan.stages is None:
        return out
    axis = plan.mesh.pp  # whose ranks have computed a head each, as they must gather its leaves
    is_last = torch.full((), axis.rank == plan.stages.ranks[-1], device=out.total.device)
    return pytree.map(lambda leaf: psum(torch.where(is_last, leaf, torch.zeros_like(leaf)), axis, leaf="loss"), out)


def logits(model: Model, params: Tree, batch: Batch, ctx: Ctx = Ctx()) -> Tensor:  # noqa: B008
    """Return all logits [B, T, V] of a batch, on one process: for tests and short sequences.

    batch: tokens int64 [B, T], and optionally documents int [B, T]. The logits have ctx.dtype.

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> logits(model, models.init_params(model, random.key(0)), {"tokens": torch.zeros(2, 4, dtype=torch.int64)}).shape
    torch.Size([2, 4, 8])"""
    ctx = prepare(model, batch, ctx)
    return model.logits(params, transform(model, params, batch, ctx), ctx)


def token_loss(
    x: Tensor, w: Tensor, batch: Batch, ctx: Ctx, *, cap: float = 0.0, words: int = 0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(cross entropy summed over the tokens, their number or weight, further sums) for x [B, T, D], w [V, D]."""
    targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
    options = {"axis": ctx.mesh.tp, "compiled": ctx.compiled, "impl": ctx.kernels["linear_cross_entropy"]}
    options |= {name: value for name, value in (("cap", cap), ("columns", words)) if value}
    flat = x.reshape(-1, x.shape[-1])
    if SOURCES not in batch:
        num_tokens = number_of(counted_tokens(targets, mask))  # which ones count is not kept beside the products
        return linear_cross_entropy(flat, w, targets, mask, **options), num_tokens, {}
    counts = counted_tokens(targets, mask)
    total, losses = linear_cross_entropy(flat, w, targets, mask, per_token=True, **options)
    return total, number_of(counts), sums_by_source(batch, losses, counts)
