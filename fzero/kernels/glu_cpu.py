"""SwiGLU on a CPU, in C++ (glu_cpu.cpp), compiled when first used: one pass over memory forward and one backward, and
silu(a) is not kept. Its bits are those of the reference, up to the last bit of exp in a tail shorter than a vector.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fzero.core import cpp
from fzero.kernels.custom_operator import Fused, operator

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _vectors() -> str:
    """The part of the library with the vectors that torch has on this CPU, or is told to have."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"OF_{capability}" if capability in ("AVX512", "AVX2") else ""


def _call(name: str, tensors: tuple[Tensor, ...]) -> None:
    """Call a function of the library on all numbers of tensors of one shape."""
    n, threads = tensors[0].numel(), torch.get_num_threads() if tensors[0].numel() > 1 << 15 else 1
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    run = getattr(cpp.library(__file__, cpp.EXACT, _vectors()), f"{name}_{TYPES[tensors[0].dtype]}")
    run(*pointers, ctypes.c_int64(n), ctypes.c_int64(threads))


@operator("swiglu_cpu(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape))
def swiglu_forward(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b."""
    out = a.new_empty(a.shape)
    _call("forward", (a.contiguous(), b.contiguous(), out))
    return out


@operator(
    "swiglu_cpu_backward(Tensor a, Tensor b, Tensor g) -> (Tensor, Tensor)",
    lambda a, b, g: (a.new_empty(a.shape), a.new_empty(a.shape)),
)
def swiglu_backward(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by a and b for the gradient g of the result."""
    da, db = (a.new_empty(a.shape) for _ in range(2))
    _call("backward", (a.contiguous(), b.contiguous(), g.contiguous(), da, db))
    return da, db


swiglu = Fused(
    "swiglu",
    lambda a, b: (torch.ops.fzero.swiglu_cpu(a, b),),
    lambda saved, grads: torch.ops.fzero.swiglu_cpu_backward(*saved, *grads),
)


def supports(a: Tensor, b: Tensor) -> str:
    """The reason why the C++ does not serve a call; "" if it does."""
    if a.dtype not in TYPES or b.dtype != a.dtype:
        return f"the dtypes are {a.dtype} and {b.dtype}; it takes two of float32 or bfloat16"
    return "" if a.shape == b.shape else f"the shapes are {list(a.shape)} and {list(b.shape)}; they must agree"
