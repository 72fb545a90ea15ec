"""The leaves of an optimizer's state by name, before and after a transformation was put around it; and updates by
units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.sharding.slices import is_stacked, shard_dim

MemberLeaves = dict[tuple[str, str | None], str]  # {(kind, parameter or None): name of the leaf}


def groups_of(names: Iterable[str], params: Collection[str]) -> dict[str, MemberLeaves]:
    """{prefix: the leaves of one member of an optimizer} of the names of its state.

    >>> groups_of(["1/count", "1/m/w"], ["w"])
    {'1/': {('count', None): '1/count', ('m', 'w'): '1/m/w'}}
    """
    groups: dict[str, MemberLeaves] = {}
    names = list(names)
    owner = pytree.owners([f"/{name}" for name in names], params)
    for name in names:
        param = owner[f"/{name}"]
        path = name if param is None else name[: len(name) - len(param)].rstrip("/")
        prefix, _, kind = path.rpartition("/")
        groups.setdefault(f"{prefix}/" if prefix else "", {})[kind, param] = name
    return groups


def same_leaves(old_names: Iterable[str], new_names: Iterable[str], params: Collection[str]) -> dict[str, str]:
    """{leaf of the state `new_names`: the leaf of `old_names` with its values}; what is new is left out.

    >>> same_leaves(["count", "m/w"], ["inner/1/count", "inner/1/m/w", "average/w"], ["w"])
    {'inner/1/count': 'count', 'inner/1/m/w': 'm/w'}
    """
    old, new = groups_of(old_names, params), groups_of(new_names, params)
    pairs = {prefix: prefix for prefix in new if prefix in old and new[prefix].keys() == old[prefix].keys()}
    for prefix, group in new.items():
        if prefix in pairs:
            continue
        twins = [p for p in new if new[p].keys() == group.keys() and p not in pairs]
        fitting = [p for p in old if old[p].keys() == group.keys() and p not in pairs.values()]
        if fitting and len(twins) != len(fitting):
            raise ValueError(
                f"the optimizer's state has {len(fitting)} members with the leaves of {fitting[0] or 'the first'} and "
                f"the new one's {len(twins)}; change one of them at a time"
            )
        pairs |= zip(twins, fitting)
    for prefix, group in new.items():
        free = [p for p in old if p not in pairs.values()]
        moments = lambda p, g=group: sum(key[1] is not None for key in old[p].keys() & g.keys())  # noqa: E731
        best = max(free, key=moments, default="")
        if prefix not in pairs and free and moments(best):
            pairs[prefix] = best
    return {
        name: old[pairs[prefix]][key]
        for prefix, group in new.items()
        if prefix in pairs
        for key, name in group.items()
        if key in old[pairs[prefix]]
    }


def columns_of(state: Tree, params: list[str]) -> tuple[dict[str, Any], dict[str, str | None]]:
    """({name: leaf of an optimizer's state}, {name: its parameter, None for a leaf of none})."""
    columns = pytree.named_leaves(state)
    # Names of the state's leaves have no path prefix if the state is itself a parameter tree.
    owner = pytree.owners([f"/{name}" for name in columns], params)
    return columns, {name.removeprefix("/"): param for name, param in owner.items()}


def is_layered(name: str, shape: Sequence[int], column: Sequence[int]) -> bool:
    """Whether a leaf of a state has layers as its parameter has."""
    return is_stacked(name) and len(shape) > 0 and tuple(column[:1]) == tuple(shape[:1])


def smallest_unit(name: str, shape: Sequence[int], columns: Iterable[Sequence[int]], unit: str) -> str:
    """The smallest part of a parameter that is updated apart from the rest: "row", "layer" or "leaf"."""
    # Where a column has no layers (a number for a whole stack), all of them are updated at once; where one has other
    # rows (a number for each layer, or each row, which lie otherwise in pages), all rows of a layer.
    lead, columns = shard_dim(name), [tuple(column) for column in columns]
    if lead and not all(is_layered(name, shape, column) for column in columns):
        return "leaf"
    return "row" if unit == "row" and all(column[lead:] == tuple(shape[lead:]) for column in columns) else "layer"


@torch.no_grad()
def select_state(names: Tree, owner: Mapping[str, str | None], parameters: Container[str | None]) -> Tree:
    """The part of a state that some parameters have: their columns and what is of no parameter."""
    trees = {column.removesuffix(param).removesuffix("/") for column, param in owner.items() if param is not None}
    return pytree.prune(names, lambda column: owner[column] is None or owner[column] in parameters, trees)


def add_in_units(
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree] | None:
    """(params, state) after `update`, in their buffers, one layer at a time; None where leaves cannot be told apart."""
    leaves, g_of = pytree.named_leaves(params), pytree.named_leaves(grads)
    columns, owner = columns_of(state, list(leaves))
    shared = [name for name, param in owner.items() if param is None]
    if not leaves:
        return None  # what is of no parameter moves all the same
    if any(columns[name].dim() for name in shared) or (shared and not all(p.dim() for p in leaves.values())):
        return None
    names = pytree.map_named(lambda name, _: name, params), pytree.map_named(lambda name, _: name, state)
    parts = {}
    for leaf in leaves:
        like = pytree.prune(names[0], lambda name, leaf=leaf: name == leaf)
        state_names = select_state(names[1], owner, (leaf,))
        if pytree.leaves(like) != [leaf] or any(owner[name] not in (None, leaf) for name in pytree.leaves(state_names)):
            return None  # a tuple of leaves, of which none can be left out
        parts[leaf] = like, state_names
    new_shared: dict[str, Tensor] = {}
    for leaf, (like, state_names) in parts.items():
        leaf_columns = [columns[name] for name in pytree.leaves(state_names) if owner[name] is not None]
        p, layers = leaves[leaf], 0
        if (
            is_stacked(leaf)
            and p.dim()
            and smallest_unit(leaf, p.shape, [x.shape for x in leaf_columns], "layer") == "layer"
        ):
            layers = p.shape[0]
        for layer in range(layers) if layers else [None]:

            def cut(x: Tensor, layer: int | None = layer) -> Tensor:
                return x if layer is None else x[layer : layer + 1]

            def unit_column(name: str, cut: Callable[[Tensor], Tensor] = cut) -> Tensor:
                return columns[name] if owner[name] is None else cut(columns[name])

            unit_inputs = pytree.from_named({leaf: cut(g_of[leaf])}, like), pytree.map(unit_column, state_names)
            updates, new = update(*unit_inputs, pytree.from_named({leaf: cut(p)}, like))
            cut(p).add_(pytree.leaves(updates)[0])
            for name, value in zip(pytree.leaves(state_names), pytree.leaves(new)):
                if owner[name] is None:
                    new_shared[name] = value
                else:
                    unit_column(name).copy_(value)
    return params, pytree.map_named(lambda name, x: new_shared.get(name, x), state)
