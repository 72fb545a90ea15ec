"""The calls of a function, recorded once and repeated in the same memory: without its Python, as a CUDA graph on a GPU.

A record has the operators that make numbers or write them, and the C++ loops, with the tensors and addresses that they
were given. Views and empty memory need no call again. What a call makes stays where it is until the record goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import EMPTY
from fzero.core.device import LAUNCHERS
from fzero.core.torch_private import OpOverload, TorchDispatchMode

VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
INDICES = (torch.int64, torch.int32)  # of `index`, whose result's shape follows from masks alone


RecordedLoop = Callable[
    [Sequence[Any], Tensor], Callable[[], Any] | None
]  # (arguments of an operator, result) -> its repetition


class CallRecord(NamedTuple):
    """The calls, the tensors that they read from outside, and the results."""

    calls: list[tuple[Callable[..., Any], Sequence[Any]]]
    inputs: list[Tensor]
    outputs: list[Tensor]
    memory: list[Any]  # what addresses among the arguments point to

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results for inputs of the same shapes, in memory of their own."""
        for stored, x in zip(self.inputs, inputs, strict=True):
            stored.copy_(x)
        for function, arguments in self.calls:
            function(*arguments)
        return [x.clone() for x in self.outputs]


class _Unrecorded(Exception):
    """A call depends on values, or on a draw."""


_RECORDING: ContextVar[CallRecord | None] = ContextVar("_RECORDING", default=None)


def record_calls(
    f: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    loops: Mapping[OpOverload, RecordedLoop] = MappingProxyType({}),
) -> CallRecord | None:
    """Return the record of f(*inputs), of which it has the results as `outputs`; None if a call depends on values of
    tensors or draws numbers. What else f reads and writes, such as parameters, is read and written again where it is.

    loops: by operator, what is repeated in its place; a loop that returns None does not serve these arguments.

    >>> record = record_calls(lambda x: [(x + 1.0).square().sum()], [torch.zeros(3)])
    >>> record(torch.ones(3))
    [tensor(12.)]
    """
    inputs = [x.clone() for x in inputs]
    record = CallRecord([], inputs, [], [])
    token = _RECORDING.set(record)
    try:
        with _Recorder(loops):
            record.outputs.extend(f(*inputs))
    except _Unrecorded:
        return None
    finally:
        _RECORDING.reset(token)
    return record


def note_call(function: Callable[..., Any], arguments: Sequence[Any], memory: Any) -> None:
    """Add a call that is no operator of torch, with the tensors that its addresses point to, to the record that is
    made now."""
    if (record := _RECORDING.get()) is not None:
        record.calls.append((function, arguments))
        record.memory.append(memory)


def record_operator(launch: Callable[..., Any], args: Sequence[Any], by_shape: bool) -> Any:
    """launch(*args), an operator of ours. by_shape: what it calls depends on shapes alone, so that a record has these
    calls; else it has the launch, which may read values."""
    record = _RECORDING.get()
    if record is None or by_shape:
        return launch(*args)
    token = _RECORDING.set(None)
    try:
        out = launch(*args)
    finally:
        _RECORDING.reset(token)
    record.calls.append((_repeating(launch, {}, _new_results(args, out)), args))
    return out


class _Recorder(TorchDispatchMode):
    """Adds the operators that run within it to the record that is made now."""

    def __init__(self, loops: Mapping[OpOverload, RecordedLoop]) -> None:
        super().__init__()
        self.loops = loops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, record = kwargs or {}, _RECORDING.get()
        if record is None:
            return func(*args, **kwargs)
        if func in LAUNCHERS:
            with self:  # which sees what the launcher calls
                return LAUNCHERS[func](*args, **kwargs)
        by_numbers = func is torch.ops.aten.index.Tensor and all(x is None or x.dtype in INDICES for x in args[1])
        if not by_numbers and any(tag in func.tags for tag in VALUES):
            raise _Unrecorded
        out = func(*args, **kwargs)
        new = _new_results((args, kwargs), out)
        fills = any(x is not None for x in new) and func._schema.name.removeprefix("aten::") not in EMPTY
        if fills or func._schema.is_mutable:
            loop = None if kwargs or func not in self.loops else self.loops[func](args, out)
            record.calls.append((_repeating(func, kwargs, new), args) if loop is None else (loop, ()))
            record.memory.append((args, out))
        return out


def _new_results(arguments: Any, out: Any) -> list[Tensor | None]:
    """The tensors of a result by leaf; None where one has the memory of an argument."""
    sources = {x.untyped_storage()._cdata for x in pytree.leaves(arguments) if isinstance(x, Tensor)}
    leaves = pytree.leaves(out)
    return [x if isinstance(x, Tensor) and x.untyped_storage()._cdata not in sources else None for x in leaves]


def _repeating(func: Any, kwargs: dict[str, Any], results: Sequence[Tensor | None]) -> Callable[..., Any]:
    """The operator, whose new results go where those of its first call are."""
    run = func._op if isinstance(func, OpOverload) else func
    if not any(x is not None for x in results):
        return functools.partial(run, **kwargs)
    if len(results) == 1 and isinstance(func, OpOverload) and (fill := _filling(func)) is not None:
        return functools.partial(fill, **kwargs, out=results[0])

    def call(*args: Any) -> None:
        for target, x in zip(results, pytree.leaves(run(*args, **kwargs))):
            if target is not None:
                target.copy_(x)

    return call


@functools.cache
def _filling(func: OpOverload) -> Any:
    """The variant of an operator that fills a tensor `out`; None if there is none."""
    arguments = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        names = [(x.name, str(x.type)) for x in variant._schema.arguments]
        if names[:-1] == arguments and names[-1][0] == "out":
            return variant._op
    return None
