"""Digests of whole leaves that ranks hold in shards: the same on every mesh, for 8 bytes a leaf sent between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.comm.tables import device_of, sum_rows
from fzero.core.digest import Started, combine, read_digests, start_digest
from fzero.core.pytree import Tree, named_leaves
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import local_windows, whole_shape
from fzero.sharding.spec import Spec


@torch.no_grad()
def digests(tree: Tree, specs: Tree, mesh: Mesh) -> dict[str, int]:
    """{name: digest of the whole leaf}, from this rank's shards by `specs`; the same on all ranks.

    Leaves may rest on a disk; one of those is in memory at a time. One of the ranks that hold the same shard computes
    its digest, by turns.
    Communicates: 8 bytes a leaf over each axis.
    """
    named, started = named_leaves(specs), []
    for number, (name, leaf) in enumerate(named_leaves(tree).items()):
        copies, copy = 1, 0
        for axis in mesh.axes:
            if axis.name not in named[name].axes:
                copies, copy = copies * axis.size, copy * axis.size + axis.rank
        started.append(shard_digests(leaf, named[name], mesh) if number % copies == copy else [])
    # int64 of the same bits, whose sums wrap.
    read = iter(read_digests([part for parts in started for part in parts]))
    values = [sum(next(read) for _ in parts) % (1 << 64) for parts in started]
    row = torch.tensor([value - (value >> 63 << 64) for value in values], dtype=torch.int64, device=device_of(mesh))
    with mesh.ledger.phase("digest"):
        sums = sum_rows(row, mesh, leaf="digests")
    return {name: value % (1 << 64) for name, value in zip(named_leaves(tree), sums.tolist())}


def digest_text(tree: Tree, specs: Tree, mesh: Mesh) -> str:
    """One digest of all leaves under their names, in 16 hexadecimal digits: in a row of metrics.jsonl that of the
    parameters."""
    return f"{combine(digests(tree, specs, mesh)):016x}"


def shard_digests(leaf: Tensor, spec: Spec, mesh: Mesh) -> list[Started]:
    """The digests of the windows of this rank's shard at their positions in the whole leaf: the digests of all shards
    add up to that of the leaf. They are read by `read_digests`."""
    x = leaf if isinstance(leaf, Tensor) else leaf.tensor()
    whole = whole_shape(x.shape, spec, mesh)
    return [start_digest(window.of(x), whole, window.start) for window in local_windows(whole, spec, mesh)]
