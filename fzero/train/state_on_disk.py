"""A state part of which rests on a disk: made there a few rows at a time, committed with every step, and found
again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.comm.tables import raise_together
from fzero.core import gpu, prng, pytree
from fzero.core.arguments import checked
from fzero.core.copy_buckets import start_fetch
from fzero.core.device import fake_device_of
from fzero.core.precision import init_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import DiskTensor, LeafFiles, Nvme, VersionedStore
from fzero.offload.buffer_need import disk_of
from fzero.offload.store_manifest import read_step_manifest
from fzero.offload.update_units import RowBlock
from fzero.optim import GradientTransformation
from fzero.optim.in_units import columns_of, is_layered, smallest_unit
from fzero.sharding import Plan
from fzero.sharding.draw import Box, draw_leaf
from fzero.sharding.slices import local_shape, local_windows, narrow_box, row_blocks, shard_dim
from fzero.train.spike import LOSS, init_stats
from fzero.train.state import TrainState, meta_state, put_in_memory, put_on, state_specs

OF_OPTIMIZER = "opt_state/"  # begins the names of an optimizer's leaves in a state


def on_disk(plan: Plan) -> bool:
    """Whether parameters or optimizer state of the plan rest on a disk."""
    return any("nvme" in (leaf.params.memory, leaf.opt.memory) for leaf in plan.leaves.values())


def owner_of(state: TrainState, plan: Plan) -> dict[str, str | None]:
    """{leaf of the state: its parameter, or None}."""
    return pytree.owners(pytree.names(state), pytree.names(plan.like))


def leaves_on_disk(like: TrainState, specs: TrainState, plan: Plan) -> dict[str, LeafFiles]:
    """The leaves of a state that rest on a disk, by name; those that have the layers of their parameter are stacked."""
    named, owner = pytree.named_leaves(specs), owner_of(like, plan)
    frozen = {f"params/{name}" for name in plan.frozen}
    cut = {name: spec if spec.rows or spec.parts else None for name, spec in named.items()}
    shards = {name: updated_shape(plan, name) for name in plan.leaves}
    return {
        name: LeafFiles(
            tuple(leaf.shape),
            leaf.dtype,
            is_layered(of, shards[of], leaf.shape) if name.startswith(OF_OPTIMIZER) else shard_dim(of) == 1,
            slots=1 if name in frozen else 2,
            cut=cut[name],
        )
        for name, leaf in pytree.named_leaves(like).items()
        if named[name].memory == "nvme" and (of := owner[name]) is not None
    }


def updated_shape(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape of this rank's part of a leaf that the optimizer updates."""
    return local_shape(plan.leaves[name].shape, plan.leaves[name].opt, plan.mesh)


def smallest_units(plan: Plan, opt_state: Tree, unit: str) -> dict[str, str]:
    """{trained leaf: the smallest part of it that is updated apart from the rest}, see `smallest_unit`."""
    names = pytree.names(plan.trained(plan.like))
    columns, owner = columns_of(opt_state, names)
    own: dict[str | None, list[Any]] = {}
    for column, of in owner.items():
        own.setdefault(of, []).append(columns[column].shape)
    return {name: smallest_unit(name, updated_shape(plan, name), own.get(name, ()), unit) for name in names}


