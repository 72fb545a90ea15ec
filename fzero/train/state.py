"""The state of a training run as a value: its parts, and their sharding over ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fzero import sharding
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.host_memory import LARGE_BYTES
from fzero.core.precision import ScalerState, init_scaler
from fzero.core.pytree import Tree
from fzero.core.text_parsing import short
from fzero.core.torch_private import disable_current_modes
from fzero.offload.nvme import DiskTensor
from fzero.optim import GradientTransformation
from fzero.optim.base import columns_of
from fzero.optim.norm import Squared
from fzero.optim.sharded_leaves import bind_to_plan
from fzero.sharding import LeafPlan, Mesh, Plan, Spec
from fzero.sharding.error_feedback import error_specs, first_errors

PREVIOUS = "previous"  # the name of the parameters before the last update in `TrainState.extra`
LOSS = "loss"  # of the statistics of the loss


class LossStats(NamedTuple):
    """The running statistics of the loss: scalars, the same on all ranks."""

    mean: Tensor  # float64
    var: Tensor  # float64: the square of the deviation
    count: Tensor  # int64: losses seen


def init_stats(device: torch.device | str = "cpu") -> LossStats:
    """The statistics of no loss."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return LossStats(zero, zero.clone(), torch.zeros((), dtype=torch.int64, device=device))


def first_stats() -> dict[str, Tensor]:
    """The leaves of the statistics of no loss, by their names in a state."""
    return pytree.named_leaves({"extra": {LOSS: init_stats()}})


class TrainState(NamedTuple):
    """All the state of a training run: nothing of it is kept elsewhere.

    Every leaf is a tensor; a part that a run does without is `()`.

    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.adamw()
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> fzero.pytree.names(state)[:5]
    ['step', 'params/w', 'opt_state/count', 'opt_state/m/w', 'opt_state/v/w']
    >>> state.step, state.master  # float32 parameters need no master weights
    (tensor(0), ())
    """

    step: Tensor  # int64 scalar: steps made, skipped ones among them
    params: Tree  # in policy.param; leaves that are not floating-point, or moved by a rule, in their own dtype
    master: Tree  # the trained ones in policy.state, in the optimizer's layout, or ()
    opt_state: Tree
    scaler: ScalerState | tuple[()]
    key: Tensor  # int64 [2]
    data_cursor: Tensor  # int64 scalar: samples consumed
    # "loss": its running statistics; with delayed updates "previous": the trained parameters before the last update;
    # with a codec's error feedback "codec_error": by hop and leaf what this rank owes (see sharding/error_feedback.py)
    extra: dict[str, Tree]


@checked()
def state_specs(plan: Plan, tx: GradientTransformation) -> TrainState:
    """Return a TrainState with a Spec in place of each tensor: how the state is sharded over the ranks.

    A checkpoint of a state on several ranks is saved with it.
    plan, tx: those that the state is made with, see `init_state`.

    >>> params, tx = {"w": torch.zeros(8, 2)}, fzero.optim.adamw()
    >>> plan = fzero.zero_plan(1, params, fzero.fake_mesh({"dp": 4}))
    >>> specs = state_specs(plan, tx)
    >>> print(specs.params["w"], specs.opt_state.m["w"])
    [·, ·] [·/dp, ·]
    """
    trained, policy = plan.trained(plan.opt), plan.policy
    scaler = init_scaler(policy.loss_scale) if policy.loss_scale else ()
    replicated: Any = Spec()  # in a tensor's place
    params = pytree.map(lambda spec: replace(spec, partial=frozenset()), plan.params)
    return TrainState(
        step=replicated,
        params=params,
        master=trained if policy.has_master else (),
        opt_state=align_memories(bind_to_plan(tx, plan).spec(trained), plan.leaves),
        scaler=pytree.map(lambda _: Spec(), scaler),
        key=replicated,
        data_cursor=replicated,
        extra={
            LOSS: pytree.map(lambda _: Spec(), init_stats()),
            **with_previous(plan.trained(params), plan.delayed),
            **error_specs(plan.stored_errors),
        },
    )


