"""Make a state: the one before the first step, or one with other parameters or for another optimizer.

Parameters are drawn or copied, each rank its own part, in the memory of the plan; master weights are made of them. The
leaves of an optimizer's state go on under the names that a new one has for them.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.comm.rank_tables import any_rank
from fzero.core import prng, pytree
from fzero.core.arguments import STATE, checked, expect_device, expect_regex
from fzero.core.pytree import Tree
from fzero.core.torch_private import FakeTensor
from fzero.models import base
from fzero.offload import DiskTensor, Nvme
from fzero.optim import GradientTransformation
from fzero.optim.base import same_leaves
from fzero.optim.sharded_leaves import bind_to_plan
from fzero.sharding import Plan
from fzero.sharding.slices import narrow_to, row_blocks, shard_dim
from fzero.sharding.zero_stages import check_tree, shapes_of
from fzero.train.checks import blocks_of, have_values, narrow_to_update, narrowing
from fzero.train.state import (
    TrainState,
    expect_alive,
    expect_shapes,
    first_state,
    meta_state,
    move_leaf,
    move_to_memory,
    read,
    state_specs,
    with_previous,
)
from fzero.train.state_on_disk import DiskLayout, FirstState, commit, init_on_disk
from fzero.train.update.in_memory import updated_params


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


@torch.no_grad()
@checked(
    "params",
    state="the state is {}; write with_params(state, params, plan)",
    plan="plan is {}; write with_params(state, params, plan)",
    tx="the optimizer's state stays as it is; leave it out",
)
def with_params(state: TrainState, params: Tree, plan: Plan, *, nvme: Nvme | None = None) -> TrainState:
    """Return the state with other parameters, and with master weights that are made of them.

    params: a tree with the names of `state.params`; each leaf is whole, or this rank's shard, as the parameters rest or
    as the optimizer updates them (an average of `with_average`), in any floating dtype and on any device: restored,
    merged, averaged or edited weights. plan: the plan of the state. nvme: its folder, if a part of it rests on a disk;
    the store then holds the new state, and the one that was given is gone.

    A master weight is the value given, in the policy's `state` dtype, and the parameter is its rounding. Without master
    weights, as in fp32, parameters are the values given. With delayed updates those before the last one are these too.
    All else stays: step, key, optimizer state and its average.
    Communicates: with ranks, three integers over each axis, and an all_gather of each leaf that is given as the
    optimizer updates it and rests whole.
    Raises ValueError, on every rank if on one, naming a leaf that is missing, extra, of another shape, of whole numbers
    where the plan has floats, without values (on the meta device), or not finite in its parameter's dtype; and a frozen
    one on a disk that differs.

    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process(), policy=fzero.bf16())
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> state = with_params(state, {"w": torch.tensor([1.0, 1.001])}, plan)
    >>> state.params["w"], state.master["w"]
    (tensor([1., 1.], dtype=torch.bfloat16), tensor([1.0000, 1.0010]))
    """
    expect_alive(state.step)
    values = NewValues(plan, pytree.named_leaves(params), state.step.device)
    expect_new_values(values, params, look=have_values(state.step))
    old_leaves = {"params": pytree.named_leaves(state.params), "master": pytree.named_leaves(state.master)}
    if any(isinstance(leaf, DiskTensor) for leaves in old_leaves.values() for leaf in leaves.values()):
        rewrite_store(values, state, nvme)

    def new(group: str, tree: Tree) -> Tree:
        def leaf_of(name: str, old: Any) -> Any:
            return old if isinstance(old, DiskTensor) else values.in_memory(group, name)

        return pytree.map_named(leaf_of, tree)

    changed = new("params", state.params)
    changed = state._replace(params=changed, master=new("master", state.master))
    changed = changed._replace(extra={**state.extra, **with_previous(plan.trained(changed.params), plan.delayed)})
    commit(nvme, changed, plan)
    return changed


def expect_new_values(values: NewValues, params: Tree, *, look: bool) -> None:
    """Raise TypeError or ValueError, on every rank if on one, where `params` is no tree of new values."""
    error, layouts, mesh = None, "", values.plan.mesh
    try:
        tensors = {name: leaf for name, leaf in values.leaves.items() if not isinstance(leaf, DiskTensor)}
        if tensors or not values.leaves:
            check_tree(params if len(tensors) == len(values.leaves) else tensors)
        pytree.from_named(values.leaves, values.plan.like)  # which names a leaf that is missing or extra
        for name in values.plan.leaves:
            values.expect_dtype(name)
        layouts = ",".join(values.layout(name) for name in values.plan.leaves)
        for name in values.plan.leaves if look else ():
            values.expect_values(name)
    except (TypeError, ValueError) as failure:
        error = failure
    if mesh.store is not None:
        if any_rank(error is not None, mesh) and error is None:
            error = ValueError("the parameters given to with_params on another rank are refused there; see its error")
        code = zlib.crc32(layouts.encode())
        if any_rank(code, mesh) != -any_rank(-code, mesh) and error is None:
            error = ValueError(
                "a leaf given to with_params is whole on one rank and a shard on another; give each leaf alike on all "
                "ranks"
            )
    if error is not None:
        raise error


class NewValues(NamedTuple):
    """The parameters that a caller gives, leaf by leaf, in the layouts of a plan."""

    plan: Plan
    leaves: dict[str, Any]
    device: torch.device

    def layout(self, name: str) -> str:
        """Which part of a leaf was given: "whole", "params" (at rest) or "opt" (as it is updated)."""
        leaf, shape = self.plan.leaves[name], tuple(self.leaves[name].shape)
        if shape == leaf.shape:
            return "whole"
        shapes = {kind: sizes[name] for kind, sizes in self.plan.local_shapes.items() if name in sizes}
        for kind, size in shapes.items():
            if shape == size:
                return kind
        sizes = [size for size in dict.fromkeys(shapes.values()) if size != leaf.shape]
        shards = "".join(f" or {list(size)}, a shard of it on this rank" for size in sizes)
        fix = "a tree of other shapes needs a plan and state of its own: init_state(params, tx, zero_plan(...))"
        raise ValueError(f"{name}: is {list(shape)}; the state has {list(leaf.shape)}{shards}: {fix}")

    def expect_dtype(self, name: str) -> None:
        """Raise ValueError for a leaf without a shape, or of integers where the plan has floats or vice versa."""
        value, dtype = self.leaves[name], self.plan.leaves[name].dtype
        if isinstance(value, torch.nn.UninitializedParameter):
            raise ValueError(f"{name}: is an uninitialized parameter of a lazy module; call the module once before")
        fits = value.dtype.is_floating_point if dtype.is_floating_point else value.dtype == dtype
        if not fits:
            fix = f"give .to({dtype}) of it, if its numbers are the values and no codes of them"
            raise ValueError(f"{name}: is {value.dtype} and the state has {dtype}; {fix}")

    def expect_values(self, name: str) -> None:
        """Raise ValueError for a leaf without values, or a trained one that is not finite in its dtype."""
        source, leaf = self.leaves[name], self.plan.leaves[name]
        if isinstance(source, Tensor):
            freed = bool(source.numel()) and not isinstance(source, FakeTensor) and not source.untyped_storage().size()
            if source.is_meta or isinstance(source, FakeTensor) or freed:
                location = "was freed" if freed and not source.is_meta else "is on the meta device"
                raise ValueError(f"{name}: {location} and has no values; give a tensor that has some")
        value = read(source)
        if not leaf.dtype.is_floating_point or not value.numel():
            return
        for block, _ in blocks_of(value, value):
            low = block.to(leaf.dtype)
            low = low.float() if low.element_size() == 1 else low
            wrong = ~torch.isfinite(low) if leaf.trained else low != low
            if wrong.any():
                first = float(block[wrong].flatten()[0])
                reason = "" if not math.isfinite(first) else f", which {leaf.dtype} does not hold"
                raise ValueError(
                    f"{name}: {int(wrong.sum()):,} or more of {value.numel():,} values are not finite, such as "
                    f"{first:g}{reason}; give finite ones: a loss of these is NaN"
                )

    def local_value(self, group: str, name: str) -> Tensor:
        """This rank's value of params/name or master/name, which may share memory with what was given."""
        leaf, mesh, layout = self.plan.leaves[name], self.plan.mesh, self.layout(name)
        value, spec = read(self.leaves[name]), leaf.params if group == "params" else leaf.opt
        if layout == "whole":
            return narrow_to(value, spec, mesh, leaf=name)
        if layout == "params":
            return value if group == "params" else narrow_to_update(value, leaf.shape, (leaf.params, leaf.opt), mesh)
        if group == "params" and leaf.updated_in_shards:
            value = value.to(self.device, leaf.dtype).contiguous()
            return all_gather(value, self.plan.link(name), shard_dim(name), leaf=name)
        return value

    def in_memory(self, group: str, name: str) -> Tensor:
        """The new leaf of the state, in its dtype and memory."""
        leaf = self.plan.leaves[name]
        dtype, spec = (leaf.dtype, leaf.params) if group == "params" else (self.plan.policy.state, leaf.opt)
        value = self.local_value(group, name)
        new = copy_of(value, dtype, value.device)
        return spec.memory.put([new], self.device)[0]


