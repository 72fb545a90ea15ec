"""Parameters and their master weights: a step compares them where somebody else may have written one."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.comm.rank_tables import any_rank
from fzero.core import gpu, pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.core.torch_private import FakeTensor
from fzero.offload import DiskTensor, Nvme
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.slices import is_stacked, local_shape, local_windows, narrow_box, narrow_to, row_blocks, shard_dim
from fzero.sharding.zero_stages import check_tree
from fzero.train.checks import expect_state, have_values
from fzero.train.init import copy_of
from fzero.train.state import TrainState, expect_alive, hand_over, read, with_previous
from fzero.train.state_on_disk import commit

REMEDY = "make the master weights anew: state = fzero.with_params(state, params, plan)"


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


# ---- the comparison --------------------------------------------------------------------------------------------------


class StateCheck:
    """The check of the states that a step is given: kinds in each call, masters where a leaf is new."""

    def __init__(self, plan: Plan, opt_names: list[str], donate: bool, nvme: Nvme | None) -> None:
        self.plan, self.opt_names, self.donate, self.nvme, self.first = plan, opt_names, donate, nvme, True
        self.checked_leaves: list[tuple[Any, int]] = []  # by leaf: a weak reference, and the version of its values

    def expect(self, state: TrainState) -> None:
        """Raise ValueError if the state is not one for this step, or a parameter is not its rounded master."""
        expect_state(self.plan, self.opt_names, state, self.donate)
        if self.nvme is not None:
            expect_store(state, self.nvme)
        if not self.plan.policy.has_master or not have_values(state.step) or gpu.is_capturing(state.step.device):
            return
        leaves = leaves_of(state)
        if len(leaves) == len(self.checked_leaves) and all(
            ref() is leaf and version == version_of(leaf) for (ref, version), leaf in zip(self.checked_leaves, leaves)
        ):
            return
        leaf_plans = self.plan.leaves.items()
        specs, shapes = (
            {n: (leaf.params, leaf.opt) for n, leaf in leaf_plans},
            {n: leaf.shape for n, leaf in leaf_plans},
        )
        fault = compare(state, specs, shapes, self.plan.mesh)
        mesh, first, self.first = self.plan.mesh, self.first, False
        if first and mesh.store is not None:
            with mesh.ledger.phase("check"):
                elsewhere = any_rank(bool(fault), mesh)
            if elsewhere and not fault:
                fault = f"a parameter on another rank is not the rounding of its master weights; {REMEDY}"
        if fault:
            raise ValueError(fault)

    def handed_over(self, old: TrainState, new: TrainState) -> TrainState:
        """The state that the step returns, whose parameters are known to be right."""
        if self.plan.policy.has_master and have_values(new.step):
            self.checked_leaves = [(weakref.ref(leaf), version_of(leaf)) for leaf in leaves_of(new)]
        return hand_over(old, new) if self.donate else new


def expect_store(state: TrainState, nvme: Nvme) -> None:
    """Raise ValueError if a leaf rests in another store than `nvme`'s."""
    for name, leaf in pytree.named_leaves(state).items():
        if not isinstance(leaf, DiskTensor) or leaf.store is nvme.store:
            continue
        if nvme.store is None or leaf.store.folder == nvme.store.folder:
            leaf.store.expect_open()  # says that it was closed, or opened again since
        else:
            raise ValueError(
                f"{name} rests in {leaf.store.folder}, and the step writes to {nvme.folder}; give make_train_step the "
                "Nvme of the state (nvme=)"
            )


def leaves_of(state: TrainState) -> list[Any]:
    """The parameters and master weights of a state."""
    return [*pytree.leaves(state.params), *pytree.leaves(state.master)]


def version_of(leaf: Any) -> int:
    """How often the values of a leaf were written to, as far as PyTorch counts it."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


@torch.no_grad()
def compare(
    state: TrainState, specs: Mapping[str, tuple[Spec, Spec]], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> str:
    """The names of the leaves whose parameter differs from its master weight, in words, or ""."""
    params, differing = pytree.named_leaves(state.params), {}
    for name, master in pytree.named_leaves(state.master).items():
        counts, layers = [], range(master.shape[0]) if is_stacked(name) else (None,)
        narrow = narrowing(shapes[name], specs[name], mesh)
        for i in layers:
            low, high = narrow(read(params[name], i), i), read(master, i)
            if low.numel():
                counts.extend(count_unequal(a, b.to(a.device)) for a, b in blocks_of(low, high))
        if counts:
            differing[name] = torch.stack([count.to(counts[0].device) for count in counts]).sum()
    totals = {name: int(count) for name, count in differing.items()}
    wrong = [name for name, count in totals.items() if count]
    if not wrong:
        return ""
    others_text = f" (nor are {len(wrong) - 1} more leaves)" if wrong[1:] else ""
    name, size = wrong[0], math.prod(pytree.named_leaves(state.master)[wrong[0]].shape)
    return (
        f"params/{name} is not the rounding of its master weights, master/{name}: {totals[name]:,} of {size:,} "
        f"elements differ{others_text}, and the next update would bring the masters' values back; {REMEDY}"
    )


def blocks_of(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two layers of one shape, cut alike into blocks of rows."""
    if not low.dim():
        return [(low, high)]
    return [(low[begin:end], high[begin:end]) for begin, end in row_blocks(tuple(low.shape))]


def count_unequal(param: Tensor, master: Tensor) -> Tensor:
    """The number of parameters that are not the rounding of their master; NaN is NaN, subnormals are 0."""
    rounded, min_normal = master.to(param.dtype), torch.finfo(param.dtype).smallest_normal
    equal = (param == rounded) | ((param != param) & (rounded != rounded))
    return (~(equal | ((param.abs() < min_normal) & (rounded.abs() < min_normal)))).sum()


def narrowing(shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> Callable[[Tensor, int | None], Tensor]:
    """The function (leaf at rest, layer) -> the part that is updated here."""
    if local_shape(shape, specs[0], mesh) == local_shape(shape, specs[1], mesh):
        return lambda value, layer: value
    start, size = inner_box(shape, specs, mesh)
    return lambda value, layer: (
        narrow_box(value, start, size) if layer is None else narrow_box(value, start[1:], size[1:])
    )


def narrow_to_update(value: Tensor, shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> Tensor:
    """The part that this rank updates of its shard at rest."""
    return narrowing(shape, specs, mesh)(value, None)


def inner_box(shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of a shard by the second spec in that by the first."""
    outer, inner = (local_windows(shape, spec, mesh) for spec in specs)
    size = local_shape(shape, specs[1], mesh)
    if not inner:  # no layer is this rank's
        return (0,) * len(shape), size
    return tuple(a - b for a, b in zip(inner[0].start, outer[0].start)), size
