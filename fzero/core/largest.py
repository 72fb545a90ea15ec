"""Let an operator that writes a tensor find the tensor's largest magnitude too, where a traced graph asks for it.

A float8 product needs the largest magnitude of its operands before it can round them, which is a pass over memory for
each operand. Where a kernel of ours has written the operand, the kernel can find it as it writes: maxima are exact and
depend on no order, so the bits stay the same. With one scale for a whole tensor the rounding itself cannot move there,
as the scale is known only when all of the tensor is.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_ATEN = torch.ops.aten
VECTOR_NORM, ABS, AMAX = _ATEN.linalg_vector_norm.default, _ATEN.abs.default, _ATEN.amax.default


class Twin(NamedTuple):
    """An operator that gives the results of another one first, and then largest magnitudes of some of them.

    Those of a result [..., N] are [rows, parts] in its dtype: of `parts` parts of each of its rows; NaN where there is
    one.
    """

    operator: Any
    places: dict[int, int]  # the number of a result -> the number of its largest magnitudes


TWINS: dict[Any, Twin] = {}  # by operator; a twin is its own


def add_twin(plain: Any, twin: Any, places: dict[int, int]) -> None:
    """Say that `twin` gives what `plain` gives, and the largest magnitudes of results at `places`."""
    TWINS[plain] = TWINS[twin] = Twin(twin, places)


class Asked(NamedTuple):
    """Whose largest magnitude a node of a graph is."""

    call: Node  # of an operator of TWINS
    result: int
    by_row: bool  # of each row, else of all


def take_largest(graph: GraphModule) -> None:
    """Take the largest magnitudes that a joint graph asks for from the operators that write the tensors, where these
    have a twin.

    Of a matrix the largest magnitude of all of it or of each row; one of each column is left as it is.
    """
    asked = [(node, found) for node in graph.graph.nodes if (found := _asked(node)) is not None]
    twins: dict[Node, Node] = {}
    for node, (call, result, by_row) in asked:
        made = twins.setdefault(call, call)
        if made is call:
            made = twins[call] = _with_twin(graph, call)
        with graph.graph.inserting_before(node):
            parts = _item(graph, made, TWINS[made.target].places[result])
            taken = graph.graph.call_function(AMAX, (parts, [1] if by_row else []))
        taken.meta.update(node.meta)
        node.replace_all_uses_with(taken)
    if not asked:
        return
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and node.target in (VECTOR_NORM, ABS, AMAX) and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


def _asked(node: Node) -> Asked | None:
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
    if source.target not in TWINS or result not in TWINS[source.target].places:
        return None
    if by_row and (len(shape) != 2 or _val(source, result).shape[-1] != shape[1]):
        return None
    return Asked(source, result, by_row)


def _magnitude(node: Node) -> tuple[Any, list[int]]:
    """(the tensor whose largest magnitude a node is, over which dims: all if there are none); (None, []) else."""
    given: Any = (*node.args, None, None, None)
    if node.op == "call_function" and not node.kwargs and node.target is VECTOR_NORM:
        source, order, dims = given[:3]
        return (source, dims or []) if order == float("inf") and node.args[3:] in ((), (False,)) else (None, [])
    if node.op == "call_function" and not node.kwargs and node.target is AMAX and given[0].target is ABS:
        return (given[0].args[0], given[1] or []) if node.args[2:] in ((), (False,)) else (None, [])
    return None, []


def _val(node: Any, number: int = 0) -> Tensor:
    """A result of a node, without its numbers."""
    val = node.meta["val"]
    return val[number] if isinstance(val, (tuple, list)) else val


def _item(graph: GraphModule, call: Node, number: int) -> Node:
    item = graph.graph.call_function(operator.getitem, (call, number))
    item.meta["val"] = call.meta["val"][number]
    return item


def _with_twin(graph: GraphModule, call: Node) -> Node:
    """The twin in place of a call."""
    twin = TWINS[call.target].operator
    with graph.graph.inserting_before(call):
        made = graph.graph.call_function(twin, call.args, call.kwargs)
        made.meta.update(call.meta)
        values: Any = map_arg(call.args, lambda n: n.meta["val"])
        made.meta["val"] = twin(*values)
        if isinstance(call.meta["val"], (tuple, list)):
            call.replace_all_uses_with(made)
        else:
            first = _item(graph, made, 0)
            call.replace_all_uses_with(first)
    graph.graph.erase_node(call)
    return made
