"""Leaves that no gradient moves but a rule, once a step: the bias by which experts are balanced, for instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.models import base
from fzero.sharding import Plan, Spec
from fzero.sharding.slices import is_stacked, narrow_to
from fzero.train.state import TrainState


def move_leaves(
    model: Any, plan: Plan, state: TrainState, tables: Mapping[str, Tensor], skipped: Tensor | None, *, donate: bool
) -> TrainState:
    """The state with the leaves of `Model.leaf_rules` moved by their rules; as they are if the step is skipped.

    tables: the sums of a step over all of its micro-batches and ranks, so that every rank moves its layers alike.
    donate: write into the leaves. Raises KeyError for a rule whose table the loss does not give.
    """
    rules = {name: rule for name, rule in model.leaf_rules.items() if rule} if isinstance(model, base.Model) else {}
    if not rules:
        return state
    leaves = pytree.named_leaves(state.params)
    for name, rule in rules.items():
        spec, stack = plan.leaves[name].params, name.split("/")[0]
        local_tables = {
            table_name: local_layers(table_name, x, spec, plan)
            for table_name, x in tables.items()
            if table_name.split("/")[0] == stack
        }
        leaf = leaves[name]
        value = rule(leaf, local_tables).to(leaf.dtype)
        value = value if skipped is None else torch.where(skipped, leaf, value)
        leaves[name] = leaf.copy_(value) if donate else value
    return state if donate else state._replace(params=pytree.from_named(leaves, state.params))


def local_layers(name: str, table: Tensor, spec: Spec, plan: Plan) -> Tensor:
    """The rows of a table that belong to the layers of a leaf which rests by `spec` on this rank."""
    assert is_stacked(name), f"{name}: a table has the name of a stack of layers"
    layers = replace(spec, dims=(spec.dims[0], *((),) * (table.dim() - 1)))
    return narrow_to(table, layers, plan.mesh)
