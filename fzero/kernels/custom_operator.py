"""Turn a forward and a backward launcher into a function that autograd and torch.func differentiate and that a trace
keeps as one node.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.autodiff import Function, run_backward, transforms
from fzero.core.compile import have_compiler
from fzero.core.device import KERNELS, fake_device_of, kind_of
from fzero.core.product_flops import Formula, add_formula
from fzero.core.torch_private import FakeTensor
from fzero.kernels.optional_triton import INSTALLED, INTERPRETED, MISSING

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default up to Triton 3.9, which warns that it will change
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")


# Launchers that are made of PyTorch's operators, by the operator: a count of memory or of FLOPs runs them, and sees
# what they allocate and multiply inside.
OPENED: dict[Any, Callable[..., Any]] = {}


def operator(
    schema: str,
    fake: Callable[..., Any],
    *,
    flop: Formula | None = None,
    opened: bool = False,
    batched: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register a launcher as the operator fzero::NAME of `schema`, which a traced or compiled graph contains
    as one node.

    A launcher is pure: it returns new tensors and does not write into its arguments. `fake` takes the same arguments
    and returns empty tensors of the results' shapes and dtypes. flop: the FLOPs of a call, of a launcher that
    multiplies matrices (see `kernels.flops`). opened: see OPENED. batched: the rule of vmap, as
    torch.library.register_vmap takes it; None: it calls the launcher once for each example, and warns.
    """

    def define(launch: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any) -> Any:
            # Triton launches on the current device.
            device = next((a.device for a in args if isinstance(a, Tensor) and a.is_cuda), None)
            if device is None:
                return launch(*args)
            with gpu.on_device(device):
                return launch(*args)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
        KERNELS.add(f"fzero::{name}")
        if batched is not None:
            torch.library.register_vmap(f"fzero::{name}", batched, lib=_LIBRARY)
        defined = getattr(torch.ops.fzero, name).default
        if flop is not None:
            add_formula(defined.overloadpacket, flop)
        if opened:
            OPENED[defined] = launch
        return defined

    return define


def triton_runs(*tensors: Tensor) -> str:
    """The reason why Triton kernels cannot take these tensors; "" if they can: all on CUDA, or the interpreter is
    on.
    """
    devices = {kind_of(t) for t in tensors}
    if devices == {"cuda"} or (INTERPRETED and devices == {"cpu"}):
        planned = INSTALLED or any(fake_device_of(t) is not None for t in tensors)
        return "" if planned else MISSING
    return f"a tensor is on {', '.join(sorted(devices - {'cuda'}) or devices)}, and Triton's kernels run on cuda"


def on_cuda(*args: Any, **options: Any) -> str:
    """The reason why "auto" should not take a Triton kernel: in the interpreter it only serves to check numbers. "" on
    CUDA.
    """
    return (
        ""
        if all(kind_of(a) == "cuda" for a in args if isinstance(a, Tensor))
        else "interpreted, for checking numbers alone"
    )


MANY = 1 << 16  # numbers of a tensor from which one C++ loop pays for its call


def cpp_runs(*tensors: Tensor) -> str:
    """The reason why C++ cannot take these tensors; "" if it can: all on the CPU, and there is a compiler."""
    if any(kind_of(t) != "cpu" for t in tensors):
        return "a tensor is not on the CPU"
    return "" if have_compiler() else "there is no C++ compiler"


def runs_alone(x: Tensor, *args: Any, **options: Any) -> str:
    """The reason why "auto" should not take a C++ loop in place of several of torch's: x is small, or a graph is
    traced, whose operators a compiler fuses and a partitioner computes again."""
    plan = fake_device_of(x)
    traced = isinstance(x, FakeTensor) if plan is None else plan.tracing
    if traced or transforms() or torch.compiler.is_compiling():
        return "the operators of a graph are fused when it is compiled"
    return "" if x.numel() >= MANY else f"a tensor has fewer than {MANY} numbers"


class Fused(NamedTuple):
    """A differentiable function given by its forward and backward pass, which both run on plain tensors below all
    transforms.

    forward(*tensors) -> (results..., extras...): new tensors, of which the first `results` are what the function
    returns and the others are for the backward pass. backward(saved, grads) -> the gradients of the first tensors, one
    for each that is differentiable. keep(tensors, outputs) -> what the backward pass is given as `saved`; inputs and
    extras by default.
    """

    label: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Sequence[Tensor]]
    results: int = 1
    select_saved: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """The results of `tensors`: a tensor if there is one, else a tuple. Differentiable once; see
        `autodiff.Backward`.
        """
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
