"""The device that a tensor is on, or that a plan's fake tensor represents.

A plan for a GPU runs on machines without one. Its tensors are fake tensors of a `FakeDevice` mode, which has two
memories: tensors on `FakeDevice.device` represent the GPU's, those on torch.device("cpu") the host's. Code that chooses
by device calls `kind_of` or `target_of`, which answer for the planned device. The tensors carry this information; there
is no global state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.fake_results import KERNELS, FakeResults
from fzero.core.gpu import HOST as HOST
from fzero.core.torch_private import FakeTensor, FakeTensorMode, get_unwrapped, is_functorch_wrapped_tensor

# Fake CUDA tensors need a CUDA build of torch as soon as autograd sees them, so cpu:0 represents the GPU. Real tensors
# are on "cpu", never on "cpu:0", and PyTorch treats the two as different devices, so mixing host and device tensors
# raises as it would on a GPU.
ELSEWHERE = torch.device("cpu", 0)


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
    """A context in which new tensors have no memory: those on `self.device` represent tensors on `target`, those on
    "cpu" tensors on its host.

    torch.tensor(numbers, device=...) always creates the tensor on the host: write torch.tensor(0).to(device).

    lower: compiles a graph for fake tensors, as (graph, example inputs, backward) -> callable; None: a graph runs as it
    was traced.
    tracing: these tensors are used to trace a graph; no step runs, and the ledger records no collective.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # otherwise torch imports Dynamo (a second) and asks it at every operator; it never traces this mode
        )

    def __init__(self, target: Target = CPU, *, lower: Callable[..., Any] | None = None, tracing: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target, self.lower, self.tracing = target, lower, tracing
        self.device = HOST if target.kind == "cpu" else ELSEWHERE
        self.results = FakeResults(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as FakeTensorMode does, except that a tensor copied to the device loses its known constant
        value.
        """
        if (
            func is torch.ops.aten._to_copy.default
            and (kwargs or {}).get("device") == ELSEWHERE
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
    found = gpu.properties(device)
    return Target("cuda", found.multi_processor_count, (found.major, found.minor), found.name)


def target_of(x: Tensor) -> Target:
    """The device that `x` is on, or represents in a plan."""
    if x.device != ELSEWHERE:
        return target_on(x.device)
    plan = fake_device_of(x)
    assert plan is not None, "a tensor on cpu:0 outside a plan"
    return plan.target


def kind_of(x: Tensor) -> str:
    """The type ("cpu", "cuda", ...) of the device that `x` is on, or represents in a plan."""
    device = x.device
    return device.type if device.index is None or device.type != "cpu" else target_of(x).kind


def fake_device_of(x: Tensor) -> FakeDevice | None:
    """The FakeDevice mode that `x` (or the tensor it wraps under a torch.func transform) belongs to; None for a real
    tensor.
    """
    x = _unwrapped(x)
    return x.fake_mode if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice) else None


def is_fake(x: Tensor) -> bool:
    """Whether `x`, or the tensor it wraps under a torch.func transform, has no memory: in a plan, or in a trace."""
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
KERNELS.add("fzero::record_launch")


def record_launch(what: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """In a plan, record the launch of a kernel that is not a torch operator: its name, the tensors it reads, and those
    it writes.
    """
    torch.ops.fzero.record_launch(what, list(read), list(written))
