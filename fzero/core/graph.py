"""Operators that keep their place while a traced graph is split and compiled.

The ranks of a mesh trace the same program, yet a compiler may choose another order for two collectives, or drop one
whose result is not used, where constants differ (a slice at 0 on one rank, at n on another). `hold` forbids that in a
joint graph of forward and backward pass before it is split, `in_order` in a graph before it is compiled.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

ORDERED: list[Any] = []  # the operators concerned; comm/operators.py enters the collectives


def hold(graph: torch.fx.GraphModule) -> None:
    """Fix for each ordered operator of a joint graph whether it runs in the forward or in the backward pass, and that
    it runs once.

    Those up to the first node that depends on a placeholder called `tangents...` belong to the forward pass: a
    partitioner saves their results and recomputes none. The others are in the backward pass, with those that the
    program itself repeats there.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    late: set[torch.fx.Node] = set()
    backward = False
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if node.name.startswith("tangents"):
                late.add(node)
        elif any(source in late for source in node.all_input_nodes):
            late.add(node)
            backward = True
        if node.target in ORDERED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def chain_in_order(graph: torch.fx.GraphModule) -> bool:
    """Chain the ordered operators of a graph (with node.meta["val"]) by tokens, so that none is moved over another, and
    none is dropped.

    Returns whether there are any; the graph then has one more output, the last token.
    """
    token: torch.fx.Node | None = None
    for node in list(graph.graph.nodes):
        if node.target not in ORDERED:
            continue
        with graph.graph.inserting_before(node):
            both = graph.graph.call_function(node.target.overloadpacket.after, (*node.args, token), node.kwargs)
            out, token = (graph.graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
        out.meta.update(node.meta)
        val = node.meta["val"]
        token.meta["val"] = val.new_empty(1)
        both.meta["val"] = (val, token.meta["val"])
        node.replace_all_uses_with(out)
        graph.graph.erase_node(node)
    if token is None:
        return False
    output = graph.graph.output_node()
    output.args = ((*output.args[0], token),)
    graph.recompile()
    return True
