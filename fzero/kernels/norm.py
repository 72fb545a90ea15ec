"""RMSNorm and LayerNorm over the last dim, alone or after a residual sum.

    rms_norm(x)   = x r * scale,                  r = 1 / sqrt(mean(x^2) + eps)
    layer_norm(x) = (x - mean(x)) r * scale + bias,   r = 1 / sqrt(var(x) + eps)
    add_rms_norm(x, residual) = rms_norm(s), s,   s = x + residual;  add_layer_norm likewise

The kernels and the gradients are in norm_triton.
Ref: Zhang & Sennrich 2019, "Root mean square layer normalization", arXiv:1910.07467, equation 4; Ba et al. 2016, "Layer
normalization", arXiv:1607.06450, section 3.1.

Shapes: x and residual [..., N] of one dtype, scale and bias [N] of any; statistics are float32 or wider, the results of
x's dtype. As in the references, s and the normed row are rounded to that dtype before further use.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import kernels
from fzero.core import compile_cache
from fzero.core.autodiff import transforms
from fzero.core.device import kind_of
from fzero.core.vjp_pair import vjp_pair
from fzero.kernels import rowwise
from fzero.kernels.custom_operator import Fused, call_cpp, cpp_runs, on_cuda, operator, runs_alone, triton_runs
from fzero.kernels.registry import Form, Op, asked_for, by_device
from fzero.kernels.rowwise import layer_norm_forward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm_reference(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale: the definition."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * scale.to(x.dtype)


def layer_norm_reference(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * scale + bias: the definition."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * scale.to(x.dtype) + bias.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x + residual): the definition."""
    total = x + residual
    return rms_norm_reference(total, scale, eps), total


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm of the sum, the sum x + residual): the definition."""
    total = x + residual
    return layer_norm_reference(total, scale, bias, eps), total


def layer_norm_aten(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """layer_norm by torch's kernel, which sums gradients in x's dtype on a CPU."""
    return F.layer_norm(x, x.shape[-1:], scale.to(x.dtype), bias.to(x.dtype), eps)


def add_layer_norm_aten(x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """add_layer_norm by torch's own kernel."""
    total = x + residual
    return layer_norm_aten(total, scale, bias, eps), total


LONG, CHUNK = 1 << 22, 1 << 20  # elements of x from which it is normalised in chunks, and of a chunk


