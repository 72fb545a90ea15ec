"""The whole parameters of a state, on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked, expect_kind
from fzero.core.pytree import Tree
from fzero.offload import DiskTensor
from fzero.sharding import Plan
from fzero.sharding.redistribute import gather_full
from fzero.train.state import TrainState, expect_alive


@checked("state plan")
@torch.no_grad()
def full_params(state: TrainState | Tree, plan: Plan, *, specs: Tree | None = None) -> Tree:
    """Return the tree of whole parameters, the same on every rank, from this rank's shards of them.

    state: a TrainState, whose `params` are taken, or a tree of shards of its own: the parameters, or with `specs`
        another part of a state. plan: that of the state.
    specs: the Specs of such a tree, as `state_specs(plan, tx)` has them; None: those of the parameters.

    Every rank must have memory for the whole tree, and call this. Leaves that are whole on a rank already are those of
    the state: clone them to keep them over the next step. Leaves on a disk are read.
    Communicates: an all_gather over each axis that shards a leaf. Raises ValueError for a tree with other leaves than
    the specs, and for a state that was donated.

    >>> params, tx = {"w": torch.arange(4.0)}, fzero.optim.adamw()
    >>> plan = fzero.zero_plan(3, params, fzero.one_process())
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> full_params(state, plan)
    {'w': tensor([0., 1., 2., 3.])}
    >>> full_params(state.opt_state, plan, specs=fzero.state_specs(plan, tx).opt_state).m
    {'w': tensor([0., 0., 0., 0.])}
    """
    expect_kind("plan", plan, Plan, "write full_params(state, plan)")
    expect_alive(state)
    tree = state.params if isinstance(state, TrainState) else state
    named = pytree.named_leaves(plan.params if specs is None else specs)
    pytree.from_named(named, tree)  # names what one has and the other has not

    def gather_leaf(name: str, leaf: Tensor | DiskTensor) -> Tensor:
        shard = leaf.tensor() if isinstance(leaf, DiskTensor) else leaf
        return gather_full(shard, named[name], plan.mesh, leaf=name)

    return pytree.map_named(gather_leaf, tree)
