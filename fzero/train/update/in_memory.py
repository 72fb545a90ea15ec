"""The end of a step: the optimizer's update on this rank's part of every leaf, and back to the parameters at rest.

And what is done where ranks move apart between two sums of their optimizer (optim/zero_one_adam.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather_same, start_all_gather
from fzero.comm.messages import SMALL
from fzero.core import pytree
from fzero.core.compile_cache import have_compiler
from fzero.core.device import kind_of
from fzero.core.gpu_copies import Future
from fzero.core.pytree import Tree
from fzero.kernels.optim_leaf import MANY
from fzero.optim import GradientTransformation, apply_in_place, apply_updates
from fzero.optim.base import Pass, name_tree, overwrite
from fzero.optim.combine import split_chain
from fzero.optim.sharded_leaves import bind_to_plan, shards_of_sums
from fzero.sharding import Plan
from fzero.sharding.error_feedback import ErrorFeedback
from fzero.sharding.slices import shard_dim
from fzero.train.state import TrainState


class Gradients(NamedTuple):
    """The sums of a step's gradients, in the layout of plan.opt, and their factor for the mean loss."""

    sums: Tree
    factor: Tensor  # 0-dim
    norm: Tensor  # 0-dim, of the sums
    errors: ErrorFeedback | None = None  # of what was sent in codes


def on_device(grads: Tree) -> bool:
    """Whether the gradients are on a GPU."""
    return all(kind_of(g) == "cuda" for g in pytree.leaves(grads))


def on_host(body: GradientTransformation, elements: int) -> bool:
    """Whether to use the compiled one-pass update on a CPU: only the number of elements decides."""
    # Worth its compile time for many elements per rank; by their number alone, so that in-memory and streamed states
    # have the same bits.
    return body.one_pass and elements >= MANY and have_compiler()


def spread(plan: Plan, target: Tree, params: Tree, done: Collection[str] = ()) -> None:
    """Write the updated parts into the trained parameters, in place, and those of the other ranks beside them."""
    names = plan.split_leaves
    pending: list[tuple[Future[Tensor], Tensor | None]] = []  # and where the gathered leaf is copied to, dp leading

    def gather(shard: Tensor, name: str, out: Tensor) -> None:
        out_buffer = out if out.is_contiguous() else None  # a state made by hand may have any strides
        started = start_all_gather(shard.to(out.dtype).contiguous(), plan.link(name), leaf=name, out=out_buffer)
        pending.append((started, out if out_buffer is None else None))

    values, leaves = pytree.named_leaves(target), pytree.named_leaves(plan.trained(params))
    with plan.mesh.ledger.phase("update"):
        for name, leaf in leaves.items():
            value, dim = values[name], shard_dim(name)
            if name not in names:
                if value is not leaf and name not in done:
                    leaf.copy_(value)
                continue
            if not leaf.numel():
                continue  # a stack of which this rank's stages have no layer
            # The shards of a layer are side by side in memory, those of a stack are not: a large layer is gathered in
            # place, small ones together with a transpose.
            if dim and value[0].numel() * leaf.element_size() >= SMALL:
                for i in range(leaf.shape[0]):
                    gather(value[i], name, leaf[i])
            elif dim:
                shard = value.to(leaf.dtype).transpose(0, 1).contiguous()
                pending.append((start_all_gather(shard, plan.link(name), leaf=name), leaf.transpose(0, 1)))
            else:
                gather(value, name, leaf)
        # All gathers are started before any is waited for.
        for gathering, out in pending:
            full = gathering.wait()
            if out is not None:
                out.copy_(full)


