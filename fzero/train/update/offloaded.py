"""The end of a step with offloaded state: the same update, unit by unit.

While unit i is updated, unit i + 1 is read and unit i - 1 written; parameters leave in their own dtype as soon as they
are updated. The arithmetic is that of fzero.train.update.in_memory on the same rows, so the bits are those of a state
in memory. Ref: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv:2104.07857, section 6.2.
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
from fzero.core.copy_buckets import SMALL_COPY, copy_in_together, rooms_beside, start_fetch
from fzero.core.device import HOST, kind_of
from fzero.core.gpu import pinned
from fzero.core.gpu_copies import Copied, copy_in, copy_out, free_sources, pass_group
from fzero.core.pytree import Tree
from fzero.offload import Buffer, DiskTensor, Nvme
from fzero.offload.update_units import (
    OFF,
    BegunUnit,
    BlockRead,
    RowBlock,
    UpdateUnit,
    begin_ahead,
    begin_unit,
    cut_units,
    is_whole_stack,
    layer_blocks,
    read_block,
)
from fzero.optim import GradientTransformation, apply_in_place
from fzero.optim.base import Pass, Piece, distinct
from fzero.optim.combine import split_chain
from fzero.optim.in_units import columns_of, part_of_state
from fzero.sharding import Plan
from fzero.sharding.slices import MOST_ELEMENTS, local_shape, narrow_part, shard_dim
from fzero.train.state import meta_state, state_specs
from fzero.train.state_on_disk import leaves_on_disk, on_disk, owner_of, smallest_units
from fzero.train.update.in_memory import Gradients, on_host, split_names
from fzero.train.update.old_values import OldValues

AHEAD = 2  # units read before their turn
SHARE = 12  # of the buffers that one unit may take


def is_offloaded(plan: Plan) -> bool:
    """Whether any parameter, gradient or optimizer state of the plan rests elsewhere than on the device."""
    return any(spec.memory != "device" for leaf in plan.leaves.values() for spec in (leaf.params, leaf.grads, leaf.opt))


class StreamedUpdate:
    """The update of a plan whose state is not all on the device; `run(grads, state, skipped)` gives the
    state after it."""

    def __init__(self, tx: GradientTransformation, plan: Plan, nvme: Nvme | None) -> None:
        self.parts, self.plan, self.nvme = split_chain(tx), plan, nvme or Nvme()
        if self.parts.body.unit == "tree" or self.parts.body.needs == "tree":
            raise ValueError(
                "offload: the optimizer looks at the whole tree (as scale_by_rules does, and clip_by_global_norm where "
                "it is not the first "
                "of a chain), and an offloaded state is updated part by part; leave that out, or put the clipping first"
            )
        self.split = split_names(plan)
        opt = pytree.named_leaves(plan.trained(plan.opt))
        self.shards = {
            n: local_shape(tuple(x.shape), opt[n], plan.mesh)
            for n, x in pytree.named_leaves(plan.trained(plan.like)).items()
        }
        # A state by which a leaf cannot be updated a row or a layer at a time has it updated by larger parts.
        units = smallest_units(plan, self.parts.state(meta_state(plan, tx).opt_state), self.parts.body.unit)
        self.whole = {n for n in self.shards if units[n] != "row" or n in self.split}
        self.stacks = {n for n in self.shards if units[n] == "leaf"}  # those of which all layers are updated at once
        self.on_host = on_host(self.parts.body, sum(math.prod(shape) for shape in self.shards.values()))
        self.pruned: dict[frozenset[str], tuple[Tree, Tree]] = {}
        self.nvme.need((AHEAD + 2) * self.largest_layer(tx) if self.whole and on_disk(plan) else 0, plan.mesh.size)

    def expect_layers(self, update: str) -> None:
        """Raise ValueError if a leaf cannot be updated layer by layer, in the backward pass."""
        if self.stacks:
            raise ValueError(
                f'update="{update}" updates layers in the backward pass, and the optimizer\'s state of '
                f"{min(self.stacks)} has leaves without layers, for which all of them are updated at once; use "
                'update="end"'
            )

    def largest_layer(self, tx: GradientTransformation) -> int:
        """The most bytes on a disk of a layer that is updated as a whole."""
        plan, sizes = self.plan, dict.fromkeys(self.whole, 0)
        like = meta_state(plan, tx)
        owner = owner_of(like, plan)
        for name, files in leaves_on_disk(like, state_specs(plan, tx), plan).items():
            of = owner[name]
            if of is not None and of in sizes:
                sizes[of] += files.file_bytes
        for name in sizes:
            if plan.leaves[name].grads.memory == "nvme":
                lead = shard_dim(name)
                sizes[name] += math.prod(self.shards[name][lead:]) * plan.policy.accumulate.itemsize
        return max(sizes.values())

    def units(self, width: int) -> list[UpdateUnit]:
        """The units, with `width` bytes of buffers per parameter."""
        most = max(1, self.nvme.buffers.size // (SHARE * width)) if width else MOST_ELEMENTS
        by_layer = lambda n: shard_dim(n) == 1 and n not in self.stacks  # noqa: E731
        return cut_units(self.shards, by_layer, lambda n: n in self.whole, most)

    @torch.no_grad()
    def run(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """The state after the update; unchanged if the step is skipped."""
        update = Update(self, grads, state, skipped)
        return state if skipped is not None and bool(update.small["skipped"]) else update.all()

    def begin(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> UpdateByUnits:
        """The update, to be made unit by unit."""
        return UpdateByUnits(Update(self, grads, state, skipped))


class UpdateByUnits:
    """An update with nothing on a disk, made unit by unit in the memory of `state`, until `finish` gives the state
    after it."""

    def __init__(self, update: Update) -> None:
        self.update, self.state = update, update.state
        self.units = update.how.units(update.width())
        self.turns, self.taken = update.by_units(self.units), 0

    @functools.cached_property
    def skips(self) -> bool:
        """Whether the step is skipped; waits for the norm."""
        return "skipped" in self.update.small and bool(self.update.small["skipped"])

    @torch.no_grad()
    def read_ahead(self) -> None:
        """Start to read the first units, before the device is given more to do."""
        if not self.taken:
            self.take()

    def take(self) -> None:
        """Update the unit whose rows have come, but for the first call, which begins to read."""
        next(self.turns, None)
        self.taken += 1

    @torch.no_grad()
    def advance(self, share: float) -> None:
        """Make the units of the first `share` of the update that are not made yet."""
        while not self.skips and self.taken <= min(1.0, share) * len(self.units):
            self.take()

    @torch.no_grad()
    def finish(self) -> Tree:
        """The state after the update; unchanged if the step is skipped."""
        self.advance(1.0)
        return self.state if self.skips else self.update.finish()


class Update:
    """An update in progress.

    old: keeps what is in memory of the units before they are updated, and the update leaves the gradients as they are;
    or gives it back before the update.
    """

    def __init__(
        self,
        how: StreamedUpdate,
        grads: Gradients,
        state: Tree,
        skipped: Tensor | None = None,
        old: OldValues | None = None,
    ) -> None:
        self.how, self.state, self.old = how, state, old
        parts, plan = how.parts, how.plan
        self.grads = pytree.named_leaves(distinct(grads.sums))
        self.params = pytree.named_leaves(plan.trained(state.params))
        self.master = pytree.named_leaves(state.master)
        self.body = parts.state(state.opt_state)
        self.columns, self.owner = columns_of(self.body, list(self.params))
        # On the host if any optimizer state is there or on a disk; else on the device.
        kept = [leaf for name, leaf in self.columns.items() if self.owner[name] is not None] + list(
            self.master.values()
        )
        on_host = any(isinstance(x, OFF) or kind_of(x) == "cpu" for x in kept)
        self.where = HOST if on_host else state.step.device
        # What is not of a parameter; on a GPU it goes to the host beside the rows, and is waited for with them.
        small = {column: leaf for column, leaf in self.columns.items() if self.owner[column] is None}
        small |= {"factor": parts.factor(grads.factor, grads.norm), "skipped": skipped}
        self._small = {name: x for name, x in small.items() if x is not None}
        self._fetch_small = start_fetch([*self._small.values()]) if on_host else None
        self.shared: dict[str, Tensor] = {}  # the new leaves that belong to no parameter
        self.made: dict[Any, Any] = {}  # see Pass.shared
        # The gradients of a layer that is updated by itself, each with what waits for it if it is on its way to the
        # host; of a leaf on a disk those of all layers.
        self.layer: dict[str, tuple[Any, Callable[[], Any] | None]] = {}
        self.back: list[tuple[Tensor, Tensor]] = []  # updated rows of a unit, and where they rest on the GPU
        # The last copies from and to the host's memory. Each way is one stream, so the others are made before them.
        self.sent: list[Copied] = []
        self.left: Copied | None = None
        self.store = how.nvme.store

    @functools.cached_property
    def small(self) -> dict[str, Tensor]:
        """The values that belong to no parameter, where the update is: leaves of the state, "factor" and "skipped"."""
        return dict(zip(self._small, self._fetch_small.wait())) if self._fetch_small is not None else self._small

    def begin_store(self) -> None:
        """Begin the next version of what is on a disk."""
        if self.store is not None:
            self.store.begin()

    def all(self) -> Tree:
        """The state after the update of all leaves."""
        self.begin_store()
        self.run(self.how.units(self.width()))
        return self.finish()

    def width(self) -> int:
        """The bytes of buffers that a parameter takes, on the average, while it is updated; 0 if nothing is on a
        disk."""
        columns = (*self.columns.values(), *(self.master or self.params).values())
        off = sum(x.dtype.itemsize for x in columns if isinstance(x, OFF))
        sums = any(leaf.trained and leaf.grads.memory == "nvme" for leaf in self.how.plan.leaves.values())
        return -(-off // len(self.params)) + 8 if off or sums else 0

    def run(self, units: list[UpdateUnit]) -> None:
        """Update some units."""
        for _ in self.by_units(units):
            pass

    def by_units(self, units: list[UpdateUnit]) -> Iterator[None]:
        """Update some units; yields before each one, with it and the next ones on their way."""
        for unit, begun in begin_ahead(units, self.begin, AHEAD):
            yield
            pass_group(self.state.step.device, unit, fetched=True)
            self.update(unit, begun)

    def begin(self, unit: UpdateUnit) -> BegunUnit:
        """Start to bring a unit to where it is updated."""
        out: dict[str, dict[str, BlockRead]] = {}
        for part in unit:
            name, master = part.name, bool(self.master)
            target = self.master[name] if master else self.params[name]
            found = {
                "grad": self.gradient(part),
                "target": read_block(target, part, whole=not master and name in self.how.split),
            }
            found |= {
                column: read_block(leaf, part) for column, leaf in self.columns.items() if self.owner[column] == name
            }
            out[name] = found
        return begin_unit(out, self.where)

    def gradient(self, part: RowBlock) -> BlockRead:
        """Start to read the gradient of a row block."""
        if part.name not in self.layer:
            return read_block(self.grads[part.name], part)
        value, arrive = self.layer[part.name]
        if isinstance(value, OFF):
            return read_block(value, part)
        rows = read_block(value[None], part._replace(layer=0))
        return rows._replace(arrive=arrive)

    def update(self, unit: UpdateUnit, begun: BegunUnit, *, change: bool = True) -> None:
        """Update a unit, and start to bring it back to where it rests; without `change` as it is, or was in `old`."""
        parts, at = {part.name: part for part in unit}, {}
        values, grads, targets = begun.arriving.wait(), {}, {}
        if self.old is not None:
            self.old.exchange(unit, begun.found, values)
        for name, part in parts.items():
            grad = values[name].pop("grad")
            grads[name] = grad if self.how.on_host else grad.to(self.how.plan.policy.accumulate)
            targets[name] = self.own(name, values[name]["target"])
            shape = self.how.shards[name]
            at[name] = Piece(shape, part.start(len(shape)))
        like, pruned = self.structure(frozenset(parts))
        flat = {column: x for found in values.values() for column, x in found.items()} | self.small
        state = pytree.map(lambda column: flat[column], pruned)
        rooms = {name: self.room(part) for name, part in parts.items() if self.master and name not in self.how.split}
        copies = self.beside({name: view for name, (_, view) in rooms.items()})
        target = pytree.from_named(targets, like)
        if change:
            new_targets, new_state = self.apply(pytree.from_named(grads, like), state, target, at, copies)
        else:
            new_targets, new_state = emit(target, copies), state
        for column, new in zip(pytree.leaves(pruned), pytree.leaves(new_state)):
            if self.owner[column] is not None:
                same(flat[column], new)
            elif column not in self.shared:
                self.shared[column] = to_device(new, self.columns[column].device)
        for name, new in pytree.named_leaves(new_targets).items():
            same(targets[name], new)
        for name, part in parts.items():
            emitted = None
            if name in rooms:
                buffer, view = rooms[name]
                made = copies.get(name)
                copied = None if made is view else self.send(targets[name] if made is None else made, view, buffer)
                emitted = None if buffer is None else (buffer, copied)
            self.put(part, begun.found[name], values[name], targets[name], emitted)
        self.send_back()

    def apply(
        self, grads: Tree, state: Tree, targets: Tree, at: Mapping[str, Piece], copies: Mapping[str, Tensor]
    ) -> tuple[Tree, Tree]:
        """The optimizer's step on some rows; `copies` are given the updated parameters in their own dtype."""
        body = self.how.parts.body
        if self.how.on_host:
            assert body.in_pass is not None  # `on_host` asks for it
            return body.in_pass(
                grads, state, targets, Pass(self.small["factor"], copies=copies, at=at, host=True, shared=self.made)
            )
        factor, kept = self.small["factor"], self.old is not None
        scaled = pytree.map(lambda g: g * factor if kept else g.mul_(factor), grads)
        new = (
            body.in_pass(scaled, state, targets, Pass(at=at, shared=self.made))
            if body.in_pass
            else apply_in_place(body, scaled, state, targets)
        )
        return emit(new[0], copies), new[1]

    def room(self, part: RowBlock) -> tuple[Buffer | Tensor | None, Tensor]:
        """The target of parameters that are copies of master weights: (a buffer if they are on a disk, or memory for
        all of their layers; the rows)."""
        rest = self.params[part.name]
        if not isinstance(rest, DiskTensor):
            return None, part.of(rest)
        if is_whole_stack(rest, part):
            stack = torch.empty(rest.shape, dtype=rest.dtype)
            return stack, stack
        shape = tuple(rest.shape if part.layer is None else rest.shape[1:])
        if part.rows is not None:
            shape = (part.rows[1] - part.rows[0], *shape[1:])
        buffer = self.buffer(shape, rest.dtype)
        return buffer, buffer.view if part.layer is None else buffer.view[None]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return self.how.nvme.buffers.take(shape, dtype, self.how.nvme.disk.busy)

    def beside(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the update writes what goes to each of `views`: the view itself, or memory from which a copy to it does
        not wait, the small ones of one dtype side by side.

        Nothing in a plan, where the target is copied.
        """
        out = {name: view for name, view in views.items() if view.device == self.where}
        back = {name: view for name, view in views.items() if view.is_cuda and name not in out}
        small = {name: view for name, view in back.items() if view.nbytes < SMALL_COPY}
        out |= zip(small, rooms_beside([*small.values()]))
        for name, view in views.items():
            if name not in out and (name in back or self.where.type == "cuda"):
                pin = name in back
                out[name] = torch.empty(view.shape, dtype=view.dtype, device=self.where, pin_memory=pin)
        return out

    def send(self, value: Tensor, home: Tensor, buffer: Buffer | Tensor | None = None) -> Copied | None:
        """Copy updated rows to where they rest, on a GPU without a wait; returns the copy into a disk's `buffer`.

        Those that go to a GPU wait for `send_back`.
        """
        if home.is_cuda and not value.is_cuda:
            self.back.append((value, home))
        elif value.is_cuda and not home.is_cuda:
            copied = copy_out(value, out=home)
            if buffer is not None:
                return copied  # for which the disk's thread waits
            self.left = copied
        else:
            home.copy_(value)
        return None

    def send_back(self) -> None:
        """Start to copy the updated rows of a unit to the GPU: small ones side by side by one copy."""
        back, self.back = self.back, []
        if back:
            values, homes = zip(*back)
            self.sent = copy_in_together(values, homes[0].device, outs=homes)

    def structure(self, names: frozenset[str]) -> tuple[Tree, Tree]:
        """(the parameter tree, the body's state) of some parameters, with names for leaves."""
        if names not in self.how.pruned:
            like = pytree.map_named(lambda name, _: name, self.how.plan.trained(self.how.plan.like))
            state = pytree.map_named(lambda name, _: name, self.body)
            part = part_of_state(state, self.owner, names)
            self.how.pruned[names] = pytree.prune(like, lambda name: name in names), part
        return self.how.pruned[names]

    def own(self, name: str, target: Tensor) -> Tensor:
        """This rank's part of a target."""
        if self.master or name not in self.how.split:
            return target
        axis = self.how.plan.link(name)
        return narrow_part(target, axis.rank, axis.size, shard_dim(name)).contiguous()

    def put(
        self,
        part: RowBlock,
        found: dict[str, BlockRead],
        values: dict[str, Tensor],
        target: Tensor,
        emitted: tuple[Buffer | Tensor, Copied | None] | None,
    ) -> None:
        """Bring updated rows back to where they rest, and start to write those of a disk.

        emitted: the buffer of the parameters, if they are copies of master weights on a disk.
        """
        name, rest = part.name, self.params[part.name]
        whole = not self.master and name in self.how.split  # of the target a part was updated
        for column, one in found.items():
            if column == "grad" or (column == "target" and whole):
                continue
            leaf = self.columns[column] if column != "target" else self.master[name] if self.master else rest
            buffer = (
                one.reading.buffer if one.reading is not None else one.home if isinstance(leaf, DiskTensor) else None
            )
            away = one.home.device != self.where
            copied = self.send(values[column], one.home, buffer) if away else None
            if buffer is not None:
                self.write(leaf, part, buffer, copied)
        if name in self.how.split:
            axis, dim = self.how.plan.link(name), shard_dim(name)
            mine = to_device(target, self.state.step.device, rest.dtype)
            gathered = all_gather(mine.contiguous(), axis, dim, leaf=name)
            buffer, view = self.room(part)
            copied = self.send(gathered, view, buffer)
            emitted = None if buffer is None else (buffer, copied)
        if emitted is not None:
            self.write(rest, part, *emitted)

    def write(self, leaf: DiskTensor, part: RowBlock, value: Buffer | Tensor, after: Copied | None) -> None:
        """Start to write rows from a buffer, or all layers of a leaf from memory; after: the copy that fills it."""
        assert self.store is not None  # the one of its leaves
        if isinstance(value, Buffer):
            self.store.write(leaf.name, part.layer or 0, part.rows, value, after=after)
            return
        if after is not None:
            after.finish()
        for layer, rows in layer_blocks(value):
            block = value[layer][rows[0] : rows[1]] if value.dim() > 1 else value[layer]
            buffer = self.buffer(tuple(block.shape), leaf.dtype)
            buffer.view.copy_(block)
            self.store.write(leaf.name, layer, rows, buffer)

    def settle(self) -> None:
        """Make the current stream wait for the rows on their way to the GPU, and the host for those that leave it."""
        for copied in self.sent:
            copied.use()
        if self.left is not None:
            self.left.finish()
        free_sources(self.state.step.device)

    def finish(self) -> Tree:
        """The state, once all units were updated; what rests in the host's memory can be read there."""
        assert self.shared.keys() == {name for name, owner in self.owner.items() if owner is None}, (
            "an update without a unit"
        )
        self.settle()
        body = pytree.map_named(lambda column, leaf: self.shared.get(column, leaf), self.body)
        return self.state._replace(opt_state=self.how.parts.whole(self.state.opt_state, body))


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


def same(old: Tensor, new: Tensor) -> None:
    """Copy `new` into the memory of `old`, unless they share it."""
    if new is not old and (_address(new) != _address(old) or new.dtype != old.dtype):
        old.copy_(new)


def _address(x: Tensor) -> tuple[int, int | torch.SymInt]:
    return x.untyped_storage()._cdata, x.storage_offset()  # a fake tensor has no other
