"""A state's whole parameters: on every rank as a tree, and back in the nn.Module that a Model was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.comm.collectives import all_gather_same
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.models.base import Model
from fzero.models.configs import LORA, LoRAConfig
from fzero.models.module_layers import CannotSplit, Stacks, choices
from fzero.models.weights import product_of
from fzero.offload import DiskTensor
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.layouts import gather_full
from fzero.sharding.slices import is_stacked
from fzero.train.state import TrainState, expect_alive, gathered, read


@checked("state", plan="plan is {}; write full_params(state, plan)")
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
    expect_alive(state)
    tree = state.params if isinstance(state, TrainState) else state
    like = plan.params if specs is None else specs
    named = pytree.named_leaves(like)
    pytree.from_named(pytree.named_leaves(tree), like)  # names the leaves that are missing or extra

    def gather_leaf(name: str, leaf: Tensor | DiskTensor) -> Tensor:
        shard = leaf.tensor() if isinstance(leaf, DiskTensor) else leaf
        return gather_full(shard, named[name], plan.mesh, leaf=name)

    return pytree.map_named(gather_leaf, tree)


@torch.no_grad()
@checked(
    state="the state is {}; write to_module(state, module)", module="the module is {}; write to_module(state, module)"
)
def to_module(
    state: TrainState,
    module: nn.Module,
    plan: Plan | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    model: Model | None = None,
) -> nn.Module:
    """Write the parameters of a state into the module that its Model was made from (see from_module), and return it.

    module: that one, or another of the same class and sizes. plan: the plan of the state, where ranks hold shards of
    it; every rank then gets all weights. layers: as it was given to from_module. model: the one that `models.lora`
    returned, of a state with its factors, whose products are added to the weights.

    Master weights are taken where the state has them, so that a module in float32 gets every bit; else the value is
    converted to the dtype of the module's parameter. Buffers stay as they are.
    Communicates: with a plan, an all_gather for each leaf, or layer of a leaf, that is sharded.
    Raises ValueError naming the first parameter that the state has not, or has in another shape.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> loss = lambda call, batch: (call(batch["x"]).square().sum(), len(batch["x"]))
    >>> model, tx = fzero.from_module(module, loss), fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, model, fzero.one_process())
    >>> state = fzero.init_state(model, tx, plan, seed=0)
    >>> state, metrics = fzero.make_train_step(model, tx, plan)(state, {"x": torch.ones(4, 2)})
    >>> to_module(state, module)[1].weight.equal(state.params["blocks"]["weight"][1])
    True
    """
    expect_alive(state.step)
    parameters = dict(module.named_parameters())
    missing = dict.fromkeys(parameters)
    for name, value in full_values(state, plan, stacks_of(state, module, layers, plan), model):
        if name not in parameters:
            raise ValueError(f"the state has {name!r} and the module has not{pytree.nearest(name, parameters)}")
        shape, expected = list(value.shape), list(parameters[name].shape)
        if shape != expected:
            fix = "" if plan is not None else "; if it is a shard, write to_module(state, module, plan)"
            raise ValueError(f"{name}: the state has shape {shape} and the module {expected}{fix}")
        parameters[name].copy_(value)
        del missing[name]
    if missing:
        raise ValueError(
            f"the module has {next(iter(missing))!r} and the state has not; give the module of the state's model"
        )
    return module


def stacks_of(
    state: TrainState, module: nn.Module, layers: str | Sequence[str] | None, plan: Plan | None = None
) -> Stacks:
    """The module's layers of each stack of the state, {} if it has none."""
    leaves = pytree.named_leaves(state.params)
    shapes = {name: leaf.shape if plan is None else plan.leaves[name].shape for name, leaf in leaves.items()}
    depths = {name.split("/")[0]: shape[0] for name, shape in shapes.items() if is_stacked(name)}
    if not depths:
        return {}
    try:
        candidates = choices(module, layers)
    except CannotSplit as reason:
        raise ValueError(f"the state has layers and the module has none: {reason}") from None
    counts = [{name: len(entry.names) for name, entry in stacks.items()} for stacks in candidates]
    alike = [stacks for stacks, count in zip(candidates, counts) if count == depths]
    if not alike:
        layer_counts = [" and ".join(map(str, entry.values())) for entry in (depths, counts[0])]
        raise ValueError(
            f"the state has {layer_counts[0]} layers and the module {layer_counts[1]}; give the state's own module"
        )
    parameters = {name for name, _ in module.named_parameters()}
    of_base = [leaf for leaf in leaves if not re.search(LORA, leaf)]

    def unmatched(stacks: Stacks) -> int:
        """The number of parameters that only the state or only the module has, by these stacks."""
        return len({name for leaf in of_base for name in parameters_of(leaf, stacks)} ^ parameters)

    return min(alike, key=unmatched)


def parameters_of(leaf: str, stacks: Stacks) -> list[str]:
    """The module's parameters of a leaf: one, or one for each layer."""
    stack, name = leaf.replace("/", ".").split(".", 1)
    return [f"{layer}.{name}" for layer in stacks[stack].names] if is_stacked(leaf) else [name]


def full_values(
    state: TrainState, plan: Plan | None, stacks: Stacks, model: Model | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, its value) for all leaves of a state, layer by layer; model: of LoRA, whose products it adds."""
    leaves, masters = pytree.named_leaves(state.params), pytree.named_leaves(state.master)
    with_lora = [leaf for leaf in leaves if re.search(LORA, leaf)]
    if with_lora and (model is None or not isinstance(model.config, LoRAConfig)):
        raise ValueError(f"the state has {with_lora[0]}, a factor of LoRA; give model=, what models.lora returned")

    def value_of(leaf: str, layer: int | None) -> Tensor:
        leaf_value, spec = masters.get(leaf, leaves[leaf]), Spec()
        if plan is not None:
            spec = plan.leaves[leaf].opt if leaf in masters else plan.leaves[leaf].params
        if plan is not None and layer is not None and spec.rows:
            return layer_over_pp(leaf_value, layer, spec, plan.mesh, leaf)
        spec = spec if layer is None else spec.layer
        return gathered(read(leaf_value, layer), spec, None if plan is None else plan.mesh, leaf)

    def adapted(leaf: str, layer: int | None) -> Tensor:
        names = [name for name in (leaf, f"{leaf}_lora_a", f"{leaf}_lora_b") if name in leaves]
        return product_of({name: value_of(name, layer) for name in names}, leaf, model)

    for leaf in leaves:
        if leaf not in with_lora:
            for i, name in enumerate(parameters_of(leaf, stacks)):
                yield name, adapted(leaf, i if is_stacked(leaf) else None)


def layer_over_pp(leaf: Any, layer: int, spec: Spec, mesh: Mesh, name: str) -> Tensor:
    """A layer, by its number, of a leaf whose layers are on ranks of pp; all ranks take part."""
    pp = mesh.pp
    ranks = [rank for rank, rows in enumerate(spec.rows) if layer in rows]
    local_layers = spec.rows[pp.rank]
    shard = (
        read(leaf, local_layers.index(layer) if layer in local_layers else 0)
        if local_layers
        else leaf.new_zeros(leaf.shape[1:])
    )
    full = gathered(shard, spec.layer, mesh, name)
    return all_gather_same(full[None], pp, 0, leaf=name)[ranks[0]]