def init_on_disk(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    key: Tensor,
    device: torch.device | str,
    nvme: Nvme | None,
) -> TrainState:
    """`init_state` with leaves on a disk: only a few rows of them are ever in memory."""
    policy = plan.policy
    like, specs = meta_state(plan, tx), state_specs(plan, tx)
    leaves = leaves_on_disk(like, specs, plan)
    gpu.wake(torch.device(device))
    store = open_in(nvme, leaves, plan, resume=False)
    store.begin()
    given = {} if isinstance(model, base.Model) else pytree.named_leaves(model)
    element = first_values(model, given, prng.fold_in(key, "init"), policy.state)
    first = FirstState(store, tx, plan, like, specs, torch.device(device))

    def make(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        first.leaf(name, shape, lambda box: element(name, box, std, mean, dtype))

    if given:
        for name, leaf in given.items():
            make(name, tuple(leaf.shape), 0.0)
    else:
        model.init(make)
    fixed = {"step": torch.tensor(0), "key": key, "data_cursor": torch.tensor(0)}
    if policy.loss_scale:
        fixed |= pytree.named_leaves({"scaler": init_scaler(policy.loss_scale)})
    fixed |= pytree.named_leaves({"extra": {LOSS: init_stats()}})
    fixed |= first.shared
    out = first.out | {name: leaf.to(device) for name, leaf in fixed.items()}
    state = assemble_state(like, out, store)
    commit(nvme, state, plan)
    return put_in_memory(state, specs)


class FirstState:
    """The leaves of parameters in a state before its first step: parameters, masters, and what the optimizer's `init`
    makes of them, a row block at a time, or a layer or all of a leaf where the optimizer needs that, as an offloaded
    update has them."""

    def __init__(
        self,
        store: VersionedStore,
        tx: GradientTransformation,
        plan: Plan,
        like: TrainState,
        specs: TrainState,
        device: torch.device,
    ) -> None:
        self.store, self.tx, self.plan, self.device = store, tx, plan, device
        self.shapes, self.specs, self.owner = (
            pytree.named_leaves(like),
            pytree.named_leaves(specs),
            owner_of(like, plan),
        )
        self.units = smallest_units(plan, like.opt_state, tx.unit)
        self.out: dict[str, Any] = {}  # the leaves that are in memory
        self.shared: dict[str, Tensor] = {}  # the leaves of the optimizer's state that belong to no parameter
        trained = plan.trained(like.master if plan.policy.has_master else like.params)
        empty = lambda leaf: leaf.new_zeros((0, *leaf.shape[1:]) if leaf.dim() else (), device="cpu")  # noqa: E731
        self.empty = pytree.map(lambda leaf: empty(leaf).to(plan.policy.state), trained)

    def leaf(self, name: str, shape: tuple[int, ...], values: Callable[[Box], Tensor]) -> None:
        """Put a parameter of this whole shape, whose elements in a box are `values(box)`, and all that is its own."""
        lead = shard_dim(name)
        windows: dict[Any, list[str]] = {}
        for n in (n for n, of in self.owner.items() if of == name):
            if n not in self.store.leaves:
                self.out[n] = torch.empty(self.shapes[n].shape, dtype=self.shapes[n].dtype, device=self.device)
            if n.startswith(("params/", "master/")):
                for window in local_windows(shape, self.specs[n], self.plan.mesh):
                    windows.setdefault(window, []).append(n)
        updated = [] if name in self.plan.frozen else local_windows(shape, self.plan.leaves[name].opt, self.plan.mesh)
        for window in [*windows, *(window for window in updated if window not in windows)]:
            (start, size, first), targets = window, windows.get(window, [])
            whole = window in updated and self.units[name] != "row"
            for i in range(size[0] if lead else 1):
                for rows in [(0, math.prod(size[lead : lead + 1]))] if whole else row_blocks(size[lead:]):
                    at, extent = list(start), list(size)
                    if lead:
                        at[0], extent[0] = start[0] + i, 1
                    if size[lead:]:
                        at[lead], extent[lead] = start[lead] + rows[0], rows[1] - rows[0]
                    value = values((shape, tuple(at), tuple(extent)))
                    for target in targets:
                        self.put(target, first + i, rows, value)
                    if window in updated and self.units[name] != "leaf":
                        self.states(name, first + i, None if whole else rows, value.to(self.plan.policy.state))
        if self.units.get(name) == "leaf":
            parts = [values((shape, start, size)) for start, size, _ in updated]
            value = torch.cat(parts) if parts else torch.empty(updated_shape(self.plan, name))
            self.states(name, None, None, value.to(self.plan.policy.state))

    def states(self, name: str, layer: int | None, rows: tuple[int, int] | None, value: Tensor) -> None:
        """Put what the optimizer's `init` makes of rows of a layer of a parameter; None: of all of them."""
        named = pytree.named_leaves(self.empty) | {name: value}
        for column, leaf in pytree.named_leaves(self.tx.init(pytree.from_named(named, self.empty))).items():
            full = f"opt_state/{column}" if column else "opt_state"
            of = self.owner[full]
            if of == name:
                self.put(full, layer, rows, leaf)
            elif of is None and full not in self.shared:
                self.shared[full] = leaf
            elif of is None and fake_device_of(leaf) is None and not torch.equal(leaf, self.shared[full]):
                raise ValueError(
                    f"offload: {full} is of no parameter, and the optimizer's init makes other values of it for other "
                    "parameters, which are put on a disk one after another; use opt=host"
                )

    def put(self, name: str, layer: int | None, rows: tuple[int, int] | None, value: Tensor) -> None:
        """Put rows of a layer of a leaf where it rests; None: all of them."""
        of, kept = self.owner[name], self.store.leaves.get(name)
        assert of is not None  # rows are those of a parameter, or of its state
        stacked = shard_dim(of) == 1
        if kept is None:
            RowBlock(name, layer if stacked else None, rows).of(self.out[name]).copy_(value)
            return
        if rows is not None:
            self.store.write_rows(name, layer or 0, rows, value)
        elif layer is None:
            self.store.write_leaf(name, value)
        else:
            self.store.write_layer(name, layer, value)


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
    disk = disk_of(nvme, plan)
    assert disk is not None  # as some of its leaves rest there
    return disk.open(leaves, plan.mesh, owner=owner_table(plan), resume=resume)


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
    nvme.store.commit(int(small["step"]), values, partial(raise_together, mesh=plan.mesh))


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
    lost = missing_leaves(like, specs, plan)
    there = read_step_manifest(nvme.folder) if lost and nvme.folder is not None else None
    if there is not None:  # said before the store is opened, which the one that is open would not outlive
        raise ValueError(
            f"{nvme.folder}: holds step {there.step} but for {lost[0]} and {len(lost) - 1} more, which the plan "
            "keeps in memory; "
            "resume from a checkpoint"
        )
    gpu.wake(torch.device(device))
    store = open_in(nvme, leaves_on_disk(like, specs, plan), plan, resume=True)
    record = store.record
    assert record is not None  # it was opened to resume
    # Earlier versions stored no statistics of the loss.
    held: dict[str, Any] = pytree.named_leaves({"extra": {LOSS: init_stats()}})
    held |= {name: from_text(text) for name, text in record.values.items()}
    shapes, owner = pytree.named_leaves(like), owner_of(like, plan)
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
