"""A state part of which rests on a disk: made there a few rows at a time, committed with every step, and reopened."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fzero import offload
from fzero.comm.collectives import all_gather
from fzero.comm.rank_tables import raise_together
from fzero.core import gpu, prng, pytree
from fzero.core.arguments import checked
from fzero.core.copy_buckets import start_fetch
from fzero.core.device import fake_device_of
from fzero.core.precision import init_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import DiskTensor, Nvme
from fzero.offload.nvme import disk_of
from fzero.optim import GradientTransformation
from fzero.optim.base import columns_of, is_layered, smallest_unit
from fzero.sharding import Plan
from fzero.sharding.slices import Box, draw_leaf, local_windows, narrow_box, row_blocks, shard_dim
from fzero.train.state import TrainState, first_stats, meta_state, move_leaf, move_to_memory, state_specs

OF_OPTIMIZER = "opt_state/"  # begins the names of an optimizer's leaves in a state


@dataclasses.dataclass(frozen=True, eq=False)
class DiskLayout:
    """Which leaves of a rank's state rest on a disk; like: the state as meta tensors."""

    like: TrainState
    specs: TrainState
    plan: Plan

    @classmethod
    def from_plan(cls, plan: Plan, tx: GradientTransformation) -> DiskLayout:
        """The layout of the states of an optimizer."""
        return cls(meta_state(plan, tx), state_specs(plan, tx), plan)

    @cached_property
    def owner(self) -> dict[str, str | None]:
        """{leaf of the state: its parameter, or None}."""
        return pytree.owners(pytree.names(self.like), pytree.names(self.plan.like))

    @cached_property
    def files(self) -> dict[str, offload.LeafFiles]:
        """The leaves that rest on a disk, by name; those that have the layers of their parameter are stacked."""
        named, shapes = pytree.named_leaves(self.specs), self.plan.local_shapes["opt"]
        frozen = {f"params/{name}" for name in self.plan.frozen}
        return {
            name: offload.LeafFiles(
                tuple(leaf.shape),
                leaf.dtype,
                is_layered(param, shapes[param], leaf.shape)
                if name.startswith(OF_OPTIMIZER)
                else shard_dim(param) == 1,
                slots=1 if name in frozen else 2,
                cut=named[name] if named[name].rows or named[name].parts else None,
            )
            for name, leaf in pytree.named_leaves(self.like).items()
            if named[name].memory.on_disk and (param := self.owner[name]) is not None
        }

    @property
    def missing(self) -> list[str]:
        """The leaves that a store neither holds nor determines: parameters follow from master weights."""
        return [
            name
            for name, param in self.owner.items()
            if param is not None
            and name not in self.files
            and param not in self.plan.rule_leaves
            and not (name.startswith("params/") and f"master/{param}" in self.files)
        ]

    def open(self, nvme: Nvme | None, *, resume: bool = False) -> offload.VersionedStore:
        """The store of the leaves in `nvme`: the one that is there, or a new one that is begun."""
        disk = disk_of(nvme, self.plan)
        assert disk is not None  # as some leaves rest there
        store = disk.open(self.files, self.plan.mesh, owner=plan_record(self.plan), resume=resume)
        if not resume:
            store.begin()
        return store

    def assemble(
        self, resident: dict[str, Any], store: offload.VersionedStore, commit_to: Nvme | None = None
    ) -> TrainState:
        """The state whose leaves are those in memory and those of the store; a new one is its first step."""
        names = pytree.names(self.like)
        named = {name: resident[name] if name in resident else DiskTensor(store, name) for name in names}
        state = pytree.from_named(named, self.like)
        commit(commit_to, state, self.plan)
        return move_to_memory(state, self.specs)


