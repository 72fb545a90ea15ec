"""Which leaf of an optimizer's state is which after a transformation was put around it, or left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fzero.core import pytree

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
    """{leaf of a state `new_names` its optimizer changed: the leaf `old_names` with its values}; what is new is left
    out.

    Members are known by their leaves, wherever they are: first those with the same ones, then those with the most in
    common. Raises ValueError where two members have the same leaves and their number changes.

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
