"""The state of a training run as a value: what is in it, how it begins, and how the states of the ranks make up one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import pytree, random
from fzero.collectives import all_gather
from fzero.models import base
from fzero.offload import Kept, Space, Store, Stored
from fzero.offload.space import together
from fzero.offload.units import Slice, owners
from fzero.optim import GradientTransformation, ema_init
from fzero.precision import Policy, ScalerState, fp32, init_scaler
from fzero.pytree import Tree
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.draw import normal_within, window
from fzero.sharding.pieces import pieces
from fzero.sharding.zero import shapes_of, shard_dim
from fzero.update import own


class TrainState(NamedTuple):
    """All of a training run, and nothing elsewhere. Every leaf is a tensor; `()` stands for what a run does without."""

    step: Tensor  # int64 scalar: steps made, skipped ones among them
    params: Tree  # in policy.param
    master: Tree  # the trained ones in policy.state, in the optimizer's layout, or ()
    opt_state: Tree
    scaler: ScalerState | tuple
    key: Tensor  # int64 [2]
    data_cursor: Tensor  # int64 scalar: samples consumed
    extra: dict[str, Tree]  # "ema": the averaged weights, where asked for


def init_state(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int | Tensor,
    policy: Policy = fp32(),  # noqa: B008
    ema: bool = False,
    device: torch.device | str = "cpu",
    space: Space | None = None,
) -> TrainState:
    """This rank's state before the first step. Parameters are drawn from the seed (or key) for a Model, and taken from a whole tree.

    `policy` must be the step's; `ema` keeps averaged weights, for a step made with `ema_decay`. A rank draws or copies its own shards
    only, so that nothing larger is ever held: the same elements on every mesh.
    space: where the leaves live that the plan puts on a disk; a store is made there, and they are drawn a few rows at a time.
    """
    key = seed.to(device) if isinstance(seed, Tensor) else random.key(seed, device)
    drawn = isinstance(model, base.Model)
    expect_shapes(plan, shapes_of(model))
    if on_disk(plan):
        return stored_state(model, tx, plan, mesh, key, policy, ema, device, space)
    opt, masters = pytree.named_leaves(plan.opt), {}

    def keep(name: str, leaf: Tensor) -> Tensor:
        if policy.has_master and name not in plan.frozen:
            masters[name] = part_of(leaf, plan, mesh, name) if drawn else whole_part(leaf, opt[name], mesh)
            masters[name] = masters[name].to(policy.state, copy=True)
        rest = leaf if drawn else whole_part(leaf, pytree.named_leaves(plan.params)[name], mesh)
        return rest.to(policy.param, copy=not drawn)

    if drawn:
        init_key = random.fold_in(key, "init")
        params = base.init_params(model, init_key, policy.state, device, plan=plan, mesh=mesh, then=keep)
    else:
        params = pytree.map_named(keep, model)
    master = pytree.from_named(masters, plan.trained(plan.like)) if policy.has_master else ()
    target = master if policy.has_master else own(plan, mesh, params)
    state = TrainState(
        step=torch.tensor(0, device=device),
        params=params,
        master=master,
        opt_state=tx.init(target),
        scaler=init_scaler(policy.loss_scale, device) if policy.loss_scale else (),
        key=key,
        data_cursor=torch.tensor(0, device=device),
        extra={"ema": ema_init(target)} if ema else {},
    )
    return in_host_memory(state, state_specs(plan, tx, policy, ema=ema))


def in_host_memory(state: TrainState, specs: TrainState) -> TrainState:
    """The state with the leaves whose spec says so in the host's memory, pinned where there is CUDA."""
    named = pytree.named_leaves(specs)

    def move(name: str, leaf: Any) -> Any:
        if named[name].memory != "host" or not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu").pin_memory() if torch.cuda.is_available() else leaf.to("cpu")

    return pytree.map_named(move, state)


def part_of(leaf: Tensor, plan: Plan, mesh: Mesh, name: str) -> Tensor:
    """The part that this rank updates of its leaf at rest."""
    return pytree.leaves(own(plan._replace(frozen=frozenset()), mesh, {name: leaf}))[0]


def whole_part(leaf: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """This rank's slice, a view, of a whole leaf."""
    for dim, (start, size) in enumerate(zip(*window(tuple(leaf.shape), spec, mesh))):
        leaf = leaf.narrow(dim, start, size)
    return leaf


def state_specs(plan: Plan, tx: GradientTransformation, policy: Policy, *, ema: bool = False) -> TrainState:
    """The state with a Spec in place of each tensor: how the states of the ranks make up one, whatever the mesh."""
    trained = plan.trained(plan.opt)
    scaler = init_scaler(policy.loss_scale) if policy.loss_scale else ()
    return TrainState(
        step=Spec(),
        params=pytree.map(lambda spec: replace(spec, partial=frozenset()), plan.params),
        master=trained if policy.has_master else (),
        opt_state=tx.spec(trained),
        scaler=pytree.map(lambda _: Spec(), scaler),
        key=Spec(),
        data_cursor=Spec(),
        extra={"ema": trained} if ema else {},
    )


def expect_shapes(plan: Plan, given: Tree, mesh: Mesh | None = None) -> None:
    """Raise ValueError naming the first leaf of `given` that is missing, extra or of another shape than the plan's.

    mesh: the leaves are this rank's shards at rest.
    """
    wanted, leaves = pytree.named_leaves(plan.like), pytree.named_leaves(given)
    specs = pytree.named_leaves(plan.params)
    pytree.from_named(leaves, plan.like)
    for name, leaf in wanted.items():
        shape = tuple(leaf.shape) if mesh is None else window(tuple(leaf.shape), specs[name], mesh)[1]
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"{name}: the plan was made for shape {list(shape)} and the leaf has {list(leaves[name].shape)}")


