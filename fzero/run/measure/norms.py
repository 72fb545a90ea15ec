"""The norms of gradients and parameters, layer by layer.

    norms.segment_norms(norms.sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor))

The squares of gradients come from the step's own norm, so nothing is read again and no gradient is held longer. Also
how evenly a step's tokens are spread over experts, and stragglers by the times of every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero import sharding
from fzero.comm.collectives import psum
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.copy_buckets import start_fetch
from fzero.core.pytree import Tree
from fzero.models.base import BIAS, DROPPED, ENTROPY, LOAD
from fzero.optim.norm import Squared
from fzero.optim.sharded_leaves import WHOLE, squares
from fzero.run.measure.timer import COMM, IO, Times
from fzero.sharding import Mesh, Plan
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec


def imbalance(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{"imbalance": the worst layer's most tokens over its mean}, or {}.

    >>> float(imbalance({"blocks/moe/load": torch.tensor([[3.0, 1.0], [2.0, 2.0]])})["imbalance"])
    1.5
    """
    loads = [table for name, table in tables.items() if name.endswith(f"/{LOAD}")]
    worst = [(load.amax(-1) / load.mean(-1).clamp_min(1e-30)).amax() for load in loads]
    return {"imbalance": torch.stack(worst).amax()} if worst else {}


def spread_of(tables: Mapping[str, Tensor], params: Tree, plan: Plan, top_k: int) -> dict[str, Any]:
    """{"experts": {stack: load, dropped, entropy, bias}} for a row of metrics; {} without experts."""
    leaves, stacks = pytree.named_leaves(params), dict[str, Any]()
    for name, load in tables.items():
        stack, _, kind = name.rpartition("/")
        if kind != LOAD:
            continue
        every = load.sum(-1, keepdim=True).clamp_min(1.0)
        row = {LOAD: load / every, ENTROPY: tables[f"{stack}/{ENTROPY}"] / (every[:, 0] / top_k)}
        if f"{stack}/{DROPPED}" in tables:
            row[DROPPED] = tables[f"{stack}/{DROPPED}"] / every
        if (bias := f"{stack}/{BIAS}") in leaves:
            spec = plan.leaves[bias].params
            row[BIAS] = (
                sharding.layouts.gather_layers(leaves[bias], spec, plan.mesh, leaf=bias) if spec.rows else leaves[bias]
            )
        stacks[stack.split("/")[0]] = {key: rounded(x.tolist()) for key, x in row.items()}
    return {"experts": stacks} if stacks else {}


def rounded(value: Any) -> Any:
    """Nested lists of numbers with six significant digits: a row is read by people too."""
    return [rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")


BEHIND = 1.05  # times the others' median: above it a rank is a straggler


COLUMNS = ("busy_s", "comm_s", "data_s", "io_s")


class RankTimes:
    """The summed times of this rank's steps since they were last gathered."""

    def __init__(self) -> None:
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)

    def add(self, times: Times) -> None:
        """Add the times of a step."""
        phases = times.phases
        self.steps += 1
        for i, value in enumerate((times.busy, phases[COMM], phases["data"], phases[IO])):
            self.sums[i] += value

    def gather(self, mesh: Mesh) -> dict[str, Any]:
        """The times of all ranks, as lists by rank, and the straggler; resets the sums. All ranks call it."""
        with mesh.ledger.phase("ranks"):
            row = torch.tensor(self.sums, dtype=torch.float64, device=device_of(mesh))
            rows = gather_rows(row, mesh, leaf="ranks").tolist()
        out = {"steps": self.steps, **{name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}}
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)
        straggler, behind = find_straggler([row[0] + row[2] + row[3] for row in rows])
        return {**out, "straggler": straggler, "behind": behind}


def find_straggler(own_s: list[float]) -> tuple[int | None, float]:
    """(the rank that the others wait for, or None; by what factor its time is above the others' median)."""
    if len(own_s) < 2:
        return None, 1.0
    rank = max(range(len(own_s)), key=lambda i: own_s[i])
    median = statistics.median(own_s[:rank] + own_s[rank + 1 :])
    behind = own_s[rank] / median if median > 0 else 1.0
    return rank if behind > BEHIND else None, behind


Norms = dict[str, Any]  # {"embed": norm, "blocks": [norm of each layer], "head": norm}


def sums(squared: Mapping[str, Squared]) -> dict[str, Tensor]:
    """{leaf: its sum of squares [layers] on this rank, float64}."""
    out = {}
    for name, leaf in squared.items():
        layers: dict[int, list[Tensor]] = {}
        for layer, square in leaf.squares:
            layers.setdefault(layer, []).append(square.to(torch.float64).sum())
        layer_sums = [torch.stack(layers[layer]).sum() for layer in sorted(layers)]
        # Without layer_sums other stages have its layers.
        out[name] = torch.stack(layer_sums) if layer_sums else torch.zeros(0, dtype=torch.float64)
    return out


@torch.no_grad()
def of_params(params: Tree) -> dict[str, Tensor]:
    """`sums` of this rank's parameters; leaves on a disk are left out, to avoid reading them."""
    local_leaves = {name: leaf for name, leaf in pytree.named_leaves(params).items() if isinstance(leaf, Tensor)}
    return sums(squares(WHOLE, local_leaves))


@torch.no_grad()
def segment_norms(local: Mapping[str, Tensor], specs: Tree, mesh: Mesh, like: Tree, factor: float = 1.0) -> Norms:
    """The 2-norms, times `factor`, of the parts of a model: embedding, layers, head; the same on all ranks."""
    named = pytree.named_leaves(specs)
    # One place for all: those of leaves in the host's memory, and of other stages' layers, are not on the GPU.
    device_sums = dict(zip(local, start_fetch(list(local.values())).wait()))
    totals = {name: scatter_layers(sums.to(device_of(mesh)), named[name], mesh) for name, sums in device_sums.items()}
    with mesh.ledger.phase("norms"):
        for axis in mesh.axes:
            names = [name for name in sorted(totals) if axis.size > 1 and axis.name in named[name].axes]
            if names:
                summed = psum(torch.cat([totals[name] for name in names]), axis, leaf="norms")
                totals.update(zip(names, summed.split([totals[name].shape[0] for name in names])))
    parts: dict[str, list[str]] = {}
    for name in pytree.names(like):
        parts.setdefault(name.split("/")[0], []).append(name)
    complete_parts = {segment: names for segment, names in parts.items() if all(name in totals for name in names)}
    norms = [factor * torch.stack([totals[name] for name in names]).sum(0).sqrt() for names in complete_parts.values()]
    out: Norms = dict.fromkeys(parts)
    for (segment, names), values in zip(complete_parts.items(), start_fetch(norms).wait()):
        finite = [value if math.isfinite(value) else None for value in values.tolist()]
        out[segment] = finite if is_stacked(names[0]) else finite[0]
    return out


def scatter_layers(sums: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The sums of this rank's layers at their indices among all layers of a leaf, 0 elsewhere."""
    if not spec.rows:
        return sums
    indices = torch.tensor(spec.rows[mesh.pp.rank], dtype=torch.int64, device=device_of(mesh))
    placed = torch.zeros(sum(len(rows) for rows in spec.rows), dtype=sums.dtype, device=device_of(mesh))
    return placed.index_copy_(0, indices, sums)
