"""A state whose optimizer changes: its leaves go on under the names that the new one has for them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked, expect_kind, expect_regex
from fzero.offload import DiskTensor
from fzero.optim import GradientTransformation
from fzero.optim.renamed import same_leaves
from fzero.optim.sharded_leaves import bind, shards_of
from fzero.sharding import Plan
from fzero.train.moved import updated
from fzero.train.state import TrainState, expect_alive, put_in_memory, state_specs


@torch.no_grad()
@checked("state tx plan")
def with_optimizer(state: TrainState, tx: GradientTransformation, plan: Plan, *, drop: str = "") -> TrainState:
    """Return the state for another optimizer `tx`: with clipping, rules or an average around the one before, without
    them, or with other numbers.

    Leaves of the optimizer's state that both have keep their values, whatever is around them now; new ones begin as
    `tx.init` makes them of the present weights (an average at those, moments at zero). plan: of the state. drop: a
    regular expression; leaves of the old state whose whole name matches may be lost.
    Raises ValueError naming a leaf that would be lost, or has another shape or dtype, and for a state on a disk.

    >>> params, adam = {"w": torch.ones(2)}, fzero.optim.adam(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> state = fzero.init_state(params, adam, plan, seed=0)
    >>> tx = fzero.optim.with_average(fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), adam), 0.9)
    >>> fzero.pytree.names(with_optimizer(state, tx, plan).opt_state)
    ['inner/1/count', 'inner/1/m/w', 'inner/1/v/w', 'average/w']
    """
    expect_kind("the state", state, TrainState, "write with_optimizer(state, tx, plan)")
    expect_kind("plan", plan, Plan, "write with_optimizer(state, tx, plan)")
    expect_regex("drop", drop)
    expect_alive(state.step)
    if any(isinstance(leaf, DiskTensor) for leaf in pytree.leaves(state)):
        raise ValueError(
            "with_optimizer: the state rests on a disk, whose store has the leaves of one optimizer; save a "
            'checkpoint, and restore it by a plan with offload="opt=host" or offload=""'
        )
    old = pytree.named_leaves(state.opt_state)
    fresh = bind(tx, shards_of(plan)).init(updated(plan, state))
    source = same_leaves(old, pytree.names(fresh), pytree.names(plan.trained(plan.like)))
    lost = [name for name in old if name not in source.values() and not (drop and re.fullmatch(drop, name))]
    if lost:
        raise ValueError(
            f"opt_state/{lost[0]} and {len(lost) - 1} more leaves are of no leaf of the new optimizer; give drop=, a "
            "regular expression, if they may be lost"
        )

    def leaf_of(name: str, begun: Tensor) -> Tensor:
        if name not in source:
            return begun.clone()
        held = old[source[name]]
        if (held.shape, held.dtype) != (begun.shape, begun.dtype):
            raise ValueError(
                f"opt_state/{source[name]} is {held.dtype} {list(held.shape)} and the new optimizer's {name} is "
                f"{begun.dtype} {list(begun.shape)}"
            )
        return held

    changed = state._replace(opt_state=pytree.map_named(leaf_of, fresh))
    return put_in_memory(changed, state_specs(plan, tx))
