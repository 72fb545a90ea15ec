"""The state before the first step: drawn or copied, each rank its own part, in the memory of the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.arguments import STATE, checked, expect_device
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation
from fzero.optim.sharded_leaves import bind_to_plan
from fzero.sharding import Plan
from fzero.sharding.slices import narrow_to
from fzero.sharding.zero_stages import shapes_of
from fzero.train.state import TrainState, expect_shapes, first_state, move_leaf, move_to_memory, state_specs
from fzero.train.state_on_disk import init_on_disk


@checked(
    "model tx",
    **STATE,
    plan="plan is {}; write init_state(model, tx, zero_plan(stage, model, mesh), seed=0)",
    seed="seed is {}; give an int, or a key: fzero.random.key(0)",
)
def init_state(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    *,
    seed: int | Tensor,
    device: torch.device | str = "cpu",
    nvme: Nvme | None = None,
) -> TrainState:
    """Return this rank's TrainState before the first step.

    model: a Model, whose parameters are drawn, or a tree of whole parameters, which are copied.
    tx: the optimizer; it is bound to the plan's shards. plan: the plan of the train step.
    seed: an int, or a key (int64 [2]); parameters and dropout follow from it.
    device: of the state.
    nvme: the folder of the leaves that the plan puts on a disk; a store is made there, and they are drawn a few rows at
    a time.

    A rank draws or copies its own shards only, so nothing larger is ever held; the elements are the same on every mesh.
    Raises ValueError naming a leaf whose shape is not that of the plan, and if a disk is needed and nvme is None.

    >>> model = fzero.models.build(fzero.models.preset("mlp-tiny"))
    >>> plan = fzero.zero_plan(3, model, fzero.fake_mesh({"dp": 4}))
    >>> state = init_state(model, fzero.optim.adamw(), plan, seed=0)
    >>> plan.leaves["head/w"].shape, state.params["head"]["w"].shape
    ((256, 32), torch.Size([64, 32]))
    """
    if isinstance(seed, Tensor) and (seed.shape != (2,) or seed.dtype != torch.int64):
        raise ValueError(
            f"seed has shape {list(seed.shape)} and is {seed.dtype}; give an int, or a key: fzero.random.key(0)"
        )
    device = expect_device(device)
    key = seed.to(device) if isinstance(seed, Tensor) else prng.key(seed, device)
    is_model = isinstance(model, base.Model)
    expect_shapes(plan, shapes_of(model))
    for name, leaf in () if is_model else pytree.named_leaves(model).items():
        if leaf.is_meta and device.type != "meta":
            raise ValueError(f"leaf {name!r} of the parameters is on the meta device and has no values; give it some")
    if not is_model:  # a module's parameters have a graph of their own
        model = pytree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf, model)
    tx, policy = bind_to_plan(tx, plan), plan.policy
    if plan.on_disk:
        return init_on_disk(model, tx, plan, key, device, nvme)
    masters = {}

    def place_leaf(name: str, leaf: Tensor) -> Tensor:
        leaf_plan = plan.leaves[name]
        if policy.has_master and name not in plan.frozen:
            master = plan.local_shards({name: leaf})[name] if is_model else narrow_to(leaf, leaf_plan.opt, plan.mesh)
            masters[name] = move_leaf(device, copy_of(master, policy.state, device), leaf_plan.opt)
        value = leaf if is_model else narrow_to(leaf, leaf_plan.params, plan.mesh)
        value = value if is_model and value.dtype == leaf_plan.dtype else copy_of(value, leaf_plan.dtype, device)
        return move_leaf(device, value, leaf_plan.params)  # one at a time, as a GPU may not hold all of them

    if is_model:
        init_key = prng.fold_in(key, "init")
        params = base.init_params(model, init_key, policy.state, device, plan=plan, on_leaf=place_leaf)
    else:
        params = pytree.map_named(place_leaf, model)
    target = pytree.from_named(masters, plan.trained(plan.like)) if policy.has_master else plan.local_shards(params)
    state = first_state(plan, tx, params, target, key)
    on_host = any(leaf.params.memory.on_host or leaf.opt.memory.on_host for leaf in plan.leaves.values())
    return move_to_memory(state, state_specs(plan, tx)) if on_host else state


def copy_of(leaf: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A contiguous copy, as messages and kernels take a leaf's memory in the order of its elements."""
    return leaf.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
