"""Trees and the names of their leaves."""

import dataclasses
import random
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree

from fzero.core import pytree


class Pair(NamedTuple):
    left: object
    right: object


TREE = {"blocks": {"attn": {"w_q": 1, "b_q": 2}}, "list": [3, (4, Pair(5, {"x": 6}))], "empty": (), "last": None}
NAMES = ["blocks/attn/w_q", "blocks/attn/b_q", "list/0", "list/1/0", "list/1/1/left", "list/1/1/right/x", "last"]


def test_names_are_the_paths_in_flatten_order():
    assert pytree.names(TREE) == NAMES
    assert pytree.leaves(TREE) == [1, 2, 3, 4, 5, 6, None]
    assert pytree.named_leaves(TREE) == dict(zip(NAMES, pytree.leaves(TREE)))
    assert pytree.names(7) == [""]


class Registered:
    def __init__(self, *values):
        self.values = values


torch_pytree.register_pytree_node(
    Registered,
    lambda node: (list(node.values), None),
    lambda values, _: Registered(*values),
    flatten_with_keys_fn=lambda node: ([(torch_pytree.SequenceKey(i), x) for i, x in enumerate(node.values)], None),
    serialized_type_name="fzero.tests.Registered",
)


class Own(dict):
    """A leaf: torch knows dict, and not what is made of it."""


def some_tree(draw, depth=3):
    """A random tree of all kinds of nodes, and of leaves that are like them."""
    if depth == 0 or draw.random() < 0.2:
        leaves = (torch.ones(2), torch.nn.Parameter(torch.ones(1)), 1, 2.0, True, "text", None, Own(a=1), {1}, b"", int)
        return draw.choice((*leaves, torch.Size([2, 3]), np.ones(2)))
    inner = [some_tree(draw, depth - 1) for _ in range(draw.randrange(4))]
    keyed = {draw.choice((f"k{i}", i, (i, "k"))): value for i, value in enumerate(inner)}
    nodes = (inner, tuple(inner), keyed, Pair(*[*inner, 0, 0][:2]))
    others = (OrderedDict(keyed), defaultdict(list, keyed), deque(inner), Registered(*inner))
    return draw.choice((*nodes, *others, torch.return_types.max((torch.ones(1), 5))))


def changed(draw, tree):
    """Another tree: of the same structure, or cut, or with other keys, or of another kind."""
    leaves, treedef = torch_pytree.tree_flatten(tree)
    same = torch_pytree.tree_unflatten([object() for _ in leaves], treedef)
    if not isinstance(same, (dict, list, tuple)) or draw.random() < 0.4:
        return same
    if isinstance(same, dict):
        items = list(same.items())
        return dict(draw.choice((items[1:], items[::-1], [("other", value) for _, value in items])))
    return draw.choice((list(same), tuple(same), list(same)[1:]))


def outcome(f, *args):
    """(the leaves, the structure) of a result, or what a ValueError says."""
    try:
        return torch_pytree.tree_flatten(f(*args))
    except ValueError as error:
        return [str(error)], None


def identical(a, b):
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(x is y or x == y for x, y in zip(a[0], b[0]))


def names_by_torch(tree):
    parts = [path for path, _ in torch_pytree.tree_flatten_with_path(tree)[0]]
    return ["/".join(str(getattr(key, dataclasses.fields(key)[0].name)) for key in path) for path in parts]