def _rows(x: Tensor) -> int:
    return max(1, CHUNK // x.shape[-1])


@operator(
    "rms_norm_rows(Tensor x, Tensor scale, float eps) -> Tensor",
    lambda x, scale, eps: x.new_empty(x.shape),
    opened=True,
)
def rms_norm_rows(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` of x [N, D], some rows at a time, to save memory."""
    out = x.new_empty(x.shape)
    for x_rows, out_rows in zip(x.split(_rows(x)), out.split(_rows(x))):
        out_rows.copy_(rms_norm_reference(x_rows, scale, eps))
    return out


@operator(
    "rms_norm_rows_backward(Tensor x, Tensor scale, Tensor g, Tensor? h, float eps) -> (Tensor, Tensor)",
    lambda x, scale, g, h, eps: (x.new_empty(x.shape), torch.empty_like(scale)),
    opened=True,
)
def rms_norm_rows_backward(x: Tensor, scale: Tensor, g: Tensor, h: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x (with h added) and of scale, for the gradient g of the result."""
    pair = vjp_pair(lambda x, scale: [rms_norm_reference(x, scale, eps)], 2, compiled=False)
    dx, total = x.new_empty(x.shape), torch.zeros_like(scale, dtype=torch.promote_types(x.dtype, torch.float32))
    for i in range(0, x.shape[0], _rows(x)):
        chunk = slice(i, i + _rows(x))
        dx_chunk, of_scale = pair.backward(pair.forward([x[chunk], scale])[1], [g[chunk]])
        torch.add(dx_chunk, h[chunk], out=dx[chunk]) if h is not None else dx[chunk].copy_(dx_chunk)
        total += of_scale
    return dx, total.to(scale.dtype)


def rms_norm_in_chunks(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """rms_norm in chunks of rows; only x is kept for the backward pass."""

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return rms_norm_rows_backward(*saved, grads[0].reshape(saved[0].shape), None, eps)

    fused = Fused("rms_norm in chunks", lambda x, scale: (rms_norm_rows(x, scale, eps),), backward)
    return fused(x.reshape(-1, x.shape[-1]), scale).reshape(x.shape)


def add_rms_norm_in_chunks(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """add_rms_norm in chunks of rows; only the sum is kept for the backward pass."""

    def forward(x: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm_rows(total, scale, eps), total

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total, scale = saved
        dx, of_scale = rms_norm_rows_backward(total, scale, *grads, eps)
        return dx, dx, of_scale

    def select_saved(tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return outputs[1], tensors[2]

    fused = Fused("add_rms_norm in chunks", forward, backward, 2, select_saved)
    flat = (t.reshape(-1, t.shape[-1]) for t in (x, residual))
    return tuple(t.reshape(x.shape) for t in fused(*flat, scale))  # type: ignore[return-value]


SUMMED_ROWS = 1024  # of a sum in float32; such sums are added in float64


def _layer_backward_like(g: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_param = x.new_empty(x.shape[-1:], dtype=torch.float32)
    return x.new_empty(x.shape), by_param, torch.empty_like(by_param)


@operator(
    "layer_norm_rows_backward(Tensor g, Tensor x, Tensor scale, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_backward_like,
    opened=True,
)
def layer_norm_rows_backward(g: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient by x [M, N], by scale and by bias, float32 [N]) from the gradient g of x normed."""
    dx, *_ = _layer_backward_like(g, x)
    sums = x.new_zeros((2, x.shape[-1]), dtype=torch.float64)
    rows, every = min(_rows(x), SUMMED_ROWS), [True, True, True]
    for i in range(0, x.shape[0] if x.numel() else 0, rows):
        chunk = slice(i, i + rows)
        wide, shape = x[chunk].to(torch.float32), x.shape[-1:]
        _, *stats = torch.native_layer_norm(wide, shape, None, None, eps)
        inputs = g[chunk].to(torch.float32), wide, shape, *stats
        by_x, *by_params = torch.ops.aten.native_layer_norm_backward(*inputs, scale, scale, every)
        dx[chunk].copy_(by_x)
        sums += torch.stack(by_params)
    by_scale, by_bias = sums.to(torch.float32)
    return dx, by_scale, by_bias


def layer_norm_rows(x: Tensor, scale: Tensor, bias: Tensor, eps: float, canonical: bool = False) -> Tensor:
    """layer_norm by torch's own kernels; statistics, and the gradients of scale and bias, in float32 or wider."""

    def wide(param: Tensor, x: Tensor) -> Tensor:
        return param.to(x.dtype).to(torch.float32)

    def forward(x: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if canonical:
            return (layer_norm_forward(x, scale, bias, eps),)
        return torch.native_layer_norm(x, x.shape[-1:], wide(scale, x), wide(bias, x), eps)[:1]

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, scale, bias = saved
        flat = [t.reshape(-1, t.shape[-1]) for t in (grads[0], x)]
        dx, of_scale, of_bias = layer_norm_rows_backward(*flat, wide(scale, x), eps)
        return dx.reshape(x.shape), of_scale.to(scale.dtype), of_bias.to(bias.dtype)

    return Fused("layer_norm", forward, backward)(x, scale, bias)


def add_layer_norm_rows(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor, eps: float, canonical: bool = False
) -> tuple[Tensor, Tensor]:
    """add_layer_norm, with layer_norm as `layer_norm_rows`."""
    total = x + residual
    return layer_norm_rows(total, scale, bias, eps, canonical), total


# ---- RMSNorm on a CPU, in C++ (norm.cpp), compiled when first used ---------------------------------------------------
# Forward and backward in one pass over memory each, where the reference makes six tensors of the size of x on the way
# and as many back. The gradients, as in norm_triton, are in float32 from x and 1 / sqrt(mean(x^2) + eps).

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PARTS, LEAST = 16, 64  # the sum over rows is made in up to so many parts, of at least so many rows


class _NormShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "n", "rows_a_part", "threads")] + [("eps", ctypes.c_double)]


def _call_cpp(name: str, tensors: tuple[Tensor | None, ...], x: Tensor, eps: float = 0.0) -> None:
    """Call a function of the library for the rows of x."""
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    threads = torch.get_num_threads() if x.numel() > 1 << 15 else 1
    shape = _NormShape(rows, n, _chunk_rows(rows), threads, eps)
    call_cpp(
        getattr(compile_cache.library(__file__, compile_cache.CONTRACTED), f"{name}_{TYPES[x.dtype]}"),
        tensors,
        ctypes.byref(shape),
    )


def _chunk_rows(rows: int) -> int:
    return max(LEAST, -(-rows // PARTS))


def _scale_of(scale: Tensor, x: Tensor) -> Tensor:
    """The scale rounded to x's dtype."""
    return scale.to(x.dtype).contiguous()


def _inverse_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(
    "rms_norm_cpu(Tensor x, Tensor scale, float eps) -> (Tensor, Tensor)",
    lambda x, scale, eps: (x.new_empty(x.shape), _inverse_like(x)),
    by_shape=True,
)
def rms_norm_forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x normed, 1 / sqrt(mean(x^2) + eps) of its rows, float32)."""
    x, out, inverse = x.contiguous(), x.new_empty(x.shape), _inverse_like(x)
    _call_cpp("forward", (x, None, _scale_of(scale, x), out, None, inverse), x, eps)
    return out, inverse


@operator(
    "add_rms_norm_cpu(Tensor x, Tensor residual, Tensor scale, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, scale, eps: (x.new_empty(x.shape), x.new_empty(x.shape), _inverse_like(x)),
    by_shape=True,
)
def add_rms_norm_forward(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum normed, the sum x + residual, 1 / sqrt(mean + eps) of its rows, float32)."""
    x, residual, inverse = x.contiguous(), residual.contiguous(), _inverse_like(x)
    out, total = (x.new_empty(x.shape) for _ in range(2))
    _call_cpp("forward", (x, residual, _scale_of(scale, x), out, total, inverse), x, eps)
    return out, total, inverse


@operator(
    "rms_norm_cpu_backward(Tensor g, Tensor? total_g, Tensor x, Tensor scale, Tensor inverse) -> (Tensor, Tensor)",
    lambda g, total_g, x, scale, inverse: (x.new_empty(x.shape), torch.empty_like(scale)),
)
def rms_norm_backward(
    g: Tensor, total_g: Tensor | None, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale from the gradient g of x normed, and total_g of x."""
    rows, g, x = math.prod(x.shape[:-1]), g.contiguous(), x.contiguous()
    residual_g = None if total_g is None else total_g.contiguous()
    dx, by_scale = x.new_empty(x.shape), inverse.new_zeros((-(-rows // _chunk_rows(rows)), x.shape[-1]))
    _call_cpp("backward", (g, residual_g, x, _scale_of(scale, x), inverse, dx, by_scale), x)
    return dx, by_scale.sum(0).to(scale.dtype)


def _rms_norm_in_cpp(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The form of `rms_norm`."""
    return Fused(
        "rms_norm",
        lambda x, scale: rms_norm_forward(x, scale, eps),
        lambda saved, grads: rms_norm_backward(grads[0], None, *saved),
        select_saved=lambda tensors, outputs: (*tensors, outputs[1]),
    )(x, scale)


def _add_rms_norm_in_cpp(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The form of `add_rms_norm`."""

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, of_scale = rms_norm_backward(*grads, *saved)
        return dx, dx, of_scale

    return Fused(
        "add_rms_norm",
        lambda x, residual, scale: add_rms_norm_forward(x, residual, scale, eps),
        backward,
        results=2,
        select_saved=lambda tensors, outputs: (outputs[1], tensors[2], outputs[2]),
    )(x, residual, scale)


# ---- the operations -------------------------------------------------------------------------------------------------


def _rows_support(x: Tensor, residual: Tensor | None, *params: Tensor) -> str:
    if kind_of(x) != "cpu":
        return "x is not on the CPU"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; it takes float32, bfloat16 and float16"
    return _param_shapes(x, *params)


def _aten_supports(x: Tensor, residual: Tensor | None, *params: Tensor) -> str:
    if kind_of(x) == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return f"on a CPU it sums the gradients of scale and bias over rows in {x.dtype}"
    return _param_shapes(x, *params)


def _long_on_cpu(x: Tensor, *args: Any, **options: Any) -> str:
    """Why "auto" should not take chunks: a compiled block, which is traced under torch.func, has no float32 copies."""
    if kind_of(x) != "cpu" or transforms():
        return "it is for eager operators on a CPU"
    return "" if x.numel() >= LONG else f"x has fewer than {LONG} elements"


def _supports(x: Tensor, residual: Tensor | None, *params: Tensor) -> str:
    if any(t.dtype not in DTYPES for t in (x, *params)):
        return f"the dtypes are {', '.join(str(t.dtype) for t in (x, *params))}; it takes float32, bfloat16 and float16"
    reason = _residual_like(x, residual) or _param_shapes(x, *params)
    return reason or triton_runs(x, *params, *([] if residual is None else [residual]))


def _cpp_supports(x: Tensor, residual: Tensor | None, scale: Tensor) -> str:
    if x.dtype not in TYPES or not scale.is_floating_point():
        return f"the dtypes are {x.dtype} and {scale.dtype}; x must be in float32 or bfloat16"
    tensors = (x, scale) if residual is None else (x, residual, scale)
    return _residual_like(x, residual) or _param_shapes(x, scale) or cpp_runs(*tensors)


def _canonical_supports(x: Tensor, residual: Tensor | None, *params: Tensor) -> str:
    return _residual_like(x, residual) or _param_shapes(x, *params) or rowwise.supports(x)


def _residual_like(x: Tensor, residual: Tensor | None) -> str:
    if residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape):
        return ""
    return f"x is {x.dtype} {list(x.shape)}, the residual {residual.dtype} {list(residual.shape)}; they must agree"


def _param_shapes(x: Tensor, *params: Tensor) -> str:
    wrong = [list(p.shape) for p in params if p.shape != x.shape[-1:]]
    return f"a parameter is {wrong[0]} for x {list(x.shape)}; it must be [{x.shape[-1]}]" if wrong else ""


def _on_cpu(x: Tensor, *args: Any, **options: Any) -> str:
    # Forward and backward of [2048, 1024] on one thread: float32 7 ms, the reference 61; bfloat16 8 and 51.
    return "" if kind_of(x) == "cpu" else "it was measured on the CPU alone, 2 to 9 times as fast as the reference"


def _op(name: str, reference: Callable[..., Any], forms: Sequence[Form], flop: int, bytes_of_x: int) -> Op:
    """The operation of x, the residual if it adds one, parameters and eps."""
    add, layer, signature = name.startswith("add_"), name.endswith("layer_norm"), inspect.signature(reference)

    def in_order(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        complete = not named and len(arguments) == len(signature.parameters)
        return arguments if complete else signature.bind(*arguments, **named).args

    def run(*arguments: Any, **named: Any) -> Any:
        *tensors, eps = in_order(arguments, named)
        return kernels.norm_triton.fused_norm(name, add, layer, eps)(*tensors)

    def of_tensors(form: Form) -> Form:
        def supports(*arguments: Any, **named: Any) -> str:
            x, *params, _eps = in_order(arguments, named)
            return form.supports(x, params.pop(0) if add else None, *params)

        return dataclasses.replace(form, supports=supports)

    triton, *others = map(of_tensors, (Form("triton", run, _supports, on_cuda), *forms))
    return Op(
        name,
        reference,
        triton,
        *(by_device(form, triton) if form.name == "canonical" else form for form in others),
        flops=lambda x, *arguments, **named: flop * x.numel(),
        bytes=lambda x, *arguments, **named: bytes_of_x * x.nbytes,
    )


rms_norm = _op(
    "rms_norm",
    rms_norm_reference,
    (
        Form("cpp", _rms_norm_in_cpp, _cpp_supports, runs_alone),
        Form("chunks", rms_norm_in_chunks, prefers=_long_on_cpu),
        Form("canonical", _rms_norm_in_cpp, _cpp_supports, asked_for),  # whose sums have fixed lanes
    ),
    flop=4,
    bytes_of_x=2,
)
add_rms_norm = _op(
    "add_rms_norm",
    add_rms_norm_reference,
    (
        Form("cpp", _add_rms_norm_in_cpp, _cpp_supports, runs_alone),
        Form("chunks", add_rms_norm_in_chunks, prefers=_long_on_cpu),
        Form("canonical", _add_rms_norm_in_cpp, _cpp_supports, asked_for),
    ),
    flop=5,
    bytes_of_x=4,
)
layer_norm = _op(
    "layer_norm",
    layer_norm_reference,
    (
        Form("rows", layer_norm_rows, _rows_support, _on_cpu),
        Form("aten", layer_norm_aten, _aten_supports, _on_cpu, composes=True),
        Form("canonical", functools.partial(layer_norm_rows, canonical=True), _canonical_supports, asked_for),
    ),
    flop=7,
    bytes_of_x=2,
)
add_layer_norm = _op(
    "add_layer_norm",
    add_layer_norm_reference,
    (
        Form("rows", add_layer_norm_rows, _rows_support, _on_cpu),
        Form("aten", add_layer_norm_aten, _aten_supports, _on_cpu, composes=True),
        Form("canonical", functools.partial(add_layer_norm_rows, canonical=True), _canonical_supports, asked_for),
    ),
    flop=8,
    bytes_of_x=4,
)