# -- on a disk


def on_disk(plan: Plan) -> bool:
    """Whether parameters or optimizer state of the plan rest on a disk."""
    return any(spec.memory == "nvme" for tree in (plan.params, plan.opt) for spec in pytree.leaves(tree))


def meta_state(tx: GradientTransformation, plan: Plan, mesh: Mesh, policy: Policy, ema: bool) -> TrainState:
    """A rank's state with meta tensors for leaves: shapes and dtypes without memory."""

    def local(specs: Tree, dtype: torch.dtype) -> Tree:
        return pytree.map(lambda leaf, spec: leaf.new_empty(window(tuple(leaf.shape), spec, mesh)[1], dtype=dtype), plan.like, specs)

    params, opt = local(plan.params, policy.param), plan.trained(local(plan.opt, policy.state if policy.has_master else policy.param))
    return TrainState(
        step=torch.empty((), dtype=torch.int64, device="meta"),
        params=params,
        master=opt if policy.has_master else (),
        opt_state=tx.init(opt),
        scaler=pytree.map(lambda x: x.to("meta"), init_scaler(policy.loss_scale)) if policy.loss_scale else (),
        key=torch.empty(2, dtype=torch.int64, device="meta"),
        data_cursor=torch.empty((), dtype=torch.int64, device="meta"),
        extra={"ema": opt} if ema else {},
    )


def owner_of(state: TrainState, plan: Plan) -> dict[str, str | None]:
    """{leaf of the state: the parameter that it belongs to, or None}."""
    return owners(pytree.names(state), pytree.names(plan.like))


def kept_leaves(like: TrainState, specs: TrainState, plan: Plan) -> dict[str, Kept]:
    """The leaves of a state that rest on a disk, by name; what belongs to stacked parameters is stacked."""
    named, owner = pytree.named_leaves(specs), owner_of(like, plan)
    frozen = {f"params/{name}" for name in plan.frozen}
    return {
        name: Kept(tuple(leaf.shape), leaf.dtype, shard_dim(owner[name]) == 1, slots=1 if name in frozen else 2)
        for name, leaf in pytree.named_leaves(like).items()
        if named[name].memory == "nvme" and owner[name] is not None
    }


