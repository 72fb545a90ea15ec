"""Gradients from the backward pass to the optimizer: summed over micro-batches and over ranks, layer by layer, and
where the sums rest: on the device, in the host's memory or on a disk.

On a GPU a term is added there, so that nobody waits: a sum that rests elsewhere is brought to the GPU and leaves again.
"fast": micro-batches are added in order, and sums over ranks are made when the plan says so. "canonical": micro-batch j
of data rank r of R has the global number j R + r, and all are added by one balanced binary tree over these numbers: the
same sum for every R that is a power of two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import start_all_gather, start_psum, start_psum_scatter
from fzero.comm.messages import bucket_groups, pack, unpack
from fzero.core import pytree
from fzero.core.copy_buckets import SMALL_COPY, allocate_adjacent, copy_in_buckets, copy_out_buckets
from fzero.core.device import kind_of
from fzero.core.gpu_copies import Copied, Future, copy_out, pass_group
from fzero.core.host_memory import empty_persistent
from fzero.core.precision import TreeSum
from fzero.core.pytree import Tree
from fzero.sharding.codec import Coder, sum_coded
from fzero.sharding.error_feedback import ErrorFeedback
from fzero.sharding.leaf_plan import Moves, is_coded
from fzero.sharding.plan import Plan
from fzero.sharding.prefetch import LeafGroup
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import DEVICE

SUMS_MEMORY = "the sums of gradients in the host's memory"


class LayerSums(NamedTuple):
    """Who hears of a layer's final sums during the backward pass."""

    # (leaf, layer, sum, the copy of it that is under way or None); of a leaf on a disk the sum of all its layers
    receive: Callable[[str, int, Any, Copied | None], None]
    retain: bool = False  # whether the sums are in `GradientReducer.sums` too, at rest where the plan says


Key = tuple[str, str, int | None]  # (stream, leaf, layer)


