"""A state whose optimizer changes: its leaves go on under the names that the new one has for them."""

from __future__ import annotations

import re
from typing import Any

import torch

from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.offload import DiskTensor, Nvme
from fzero.optim import GradientTransformation
from fzero.optim.base import same_leaves
from fzero.optim.sharded_leaves import bind_to_plan
from fzero.sharding import Plan
from fzero.sharding.slices import row_blocks, shard_dim
from fzero.train.masters import narrowing
from fzero.train.state import TrainState, expect_alive, meta_state, move_to_memory, read, state_specs
from fzero.train.state_on_disk import DiskLayout, FirstState
from fzero.train.update.in_memory import updated_params

OPT_PREFIX = "opt_state/"


@torch.no_grad()
@checked(
    "tx",
    state="the state is {}; write with_optimizer(state, tx, plan)",
    plan="plan is {}; write with_optimizer(state, tx, plan)",
)
def with_optimizer(
    state: TrainState, tx: GradientTransformation, plan: Plan, *, drop: str = "", nvme: Nvme | None = None
) -> TrainState:
    """Return the state for another optimizer `tx`: with clipping, rules or an average around the one before, without
    them, or with other numbers.

    Leaves of the optimizer's state that both have keep their values, whatever is around them now; new ones begin as
    `tx.init` makes them of the present weights (an average at those, moments at zero). plan: of the state. drop: a
    regular expression; leaves of the old state whose whole name matches may be lost, or begin anew where theirs has
    another shape or dtype. nvme: if a part of the state rests on a disk, a folder for the new one, where it is copied
    a layer at a time; the old one stays as it is.
    Raises ValueError naming a leaf that would be lost, or has another shape or dtype, and for a state on a disk without
    a folder of another store.

    >>> params, adam = {"w": torch.ones(2)}, fzero.optim.adam(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> state = fzero.init_state(params, adam, plan, seed=0)
    >>> tx = fzero.optim.with_average(fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), adam), 0.9)
    >>> fzero.pytree.names(with_optimizer(state, tx, plan).opt_state)
    ['inner/1/count', 'inner/1/m/w', 'inner/1/v/w', 'average/w']
    """
    expect_regex("drop", drop)
    expect_alive(state.step)
    on_disk = next((leaf for leaf in pytree.leaves(state) if isinstance(leaf, DiskTensor)), None)
    if on_disk is not None and (nvme is None or nvme.store is on_disk.store):
        raise ValueError(
            f"the state rests on a disk, in {on_disk.store.folder}; give with_optimizer a folder for the new one, "
            "nvme=fzero.Nvme(another folder)"
        )
    bound = bind_to_plan(tx, plan)
    like = meta_state(plan, tx).opt_state if on_disk is not None else bound.init(updated_params(plan, state))
    old, new = pytree.named_leaves(state.opt_state), pytree.named_leaves(like)
    source = same_leaves(old, list(new), pytree.names(plan.trained(plan.like)))
    dropped = {name for name in old if drop and any(re.fullmatch(drop, label) for label in (name, OPT_PREFIX + name))}
    lost = [name for name in old if name not in source.values() and name not in dropped]
    if lost:
        raise ValueError(
            f"the new optimizer has no leaf for {OPT_PREFIX}{lost[0]} ({len(lost)} in all); give drop=, a regular "
            "expression of their names, if they may be lost"
        )
    unlike = {name: old_name for name, old_name in source.items() if kind_of(old[old_name]) != kind_of(new[name])}
    for name, old_name in unlike.items():
        if old_name not in dropped:
            raise ValueError(
                f"{OPT_PREFIX}{old_name} is {old[old_name].dtype} {list(old[old_name].shape)} and the new optimizer's "
                f"{name} is {new[name].dtype} {list(new[name].shape)}; give drop=, a regular expression of such names, "
                "if they may begin anew"
            )
    source = {name: old_name for name, old_name in source.items() if name not in unlike}
    if on_disk is not None and nvme is not None:
        return copy_state(
            state, bound, plan, {OPT_PREFIX + name: OPT_PREFIX + old_name for name, old_name in source.items()}, nvme
        )
    leaves = {name: old[source[name]] if name in source else initial.clone() for name, initial in new.items()}
    return move_to_memory(state._replace(opt_state=pytree.from_named(leaves, like)), state_specs(plan, tx))


def kind_of(leaf: Any) -> tuple[Any, Any]:
    """What two leaves must have in common for one to have the other's values."""
    return leaf.shape, leaf.dtype


def copy_state(
    state: TrainState, tx: GradientTransformation, plan: Plan, source: dict[str, str], nvme: Nvme
) -> TrainState:
    """The state in a new store for another optimizer; source: the old leaf that gives a new one's values."""
    layout, old = DiskLayout.from_plan(plan, tx), pytree.named_leaves(state)
    store = layout.open(nvme)
    first = FirstState(store, tx, layout, state.step.device)
    for name, leaf in first.shapes.items():
        if first.owner[name] is not None and name not in store.leaves:
            first.out[name] = torch.empty_like(leaf, device=state.step.device)
    if any(name.startswith(OPT_PREFIX) and name not in source for name in first.shapes):
        for name in plan.local_shapes["opt"]:
            begin_states(first, state, name)
    store.flush()
    leaves: dict[str, Any] = {}
    for name in first.shapes:
        old_name = source.get(name, "" if name.startswith(OPT_PREFIX) else name)
        if name not in store.leaves:
            leaves[name] = old[old_name] if old_name else first.shared.get(name, first.out.get(name))
        for i in range(store.leaves[name].layers if old_name and name in store.leaves else 0):
            store.write_layer(name, i, read(old[old_name], i if store.leaves[name].stacked else None))
    return layout.assemble(leaves, store, nvme)


def begin_states(first: FirstState, state: TrainState, name: str) -> None:
    """Put what the optimizer's `init` makes of this rank's present weights of a parameter."""
    leaf, lead = first.plan.leaves[name], shard_dim(name)
    masters = pytree.named_leaves(state.master)
    weight = masters[name] if name in masters else pytree.named_leaves(state.params)[name]
    narrow = (
        (lambda value, layer: value)
        if name in masters
        else narrowing(leaf.shape, (leaf.params, leaf.opt), first.plan.mesh)
    )
    if first.units[name] == "leaf":
        layers = [narrow(read(weight, i), i) for i in range(weight.shape[0])]
        value = torch.stack(layers) if layers else torch.empty(first.plan.local_shapes["opt"][name])
        first.states(name, None, None, value.to(first.plan.policy.state))
        return
    for i in range(weight.shape[0]) if lead else (None,):
        value = narrow(read(weight, i), i).to(first.plan.policy.state)
        blocks = row_blocks(tuple(value.shape)) if first.units[name] == "row" and value.dim() else [None]
        for rows in blocks:
            block = value if rows is None else value[rows[0] : rows[1]]
            first.states(name, i or 0, rows, block[None] if lead else block)
