"""Gated activations: SwiGLU, GeGLU and gpt-oss's clamped SwiGLU of the two products a and b.

    swiglu(a, b) = silu(a) b,   silu(a) = a s(a)
    geglu(a, b) = gelu(a) b,   gelu(a) = a s(2 c (a + 0.044715 a^3)),  c = sqrt(2 / pi)
    clamped_swiglu(a, b) = a' s(1.702 a') (b' + 1),   a' = min(a, 7),  b' = min(max(b, -7), 7)

with s the logistic function (the tanh form of GELU, as tanh(x) = 2 s(2x) - 1). The backward pass keeps only a and b,
and recomputes the activation.
Ref: Shazeer 2020, "GLU variants improve transformer", arXiv:2002.05202, equations 5 and
6; Hendrycks & Gimpel 2016, arXiv:1606.08415; OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", arXiv:2508.10925,
section 2.2.

Shapes: a and b of one shape and dtype, any strides; the arithmetic is in float32 or wider, the result in their dtype.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import compile_cache
from fzero.kernels import rowwise, tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import (
    PART,
    Fused,
    bits_of,
    call_cpp,
    cpp_runs,
    largest_like,
    on_cuda,
    operator,
    operator_with_largest,
    runs_alone,
    segment_length,
    store_largest,
    tl,
    triton,
    triton_runs,
)
from fzero.kernels.registry import Form, Op, asked_for, by_device

CONFIGS = tuning.ConfigTable("_glu")
GELU_SLOPE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
GELU_CUBE = tl.constexpr(0.044715)
CLAMPED_SLOPE = tl.constexpr(1.702)
CLAMPED_LIMIT = tl.constexpr(7.0)
KINDS = ("swiglu", "geglu", "clamped_swiglu")  # by their numbers in the kernels


def swiglu_reference(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b: the definition."""
    return F.silu(a) * b


