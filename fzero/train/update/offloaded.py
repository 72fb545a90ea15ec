"""The end of a step with offloaded state: the same update, unit by unit, with the bits of a state in memory.

While unit i is updated, unit i + 1 is read and unit i - 1 written; parameters leave as soon as they are updated. Ref:
Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv:2104.07857, section 6.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.core import pytree
from fzero.core.copy_buckets import SMALL_COPY, allocate_adjacent, copy_in_buckets, start_fetch
from fzero.core.device import HOST, kind_of
from fzero.core.gpu import pinned
from fzero.core.gpu_copies import Copied, copy_in, copy_out, free_sources, pass_group
from fzero.core.pytree import Tree
from fzero.offload import Buffer, DiskTensor, Nvme
from fzero.offload.update_units import (
    OFF,
    BlockRead,
    RowBlock,
    UnitTransfer,
    UpdateUnit,
    begin_ahead,
    begin_unit,
    cut_units,
    is_full_stack,
    layer_blocks,
    read_block,
)
from fzero.optim import GradientTransformation, apply_in_place
from fzero.optim.base import Pass, ShardSlice, columns_of, distinct, select_state
from fzero.optim.combine import split_chain
from fzero.sharding import Plan
from fzero.sharding.slices import MOST_ELEMENTS, narrow_part, shard_dim
from fzero.train.state_on_disk import DiskLayout, smallest_units
from fzero.train.update.in_memory import Gradients, on_host

# (unit, what is read of it, its values by leaf and column): is called with rows before they are updated.
Exchange = Callable[[UpdateUnit, Mapping[str, dict[str, BlockRead]], Mapping[str, dict[str, Tensor]]], None]
AHEAD = 2  # units read before their turn
SHARE = 12  # of the buffers that one unit may take


class StreamedUpdate:
    """The update of a plan whose state is not all on the device: `run(grads, state, skipped)` -> the state."""

    def __init__(self, tx: GradientTransformation, plan: Plan, nvme: Nvme | None) -> None:
        self.parts, self.plan, self.nvme = split_chain(tx), plan, nvme or Nvme()
        if self.parts.body.unit == "tree" or self.parts.body.needs == "tree":
            raise ValueError(
                "offload: the optimizer looks at the whole tree (as scale_by_rules does, and clip_by_global_norm where "
                "it is not the first "
                "of a chain), and an offloaded state is updated part by part; leave that out, or put the clipping first"
            )
        self.split = plan.split_leaves
        self.shards, layout = plan.local_shapes["opt"], DiskLayout.from_plan(plan, tx)
        # A state by which a leaf cannot be updated a row or a layer at a time has it updated by larger parts.
        units = smallest_units(self.shards, self.parts.state(layout.like.opt_state), self.parts.body.unit)
        self.uncut = {n for n in self.shards if units[n] != "row" or n in self.split}
        self.stacks = {n for n in self.shards if units[n] == "leaf"}  # those of which all layers are updated at once
        self.on_host = on_host(self.parts.body, sum(math.prod(shape) for shape in self.shards.values()))
        self.pruned: dict[frozenset[str], tuple[Tree, Tree]] = {}
        self.nvme.need((AHEAD + 2) * self.largest_layer(layout) if self.uncut and plan.on_disk else 0, plan.mesh.size)

    def largest_layer(self, layout: DiskLayout) -> int:
        """The most bytes on a disk of a layer that is updated as a whole."""
        plan, sizes = self.plan, dict.fromkeys(self.uncut, 0)
        for name, files in layout.files.items():
            param = layout.owner[name]
            if param is not None and param in sizes:
                sizes[param] += files.file_bytes
        for name in sizes:
            if plan.leaves[name].grads.memory.on_disk:
                lead = shard_dim(name)
                sizes[name] += math.prod(self.shards[name][lead:]) * plan.policy.accumulate.itemsize
        return max(sizes.values())

    def units(self, width: int) -> list[UpdateUnit]:
        """The units, with `width` bytes of buffers per parameter."""
        max_elements = max(1, self.nvme.buffers.size // (SHARE * width)) if width else MOST_ELEMENTS
        by_layer = lambda n: shard_dim(n) == 1 and n not in self.stacks  # noqa: E731
        return cut_units(self.shards, by_layer, lambda n: n in self.uncut, max_elements)

    @torch.no_grad()
    def run(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """The state after the update; unchanged if the step is skipped."""
        update = Update(self, grads, state, skipped)
        return state if skipped is not None and bool(update.small["skipped"]) else update.update_all()


class Update:
    """An update in progress; exchange: keeps what units overwrite, or gives it back."""

    def __init__(
        self,
        streamed: StreamedUpdate,
        grads: Gradients,
        state: Tree,
        skipped: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.streamed, self.state, self.exchange = streamed, state, exchange
        parts, plan = streamed.parts, streamed.plan
        self.grads = pytree.named_leaves(distinct(grads.sums))
        self.params = pytree.named_leaves(plan.trained(state.params))
        self.master = pytree.named_leaves(state.master)
        self.body = parts.state(state.opt_state)
        self.columns, self.owner = columns_of(self.body, list(self.params))
        # On the host if any optimizer state is there or on a disk; else on the device.
        owned_columns = [leaf for name, leaf in self.columns.items() if self.owner[name] is not None]
        state_leaves = [*owned_columns, *self.master.values()]
        # Its rows are more bytes than the gradient that comes and the parameter that goes.
        on_host = any(isinstance(x, OFF) or kind_of(x) == "cpu" for x in state_leaves)
        self.device = HOST if on_host else state.step.device
        # What is not of a parameter; on a GPU it goes to the host beside the rows, and is waited for with them.
        small = {column: leaf for column, leaf in self.columns.items() if self.owner[column] is None}
        small |= {"factor": parts.factor(grads.factor, grads.norm), "skipped": skipped}
        self._small = {name: x for name, x in small.items() if x is not None}
        self._fetch_small = start_fetch([*self._small.values()]) if on_host else None
        self.shared: dict[str, Tensor] = {}  # the new leaves that belong to no parameter
        self.pass_cache: dict[Any, Any] = {}  # see Pass.shared
        # The gradients of a layer that is updated by itself, each with what waits for it if it is on its way to the
        # host; of a leaf on a disk those of all layers.
        self.layer: dict[str, tuple[Any, Callable[[], Any] | None]] = {}
        self.pending_copies: list[tuple[Tensor, Tensor]] = []  # updated rows of a unit, and where they rest on the GPU
        # The last copies from and to the host's memory. Each way is one stream, so the others are made before them.
        self.sent: list[Copied] = []
        self.last_copy: Copied | None = None
        self.store = streamed.nvme.store

    @functools.cached_property
    def small(self) -> dict[str, Tensor]:
        """The values that belong to no parameter, where the update is: leaves of the state, "factor" and "skipped"."""
        return dict(zip(self._small, self._fetch_small.wait())) if self._fetch_small is not None else self._small

    def begin_store(self) -> None:
        """Begin the next version of what is on a disk."""
        if self.store is not None:
            self.store.begin()

    def update_all(self) -> Tree:
        """The state after the update of all leaves."""
        self.begin_store()
        self.run(self.streamed.units(self.width()))
        return self.finish()

    def width(self) -> int:
        """The mean bytes of buffers that a parameter takes while it is updated; 0 if nothing is on a disk."""
        columns = (*self.columns.values(), *(self.master or self.params).values())
        disk_bytes = sum(x.dtype.itemsize for x in columns if isinstance(x, OFF))
        sums = any(leaf.grads.memory.on_disk for leaf in self.streamed.plan.trained_leaves.values())
        return -(-disk_bytes // len(self.params)) + 8 if disk_bytes or sums else 0

    def run(self, units: list[UpdateUnit]) -> None:
        """Update some units."""
        for _ in self.by_units(units):
            pass

    def by_units(self, units: list[UpdateUnit]) -> Iterator[None]:
        """Update some units; yields before each one, with it and the next ones on their way."""
        for unit, transfer in begin_ahead(units, self.begin, AHEAD):
            yield
            pass_group(self.state.step.device, unit, fetched=True)
            self.update(unit, transfer)

    def begin(self, unit: UpdateUnit) -> UnitTransfer:
        """Start to bring a unit to where it is updated."""
        out: dict[str, dict[str, BlockRead]] = {}
        for block in unit:
            name, master = block.name, bool(self.master)
            target = self.master[name] if master else self.params[name]
            reads = {
                "grad": self.gradient(block),
                "target": read_block(target, block, all_rows=not master and name in self.streamed.split),
            }
            reads |= {
                column: read_block(leaf, block) for column, leaf in self.columns.items() if self.owner[column] == name
            }
            out[name] = reads
        return begin_unit(out, self.device)

    def gradient(self, block: RowBlock) -> BlockRead:
        """Start to read the gradient of a row block."""
        if block.name not in self.layer:
            return read_block(self.grads[block.name], block)
        value, arrive = self.layer[block.name]
        if isinstance(value, OFF):
            return read_block(value, block)
        rows = read_block(value[None], block._replace(layer=0))
        return rows._replace(arrive=arrive)

    def update(self, unit: UpdateUnit, transfer: UnitTransfer, *, change: bool = True) -> None:
        """Update a unit, and start to bring it back; change=False: restore it."""
        parts, pieces = {block.name: block for block in unit}, {}
        values, grads, targets = transfer.arriving.wait(), {}, {}
        if self.exchange is not None:
            self.exchange(unit, transfer.reads, values)
        for name, block in parts.items():
            grad = values[name].pop("grad")
            grads[name] = grad if self.streamed.on_host else grad.to(self.streamed.plan.policy.accumulate)
            targets[name] = self.narrow_target(name, values[name]["target"])
            shape = self.streamed.shards[name]
            pieces[name] = ShardSlice(shape, block.start(len(shape)))
        like, pruned = self.structure(frozenset(parts))
        flat = {column: x for columns in values.values() for column, x in columns.items()} | self.small
        state = pytree.map(lambda column: flat[column], pruned)
        param_buffers = {
            name: self.param_buffer(block)
            for name, block in parts.items()
            if self.master and name not in self.streamed.split
        }
        copies = self.staging_buffers({name: view for name, (_, view) in param_buffers.items()})
        target = pytree.from_named(targets, like)
        if change:
            new_targets, new_state = self.apply(pytree.from_named(grads, like), state, target, pieces, copies)
        else:
            new_targets, new_state = emit(target, copies), state
        for column, new in zip(pytree.leaves(pruned), pytree.leaves(new_state)):
            if self.owner[column] is not None:
                copy_if_distinct(flat[column], new)
            elif column not in self.shared:
                self.shared[column] = to_device(new, self.columns[column].device)
        for name, new in pytree.named_leaves(new_targets).items():
            copy_if_distinct(targets[name], new)
        for name, block in parts.items():
            emitted = None
            if name in param_buffers:
                buffer, view = param_buffers[name]
                copy = copies.get(name)
                copied = None if copy is view else self.send(targets[name] if copy is None else copy, view, buffer)
                emitted = None if buffer is None else (buffer, copied)
            self.write_back(block, transfer.reads[name], values[name], targets[name], emitted)
        self.send_back()

    def apply(
        self, grads: Tree, state: Tree, targets: Tree, pieces: Mapping[str, ShardSlice], copies: Mapping[str, Tensor]
    ) -> tuple[Tree, Tree]:
        """The optimizer's step on some rows; `copies` are given the updated parameters in their own dtype."""
        body, options = self.streamed.parts.body, Pass(slices=pieces, shared=self.pass_cache)
        # With `exchange` the gradients may be needed again, so they are not scaled in place.
        factor, keeps_grads = self.small["factor"], self.exchange is not None
        if self.streamed.on_host:
            options = options._replace(factor=factor, copies=copies, host=True)
            return apply_in_place(body, grads, state, targets, options)
        scaled = pytree.map(lambda g: g * factor if keeps_grads else g.mul_(factor), grads)
        new_targets, new_state = apply_in_place(body, scaled, state, targets, options)
        return emit(new_targets, copies), new_state

    def param_buffer(self, block: RowBlock) -> tuple[Buffer | Tensor | None, Tensor]:
        """The target of parameters that are copies of master weights: (a disk's buffer or memory, the rows)."""
        leaf = self.params[block.name]
        if not isinstance(leaf, DiskTensor):
            return None, block.narrow(leaf)
        if is_full_stack(leaf, block):
            stack = torch.empty(leaf.shape, dtype=leaf.dtype)
            return stack, stack
        shape = tuple(leaf.shape if block.layer is None else leaf.shape[1:])
        if block.rows is not None:
            shape = (block.rows[1] - block.rows[0], *shape[1:])
        buffer = self.buffer(shape, leaf.dtype)
        return buffer, buffer.view if block.layer is None else buffer.view[None]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return self.streamed.nvme.buffers.allocate(shape, dtype, self.streamed.nvme.disk.busy)

    def staging_buffers(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the update writes what goes to each of `views`: the view, or memory whose copy does not wait."""
        out = {name: view for name, view in views.items() if view.device == self.device}
        gpu_views = {name: view for name, view in views.items() if view.is_cuda and name not in out}
        small = {name: view for name, view in gpu_views.items() if view.nbytes < SMALL_COPY}
        out |= zip(small, allocate_adjacent([*small.values()]))
        for name, view in views.items():
            if name not in out and (name in gpu_views or self.device.type == "cuda"):
                pin = name in gpu_views
                out[name] = torch.empty(view.shape, dtype=view.dtype, device=self.device, pin_memory=pin)
        return out

    def send(self, value: Tensor, target: Tensor, buffer: Buffer | Tensor | None = None) -> Copied | None:
        """Copy updated rows to where they rest, on a GPU without a wait; returns the copy into `buffer`."""
        if target.is_cuda and not value.is_cuda:
            self.pending_copies.append((value, target))
        elif value.is_cuda and not target.is_cuda:
            # The copy is not waited for here: the disk's thread waits for it, or `settle` for the last one.
            copied = copy_out(value, out=target)
            if buffer is not None:
                return copied  # for which the disk's thread waits
            self.last_copy = copied
        else:
            target.copy_(value)
        return None

    def send_back(self) -> None:
        """Start to copy a unit's updated rows to the GPU, small ones together."""
        pairs, self.pending_copies = self.pending_copies, []
        if pairs:
            values, homes = zip(*pairs)
            self.sent = copy_in_buckets(values, homes[0].device, outs=homes)

    def structure(self, names: frozenset[str]) -> tuple[Tree, Tree]:
        """(the parameter tree, the body's state) of some parameters, with names for leaves."""
        if names not in self.streamed.pruned:
            like = pytree.map_named(lambda name, _: name, self.streamed.plan.trained(self.streamed.plan.like))
            state = pytree.map_named(lambda name, _: name, self.body)
            pruned_state = select_state(state, self.owner, names)
            self.streamed.pruned[names] = pytree.prune(like, lambda name: name in names), pruned_state
        return self.streamed.pruned[names]

    def narrow_target(self, name: str, target: Tensor) -> Tensor:
        """This rank's part of a target."""
        if self.master or name not in self.streamed.split:
            return target
        axis = self.streamed.plan.link(name)
        return narrow_part(target, axis.rank, axis.size, shard_dim(name)).contiguous()

    def write_back(
        self,
        block: RowBlock,
        reads: dict[str, BlockRead],
        values: dict[str, Tensor],
        target: Tensor,
        emitted: tuple[Buffer | Tensor, Copied | None] | None,
    ) -> None:
        """Bring updated rows back to where they rest, and start to write those of a disk."""
        name, param = block.name, self.params[block.name]
        is_partial = not self.master and name in self.streamed.split  # of the target a part was updated
        for column, read in reads.items():
            if column == "grad" or (column == "target" and is_partial):
                continue
            leaf = self.columns[column] if column != "target" else self.master[name] if self.master else param
            buffer = (
                read.reading.buffer
                if read.reading is not None
                else read.storage
                if isinstance(leaf, DiskTensor)
                else None
            )
            moves = read.storage.device != self.device
            copied = self.send(values[column], read.storage, buffer) if moves else None
            if buffer is not None:
                self.write(leaf, block, buffer, copied)
        if name in self.streamed.split:
            axis, dim = self.streamed.plan.link(name), shard_dim(name)
            shard = to_device(target, self.state.step.device, param.dtype)
            gathered = all_gather(shard.contiguous(), axis, dim, leaf=name)
            buffer, view = self.param_buffer(block)
            copied = self.send(gathered, view, buffer)
            emitted = None if buffer is None else (buffer, copied)
        if emitted is not None:
            self.write(param, block, *emitted)

    def write(self, leaf: DiskTensor, block: RowBlock, value: Buffer | Tensor, fill: Copied | None) -> None:
        """Start to write rows from a buffer, or all layers from memory."""
        assert self.store is not None  # the one of its leaves
        if isinstance(value, Buffer):
            self.store.write(leaf.name, block.layer or 0, block.rows, value, fill=fill)
            return
        if fill is not None:
            fill.finish()
        for layer, rows in layer_blocks(value):
            values = value[layer][rows[0] : rows[1]] if value.dim() > 1 else value[layer]
            buffer = self.buffer(tuple(values.shape), leaf.dtype)
            buffer.view.copy_(values)
            self.store.write(leaf.name, layer, rows, buffer)

    def settle(self) -> None:
        """Make stream and host wait for the rows on their way."""
        for copied in self.sent:
            copied.use()
        if self.last_copy is not None:
            self.last_copy.finish()
        free_sources(self.state.step.device)

    def finish(self) -> Tree:
        """The state, once all units were updated; what rests in the host's memory can be read there."""
        assert self.shared.keys() == {name for name, owner in self.owner.items() if owner is None}, (
            "an update without a unit"
        )
        self.settle()
        body = pytree.map_named(lambda column, leaf: self.shared.get(column, leaf), self.body)
        return self.state._replace(opt_state=self.streamed.parts.merge(self.state.opt_state, body))


def emit(targets: Tree, copies: Mapping[str, Tensor]) -> Tree:
    """`targets`, once those that have one in `copies` were written there too."""
    for name, target in pytree.named_leaves(targets).items():
        if name in copies:
            copies[name].copy_(target)
    return targets


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`x` on a device and in a dtype, without a wait of the host."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device, dtype or x.dtype)
    return copy_in(pinned(x.to(dtype or x.dtype), device), device).use()


def copy_if_distinct(old: Tensor, new: Tensor) -> None:
    """Copy `new` into the memory of `old`, unless they share it."""
    if new is not old and (_address(new) != _address(old) or new.dtype != old.dtype):
        old.copy_(new)


def _address(x: Tensor) -> tuple[int, int | torch.SymInt]:
    return x.untyped_storage()._cdata, x.storage_offset()  # a fake tensor has no other
