"""Trees and the names of their leaves."""

from typing import NamedTuple

import pytest
import torch

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


def test_flatten_and_unflatten_are_inverse():
    leaves, treedef = pytree.flatten(TREE)
    assert pytree.unflatten(leaves, treedef) == TREE
    again = pytree.unflatten([10 * i for i in range(7)], treedef)
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