def geglu_reference(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) * b with the tanh form of GELU: the definition."""
    return F.gelu(a, approximate="tanh") * b


def clamped_swiglu_reference(a: Tensor, b: Tensor) -> Tensor:
    """a s(1.702 a) (b + 1) of a up to 7 and b in [-7, 7]: the definition."""
    limit = CLAMPED_LIMIT.value
    # The gradient at a limit is 1, as in the kernels; torch's clamp has 1 up to 2.13, and 0 from 2.14 on.
    a, b = torch.where(a > limit, limit, a), torch.where(b > limit, limit, torch.where(b < -limit, -limit, b))
    return a * torch.sigmoid(a * CLAMPED_SLOPE.value) * (b + 1.0)


@triton.jit
def _gate(a, KIND: tl.constexpr):
    """(activation, its derivative) of float32 a."""
    if KIND == 2:
        # Above the limit the activation is constant, and its derivative 0.
        low = tl.minimum(a, CLAMPED_LIMIT)
        s = tl.sigmoid(low * CLAMPED_SLOPE)
        return low * s, tl.where(a <= CLAMPED_LIMIT, s * (1.0 + low * CLAMPED_SLOPE * (1.0 - s)), 0.0)
    if KIND == 1:
        # A constexpr to the left of a tensor is no tensor in the interpreter.
        s = tl.sigmoid((a + a * a * a * GELU_CUBE) * GELU_SLOPE)
        return a * s, s + a * s * (1.0 - s) * (1.0 + a * a * GELU_CUBE * 3.0) * GELU_SLOPE
    s = tl.sigmoid(a)
    return a * s, s * (1.0 + a * (1.0 - s))


@triton.jit
def _factor(b, KIND: tl.constexpr):
    """(what the activation is multiplied by, its derivative) of float32 b."""
    if KIND == 2:
        inside = (b >= -CLAMPED_LIMIT) & (b <= CLAMPED_LIMIT)
        return tl.minimum(tl.maximum(b, -CLAMPED_LIMIT), CLAMPED_LIMIT) + 1.0, tl.where(inside, 1.0, 0.0)
    return b, tl.full(b.shape, 1.0, tl.float32)  # of one type with the return above


@triton.jit
def _largest(MOST, x, n, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest magnitude of each PART numbers of a program's x [BLOCK], of n in all."""
    bits = tl.max(tl.reshape(bits_of(x), [BLOCK // PART, PART]), 1)
    # BLOCK is a multiple of PART, so no part crosses two programs.
    segments = tl.program_id(0).to(tl.int64) * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
    store_largest(MOST, segments, bits, segments * PART < n)


@triton.jit
def _glu_forward(A, B, OUT, MOST, n, KIND: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    # With PART, MOST is the largest magnitude of each PART numbers of OUT; n is a multiple of it.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    b = tl.load(B + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    act, _ = _gate(a, KIND)
    times, _ = _factor(b, KIND)
    # Rounded first: MOST is the largest of what is stored, which a float8 product reads.
    out = (act * times).to(OUT.dtype.element_ty)
    tl.store(OUT + offsets, out, mask=offsets < n)
    if PART:
        _largest(MOST, out, n, PART, BLOCK)


@triton.jit
def _glu_backward(
    A, B, G, DA, DB, MOST_A, MOST_B, n, KIND: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # With PART as in _glu_forward: MOST_A of DA, MOST_B of DB.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    b = tl.load(B + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    g = tl.load(G + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    # Computed again rather than kept: a and b are read anyway.
    act, slope = _gate(a, KIND)
    times, slope_b = _factor(b, KIND)
    da, db = (g * times * slope).to(DA.dtype.element_ty), (g * act * slope_b).to(DB.dtype.element_ty)
    tl.store(DA + offsets, da, mask=offsets < n)
    tl.store(DB + offsets, db, mask=offsets < n)
    if PART:
        _largest(MOST_A, da, n, PART, BLOCK)
        _largest(MOST_B, db, n, PART, BLOCK)


def _grid(n: int, config: tuning.Config) -> tuple[int]:
    return (triton.cdiv(n, config["BLOCK"]),)


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], kind: int, segment_size: int = 0) -> None:
    n = tensors[0].numel()
    if n:
        grid, shape = functools.partial(_grid, n), (n, tensors[0].dtype)
        tuning.launch(kernel, grid, (*tensors, n), CONFIGS, shape=shape, KIND=kind, PART=segment_size)


@operator_with_largest(
    "glu_forward(Tensor a, Tensor b, int kind) -> Tensor", lambda a, b, kind: a.new_empty(a.shape), segmented=True
)
def glu_forward(a: Tensor, b: Tensor, kind: int, *, largest: bool) -> Any:
    """The activation of a times b, in one pass over memory."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    segment_size = segment_length(a) * largest
    amax = largest_like(a, segment_size) if largest else out
    _launch(_glu_forward, (a.contiguous(), b.contiguous(), out, amax), kind, segment_size)
    return (out, amax) if largest else out


@operator_with_largest(
    "glu_backward(Tensor a, Tensor b, Tensor g, int kind) -> (Tensor, Tensor)",
    lambda a, b, g, kind: (a.new_empty(a.shape), a.new_empty(a.shape)),
    indices=(0, 1),
    segmented=True,
)
def glu_backward(a: Tensor, b: Tensor, g: Tensor, kind: int, *, largest: bool) -> tuple[Tensor, ...]:
    """The gradients by a and b for the gradient g of the result."""
    grads = tuple(torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    segment_size = segment_length(a) * largest
    magnitudes = tuple(largest_like(a, segment_size) for _ in range(2)) if largest else grads
    tensors = (a.contiguous(), b.contiguous(), g.contiguous(), *grads, *magnitudes)
    _launch(_glu_backward, tensors, kind, segment_size)
    return grads + magnitudes if largest else grads


def _fused(label: str, kind: int) -> Fused:
    return Fused(
        label,
        forward=lambda a, b: (glu_forward(a, b, kind),),
        backward=lambda saved, grads: glu_backward(*saved, *grads, kind),
    )


def _supports(a: Tensor, b: Tensor) -> str:
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return f"the dtypes are {a.dtype} and {b.dtype}; it takes two of float32, bfloat16 or float16"
    return _same_shape(a, b) or triton_runs(a, b)


def _same_shape(a: Tensor, b: Tensor) -> str:
    return "" if a.shape == b.shape else f"the shapes are {list(a.shape)} and {list(b.shape)}; they must agree"


# ---- on a CPU, in C++ (glu.cpp), compiled when first used -----------------------------------------------------------
# One pass over memory forward and one backward, and silu(a) is not kept. The bits are those of the reference, up to the
# last bit of exp in a tail shorter than a vector.

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _vectors() -> str:
    """The part of the library with the vectors that torch has on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"OF_{capability}" if capability in ("AVX512", "AVX2") else ""


def _call_cpp(name: str, tensors: tuple[Tensor, ...]) -> None:
    """Call a function of the library on all numbers of tensors of one shape."""
    n, threads = tensors[0].numel(), torch.get_num_threads() if tensors[0].numel() > 1 << 15 else 1
    run = getattr(compile_cache.library(__file__, compile_cache.EXACT, _vectors()), f"{name}_{TYPES[tensors[0].dtype]}")
    call_cpp(run, tensors, ctypes.c_int64(n), ctypes.c_int64(threads))


@operator("swiglu_cpu(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape), by_shape=True)
def swiglu_in_cpp(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b."""
    out = a.new_empty(a.shape)
    _call_cpp("forward", (a.contiguous(), b.contiguous(), out))
    return out


@operator(
    "swiglu_cpu_backward(Tensor a, Tensor b, Tensor g) -> (Tensor, Tensor)",
    lambda a, b, g: (a.new_empty(a.shape), a.new_empty(a.shape)),
)
def swiglu_backward_in_cpp(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by a and b for the gradient g of the result."""
    da, db = (a.new_empty(a.shape) for _ in range(2))
    _call_cpp("backward", (a.contiguous(), b.contiguous(), g.contiguous(), da, db))
    return da, db


_swiglu_in_cpp = Fused(
    "swiglu",
    lambda a, b: (swiglu_in_cpp(a, b),),
    lambda saved, grads: swiglu_backward_in_cpp(*saved, *grads),
)


def _cpp_supports(a: Tensor, b: Tensor) -> str:
    if a.dtype not in TYPES or b.dtype != a.dtype:
        return f"the dtypes are {a.dtype} and {b.dtype}; it takes two of float32 or bfloat16"
    return _same_shape(a, b) or cpp_runs(a, b)


# ---- canonical: rowwise.cpp -----------------------------------------------------------------------------------------


def _geglu_backward(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    da = torch.ops.aten.gelu_backward(g * b, a, approximate="tanh")
    return da, g * F.gelu(a, approximate="tanh")


def _clamped_backward(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    limit, slope = CLAMPED_LIMIT.value, CLAMPED_SLOPE.value
    low, factor = a.clamp(max=limit), b.clamp(-limit, limit) + 1.0
    s = torch.sigmoid(low * slope)
    da = g * factor * s * (1.0 + low * slope * (1.0 - s))
    return torch.where(a <= limit, da, 0.0), torch.where(b.abs() <= limit, g * low * s, 0.0)


def _canonical(name: str, slopes: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    kind = rowwise.KINDS.index(name)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wide = (x.to(torch.float32) for x in (*saved, *grads))
        return tuple(x.to(grads[0].dtype) for x in slopes(*wide))

    fused = Fused(name, lambda a, b: (rowwise.rowwise_numbers(a, b, kind),), backward)
    return Form("canonical", fused, lambda a, b: _same_shape(a, b) or rowwise.supports(a, b), asked_for)


def _op(name: str, reference: Callable[[Tensor, Tensor], Tensor], *forms: Form) -> Op:
    triton = Form("triton", _fused(name, KINDS.index(name)), supports=_supports, prefers=on_cuda)
    return Op(
        name,
        reference,
        triton,
        *(by_device(form, triton) if form.name == "canonical" else form for form in forms),
        flops=lambda a, b: 10 * a.numel(),
        bytes=lambda a, b: 3 * a.numel() * a.element_size(),
    )


swiglu = _op(
    "swiglu",
    swiglu_reference,
    Form("cpp", _swiglu_in_cpp, supports=_cpp_supports, prefers=runs_alone),
    Form("canonical", _swiglu_in_cpp, _cpp_supports, asked_for),  # which has one exp, in a tail too
)
geglu = _op("geglu", geglu_reference, _canonical("geglu", _geglu_backward))
clamped_swiglu = _op("clamped_swiglu", clamped_swiglu_reference, _canonical("clamped_swiglu", _clamped_backward))


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for kernel in (_glu_forward, _glu_backward):
        for config in CONFIGS.for_gpu(gpu):
            for kind, segment_size in ((0, 0), (1, 0), (2, 0), (0, PART)):
                label = f"{KINDS[kind]}{', largest,' * bool(segment_size)} {config['BLOCK']}"
                yield build(kernel, label, config, {"KIND": kind, "PART": segment_size}, aligned=("n",))
