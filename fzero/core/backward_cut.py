"""A traced backward pass cut in two: gradients by inputs, which somebody waits for, and gradients by weights.

The first graph has the ancestors of the gradients by inputs. Every product that serves the weights alone is in the
second one, and no product is in both. Between them rest the operands of those products, as they are or as what cheap
operators make them from again, whichever is less: a minimal cut, as between a forward and a backward pass.

Ref: Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241, section 2; the cut as in functorch.compile.
"""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from fzero.core.graph import ORDERED


def cut_backward(backward: GraphModule, weights: int) -> tuple[GraphModule, GraphModule]:
    """Cut a backward graph, whose first `weights` results are gradients by weights, into (by inputs, by weights).

    The first takes what the backward graph took and gives the gradients by inputs, followed by what the second one
    takes, which gives those by weights.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    from fzero.core.torch_private import default_op_list, functorch_config, min_cut_partition

    graph, inputs = _reordered(backward, weights)
    first = _ancestors(graph, inputs)
    is_cheap = default_op_list().is_recomputable
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key not in ("partitioner_tag", "recompute")}
        if node.op != "call_function":
            continue
        ordered = node.target in ORDERED
        if ordered:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node in first:
            if ordered:
                node.meta["partitioner_tag"] = "must_be_in_forward"
        elif ordered or not is_cheap(node):
            # Else its result would be kept, which is often smaller than its operands. A cheap sum may be made early.
            node.meta["partitioner_tag"] = "must_be_in_backward"
    with functorch_config.patch(activation_memory_budget=1.0, cse=False, ban_recompute_materialized_backward=False):
        return min_cut_partition(GraphModule(backward, graph), (), num_fwd_outputs=inputs)


def _reordered(backward: GraphModule, weights: int) -> tuple[Graph, int]:
    """(a copy of a backward graph that gives the gradients by inputs first, their number).

    The partitioner takes every input whose name has no "tangents" for one of a forward pass."""
    graph, made = Graph(), dict[Node, Node]()
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.placeholder(f"primals_{len(made) + 1}")
            made[node].meta = dict(node.meta)
        elif node.op != "output":
            made[node] = graph.node_copy(node, lambda source: made[source])
    (grads,) = backward.graph.output_node().args
    assert isinstance(grads, (list, tuple))
    of = [made[grad] if isinstance(grad, Node) else grad for grad in grads]
    graph.output((*of[weights:], *of[:weights]))
    return graph, len(of) - weights


def _ancestors(graph: Graph, inputs: int) -> set[Node]:
    """The nodes that the first `inputs` results of a graph depend on."""
    (grads,) = graph.output_node().args
    assert isinstance(grads, (list, tuple))
    found, left = set[Node](), [grad for grad in grads[:inputs] if isinstance(grad, Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return found
