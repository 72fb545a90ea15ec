"""RMSNorm on a CPU, in C++ (norm_cpu.cpp), compiled when first used: forward and backward in one pass over memory each,
where the reference makes six tensors of the size of x on the way and as many back.

The definitions are in norm; the gradients, as in norm_triton, are in float32 from x and 1 / sqrt(mean(x^2) + eps).
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from fzero.core import cpp
from fzero.kernels.custom_operator import Fused, operator

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PARTS, LEAST = 16, 64  # the sum over rows is made in up to so many parts, of at least so many rows


class _NormShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "n", "rows_a_part", "threads")] + [("eps", ctypes.c_double)]


def _call(name: str, tensors: tuple[Tensor | None, ...], x: Tensor, eps: float = 0.0) -> None:
    """Call a function of the library for the rows of x."""
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    threads = torch.get_num_threads() if x.numel() > 1 << 15 else 1
    shape = _NormShape(rows, n, _chunk_rows(rows), threads, eps)
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors)
    getattr(cpp.library(__file__, cpp.CONTRACTED), f"{name}_{TYPES[x.dtype]}")(*pointers, ctypes.byref(shape))


def _chunk_rows(rows: int) -> int:
    return max(LEAST, -(-rows // PARTS))


def _scale_of(scale: Tensor, x: Tensor) -> Tensor:
    """The scale rounded to x's dtype, in float32."""
    return scale.to(x.dtype).to(torch.float32).contiguous()


def _inverse_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(
    "rms_norm_cpu(Tensor x, Tensor scale, float eps) -> (Tensor, Tensor)",
    lambda x, scale, eps: (x.new_empty(x.shape), _inverse_like(x)),
)
def rms_norm_forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x normed, 1 / sqrt(mean(x^2) + eps) of its rows, float32)."""
    x, out, inverse = x.contiguous(), x.new_empty(x.shape), _inverse_like(x)
    _call("forward", (x, None, _scale_of(scale, x), out, None, inverse), x, eps)
    return out, inverse


@operator(
    "add_rms_norm_cpu(Tensor x, Tensor residual, Tensor scale, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, scale, eps: (x.new_empty(x.shape), x.new_empty(x.shape), _inverse_like(x)),
)
def add_rms_norm_forward(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum normed, the sum x + residual, 1 / sqrt(mean + eps) of its rows, float32)."""
    x, residual, inverse = x.contiguous(), residual.contiguous(), _inverse_like(x)
    out, total = (x.new_empty(x.shape) for _ in range(2))
    _call("forward", (x, residual, _scale_of(scale, x), out, total, inverse), x, eps)
    return out, total, inverse


@operator(
    "rms_norm_cpu_backward(Tensor g, Tensor? total_g, Tensor x, Tensor scale, Tensor inverse) -> (Tensor, Tensor)",
    lambda g, total_g, x, scale, inverse: (x.new_empty(x.shape), torch.empty_like(scale)),
)
def rms_norm_backward(
    g: Tensor, total_g: Tensor | None, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of scale from the gradient g of x normed, and total_g of x itself, if any."""
    rows, g, x = math.prod(x.shape[:-1]), g.contiguous(), x.contiguous()
    residual_g = None if total_g is None else total_g.contiguous()
    dx, by_scale = x.new_empty(x.shape), inverse.new_zeros((-(-rows // _chunk_rows(rows)), x.shape[-1]))
    _call("backward", (g, residual_g, x, _scale_of(scale, x), inverse, dx, by_scale), x)
    return dx, by_scale.sum(0).to(scale.dtype)


# ---- as forms --------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The form of `rms_norm`."""
    return Fused(
        "rms_norm",
        lambda x, scale: torch.ops.fzero.rms_norm_cpu(x, scale, eps),
        lambda saved, grads: torch.ops.fzero.rms_norm_cpu_backward(grads[0], None, *saved),
        select_saved=lambda tensors, outputs: (*tensors, outputs[1]),
    )(x, scale)


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The form of `add_rms_norm`."""

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, of_scale = torch.ops.fzero.rms_norm_cpu_backward(*grads, *saved)
        return dx, dx, of_scale

    return Fused(
        "add_rms_norm",
        lambda x, residual, scale: torch.ops.fzero.add_rms_norm_cpu(x, residual, scale, eps),
        backward,
        results=2,
        select_saved=lambda tensors, outputs: (outputs[1], tensors[2], outputs[2]),
    )(x, residual, scale)


def supports(x: Tensor, residual: Tensor | None, scale: Tensor) -> str:
    """The reason why the C++ does not serve a call; "" if it does."""
    if x.dtype not in TYPES or not scale.is_floating_point():
        return f"the dtypes are {x.dtype} and {scale.dtype}; x must be in float32 or bfloat16"
    if residual is not None and (residual.dtype, residual.shape) != (x.dtype, x.shape):
        return f"x is {x.dtype} {list(x.shape)}, the residual {residual.dtype} {list(residual.shape)}; they must agree"
    return ""
