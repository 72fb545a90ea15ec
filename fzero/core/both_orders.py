"""Call an operator once for a matrix and for the matrix turned, where a pass of a split graph calls it for each.

A float8 product of values needs their numbers in the order of rows, and the one that gives the gradient by weights
those in the order of columns. Where a forward pass keeps the latter in place of the values, it makes both, by one read.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

_ATEN = torch.ops.aten
# An operator of (x, given, *rest) -> one of (x, given for x, given for x turned, *rest), whose results are those of the
# first for x, and then those for x turned. kernels/float8.py adds its own.
BOTH: dict[Any, Any] = {}


def make_both_orders(graph: GraphModule) -> None:
    """In a forward or backward graph, replace two calls of an operator of BOTH, for a matrix and for the matrix turned,
    by one."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and node.target in BOTH]
    plain = {(node.target, node.args[0], str(node.args[2:])): node for node in calls}
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    made = False
    for node in calls:
        first = plain.get((node.target, _unturned(node.args[0]), str(node.args[2:])))
        if first is not None and place[first] < place[node] and _move_before(graph, node.args[1], first, place):
            turned = node.args[0]
            _join(graph, first, node)
            if not turned.users:
                graph.graph.erase_node(turned)
            made = True
    if made:
        graph.recompile()


def _unturned(node: Any) -> Any:
    """The matrix that a node is the transpose of; None if it is none."""
    if node.op != "call_function":
        return None
    turned = node.target is _ATEN.t.default
    turned |= node.target is _ATEN.permute.default and list(node.args[1]) == [1, 0]
    turned |= node.target is _ATEN.transpose.int and {dim % 2 for dim in node.args[1:3]} == {0, 1}
    return node.args[0] if turned else None


def _move_before(graph: GraphModule, node: Any, first: Node, place: dict[Node, int]) -> bool:
    """Let a node be computed before `first`, with what it is made of; False if that depends on `first` or is made
    by something else than one value after another."""
    chain: list[Node] = []
    while place[node] > place[first]:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.all_input_nodes[0] is first:
            return False
        chain.append(node)
        (node,) = node.all_input_nodes
    for later in reversed(chain):
        first.prepend(later)
        place[later] = place[first] - 1  # before it, which is all that is asked
    return True


def _join(graph: GraphModule, first: Node, turned: Node) -> None:
    """The call for both in place of these two."""
    given: Any = (first.args[0], first.args[1], turned.args[1], *first.args[2:])
    count = len(first.meta["val"])
    with graph.graph.inserting_before(first):
        both = graph.graph.call_function(BOTH[first.target], given)
        # Not the inputs' strides, which are noted of a call with other inputs.
        both.meta.update({key: value for key, value in first.meta.items() if key != "eager_input_vals"})
        both.meta["val"] = (*first.meta["val"], *turned.meta["val"])
    for node, offset in ((first, 0), (turned, count)):
        for item in list(node.users):
            assert item.target is operator.getitem
            number: Any = item.args[1]
            with graph.graph.inserting_before(item if offset else first):
                result = graph.graph.call_function(operator.getitem, (both, number + offset))
            result.meta.update(item.meta)
            item.replace_all_uses_with(result)
            graph.graph.erase_node(item)
        graph.graph.erase_node(node)
