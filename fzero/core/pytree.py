"""Trees of tensors and the names of their leaves.

A tree is nested dicts, lists, tuples and NamedTuples; everything else (None too) is a leaf, named by the path to it:
`params["blocks"]["attn"]["w_q"]` is `"blocks/attn/w_q"`. This is the only file that imports torch.utils._pytree, so
that trees here and under torch.func are flattened alike; the four kinds are walked here, as torch's functions are slow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch

from fzero.core.text_parsing import nearest
from fzero.core.torch_private import torch_pytree as _pytree

Tree = Any
TreeDef = _pytree.TreeSpec
_LEAF: TreeDef = _pytree.tree_flatten(None)[1]
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))  # classes of most leaves
_FILLED = (dict, list, tuple, _pytree.namedtuple)  # the kinds of nodes that are walked here
_NODES = _pytree.SUPPORTED_NODES  # the classes of nodes that are known by now, but for those of NamedTuples


@functools.lru_cache(maxsize=1024)
def _is_named(kind: type) -> bool:
    """Whether a class is a NamedTuple's."""
    return _pytree.is_namedtuple_class(kind)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of `tree`, in flatten order."""
    collected: list[Any] = []
    _collect(tree, collected)
    return collected


def _collect(tree: Tree, collected: list[Any]) -> None:
    kind = type(tree)
    if kind in _PLAIN:
        collected.append(tree)
    elif kind is dict:
        for value in tree.values():
            _collect(value, collected)
    elif kind is list or kind is tuple or _is_named(kind):
        for value in tree:
            _collect(value, collected)
    elif kind in _NODES:
        collected += _pytree.tree_leaves(tree)
    else:
        collected.append(tree)


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """The leaves of `tree` and the structure that `unflatten` needs."""
    collected: list[Any] = []
    return collected, _structure(tree, collected)


def _structure(tree: Tree, collected: list[Any]) -> TreeDef:
    """The structure of `tree`, whose leaves are appended to `collected`."""
    kind = type(tree)
    if kind in _PLAIN:
        collected.append(tree)
        return _LEAF
    if kind is dict:
        return TreeDef(dict, list(tree), [_structure(value, collected) for value in tree.values()])
    if kind is list or kind is tuple:
        return TreeDef(kind, None, [_structure(value, collected) for value in tree])
    if _is_named(kind):
        return TreeDef(_pytree.namedtuple, kind, [_structure(value, collected) for value in tree])
    if kind in _NODES:
        inner, treedef = _pytree.tree_flatten(tree)
        collected += inner
        return treedef
    collected.append(tree)
    return _LEAF


def unflatten(leaves: Iterable[Any], treedef: TreeDef) -> Tree:
    """The tree of structure `treedef` with these leaves: the inverse of `flatten`; raises ValueError if there are more
    or fewer."""
    leaf_list = leaves if isinstance(leaves, (list, tuple)) else list(leaves)
    if len(leaf_list) != treedef.num_leaves:
        return _pytree.tree_unflatten(leaf_list, treedef)  # which says how many it takes
    return _fill(treedef, iter(leaf_list))


def _fill(treedef: TreeDef, remaining: Iterator[Any]) -> Tree:
    """The tree of structure `treedef` of the next leaves."""
    kind = treedef.type
    if kind is None:
        return next(remaining)
    if kind not in _FILLED:
        return _pytree.tree_unflatten([next(remaining) for _ in range(treedef.num_leaves)], treedef)
    inner = [next(remaining) if child is _LEAF else _fill(child, remaining) for child in treedef.children()]
    if kind is list:
        return inner
    if kind is tuple:
        return tuple(inner)
    return dict(zip(treedef.context, inner)) if kind is dict else treedef.context(*inner)


def map(fn: Callable[..., Any], tree: Tree, *trees: Tree) -> Tree:
    """Return a tree of `fn(leaf, *leaves of rest)`; raises ValueError if `trees` has another structure."""
    if not trees:
        return _map(fn, tree)
    columns: list[list[Any]] = [[] for _ in trees]
    if not all(_match_leaves(tree, peer, column) for peer, column in zip(trees, columns)):
        return _pytree.tree_map(fn, tree, *trees)  # which says where they differ
    leaf_rows = zip(*columns)
    return _map(lambda leaf: fn(leaf, *next(leaf_rows)), tree)


def _map(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    kind = type(tree)
    if kind in _PLAIN:
        return fn(tree)
    if kind is dict:
        return {key: _map(fn, value) for key, value in tree.items()}
    if kind is list:
        return [_map(fn, value) for value in tree]
    if kind is tuple:
        return tuple([_map(fn, value) for value in tree])
    if _is_named(kind):
        return kind(*[_map(fn, value) for value in tree])
    return _pytree.tree_map(fn, tree) if kind in _NODES else fn(tree)


def _match_leaves(tree: Tree, peer: Tree, column: list[Any]) -> bool:
    """Append to `column` what `peer` has for the leaves of `tree`; false where their nodes differ."""
    kind = type(tree)
    if kind in _PLAIN or not (kind in _NODES or _is_named(kind)):
        column.append(peer)
        return True
    if type(peer) is not kind:
        return False
    if kind is dict:
        return len(tree) == len(peer) and all(
            key in peer and _match_leaves(value, peer[key], column) for key, value in tree.items()
        )
    if kind is list or kind is tuple or _is_named(kind):
        return len(tree) == len(peer) and all(
            _match_leaves(value, peer_value, column) for value, peer_value in zip(tree, peer)
        )
    return False


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"a tree path of unknown kind: {key!r}")


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Return `{name: leaf}` in flatten order; raises ValueError if two leaves have the same name."""
    named: dict[str, Any] = {}
    _name(tree, "", named)
    return named