def align_memories(specs: Tree, leaves: Mapping[str, LeafPlan]) -> Tree:
    """The specs of an optimizer's state, with what is of a parameter in the memory that the plan gives it."""
    columns, owner = columns_of(specs, list(leaves))
    memories = {name: leaves[param].opt.memory for name, param in owner.items() if param is not None}
    changed = {name: replace(spec, memory=memories[name]) for name, spec in columns.items() if name in memories}
    return pytree.map_named(lambda name, spec: changed.get(name, spec), specs)


def expect_shapes(plan: Plan, tree: Tree, *, shards: bool = False) -> None:
    """Raise ValueError naming the first leaf that is missing, extra or of another shape than the plan's."""
    leaves = pytree.named_leaves(tree)
    pytree.from_named(leaves, plan.like)
    for name, leaf in plan.leaves.items():
        dtype = getattr(leaves[name], "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is {short(leaves[name])}; it must be a tensor")
        shape = plan.local_shapes["params"][name] if shards else leaf.shape
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(leaves[name].shape)}; the plan's model has {list(shape)}")
        if dtype.is_floating_point != leaf.dtype.is_floating_point:
            raise ValueError(f"{name} is {dtype}; the plan's model has {leaf.dtype}")


def meta_state(plan: Plan, tx: GradientTransformation) -> TrainState:
    """A rank's state with meta tensors for leaves: shapes and dtypes without memory."""

    def empty(group: str, name: str, leaf: Tensor) -> Tensor:
        dtype = plan.policy.state if group == "opt" and plan.policy.has_master else plan.leaves[name].dtype
        return leaf.new_empty(plan.local_shapes[group][name], dtype=dtype)

    params = pytree.map_named(partial(empty, "params"), plan.like)
    opt = pytree.map_named(partial(empty, "opt"), plan.trained(plan.like))
    return first_state(plan, bind_to_plan(tx, plan), params, opt, torch.empty(2, dtype=torch.int64, device="meta"))


def first_state(plan: Plan, tx: GradientTransformation, params: Tree, target: Tree, key: Tensor) -> TrainState:
    """The state before the first step, on the device of its key; target: what it updates."""
    policy, device = plan.policy, key.device
    return TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params=params,
        master=target if policy.has_master else (),
        opt_state=tx.init(target),
        scaler=init_scaler(policy.loss_scale, device) if policy.loss_scale else (),
        key=key,
        data_cursor=torch.zeros((), dtype=torch.int64, device=device),
        extra={
            LOSS: init_stats(device),
            **with_previous(plan.trained(params), plan.delayed),
            **first_errors(plan.stored_errors, plan.mesh, device),
        },
    )


def with_previous(trained: Tree, delayed: int) -> dict[str, Tree]:
    """The entry of `TrainState.extra` for the parameters before the last update; {} without delayed updates."""
    copied = lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf  # noqa: E731
    return {PREVIOUS: pytree.map(copied, trained)} if delayed else {}


def move_to_memory(state: TrainState, specs: TrainState) -> TrainState:
    """The state with each leaf in the memory of its spec: pinned host memory, or the device."""
    named, leaves, device = pytree.named_leaves(specs), pytree.named_leaves(state), state.step.device
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    replacements = dict[str, Tensor]()
    for memory in dict.fromkeys(named[name].memory for name in tensors):
        names = [name for name in tensors if named[name].memory == memory]
        replacements |= zip(names, memory.put([tensors[name] for name in names], device))
    return pytree.map_named(lambda name, leaf: replacements.get(name, leaf), state)


def move_leaf(device: torch.device, leaf: Tensor, spec: Spec) -> Tensor:
    """A leaf of a state on `device`, if its spec says so; a large one that stays in host memory is freed there."""
    is_small = spec.memory.on_host and leaf.nbytes < LARGE_BYTES  # put there with the others, by `move_to_memory`
    return leaf if is_small else spec.memory.put([leaf], device)[0]


DONATED = (
    "this state was donated to a train step, which has written the new one into its buffers: use the state that "
    "the step returned, or make the step with donate=False, which leaves its input valid (with an offload a checkpoint "
    "keeps it: fzero.checkpoint.save)"
)


MARK = "fzero_donated"  # the attribute of a donated state's step


