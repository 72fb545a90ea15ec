"""Keep registered operators (the collectives) in place while a traced graph is split and compiled.

All ranks trace the same program, but their graphs differ in constants, so the compiler could reorder or drop a
collective on one rank only; the ranks would then hang. `pin_ordered` prevents that when a joint graph is split,
`chain_in_order` when a graph is compiled.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

ORDERED: list[Any] = []  # the operators to keep in place; comm/operators.py adds the collectives
STARTED: dict[Any, Any] = {}  # of those the waits, and the operator whose result each waits for
SHARED: list[Any] = []  # the operators to call once for the same arguments; kernels/float8.py adds its own
_ATEN = torch.ops.aten
LARGEST = _ATEN.linalg_vector_norm.default, _ATEN.abs.default, _ATEN.amax.default  # the first one, or its parts


def pin_ordered(graph: torch.fx.GraphModule) -> None:
    """Mark each ordered operator of a joint graph as of the forward or the backward pass, and as never recomputed."""
    # The backward pass begins at the first node that depends on a placeholder named `tangents...`. Ordered operators
    # before it are of the forward pass, and their results are saved; those after it are of the backward pass, also if
    # the program repeats them on purpose. Random numbers would be others if they were recomputed.
    from torch.utils.checkpoint import CheckpointPolicy

    downstream: set[torch.fx.Node] = set()
    backward = False
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if node.name.startswith("tangents"):
                downstream.add(node)
        elif any(source in downstream for source in node.all_input_nodes):
            downstream.add(node)
            backward = True
        if node.target in ORDERED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"
        elif is_random(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_random(node: torch.fx.Node) -> bool:
    """Whether a node of a graph draws random numbers by torch's generators."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def merge_shared(graph: torch.fx.GraphModule) -> None:
    """Call each operator of SHARED once for the same arguments in a pass of a joint graph."""
    # Views of the same tensor, and items of the same result, become one; nothing else does: what the program computes
    # twice on purpose, to keep less, stays so.
    if not any(node.target in SHARED for node in graph.graph.nodes):
        return
    first_calls: dict[Any, torch.fx.Node] = {}
    backward = False
    for node in list(graph.graph.nodes):
        backward |= any(s.op == "placeholder" and s.name.startswith("tangents") for s in node.all_input_nodes)
        merged = getattr(node.target, "is_view", False) or node.target in (*SHARED, *LARGEST, operator.getitem)
        if node.op == "call_function" and merged:
            first = first_calls.setdefault((backward, node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.graph.erase_node(node)
    graph.recompile()


def has_equal_sums(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph sums the same values twice, as the gradients of two biases of one sum do."""
    numbers: dict[torch.fx.Node, str] = {}  # equal ones for equal values
    value_ids: dict[str, str] = {}
    for node in graph.graph.nodes:
        args = torch.fx.map_arg((node.args, tuple(node.kwargs.items())), lambda source: numbers[source])
        value = f"{node.target}{args}" if node.op == "call_function" else node.name
        if value in value_ids and getattr(node.target, "overloadpacket", None) is _ATEN.sum:
            return True
        numbers[node] = value_ids.setdefault(value, f"%{len(value_ids)}")
    return False


def chain_in_order(graph: torch.fx.GraphModule) -> bool:
    """Chain the ordered operators of a graph by tokens; returns whether there are any: then one output more."""
    # Each operator takes the token of the one before and returns a new one. Nodes need node.meta["val"].
    token: torch.fx.Node | None = None
    for node in list(graph.graph.nodes):
        if node.target not in ORDERED:
            continue
        args = _wait_arguments(node) if node.target in STARTED else node.args
        with graph.graph.inserting_before(node):
            chained = graph.graph.call_function(node.target.overloadpacket.after, (*args, token), node.kwargs)
            val, has_several = node.meta["val"], isinstance(node.meta["val"], (tuple, list))
            results = tuple(val) if has_several else (val,)
            token = graph.graph.call_function(operator.getitem, (chained, len(results)))
            out = chained if has_several else graph.graph.call_function(operator.getitem, (chained, 0))
        # Else the strides of its inputs, which are noted there, would be those of a call without a token.
        if not has_several:
            out.meta.update(node.meta)
        token.meta["val"] = results[0].new_empty(1)
        chained.meta["val"] = (*results, token.meta["val"])
        node.replace_all_uses_with(out)
        graph.graph.erase_node(node)
    if token is None:
        return False
    output = graph.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    output.args = ((*results, token),)
    graph.recompile()
    return True


def keeps_order(graph: torch.fx.GraphModule) -> bool:
    """Whether something is computed between a start and its wait in a chained graph, whose order then counts."""
    waits = [wait.overloadpacket.after for wait in STARTED]
    return any(node.target in waits and len(node.args[1]) > 1 for node in graph.graph.nodes)


def _wait_arguments(wait: torch.fx.Node) -> tuple[Any, ...]:
    """The arguments of a wait, with what may not be reused or computed later as the second one."""
    # That is the tensor on its way, and what the graph computes between for use behind the wait: the compiler moves
    # products next to their use, and nothing would be computed meanwhile.
    row, _, *extra = wait.args
    start = _source(row)
    while start.target is not STARTED[wait.target].overloadpacket.after:
        start = _source(start.args[0])  # through views
    interval, node = dict[torch.fx.Node, None](), _source(row).next
    while node is not wait:
        interval[node], node = None, node.next
    held_values = {_source(start.args[0]): None}
    for node in interval:
        if isinstance(node.meta.get("val"), torch.Tensor) and not all(user in interval for user in node.users):
            while getattr(node.target, "is_view", False):
                node = _source(node.args[0])
            held_values |= {node: None} if node in interval else {}
    return row, list(held_values), *extra


def _source(argument: Any) -> torch.fx.Node:
    assert isinstance(argument, torch.fx.Node), "an operator is waited for in another graph than it was started in"
    return argument
