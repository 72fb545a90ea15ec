"""The results of operators on fake tensors, remembered by the sizes of their arguments.

A plan runs the same few hundred operators on the same sizes ten thousand times. FakeTensorMode has a memory of its own,
in which finding a result takes some 200 us on a slow CPU; here it takes 20 (in place) to 150 (a view), as only what a
plan needs is served: sizes that are numbers, and tensors of the mode without a known value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core.torch_private import FakeTensor, in_kernel_invocation

PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
# Results that depend on values, operators that change the sizes of an argument, and those of the size of a storage.
TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
LEFT_OUT = frozenset(("set_", "lift", "lift_fresh", "lift_fresh_copy", "resize_", "record_stream"))
KERNELS: set[str] = set()  # operators of ours, whose fake results follow from their arguments' sizes alone


class Result(NamedTuple):
    """A tensor that an operator returns, in memory of its own or in that of a tensor given."""

    given: int  # which of the tensors given has its memory, or is the result itself; -1: none
    same: bool  # whether it is that tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class FakeResults:
    """The results of a FakeTensorMode; call it in place of the mode's own dispatch."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.serves: dict[Any, bool] = {}  # by operator
        self.found: dict[Any, Any] = {}  # by the operator and `key_of` its arguments: see `described`

    def __call__(self, run: Callable[..., Any], func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """The result of an operator; `run` makes it the first time."""
        serves = self.serves.get(func)
        if serves is None:
            serves = self.serves[func] = is_served(func)
        if not serves:
            return run(func, types, args, kwargs)
        given: list[Any] = []
        words = (args, *((name, value) for name, value in kwargs.items())) if kwargs else (args,)
        key = key_of(self.mode, words, given)
        if key is None:
            return run(func, types, args, kwargs)
        key = func, torch.get_default_dtype(), key
        found = self.found.get(key)
        if found is None:
            out = run(func, types, args, kwargs)
            self.found[key] = described(out, given)
            return out
        return run(func, types, args, kwargs) if found is UNKNOWN else self.make(found, given)

    def make(self, found: Any, given: Sequence[Any]) -> Any:
        """What an operator returns: a fake tensor, several, or nothing."""
        if not isinstance(found, Result):
            return None if found is NOTHING else type(found)(self.make(one, given) for one in found)
        if found.same:
            return given[found.given]
        with in_kernel_invocation(self.mode):
            if found.given < 0:
                x = torch.empty_strided(found.shape, found.stride, dtype=found.dtype, device="meta")
            elif given[found.given].dtype == found.dtype:
                x = given[found.given].as_strided(found.shape, found.stride, found.offset)
            else:
                x = torch.empty(0, dtype=found.dtype, device="meta")
                x.set_(given[found.given].untyped_storage(), found.offset, found.shape, found.stride)
        return FakeTensor(self.mode, x, found.device)


UNKNOWN, NOTHING = object(), object()  # the results of an operator that runs each time, and of one that returns None


def is_served(func: Any) -> bool:
    """Whether the results of an operator follow from the sizes of its arguments."""
    space, _, name = func._schema.name.partition("::")
    known = name not in LEFT_OUT if space == "aten" else func._schema.name in KERNELS
    return known and not any(tag in func.tags for tag in TAGS)


def key_of(mode: Any, value: Any, given: list[Any]) -> Any:
    """What the results depend on, of an argument, whose tensors are appended to `given`; None if it has another
    value."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is FakeTensor:
        if value.fake_mode is not mode or value.constant is not None or value.requires_grad or value.is_conj():
            return None
        given.append(value)
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device
    if isinstance(value, (tuple, list)):
        keys = [key_of(mode, one, given) for one in value]
        return None if None in keys else tuple(keys)
    return None


def described(out: Any, given: Sequence[Any]) -> Any:
    """What an operator returned: a Result, several, NOTHING, or UNKNOWN if it cannot be made again."""
    if isinstance(out, (tuple, list)):
        found = [described(one, given) for one in out]
        found = found if isinstance(out, list) else tuple(found)
        return UNKNOWN if UNKNOWN in found else found
    if out is None:
        return NOTHING
    if type(out) is not FakeTensor or out.constant is not None or out.requires_grad:
        return UNKNOWN
    sizes = out.shape, out.stride(), int(out.storage_offset()), out.dtype, out.fake_device
    for i, x in enumerate(given):
        if x is out:
            return Result(i, True, *sizes)
    storage = out.untyped_storage()
    for i, x in enumerate(given):
        if x.untyped_storage()._cdata == storage._cdata:
            return Result(i, False, *sizes)
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta").untyped_storage()
    return Result(-1, False, *sizes) if not sizes[2] and like.nbytes() == storage.nbytes() else UNKNOWN
