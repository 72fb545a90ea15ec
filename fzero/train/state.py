"""The state of a training run as a value: what is in it, and how the states of the ranks make up one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.precision import ScalerState, init_scaler
from fzero.core.pytree import Tree
from fzero.optim import GradientTransformation
from fzero.optim.sharded_leaves import bind, sharded_by
from fzero.sharding import Plan, Spec
from fzero.sharding.slices import local_slice
from fzero.train.spike import LOSS, init_stats


class TrainState(NamedTuple):
    """All of a training run, and nothing elsewhere. Every leaf is a tensor; `()` stands for what a run does without."""

    step: Tensor  # int64 scalar: steps made, skipped ones among them
    params: Tree  # in policy.param
    master: Tree  # the trained ones in policy.state, in the optimizer's layout, or ()
    opt_state: Tree
    scaler: ScalerState | tuple
    key: Tensor  # int64 [2]
    data_cursor: Tensor  # int64 scalar: samples consumed
    extra: dict[str, Tree]  # "loss": its running statistics; "ema": the averaged weights, where asked for


def state_specs(plan: Plan, tx: GradientTransformation, *, ema: bool = False) -> TrainState:
    """The state with a Spec in place of each tensor: how the states of the ranks make up one, whatever the mesh."""
    trained, policy = plan.trained(plan.opt), plan.policy
    scaler = init_scaler(policy.loss_scale) if policy.loss_scale else ()
    return TrainState(
        step=Spec(),
        params=pytree.map(lambda spec: replace(spec, partial=frozenset()), plan.params),
        master=trained if policy.has_master else (),
        opt_state=tx.spec(trained),
        scaler=pytree.map(lambda _: Spec(), scaler),
        key=Spec(),
        data_cursor=Spec(),
        extra=({"ema": trained} if ema else {}) | {LOSS: pytree.map(lambda _: Spec(), init_stats())},
    )


def expect_shapes(plan: Plan, given: Tree, *, shards: bool = False) -> None:
    """Raise ValueError naming the first leaf of `given` that is missing, extra or of another shape than the plan's.

    shards: the leaves are this rank's shards at rest.
    """
    leaves = pytree.named_leaves(given)
    pytree.from_named(leaves, plan.like)
    for name, leaf in plan.leaves.items():
        shape = local_slice(leaf.shape, leaf.params, plan.mesh)[1] if shards else leaf.shape
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"{name}: the plan was made for shape {list(shape)} and the leaf has {list(leaves[name].shape)}")


def meta_state(plan: Plan, tx: GradientTransformation, *, ema: bool = False) -> TrainState:
    """A rank's state with meta tensors for leaves: shapes and dtypes without memory."""

    def local(specs: Tree, dtype: torch.dtype) -> Tree:
        return pytree.map(
            lambda leaf, spec: leaf.new_empty(local_slice(tuple(leaf.shape), spec, plan.mesh)[1], dtype=dtype), plan.like, specs
        )

    policy = plan.policy
    params, opt = local(plan.params, policy.param), plan.trained(local(plan.opt, policy.state if policy.has_master else policy.param))
    return TrainState(
        step=torch.empty((), dtype=torch.int64, device="meta"),
        params=params,
        master=opt if policy.has_master else (),
        opt_state=bind(tx, sharded_by(plan)).init(opt),
        scaler=pytree.map(lambda x: x.to("meta"), init_scaler(policy.loss_scale)) if policy.loss_scale else (),
        key=torch.empty(2, dtype=torch.int64, device="meta"),
        data_cursor=torch.empty((), dtype=torch.int64, device="meta"),
        extra=({"ema": opt} if ema else {}) | {LOSS: init_stats("meta")},
    )


def in_host_memory(state: TrainState, specs: TrainState) -> TrainState:
    """The state with the leaves whose spec says so in the host's memory, pinned where there is CUDA."""
    named = pytree.named_leaves(specs)

    def move(name: str, leaf: Any) -> Any:
        if named[name].memory != "host" or not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu").pin_memory() if torch.cuda.is_available() else leaf.to("cpu")

    return pytree.map_named(move, state)
