"""The collectives as operators of PyTorch (namespace `fzero`): what a traced graph holds, and what keeps it one program on all ranks.

An operator names its link by number and runs blocking. The ranks of a mesh trace the same program, yet a compiler may choose another
order for two collectives, or drop one whose result is not used, where constants differ (a slice at 0 on one rank, at n on another).
`hold` and `in_order` forbid that: `hold` for a joint graph of forward and backward pass before it is split, `in_order` for a graph
before it is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from fzero.links import Link, Pending, link_of
from fzero.target import traced

_LIBRARY = torch.library.Library("fzero", "DEF")
_OPS: list[Any] = []  # the overloads that a trace holds


def pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    """(source, destination) pairs of a flat list, in which operators take them."""
    return list(zip(flat[::2], flat[1::2]))


def _define(name: str, start: Callable[..., Pending], shape: Callable[..., Sequence[int]], extra: str = "") -> None:
    """Define fzero::name(x, link, <extra>, leaf), and its overload `after` with a token in and out, which gives it a place in an order.

    start(link, x, *rest) starts it; shape(link, x) is that of the result.
    """

    def real(x: Tensor, link: int, *rest: Any) -> Tensor:
        return start(link_of(link), x, *rest).wait()

    def fake(x: Tensor, link: int, *rest: Any) -> Tensor:
        to = link_of(link)
        if to.transport == "fake" and not (is_fx_symbolic_tracing() or traced(x)):  # planned, and not only traced
            return start(to, x, *rest).wait()
        return x.new_empty(shape(to, x))

    def with_token(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run_after(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            return run(x, *args[:-1]), x.new_empty(1)

        return run_after

    arguments = f"(Tensor x, int link, {extra}str leaf"
    _LIBRARY.define(f"{name}{arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.define(f"{name}.after{arguments}, Tensor? token) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
    for overload, runs in ((name, (real, fake)), (f"{name}.after", (with_token(real), with_token(fake)))):
        _LIBRARY.impl(overload, runs[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{overload}", runs[1], lib=_LIBRARY)
    packet = getattr(torch.ops.fzero, name)
    _OPS.append(packet.default)
    # Not dead code, even where a rank does not use its result: the others wait for this one.
    torch.fx.node.has_side_effect(packet.default)
    torch.fx.node.has_side_effect(packet.after)


_define("psum", Link.start_psum, lambda link, x: x.shape)
_define("all_gather", Link.start_all_gather, lambda link, x: (link.size * x.shape[0], *x.shape[1:]))
_define("psum_scatter", Link.start_psum_scatter, lambda link, x: (x.shape[0] // link.size, *x.shape[1:]))
_define("all_to_all", Link.start_all_to_all, lambda link, x: x.shape)
_define("ppermute", lambda link, x, perm, leaf: link.start_ppermute(x, pairs(perm), leaf), lambda link, x: x.shape, "int[] perm, ")
ops = torch.ops.fzero


def hold(graph: torch.fx.GraphModule) -> None:
    """Fix for each collective of a joint graph whether it runs in the forward or in the backward pass, and that it runs once.

    Those up to the first node that depends on a placeholder called `tangents...` belong to the forward pass: a partitioner saves their
    results and recomputes none. The others are in the backward pass, with those that the program itself repeats there.
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
        if node.target in _OPS:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def in_order(graph: torch.fx.GraphModule) -> bool:
    """Chain the collectives of a graph (with node.meta["val"]) by tokens, so that none is moved over another, and none is dropped.

    Returns whether there are any; the graph then has one more output, the last token.
    """
    token: torch.fx.Node | None = None
    for node in list(graph.graph.nodes):
        if node.target not in _OPS:
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