def rewrite_store(values: NewValues, state: TrainState, nvme: Nvme | None) -> None:
    """Begin the store's next version with the new parameters and masters."""
    if nvme is None or nvme.store is None:
        raise ValueError("the state rests on a disk; give with_params the nvme= that init_state was given")
    store, fresh = nvme.store, {}
    for name, files in store.leaves.items():
        group, _, leaf = name.partition("/")
        if group not in ("params", "master"):
            continue
        fixed = files.slots == 1 and store.slots > 1
        fresh[name] = None if fixed else (group, leaf)
        if fixed and not torch.equal(
            DiskTensor(store, name).tensor(), values.local_value(group, leaf).to("cpu", files.dtype)
        ):
            raise ValueError(
                f"{leaf}: is frozen and rests on a disk, where it was written once, and is given other values; make a "
                "state of them: init_state(params, tx, plan, nvme=fzero.Nvme(folder))"
            )
    store.begin()
    for name, files in store.leaves.items():
        target = fresh.get(name, ())
        if target is None:
            continue
        full = values.local_value(*target).to("cpu", files.dtype) if target else None
        for i in range(files.layers):
            layer = read(DiskTensor(store, name), i if files.stacked else None) if full is None else full
            store.write_layer(name, i, layer[i] if full is not None and files.stacked else layer)
    store.flush()


# ---- another optimizer

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
