"""A function as the calls of its operators in a row, for shapes that come again: without the Python between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fzero import core
from fzero.core.compile import fake_mode, fakes_of
from fzero.core.device import LAUNCHERS
from fzero.core.torch_private import DataDependent, OpOverload

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
VIEWS = (*RESHAPES, torch.ops.aten.select.int)
_TRACING = threading.Lock()  # torch.fx has state of which a process has one


def operators_of(
    f: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor]
) -> Callable[..., list[Tensor]] | None:
    """The function of these many tensors that calls the operators of `f` for tensors of these shapes, those that write
    in place too; None if `f` needs values of tensors. Operators of constants alone are called once, here."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode()
    try:
        with _TRACING, mode, core.random_interception.no_draws():
            graph = make_fx(f)(fakes_of(tensors, mode))
    except DataDependent:
        return None
    _merge_views(graph)
    nodes = list(graph.graph.nodes)
    constants = _constants(graph, nodes)
    last_uses = {source: node for node in nodes for source in node.all_input_nodes}
    names = {node: f"x{i}" for i, node in enumerate(nodes)}
    scope: dict[str, Any] = {names[node]: value for node, value in constants.items()}
    lines, inputs = [], [names[node] for node in nodes if node.op == "placeholder"]
    for node in nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0], names, scope)}")
        elif node.op == "call_function" and node not in constants:
            target = node.target
            scope[f"f_{names[node]}"] = _callable(target)
            arguments = [_text(x, names, scope) for x in node.args]
            arguments += [f"{key}={_text(value, names, scope)}" for key, value in node.kwargs.items()]
            lines.append(f"{names[node]} = f_{names[node]}({', '.join(arguments)})")
            done = [names[x] for x in node.all_input_nodes if last_uses[x] is node and x not in constants]
            lines += [f"del {', '.join(done)}"] if done else []
            lines += [f"del {names[node]}"] if node not in last_uses else []
    exec(f"def run({', '.join(inputs)}):\n " + "\n ".join(lines), scope)
    return scope["run"]


def _callable(target: Any) -> Any:
    """What is called for a node: without the dispatcher's Python if it can be."""
    return LAUNCHERS.get(target) or (target._op if isinstance(target, OpOverload) else target)


def _merge_views(graph: torch.fx.GraphModule) -> None:
    """Let equal views of one tensor be one, and a reshape of a reshape one of its source."""
    views: dict[Any, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in VIEWS:
            continue
        source = node.args[0]
        if node.target in RESHAPES and isinstance(source, Node) and source.target in RESHAPES:
            node.replace_input_with(source, source.args[0])
        first = views.setdefault((node.target, repr(node.args)), node)
        if first is not node:
            node.replace_all_uses_with(first)
    for node in reversed(list(graph.graph.nodes)):
        if node.target in VIEWS and not node.users:
            graph.graph.erase_node(node)


def _constants(graph: torch.fx.GraphModule, nodes: Sequence[Node]) -> dict[Node, Any]:
    """The values of the nodes that depend on no input."""
    constants: dict[Node, Any] = {}
    with torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                constants[node] = getattr(graph, str(node.target))
            elif node.op == "call_function" and all(x in constants for x in node.all_input_nodes):
                args, kwargs = map_arg((node.args, dict(node.kwargs)), constants.__getitem__)
                constants[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return constants


def _text(value: Any, names: dict[Node, str], scope: dict[str, Any]) -> str:
    """An argument as Python; what is no number or text is a name in `scope`."""
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = "".join(f"{_text(item, names, scope)}, " for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    name = f"c{len(scope)}"
    scope[name] = value
    return name
