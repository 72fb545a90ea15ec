"""Trees of tensors and the names of their leaves.

A tree is nested dicts, lists, tuples and NamedTuples; everything else (None too) is a leaf. A leaf is named by the path
to it: `params["blocks"]["attn"]["w_q"]` is `"blocks/attn/w_q"`. This is the only file that imports torch.utils._pytree,
so that trees here and trees under torch.func are flattened alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fzero.core.foreign import nearest
from fzero.core.torch_private import torch_pytree as _pytree

Tree = Any
TreeDef = _pytree.TreeSpec


def leaves(tree: Tree) -> list[Any]:
    """The leaves of `tree`, in flatten order."""
    return _pytree.tree_leaves(tree)


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """The leaves of `tree` and the structure that `unflatten` needs."""
    return _pytree.tree_flatten(tree)


def unflatten(leaves: Iterable[Any], treedef: TreeDef) -> Tree:
    """The tree of structure `treedef` with these leaves: the inverse of `flatten`."""
    return _pytree.tree_unflatten(leaves, treedef)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Return a tree of `fn(leaf, *leaves of rest)`; raises ValueError if `rest` has another structure."""
    return _pytree.tree_map(fn, tree, *rest)


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"a tree path of unknown kind: {key!r}")


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Return `{name: leaf}` in flatten order; raises ValueError if two leaves have the same name."""
    named: dict[str, Any] = {}
    for path, leaf in _pytree.tree_flatten_with_path(tree)[0]:
        name = "/".join(_key_name(k) for k in path)
        if name in named:
            raise ValueError(f"two leaves of the tree are called {name!r}; rename one")
        named[name] = leaf
    return named


def names(tree: Tree) -> list[str]:
    """The names of the leaves, in flatten order."""
    return list(named_leaves(tree))


def map_named(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """A tree of `fn(name, leaf, *leaves of rest)`."""
    return map(fn, unflatten(names(tree), flatten(tree)[1]), tree, *rest)


def from_named(named: dict[str, Any], like: Tree) -> Tree:
    """The tree of the structure of `like` whose leaves are `named`: the inverse of `named_leaves`.

    Raises ValueError naming the missing and the extra leaves.
    """
    wanted = names(like)
    missing = [n for n in wanted if n not in named]
    extra = sorted(set(named) - set(wanted))
    if missing or extra:
        faults = []
        if missing:
            faults.append(
                f"missing {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            )
        if extra:
            faults.append("extra " + ", ".join(f"{n}{nearest(n, missing or wanted)}" for n in extra[:5]))
        raise ValueError(f"the leaves do not match the tree: {'; '.join(faults)}")
    return unflatten([named[n] for n in wanted], flatten(like)[1])


def nest(named: dict[str, Any]) -> dict[str, Any]:
    """The tree of nested dicts whose leaves have these names: the inverse of `named_leaves` for such a tree."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


def owners(names: Iterable[str], params: Iterable[str]) -> dict[str, str | None]:
    """{name of a leaf of a state: name of its parameter}; None for a leaf of no parameter, such as a count of steps.

    A leaf is a parameter's if its name ends with it: `opt_state/m/blocks/w` is of `blocks/w`.
    """
    known = set(params)
    found: dict[str, str | None] = {}
    for name in names:
        parts = name.split("/")
        tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
        found[name] = next((tail for tail in tails if tail in known), None)
    return found


def prune(tree: Tree, keep: Callable[[str], bool]) -> Tree:
    """Return the tree without the leaves for whose name `keep` is false.

    A dict loses entries that become empty by that; a tuple keeps its length, with pruned nodes inside.
    """

    def walk(
        tree: Tree, path: str
    ) -> tuple[Tree, bool]:  # (the remaining tree, whether all of its leaves were removed)
        if isinstance(tree, dict):
            inner = {key: walk(value, f"{path}/{key}") for key, value in tree.items()}
            left = {key: value for key, (value, lost) in inner.items() if not lost}
            return left, bool(tree) and not left
        if isinstance(tree, (tuple, list)):
            keys = getattr(tree, "_fields", range(len(tree)))
            values = [walk(value, f"{path}/{key}")[0] for key, value in zip(keys, tree)]
            return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values), False
        return tree, not keep(path[1:])

    return walk(tree, "")[0]


def split(tree: Tree, select: Callable[[str, Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the leaves into flat dicts by name, `(chosen, rest)`: those for which `select(name, leaf)` is true, and the
    others.
    """
    chosen, rest = {}, {}
    for name, leaf in named_leaves(tree).items():
        (chosen if select(name, leaf) else rest)[name] = leaf
    return chosen, rest


def merge(chosen: dict[str, Any], rest: dict[str, Any], like: Tree) -> Tree:
    """Merge two flat dicts into a tree of the structure of `like`: the inverse of `split`."""
    return from_named({**chosen, **rest}, like)
