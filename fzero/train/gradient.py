"""The loss of a micro-batch and its gradient, for a Model and for a plain function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat, needs_grad, transforms
from fzero.core.pytree import Tree
from fzero.core.tree_sum import TreeSum
from fzero.models import base
from fzero.models.layers import block_keys
from fzero.offload import Nvme, ScratchTensor
from fzero.optim.norm import Squared, widen
from fzero.optim.sharded_leaves import shards_of
from fzero.sharding import Plan
from fzero.sharding.pipelines import users_of
from fzero.sharding.prefetch import Group, ParamFetcher
from fzero.sharding.reduce import GradientReducer, LayerSums
from fzero.sharding.slices import is_stacked, iterate_blocks, shard_dim
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, call_plain, context_of, make_loss, sum_losses
from fzero.train.over_stages import gather_over_pp, scatter_over_pp, share_losses
from fzero.train.row import Batches, run_row
from fzero.train.state import TrainState
from fzero.train.streamed import StreamedModel, parts_of
from fzero.train.update.in_backward import EarlyUpdate
from fzero.train.update.in_memory import own
from fzero.train.update.speculation import SpeculativeUpdate


def make_backward(
    loss_fn: base.Model | LossFn, plan: Plan, how: Execution, nvme: Nvme | None = None
) -> Callable[..., list[base.Loss]]:
    """`(params, batches, seed, sink, ready=) -> losses` of some micro-batches; on a mesh with pp of those whose last
    stage is this rank's.

    The gradient of the total * seed, as this rank has it before anything is summed over ranks, goes to `sink.put`, as
    of a Reducer, part of the model by part. params: as they are used (see over_stages). ready: is called with the loss
    of each micro-batch before its backward pass.
    """
    if isinstance(loss_fn, base.Model):
        ctx = context_of(plan, how)
        parts = parts_of(loss_fn, plan, how._layers)
        assert isinstance(how.remat, Remat)  # Execution parses a text
        known = {} if how._known is None else how._known
        options = (how.prefetch, how.reshard, nvme, known, how.resident)
        return partial(run_row, StreamedModel(loss_fn, parts, plan, ctx, how.remat, *options))

    def call(params: Tree, part: Any, key: Any, first: Any) -> base.Loss:
        return call_plain(loss_fn, params, part, plan.policy)

    def plain(params: Tree, batches: Batches, seed: Tensor, sink: Any, ready: Any = None) -> list[base.Loss]:
        out: list[base.Loss] = []
        for part, first in zip(batches.parts, batches.firsts):
            grads, losses = functional(call, whole_params(params, plan, seed.device), plan, [part], [first], (), seed)
            out += losses
            put_whole(sink, grads, last=len(out) == len(batches.parts))
            del grads
        return out

    return plain


def layer_keys(key: Tensor | tuple[()], plan: Plan, how: Execution) -> dict[str, Any]:
    """The fields `key` and `keys` of the Ctx of a layered model in a step with this `dropout_key`; {} for none.

    A compiled block makes its keys itself, within other kernels."""
    if isinstance(key, tuple):
        return {}
    depths = {name.split("/")[0]: leaf.shape[0] for name, leaf in plan.leaves.items() if is_stacked(name)}
    return {"key": key, "keys": {} if how.compiled else block_keys(key, sum(depths.values()))}


def make_gradient(
    loss_fn: base.Model | LossFn,
    plan: Plan,
    how: Execution,
    nvme: Nvme | None = None,
    lasting: tuple[dict[Any, Tensor] | None, bool] = (None, False),
) -> Callable[..., tuple[Tree, base.Loss, dict[str, Squared]]]:
    """`(state, parts, size, key, seed) -> (gradient of the summed total * seed, sums of losses, squares)`, over all
    parts of all ranks.

    The gradient is in the layout of plan.opt, in policy.accumulate; `size` rows to a part. squares: of the leaves that
    the norm need not read, see GradientReducer. lasting: see there, rooms and narrow."""
    loss, backward = make_loss(loss_fn, plan, how), make_backward(loss_fn, plan, how, nvme)
    told: dict[Any, Any] = {} if how._known is None else how._known
    users = users_of(plan)
    mesh, policy, square = plan.mesh, plan.policy, shards_of(plan).square

    def squares_of(leaf: Tensor) -> list[Tensor]:
        return [square(piece) for _, piece in widen(iterate_blocks(leaf, False))]

    def pure(params: Tree, parts: list[Any], firsts: list[Any], key: Any, seed: Tensor) -> tuple[Tree, list[base.Loss]]:
        grads, losses = functional(loss, params, plan, parts, firsts, key, seed)
        grads = pytree.map(lambda g: g.to(policy.accumulate), grads)
        return own(plan, plan.whole(grads, params)), losses

    def away(name: str, stream: str, depth: int | None) -> ScratchTensor:
        assert nvme is not None  # given with a plan whose gradients rest on a disk
        return ScratchTensor(nvme.scratch, ("grads", stream, name), depth, policy.accumulate)

    def gradient(
        state: TrainState,
        parts: list[Any],
        size: int,
        key: Any,
        seed: Tensor,
        early: EarlyUpdate | SpeculativeUpdate | None = None,
        known: Callable[[base.Loss], None] | None = None,
    ) -> tuple[Tree, base.Loss, dict[str, Squared]]:
        firsts = [(j * mesh.data_size + mesh.data_rank) * size for j in range(len(parts))]
        if transforms() or needs_grad(*pytree.leaves((state.params, parts))):
            grads, losses = pure(state.params, parts, firsts, key, seed)
            return grads, sum_losses(losses, mesh), {}
        keys = layer_keys(key, plan, how)
        shown = LayerSums(early.take, early.keeps) if early is not None else None
        reducer, device = GradientReducer(plan, len(parts), away, shown, *lasting, squares_of), seed.device
        so_far: list[base.Loss] = []

        def ready(loss: base.Loss) -> None:
            so_far.append(loss)
            if known is not None and len(so_far) == len(parts):  # after the last forward pass
                known(sum_losses(so_far, mesh))

        params = gather_over_pp(state.params, plan, users, device)
        losses = backward(params, Batches(parts, firsts, keys), seed, reducer, ready)
        del params
        over_pp = None
        if plan.stages is not None:
            losses = share_losses(losses, len(parts), plan, told, device)
            over_pp = partial(scatter_over_pp, plan=plan, users=users, device=device)
        like = plan.trained(plan.like)
        if early is not None and not early.keeps:
            like = {name: leaf for name, leaf in pytree.named_leaves(like).items() if name not in early.stacked}
        sums, shapes = (
            reducer.sums(like, over_pp),
            {name: leaf.shape for name, leaf in pytree.named_leaves(plan.like).items()},
        )
        squares = {name: Squared(found, shapes[name], policy.accumulate) for name, found in reducer.squares().items()}
        return sums, sum_losses(losses, mesh), squares

    return gradient


def put_whole(reducer: GradientReducer, grads: Tree, last: bool) -> None:
    """Hand the gradients of whole leaves to `reducer`, a stacked leaf layer by layer."""
    for name, leaf in pytree.named_leaves(grads).items():
        for i, grad in enumerate(leaf) if shard_dim(name) else [(None, leaf)]:
            reducer.put(Group("all", (name,), i), (name,), [grad], last=last)


def whole_params(params: Tree, plan: Plan, device: torch.device) -> Tree:
    """All parameters gathered over dp, for a plain loss function."""
    gather = ParamFetcher(params, plan, device)

    def whole(name: str, leaf: Any) -> Tensor:
        if name not in gather.sharded and name not in gather.away:
            return leaf
        layers = range(leaf.shape[0]) if shard_dim(name) else [None]
        out = [gather.start(Group("all", (name,), i), "forward").wait()[0] for i in layers]
        return torch.stack(out) if shard_dim(name) else out[0]

    return pytree.map_named(whole, params)


Objective = Callable[..., base.Loss]  # (params, batch, key, first) -> Loss


def functional(
    loss: Objective, params: Tree, plan: Plan, parts: list[Any], firsts: list[Any], key: Any, seed: Tensor
) -> tuple[Tree, Any]:
    """(gradient in the layout at rest, losses of the parts) by torch.func.grad, so that it may itself be transformed.

    Canonical sums follow the binary tree over the micro-batches that GradientReducer's do, in policy.accumulate.
    """
    trained, plus = plan.trained(params), partial(pytree.map, torch.add)

    def objective(leaves: Tree, part: Any, first: Any) -> tuple[Tensor, base.Loss]:
        out = loss(plan.whole(leaves, params), part, key, first)
        return out.total * seed, out

    gradient = torch.func.grad(objective, has_aux=True)
    canonical, total = TreeSum(plus) if plan.reduce == "canonical" else None, None
    losses = []
    for part, first in zip(parts, firsts):
        grads, out = gradient(trained, part, first)
        losses.append(out)
        if canonical is not None:
            canonical.add(pytree.map(lambda g: g.to(plan.policy.accumulate), grads))
        else:
            total = grads if total is None else plus(total, grads)
    return total if canonical is None else canonical.sum(), losses
