"""The state before the first step: drawn or taken, each rank its own part, in whichever memory it rests."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.precision import init_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation, ema_init
from fzero.optim.sharded_leaves import bind, sharded_by
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.plan import shapes_of
from fzero.sharding.slices import local_slice
from fzero.train.spike import LOSS, init_stats
from fzero.train.state import TrainState, expect_shapes, in_host_memory, state_specs
from fzero.train.state_on_disk import on_disk, stored_state
from fzero.train.update.in_memory import own


def init_state(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    *,
    seed: int | Tensor,
    ema: bool = False,
    device: torch.device | str = "cpu",
    nvme: Nvme | None = None,
) -> TrainState:
    """This rank's state before the first step. Parameters are drawn from the seed (or key) for a Model, and taken from a whole tree.

    ema: whether averaged weights are kept, for a step made with `ema_decay`. A rank draws or copies its own shards only, so that nothing
    larger is ever held: the same elements on every mesh.
    nvme: where the leaves live that the plan puts on a disk; a store is made there, and they are drawn a few rows at a time.
    """
    key = seed.to(device) if isinstance(seed, Tensor) else prng.key(seed, device)
    drawn = isinstance(model, base.Model)
    expect_shapes(plan, shapes_of(model))
    tx, policy = bind(tx, sharded_by(plan)), plan.policy
    if on_disk(plan):
        return stored_state(model, tx, plan, key, ema, device, nvme)
    masters = {}

    def keep(name: str, leaf: Tensor) -> Tensor:
        if policy.has_master and name not in plan.frozen:
            masters[name] = part_of(leaf, plan, name) if drawn else whole_part(leaf, plan.leaves[name].opt, plan.mesh)
            masters[name] = masters[name].to(policy.state, copy=True)
        rest = leaf if drawn else whole_part(leaf, plan.leaves[name].params, plan.mesh)
        return rest.to(policy.param, copy=not drawn)

    if drawn:
        init_key = prng.fold_in(key, "init")
        params = base.init_params(model, init_key, policy.state, device, plan=plan, then=keep)
    else:
        params = pytree.map_named(keep, model)
    master = pytree.from_named(masters, plan.trained(plan.like)) if policy.has_master else ()
    target = master if policy.has_master else own(plan, params)
    state = TrainState(
        step=torch.tensor(0).to(device),
        params=params,
        master=master,
        opt_state=tx.init(target),
        scaler=init_scaler(policy.loss_scale, device) if policy.loss_scale else (),
        key=key,
        data_cursor=torch.tensor(0).to(device),
        extra=({"ema": ema_init(target)} if ema else {}) | {LOSS: init_stats(device)},
    )
    on_host = any("host" in (leaf.params.memory, leaf.opt.memory) for leaf in plan.leaves.values())
    return in_host_memory(state, state_specs(plan, tx, ema=ema)) if on_host else state


def part_of(leaf: Tensor, plan: Plan, name: str) -> Tensor:
    """The part that this rank updates of its trained leaf at rest."""
    return own(plan, {name: leaf})[name]


def whole_part(leaf: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """This rank's slice, a view, of a whole leaf."""
    for dim, (start, size) in enumerate(zip(*local_slice(tuple(leaf.shape), spec, mesh))):
        leaf = leaf.narrow(dim, start, size)
    return leaf
