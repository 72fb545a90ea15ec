"""Products with a weight in codes, read as codes: the weight is not dequantised to memory.

    y[n] = sum_k x[k] value(codes[k, n]) scale[k, n / block]      a chain of fused multiply-adds over k in float32

A product of few rows is bound by memory: codes of one byte, or of half of one, are read in less time than the numbers
that they stand for. In C++ (quantized_linear.cpp) each row of the result depends on its row of x alone. The values are
products in float32, which the reference rounds to x's dtype first.

Shapes: x [..., K] in float32 or bfloat16, codes [K, N] int8 or [K, N / 2] uint8 as `quantize` makes them along N,
scales float32 [K, ceil(N / block)].

Ref: Frantar et al. 2023, "GPTQ", arXiv:2210.17323, section 4 ("Practical speedups").
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fzero.core import compile_cache
from fzero.kernels.custom_operator import address, call_cpp, cpp_runs, operator
from fzero.kernels.quantize import Quantized, dequantize
from fzero.kernels.quantize_codes import KINDS, codes_a_byte
from fzero.kernels.registry import Form, Op, asked_for

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
CODES = ("int8", "int4", "nf4")  # by their numbers in the C++
ROWS = 12  # up to which decoding costs less than a weight in memory and torch's product
SMALL = 1 << 16  # multiplications that one thread makes


class _CodedShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("m", "k", "n", "block", "kind", "threads")),
        ("levels", ctypes.c_void_p),
    ]


def reference(x: Tensor, codes: Tensor, scales: Tensor, kind: str, block: int) -> Tensor:
    """x [..., K] @ the weight [K, N] dequantised to x's dtype: the definition."""
    return x @ dequantize(Quantized(codes, scales), kind, block, x.dtype)


@functools.cache
def _levels(kind: str) -> Tensor:
    """What the codes of four bits stand for, in the order of their bits."""
    return torch.tensor(KINDS[kind].levels or (*range(8), *range(-8, 0)), dtype=torch.float32)


@operator(
    "quantized_linear(Tensor x, Tensor codes, Tensor scales, str kind, int block) -> Tensor",
    lambda x, codes, scales, kind, block: x.new_empty((x.shape[0], codes.shape[1] * codes_a_byte(kind))),
    flop=lambda x, *rest, out_val, **options: 2 * x.numel() * out_val.shape[-1],
    by_shape=True,
)
def quantized_product(x: Tensor, codes: Tensor, scales: Tensor, kind: str, block: int) -> Tensor:
    """x [M, K] times a weight in codes, [M, N]."""
    (m, k), n = x.shape, codes.shape[1] * codes_a_byte(kind)
    out, threads = x.new_empty((m, n)), torch.get_num_threads() if m * k * n > SMALL else 1
    shape = _CodedShape(m, k, n, block, CODES.index(kind), threads, address(_levels(kind)))
    if out.numel():
        run = getattr(compile_cache.library(__file__, compile_cache.EXACT), f"product_{TYPES[x.dtype]}")
        tensors = x.contiguous(), codes.contiguous(), scales.contiguous(), out
        call_cpp(run, tensors, ctypes.byref(shape))
    return out


def _by_codes(x: Tensor, codes: Tensor, scales: Tensor, kind: str, block: int) -> Tensor:
    out = quantized_product(x.reshape(-1, x.shape[-1]), codes, scales, kind, block)
    return out.reshape(*x.shape[:-1], out.shape[1])


def supports(x: Tensor, codes: Tensor, scales: Tensor, kind: str, block: int) -> str:
    """The reason why codes are not multiplied as they are; "" if they are."""
    if kind not in CODES:
        return f"the codes are {kind}; it takes {', '.join(CODES)}"
    if x.dtype not in TYPES or scales.dtype != torch.float32 or codes.dim() != 2:
        return (
            f"x is {x.dtype}, scales {scales.dtype}, codes {list(codes.shape)}; it takes float32 or bfloat16, a matrix"
        )
    return cpp_runs(x, codes, scales)


def prefers(x: Tensor, *tensors: object) -> str:
    """Why "auto" should dequantise first."""
    rows = x.numel() // max(1, x.shape[-1])
    return "" if rows <= ROWS else f"there are {rows} rows; beyond {ROWS} torch's product of the whole weight is faster"


# Of no gradient: models.weights has that of a frozen weight.
quantized_linear = Op(
    "quantized_linear",
    reference,
    Form("cpp", _by_codes, supports, prefers),
    Form("canonical", _by_codes, supports, asked_for),
    flops=lambda x, codes, scales, kind, block: 2 * x.numel() * codes.shape[-1] * codes_a_byte(kind),
    bytes=lambda x, codes, scales, kind, block: x.nbytes + codes.nbytes + scales.nbytes,
)