def _name(tree: Tree, path: str, named: dict[str, Any]) -> None:
    """Enter the leaves of a node. path: what leads to it, each key after a slash."""
    kind = type(tree)
    if kind is dict:
        for key, value in tree.items():
            _name(value, f"{path}/{key}", named)
    elif kind is list or kind is tuple:
        for i, value in enumerate(tree):
            _name(value, f"{path}/{i}", named)
    elif kind not in _PLAIN and _is_named(kind):
        for key, value in zip(kind._fields, tree):
            _name(value, f"{path}/{key}", named)
    else:
        inner = _pytree.tree_flatten_with_path(tree)[0] if kind in _NODES else [((), tree)]
        for keys, leaf in inner:
            name = "".join((path, *(f"/{_key_name(key)}" for key in keys)))[1:]
            if name in named:
                raise ValueError(f"two leaves of the tree are called {name!r}; rename one")
            named[name] = leaf


def names(tree: Tree) -> list[str]:
    """The names of the leaves, in flatten order."""
    return list(named_leaves(tree))


def map_named(fn: Callable[..., Any], tree: Tree, *trees: Tree) -> Tree:
    """A tree of `fn(name, leaf, *leaves of rest)`."""
    ordered = iter(names(tree))
    return map(lambda leaf, *peers: fn(next(ordered), leaf, *peers), tree, *trees)


def from_named(named: dict[str, Any], like: Tree) -> Tree:
    """The tree of the structure of `like` whose leaves are `named`: the inverse of `named_leaves`.

    Raises ValueError naming the missing and the extra leaves.
    """
    expected = names(like)
    missing = [n for n in expected if n not in named]
    extra = sorted(set(named) - set(expected))
    if missing or extra:
        faults = []
        if missing:
            faults.append(
                f"missing {', '.join(n or 'a single leaf, no tree' for n in missing[:5])}"
                + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            )
        if extra:
            labels = [f"{n}{nearest(n, missing or expected)}" if n else "a single leaf, no tree" for n in extra[:5]]
            faults.append(f"extra {', '.join(labels)}")
        raise ValueError(f"the leaves do not match the tree: {'; '.join(faults)}")
    ordered = iter(expected)
    return map(lambda _: named[next(ordered)], like)


def nest(named: dict[str, Any]) -> dict[str, Any]:
    """The tree of nested dicts whose leaves have these names: the inverse of `named_leaves` for such a tree."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def owners(names: Iterable[str], params: Iterable[str]) -> dict[str, str | None]:
    """{name of a leaf of a state: name of its parameter}; None for a leaf of no parameter, such as a count of steps.

    A leaf is a parameter's if its name ends with it: `opt_state/m/blocks/w` is of `blocks/w`.
    """
    param_names = set(params)
    owner_names: dict[str, str | None] = {}
    for name in names:
        parts = name.split("/")
        tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
        owner_names[name] = next((tail for tail in tails if tail in param_names), None)
    return owner_names


def prune(tree: Tree, predicate: Callable[[str], bool], nodes: Container[str] = ()) -> Tree:
    """Return the tree without the leaves for whose name `predicate` is false.

    A dict loses entries that become empty by that, but for the `nodes` of these names; a tuple keeps its length, with
    pruned nodes inside.
    """

    def walk(
        tree: Tree, path: str
    ) -> tuple[Tree, bool]:  # (the remaining tree, whether all of its leaves were removed)
        if isinstance(tree, dict):
            inner = {key: walk(value, f"{path}/{key}") for key, value in tree.items()}
            remaining = {key: value for key, (value, lost) in inner.items() if not lost}
            return remaining, bool(tree) and not remaining and path[1:] not in nodes
        if isinstance(tree, (tuple, list)):
            keys = getattr(tree, "_fields", range(len(tree)))
            values = [walk(value, f"{path}/{key}")[0] for key, value in zip(keys, tree)]
            return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values), False
        return tree, not predicate(path[1:])

    return walk(tree, "")[0]


def split(tree: Tree, select: Callable[[str, Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the leaves into flat dicts by name, `(chosen, rest)`: those for which `select(name, leaf)` is true, and the
    others.
    """
    chosen, remainder = {}, {}
    for name, leaf in named_leaves(tree).items():
        (chosen if select(name, leaf) else remainder)[name] = leaf
    return chosen, remainder


def merge(chosen: dict[str, Any], remainder: dict[str, Any], like: Tree) -> Tree:
    """Merge two flat dicts into a tree of the structure of `like`: the inverse of `split`."""
    return from_named({**chosen, **remainder}, like)
