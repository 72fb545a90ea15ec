"""The norms of gradients and parameters, layer by layer.

    norms.by_part(norms.sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor))

The squares of gradients come from the step's own norm, so nothing is read again and no gradient is held longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.comm.tables import device_of
from fzero.core import pytree
from fzero.core.copy_buckets import start_fetch
from fzero.core.pytree import Tree
from fzero.optim.norm import Squared
from fzero.optim.sharded_leaves import WHOLE, squares
from fzero.sharding import Mesh
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec

Norms = dict[str, Any]  # {"embed": norm, "blocks": [norm of each layer], "head": norm}


def sums(squared: Mapping[str, Squared]) -> dict[str, Tensor]:
    """{leaf: its sum of squares [layers] on this rank, float64}; of one layer for a leaf that is not stacked."""
    out = {}
    for name, leaf in squared.items():
        layers: dict[int, list[Tensor]] = {}
        for layer, square in leaf.squares:
            layers.setdefault(layer, []).append(square.to(torch.float64).sum())
        found = [torch.stack(layers[layer]).sum() for layer in sorted(layers)]
        out[name] = torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)  # other stages have its layers
    return out


@torch.no_grad()
def of_params(params: Tree) -> dict[str, Tensor]:
    """`sums` of this rank's parameters; leaves on a disk are left out, to avoid reading them."""
    here = {name: leaf for name, leaf in pytree.named_leaves(params).items() if isinstance(leaf, Tensor)}
    return sums(squares(WHOLE, here))


@torch.no_grad()
def by_part(local: Mapping[str, Tensor], specs: Tree, mesh: Mesh, whole: Tree, factor: float = 1.0) -> Norms:
    """The 2-norms, times `factor`, of the parts of a model: the embedding, each layer, the head; the same on all ranks.

    local: this rank's `sums` of leaves that `specs` shard. whole: a tree with all leaves; a part with a leaf
    missing in `local` is None. A number that is not finite is None too.
    Communicates: one psum per axis that shards any leaf, of a float64 number per leaf and layer.
    """
    named = pytree.named_leaves(specs)
    # One place for all: those of leaves in the host's memory, and of other stages' layers, are not on the GPU.
    here = dict(zip(local, start_fetch(list(local.values())).wait()))
    totals = {name: place_layers(sums.to(device_of(mesh)), named[name], mesh) for name, sums in here.items()}
    with mesh.ledger.phase("norms"):
        for axis in mesh.axes:
            names = [name for name in sorted(totals) if axis.size > 1 and axis.name in named[name].axes]
            if names:
                summed = psum(torch.cat([totals[name] for name in names]), axis, leaf="norms")
                totals.update(zip(names, summed.split([totals[name].shape[0] for name in names])))
    parts: dict[str, list[str]] = {}
    for name in pytree.names(whole):
        parts.setdefault(name.split("/")[0], []).append(name)
    known = {part: names for part, names in parts.items() if all(name in totals for name in names)}
    norms = [factor * torch.stack([totals[name] for name in names]).sum(0).sqrt() for names in known.values()]
    out: Norms = dict.fromkeys(parts)
    for (part, names), found in zip(known.items(), start_fetch(norms).wait()):
        finite = [value if math.isfinite(value) else None for value in found.tolist()]
        out[part] = finite if is_stacked(names[0]) else finite[0]
    return out


def place_layers(sums: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The sums [layers of this rank] of a leaf whose layers are on several ranks at their places among all of its
    layers, where those of other ranks are 0: a sum over pp then has each layer's own bits."""
    if not spec.rows:
        return sums
    mine = torch.tensor(spec.rows[mesh["pp"].rank], dtype=torch.int64, device=device_of(mesh))
    placed = torch.zeros(sum(len(rows) for rows in spec.rows), dtype=sums.dtype, device=device_of(mesh))
    return placed.index_copy_(0, mine, sums)