def smallest_units(shapes: dict[str, tuple[int, ...]], opt_state: Tree, unit: str) -> dict[str, str]:
    """{trained leaf: the smallest part of it that is updated apart from the rest}, see `smallest_unit`."""
    columns, owner = columns_of(opt_state, list(shapes))
    param_shapes: dict[str | None, list[Any]] = {}
    for column, param in owner.items():
        param_shapes.setdefault(param, []).append(columns[column].shape)
    return {name: smallest_unit(name, shape, param_shapes.get(name, ()), unit) for name, shape in shapes.items()}


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
    layout = DiskLayout.from_plan(plan, tx)
    gpu.wake(torch.device(device))
    store = layout.open(nvme)
    values = {} if isinstance(model, base.Model) else pytree.named_leaves(model)
    element = first_values(model, values, prng.fold_in(key, "init"), policy.state)
    first = FirstState(store, tx, layout, torch.device(device))

    def make(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        first.leaf(name, shape, lambda box: element(name, box, std, mean, dtype))

    if values:
        for name, leaf in values.items():
            make(name, tuple(leaf.shape), 0.0)
    else:
        model.init(make)
    fixed = {"step": torch.tensor(0), "key": key, "data_cursor": torch.tensor(0)}
    if policy.loss_scale:
        fixed |= pytree.named_leaves({"scaler": init_scaler(policy.loss_scale)})
    fixed |= first_stats()
    fixed |= first.shared
    out = first.out | {name: leaf.to(device) for name, leaf in fixed.items()}
    return layout.assemble(out, store, nvme)


class FirstState:
    """The leaves of parameters in a state before its first step: parameters, masters and optimizer states."""

    def __init__(
        self, store: offload.VersionedStore, tx: GradientTransformation, layout: DiskLayout, device: torch.device
    ) -> None:
        self.store, self.tx, self.device = store, tx, device
        self.plan, self.owner, like = layout.plan, layout.owner, layout.like
        self.shapes, self.specs = pytree.named_leaves(like), pytree.named_leaves(layout.specs)
        self.units = smallest_units(layout.plan.local_shapes["opt"], like.opt_state, tx.unit)
        plan = self.plan
        self.out: dict[str, Any] = {}  # the leaves that are in memory
        self.shared: dict[str, Tensor] = {}  # the leaves of the optimizer's state that belong to no parameter
        trained = plan.trained(like.master if plan.policy.has_master else like.params)
        empty = lambda leaf: leaf.new_zeros((0, *leaf.shape[1:]) if leaf.dim() else (), device="cpu")  # noqa: E731
        self.empty = pytree.map(lambda leaf: empty(leaf).to(plan.policy.state), trained)

    def leaf(self, name: str, shape: tuple[int, ...], values: Callable[[Box], Tensor]) -> None:
        """Put a parameter of this shape, whose elements are `values(box)`."""
        lead = shard_dim(name)
        windows: dict[Any, list[str]] = {}
        for n in (n for n, param in self.owner.items() if param == name):
            if n not in self.store.leaves:
                self.out[n] = torch.empty(self.shapes[n].shape, dtype=self.shapes[n].dtype, device=self.device)
            if n.startswith(("params/", "master/")):
                for window in local_windows(shape, self.specs[n], self.plan.mesh):
                    windows.setdefault(window, []).append(n)
        updated = [] if name in self.plan.frozen else local_windows(shape, self.plan.leaves[name].opt, self.plan.mesh)
        for window in [*windows, *(window for window in updated if window not in windows)]:
            (start, size, first), targets = window, windows.get(window, [])
            uncut = window in updated and self.units[name] != "row"
            for i in range(size[0] if lead else 1):
                for rows in [(0, math.prod(size[lead : lead + 1]))] if uncut else row_blocks(size[lead:]):
                    box_start, extent = list(start), list(size)
                    if lead:
                        box_start[0], extent[0] = start[0] + i, 1
                    if size[lead:]:
                        box_start[lead], extent[lead] = start[lead] + rows[0], rows[1] - rows[0]
                    value = values((shape, tuple(box_start), tuple(extent)))
                    for target in targets:
                        self.write_rows(target, first + i, rows, value)
                    if window in updated and self.units[name] != "leaf":
                        self.states(name, first + i, None if uncut else rows, value.to(self.plan.policy.state))
        if self.units.get(name) == "leaf":
            parts = [values((shape, start, size)) for start, size, _ in updated]
            value = torch.cat(parts) if parts else torch.empty(self.plan.local_shapes["opt"][name])
            self.states(name, None, None, value.to(self.plan.policy.state))

    def states(self, name: str, layer: int | None, rows: tuple[int, int] | None, value: Tensor) -> None:
        """Put what the optimizer's `init` makes of rows of a layer, or of all."""
        named = pytree.named_leaves(self.empty) | {name: value}
        for column, leaf in pytree.named_leaves(self.tx.init(pytree.from_named(named, self.empty))).items():
            full = f"opt_state/{column}" if column else "opt_state"
            param = self.owner[full]
            if param == name:
                self.write_rows(full, layer, rows, leaf)
            elif param is None and full not in self.shared:
                self.shared[full] = leaf
            elif param is None and fake_device_of(leaf) is None and not torch.equal(leaf, self.shared[full]):
                raise ValueError(
                    f"offload: {full} is of no parameter, and the optimizer's init makes other values of it for other "
                    "parameters, which are put on a disk one after another; use opt=host"
                )

    def write_rows(self, name: str, layer: int | None, rows: tuple[int, int] | None, value: Tensor) -> None:
        """Put rows of a layer of a leaf where it rests; None: all of them."""
        param, files = self.owner[name], self.store.leaves.get(name)
        assert param is not None  # rows are those of a parameter, or of its state
        stacked = shard_dim(param) == 1
        if files is None:
            offload.RowBlock(name, layer if stacked else None, rows).narrow(self.out[name]).copy_(value)
            return
        if rows is not None:
            self.store.write_rows(name, layer or 0, rows, value)
        elif layer is None:
            self.store.write_leaf(name, value)
        else:
            self.store.write_layer(name, layer, value)


def first_values(
    model: base.Model | Tree, values: dict[str, Tensor], key: Tensor, state: torch.dtype
) -> Callable[[str, Box, float, float, torch.dtype | None], Tensor]:
    """`(name, box, std, mean, dtype) -> elements` before the first step."""
    initial = model.traits.start if isinstance(model, base.Model) else {}

    def element(name: str, box: Box, std: float, mean: float, dtype: torch.dtype | None) -> Tensor:
        if name in values:
            block = narrow_box(values[name], *box[1:])
            return block.to(state) if block.is_floating_point() else block
        if name in initial:
            return initial[name].box(*box[1:], dtype or state, "cpu")
        return draw_leaf(prng.fold_in(key, name), box, mean, std, dtype or state, "cpu")

    return element


def plan_record(plan: Plan) -> dict[str, Any]:
    """The record of a plan in its store."""
    record: dict[str, Any] = {
        "mesh": {name: size for name, size in plan.sizes.items() if size > 1},
        "stage": plan.stage,
    }
    if plan.pipeline is not None and plan.stages is not None:
        record["pipeline"] = dataclasses.asdict(dataclasses.replace(plan.pipeline, layout=plan.stages.layout))
    return record


def commit(nvme: Nvme | None, state: TrainState, plan: Plan) -> None:
    """Make the state its store's last complete step, with the values that lie outside of the store."""
    if nvme is None or nvme.store is None:
        return
    leaves = pytree.named_leaves(state)
    owner = pytree.owners(list(leaves), pytree.names(state.params))
    names = [name for name in leaves if owner[name] is None or owner[name] in plan.rule_leaves]
    small = dict(zip(names, start_fetch([leaves[name] for name in names]).wait()))
    values = {name: to_text(leaf) for name, leaf in small.items()}
    nvme.store.commit(int(small["step"]), values, partial(raise_together, mesh=plan.mesh))


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
    layout = DiskLayout.from_plan(plan, tx)
    lost = layout.missing
    manifest = offload.read_step_manifest(nvme.folder) if lost and nvme.folder is not None else None
    if manifest is not None:  # said before the store is opened, which the one that is open would not outlive
        raise ValueError(
            f"{nvme.folder}: holds step {manifest.step} but for {lost[0]} and {len(lost) - 1} more, which the plan "
            "keeps in memory; "
            "resume from a checkpoint"
        )
    gpu.wake(torch.device(device))
    store = layout.open(nvme, resume=True)
    record = store.record
    assert record is not None  # it was opened to resume
    # Earlier versions stored no statistics of the loss.
    resident: dict[str, Any] = first_stats()
    resident |= {name: from_text(text) for name, text in record.values.items()}
    shapes, owner = pytree.named_leaves(layout.like), layout.owner
    derived = [name for name in shapes if name not in resident and name not in store.leaves]
    for name in derived:
        param = owner[name]
        assert param is not None  # `missing` names the others
        value = DiskTensor(store, f"master/{param}").tensor().to(plan.policy.param)
        if value.shape != shapes[name].shape:
            value = all_gather(value.to(device), plan.link(param), shard_dim(param), leaf=param)
        resident[name] = value
    named, target = pytree.named_leaves(layout.specs), torch.device(device)
    resident = {name: move_leaf(target, leaf, named[name]) for name, leaf in resident.items()}
    return layout.assemble(resident, store)


def write_to_disk(
    read: Callable[[str, Tensor, int | None], Tensor], layout: DiskLayout, nvme: Nvme | None, device: torch.device
) -> TrainState:
    """The state whose leaves are `read(name, meta tensor, layer)`, in a new store or on `device`."""
    named, leaves = pytree.named_leaves(layout.specs), layout.files
    gpu.wake(device)
    store = layout.open(nvme)
    resident: dict[str, Tensor] = {}
    for name, leaf in pytree.named_leaves(layout.like).items():
        if name not in leaves:
            resident[name] = move_leaf(device, read(name, leaf, None), named[name])
            continue
        for i in range(leaves[name].layers):
            store.write_layer(name, i, read(name, leaf, i if leaves[name].stacked else None))
    return layout.assemble(resident, store, nvme)


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
