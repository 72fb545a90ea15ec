"""Ranks that move apart between two sums of their optimizer (see optim/zero_one_adam.py)."""

from __future__ import annotations

import torch

from fzero.core.pytree import Tree
from fzero.optim import GradientTransformation, apply_updates
from fzero.optim.sharded_leaves import bind_to_plan
from fzero.sharding import Plan
from fzero.train.state import TrainState
from fzero.train.update.in_memory import local_shards, params_at_rest, spread


def updated_params(plan: Plan, state: TrainState) -> Tree:
    """The parameters that this rank updates."""
    return state.master if plan.policy.has_master else local_shards(plan, state.params)


def with_local_params(tx: GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """The state with the parameters at which this rank's gradient is taken: its own, where ranks move apart between two
    sums of an optimizer."""
    if tx.local is None:
        return state
    params = tx.local(state.opt_state, updated_params(plan, state))
    return state if params is None else state._replace(params=params_at_rest(plan, params, state.params))


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
    >>> state.params["w"], sum_divergence(tx, plan, state).params["w"]
    (tensor([0.9000, 0.9000]), tensor([0.8000, 0.8000]))
    """
    if tx.sync is None:
        return state
    bound = bind_to_plan(tx, plan)
    assert bound.sync is not None  # as that of the whole
    params = updated_params(plan, state)
    result = bound.sync(state.opt_state, params)
    if result is None:
        return state
    target = apply_updates(params, result[0])
    spread(plan, target, state.params)
    return state._replace(master=target if plan.policy.has_master else (), opt_state=result[1])
