"""The plan of a state's snapshot: which slabs of which parts this rank writes, and the memory that they take. States of
the same shapes have the same one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fzero.checkpoint.layout import RankParts, Slab, lay_out, slabs
from fzero.offload.buffer_pool import round_to_pages
from fzero.sharding import Mesh, Spec

SLAB = 16 << 20  # bytes to copy, checksum and write at a time
SLAB_OF_GPU = 64 << 20  # the same from a GPU, where each copy takes the host as long as it takes to start it
OBJECT = 64 << 20  # bytes of an object in an object store
Named = Mapping[str, tuple[Any, Spec]]  # a leaf and its Spec by name


class LeafPlan(NamedTuple):
    """The part of a leaf that this rank writes."""

    mine: RankParts
    slabs: list[list[Slab]]  # of each of its parts
    sizes: list[list[int]]  # bytes of memory for each of those


class SnapshotPlan(NamedTuple):
    """The parts of a state that this rank writes, in the order of its leaves."""

    leaves: dict[str, LeafPlan]
    total: int  # bytes of memory for all slabs
    largest: int  # bytes of memory for one
    nbytes: int  # bytes of elements


def is_on_gpu(leaf: Any) -> bool:
    """Whether a leaf of a state is a tensor on a GPU."""
    return isinstance(leaf, Tensor) and leaf.is_cuda


def traits_of(named: Named) -> list[tuple[Any, ...]]:
    """All that the plan of a snapshot depends on: two states with equal traits have the same."""
    return [(name, tuple(leaf.shape), leaf.dtype, spec, is_on_gpu(leaf)) for name, (leaf, spec) in named.items()]


def plan_snapshot(named: Named, mesh: Mesh, *, objects: bool, compress: str) -> SnapshotPlan:
    """The SnapshotPlan of a state. objects: it goes to an object store."""
    leaves, sizes, nbytes = {}, [], 0
    for number, (name, (leaf, spec)) in enumerate(named.items()):
        mine = lay_out(leaf.shape, leaf.dtype, spec, mesh, number, most=OBJECT if objects else None, compress=compress)
        most = 2 * OBJECT if objects else SLAB_OF_GPU if is_on_gpu(leaf) else SLAB
        pieces = [list(slabs(mine.layout, most)) for _ in mine.parts]
        room = [[round_to_pages(math.prod(slab.counts) * mine.layout.stride) for slab in part] for part in pieces]
        leaves[name] = LeafPlan(mine, pieces, room)
        sizes += [size for part in room for size in part]
        nbytes += sum(math.prod(slab.counts) * mine.layout.chunk_bytes for part in pieces for slab in part)
    return SnapshotPlan(leaves, sum(sizes), max(sizes, default=0), nbytes)
