"""Shards put together: the whole of a state on one process."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import STACKED
from fzero.sharding.spec import Spec


@torch.no_grad()
def whole_on_first(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """The tree of whole leaves on rank 0, and () on every other rank, of a tree of which each rank holds the shards by `specs`.

    Leaf by leaf, and a stacked leaf layer by layer: another rank than the first never holds more than one of those.
    Communicates: an all_gather over each axis that shards a leaf.
    """
    named, first = pytree.named_leaves(specs), mesh.rank == 0

    def whole(name: str, leaf: Tensor) -> Tensor:
        spec = named[name]
        if not any(mesh[axis].size > 1 for axis in spec.axes):
            return leaf
        if f"/{STACKED}" not in f"/{name}" or spec.dims[0]:
            out = gathered(leaf, spec, mesh, name)
            return out if first else leaf
        inner, layers = Spec(spec.dims[1:]), []
        for layer in leaf:
            out = gathered(layer, inner, mesh, name)
            layers += [out] if first else []
        return torch.stack(layers) if first else leaf

    out = pytree.map_named(whole, tree)
    return out if first else ()


def gathered(leaf: Tensor, spec: Spec, mesh: Mesh, name: str) -> Tensor:
    """The whole leaf, on all ranks, of which each holds the shard by `spec`."""
    for dim, axes in enumerate(spec.dims):
        for axis in reversed(axes):  # innermost first
            leaf = all_gather(leaf, mesh[axis], dim, leaf=name)
    return leaf
