"""The collectives as torch operators (namespace `fzero`), which a traced graph has in program order (core/graph.py).

An operator names its communicator by number and blocks until the result has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fzero.comm.communicator import Communicator, communicator_of
from fzero.core.device import is_traced
from fzero.core.future import Future
from fzero.core.graph import ORDERED
from fzero.core.torch_private import is_fx_symbolic_tracing

_LIBRARY = torch.library.Library("fzero", "DEF")


def pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a flat list; operators cannot take nested lists."""
    return list(zip(flat[::2], flat[1::2]))


def _define(
    name: str, start: Callable[..., Future[Tensor]], shape: Callable[..., Sequence[int]], extra: str = ""
) -> None:
    """Define fzero::name(x, communicator, <extra>, leaf), and its overload `after` with a token in and out, which
    orders it.

    start(communicator, x, *rest) starts it; shape(communicator, x) gives the shape of the result.
    """

    def real(x: Tensor, communicator: int, *rest: Any) -> Tensor:
        return start(communicator_of(communicator), x, *rest).wait()

    def fake(x: Tensor, communicator: int, *rest: Any) -> Tensor:
        to = communicator_of(communicator)
        if to.transport == "fake" and not (
            is_fx_symbolic_tracing() or is_traced(x)
        ):  # in a plan, and not only while tracing
            return start(to, x, *rest).wait()
        return x.new_empty(shape(to, x))

    def with_token(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run_after(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            return run(x, *args[:-1]), x.new_empty(1)

        return run_after

    arguments = f"(Tensor x, int communicator, {extra}str leaf"
    _LIBRARY.define(f"{name}{arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.define(f"{name}.after{arguments}, Tensor? token) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
    for overload, runs in ((name, (real, fake)), (f"{name}.after", (with_token(real), with_token(fake)))):
        _LIBRARY.impl(overload, runs[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{overload}", runs[1], lib=_LIBRARY)
    packet = getattr(torch.ops.fzero, name)
    ORDERED.append(packet.default)
    # Never dead code, even if this rank does not use the result: the other ranks wait for it.
    has_side_effect(packet.default)
    has_side_effect(packet.after)


_define("psum", Communicator.start_psum, lambda communicator, x: x.shape)
_define(
    "all_gather", Communicator.start_all_gather, lambda communicator, x: (communicator.size * x.shape[0], *x.shape[1:])
)
_define(
    "psum_scatter",
    Communicator.start_psum_scatter,
    lambda communicator, x: (x.shape[0] // communicator.size, *x.shape[1:]),
)
_define("all_to_all", Communicator.start_all_to_all, lambda communicator, x: x.shape)
_define(
    "ppermute",
    lambda communicator, x, perm, leaf: communicator.start_ppermute(x, pairs(perm), leaf),
    lambda communicator, x: x.shape,
    "int[] perm, ",
)
ops = torch.ops.fzero
