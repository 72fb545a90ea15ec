"""A state part of which rests on a disk: made there a few rows at a time, committed with every step, and found
again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.comm.tables import barrier
from fzero.core import gpu, prng, pytree
from fzero.core.arguments import checked
from fzero.core.copy_buckets import start_fetch
from fzero.core.device import fake_device_of
from fzero.core.precision import init_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import DiskTensor, LeafFiles, Nvme, VersionedStore
from fzero.offload.update_units import RowBlock
from fzero.optim import GradientTransformation
from fzero.optim.average import AVERAGE
from fzero.optim.lr_scale import LR_SCALE
from fzero.sharding import Plan
from fzero.sharding.draw import Box, draw_leaf
from fzero.sharding.slices import local_windows, narrow_box, row_blocks, shard_dim
from fzero.train.spike import LOSS, init_stats
from fzero.train.state import TrainState, meta_state, put_in_memory, put_on, state_specs


def on_disk(plan: Plan) -> bool:
    """Whether parameters or optimizer state of the plan rest on a disk."""
    return any("nvme" in (leaf.params.memory, leaf.opt.memory) for leaf in plan.leaves.values())


def owner_of(state: TrainState, plan: Plan) -> dict[str, str | None]:
    """{leaf of the state: its parameter, or None}."""
    return pytree.owners(pytree.names(state), pytree.names(plan.like))


def leaves_on_disk(like: TrainState, specs: TrainState, plan: Plan) -> dict[str, LeafFiles]:
    """The leaves of a state that rest on a disk, by name; leaves of stacked parameters are stacked."""
    named, owner = pytree.named_leaves(specs), owner_of(like, plan)
    frozen = {f"params/{name}" for name in plan.frozen}
    most = {name: max(map(len, spec.rows), default=0) for name, spec in named.items()}
    return {
        name: LeafFiles(
            tuple(leaf.shape), leaf.dtype, shard_dim(of) == 1, slots=1 if name in frozen else 2, most=most[name]
        )
        for name, leaf in pytree.named_leaves(like).items()
        if named[name].memory == "nvme" and (of := owner[name]) is not None
    }


def init_on_disk(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    key: Tensor,
    device: torch.device | str,
    nvme: Nvme | None,
) -> TrainState:
    """`init_state` with leaves on a disk: only a few rows of them are ever in memory."""
    policy, mesh = plan.policy, plan.mesh
    like, specs = meta_state(plan, tx), state_specs(plan, tx)
    leaves = leaves_on_disk(like, specs, plan)
    gpu.wake(torch.device(device))
    store = open_in(nvme, leaves, plan, resume=False)
    store.begin()
    named_specs, shapes = pytree.named_leaves(specs), pytree.named_leaves(like)
    out: dict[str, Any] = {}
    given = {} if isinstance(model, base.Model) else pytree.named_leaves(model)
    element = first_values(model, given, prng.fold_in(key, "init"), policy.state)

    def put(name: str, i: int, rows: tuple[int, int], value: Tensor) -> None:
        if name in leaves:
            store.write_rows(name, i, rows, value)
            return
        of = owner[name]
        assert of is not None  # rows are those of a parameter, or of its state
        RowBlock(name, i if shard_dim(of) == 1 else None, rows).of(out[name]).copy_(value)

    owner = owner_of(like, plan)

    def make(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        drawn = [n for n, of in owner.items() if of == name and n.startswith(("params/", "master/", AVERAGE))]
        windows: dict[Any, list[str]] = {}
        for n in drawn:
            if n not in leaves:
                out[n] = torch.empty(shapes[n].shape, dtype=shapes[n].dtype, device=device)
            for window in local_windows(shape, named_specs[n], mesh):
                windows.setdefault(window, []).append(n)
        lead = shard_dim(name)
        for (start, size, first), targets in windows.items():
            for i in range(size[0] if lead else 1):
                for rows in row_blocks(size[lead:]):
                    at, extent = list(start), list(size)
                    if lead:
                        at[0], extent[0] = start[0] + i, 1
                    if size[lead:]:
                        at[lead], extent[lead] = start[lead] + rows[0], rows[1] - rows[0]
                    value = element(name, (shape, tuple(at), tuple(extent)), std, mean, dtype)
                    for target in targets:
                        put(target, first + i, rows, value)

    if given:
        for name, leaf in given.items():
            make(name, tuple(leaf.shape), 0.0)
    else:
        model.init(make)
    for name, leaf in shapes.items():
        if not name.startswith("opt_state/") or name.startswith(AVERAGE):
            continue
        if name not in leaves:
            begin = float(name.split("/")[-1] == LR_SCALE)  # of what is no moment
            out[name] = torch.full(leaf.shape, begin, dtype=leaf.dtype, device=device)
            continue
        for i in range(leaves[name].layers):
            for rows in row_blocks(leaves[name].chunk):
                shape = (rows[1] - rows[0], *leaves[name].chunk[1:]) if leaves[name].chunk else ()
                put(name, i, rows, torch.zeros(()).expand(shape))
    fixed = {"step": torch.tensor(0), "key": key, "data_cursor": torch.tensor(0)}
    if policy.loss_scale:
        fixed |= pytree.named_leaves({"scaler": init_scaler(policy.loss_scale)})
    fixed |= pytree.named_leaves({"extra": {LOSS: init_stats()}})
    out |= {name: leaf.to(device) for name, leaf in fixed.items()}
    state = assemble_state(like, out, store)
    commit(nvme, state, plan)
    return put_in_memory(state, specs)


def first_values(
    model: base.Model | Tree, given: dict[str, Tensor], key: Tensor, state: torch.dtype
) -> Callable[[str, Box, float, float, torch.dtype | None], Tensor]:
    """`(name, box, std, mean, dtype) -> elements of a leaf in a box` before the first step: those given, or drawn."""
    begun = model.start if isinstance(model, base.Model) else {}

    def element(name: str, box: Box, std: float, mean: float, dtype: torch.dtype | None) -> Tensor:
        if name in given:
            part = narrow_box(given[name], *box[1:])
            return part.to(state) if part.is_floating_point() else part
        if name in begun:
            return begun[name].box(*box[1:], dtype or state, "cpu")
        return draw_leaf(prng.fold_in(key, name), box, mean, std, dtype or state, "cpu")

    return element


def open_in(nvme: Nvme | None, leaves: dict[str, LeafFiles], plan: Plan, *, resume: bool) -> VersionedStore:
    """The store of some leaves in `nvme`."""
    if nvme is None:
        raise ValueError(
            f"offload: {next(iter(leaves))} rests on a disk by the plan; give nvme=fzero.Nvme(folder) to "
            "init_state and the step"
        )
    return nvme.open(leaves, plan.mesh, owner=owner_table(plan), resume=resume)


def owner_table(plan: Plan) -> dict[str, Any]:
    """The record of a plan in its store."""
    found: dict[str, Any] = {"mesh": {name: size for name, size in plan.sizes.items() if size > 1}, "stage": plan.stage}
    if plan.pipeline is not None and plan.stages is not None:
        layout = ",".join(str(len(layers)) for layers in plan.stages.layers)
        found["pipeline"] = dataclasses.asdict(dataclasses.replace(plan.pipeline, layout=layout))
    return found


def assemble_state(like: TrainState, held: dict[str, Any], store: VersionedStore) -> TrainState:
    """The state whose leaves are those in memory and those of the store."""
    named = {name: held[name] if name in held else DiskTensor(store, name) for name in pytree.names(like)}
    return pytree.from_named(named, like)


def commit(nvme: Nvme | None, state: TrainState, plan: Plan) -> None:
    """Make the state the last complete step of its store, with the values that lie outside of it: counts, keys, the
    loss scale, and leaves that a rule moves."""
    if nvme is None or nvme.store is None:
        return
    leaves = pytree.named_leaves(state)
    owner = pytree.owners(list(leaves), pytree.names(state.params))
    beside = values_beside(plan)
    names = [name for name in leaves if owner[name] is None or name in beside]
    small = dict(zip(names, start_fetch([leaves[name] for name in names]).wait()))
    values = {name: to_text(leaf) for name, leaf in small.items()}
    nvme.store.commit(int(small["step"]), values, partial(barrier, plan.mesh))


def values_beside(plan: Plan) -> frozenset[str]:
    """The parameters, as leaves of a state, that are kept with the record of a store: those that a rule moves."""
    return frozenset(f"params/{name}" for name in plan.moved)


@checked()
def reopen_state(
    tx: GradientTransformation, plan: Plan, nvme: Nvme, *, device: torch.device | str = "cpu"
) -> TrainState:
    """Return this rank's state of the last complete step in the store of `nvme`: after a kill, or in a later process.

    tx, plan: those that the state was made with. nvme: the folder that it was made in. device: of the state.
    Leaves that the plan keeps on the device are made from those in the store: parameters from their master weights.
    Raises ValueError if the store is of another run, damaged, or lacks something that cannot be made.

    >>> import tempfile
    >>> params, tx, folder = {"w": torch.ones(2)}, fzero.optim.adamw(), tempfile.mkdtemp()
    >>> plan = fzero.zero_plan(0, params, fzero.one_process(), offload="params=nvme,opt=nvme")
    >>> nvme = fzero.Nvme(folder, buffer_bytes=1 << 20)
    >>> _ = fzero.init_state(params, tx, plan, seed=0, nvme=nvme)
    >>> nvme.close()
    >>> nvme = fzero.Nvme(folder, buffer_bytes=1 << 20)  # as a later process does
    >>> state = reopen_state(tx, plan, nvme)
    >>> state.step, state.params["w"].tensor()
    (tensor(0), tensor([1., 1.]))
    >>> nvme.close()
    """
    like, specs = meta_state(plan, tx), state_specs(plan, tx)
    gpu.wake(torch.device(device))
    store = open_in(nvme, leaves_on_disk(like, specs, plan), plan, resume=True)
    record = store.record
    assert record is not None  # it was opened to resume
    # Earlier versions stored no statistics of the loss.
    held: dict[str, Any] = pytree.named_leaves({"extra": {LOSS: init_stats()}})
    held |= {name: from_text(text) for name, text in record.values.items()}
    shapes, owner = pytree.named_leaves(like), owner_of(like, plan)
    lost = missing_leaves(like, specs, plan)
    if lost:
        raise ValueError(
            f"{nvme.folder}: holds step {record.step} but for {lost[0]} and {len(lost) - 1} more, which the plan "
            "keeps in memory; "
            "resume from a checkpoint"
        )
    derived = [name for name in shapes if name not in held and name not in store.leaves]
    for name in derived:
        of = owner[name]
        assert of is not None  # `missing_leaves` finds the others
        part = DiskTensor(store, f"master/{of}").tensor().to(plan.policy.param)
        if part.shape != shapes[name].shape:
            part = all_gather(part.to(device), plan.link(of), shard_dim(of), leaf=of)
        held[name] = part
    named, where = pytree.named_leaves(specs), torch.device(device)
    held = {name: put_on(where, leaf, named[name]) for name, leaf in held.items()}
    return put_in_memory(assemble_state(like, held, store), specs)


def missing_leaves(like: TrainState, specs: TrainState, plan: Plan) -> list[str]:
    """The leaves of a state that its store neither holds nor determines: parameters follow from master weights."""
    stored, owner = leaves_on_disk(like, specs, plan), owner_of(like, plan)
    beside = values_beside(plan)
    return [
        name
        for name, of in owner.items()
        if of is not None
        and name not in stored
        and name not in beside
        and not (name.startswith("params/") and f"master/{of}" in stored)
    ]


def put_on_disk(
    read: Callable[[str, Tensor, int | None], Tensor],
    like: TrainState,
    specs: TrainState,
    plan: Plan,
    nvme: Nvme | None,
    device: torch.device,
) -> TrainState:
    """The state whose leaves are `read(name, meta tensor, layer)` in a new store, or on `device`: a layer of a stacked
    leaf, or all of it for None."""
    named = pytree.named_leaves(specs)
    leaves = leaves_on_disk(like, specs, plan)
    gpu.wake(device)
    store = open_in(nvme, leaves, plan, resume=False)
    store.begin()
    held: dict[str, Tensor] = {}
    for name, leaf in pytree.named_leaves(like).items():
        if name not in leaves:
            held[name] = put_on(device, read(name, leaf, None), named[name])
            continue
        for i in range(leaves[name].layers):
            layer = read(name, leaf, i if leaves[name].stacked else None)
            for rows in row_blocks(leaves[name].chunk):
                store.write_rows(name, i, rows, layer[rows[0] : rows[1]] if layer.dim() else layer)
    state = assemble_state(like, held, store)
    commit(nvme, state, plan)
    return put_in_memory(state, specs)


def to_text(leaf: Tensor) -> dict[str, Any]:
    """A small tensor as JSON can hold it, exactly; of a planned one, which has no value, nothing."""
    if fake_device_of(leaf) is not None:
        return {}
    data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), "hex": data}


def from_text(text: dict[str, Any]) -> Tensor:
    """The tensor of such a text."""
    data = torch.frombuffer(bytearray.fromhex(text["hex"]), dtype=getattr(torch, text["dtype"]))
    return data.reshape(text["shape"]).clone()