def test_trees_are_flattened_and_mapped_as_torch_does():
    draw = random.Random(0)
    for _ in range(200):
        tree = some_tree(draw)
        expected = torch_pytree.tree_flatten(tree)
        assert identical(pytree.flatten(tree), expected) and identical((pytree.leaves(tree), expected[1]), expected)
        assert hash(pytree.flatten(tree)[1]) == hash(expected[1])
        for treedef in (pytree.flatten(tree)[1], expected[1]):
            built, theirs = (f(expected[0], treedef) for f in (pytree.unflatten, torch_pytree.tree_unflatten))
            assert identical(torch_pytree.tree_flatten(built), torch_pytree.tree_flatten(theirs))
        names = names_by_torch(tree)
        if len(set(names)) == len(names):
            assert pytree.names(tree) == names
            assert identical((list(pytree.named_leaves(tree).values()), expected[1]), expected)
            named = torch_pytree.tree_unflatten(list(zip(names, expected[0])), expected[1])
            assert identical(outcome(pytree.map_named, lambda *x: x, tree), torch_pytree.tree_flatten(named))
        for others in ((), (tree,), (changed(draw, tree),)):
            given = (lambda *x: x, tree, *others)
            assert identical(outcome(pytree.map, *given), outcome(torch_pytree.tree_map, *given))


def test_flatten_and_unflatten_are_inverse():
    leaves, treedef = pytree.flatten(TREE)
    assert pytree.unflatten(leaves, treedef) == TREE
    again = pytree.unflatten([10 * i for i in range(7)], treedef)
    for wrong in (leaves[1:], [*leaves, 1]):
        with pytest.raises(ValueError, match=rf"has length {len(wrong)} but the spec refers to .* {len(leaves)} items"):
            pytree.unflatten(wrong, treedef)
    assert again["list"][1][1] == Pair(40, {"x": 50}) and isinstance(again["list"][1][1], Pair) and again["empty"] == ()


def test_map_takes_the_leaves_of_further_trees_by_key():
    assert pytree.map(lambda a, b: a - b, {"x": 5, "y": [7]}, {"y": [1], "x": 2}) == {"x": 3, "y": [6]}
    assert pytree.map_named(lambda name, a, b: f"{name}={a}{b}", {"x": 5, "y": [7]}, {"x": "a", "y": ["b"]}) == {
        "x": "x=5a",
        "y": ["y/0=7b"],
    }


def test_map_refuses_another_structure():
    for other in ({"x": 1}, {"x": 1, "z": [2]}, {"x": 1, "y": [2, 3]}, {"x": 1, "y": (2,)}):
        with pytest.raises(ValueError):
            pytree.map(lambda a, b: a, {"x": 5, "y": [7]}, other)


def test_from_named_is_the_strict_inverse():
    assert pytree.from_named(dict(reversed(pytree.named_leaves(TREE).items())), TREE) == TREE
    named = pytree.named_leaves({"w_in": 1, "w_out": 2})
    like = {"w_in": 0, "w_out": 0}
    assert pytree.from_named(named, like) == {"w_in": 1, "w_out": 2}
    with pytest.raises(ValueError, match=r"missing w_out$"):
        pytree.from_named({"w_in": 1}, like)
    with pytest.raises(ValueError, match=r"missing w_out; extra w_oout \(did you mean w_out\?\)"):
        pytree.from_named({"w_in": 1, "w_oout": 2}, like)
    with pytest.raises(ValueError, match=r"missing 0, 1, 2, 3, 4 and 3 more"):
        pytree.from_named({}, list(range(8)))


def test_names_that_coincide_are_refused():
    with pytest.raises(ValueError, match="a/b"):
        pytree.named_leaves({"a/b": 1, "a": {"b": 2}})


def test_split_and_merge_are_inverse():
    tree = {"w": torch.ones(2, 2), "b": torch.zeros(2), "n": {"w": torch.ones(3)}}
    chosen, rest = pytree.split(tree, lambda name, leaf: name.endswith("w") and leaf.dim() == 2)
    assert list(chosen) == ["w"] and list(rest) == ["b", "n/w"]
    merged = pytree.merge(chosen, rest, tree)
    assert pytree.names(merged) == pytree.names(tree)
    assert all(a is b for a, b in zip(pytree.leaves(merged), pytree.leaves(tree)))


def test_nearest():
    assert pytree.nearest("w_inn", ["w_in", "bias"]) == " (did you mean w_in?)"
    assert pytree.nearest("zzz", ["w_in", "bias"]) == ""
