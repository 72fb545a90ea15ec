"""The loss of a micro-batch and its gradient, for a Model and for a plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat, needs_grad, transforms
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import Nvme, ScratchTensor
from fzero.sharding import Plan
from fzero.sharding.prefetch import Group, ParamFetcher
from fzero.sharding.reduce import GradientReducer
from fzero.sharding.slices import shard_dim
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, call_plain, context_of, make_loss, sum_losses
from fzero.train.state import TrainState
from fzero.train.streamed import StreamedModel, parts_of
from fzero.train.update.in_backward import EarlyUpdate
from fzero.train.update.in_memory import own


def make_backward(
    loss_fn: base.Model | LossFn, plan: Plan, how: Execution, nvme: Nvme | None = None
) -> Callable[..., base.Loss]:
    """`(params, part, first, key, seed, sink, last=, ready=) -> Loss` of one micro-batch, whose rows begin with row
    `first` of the batch.

    The gradient of the total * seed, as this rank has it before anything is summed over ranks, goes to `sink.put`, as
    of a Reducer, part of the model by part. last, ready: see StreamedModel.backward.
    """
    if isinstance(loss_fn, base.Model):
        ctx = context_of(plan, how)
        parts = parts_of(loss_fn, plan)
        parts = parts._replace(depth=how._layers or parts.depth)
        assert isinstance(how.remat, Remat)  # Execution parses a text
        streamed = StreamedModel(loss_fn, parts, plan, ctx, how.remat, how.prefetch, nvme)

        def layered(
            params: Tree, part: Any, first: int, key: Any, seed: Tensor, sink: Any, last: bool, ready: Any = None
        ) -> base.Loss:
            at = streamed.context(part, key, torch.full((), first, device=seed.device))
            return streamed.backward(params, part, at, seed, sink, last=last, ready=ready)

        return layered

    def call(params: Tree, part: Any, key: Any, first: Any) -> base.Loss:
        return call_plain(loss_fn, params, part, plan.policy)

    def plain(
        params: Tree, part: Any, first: int, key: Any, seed: Tensor, sink: Any, last: bool, ready: Any = None
    ) -> base.Loss:
        grads, losses = functional(call, whole_params(params, plan, seed.device), plan, [part], [first], key, seed)
        put_whole(sink, grads, last=last)
        return losses[0]

    return plain


def make_gradient(
    loss_fn: base.Model | LossFn,
    plan: Plan,
    how: Execution,
    nvme: Nvme | None = None,
    lasting: tuple[dict[Any, Tensor] | None, bool] = (None, False),
) -> Callable[..., tuple[Tree, base.Loss]]:
    """`(state, parts, size, key, seed) -> (gradient of the summed total * seed, sums of losses)`, over all parts of all
    ranks.

    The gradient is in the layout of plan.opt, in policy.accumulate; `size` rows to a part. lasting: see Reducer, rooms
    and narrow."""
    loss, backward = make_loss(loss_fn, plan, how), make_backward(loss_fn, plan, how, nvme)
    mesh, policy = plan.mesh, plan.policy

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
        early: EarlyUpdate | None = None,
        known: Callable[[base.Loss], None] | None = None,
    ) -> tuple[Tree, base.Loss]:
        firsts = [(j * mesh.data_size + mesh.data_rank) * size for j in range(len(parts))]
        if transforms() or needs_grad(*pytree.leaves((state.params, parts))):
            grads, losses = pure(state.params, parts, firsts, key, seed)
            return grads, sum_losses(losses, mesh)
        reducer = GradientReducer(plan, len(parts), away, early.take if early is not None else None, *lasting)
        losses = []
        for j, (part, first) in enumerate(zip(parts, firsts)):
            last = j == len(parts) - 1
            # After the last forward pass the sum of all losses is known.
            ready = None if known is None or not last else lambda loss: known(sum_losses([*losses, loss], mesh))
            losses.append(backward(state.params, part, first, key, seed, reducer, last, ready))
        like = plan.trained(plan.like)
        if early is not None:
            like = {name: leaf for name, leaf in pytree.named_leaves(like).items() if name not in early.stacked}
        return reducer.sums(like), sum_losses(losses, mesh)

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
        out = [gather.start(Group("all", (name,), i), "forward")()[0] for i in layers]
        return torch.stack(out) if shard_dim(name) else out[0]

    return pytree.map_named(whole, params)


Objective = Callable[..., base.Loss]  # (params, batch, key, first) -> Loss


def functional(
    loss: Objective, params: Tree, plan: Plan, parts: list[Any], firsts: list[Any], key: Any, seed: Tensor
) -> tuple[Tree, Any]:
    """(gradient in the layout at rest, losses of the parts) by torch.func.grad, so that it may itself be transformed.

    Canonical sums follow the binary tree over the micro-batches that GradientReducer's do, in policy.accumulate.
    """
    trained, canonical = plan.trained(params), plan.reduce == "canonical"

    def objective(leaves: Tree, part: Any, first: Any) -> tuple[Tensor, base.Loss]:
        out = loss(plan.whole(leaves, params), part, key, first)
        return out.total * seed, out

    gradient = torch.func.grad(objective, has_aux=True)
    sums: list[
        tuple[int, Tree]
    ] = []  # (terms, their sum): of a binary counter, largest first; fast sums have one entry
    losses = []
    for part, first in zip(parts, firsts):
        grads, out = gradient(trained, part, first)
        terms = 1
        if canonical:
            grads = pytree.map(lambda g: g.to(plan.policy.accumulate), grads)
        while sums and (not canonical or sums[-1][0] == terms):
            before, total = sums.pop()
            terms, grads = terms + before, pytree.map(torch.add, total, grads)
        sums.append((terms, grads))
        losses.append(out)
    _, total = sums.pop()
    while sums:
        total = pytree.map(torch.add, sums.pop()[1], total)
    return total, losses
