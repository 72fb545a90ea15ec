"""The forward pass of a layered Model, from a batch to its loss or logits, on one process or on a rank of a mesh."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree
from fzero.core.stack import Block, depth, in_turn, stack
from fzero.kernels.cross_entropy import counted_tokens, number_of
from fzero.kernels.linear_cross_entropy import linear_cross_entropy
from fzero.models.base import Ctx, Loss, Model, stacks_of
from fzero.models.batch import SOURCES, WHOLE, WRONG, Batch, check_batch, has_tokens, mark_wrong, select_tokens
from fzero.models.by_source import sums_by_source
from fzero.models.place import balanced_positions, patterns_of
from fzero.models.stack_over_pp import stack_over_pp
from fzero.sharding import Plan
from fzero.sharding.unshard import unshard_block, unshard_tree


def under_plan(ctx: Ctx, plan: Plan) -> Ctx:
    """The ctx of functions whose parameters rest as `plan` says: its mesh, and how activations, attention and experts
    are split, are the plan's, whose sums of gradients are those of just that program; and its dtype where that is
    wider."""
    dtype = torch.promote_types(ctx.dtype, plan.policy.compute)
    split = {"sequence": plan.sequence, "context": plan.context or (), "experts": plan.experts or ()}
    return ctx._replace(mesh=plan.mesh, dtype=dtype, **split)


def sequence_parts(ctx: Ctx) -> int:
    """The number of parts that sequence parallelism cuts a sequence into."""
    return ctx.mesh["tp"].size if ctx.sequence else 1


def check(model: Model, batch: Batch, ctx: Ctx) -> None:
    """Raise ValueError if a batch of whole sequences does not fit the model, or cannot be split as ctx says."""
    parts, cp = sequence_parts(ctx), ctx.mesh["cp"].size
    check_batch(model.config, batch, parts if cp == 1 else 1)
    if cp > 1:
        if not ctx.context:
            raise ValueError(
                f"cp={cp}: the ctx does not say how; write Ctx(context=plan.context), or give loss the plan"
            )
        ctx.context.expect_divisible(cp, batch["tokens"].shape[-1], parts)


def prepare(model: Model, batch: Batch, ctx: Ctx) -> Ctx:
    """Return the ctx of a batch of whole sequences: with its documents, its first row, this rank's positions and what
    the model's `prepare` makes of it."""
    cp = ctx.mesh["cp"]
    if ctx.context:
        tokens, pieces = batch["tokens"], ctx.context.over(cp.size)
        if pieces is None:
            placed = balanced_positions(tokens, batch.get("documents"), cp.size, patterns_of(model.config))
        else:
            ranks = range(cp.size)
            placed = torch.stack([pieces.positions(rank, tokens.shape[-1], tokens.device) for rank in ranks])
        ctx = ctx._replace(pieces=pieces or (), placed=placed, positions=placed[cp.rank])
    if has_tokens(model.config):
        ctx = ctx._replace(documents=batch.get("documents", ()), first=batch.get("first", ctx.first))
    return ctx if model.prepare is None else ctx._replace(prepared=model.prepare(batch, ctx))


def own_part(model: Model, batch: Batch, ctx: Ctx) -> Batch:
    """The part of a batch of whole sequences that embedding and head see, ctx being from `prepare`: what there is for
    each token, of this rank's, without tokens that the embedding has no row for: see `mark_wrong`. Documents, and the
    model's `whole_entries`, stay whole."""
    if not isinstance(ctx.positions, tuple):
        batch = select_tokens(batch, ctx.positions, (*WHOLE, *model.whole_entries))
    return mark_wrong(model.config, batch)


def judged(out: Loss, batch: Batch) -> Loss:
    """The loss that a head gave of a batch from `own_part`, NaN if a value of that batch is wrong."""
    wrong = batch.get(WRONG)
    return out if wrong is None else out._replace(total=torch.where(wrong, math.nan, out.total))


