"""The loss of a micro-batch and its gradient, for a Model and for a plain function: what a step, and whoever checks one, computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.autodiff import Remat, needs_grad, transforms
from fzero.core.precision import Policy
from fzero.core.pytree import Tree
from fzero.kernels.registry import AUTO, Kernels
from fzero.models import base
from fzero.offload import Scratched, Space
from fzero.sharding import Mesh, Plan
from fzero.sharding.reduce import Reducer
from fzero.sharding.unshard import fetch_tree
from fzero.train.state import TrainState
from fzero.train.streamed import Streamed, functional, parts_of, put_whole, sum_losses, whole_params
from fzero.train.update.in_backward import EarlyUpdate
from fzero.train.update.in_memory import own

LossFn = Callable[[Tree, Any], Any]


class How(NamedTuple):
    """How a loss and its gradient are computed; see make_train_step."""

    policy: Policy
    remat: Remat = Remat()
    compiled: bool = False
    kernels: Kernels = AUTO
    prefetch: int = 1
    mlp_tiles: int = 1
    space: Space | None = None
    layers: int = 0  # of a plan: only the first so many layers are run; 0: all


def make_loss(loss_fn: base.Model | LossFn, plan: Plan | None, mesh: Mesh, how: How) -> Callable[..., base.Loss]:
    """`loss(params, batch, key, first) -> Loss` of a Model, or of a plain function of (params, batch), over parameters at rest.

    A plain function returns a `Loss`, a pair (sum, number of tokens), or a scalar, which counts as one token: then the loss of a step is
    the mean over its micro-batches. It is given whole parameters in policy.compute. `key` is () for no dropout.
    """
    if isinstance(loss_fn, base.Model):
        ctx = context_of(plan, mesh, how)._replace(remat=how.remat)
        return lambda params, batch, key, first: base.loss(loss_fn, params, batch, ctx._replace(key=key, first=first), plan)

    def plain(params: Tree, batch: Any, key: Any, first: Any) -> base.Loss:
        whole = params if plan is None or mesh.size == 1 else fetch_tree(params, plan, mesh)
        return call_plain(loss_fn, whole, batch, how.policy)

    return plain


def context_of(plan: Plan | None, mesh: Mesh, how: How) -> base.Ctx:
    """What a Model computes with under a plan (None: whole parameters)."""
    return base.Ctx(
        mesh=mesh,
        dtype=how.policy.compute,
        matmul=how.policy.matmul,
        compiled=how.compiled,
        kernels=how.kernels,
        sequence=plan is not None and plan.sequence,
        tiles=how.mlp_tiles,
    )


def call_plain(loss_fn: LossFn, params: Tree, batch: Any, policy: Policy) -> base.Loss:
    """The Loss of a plain function of whole parameters."""
    out = loss_fn(pytree.map(lambda leaf: leaf.to(policy.compute), params), batch)
    out = out if isinstance(out, tuple) else (out, torch.ones_like(out.detach()))
    total, num_tokens, *extra = out
    return base.Loss(total, torch.as_tensor(num_tokens), *extra)


def make_backward(loss_fn: base.Model | LossFn, plan: Plan, mesh: Mesh, how: How) -> Callable[..., base.Loss]:
    """`(params, part, first, key, seed, sink, last=, ready=) -> Loss` of one micro-batch, whose rows begin with row `first` of the batch.

    The gradient of the total * seed, as this rank has it before anything is summed over ranks, goes to `sink.put`, as of a Reducer, part of
    the model by part. last, ready: see gradients.Streamed.backward.
    """
    if isinstance(loss_fn, base.Model):
        ctx = context_of(plan, mesh, how)
        parts = parts_of(loss_fn, plan)
        parts = parts._replace(depth=how.layers or parts.depth)
        streamed = Streamed(loss_fn, parts, plan, mesh, ctx, how.remat, how.prefetch, how.space)

        def layered(params: Tree, part: Any, first: int, key: Any, seed: Tensor, sink: Any, last: bool, ready: Any = None) -> base.Loss:
            return streamed.backward(params, part, key, torch.tensor(first).to(seed.device), seed, sink, last=last, ready=ready)

        return layered

    def call(params: Tree, part: Any, key: Any, first: Any) -> base.Loss:
        return call_plain(loss_fn, params, part, how.policy)

    def plain(params: Tree, part: Any, first: int, key: Any, seed: Tensor, sink: Any, last: bool, ready: Any = None) -> base.Loss:
        grads, losses = functional(call, whole_params(params, plan, mesh, seed.device), plan, [part], [first], key, seed)
        put_whole(sink, grads, last=last)
        return losses[0]

    return plain


def make_gradient(
    loss_fn: base.Model | LossFn,
    plan: Plan,
    mesh: Mesh,
    how: How,
    lasting: tuple[dict[Any, Tensor] | None, bool] = (None, False),
) -> Callable[..., tuple[Tree, base.Loss]]:
    """`(state, parts, size, key, seed) -> (gradient of the summed total * seed, sums of losses)`, over all parts of all ranks.

    The gradient is in the layout of plan.opt, in policy.accumulate; `size` rows to a part. lasting: see Reducer, rooms and narrow.
    """
    loss, backward, policy = make_loss(loss_fn, plan, mesh, how), make_backward(loss_fn, plan, mesh, how), how.policy

    def pure(params: Tree, parts: list[Any], firsts: list[Any], key: Any, seed: Tensor) -> tuple[Tree, list[base.Loss]]:
        grads, losses = functional(loss, params, plan, parts, firsts, key, seed)
        grads = pytree.map(lambda g: g.to(policy.accumulate), grads)
        return own(plan, mesh, plan.whole(grads, params)), losses

    def away(name: str, stream: str, depth: int | None) -> Scratched:
        return Scratched(how.space.scratch, ("grads", stream, name), depth, policy.accumulate)

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
        reducer = Reducer(
            plan, mesh, policy.reduce, policy.accumulate, len(parts), away, early.take if early is not None else None, *lasting
        )
        losses = []
        for j, (part, first) in enumerate(zip(parts, firsts)):
            last = j == len(parts) - 1
            # Behind the last forward pass the sum of all losses is known.
            ready = (lambda loss: known(sum_losses([*losses, loss], mesh))) if last and early is not None else None
            losses.append(backward(state.params, part, first, key, seed, reducer, last, ready))
        like = plan.trained(plan.like)
        if early is not None:
            like = {name: leaf for name, leaf in pytree.named_leaves(like).items() if name not in early.stacked}
        return reducer.sums(like), sum_losses(losses, mesh)

    return gradient


def dropout_key(loss_fn: base.Model | LossFn, state: TrainState) -> Tensor | tuple:
    """The key of a step's dropout, () for none."""
    dropout = isinstance(loss_fn, base.Model) and getattr(loss_fn.config, "dropout", 0.0) > 0.0
    return prng.fold_in(prng.fold_in(state.key, "dropout"), state.step) if dropout else ()