class Donated(Tensor):
    """The stand-in for the leaves of a donated state: every use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(DONATED)


with disable_current_modes():  # this file may be imported while a step runs on fake tensors
    GONE = torch.empty(0, device="cpu").as_subclass(Donated)


def hand_over(old: TrainState, new: TrainState) -> TrainState:
    """`new`, made in the buffers of `old`, whose next use raises from here on."""
    # Tensors stay the same objects. The outermost dicts and lists of `new` are its own; those of `old` lose their
    # entries, which takes microseconds however many leaves are below. A tree of tuples has none: its state is known by
    # its step.
    new = new._replace(params=copy_containers(new.params), master=copy_containers(new.master))
    new = new._replace(opt_state=copy_containers(new.opt_state))
    new = new._replace(extra={name: copy_containers(tree) for name, tree in new.extra.items()})
    for tree in (old.params, old.master, old.opt_state, *old.extra.values()):
        empty_containers(tree)
    setattr(old.step, MARK, True)
    return new


def copy_containers(tree: Tree) -> Tree:
    """The tree with copies of its outermost dicts and lists."""
    if isinstance(tree, (dict, list)):
        return copy.copy(tree)
    if not isinstance(tree, tuple):
        return tree
    return type(tree)(*map(copy_containers, tree)) if hasattr(tree, "_fields") else tuple(map(copy_containers, tree))


def empty_containers(tree: Tree) -> None:
    """Replace what the outermost dicts and lists of a tree hold."""
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            tree[key] = GONE
    elif isinstance(tree, tuple):
        for child in tree:
            empty_containers(child)


def expect_alive(tree: Tree) -> None:
    """Raise ValueError if a tree is, or belongs to, a state that was donated."""
    if any(isinstance(leaf, Donated) or getattr(leaf, MARK, False) for leaf in pytree.leaves(tree)):
        raise ValueError(DONATED)


class Metrics(NamedTuple):
    """The results that a train step reports, as scalars.

    >>> def loss(params, batch):  # (sum, number of tokens)
    ...     return (batch["x"] @ params["w"]).square().sum(), batch["x"].shape[0]
    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> state, metrics = fzero.make_train_step(loss, tx, plan)(state, {"x": torch.eye(2)})
    >>> metrics.loss, metrics.num_tokens, metrics.skipped
    (tensor(1.), tensor(2), tensor(False))
    """

    loss: Tensor  # nats per token (float32 or wider)
    num_tokens: Tensor  # negative or not finite only if a loss function counted so: the loss is then NaN
    grad_norm: Tensor  # of the gradient of that loss, before clipping
    # bool: loss or gradient not finite, nothing that counts, or the loss a spike; parameters and optimizer state are as
    # they were
    skipped: Tensor
    loss_scale: Tensor
    extra: dict[str, Tensor]  # the loss function's own sums, per token
    spike: Tensor | tuple[()] = ()  # bool: the loss was a spike; () where that is not judged
    squares: dict[str, Squared] | tuple[()] = ()  # of this rank's sums of gradients, leaf by leaf: see Execution.norms
    factor: Tensor | tuple[()] = ()  # beside the squares: by which those sums are gradients of the mean loss
    tables: dict[str, Tensor] = {}  # noqa: RUF012  (the loss function's own sums by layer, see Loss; as they are)
    # With update="speculate": the layers that were updated in the backward pass, and how many of them were put right
    # afterwards, as the step was clipped or skipped: all or none.
    speculated: Tensor | tuple[()] = ()
    put_right: Tensor | tuple[()] = ()
    # int64: how often the gradient was computed again, as experts of a rank were sent more rows than there was room for
    # (see Experts); () where that cannot be.
    recomputed: Tensor | tuple[()] = ()


def read(leaf: Any, layer: int | None = None) -> Tensor:
    """A leaf of a state, or a layer of it, also from a disk."""
    if isinstance(leaf, DiskTensor):
        return leaf.tensor() if layer is None else leaf.tensor(layers=(layer, 1))[0]
    return leaf if layer is None else leaf[layer]


def gathered(value: Tensor, spec: Spec, mesh: Mesh | None, leaf: str) -> Tensor:
    """The whole of a value, of which this rank has a shard by `spec`."""
    if mesh is None or not any(mesh[axis].size > 1 for axis in spec.axes):
        return value
    return sharding.gather_full(value, spec, mesh, leaf=leaf)