def transform(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Any:
    """Return the activations after the last block; ctx is from `prepare`, the batch from `own_part`. With pp they are
    those on the last stage's rank."""
    x = model.embed(unshard_part(model, "embed", params, plan, ctx), batch, ctx)
    inner = ctx._replace(remat=Remat())  # a block is the same program under every policy
    first = 0

    def apply(blocks: tuple[Block, ...], layers: Tree, x: Any, first: int) -> Any:
        return stack(blocks, layers, x, inner, remat=ctx.remat, compiled=ctx.compiled, first=first)

    for one in stacks_of(model):
        if one.join is not None:
            x = one.join(unshard_part(model, one.join_name, params, plan, ctx), x, batch, ctx)
        blocks, layers = in_turn(one.block), params[one.name]
        if plan is not None and ctx.mesh.size > 1:
            blocks = tuple(unshard_block(f, plan, one.name) for f in blocks)
        if plan is None or plan.stages is None:
            x = apply(blocks, layers, x, first)
            first += depth(layers)
        else:
            x, first = stack_over_pp(apply, one.name, blocks, layers, x, inner, first, plan)
    return x


def unshard_part(model: Model, part: str, params: Tree, plan: Plan | None, ctx: Ctx) -> Tree:
    """Return the parameters that "embed", "head" or a join uses, gathered from the shards at rest."""
    if plan is None or ctx.mesh.size == 1:
        return params
    shared = model.shared if part != "embed" else ()
    used = {
        name: leaf
        for name, leaf in pytree.named_leaves(params).items()
        if name.startswith(f"{part}/") or name in shared
    }
    return unshard_tree(pytree.nest(used), plan)


def loss(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Loss:
    """Return the loss of a batch, as sums: embed, the stack of blocks, head.

    batch: tokens and targets int64 [B, T]; optional mask [B, T] (bool, or float: the weight of each target, by which
    its loss is multiplied, and whose sum num_tokens is), documents int [B, T], first int64 scalar. total is in nats;
    NaN if a token or target is outside of the vocabulary, or a weight negative or not finite (see `check_tokens`).
    plan: on a mesh, `params` are this rank's shards at rest and the batch is this rank's part. The sums are then this
    rank's too: equal on the ranks of tp and pp, to be summed over dp, rp and cp; the gradients with respect to `params`
    are complete and in their layout. The ctx's mesh, sequence, context and experts are then the plan's, whatever it has
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
    if ctx.experts:
        ctx = ctx._replace(experts=replace(ctx.experts, slack=math.inf))  # a loss cannot be computed again
    check(model, batch, ctx)
    ctx = prepare(model, batch, ctx)
    batch = own_part(model, batch, ctx)
    x = transform(model, params, batch, ctx, plan)
    out = judged(model.head(unshard_part(model, "head", params, plan, ctx), x, batch, ctx), batch)
    if plan is None or plan.stages is None:
        return out
    axis = plan.mesh["pp"]  # whose ranks have computed a head each, as they must gather its leaves
    mine = torch.full((), axis.rank == plan.stages.ranks[-1], device=out.total.device)
    return pytree.map(lambda leaf: psum(torch.where(mine, leaf, torch.zeros_like(leaf)), axis, leaf="loss"), out)


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
    """Return (cross entropy summed over the tokens that count, times their weights if the mask has some, their number
    or the sum of their weights, further sums to report) for normalised activations x [B, T, D] and w [V, D]; cap: of
    the logits, 0 for none; words: V, 0 where tp divides it.

    The further sums are those of `sums_by_source`, for a batch that has sources.

    Under tp w is this rank's rows [V/tp, D] and x is inside the tensor-parallel region (`layers.enter`); the results
    are the same on all ranks of tp.
    """
    targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
    options = {"axis": ctx.mesh["tp"], "compiled": ctx.compiled, "impl": ctx.kernels["linear_cross_entropy"]}
    options |= {name: value for name, value in (("cap", cap), ("columns", words)) if value}
    flat = x.reshape(-1, x.shape[-1])
    if SOURCES not in batch:
        num_tokens = number_of(counted_tokens(targets, mask))  # which ones count is not kept beside the products
        return linear_cross_entropy(flat, w, targets, mask, **options), num_tokens, {}
    counts = counted_tokens(targets, mask)
    total, losses = linear_cross_entropy(flat, w, targets, mask, each=True, **options)
    return total, number_of(counts), sums_by_source(batch, losses, counts)
