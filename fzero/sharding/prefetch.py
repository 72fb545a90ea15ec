"""Parameters from rest to use: reads, copies and gathers of a group of leaves, started before they are needed.

`unshard_tree` is the definition, a differentiable function; train/streamed_model.py computes the same faster.
`PartitionedActivations` are layer inputs that remat keeps, cut over the ranks of tp, which would each keep all.

Ref: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 6.1 (partitioned activation checkpointing).
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.axes import RP, links_of
from fzero.comm.collectives import all_gather, pvary, start_all_gather
from fzero.comm.communicator import Axis
from fzero.comm.messages import bucket_groups, pack, unpack
from fzero.core import pytree
from fzero.core.autodiff import active_varying
from fzero.core.copy_buckets import LARGE_COPY, SMALL_COPY
from fzero.core.gpu_copies import Copied, Future, copy_in, pass_group, ready
from fzero.core.pytree import Tree
from fzero.sharding.codec import Coder
from fzero.sharding.mesh import Mesh
from fzero.sharding.plan import Plan
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec

SMALL = 1024  # elements of a tensor that is not worth a message: it is kept whole


class PartitionedActivations:
    """A stack of lists of tensors, the same on all ranks of `axis`, of which each rank keeps its part."""

    def __init__(self, axis: Axis, stack: Any) -> None:
        self.axis, self.stack = axis, stack
        self.shapes: list[list[torch.Size]] = []
        self.ahead: Future[list[Tensor]] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors."""
        self.shapes.append([x.shape for x in tensors])
        self.stack.append([self.shard(x.detach()) for x in tensors])

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor, flat; the last rank's ends in zeros, if need be."""
        if x.numel() < SMALL:
            return x
        size = -(-x.numel() // self.axis.size)
        chunk = x.reshape(-1)[self.axis.rank * size : (self.axis.rank + 1) * size]
        return chunk.clone() if chunk.numel() == size else torch.cat([chunk, chunk.new_zeros(size - chunk.numel())])

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        gathering = self.ahead or self._gather()
        # The backward pass pops in reverse order, so that the next list is known, and its gather overlaps with the use
        # of this one.
        self.ahead = self._gather() if self.shapes else None
        return gathering.wait()

    def _gather(self) -> Future[list[Tensor]]:
        shapes, parts = self.shapes.pop(), self.stack.pop()
        wholes = [
            start_all_gather(shard, self.axis) if shape.numel() >= SMALL else ready(shard.reshape(-1))
            for shape, shard in zip(shapes, parts)
        ]
        return Future(lambda: [gathered.wait()[: shape.numel()].view(shape) for shape, gathered in zip(shapes, wholes)])

    def __bool__(self) -> bool:
        return bool(self.shapes) or self.ahead is not None


def unshard(x: Tensor, stored: Spec, compute: Spec, mesh: Mesh, *, leaf: str = "", layer: bool = False) -> Tensor:
    """A leaf as the model uses it, from this rank's shard at rest; its gradient is summed, in the layout at rest."""
    sizes = mesh.sizes
    partial_axes = [axis for axis in compute.partial_axes if axis not in stored.axes]
    # The transpose of `pvary` sums the gradients of the ranks that use the leaf differently; a gather's transpose sums
    # and scatters them.
    for link in links_of(partial_axes, sizes) if x.is_floating_point() else ():
        x = pvary(x, mesh[link], leaf=leaf)
    for dim, axes in enumerate(stored.dims[1:] if layer else stored.dims):
        # The last axis of a dim divides it finest, so it is gathered first.
        for link in reversed(links_of([axis for axis in axes if axis not in compute.axes], sizes)):
            x = all_gather(x, mesh[link], dim, leaf=leaf)
    return x


def unshard_tree(params: Tree, plan: Plan) -> Tree:
    """`unshard` of every leaf of a tree of parameters, or a part of one."""
    leaves = plan.leaves
    return pytree.map_named(
        lambda name, x: unshard(x, leaves[name].params, leaves[name].compute, plan.mesh, leaf=name), params
    )


def unshard_block(block: Callable[..., Any], plan: Plan, stack: str = "blocks") -> Callable[..., Any]:
    """`block` as a function of the parameters at rest of a layer of `stack`."""
    leaves = {name: leaf for name, leaf in plan.leaves.items() if name.startswith(f"{stack}/")}
    specs = tuple((name, leaf.params, leaf.compute) for name, leaf in leaves.items())
    return _unshard_block(block, specs, stack, plan.mesh)


# One function per block, so that its compiled programs are found again.
@functools.lru_cache(maxsize=64)
def _unshard_block(block: Callable[..., Any], specs: tuple, stack: str, mesh: Mesh) -> Callable[..., Any]:
    spec_pairs = {name: (stored, compute) for name, stored, compute in specs}

    def fetched_block(params: Tree, x: Any, ctx: Any) -> Any:
        def full_leaf(short: str, leaf: Tensor) -> Tensor:
            name = f"{stack}/{short}"
            return unshard(leaf, *spec_pairs[name], mesh, leaf=name, layer=True)

        return block(pytree.map_named(full_leaf, params), x, ctx)

    return fetched_block


class LeafGroup(NamedTuple):
    """The leaves of a model that are fetched, used and dropped together: of a layer, the embedding or the head."""

    name: str
    leaves: tuple[str, ...]  # full names
    layer: int | None = None


def layer_of(leaf: Tensor, name: str, layer: int | None) -> Tensor:
    """A layer of a stacked leaf; a leaf that is not stacked is returned as it is."""
    return leaf[layer] if layer is not None and is_stacked(name) else leaf


def is_small(leaf: Tensor) -> bool:
    """Whether a stack's layers take longer to start a copy of than to copy."""
    return leaf[0].nbytes < SMALL_COPY and leaf.nbytes <= LARGE_COPY


class Coding(NamedTuple):
    """How the leaves of Plan.float8 and of Plan.coded travel."""

    narrow: Callable[[Tensor, Tensor], Tensor]  # (shard, the largest magnitude of the whole leaf) -> uint8 of its shape
    widen: Callable[[Tensor, Tensor], Tensor]  # the way back
    coder: Coder | None = None


Pieces = tuple[Tensor, ...]  # what travels of a shard
NodeShards = dict[tuple[str, int | None], Pieces]  # by (name, layer)


class ParamFetcher:
    """Fetches groups of `params` from rest to `device`, whole but for tensor parallelism."""

    # Communicates: an all_gather over dp, ep and cp (of experts over dp and cp) for each large leaf, and one for all
    # small leaves of a group; of leaves that rest over rp, before it the same over rp, unless it is kept. With float8,
    # one before them for the largest magnitudes. A leaf in codes has two tensors, codes and scales.
    def __init__(
        self,
        params: Tree,
        plan: Plan,
        device: torch.device,
        coding: Coding | None = None,
        node_shards: NodeShards | None = None,
    ):
        self.leaves: dict[str, Any] = pytree.named_leaves(params)
        self.ledger, self.device, self.node_shards = plan.mesh.ledger, device, node_shards
        self.compute = pytree.named_leaves(plan.compute)
        # And what each is gathered over.
        self.sharded = {name: plan.link(name) for name in self.leaves if plan.leaves[name].gathered}
        nodes = plan.mesh.rp
        self.over_nodes = {name: nodes for name in self.leaves if RP in plan.leaves[name].use.axes and nodes.size > 1}
        # What has no memory of its own, or not on the device. A leaf on a disk has `read(layer)`, whose result has
        # `copy_to(device)`.
        self.offloaded = {
            name for name, leaf in self.leaves.items() if not isinstance(leaf, Tensor) or leaf.device != device
        }
        # Stacked leaves in the host's memory with small layers: one copy brings all of them, for the whole pass.
        self.bulk_copied = {
            name
            for name, leaf in self.leaves.items()
            if name in self.offloaded and isinstance(leaf, Tensor) and is_stacked(name) and len(leaf) and is_small(leaf)
        }
        self.copied: dict[str, Copied] = {}
        self.coding, self.coder, self.coded = coding, coding.coder if coding is not None else None, plan.coded
        self.magnitudes = self.largest([name for name in self.leaves if name in plan.float8]) if coding else {}

    def largest(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The largest magnitude of each layer of stacked leaves [L, ...] on all ranks, float32 [L], by name."""
        if not names:
            return {}
        local_maxima = [
            torch.linalg.vector_norm(self.leaves[n], torch.inf, list(range(1, self.leaves[n].dim()))) for n in names
        ]
        with self.ledger.phase("forward"):
            row = torch.cat([maxima.to(torch.float32) for maxima in local_maxima])[None]
            for links in (self.over_nodes, self.sharded):
                if names[0] in links:
                    # One message for all leaves, and before the layers: a rank's scale must be that of the whole leaf.
                    every = start_all_gather(row, links[names[0]], leaf="largest of " + " ".join(names)).wait()
                    row = every.amax(0, keepdim=True)
        return dict(zip(names, row[0].split([len(maxima) for maxima in local_maxima])))

    def moves(self, name: str) -> bool:
        """Whether a leaf is gathered."""
        return name in self.sharded or name in self.over_nodes

    def mark_fetched(self, group: LeafGroup, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves of a group that were fetched, which differ over the axes of their compute specs alone."""
        if followed := active_varying():
            for name, leaf in zip(group.leaves, leaves):
                followed.mark(leaf, frozenset(self.compute[name].axes))
        return leaves

    def dropped(self, group: LeafGroup, reshard: bool) -> bool:
        """Whether the group must be fetched again for the backward pass."""
        return any(name in self.offloaded or (reshard and self.moves(name)) for name in group.leaves)

    def like(self, group: LeafGroup) -> list[Tensor]:
        """Tensors of the shapes and dtypes that `start` gives for the group, with any values."""
        return [self._like_leaf(name, group.layer) for name in group.leaves]

    def _like_leaf(self, name: str, layer: int | None) -> Tensor:
        leaf = self.leaves[name]
        if isinstance(leaf, Tensor) and not self.moves(name) and name not in self.offloaded:
            return layer_of(leaf, name, layer)
        shape = leaf.shape[1:] if layer is not None and is_stacked(name) else leaf.shape
        for links in (self.over_nodes, self.sharded):
            if name in links:
                shape = (links[name].size * shape[0], *shape[1:])
        return torch.empty(shape, dtype=leaf.dtype, device=self.device)

    def read(self, group: LeafGroup, phase: str) -> list[Future[Any]]:
        """Start to copy this rank's shards of the group to the device; of those over rp, to gather their `Pieces`."""
        reads: list[Future[Any]] = []
        cached, fresh = self.node_shards or {}, list[tuple[int, tuple[str, int | None]]]()
        for i, name in enumerate(group.leaves):
            # Gathered over rp, the slow link, once a step; later passes find the pieces in `node_shards`.
            key = name, group.layer if is_stacked(name) else None
            if name not in self.over_nodes:
                reads.append(self._bring_leaf(name, group.layer))
                continue
            reads.append(ready(cached.get(key, ())))
            if key not in cached:
                fresh.append((i, key))
        if fresh:
            names = [name for _, (name, _) in fresh]
            shards = [self._bring_leaf(name, group.layer).wait() for name in names]
            pieces = [self.pieces(name, group.layer, shard) for name, shard in zip(names, shards)]
            with self.ledger.phase(phase):
                arrived = functools.cache(self.gather(names, pieces, self.over_nodes).wait)
            for position, (i, key) in enumerate(fresh):
                reads[i] = Future(functools.partial(self._cache_pieces, key, arrived, position))
        return reads

    def _cache_pieces(self, key: tuple[str, int | None], arrived: Callable[[], list[Pieces]], index: int) -> Pieces:
        pieces = arrived()[index]
        if self.node_shards is not None:
            self.node_shards[key] = pieces
        return pieces

    def _bring_leaf(self, name: str, layer: int | None) -> Future[Tensor]:
        leaf = self.leaves[name]
        if name in self.bulk_copied:
            # One copy for the stack: small layers take longer to start a copy of than to copy.
            copied = self.copied.get(name) or self.copied.setdefault(name, copy_in(leaf, self.device))
            return Future(lambda: layer_of(copied.use(), name, layer))
        if isinstance(leaf, Tensor):
            value = layer_of(leaf, name, layer)
            # The update writes into it only after the device has computed with the copy.
            return Future(copy_in(value, self.device).use) if name in self.offloaded else ready(value)
        reading = leaf.read(layer or 0) if layer is None or is_stacked(name) else leaf.read()
        return reading.copy_to(self.device)

    def pieces(self, name: str, layer: int | None, shard: Tensor) -> Pieces:
        """What travels of a shard."""
        if self.coding is not None and name in self.magnitudes:
            return (self.coding.narrow(shard, self.magnitudes[name][layer]),)
        return self.coder.encode(shard) if self.coder is not None and name in self.coded else (shard,)

    def joined(self, name: str, layer: int | None, pieces: Pieces) -> Tensor:
        """The whole leaf of the pieces of all ranks."""
        if self.coding is not None and name in self.magnitudes:
            return self.coding.widen(pieces[0], self.magnitudes[name][layer])
        if self.coder is None or name not in self.coded:
            return pieces[0]
        leaf = self.leaves[name]
        return self.coder.decode(pieces, leaf.dtype, leaf.shape[-1])

    def gather(self, names: Sequence[str], pieces: list[Pieces], links: dict[str, Axis]) -> Future[list[Pieces]]:
        """Start to gather what travels of leaves, each over its link; the list `pieces` is emptied."""
        counts = [len(leaf_pieces) for leaf_pieces in pieces]
        owners = [name for name, count in zip(names, counts) for _ in range(count)]
        flat = [tensor for leaf_pieces in pieces for tensor in leaf_pieces]
        # The caller's list too, so that no shard outlives its bucket.
        pieces.clear()
        shapes, flying = [tensor.shape for tensor in flat], []
        for bucket in bucket_groups(flat, [links[name].name for name in owners]):
            packed = pack([flat[i] for i in bucket], 1, flat[bucket[0]].dtype)
            label = " ".join(owners[i] for i in bucket)
            flying.append((bucket, start_all_gather(packed, links[owners[bucket[0]]], leaf=label)))
        flat.clear()

        def finish() -> list[Pieces]:
            out: dict[int, Tensor] = {}
            while flying:
                bucket, pending = flying.pop()
                whole_shapes = [(links[owners[i]].size * shapes[i][0], *shapes[i][1:]) for i in bucket]
                out.update(zip(bucket, unpack(pending.wait(), whole_shapes)))
            ends = list(itertools.accumulate(counts, initial=0))
            return [tuple(out.pop(i) for i in range(low, high)) for low, high in itertools.pairwise(ends)]

        return Future(finish)

    def start(self, group: LeafGroup, phase: str, read: list[Future[Any]] | None = None) -> Future[list[Tensor]]:
        """Start to gather the group, once the shards to be gathered are on the device. `read` is emptied."""
        read = self.read(group, phase) if read is None else read
        moving = [i for i, name in enumerate(group.leaves) if name in self.sharded]
        pieces = [self._ready(group, i, read[i].wait()) for i in moving]
        with self.ledger.phase(phase):
            gathering = self.gather([group.leaves[i] for i in moving], pieces, self.sharded) if moving else ready([])
        waiting = [(i, leaf) for i, leaf in enumerate(read) if i not in moving]
        read.clear()

        def finish() -> list[Tensor]:
            out: dict[int, Tensor] = {}
            gathered = gathering.wait()
            for i in reversed(moving):
                # Popped one by one: the codes of a leaf are freed once it is whole.
                out[i] = self.joined(group.leaves[i], group.layer, gathered.pop())
            for i, leaf in waiting:
                value = leaf.wait()
                out[i] = self.joined(group.leaves[i], group.layer, value) if isinstance(value, tuple) else value
            waiting.clear()
            done = [out.pop(i) for i in range(len(group.leaves))]  # so that only the caller holds the fetched leaves
            self.ledger.holds("gathered", done)
            return done

        return Future(finish)

    def _ready(self, group: LeafGroup, i: int, value: Any) -> Pieces:
        """The pieces of a leaf of a group of what `read` gave."""
        return value if isinstance(value, tuple) else self.pieces(group.leaves[i], group.layer, value)


class Prefetcher:
    """Fetches groups in a known order, up to `ahead` of them early, so that `ahead` + 1 are whole at a time."""

    def __init__(self, fetcher: ParamFetcher, ahead: int):
        self.fetcher, self.ahead = fetcher, ahead
        # A gather begins when its shards have come, so a group that is both read and gathered is read one earlier.
        self.extra_ahead = bool(fetcher.offloaded and fetcher.sharded) or bool(fetcher.over_nodes)
        self.waiting: deque[tuple[LeafGroup, str]] = deque()
        self.reading: deque[tuple[LeafGroup, str, list[Future[Any]]]] = deque()
        self.flying: deque[tuple[LeafGroup, Future[list[Tensor]]]] = deque()

    def expect(self, groups: Iterable[LeafGroup], phase: str) -> None:
        """Add groups to the end of the order."""
        self.waiting.extend((group, phase) for group in groups)

    def dropped(self, group: LeafGroup, reshard: bool) -> bool:
        """Whether the group must be taken again for the backward pass."""
        return self.fetcher.dropped(group, reshard)

    def fetch(self, group: LeafGroup) -> Sequence[Tensor]:
        """The leaves of the next group, which must be `group`; those after it are started first."""
        self.fetcher.ledger.reach(group.name, group.layer)
        pass_group(self.fetcher.device, group, fetched=True)
        while self.waiting and len(self.flying) + len(self.reading) < self.ahead + 1 + self.extra_ahead:
            next_group, phase = self.waiting.popleft()
            self.reading.append((next_group, phase, self.fetcher.read(next_group, phase)))
        while self.reading and len(self.flying) < self.ahead + 1:
            self.flying.append((self.reading[0][0], self.fetcher.start(*self.reading.popleft())))
        expected, leaves = self.flying.popleft()
        assert expected == group, f"{group} was asked for and {expected} comes next"
        return self.fetcher.mark_fetched(group, leaves.wait())


class Resident:
    """Groups that stay whole from their first use until `drop`, for several passes over a stage."""

    def __init__(self, ahead: Prefetcher, groups: Sequence[LeafGroup], phase: str):
        self.ahead, self.fetcher = ahead, ahead.fetcher
        self.upcoming, self.resident = deque(groups), dict[LeafGroup, Sequence[Tensor]]()
        ahead.expect(groups, phase)

    def expect(self, groups: Iterable[LeafGroup], phase: str) -> None:
        """Nothing: the order is known, and what was taken is there."""

    def dropped(self, group: LeafGroup, reshard: bool) -> bool:
        """Whether the group must be fetched again for the backward pass."""
        return self.fetcher.dropped(group, reshard=True)

    def fetch(self, group: LeafGroup) -> Sequence[Tensor]:
        """The leaves of a group; those before it in the order of the first pass are fetched first."""
        if group in self.resident:
            pass_group(self.fetcher.device, group, fetched=True)
        while group not in self.resident:
            next_group = self.upcoming.popleft()
            self.resident[next_group] = self.ahead.fetch(next_group)
        self.fetcher.ledger.reach(group.name, group.layer)
        return self.resident[group]

    def drop(self) -> None:
        """Let the groups go; nothing is taken from here again."""
        self.resident.clear()
        self.upcoming.clear()
