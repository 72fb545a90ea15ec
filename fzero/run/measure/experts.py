"""What a run records of its experts: how evenly the tokens of a step are spread over them, by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.models.routing import BIAS, DROPPED, ENTROPY, LOAD
from fzero.sharding import Plan
from fzero.sharding.redistribute import gather_layers


def imbalance(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{"imbalance": the most tokens of an expert over the mean of its layer, of the worst layer}; {} without experts.

    >>> float(imbalance({"blocks/moe/load": torch.tensor([[3.0, 1.0], [2.0, 2.0]])})["imbalance"])
    1.5
    """
    loads = [table for name, table in tables.items() if name.endswith(f"/{LOAD}")]
    worst = [(load.amax(-1) / load.mean(-1).clamp_min(1e-30)).amax() for load in loads]
    return {"imbalance": torch.stack(worst).amax()} if worst else {}


def spread_of(tables: Mapping[str, Tensor], params: Tree, plan: Plan, top_k: int) -> dict[str, Any]:
    """{"experts": {stack: its tables}} for a row of metrics; {} without experts.

    Of a stack: "load" [layers][experts], the share of the layer's choices, which sum to 1; "dropped", the share of them
    beyond the capacity; "entropy" [layers], the mean over tokens of that of the router's shares, in nats; "bias".
    top_k: the choices of a token.
    Communicates: an all_gather over pp of each bias.
    """
    leaves, found = pytree.named_leaves(params), dict[str, Any]()
    for name, load in tables.items():
        stack, _, kind = name.rpartition("/")
        if kind != LOAD:
            continue
        every = load.sum(-1, keepdim=True).clamp_min(1.0)
        kept = {LOAD: load / every, ENTROPY: tables[f"{stack}/{ENTROPY}"] / (every[:, 0] / top_k)}
        if f"{stack}/{DROPPED}" in tables:
            kept[DROPPED] = tables[f"{stack}/{DROPPED}"] / every
        if (bias := f"{stack}/{BIAS}") in leaves:
            spec = plan.leaves[bias].params
            kept[BIAS] = gather_layers(leaves[bias], spec, plan.mesh, leaf=bias) if spec.rows else leaves[bias]
        found[stack.split("/")[0]] = {what: rounded(x.tolist()) for what, x in kept.items()}
    return {"experts": found} if found else {}


def rounded(value: Any) -> Any:
    """Nested lists of numbers with six significant digits: a row is read by people too."""
    return [rounded(one) for one in value] if isinstance(value, list) else float(f"{value:.6g}")
