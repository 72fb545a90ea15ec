"""Parameters on their way from rest to use: the reads, copies and gathers of a part of a model, ahead of the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.bucket import bucket_groups, pack, unpack
from fzero.comm.collectives import start_all_gather
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.sharding.plan import Plan
from fzero.sharding.slices import STACKED


class Group(NamedTuple):
    """A part of a model that is fetched, used and dropped as a whole: a layer, the embedding or the head."""

    name: str
    leaves: tuple[str, ...]  # full names
    layer: int | None = None


def layer_of(leaf: Tensor, name: str, layer: int | None) -> Tensor:
    """The slice of a stacked leaf that belongs to a layer; another leaf is returned as it is."""
    return leaf[layer] if layer is not None and name.startswith(STACKED) else leaf


Wait = Callable[[], Tensor]


class ParamFetcher:
    """Fetches parts of `params` (local shards, at rest by plan.params) to `device`, whole but for tensor parallelism.

    `read(part)` starts what comes from the host's memory or a disk, `start` the gathers, and gives the function that waits and returns the
    leaves. A leaf that is on the device and that dp does not shard is a view of the one at rest.
    Communicates: an all_gather over dp for each large leaf and one for the small ones together.
    """

    def __init__(self, params: Tree, plan: Plan, device: torch.device):
        self.leaves: dict[str, Any] = pytree.named_leaves(params)
        self.axis, self.ledger, self.device = plan.mesh["dp"], plan.mesh.ledger, device
        self.sharded = {name for name in self.leaves if self.axis.size > 1 and "dp" in plan.leaves[name].params.axes}
        # What has no memory of its own, or not on the device. A leaf on a disk has `read(layer)`, whose result has `wait()`.
        self.away = {name for name, leaf in self.leaves.items() if not isinstance(leaf, Tensor) or leaf.device != device}
        self.stream = torch.cuda.Stream(device) if self.away and device.type == "cuda" else None  # None in a plan, too

    def needed(self, part: Group) -> bool:
        """Whether anything of the part must be fetched."""
        return any(name in self.sharded or name in self.away for name in part.leaves)

    def dropped(self, part: Group, reshard: bool) -> bool:
        """Whether the part is to be fetched again for the backward pass."""
        return any(name in self.away or (reshard and name in self.sharded) for name in part.leaves)

    def read(self, part: Group) -> list[Wait]:
        """Start to bring this rank's shards of the part to the device; a function for each leaf that waits for it."""
        return [self._bring(name, part.layer) for name in part.leaves]

    def _bring(self, name: str, layer: int | None) -> Wait:
        leaf = self.leaves[name]
        if isinstance(leaf, Tensor):
            value = layer_of(leaf, name, layer)
            return self._copied(value) if name in self.away else lambda: value
        reading = leaf.read(layer or 0) if layer is None or name.startswith(STACKED) else leaf.read()
        return reading.wait if self.device == HOST else lambda: self._copied(reading.wait())()

    def _copied(self, value: Tensor) -> Wait:
        if self.stream is None:
            there = value.to(self.device)
            return lambda: there
        with torch.cuda.stream(self.stream):
            there = value.to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)

        def wait() -> Tensor:
            event.synchronize()  # the memory it came from may be used for something else from now on
            there.record_stream(torch.cuda.current_stream(self.device))
            return there

        return wait

    def start(self, part: Group, phase: str, read: list[Wait] | None = None) -> Callable[[], list[Tensor]]:
        """Start to gather the part, once its shards that must be gathered are here."""
        read = self.read(part) if read is None else read
        moving = [i for i, name in enumerate(part.leaves) if name in self.sharded]
        shards = [read[i]() for i in moving]
        out: list[Tensor | None] = [None] * len(read)
        flying = []
        with self.ledger.phase(phase):
            for group in bucket_groups(shards, [()] * len(shards)):
                bundle = pack([shards[i] for i in group], 1, shards[group[0]].dtype)
                label = " ".join(part.leaves[moving[i]] for i in group)
                flying.append((group, start_all_gather(bundle, self.axis, leaf=label)))
        shapes = [shard.shape for shard in shards]
        shards.clear()
        waiting = [None if i in moving else wait for i, wait in enumerate(read)]
        read.clear()

        def finish() -> list[Tensor]:
            while flying:
                group, pending = flying.pop()
                whole_shapes = [(self.axis.size * shapes[i][0], *shapes[i][1:]) for i in group]
                for i, whole in zip(group, unpack(pending.wait(), whole_shapes)):
                    out[moving[i]] = whole
            for i, wait in enumerate(waiting):
                if wait is not None:
                    out[i] = wait()
            waiting.clear()
            done = list(out)
            out.clear()  # the caller alone holds what was fetched
            self.ledger.holds("gathered", done)
            return done

        return finish


class Prefetcher:
    """Parts fetched in a known order, up to `ahead` of them before they are asked for, so `ahead` + 1 are whole at a time.

    Those that come from elsewhere and are gathered are read one further ahead, as a gather begins when its shards are here.
    """

    def __init__(self, gather: ParamFetcher, ahead: int):
        self.gather, self.ahead = gather, ahead
        self.further = bool(gather.away and gather.sharded)
        self.waiting: deque[tuple[Group, str]] = deque()
        self.reading: deque[tuple[Group, str, list[Wait]]] = deque()
        self.flying: deque[tuple[Group, Callable[[], list[Tensor]]]] = deque()

    def expect(self, parts: Iterable[Group], phase: str) -> None:
        """Add parts to the end of the order."""
        self.waiting.extend((part, phase) for part in parts)

    def take(self, part: Group) -> Sequence[Tensor]:
        """The leaves of the next part, which must be `part`; those behind it are started first."""
        self.gather.ledger.at(part.name, part.layer)
        while self.waiting and len(self.flying) + len(self.reading) < self.ahead + 1 + self.further:
            after, phase = self.waiting.popleft()
            self.reading.append((after, phase, self.gather.read(after)))
        while self.reading and len(self.flying) < self.ahead + 1:
            self.flying.append((self.reading[0][0], self.gather.start(*self.reading.popleft())))
        expected, finish = self.flying.popleft()
        assert expected == part, f"{part} was asked for and {expected} comes next"
        return finish()
