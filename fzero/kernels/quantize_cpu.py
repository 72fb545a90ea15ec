"""The operations of `quantize` on a CPU, in C++ (quantize_cpu.cpp), compiled when first used: every kind, rounded to
nearest.

One pass over memory, with the bits of the reference, which makes ten tensors of the size of x on the way.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from fzero.core import cpp
from fzero.core.compile import have_compiler
from fzero.core.device import kind_of
from fzero.kernels.custom_operator import operator
from fzero.kernels.quantize_codes import KINDS, Quantized, codes_a_byte, empty_codes, size_of

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
LARGEST_BLOCK = 8192
MANY = 1 << 14  # numbers from which "auto" takes these forms: fewer are quick by any, and need no compiler


class _CodesShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "n", "block", "threads", "parts")),
        *((name, ctypes.c_void_p) for name in ("values", "between")),
    ]


@functools.cache
def _tables(kind: str) -> tuple[Any, Any]:
    """(what the codes of a kind stand for, the middles between neighbours) as arrays of C, None where they are
    integers, or no levels."""
    array = lambda numbers: (ctypes.c_float * len(numbers))(*numbers)  # noqa: E731
    levels, mantissa = KINDS[kind].levels, KINDS[kind].mantissa
    if levels:
        return array(levels), array([(a + b) / 2 for a, b in itertools.pairwise(levels)])
    if mantissa:
        return array(torch.arange(256, dtype=torch.uint8).view(KINDS[kind].dtype).to(torch.float32).tolist()), None
    return None, None


def _call(name: str, tensors: tuple[Tensor, ...], kind: str, shape: torch.Size, block: int, parts: int = 1) -> None:
    """Call a function of the library on all blocks of a tensor of `shape`."""
    if not math.prod(shape):
        return
    tables = (ctypes.cast(table, ctypes.c_void_p) for table in _tables(kind))
    sizes = _CodesShape(math.prod(shape[:-1]), shape[-1], block, torch.get_num_threads(), parts, *tables)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in tensors)
    getattr(cpp.library(__file__, cpp.EXACT), name)(*pointers, ctypes.byref(sizes))


@operator(
    "quantize_cpu(Tensor x, str kind, int block) -> (Tensor, Tensor)",
    lambda x, kind, block: empty_codes(x.shape, kind, block, x.device),
)
def quantize_rows(x: Tensor, kind: str, block: int) -> tuple[Tensor, Tensor]:
    """(data, scale) of x [.., n]."""
    codes = empty_codes(x.shape, kind, block, x.device)
    _call(f"quantize_{kind}_{TYPES[x.dtype]}", (x.contiguous(), *codes), kind, x.shape, block)
    return codes


@operator(
    "dequantize_cpu(Tensor data, Tensor scale, str kind, int block, ScalarType dtype, int size) -> Tensor",
    lambda data, scale, kind, block, dtype, size: scale.new_empty((*data.shape[:-1], size), dtype=dtype),
)
def dequantize_rows(data: Tensor, scale: Tensor, kind: str, block: int, dtype: torch.dtype, size: int) -> Tensor:
    """The tensor [.., size] that data and scale stand for."""
    out = torch.empty((*data.shape[:-1], size), dtype=dtype)
    _call(f"dequantize_{kind}_{TYPES[dtype]}", (data.contiguous(), scale.contiguous(), out), kind, out.shape, block)
    return out


@operator(
    "add_codes_cpu(Tensor data, Tensor scale, str kind, int block, int size) -> (Tensor, Tensor)",
    lambda data, scale, kind, block, size: empty_codes((*data.shape[1:-1], size), kind, block, data.device),
)
def add_rows(data: Tensor, scale: Tensor, kind: str, block: int, size: int) -> tuple[Tensor, Tensor]:
    """(data, scale) of the sum over the first dim."""
    shape = torch.Size((*data.shape[1:-1], size))
    codes = empty_codes(shape, kind, block, data.device)
    _call(f"add_{kind}", (data.contiguous(), scale.contiguous(), *codes), kind, shape, block, data.shape[0])
    return codes


# ---- as forms --------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, kind: str, block: int, **_: Any) -> Quantized:
    """The form of `quantize`."""
    return Quantized(*torch.ops.fzero.quantize_cpu(x.detach(), kind, block))


def dequantize(
    q: Quantized | tuple[Tensor, Tensor],
    kind: str,
    block: int,
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> Tensor:
    """The form of `dequantize`."""
    data, scale = (t.detach() for t in q)
    return torch.ops.fzero.dequantize_cpu(data, scale, kind, block, dtype, size_of(data, scale, kind, block, size))


def add(data: Tensor, scale: Tensor, kind: str, block: int, size: int | None = None, **_: Any) -> Quantized:
    """The form of `dequantize_sum_requantize`."""
    n = size_of(data, scale, kind, block, size)
    return Quantized(*torch.ops.fzero.add_codes_cpu(data.detach(), scale.detach(), kind, block, n))


def supports(dtype: torch.dtype, kind: str, block: int, key: Tensor | None, *tensors: Tensor) -> str:
    """The reason why the C++ cannot serve a call; "" if it can."""
    if any(kind_of(x) != "cpu" for x in tensors):
        return "a tensor is not on the CPU"
    if dtype not in TYPES:
        return f"the dtype is {dtype}; it takes float32, bfloat16 or float16"
    if kind not in KINDS or not codes_a_byte(kind) <= block <= LARGEST_BLOCK or block % codes_a_byte(kind):
        return f"kind is {kind!r} and block {block}; it takes {', '.join(KINDS)}, even blocks of up to {LARGEST_BLOCK}"
    if key is not None:
        return "rounding is stochastic; it rounds to nearest"
    return "" if have_compiler() else "there is no C++ compiler"


def prefers(numbers: int) -> str:
    """The reason why "auto" should not take it for so many numbers."""
    return "" if numbers >= MANY else f"of {numbers} numbers the reference is as quick"
