"""The device that a tensor is on, or that a plan's fake tensor represents.

A plan for a GPU runs on machines without one, on fake tensors of a `FakeDevice` mode: those on `FakeDevice.device`
represent the GPU's, those on torch.device("cpu") the host's. Code that chooses by device calls `kind_of` or
`target_of`; there is no global state.

Results of operators on fake tensors are remembered by the sizes of their arguments: a plan runs the same few hundred
ten thousand times, and FakeTensorMode takes some 200 us to find one, this 20 to 150.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.gpu import HOST as HOST
from fzero.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    get_unwrapped,
    in_kernel_invocation,
    is_functorch_wrapped_tensor,
)

PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
# Results that depend on values, operators that change the sizes of an argument, and those of the size of a storage.
TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
EXCLUDED = frozenset(("set_", "lift", "lift_fresh", "lift_fresh_copy", "resize_", "record_stream"))
# The modules of our operators, whose fake results follow from their arguments' sizes alone, by name.
KERNELS: dict[str, str] = {}
# What those operators run, by operator: a program calls it without the dispatcher.
LAUNCHERS: dict[Any, Callable[..., Any]] = {}


class TensorResult(NamedTuple):
    """A tensor that an operator returns, in memory of its own or in that of a tensor given."""

    source_index: int  # which of the tensors given has its memory, or is the result itself; -1: none
    is_source: bool  # whether it is that tensor
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
        self.cache: dict[Any, Any] = {}  # by the operator and `key_of` its arguments: see `described`

    def __call__(self, run: Callable[..., Any], func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """The result of an operator; `run` makes it the first time."""
        serves = self.serves.get(func)
        if serves is None:
            serves = self.serves[func] = is_cacheable(func)
        if not serves:
            return run(func, types, args, kwargs)
        tensors: list[Any] = []
        words = (args, *((name, value) for name, value in kwargs.items())) if kwargs else (args,)
        key = key_of(self.mode, words, tensors)
        if key is None:
            return run(func, types, args, kwargs)
        key = func, torch.get_default_dtype(), key
        entry = self.cache.get(key)
        if entry is None:
            out = run(func, types, args, kwargs)
            self.cache[key] = encode_output(out, tensors)
            return out
        return run(func, types, args, kwargs) if entry is UNKNOWN else self.decode(entry, tensors)

    def decode(self, entry: Any, tensors: Sequence[Any]) -> Any:
        """What an operator returns: a fake tensor, several, or nothing."""
        if not isinstance(entry, TensorResult):
            return None if entry is NOTHING else type(entry)(self.decode(element, tensors) for element in entry)
        if entry.is_source:
            return tensors[entry.source_index]
        with in_kernel_invocation(self.mode):
            if entry.source_index < 0:
                x = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="meta")
            elif tensors[entry.source_index].dtype == entry.dtype:
                x = tensors[entry.source_index].as_strided(entry.shape, entry.stride, entry.offset)
            else:
                x = torch.empty(0, dtype=entry.dtype, device="meta")
                x.set_(tensors[entry.source_index].untyped_storage(), entry.offset, entry.shape, entry.stride)
        return FakeTensor(self.mode, x, entry.device)


UNKNOWN, NOTHING = object(), object()  # the results of an operator that runs each time, and of one that returns None


def is_cacheable(func: Any) -> bool:
    """Whether the results of an operator follow from the sizes of its arguments."""
    space, _, name = func._schema.name.partition("::")
    allowed = name not in EXCLUDED if space == "aten" else func._schema.name in KERNELS
    return allowed and not any(tag in func.tags for tag in TAGS)


def key_of(mode: Any, value: Any, tensors: list[Any]) -> Any:
    """What the results depend on, of an argument, whose tensors are added to `tensors`; None if unknown."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is FakeTensor:
        if value.fake_mode is not mode or value.constant is not None or value.requires_grad or value.is_conj():
            return None
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device
    if isinstance(value, (tuple, list)):
        keys = [key_of(mode, element, tensors) for element in value]
        return None if None in keys else tuple(keys)
    return None


def encode_output(out: Any, tensors: Sequence[Any]) -> Any:
    """What an operator returned: a Result, several, NOTHING, or UNKNOWN if it cannot be made again."""
    if isinstance(out, (tuple, list)):
        elements = [encode_output(element, tensors) for element in out]
        elements = elements if isinstance(out, list) else tuple(elements)
        return UNKNOWN if UNKNOWN in elements else elements
    if out is None:
        return NOTHING
    if type(out) is not FakeTensor or out.constant is not None or out.requires_grad:
        return UNKNOWN
    sizes = out.shape, out.stride(), int(out.storage_offset()), out.dtype, out.fake_device
    for i, x in enumerate(tensors):
        if x is out:
            return TensorResult(i, True, *sizes)
    storage = out.untyped_storage()
    for i, x in enumerate(tensors):
        if x.untyped_storage()._cdata == storage._cdata:
            return TensorResult(i, False, *sizes)
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta").untyped_storage()
    return TensorResult(-1, False, *sizes) if not sizes[2] and like.nbytes() == storage.nbytes() else UNKNOWN