class SumsAtRest:
    """The sums of gradients, leaf by leaf, where the plan lets them rest."""

    def __init__(
        self,
        plan: Plan,
        parts: int,
        make_disk_sum: Callable[..., Any] | None = None,
        early: LayerSums | None = None,
        buffers: dict[Any, Tensor] | None = None,
        narrow: bool = False,
        squares_of: Callable[[Tensor], list[Any]] | None = None,
    ):
        # make_disk_sum: (leaf, stream, depth) -> the sum of a leaf that rests on a disk (see ScratchTensor). early: is
        # handed the sums of each layer as soon as they are final. buffers: the memory of sums in the host's memory, for
        # the next step too. narrow: with one micro-batch the sums keep its dtype at the end. squares_of: (a leaf, or a
        # layer of one) -> what the norm is made of, taken before a sum leaves the GPU, so that nobody reads it again.
        self.accumulate, self.parts = plan.policy.accumulate, parts
        self.make_disk_sum, self.early = make_disk_sum, early
        self.buffers, self.narrow, self.squares_of = {} if buffers is None else buffers, narrow, squares_of
        self.last = False  # whether the micro-batch under way is the last one
        self.tiers = {name: leaf.grads.memory for name, leaf in plan.leaves.items()}
        # What is owed over pp stays on the device until its sum over the stages is made.
        self.memory = {
            name: tier if plan.stages is None or is_stacked(name) else DEVICE for name, tier in self.tiers.items()
        }
        shapes = plan.local_shapes["opt"]
        self.depth = {name: shape[0] for name, shape in shapes.items() if is_stacked(name)}
        self.final: dict[tuple[str, str], Any] = {}  # (stream, leaf) -> its sum, stacked: a tensor, or what `away` made
        self.started: set[Key] = set()  # the keys whose part of `final` holds a sum already
        # On a GPU, what is added to sums that rest elsewhere; and the same once such a sum is on its way to the GPU.
        # Collected, so that the small sums of a layer come to the GPU by one copy.
        self.pending: list[tuple[Key, Tensor]] = []
        self.incoming: list[tuple[Key, Tensor, Future[Tensor]]] = []
        self.host_copies: dict[Key, Copied] = {}  # the last copy of each sum to the host's memory
        self.small: list[tuple[Key, Tensor]] = []  # sums that wait to leave by one copy
        self.squared: dict[tuple[str, str], dict[int, list[Any]]] = {}  # (stream, leaf) -> layer -> its `squares_of`

    def add_value(self, key: Key, value: Tensor) -> None:
        """Write a value into the stacked sums, or add it to them."""
        stream, name, layer = key
        if not self.memory[name].on_device and kind_of(value) == "cuda":
            # The GPU adds, for which nobody waits; for the host to add, it would wait for the value.
            if key in self.started:
                self.pending.append((key, value))
            else:
                self.offload(key, self.wide(value))
            return
        if self.ends_early(layer):
            self.emit_sum(key, self.ended(key, value))
            return
        if self.memory[name].on_disk:
            self.on_disk(key).add(layer or 0, self.wide(value))
            self.notify_early(key)
            return
        stacked = self.final.get((stream, name))
        if stacked is None:
            value = self.wide(value)
            if layer is None and self.parts == 1 and value.is_contiguous() and self.memory[name].on_device:
                stacked = self.final[stream, name] = value
                self.started.add(key)
                return
            stacked = self.final[stream, name] = self.sum_buffer(key, value)
        slot = stacked if layer is None else stacked[layer]
        if key in self.started:
            slot.add_(value)
        else:
            slot.copy_(value)
            self.started.add(key)
        self.notify_early(key)

    def ends_early(self, layer: int | None) -> bool:
        """Whether a value of this micro-batch ends its sum, which then goes to `early` and nowhere else."""
        return self.early is not None and not self.early.retain and self.last and layer is not None

    def emit_sum(self, key: Key, total: Tensor) -> None:
        """Hand a layer's final sum to `early`."""
        _, name, layer = key
        assert self.early is not None and layer is not None  # `ends_early` asks
        self.note_squares(key, total)
        self.early.receive(name, layer, total, None)

    def notify_early(self, key: Key, copied: Copied | None = None) -> None:
        """Show `early` a layer's final sum where it is kept; `copied`: it is on its way there."""
        stream, name, layer = key
        if self.early is not None and self.early.retain and self.last and layer is not None:
            stacked = self.final[stream, name]
            self.early.receive(name, layer, stacked if self.memory[name].on_disk else stacked[layer], copied)

    def on_disk(self, key: Key) -> Any:
        """The sums of a leaf that rest on a disk."""
        stream, name, _ = key
        assert self.make_disk_sum is not None  # given if a leaf rests on a disk
        return self.final.setdefault((stream, name), self.make_disk_sum(name, stream, self.depth.get(name)))

    def fetch_pending(self) -> None:
        """Start to copy to the GPU the sums to which something is added next, the small ones of a layer by one copy."""
        pending, self.pending = self.pending, []
        host_keys = [key for key, _ in pending if self.memory[key[1]].on_host]
        host_sums: dict[Any, Future[Tensor]] = {}
        if host_keys:
            wholes = [(self.final[stream, name], layer) for stream, name, layer in host_keys]
            sums = [stacked if layer is None else stacked[layer] for stacked, layer in wholes]
            # The last copy out of the GPU may be under way: the copy back waits for its event, on the GPU.
            events = [self.host_copies[key].event for key in host_keys]
            copies = copy_in_buckets(sums, pending[0][1].device, events=events)
            host_sums = {key: Future(copied.use) for key, copied in zip(host_keys, copies)}
        for key, value in pending:
            stream, name, layer = key
            on_disk = key not in host_sums
            bring = self.final[stream, name].read(layer or 0).copy_to(value.device) if on_disk else host_sums[key]
            self.incoming.append((key, value, bring))

    def offload(self, key: Key, total: Tensor) -> None:
        """Start to copy a sum from the GPU to where it rests, or hand it to `early`."""
        _, name, layer = key
        if self.ends_early(layer):
            self.emit_sum(key, total)
            return
        if self.last:
            self.note_squares(key, total)
        self.started.add(key)
        if self.memory[name].on_disk:
            self.on_disk(key).set_layer(layer or 0, total)
            self.notify_early(key)
            return
        if total.nbytes < SMALL_COPY:
            self.small.append((key, total))
        else:
            self.send([(key, total)])

    def offload_small(self) -> None:
        """Start to copy the small sums that wait to the host's memory, by one copy."""
        small, self.small = self.small, []
        if small:
            self.allocate_buffers(small)
            self.send(small)

    def send(self, leaving: list[tuple[Key, Tensor]]) -> None:
        """Start to copy sums from the GPU to the host's memory."""
        tensors, slots = [], []
        for key, total in leaving:
            stream, name, layer = key
            stacked = self.final.get((stream, name))
            if stacked is None:
                stacked = self.final[stream, name] = self.sum_buffer(key, total)
            tensors.append(total.to(stacked.dtype))
            slots.append(stacked if layer is None else stacked[layer])
        for (key, _), copied in zip(leaving, copy_out_buckets(tensors, slots)):
            self.host_copies.pop(key, None)  # so that the last entry is the last copy
            self.host_copies[key] = copied
            self.notify_early(key, copied)

    def allocate_buffers(self, sums: list[tuple[Key, Tensor]]) -> None:
        """Make the memory of those that have none, side by side where they have as many layers."""
        fresh: dict[int | None, list[tuple[tuple[str, str], Tensor]]] = {}
        for (stream, name, layer), total in sums:
            if (stream, name) not in self.buffers:
                depth = None if layer is None else self.depth[name]
                fresh.setdefault(depth, []).append(((stream, name), total))
        for depth, entries in fresh.items():
            empty = functools.partial(empty_persistent, label=SUMS_MEMORY, pinned=entries[0][1].is_cuda)
            buffers = allocate_adjacent([total for _, total in entries], depth, empty)
            self.buffers |= {key: buffer for (key, _), buffer in zip(entries, buffers)}

    def store_shard(self, name: str, piece: Tensor) -> Any:
        """This rank's part of a sum over the stages, on its way to where such sums rest."""
        key, on_gpu = ("", name, None), kind_of(piece) == "cuda"
        if not piece.numel() or self.tiers[name].on_device or (self.tiers[name].on_host and not on_gpu):
            return piece
        if on_gpu:
            self.note_squares(key, piece)
        if self.tiers[name].on_disk:
            assert self.make_disk_sum is not None  # given if a leaf rests on a disk
            sums = self.make_disk_sum(name, "", None)
            sums.set_layer(0, piece)
            return sums
        buffer = self.host_buffer(("", name), piece.shape, piece)
        self.host_copies[key] = copy_out(piece, out=buffer)
        return buffer

    def note_squares(self, key: Key, total: Tensor) -> None:
        """Keep the squares of a final sum."""
        stream, name, layer = key
        if self.squares_of is not None:
            self.squared.setdefault((stream, name), {})[layer or 0] = self.squares_of(total)

    def squares(self) -> dict[str, list[tuple[int, Any]]]:
        """{leaf: (layer, one of its `squares_of`), in order}, of the leaves whose final sums went that way."""
        streams = [name for _, name in self.squared]
        return {
            name: [(layer, square) for layer in sorted(layers) for square in layers[layer]]
            for (_, name), layers in self.squared.items()
            if streams.count(name) == 1  # the sum of two streams is made at the end
        }

    def ended(self, key: Key, value: Tensor) -> Tensor:
        """The final sum of a layer; `value` is its last term."""
        stream, name, layer = key
        so_far = self.final.get((stream, name))
        if so_far is None:
            return self.wide(value)
        if self.memory[name].on_disk:
            reading = so_far.read(layer)
            return reading.wait().add_(value)
        return so_far[layer].add_(value)

    def wide(self, value: Tensor) -> Tensor:
        """A value in the dtype of its sum; with one micro-batch in its own until the activations are freed."""
        return value if self.parts == 1 else value.to(self.accumulate)

    def sum_buffer(self, key: Key, value: Tensor) -> Tensor:
        """Uninitialised memory for a leaf's sum, of which `value` is a part."""
        stream, name, layer = key
        shape = value.shape if layer is None else (self.depth[name], *value.shape)
        if not self.memory[name].on_host:
            return torch.empty(shape, dtype=value.dtype, device=value.device)
        return self.host_buffer((stream, name), shape, value)

    def host_buffer(self, key: tuple[str, str], shape: Sequence[int], value: Tensor) -> Tensor:
        """Memory of the host for a sum of `value`'s dtype, kept from step to step."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != torch.Size(shape) or buffer.dtype != value.dtype:
            buffer = empty_persistent(shape, value.dtype, SUMS_MEMORY, pinned=value.is_cuda)
            self.buffers[key] = buffer
        return buffer

    def finish(self) -> None:
        """Add what waits for sums that come to the GPU, and start to copy the last ones back."""
        self.fetch_pending()
        while self.incoming:
            key, value, total = self.incoming.pop(0)
            self.offload(key, total.wait().add_(value))
        self.offload_small()

    def pop_tree(
        self, like: Tree, over_pp: Callable[[dict[tuple[str, str], Any]], dict[str, Tensor]] | None = None
    ) -> Tree:
        """The tree of all sums, which leave; over_pp: gives the parts of those that are owed over pp."""
        out: dict[str, Any] = {}
        if over_pp is not None:
            out = {name: self.store_shard(name, piece) for name, piece in over_pp(self.final).items()}
        if self.host_copies:
            # Copies out are on one stream, so that the last one ends last.
            *_, last = self.host_copies.values()
            last.finish()  # on one stream, so all are made: whoever has the sums may read them
        names = set(pytree.names(like))
        # Sorted, so that the sums of two streams are added in one order on every rank.
        for stream, name in sorted(self.final):
            value = self.final.pop((stream, name))
            if name not in names:
                continue
            if self.memory[name].on_disk:
                out[name] = out[name].plus(value) if name in out else value
                continue
            value = value if self.narrow else value.to(self.accumulate)
            out[name] = out[name].to(self.accumulate).add_(value) if name in out else value
        return pytree.from_named(out, like)


# A value that no job yields, as a job may yield None.
ENDED = object()  # in place of what a job yields


class GradientReducer:
    """Sums the gradients of a step, group by group, in the layout of plan.opt, into the sums at rest."""

    def __init__(
        self,
        plan: Plan,
        stored_sums: SumsAtRest,
        coder: Coder | None = None,
        errors: ErrorFeedback | None = None,
        on_group: Callable[[], None] | None = None,
    ):
        self.mesh, self.accumulate, self.stored_sums = plan.mesh, plan.policy.accumulate, stored_sums
        self.canonical, self.on_group = plan.reduce == "canonical", on_group
        self.reduce, self.coder, self.errors = plan.reduce_dtype, coder, errors
        self.coded = plan.coded_grads
        self.moves = {name: leaf.moves_within_stage for name, leaf in plan.leaves.items()}
        for name in plan.optimizer_sums:  # whose sums over a link the optimizer makes
            (micro_path, end), link = self.moves[name], plan.leaves[name].sum_link
            self.moves[name] = micro_path, tuple(move for move in end if move[1] != link)
        # Sums over micro-batches before the last one: a TreeSum if canonical, else a tensor.
        self.partial_sums: dict[Key, Any] = {}
        self.flying: list[Iterator[Any]] = []
        # With pp the stage before waits for the gradient of its last micro-batch, and would wait for the last sums of
        # every stage behind it. So these go on until the row is over.
        self.long = plan.stages is not None  # whether sums that are made once travel until the end
        self.ending: list[Iterator[Any]] = []  # those

    def reduce_group(
        self,
        group: LeafGroup,
        names: Sequence[str],
        grads: list[Tensor],
        *,
        last: bool,
        shared_leaves: frozenset[str] = frozenset(),
    ) -> None:
        """Take a micro-batch's gradients of the leaves `names` of a group; the list is emptied."""
        if grads:
            pass_group(grads[0].device, group, fetched=False)
        # The group before must be done: the gradients of one group travel while the next are computed, which bounds
        # their memory.
        self.finish()
        self.mesh.ledger.holds("grads", grads)
        self.stored_sums.last = last
        kinds = [(self.moves[name], name in shared_leaves, name in self.coded) for name in names]
        for bucket in bucket_groups(grads, kinds):
            chosen, tensors = [names[i] for i in bucket], [grads[i] for i in bucket]
            # A leaf for which another group still gives a gradient does not end here; canonical sums have a tree per
            # group.
            ends = last and (self.canonical or not kinds[bucket[0]][1])
            job = self.job(group, chosen, tensors, kinds[bucket[0]][0], ends)
            del tensors
            if next(job, None) is not None:
                long = ends and self.ends_long(chosen, kinds[bucket[0]][0])
                (self.ending if long else self.flying).append(job)
        self.stored_sums.fetch_pending()
        if not self.flying and not self.stored_sums.incoming:
            self.stored_sums.offload_small()
        grads.clear()
        if self.on_group is not None:
            self.on_group()

    def ends_long(self, names: Sequence[str], paths: tuple[Moves, Moves]) -> bool:
        """Whether a bucket's last sums are waited for behind the row."""
        micro_path, end = paths
        is_full = bool(end) and all(op != "scatter" for op, _ in micro_path)
        return self.long and is_full and all(self.stored_sums.memory[name].on_device for name in names)

    def finish(self) -> None:
        """Wait for the collectives under way, and add their results."""
        while self.flying:
            self.flying = [job for job in self.flying if next(job, ENDED) is not ENDED]
        self.stored_sums.finish()

    def job(
        self, group: LeafGroup, names: Sequence[str], grads: list[Tensor], paths: tuple[Moves, Moves], ends: bool
    ) -> Iterator[Any]:
        """Reduce one bucket's gradients and add them to their sums; yields when a collective has started."""
        micro_path, end = paths
        values = yield from self.travel(names, grads, micro_path, group.layer)
        grads.clear()
        # Canonical: a tree per group, as each group gives a term of its own for each micro-batch.
        keys = [(group.name if self.canonical else "", name, group.layer) for name in names]
        for i, key in enumerate(keys):
            value, values[i] = values[i], None
            # Only `value` refers to it, so that it is freed once it is added.
            values[i] = self.add(key, value, bool(end), ends)
            del value
        if ends and end:
            if self.long and end[0][0] == "psum":
                yield names  # begun behind the row, one after the other: each has memory beside what it sums
            values = yield from self.travel(names, values, end, group.layer)
            for key, value in zip(keys, values):
                self.stored_sums.add_value(key, value)

    def travel(self, names: Sequence[str], tensors: list[Tensor], path: Moves, layer: int | None) -> Iterator[Any]:
        """The tensors, of a layer of these leaves, after the collectives of `path`; the list `tensors` is emptied."""
        for op, name in path:
            axis, shapes = self.mesh[name], [t.shape for t in tensors]
            if self.coder is not None and names[0] in self.coded and is_coded(op, name):
                coder = self.coder
                if self.errors is not None:
                    coder = self.errors.coder(coder, name, names, layer or 0, axis.size)
                tensors = yield from sum_coded(op, names, tensors, axis, coder, self.accumulate, self.mesh.ledger)
                continue
            bundle = pack(tensors, axis.size if op == "scatter" else 1, self.reduce)
            tensors.clear()
            start = {"scatter": start_psum_scatter, "psum": start_psum, "gather": start_all_gather}[op]
            with self.mesh.ledger.phase("reduce"):
                # Yields after each start: the caller starts the collectives of all buckets before it waits for any.
                pending = start(bundle, axis, leaf=" ".join(names))
            yield pending
            if op == "scatter":
                shapes = [(s[0] // axis.size, *s[1:]) for s in shapes]
            elif op == "gather":
                shapes = [(s[0] * axis.size, *s[1:]) for s in shapes]
            tensors = unpack(pending.wait(), shapes)
            del bundle, pending
        return list(tensors)

    def add(self, key: Key, value: Tensor, unfinished: bool, ends: bool) -> Tensor | None:
        """Add a micro-batch's value to the sum of `key`; returns the last sum if it must still be sent."""
        if not unfinished and not self.canonical:
            self.stored_sums.add_value(key, value)
            return None
        if self.stored_sums.parts == 1 and ends and key not in self.partial_sums:
            return value if unfinished else self.stored_sums.add_value(key, value)
        # A copy, as sums add in place and the value may be a view of a bucket.
        term = value.to(self.accumulate, copy=True) if value.dtype == self.accumulate else value.to(self.accumulate)
        if self.canonical:
            self.partial_sums.setdefault(key, TreeSum()).add(term)
            total = self.partial_sums.pop(key).sum() if ends else None
        else:
            self.partial_sums[key] = self.partial_sums[key].add_(term) if key in self.partial_sums else term
            total = self.partial_sums.pop(key) if ends else None
        return self.stored_sums.add_value(key, total) if total is not None and not unfinished else total

    def sums(
        self, like: Tree, over_pp: Callable[[dict[tuple[str, str], Any]], dict[str, Tensor]] | None = None
    ) -> Tree:
        """`SumsAtRest.pop_tree` of all sums. Call it once, after the last `put`."""
        self.finish()
        for job in self.ending:  # one after the other: each has memory beside what it sums
            self.flying = [job]
            self.finish()
        self.ending = []
        assert not self.partial_sums, f"sums that were never finished: {sorted(key[1] for key in self.partial_sums)}"
        return self.stored_sums.pop_tree(like, over_pp)
