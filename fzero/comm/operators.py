"""The collectives as torch operators (namespace `fzero`), which a traced graph has in program order.

An operator names its communicator by number and blocks until the result has arrived; only `start_rows` does not, for
whose result `wait_rows` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fzero.comm.axes import EP
from fzero.comm.communicator import Communicator, communicator_of
from fzero.core.autodiff import NOWHERE, VARYING_RULES
from fzero.core.device import is_traced
from fzero.core.gpu_copies import Future
from fzero.core.graph_passes import ORDERED, STARTED
from fzero.core.torch_private import is_fx_symbolic_tracing

_LIBRARY = torch.library.Library("fzero", "DEF")


def pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a flat list; operators cannot take nested lists."""
    return list(zip(flat[::2], flat[1::2]))


def define_ordered(
    name: str, arguments: str, results: int, real: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define fzero::name(arguments), and its overload `after` with a token that orders it; return it."""
    communicator_index = [argument.split()[-1] for argument in arguments.split(",")].index("communicator")

    def planned(x: Tensor, *args: Any) -> Any:
        plans = communicator_of(args[communicator_index - 1]).transport == "fake"
        return (real if plans and not (is_fx_symbolic_tracing() or is_traced(x)) else fake)(x, *args)

    def with_token(run: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        def run_after(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
            out = run(x, *args[:-1])
            return *((out,) if results == 1 else out), x.new_empty(1)

        return run_after

    _LIBRARY.define(f"{name}({arguments}) -> {_tensors(results)}", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.define(
        f"{name}.after({arguments}, Tensor? token) -> {_tensors(results + 1)}", tags=torch.Tag.pt2_compliant_tag
    )
    for overload, runs in ((name, (real, planned)), (f"{name}.after", (with_token(real), with_token(planned)))):
        _LIBRARY.impl(overload, runs[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{overload}", runs[1], lib=_LIBRARY)
    packet = getattr(torch.ops.fzero, name)
    # core/graph_passes.py gives each of these the token of the one before it: a compiler might swap two otherwise, and
    # ranks that swap differently hang.
    ORDERED.append(packet.default)
    # Never dead code, even if this rank does not use the result: the other ranks wait for it.
    has_side_effect(packet.default)
    has_side_effect(packet.after)
    return packet.default


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _define(
    name: str, start: Callable[..., Future[Tensor]], shape: Callable[..., Sequence[int]], extra: str = ""
) -> None:
    """Define the collective fzero::name(x, communicator, <extra>, leaf) from its start and its result's shape."""

    def real(x: Tensor, communicator: int, *options: Any) -> Tensor:
        return start(communicator_of(communicator), x, *options).wait()

    def fake(x: Tensor, communicator: int, *options: Any) -> Tensor:
        return x.new_empty(shape(communicator_of(communicator), x))

    define_ordered(name, f"Tensor x, int communicator, {extra}str leaf", 1, real, fake)


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


def _rule(removes: bool, adds: bool) -> Callable[..., tuple[frozenset[str], frozenset[str]]]:
    """What a collective does to the axes over which a tensor may differ (see core/autodiff)."""

    def rule(x: Tensor, communicator: int, *options: Any) -> tuple[frozenset[str], frozenset[str]]:
        axes = frozenset(communicator_of(communicator).axis.split("+"))
        return axes if removes else NOWHERE, axes if adds else NOWHERE

    return rule


VARYING_RULES.update({name: _rule(True, False) for name in ("psum", "all_gather")})
VARYING_RULES.update({name: _rule(False, True) for name in ("psum_scatter", "all_to_all", "ppermute")})
VARYING_RULES["start_rows"] = lambda x, *_: (NOWHERE, frozenset((EP,)))
VARYING_RULES["wait_rows"] = VARYING_RULES["start_rows"]

# ---- exchanges of rows, in two operators -----------------------------------------------------------------------------

_PENDING: dict[int, Future[Tensor]] = {}  # by the storage of the row that the start of an exchange returned


def _start_rows(x: Tensor, counts: Tensor, communicator: int, *options: Any) -> Tensor:
    row = x.new_zeros((1, *x.shape[1:]))
    # An exchange that nobody waited for, as an error came between, gives way to the next one with its memory.
    _PENDING[row.untyped_storage()._cdata] = communicator_of(communicator).start_exchange_rows(x, counts, *options)
    return row


def _wait_rows(row: Tensor, *_: Any) -> Tensor:
    return _PENDING.pop(row.untyped_storage()._cdata).wait()


start_rows = define_ordered(
    "start_rows",
    "Tensor x, Tensor counts, int communicator, int room, str leaf, str otherwise",
    1,
    _start_rows,
    lambda x, *_: x.new_empty((1, *x.shape[1:])),
)
wait_rows = define_ordered(
    "wait_rows",
    "Tensor row, Tensor[] held, int communicator, int room",
    1,
    _wait_rows,
    lambda row, held, number, room: row.new_empty((room, *row.shape[1:])),
)
STARTED[wait_rows] = start_rows

ops = torch.ops.fzero
