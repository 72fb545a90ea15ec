"""Parameters on their way from rest to use: the gathers of a part of a model, ahead of the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from fzero import pytree
from fzero.collectives import start_all_gather
from fzero.pytree import Tree
from fzero.sharding.bundle import pack, together, unpack
from fzero.sharding.mesh import Mesh
from fzero.sharding.zero import STACKED, Plan


class Part(NamedTuple):
    """A part of a model that is fetched, used and dropped as a whole: a layer, the embedding or the head."""

    name: str
    leaves: tuple[str, ...]  # full names
    layer: int | None = None


def layer_of(leaf: Tensor, name: str, layer: int | None) -> Tensor:
    """The slice of a stacked leaf that belongs to a layer; another leaf is returned as it is."""
    return leaf[layer] if layer is not None and name.startswith(STACKED) else leaf


class Gather:
    """Fetches parts of `params` (local shards, at rest by plan.params): `start(part)` gives the function that waits and returns its
    leaves, whole but for tensor parallelism. A leaf that dp does not shard is a view of the one at rest.

    Communicates: an all_gather over dp for each large leaf and one for the small ones together.
    """

    def __init__(self, params: Tree, plan: Plan, mesh: Mesh):
        self.leaves = pytree.named_leaves(params)
        self.axis, self.ledger = mesh["dp"], mesh.ledger
        specs = pytree.named_leaves(plan.params)
        self.sharded = {name for name in self.leaves if self.axis.size > 1 and "dp" in specs[name].axes}

    def needed(self, part: Part) -> bool:
        """Whether anything of the part must be gathered."""
        return any(name in self.sharded for name in part.leaves)

    def start(self, part: Part, phase: str) -> Callable[[], list[Tensor]]:
        """Start to fetch the part."""
        out: list[Tensor | None] = [layer_of(self.leaves[name], name, part.layer) for name in part.leaves]
        moving = [i for i, name in enumerate(part.leaves) if name in self.sharded]
        shards = [out[i] for i in moving]
        flying = []
        with self.ledger.phase(phase):
            for group in together(shards, [()] * len(shards)):
                bundle = pack([shards[i] for i in group], 1, shards[group[0]].dtype)
                label = " ".join(part.leaves[moving[i]] for i in group)
                flying.append((group, start_all_gather(bundle, self.axis, leaf=label)))
        for i in moving:
            out[i] = None

        def finish() -> list[Tensor]:
            while flying:
                group, pending = flying.pop()
                shapes = [(self.axis.size * shards[i].shape[0], *shards[i].shape[1:]) for i in group]
                for i, whole in zip(group, unpack(pending.wait(), shapes)):
                    out[moving[i]] = whole
            done = list(out)
            out.clear()  # the caller alone holds what was gathered
            return done

        return finish


class Ahead:
    """Parts fetched in a known order, up to `ahead` of them before they are asked for, so `ahead` + 1 are whole at a time."""

    def __init__(self, gather: Gather, ahead: int):
        self.gather, self.ahead = gather, ahead
        self.waiting: deque[tuple[Part, str]] = deque()
        self.flying: deque[tuple[Part, Callable[[], list[Tensor]]]] = deque()

    def expect(self, parts: Iterable[Part], phase: str) -> None:
        """Add parts to the end of the order."""
        self.waiting.extend((part, phase) for part in parts)

    def take(self, part: Part) -> Sequence[Tensor]:
        """The leaves of the next part, which must be `part`; those behind it are started first."""
        while self.waiting and len(self.flying) < self.ahead + 1:
            after, phase = self.waiting.popleft()
            self.flying.append((after, self.gather.start(after, phase)))
        expected, finish = self.flying.popleft()
        assert expected == part, f"{part} was asked for and {expected} comes next"
        return finish()
