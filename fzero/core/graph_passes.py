"""Passes over traced graphs, and FLOPs of their operators.

Collectives stay in place. All ranks trace the same program, but their graphs differ in constants, so the compiler could
reorder or drop a collective on one rank only; the ranks would then hang. `pin_ordered` prevents that when a joint graph
is split, `chain_in_order` when a graph is compiled.

A float8 product needs the largest magnitude of its operands first, a pass over memory each. A kernel of ours that
writes the operand can find it as it writes: maxima are exact and depend on no order, so the bits stay the same. And
where a graph rounds a matrix for its rows and for its columns, one call does both, by one read.

Of FLOPs, products and attention count, a multiply-add as two, and nothing else; a partitioner knows them.
torch.utils.flop_counter has formulas for most of torch's own operators, FORMULAS for others and for fzero's.

Ref: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", appendix A.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

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


Formula = Callable[..., int]  # the operator's own arguments, and its result as out_val

# By the operator, an OpOverloadPacket; kernels.custom_operator adds fzero's, each where it is defined.
FORMULAS: dict[Any, Formula] = {}


def add_formula(packet: Any, formula: Formula) -> None:
    """Say what an operator costs, whose result is dear, so that a partitioner keeps it."""
    formula._get_raw = True  # type: ignore[attr-defined]  # torch's counter hands it the tensors, and not their shapes
    FORMULAS[packet] = formula


def flop_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The FLOPs of one operator (an OpOverload) with these arguments and result; 0 unless a product or attention."""
    packet = getattr(func, "_overloadpacket", func)
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


@contextlib.contextmanager
def partition_by_cost() -> Iterator[None]:
    """A context in which torch's partitioner takes every operator with a formula as one that costs its FLOPs."""
    from fzero.core.torch_private import partitioners

    plain, saved_formulas = partitioners.get_default_op_list, dict(flop_registry)

    def list_operators() -> Any:
        operators = plain()
        dear = type(operators.compute_intensive_ops)((*operators.compute_intensive_ops, *flop_registry))
        return dataclasses.replace(operators, compute_intensive_ops=dear)

    try:
        flop_registry.update(FORMULAS)
        partitioners.get_default_op_list = list_operators
        yield
    finally:
        partitioners.get_default_op_list = plain
        flop_registry.clear()
        flop_registry.update(saved_formulas)


# ---- torch's operators ----------------------------------------------------------------------------------------------


def product(x: Tensor, *arguments: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Of a product in which each element of x meets a row of what it is multiplied with: of [M, K] by [K, N] or its
    transpose, of rows or columns in groups by one matrix each."""
    return 2 * x.numel() * out_val.shape[-1]


def _added(x: Tensor, a: Tensor, *arguments: Any, out_val: Tensor, **kwargs: Any) -> int:
    return product(a, out_val=out_val)


def _for_heads(q: Tensor, *tensors: Tensor) -> Iterator[tuple[int, ...]]:
    """The shapes [B, H, S, K] of keys and values with a head for each of q's, which torch 2.11 counts alone."""
    return ((x.shape[0], q.shape[1], *x.shape[2:]) for x in tensors)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, *_for_heads(q, k, v))


def _sdpa_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(g.shape, q.shape, *_for_heads(q, k, v))


for name, formula in (
    ("_scaled_dot_product_flash_attention_for_cpu", _sdpa),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _sdpa_backward),
    ("_grouped_mm", product),
    ("addmm", _added),  # torch's formulas refuse the factors that a compiled graph gives by position
    ("addmm_", _added),
    ("baddbmm", _added),
    ("baddbmm_", _added),
):
    add_formula(getattr(torch.ops.aten, name), formula)


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
    """What a node asks for, if it is a largest magnitude of an output of TWINS."""
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
    """(the tensor whose largest magnitude a node is, over which dims); else (None, [])."""
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
