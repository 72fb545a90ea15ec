"""Graph passes: an operator that writes a tensor finds its largest magnitude too, and twin calls become one.

A float8 product needs the largest magnitude of its operands first, a pass over memory each. A kernel of ours that
writes the operand can find it as it writes: maxima are exact and depend on no order, so the bits stay the same.

And where a graph rounds a matrix for its rows and for its columns, one call does both, by one read.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_ATEN = torch.ops.aten
# An operator of (x, given, *rest) -> one of (x, given for x, given for x turned, *rest), whose results are those of the
# first for x, and then those for x turned. kernels/float8.py adds its own.
PAIRED_OPERATORS: dict[Any, Any] = {}


def merge_transposed_calls(graph: GraphModule) -> None:
    """Replace two calls of an operator of BOTH, for a matrix and for the matrix turned, by one."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and node.target in PAIRED_OPERATORS]
    plain = {(node.target, node.args[0], str(node.args[2:])): node for node in calls}
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    changed = False
    for node in calls:
        first = plain.get((node.target, _transpose_source(node.args[0]), str(node.args[2:])))
        if first is not None and order[first] < order[node] and _move_before(graph, node.args[1], first, order):
            turned = node.args[0]
            _merge_calls(graph, first, node)
            if not turned.users:
                graph.graph.erase_node(turned)
            changed = True
    if changed:
        graph.recompile()


def _transpose_source(node: Any) -> Any:
    """The matrix that a node is the transpose of; None if it is none."""
    if node.op != "call_function":
        return None
    turned = node.target is _ATEN.t.default
    turned |= node.target is _ATEN.permute.default and list(node.args[1]) == [1, 0]
    turned |= node.target is _ATEN.transpose.int and {dim % 2 for dim in node.args[1:3]} == {0, 1}
    return node.args[0] if turned else None


def _move_before(graph: GraphModule, node: Any, first: Node, order: dict[Node, int]) -> bool:
    """Let a node be computed before `first`; False if it depends on `first` or on several values."""
    chain: list[Node] = []
    while order[node] > order[first]:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.all_input_nodes[0] is first:
            return False
        chain.append(node)
        (node,) = node.all_input_nodes
    for later in reversed(chain):
        first.prepend(later)
        order[later] = order[first] - 1  # before it, which is all that is asked
    return True


def _merge_calls(graph: GraphModule, first: Node, turned: Node) -> None:
    """The call for both in place of these two."""
    arguments: Any = (first.args[0], first.args[1], turned.args[1], *first.args[2:])
    count = len(first.meta["val"])
    with graph.graph.inserting_before(first):
        merged = graph.graph.call_function(PAIRED_OPERATORS[first.target], arguments)
        # Not the inputs' strides, which are noted of a call with other inputs.
        merged.meta.update({key: value for key, value in first.meta.items() if key != "eager_input_vals"})
        merged.meta["val"] = (*first.meta["val"], *turned.meta["val"])
    for node, offset in ((first, 0), (turned, count)):
        for item in list(node.users):
            assert item.target is operator.getitem
            number: Any = item.args[1]
            with graph.graph.inserting_before(item if offset else first):
                result = graph.graph.call_function(operator.getitem, (merged, number + offset))
            result.meta.update(item.meta)
            item.replace_all_uses_with(result)
            graph.graph.erase_node(item)
        graph.graph.erase_node(node)


VECTOR_NORM, ABS, AMAX = _ATEN.linalg_vector_norm.default, _ATEN.abs.default, _ATEN.amax.default


class Twin(NamedTuple):
    """An operator that gives the results of another one first, and then largest magnitudes of some of them."""

    operator: Any
    magnitude_index: dict[int, int]  # the number of a result -> the number of its largest magnitudes


TWINS: dict[Any, Twin] = {}  # by operator; a twin is its own


def add_twin(plain: Any, twin: Any, magnitude_index: dict[int, int]) -> None:
    """Say that `twin` gives what `plain` gives, and the largest magnitudes of results at `magnitude_index`."""
    TWINS[plain] = TWINS[twin] = Twin(twin, magnitude_index)


class MagnitudeRequest(NamedTuple):
    """Whose largest magnitude a node of a graph is."""

    call: Node  # of an operator of TWINS
    result: int
    by_row: bool  # of each row, else of all


def fuse_max_magnitudes(graph: GraphModule) -> None:
    """Take the largest magnitudes that a joint graph asks for from the twins of the operators that write."""
    requests = [(node, request) for node in graph.graph.nodes if (request := _magnitude_request(node)) is not None]
    twins: dict[Node, Node] = {}
    for node, (call, result, by_row) in requests:
        twin_call = twins.setdefault(call, call)
        if twin_call is call:
            twin_call = twins[call] = _insert_twin(graph, call)
        with graph.graph.inserting_before(node):
            magnitudes = _item(graph, twin_call, TWINS[twin_call.target].magnitude_index[result])
            maximum = graph.graph.call_function(AMAX, (magnitudes, [1] if by_row else []))
        maximum.meta.update(node.meta)
        node.replace_all_uses_with(maximum)
    if not requests:
        return
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and node.target in (VECTOR_NORM, ABS, AMAX) and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


def _magnitude_request(node: Node) -> MagnitudeRequest | None:
    """What a node asks for, if it is a largest magnitude of what an operator of TWINS has written."""
    source, dims = _magnitude(node)
    if source is None:
        return None
    shape = _val(source).shape
    by_row = bool(dims)
    if by_row and [dim % len(shape) for dim in dims] != [1]:
        return None
    while source.target is _ATEN.view.default:
        source = source.args[0]
    result = 0
    if source.target is operator.getitem:
        source, result = source.args
    if source.target not in TWINS or result not in TWINS[source.target].magnitude_index:
        return None
    if by_row and (len(shape) != 2 or _val(source, result).shape[-1] != shape[1]):
        return None
    return MagnitudeRequest(source, result, by_row)


def _magnitude(node: Node) -> tuple[Any, list[int]]:
    """(the tensor whose largest magnitude a node is, over which dims: all if there are none); (None, []) else."""
    arguments: Any = (*node.args, None, None, None)
    if node.op == "call_function" and not node.kwargs and node.target is VECTOR_NORM:
        source, order, dims = arguments[:3]
        return (source, dims or []) if order == float("inf") and node.args[3:] in ((), (False,)) else (None, [])
    if node.op == "call_function" and not node.kwargs and node.target is AMAX and arguments[0].target is ABS:
        return (arguments[0].args[0], arguments[1] or []) if node.args[2:] in ((), (False,)) else (None, [])
    return None, []


def _val(node: Any, number: int = 0) -> Tensor:
    """A result of a node, without its numbers."""
    val = node.meta["val"]
    return val[number] if isinstance(val, (tuple, list)) else val


def _item(graph: GraphModule, call: Node, number: int) -> Node:
    item = graph.graph.call_function(operator.getitem, (call, number))
    item.meta["val"] = call.meta["val"][number]
    return item


def _insert_twin(graph: GraphModule, call: Node) -> Node:
    """The twin in place of a call."""
    twin = TWINS[call.target].operator
    with graph.graph.inserting_before(call):
        twin_call = graph.graph.call_function(twin, call.args, call.kwargs)
        twin_call.meta.update(call.meta)
        values: Any = map_arg(call.args, lambda n: n.meta["val"])
        twin_call.meta["val"] = twin(*values)
        if isinstance(call.meta["val"], (tuple, list)):
            call.replace_all_uses_with(twin_call)
        else:
            first = _item(graph, twin_call, 0)
            call.replace_all_uses_with(first)
    graph.graph.erase_node(call)
    return twin_call