# Fake CUDA tensors need a CUDA build of torch as soon as autograd sees them, so cpu:0 represents the GPU. Real tensors
# are on "cpu", never on "cpu:0", and PyTorch treats the two as different devices, so mixing host and device tensors
# raises as it would on a GPU.
PLANNED_GPU = torch.device("cpu", 0)


# Products with a dtype of their own that PyTorch's fake tensors do not have, or not rightly: 2.11 takes the dtype of
# addmm for a factor, and lacks bmm into a tensor; baddbmm's is taken for a factor up to 2.15. They have mm.
WIDE_PRODUCTS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("addmm", "bmm", "baddbmm")
    for overload in ("dtype", "dtype_out")
)


class Target(NamedTuple):
    """The properties of a device on which the choice of kernels and block sizes depends."""

    kind: str  # "cpu" or "cuda"
    processors: int = 0  # multiprocessors of a GPU
    capability: tuple[int, int] = (0, 0)  # of a GPU, CUDA's compute capability
    name: str = ""


CPU = Target("cpu")


class FakeDevice(FakeTensorMode):
    """A context in which new tensors have no memory and represent tensors on `target`, or on its host."""

    # torch.tensor(numbers, device=...) always creates the tensor on the host: write torch.tensor(0).to(device). lower:
    # compiles a graph for fake tensors, as (graph, example inputs, backward) -> callable; None: a graph runs as it was
    # traced. tracing: these tensors are used to trace a graph; no step runs, and the ledger records no collective.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # otherwise torch imports Dynamo (a second) and asks it at every operator; it never traces this mode
        )

    def __init__(self, target: Target = CPU, *, lower: Callable[..., Any] | None = None, tracing: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target, self.lower, self.tracing = target, lower, tracing
        self.device = HOST if target.kind == "cpu" else PLANNED_GPU
        self.results = FakeResults(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as FakeTensorMode does; a tensor copied to the device loses its constant value."""
        if (
            func is torch.ops.aten._to_copy.default
            and (kwargs or {}).get("device") == PLANNED_GPU
            and isinstance(args[0], FakeTensor)
        ):
            args[0].constant = None
        run = self._multiply if func in WIDE_PRODUCTS else super().__torch_dispatch__
        return self.results(run, func, types, args, kwargs or {})

    def _multiply(self, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """The result of one of WIDE_PRODUCTS: its `out`, or a new tensor, as of the product alone."""
        *_, a, b = (arg for arg in args if isinstance(arg, Tensor))
        dtype = next(arg for arg in args if isinstance(arg, torch.dtype))
        alone = torch.ops.aten.bmm.dtype if a.dim() == 3 else torch.ops.aten.mm.dtype
        product = super().__torch_dispatch__(alone, types, (a, b, dtype), {})
        for x in (*args, kwargs.get("out", product)):
            if isinstance(x, Tensor) and x.device != product.device:
                raise RuntimeError(f"{func}: a tensor is on {x.device}, and the product on {product.device}")
        return kwargs.get("out", product)


@functools.cache
def target_on(device: torch.device) -> Target:
    """The Target of a real device of this machine."""
    if device.type != "cuda":
        return Target(device.type)
    properties = gpu.properties(device)
    return Target("cuda", properties.multi_processor_count, (properties.major, properties.minor), properties.name)


def target_of(x: Tensor) -> Target:
    """The device that `x` is on, or represents in a plan."""
    if x.device != PLANNED_GPU:
        return target_on(x.device)
    plan = fake_device_of(x)
    assert plan is not None, "a tensor on cpu:0 outside a plan"
    return plan.target


def kind_of(x: Tensor) -> str:
    """The type ("cpu", "cuda", ...) of the device that `x` is on, or represents in a plan."""
    device = x.device
    return device.type if device.index is None or device.type != "cpu" else target_of(x).kind


def fake_device_of(x: Tensor) -> FakeDevice | None:
    """The FakeDevice mode that `x` (or the tensor it wraps) belongs to; None for a real tensor."""
    x = _unwrapped(x)
    return x.fake_mode if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice) else None


def is_fake(x: Tensor) -> bool:
    """Whether `x`, or the tensor that it wraps, has no memory: in a plan or a trace."""
    return isinstance(_unwrapped(x), FakeTensor)


def _unwrapped(x: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def is_traced(x: Tensor) -> bool:
    """Whether `x` belongs to a FakeDevice that traces a graph."""
    plan = fake_device_of(x)
    return plan is not None and plan.tracing


_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("record_launch(str what, Tensor[] read, Tensor(a!)[] written) -> ()")
torch.library.register_fake("fzero::record_launch", lambda what, read, written: None, lib=_LIBRARY)
KERNELS["fzero::record_launch"] = __name__


def record_launch(kernel: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """In a plan, record the launch of a kernel that is no torch operator: its name, what it reads and writes."""
    torch.ops.fzero.record_launch(kernel, list(read), list(written))
