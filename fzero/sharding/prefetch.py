"""Parameters from rest to use: the reads, copies and gathers of a group of leaves, started before the computation needs
them."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.bucket import bucket_groups, pack, unpack
from fzero.comm.collectives import Axis, start_all_gather
from fzero.core import pytree, varying
from fzero.core.copy_buckets import LARGE_COPY, SMALL_COPY
from fzero.core.future import Future, ready
from fzero.core.gpu_copies import Copied, copy_in, pass_group
from fzero.core.pytree import Tree
from fzero.sharding.codec import Coder
from fzero.sharding.plan import Plan
from fzero.sharding.slices import is_stacked


class Group(NamedTuple):
    """The leaves of a model that are fetched, used and dropped together: those of a layer, the embedding or the
    head."""

    name: str
    leaves: tuple[str, ...]  # full names
    layer: int | None = None


def layer_of(leaf: Tensor, name: str, layer: int | None) -> Tensor:
    """A layer of a stacked leaf; a leaf that is not stacked is returned as it is."""
    return leaf[layer] if layer is not None and is_stacked(name) else leaf


def is_small(leaf: Tensor) -> bool:
    """Whether the layers of a stacked leaf take longer to start a copy of than to copy, and are little together."""
    return leaf[0].nbytes < SMALL_COPY and leaf.nbytes <= LARGE_COPY


class Coding(NamedTuple):
    """How leaves that do not travel as they are do: those of Plan.float8 by `narrow(shard, most)` -> uint8 of its shape
    and `widen(numbers, most)` back, those of Plan.coded by `coder`.

    most: the largest magnitude of the whole leaf, float32 scalar.
    """

    narrow: Callable[[Tensor, Tensor], Tensor]
    widen: Callable[[Tensor, Tensor], Tensor]
    coder: Coder | None = None


Pieces = tuple[Tensor, ...]  # what travels of a shard
Kept = dict[tuple[str, int | None], Pieces]  # by (name, layer)


class ParamFetcher:
    """Fetches groups of `params` (local shards, at rest by plan.params) to `device`, whole but for tensor parallelism.

    `read(group)` starts the reads from host memory or a disk, `start` the gathers. A leaf that is on the device and not
    sharded is a view of the leaf at rest.
    coding: how leaves of plan.float8 and plan.coded travel; None: as they are. kept: of leaves that rest over rp too,
    what the ranks of a node hold together, for all that is fetched in a step; None: nothing is kept.
    Communicates: an all_gather over dp, ep and cp (of experts over dp and cp) for each large leaf, and one for all
    small leaves of a group; of leaves that rest over rp, before it the same over rp, unless it is kept. With float8,
    one before them for the largest magnitudes of all its leaves. A leaf in codes has two tensors, codes and scales.
    """

    def __init__(
        self,
        params: Tree,
        plan: Plan,
        device: torch.device,
        coding: Coding | None = None,
        kept: Kept | None = None,
    ):
        self.leaves: dict[str, Any] = pytree.named_leaves(params)
        self.ledger, self.device, self.kept = plan.mesh.ledger, device, kept
        self.compute = pytree.named_leaves(plan.compute)
        links = {name: plan.link(name) for name in self.leaves if "dp" in plan.leaves[name].use.axes}
        self.sharded = {name: link for name, link in links.items() if link.size > 1}  # and what each is gathered over
        nodes = plan.mesh["rp"]
        self.over_nodes = {name: nodes for name in self.leaves if "rp" in plan.leaves[name].use.axes and nodes.size > 1}
        # What has no memory of its own, or not on the device. A leaf on a disk has `read(layer)`, whose result has
        # `copy_to(device)`.
        self.away = {
            name for name, leaf in self.leaves.items() if not isinstance(leaf, Tensor) or leaf.device != device
        }
        # Stacked leaves in the host's memory with small layers: one copy brings all of them, for the whole pass.
        self.together = {
            name
            for name, leaf in self.leaves.items()
            if name in self.away and isinstance(leaf, Tensor) and is_stacked(name) and len(leaf) and is_small(leaf)
        }
        self.copied: dict[str, Copied] = {}
        self.coding, self.coder, self.coded = coding, coding.coder if coding is not None else None, plan.coded
        self.most = self.largest([name for name in self.leaves if name in plan.float8]) if coding else {}

    def largest(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The largest magnitude of each layer of stacked leaves [L, ...] on all ranks, float32 [L], by name."""
        if not names:
            return {}
        own = [torch.linalg.vector_norm(self.leaves[n], torch.inf, list(range(1, self.leaves[n].dim()))) for n in names]
        with self.ledger.phase("forward"):
            row = torch.cat([found.to(torch.float32) for found in own])[None]
            for links in (self.over_nodes, self.sharded):
                if names[0] in links:
                    every = start_all_gather(row, links[names[0]], leaf="largest of " + " ".join(names)).wait()
                    row = every.amax(0, keepdim=True)
        return dict(zip(names, row[0].split([len(found) for found in own])))

    def moves(self, name: str) -> bool:
        """Whether a leaf is gathered."""
        return name in self.sharded or name in self.over_nodes

    def needed(self, group: Group) -> bool:
        """Whether any leaf of the group must be fetched."""
        return any(self.moves(name) or name in self.away for name in group.leaves)

    def known(self, group: Group, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves of a group that were fetched, which differ over the axes of their compute specs alone."""
        if followed := varying.active():
            for name, leaf in zip(group.leaves, leaves):
                followed.mark(leaf, frozenset(self.compute[name].axes))
        return leaves

    def dropped(self, group: Group, reshard: bool) -> bool:
        """Whether the group must be fetched again for the backward pass."""
        return any(name in self.away or (reshard and self.moves(name)) for name in group.leaves)

    def like(self, group: Group) -> list[Tensor]:
        """Tensors of the shapes and dtypes that `start` gives for the group, with any values."""
        return [self._like_leaf(name, group.layer) for name in group.leaves]

    def _like_leaf(self, name: str, layer: int | None) -> Tensor:
        leaf = self.leaves[name]
        if isinstance(leaf, Tensor) and not self.moves(name) and name not in self.away:
            return layer_of(leaf, name, layer)
        shape = leaf.shape[1:] if layer is not None and is_stacked(name) else leaf.shape
        for links in (self.over_nodes, self.sharded):
            if name in links:
                shape = (links[name].size * shape[0], *shape[1:])
        return torch.empty(shape, dtype=leaf.dtype, device=self.device)

    def read(self, group: Group, phase: str) -> list[Future[Any]]:
        """Start to copy this rank's shards of the group to the device; of a leaf that rests over rp, to gather there
        the `Pieces` of them that its node holds."""
        found: list[Future[Any]] = [
            ready(()) if name in self.over_nodes else self._bring_leaf(name, group.layer) for name in group.leaves
        ]
        apart = [i for i, name in enumerate(group.leaves) if name in self.over_nodes]
        places = {i: (group.leaves[i], group.layer if is_stacked(group.leaves[i]) else None) for i in apart}
        held = self.kept or {}
        fresh = [i for i in apart if places[i] not in held]
        found = [ready(held[places[i]]) if i in apart and i not in fresh else one for i, one in enumerate(found)]
        if fresh:
            shards = [self._bring_leaf(group.leaves[i], group.layer).wait() for i in fresh]
            pieces = [self.pieces(group.leaves[i], group.layer, shard) for i, shard in zip(fresh, shards)]
            with self.ledger.phase(phase):
                arrived = functools.cache(self.gather([group.leaves[i] for i in fresh], pieces, self.over_nodes).wait)
            for at, i in enumerate(fresh):
                found[i] = Future(functools.partial(self._keep, places[i], arrived, at))
        return found

    def _keep(self, place: tuple[str, int | None], arrived: Callable[[], list[Pieces]], at: int) -> Pieces:
        pieces = arrived()[at]
        if self.kept is not None:
            self.kept[place] = pieces
        return pieces

    def _bring_leaf(self, name: str, layer: int | None) -> Future[Tensor]:
        leaf = self.leaves[name]
        if name in self.together:
            copied = self.copied.get(name) or self.copied.setdefault(name, copy_in(leaf, self.device))
            return Future(lambda: layer_of(copied.use(), name, layer))
        if isinstance(leaf, Tensor):
            value = layer_of(leaf, name, layer)
            # The update writes into it only after the device has computed with the copy.
            return Future(copy_in(value, self.device).use) if name in self.away else ready(value)
        reading = leaf.read(layer or 0) if layer is None or is_stacked(name) else leaf.read()
        return reading.copy_to(self.device)

    def pieces(self, name: str, layer: int | None, shard: Tensor) -> Pieces:
        """What travels of a shard."""
        if self.coding is not None and name in self.most:
            return (self.coding.narrow(shard, self.most[name][layer]),)
        return self.coder.encode(shard) if self.coder is not None and name in self.coded else (shard,)

    def joined(self, name: str, layer: int | None, pieces: Pieces) -> Tensor:
        """The whole leaf of the pieces of all ranks."""
        if self.coding is not None and name in self.most:
            return self.coding.widen(pieces[0], self.most[name][layer])
        if self.coder is None or name not in self.coded:
            return pieces[0]
        leaf = self.leaves[name]
        return self.coder.decode(pieces, leaf.dtype, leaf.shape[-1])

    def gather(self, names: Sequence[str], pieces: list[Pieces], links: dict[str, Axis]) -> Future[list[Pieces]]:
        """Start to gather what travels of leaves, each over its link; the list `pieces` is emptied."""
        counts = [len(one) for one in pieces]
        owners = [name for name, count in zip(names, counts) for _ in range(count)]
        flat = [tensor for one in pieces for tensor in one]
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

    def start(self, group: Group, phase: str, read: list[Future[Any]] | None = None) -> Future[list[Tensor]]:
        """Start to gather the group, once the shards to be gathered are on the device. `read` is emptied."""
        read = self.read(group, phase) if read is None else read
        moving = [i for i, name in enumerate(group.leaves) if name in self.sharded]
        pieces = [self._ready(group, i, read[i].wait()) for i in moving]
        with self.ledger.phase(phase):
            coming = self.gather([group.leaves[i] for i in moving], pieces, self.sharded)
        waiting = [(i, leaf) for i, leaf in enumerate(read) if i not in moving]
        read.clear()

        def finish() -> list[Tensor]:
            out: dict[int, Tensor] = {}
            gathered = coming.wait()
            for i in reversed(moving):
                out[i] = self.joined(group.leaves[i], group.layer, gathered.pop())
            for i, leaf in waiting:
                here = leaf.wait()
                out[i] = self.joined(group.leaves[i], group.layer, here) if isinstance(here, tuple) else here
            waiting.clear()
            done = [out.pop(i) for i in range(len(group.leaves))]  # so that only the caller holds the fetched leaves
            self.ledger.holds("gathered", done)
            return done

        return Future(finish)

    def _ready(self, group: Group, i: int, here: Any) -> Pieces:
        """The pieces of a leaf of a group of what `read` gave."""
        return here if isinstance(here, tuple) else self.pieces(group.leaves[i], group.layer, here)


class Prefetcher:
    """Fetches groups in a known order, up to `ahead` of them before they are taken, so that `ahead` + 1 are whole at a
    time.

    Groups that are both read from elsewhere (or gathered over rp) and gathered are read one earlier, because a gather
    begins when its shards have arrived.
    """

    def __init__(self, fetcher: ParamFetcher, ahead: int):
        self.fetcher, self.ahead = fetcher, ahead
        self.further = bool(fetcher.away and fetcher.sharded) or bool(fetcher.over_nodes)
        self.waiting: deque[tuple[Group, str]] = deque()
        self.reading: deque[tuple[Group, str, list[Future[Any]]]] = deque()
        self.flying: deque[tuple[Group, Future[list[Tensor]]]] = deque()

    def expect(self, groups: Iterable[Group], phase: str) -> None:
        """Add groups to the end of the order."""
        self.waiting.extend((group, phase) for group in groups)

    def dropped(self, group: Group, reshard: bool) -> bool:
        """Whether the group must be taken again for the backward pass."""
        return self.fetcher.dropped(group, reshard)

    def take(self, group: Group) -> Sequence[Tensor]:
        """The leaves of the next group, which must be `group`; those after it are started first."""
        self.fetcher.ledger.at(group.name, group.layer)
        pass_group(self.fetcher.device, group, fetched=True)
        while self.waiting and len(self.flying) + len(self.reading) < self.ahead + 1 + self.further:
            after, phase = self.waiting.popleft()
            self.reading.append((after, phase, self.fetcher.read(after, phase)))
        while self.reading and len(self.flying) < self.ahead + 1:
            self.flying.append((self.reading[0][0], self.fetcher.start(*self.reading.popleft())))
        expected, leaves = self.flying.popleft()
        assert expected == group, f"{group} was asked for and {expected} comes next"
        return self.fetcher.known(group, leaves.wait())


class Resident:
    """Groups that stay whole from when each is first taken until `drop`, for several passes over a stage.

    ahead: fetches them, in the order of the first pass, which `groups` has.
    """

    def __init__(self, ahead: Prefetcher, groups: Sequence[Group], phase: str):
        self.ahead, self.fetcher = ahead, ahead.fetcher
        self.coming, self.whole = deque(groups), dict[Group, Sequence[Tensor]]()
        ahead.expect(groups, phase)

    def expect(self, groups: Iterable[Group], phase: str) -> None:
        """Nothing: the order is known, and what was taken is there."""

    def dropped(self, group: Group, reshard: bool) -> bool:
        """Whether the group must be taken again for the backward pass: what is fetched, so that only this holds it."""
        return self.fetcher.needed(group)

    def take(self, group: Group) -> Sequence[Tensor]:
        """The leaves of a group; those before it in the order of the first pass are fetched first."""
        if group in self.whole:
            pass_group(self.fetcher.device, group, fetched=True)
        while group not in self.whole:
            after = self.coming.popleft()
            self.whole[after] = self.ahead.take(after)
        self.fetcher.ledger.at(group.name, group.layer)
        return self.whole[group]

    def drop(self) -> None:
        """Let the groups go; nothing is taken from here again."""
        self.whole.clear()
        self.coming.clear()