class InMemoryUpdate(NamedTuple):
    """The update of a state in memory, by an optimizer on the plan's shards."""

    tx: GradientTransformation
    plan: Plan

    @torch.no_grad()
    def donated(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """The state after the optimizer's update, in the buffers of `state`; unchanged if the step is skipped."""
        plan, parts = self.plan, split_chain(self.tx)
        # On a GPU `skipped` stays there, and the kernel looks at it: reading it would make the host wait for the step.
        waits_not = parts.body.one_pass and on_device(grads.sums)
        if skipped is not None and not waits_not:
            if bool(skipped):
                return state
            skipped = None
        factor, body_state = parts.factor(grads.factor, grads.norm), parts.state(state.opt_state)
        if plan.policy.has_master:
            target = state.master
        else:
            names = plan.split_leaves
            target = pytree.map_named(
                # The optimizer's kernels need dense memory; `spread` writes the parts back.
                lambda name, x: x.contiguous() if name in names else x,
                plan.local_shards(state.params),
            )
        copies: dict[str, Tensor] = {}
        host = not on_device(grads.sums) and on_host(parts.body, sum(leaf.numel() for leaf in pytree.leaves(target)))
        if waits_not or host:
            names, leaves = plan.split_leaves, pytree.named_leaves(plan.trained(state.params))
            copies = (
                {name: leaf for name, leaf in leaves.items() if name not in names} if plan.policy.has_master else {}
            )
            options = Pass(factor=factor, skip=skipped, copies=copies, host=host)
            sums = grads.sums
        else:
            sums, options = overwrite(lambda name, g: g.mul_(factor), name_tree(grads.sums), grads.sums), Pass()
        target, body_state = apply_in_place(parts.body, sums, body_state, target, options)
        spread(plan, target, state.params, done=copies)
        opt_state = parts.merge(state.opt_state, body_state)
        return state._replace(master=target if plan.policy.has_master else (), opt_state=opt_state)

    def pure(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """The same as a pure function, which chooses by torch.where: it composes with vmap and grad."""
        plan = self.plan
        old_target = state.master if plan.policy.has_master else plan.local_shards(state.params, linear=True)
        vary = shards_of_sums(plan).vary  # the factor is the same on all ranks, and each uses it with its shards
        scaled = pytree.map_named(lambda name, g: g * vary(name, grads.factor), grads.sums)
        updates, opt_state = self.tx.update(scaled, state.opt_state, old_target)
        target = apply_updates(old_target, updates)
        params = params_at_rest(plan, target, state.params)
        new = state._replace(params=params, master=target if plan.policy.has_master else (), opt_state=opt_state)
        return new if skipped is None else pytree.map(lambda a, b: torch.where(skipped, a, b), state, new)

    def with_local_params(self, state: TrainState) -> TrainState:
        """The state with the parameters at which this rank's gradient is taken, where ranks move apart."""
        if self.tx.sums.local is None:
            return state
        params = self.tx.sums.local(state.opt_state, updated_params(self.plan, state))
        return state if params is None else state._replace(params=params_at_rest(self.plan, params, state.params))


def params_at_rest(plan: Plan, target: Tree, params: Tree) -> Tree:
    """New parameters at rest, whose trained ones are those of `target`, as this rank updates them."""
    names = plan.split_leaves

    def gather_leaf(name: str, leaf: Tensor) -> Tensor:
        leaf = leaf.to(plan.policy.param)
        return all_gather_same(leaf, plan.link(name), shard_dim(name), leaf=name) if name in names else leaf

    with plan.mesh.ledger.phase("update"):
        return plan.merge_trained(pytree.map_named(gather_leaf, target), params)


def updated_params(plan: Plan, state: TrainState) -> Tree:
    """The parameters that this rank updates."""
    return state.master if plan.policy.has_master else plan.local_shards(state.params)


@torch.no_grad()
def sum_divergence(tx: GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """The state once ranks that move apart have summed what they moved since their last sum, in the buffers of `state`:
    what a run needs that ends between two sums. Where they are together it is the state as it was.

    Communicates: a sum of the optimizer, and what an update does to spread its result.

    >>> import fzero
    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.zero_one_adam(0.1, freeze=1, sum_every=8, weight_decay=0.0)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process(), codec="grads=1bit,local")
    >>> step = fzero.make_train_step(lambda p, batch: (p["w"] * batch["x"]).sum(), tx, plan)
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> for _ in range(2):
    ...     state, metrics = step(state, {"x": torch.ones(1, 2)})
    >>> state.params["w"]
    tensor([0.9000, 0.9000])
    >>> sum_divergence(tx, plan, state).params["w"]
    tensor([0.8000, 0.8000])
    """
    sync = bind_to_plan(tx, plan).sums.sync
    if sync is None:
        return state
    params = updated_params(plan, state)
    result = sync(state.opt_state, params)
    if result is None:
        return state
    target = apply_updates(params, result[0])
    spread(plan, target, state.params)
    return state._replace(master=target if plan.policy.has_master else (), opt_state=result[1])
