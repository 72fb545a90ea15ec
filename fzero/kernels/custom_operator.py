"""What files of kernels are made with: Triton, operators, and functions of a forward and a backward launcher.

Kernels import `triton` and `tl` from here. Triton need not be installed on a machine without a GPU: the files of this
package still load, plans count what their kernels would do, and only a launch raises.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fzero import core
from fzero.core import gpu
from fzero.core.autodiff import INFERENCE, Function, run_backward, transforms
from fzero.core.call_record import note_call, record_operator
from fzero.core.compile_cache import have_compiler
from fzero.core.device import KERNELS, LAUNCHERS, fake_device_of, kind_of
from fzero.core.torch_private import FakeTensor

MISSING = "Triton is not installed; it comes with torch's CUDA build, or by `pip install triton`"


class AbsentKernel:
    """Stands for a kernel; a launch raises ImportError."""

    def __init__(self, function: Any):
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        raise ImportError(f"{self.__name__}: {MISSING}")


class Absent:
    """Stands for `triton` and `triton.language`: what a file needs to define its kernels and count their blocks."""

    float32, float16, bfloat16 = "fp32", "fp16", "bf16"

    def jit(self, function: Any = None, **_: Any) -> Any:
        return AbsentKernel if function is None else AbsentKernel(function)

    def constexpr(self, value: Any) -> Any:
        return value

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << max(0, n - 1).bit_length()


# By Triton's own types a kernel takes no number where it has a `tl.constexpr`, and its language's functions return
# nothing; and it need not be installed. So a type checker is told that all of it is Any.
if TYPE_CHECKING:

    class triton(Any):
        JITFunction = Any

    class tl(Any):
        class constexpr(Any):
            def __init__(self, value: Any) -> None: ...
else:
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        triton = tl = Absent()

INSTALLED = not isinstance(triton, Absent)
VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2])) if INSTALLED else (0, 0)
# TRITON_INTERPRET=1 before Triton's import: kernels run in Python, on any device.
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default up to Triton 3.9, which warns that it will change
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")


# Launchers that are made of PyTorch's operators, by the operator: a count of memory or of FLOPs runs them, and sees
# what they allocate and multiply inside.
OPENED: dict[Any, Callable[..., Any]] = {}


def operator(
    schema: str,
    fake: Callable[..., Any],
    *,
    flop: core.Formula | None = None,
    opened: bool = False,
    by_shape: bool = False,
    batched: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register a launcher as the operator fzero::NAME of `schema`, one node of a graph."""

    # A launcher is pure: it returns new tensors and does not write into its arguments. `fake` takes the same arguments
    # and returns empty tensors of the results' shapes and dtypes. flop: the FLOPs of a call.
    # opened: see OPENED. by_shape: what it calls depends on its arguments' shapes alone, see core.call_record.
    # batched: the rule of vmap; None: one call for each example, with a warning.
    def define(launch: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any) -> Any:
            # Triton launches on the current device.
            device = next((a.device for a in args if isinstance(a, Tensor) and a.is_cuda), None)
            if device is None:
                return record_operator(launch, args, by_shape)
            with gpu.on_device(device):
                return launch(*args)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
        KERNELS[f"fzero::{name}"] = launch.__module__
        if batched is not None:
            torch.library.register_vmap(f"fzero::{name}", batched, lib=_LIBRARY)
        defined = getattr(torch.ops.fzero, name).default
        LAUNCHERS[defined] = on_device
        if flop is not None:
            core.add_formula(defined.overloadpacket, flop)
        if opened:
            OPENED[defined] = launch
        return defined

    return define


def triton_runs(*tensors: Tensor) -> str:
    """The reason why Triton kernels cannot take these tensors; "" if all are on CUDA or it interprets."""
    devices = {kind_of(t) for t in tensors}
    if devices == {"cuda"} or (INTERPRETED and devices == {"cpu"}):
        planned = INSTALLED or any(fake_device_of(t) is not None for t in tensors)
        return "" if planned else MISSING
    return f"a tensor is on {', '.join(sorted(devices - {'cuda'}) or devices)}, and Triton's kernels run on cuda"


def on_cuda(*args: Any, **options: Any) -> str:
    """The reason why "auto" should not take a Triton kernel, such as the interpreter; "" on CUDA."""
    return (
        ""
        if all(kind_of(a) == "cuda" for a in args if isinstance(a, Tensor))
        else "interpreted, for checking numbers alone"
    )


MANY = 1 << 16  # numbers of a tensor from which one C++ loop pays for its call


def cpp_runs(*tensors: Tensor) -> str:
    """The reason why C++ cannot take these tensors; "" if it can."""
    if any(kind_of(t) != "cpu" for t in tensors):
        return "a tensor is not on the CPU"
    return "" if have_compiler() else "there is no C++ compiler"


def rows_run(*tensors: Tensor) -> str:
    """The reason why a canonical form cannot take these tensors; "" if C++ can on a CPU, or Triton on a GPU."""
    return triton_runs(*tensors) if all(kind_of(t) == "cuda" for t in tensors) else cpp_runs(*tensors)