def stored_state(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    key: Tensor,
    policy: Policy,
    ema: bool,
    device: torch.device | str,
    space: Space | None,
) -> TrainState:
    """`init_state` where some leaves rest on a disk: nothing larger than a few rows of them is ever in memory."""
    like, specs = meta_state(tx, plan, mesh, policy, ema), state_specs(plan, tx, policy, ema=ema)
    leaves = kept_leaves(like, specs, plan)
    store = open_in(space, leaves, plan, mesh, resume=False)
    store.begin()
    named_specs, shapes = pytree.named_leaves(specs), pytree.named_leaves(like)
    out: dict[str, Any] = {}
    given = {} if isinstance(model, base.Model) else pytree.named_leaves(model)
    init_key = random.fold_in(key, "init")

    def put(name: str, i: int, rows: tuple[int, int] | None, value: Tensor) -> None:
        if name in leaves:
            shape = leaves[name].chunk if rows is None or not leaves[name].chunk else (rows[1] - rows[0], *leaves[name].chunk[1:])
            buffer = space.arena.take(shape, leaves[name].dtype, space.disk.busy)
            buffer.view.copy_(value.reshape(shape))
            store.write(name, i, rows, buffer)
            return
        where = out.setdefault(name, torch.empty(shapes[name].shape, dtype=shapes[name].dtype, device=device))
        Slice(name, i if shard_dim(owner[name]) == 1 else None, rows).of(where).copy_(value)

    owner = owner_of(like, plan)

    def make(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        drawn = [n for n, of in owner.items() if of == name and n.startswith(("params/", "master/", "extra/ema/"))]
        windows: dict[Any, list[str]] = {}
        for n in drawn:
            windows.setdefault(window(shape, named_specs[n], mesh), []).append(n)
        lead = shard_dim(name)
        for (start, size), targets in windows.items():
            for i in range(size[0] if lead else 1):
                for rows in pieces(size[lead:]) if size[lead:] else [None]:
                    at, extent = list(start), list(size)
                    if lead:
                        at[0], extent[0] = start[0] + i, 1
                    if rows is not None:
                        at[lead], extent[lead] = start[lead] + rows[0], rows[1] - rows[0]
                    value = element(name, shape, tuple(at), tuple(extent), std, mean)
                    for target in targets:
                        put(target, i, rows, value)

    def element(name: str, shape: Any, start: Any, size: Any, std: float, mean: float) -> Tensor:
        if name in given:
            leaf = given[name]
            for dim, (at, n) in enumerate(zip(start, size)):
                leaf = leaf.narrow(dim, at, n)
            return leaf.to(policy.state)
        if std == 0.0:
            return torch.full(size, mean, dtype=policy.state)
        return normal_within(random.fold_in(init_key, name), shape, start, size, mean, std, policy.state, "cpu")

    if given:
        for name, leaf in given.items():
            make(name, tuple(leaf.shape), 0.0)
    else:
        model.init(make)
    for name, leaf in shapes.items():
        if not name.startswith("opt_state/"):
            continue
        if name not in leaves:
            out[name] = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            continue
        for i in range(leaves[name].layers):
            for rows in pieces(leaves[name].chunk) if leaves[name].chunk else [None]:
                put(
                    name,
                    i,
                    rows,
                    torch.zeros(()).expand(leaves[name].chunk if rows is None else (rows[1] - rows[0], *leaves[name].chunk[1:])),
                )
    fixed = {"step": torch.tensor(0), "key": key, "data_cursor": torch.tensor(0)}
    if policy.loss_scale:
        fixed |= pytree.named_leaves({"scaler": init_scaler(policy.loss_scale)})
    out |= {name: leaf.to(device) for name, leaf in fixed.items()}
    state = assembled(like, out, store)
    commit(space, state, mesh)
    return in_host_memory(state, specs)


def open_in(space: Space | None, leaves: dict[str, Kept], plan: Plan, mesh: Mesh, *, resume: bool) -> Store:
    """The store of some leaves in `space`."""
    if space is None:
        raise ValueError(
            f"offload: {next(iter(leaves))} rests on a disk by the plan; give space=fzero.offload.Space(folder) to init_state and the step"
        )
    return space.open(
        leaves, mesh, owner={"mesh": {n: size for n, size in plan.sizes.items() if size > 1}, "stage": plan.stage}, resume=resume
    )


def assembled(like: TrainState, held: dict[str, Any], store: Store) -> TrainState:
    """The state whose leaves are those in memory and those of the store."""
    named = {name: held[name] if name in held else Stored(store, name) for name in pytree.names(like)}
    return pytree.from_named(named, like)


def commit(space: Space | None, state: TrainState, mesh: Mesh) -> None:
    """Make the state the last complete step of its store, with the values that lie outside of it: counts, keys, the loss scale."""
    if space is None or space.store is None:
        return
    values = {
        name: to_text(leaf) for name, leaf in pytree.named_leaves(state).items() if isinstance(leaf, Tensor) and leaf.numel() <= SMALL
    }
    space.store.commit(int(state.step), values, together(mesh))


def reopened(tx: GradientTransformation, plan: Plan, mesh: Mesh, space: Space, *, policy: Policy, ema: bool = False) -> TrainState:
    """This rank's state of the last complete step in the store of `space`: after a kill, or in a later process.

    What the plan keeps on the device is made of what is in the store: parameters of their master weights.
    Raises ValueError where the store is of another run, damaged, or lacks something that cannot be made.
    """
    like, specs = meta_state(tx, plan, mesh, policy, ema), state_specs(plan, tx, policy, ema=ema)
    store = open_in(space, kept_leaves(like, specs, plan), plan, mesh, resume=True)
    held = {name: from_text(text) for name, text in store.record.values.items()}
    shapes, owner = pytree.named_leaves(like), owner_of(like, plan)
    missing = [name for name in shapes if name not in held and name not in store.leaves]
    derived = [name for name in missing if policy.has_master and name.startswith("params/") and f"master/{owner[name]}" in store.leaves]
    lost = [name for name in missing if name not in derived]
    if lost:
        raise ValueError(
            f"{space.folder}: holds step {store.record.step} but for {lost[0]} and {len(lost) - 1} more, which the plan keeps in memory; "
            "resume from a checkpoint"
        )
    for name in derived:
        part = Stored(store, f"master/{owner[name]}").tensor().to(policy.param)
        if part.shape != shapes[name].shape:
            part = all_gather(part, mesh["dp"], shard_dim(owner[name]), leaf=owner[name])
        held[name] = part
    return in_host_memory(assembled(like, held, store), specs)


SMALL = 64  # elements of a leaf that is written beside the step's number


def to_text(leaf: Tensor) -> dict[str, Any]:
    """A small tensor as JSON can hold it, exactly."""
    data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), "hex": data}


def from_text(text: dict[str, Any]) -> Tensor:
    """The tensor of such a text."""
    data = torch.frombuffer(bytearray.fromhex(text["hex"]), dtype=getattr(torch, text["dtype"]))
    return data.reshape(text["shape"]).clone()