def address(x: Tensor | None) -> int | None:
    """Where the numbers of a tensor lie in memory; None for no tensor."""
    return None if x is None else x.data_ptr()


def call_cpp(function: Any, tensors: Sequence[Tensor | None], *arguments: Any) -> None:
    """Call a C++ function with pointers to tensors, null for None, and then other arguments."""
    arguments = *(ctypes.c_void_p(address(x)) for x in tensors), *arguments
    function(*arguments)
    note_call(function, arguments, tensors)


def runs_alone(x: Tensor, *args: Any, **options: Any) -> str:
    """The reason why "auto" should not take a C++ loop in place of several of torch's operators."""
    if INFERENCE.get():
        return ""
    plan = fake_device_of(x)
    traced = isinstance(x, FakeTensor) if plan is None else plan.tracing
    if traced or transforms() or torch.compiler.is_compiling():
        return "the operators of a graph are fused when it is compiled"
    return "" if x.numel() >= MANY else f"a tensor has fewer than {MANY} numbers"


class Fused(NamedTuple):
    """A differentiable function given by its forward and backward pass, below all transforms."""

    label: str
    forward: Callable[..., tuple[Tensor, ...]]  # -> new tensors: the results, and extras for the backward pass
    backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Sequence[Tensor]]  # (saved, grads) -> gradients
    results: int = 1
    # (tensors, outputs) -> what the backward pass is given as `saved`; None: inputs and extras
    select_saved: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """The results of `tensors`: a tensor if there is one, else a tuple; differentiable once."""
        out = _Fused.apply(self, *tensors)[: self.results]
        return out[0] if self.results == 1 else out


def _backward(fused: Fused, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(fused.backward(tensors[:count], tensors[count:]))


class _Fused(Function):
    @staticmethod
    def forward(fused: Fused, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.forward(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        fused, *tensors = inputs
        ctx.fused, ctx.inputs = fused, len(tensors)
        ctx.mark_non_differentiable(*output[fused.results :])
        saved = (
            fused.select_saved(tuple(tensors), output) if fused.select_saved else (*tensors, *output[fused.results :])
        )
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, fused = ctx.saved_tensors, ctx.fused
        run = functools.partial(_backward, fused, len(saved))
        gradients = run_backward(fused.label, run, *saved, *grads[: fused.results])
        return None, *gradients, *([None] * (ctx.inputs - len(gradients)))


# ---- largest magnitudes that a kernel finds of what it writes; core.graph_passes says for whom and where -------------
# A magnitude is compared by the bits of its float32, which are ordered as magnitudes are, NaN above infinity.

PART = 256  # the most numbers of a row whose largest magnitude a kernel of flat blocks keeps


@triton.jit
def bits_of(x):
    """The bits of |x| for x as it is stored, int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_largest(MOST, indices, bits, mask):
    """Store the magnitudes with these bits, which round to themselves in the dtype that they come from."""
    tl.store(MOST + indices, bits.to(tl.float32, bitcast=True).to(MOST.dtype.element_ty), mask=mask)


def segment_length(x: Tensor) -> int:
    """The length of the parts of a row of x [..., N], a power of two up to PART.

    >>> segment_length(torch.empty(2, 14336)), segment_length(torch.empty(2, 48))
    (256, 16)
    """
    return math.gcd(x.shape[-1], PART) if x.dim() and x.shape[-1] else 1


def largest_like(x: Tensor, segment_size: int | None = None) -> Tensor:
    """An empty tensor [rows, parts] for the largest magnitudes of x [..., N]."""
    parts = 1 if segment_size is None else x.shape[-1] // segment_size
    return torch.empty((math.prod(x.shape[:-1]), parts), dtype=x.dtype, device=x.device)


def operator_with_largest(
    schema: str, fake: Callable[..., Any], indices: Sequence[int] = (0,), segmented: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register launch(*arguments, largest) as `schema`, and as NAME_largest with magnitudes."""

    def fake_with_largest(*args: Any) -> tuple[Tensor, ...]:
        results = fake(*args)
        results = results if isinstance(results, tuple) else (results,)
        watched = (results[i] for i in indices)
        return *results, *(largest_like(x, segment_length(x) if segmented else None) for x in watched)

    def define(launch: Callable[..., Any]) -> Callable[..., Any]:
        signature, _, results = schema.partition(" -> ")
        name, _, arguments = signature.partition("(")
        count = results.count("Tensor")
        more = ", ".join(["Tensor"] * (count + len(indices)))
        plain = operator(schema, fake)(functools.partial(launch, largest=False))
        twin_schema = f"{name}_largest({arguments} -> ({more})"
        twin = operator(twin_schema, fake_with_largest)(functools.partial(launch, largest=True))
        core.add_twin(plain, twin, {index: count + i for i, index in enumerate(indices)})
        return plain

    return define


def cap_logits(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), or x if cap is 0."""
    return torch.tanh(x / cap) * cap if cap else x
