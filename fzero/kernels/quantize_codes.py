"""Quantised tensors: their kinds, their codes, the reference functions, and these operations in C++ on a CPU.

nf4 is not a number but the index of one of 16 levels, the quantiles of a normal distribution scaled to [-1, 1], with 0
among them. Ref: Dettmers et al. 2023, "QLoRA", arXiv:2305.14314, section 3 and appendix E.

In C++ (quantize_codes.cpp, compiled when first used) they take every kind, rounded to nearest, in one pass over memory,
with the bits of the reference, which makes ten tensors of the size of x on the way.

Blocks of numbers held in registers, to codes of eight or four bits and back: what the kernels of `quantize` do with
each block.

Integer operations, and float32 ones that IEEE 754 rounds one way: the bits are those of plain torch on every device,
and no float8 hardware is needed. The division is the exact one; Triton's x / y is not.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import compile_cache, prng
from fzero.core.autodiff import reinterpret
from fzero.core.compile_cache import have_compiler
from fzero.core.config_tables import check_choice
from fzero.core.device import kind_of

# A number is a `tl.constexpr` where a kernel says so, which no type checker knows.
# pyright: reportAssignmentType=false
from fzero.kernels.custom_operator import call_cpp, operator, tl, triton


class Quantized(NamedTuple):
    """A tensor [.., n] in codes: data, two a byte for int4 and nf4, and scale float32 [.., blocks]."""

    data: Tensor
    scale: Tensor


class CodeKind(NamedTuple):
    """A kind of code: the largest, the dtype of the data, float8's format, and the levels if any."""

    largest: float
    dtype: torch.dtype
    mantissa: int = 0  # bits of float8's mantissa
    lowest: int = 0  # float8's lowest normal exponent
    levels: tuple[float, ...] = ()  # what codes stand for, if they are numbers of levels


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
KINDS = {
    "int8": CodeKind(127.0, torch.int8),
    "int4": CodeKind(7.0, torch.uint8),
    "nf4": CodeKind(1.0, torch.uint8, levels=NF4),
    "fp8_e4m3": CodeKind(448.0, torch.float8_e4m3fn, 3, -6),
    "fp8_e5m2": CodeKind(57344.0, torch.float8_e5m2, 2, -14),
}
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def codes_a_byte(kind: str) -> int:
    """How many codes of this kind are in an element of the data."""
    return 2 if KINDS[kind].dtype == torch.uint8 else 1


def _width(n: int, kind: str) -> int:
    """Elements of a row of data."""
    return -(-n // codes_a_byte(kind))


def _check_kind(kind: str, block: int) -> None:
    check_choice("kind", kind, KINDS)
    if block < 1 or block % codes_a_byte(kind):
        raise ValueError(f"block is {block}; it must be at least 1, and even for int4 and nf4")


def size_of(data: Tensor, scale: Tensor, kind: str, block: int, size: int | None) -> int:
    """The elements of a row of the quantised tensor; raises ValueError."""
    _check_kind(kind, block)
    n = size if size is not None else data.shape[-1] * codes_a_byte(kind)
    if data.dtype != KINDS[kind].dtype or scale.dtype != torch.float32:
        raise ValueError(
            f"{kind}: data is {data.dtype} and scale {scale.dtype}; they must be {KINDS[kind].dtype} and torch.float32"
        )
    if data.shape[-1] != _width(n, kind) or scale.shape != (*data.shape[:-1], -(-n // block)):
        raise ValueError(
            f"{kind}: data has shape {list(data.shape)} and scale {list(scale.shape)}; size {n} in blocks of "
            f"{block} makes the last "
            f"dims {_width(n, kind)} and {-(-n // block)}, and the others agree"
        )
    return n


def _split(x: Tensor, block: int) -> Tensor:
    """x [.., n] as [.., blocks, block], padded with zeros."""
    blocks = -(-x.shape[-1] // block)
    return F.pad(x, (0, blocks * block - x.shape[-1])).unflatten(-1, (blocks, block))


def _round(y: Tensor, word: Tensor | None) -> Tensor:
    if word is None:
        return y.round()
    floor = y.floor()
    return floor + ((word >> 8).to(torch.float32) * 2.0**-24 < y - floor)


def _nearest_level(y: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The numbers of the levels next to y; halfway between two, the lower one."""
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    return torch.bucketize(y.contiguous(), torch.tensor(midpoints, dtype=torch.float32, device=y.device))


def _level_of(codes: Tensor, levels: Sequence[float]) -> Tensor:
    """The levels, float32, of codes, chosen bit by bit in place of a table."""
    values: list[Any] = list(levels)
    while len(values) > 1:
        odd = (codes & 1) != 0
        values = [torch.where(odd, high, low) for low, high in zip(values[::2], values[1::2])]
        codes = codes >> 1
    return values[0]


def quantize_reference(x: Tensor, kind: str, block: int, *, key: Tensor | None = None, first: int = 0) -> Quantized:
    """x [.., n] in codes: the definition; key: stochastic rounding, by `random.bits` from `first` on."""
    _check_kind(kind, block)
    x, (largest, dtype, mantissa, lowest, levels) = x.detach().to(torch.float32), KINDS[kind]
    if levels and key is not None:
        raise ValueError(f"{kind} goes to the nearest level; give no key for stochastic rounding")
    blocks = _split(x, block)
    absmax = blocks.abs().amax(-1)
    # By a tensor: on CUDA x / number is x times the number's reciprocal.
    scale = torch.where(
        absmax.isfinite(), (absmax / torch.full_like(absmax, largest)).clamp(min=2.0**-126), float("inf")
    )
    y = torch.where(scale[..., None].isfinite(), blocks * (1.0 / scale)[..., None], 0.0).clamp(-largest, largest)
    y = y.flatten(-2)[..., : x.shape[-1]]
    word = None if key is None else prng.bits(key, x.shape, first=first)
    if mantissa and word is not None:
        # float8 numbers near y are 2^(exponent - mantissa) apart; round to one of them, so that the cast is exact.
        exponent = ((reinterpret(y, torch.int32) >> 23) & 0xFF).clamp(min=127 + lowest)
        unit = reinterpret((exponent - mantissa) << 23, torch.float32)
        y = torch.copysign(_round(y.abs() / unit, word) * unit, y)
    codes = y if mantissa else _nearest_level(y, levels) if levels else _round(y, word)
    if codes_a_byte(kind) == 2:
        low, high = _split(codes.to(torch.int32), 2).unbind(-1)
        codes = (low & 15) | ((high & 15) << 4)
    return Quantized(codes.to(dtype), scale)


def dequantize_reference(
    q: Quantized | tuple[Tensor, Tensor],
    kind: str,
    block: int,
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> Tensor:
    """The tensor [.., size] of `dtype` that q stands for: the definition."""
    data, scale = (t.detach() for t in q)
    n = size_of(data, scale, kind, block, size)
    if levels := KINDS[kind].levels:
        data = _level_of(torch.stack((data & 15, data >> 4), -1).flatten(-2)[..., :n], levels)
    elif codes_a_byte(kind) == 2:
        data = reinterpret(torch.stack((data << 4, data), -1).flatten(-2)[..., :n], torch.int8) >> 4
    return (_split(data.to(torch.float32), block) * scale[..., None]).flatten(-2)[..., :n].to(dtype)


def dequantize_sum_requantize_reference(
    data: Tensor,
    scale: Tensor,
    kind: str,
    block: int,
    size: int | None = None,
    *,
    key: Tensor | None = None,
    first: int = 0,
) -> Quantized:
    """The sum over the first dim of what data [R, ..] and scale [R, ..] stand for, in order, in codes."""
    n = size_of(data, scale, kind, block, size)
    total = torch.zeros((*data.shape[1:-1], n), dtype=torch.float32, device=data.device)
    for rank_codes in zip(data, scale):
        total = total + dequantize_reference(rank_codes, kind, block, size=n)
    return quantize_reference(total, kind, block, key=key, first=first)


def empty_codes(shape: Sequence[int], kind: str, block: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Allocate (data, scale) for a tensor of `shape`."""
    data = torch.empty((*shape[:-1], _width(shape[-1], kind)), dtype=KINDS[kind].dtype, device=device)
    return data, torch.empty((*shape[:-1], -(-shape[-1] // block)), dtype=torch.float32, device=device)


TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
LARGEST_BLOCK = 8192  # elements, of what the C++ loop takes
MANY = 1 << 14  # numbers from which "auto" takes these forms: fewer are quick by any, and need no compiler


class _CodesShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "n", "block", "threads", "parts")),
        *((name, ctypes.c_void_p) for name in ("values", "between")),
    ]


@functools.cache
def _tables(kind: str) -> tuple[Any, Any]:
    """(what the codes of a kind stand for, the middles between neighbours) as arrays of C, or None."""
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
    call_cpp(getattr(compile_cache.library(__file__, compile_cache.EXACT), name), tensors, ctypes.byref(sizes))


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


def quantize_in_cpp(x: Tensor, kind: str, block: int, **_: Any) -> Quantized:
    """The form of `quantize`."""
    return Quantized(*torch.ops.fzero.quantize_cpu(x.detach(), kind, block))


def dequantize_in_cpp(
    q: Quantized | tuple[Tensor, Tensor],
    kind: str,
    block: int,
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> Tensor:
    """The form of `dequantize`."""
    data, scale = (t.detach() for t in q)
    return torch.ops.fzero.dequantize_cpu(data, scale, kind, block, dtype, size_of(data, scale, kind, block, size))


def add_in_cpp(data: Tensor, scale: Tensor, kind: str, block: int, size: int | None = None, **_: Any) -> Quantized:
    """The form of `dequantize_sum_requantize`."""
    n = size_of(data, scale, kind, block, size)
    return Quantized(*torch.ops.fzero.add_codes_cpu(data.detach(), scale.detach(), kind, block, n))


def cpp_serves(dtype: torch.dtype, kind: str, block: int, key: Tensor | None, *tensors: Tensor) -> str:
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


def cpp_preferred(numbers: int) -> str:
    """The reason why "auto" should not take it for so many numbers."""
    return "" if numbers >= MANY else f"of {numbers} numbers the reference is as quick"


ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to |y| < 2^22 it rounds y to the nearest integer, ties to even
ROUNDER_BITS = tl.constexpr(0x4B400000)
SMALLEST = tl.constexpr(2.0**-126)
INFINITY = tl.constexpr(float("inf"))
# nf4's levels, and the middles between neighbours: a kernel reads no tuple of its module.
L0, L1, L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12, L13, L14, L15 = (tl.constexpr(level) for level in NF4)
M0, M1, M2, M3, M4, M5, M6, M7, M8, M9, M10, M11, M12, M13, M14 = (
    tl.constexpr((low + high) / 2) for low, high in itertools.pairwise(NF4)
)


@triton.jit
def _round_to_int(y, word, STOCHASTIC: tl.constexpr):
    """float32 y, |y| < 2^22, as int32: to nearest even, or up with the probability of its fraction."""
    if STOCHASTIC:
        floor = tl.floor(y)
        # Words are unsigned; their upper 24 bits are exact in float32, and 2^-24 makes them [0, 1).
        u = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32, bitcast=True).to(tl.float32) * 5.9604644775390625e-08
        return floor.to(tl.int32) + (u < y - floor).to(tl.int32)
    return (y + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def _level_next_to(y):
    """The numbers, int32, of nf4's levels next to float32 y: of the middles between neighbours, those below y."""
    level = (y > M0).to(tl.int32) + (y > M1).to(tl.int32) + (y > M2).to(tl.int32) + (y > M3).to(tl.int32)
    level += (y > M4).to(tl.int32) + (y > M5).to(tl.int32) + (y > M6).to(tl.int32) + (y > M7).to(tl.int32)
    level += (y > M8).to(tl.int32) + (y > M9).to(tl.int32) + (y > M10).to(tl.int32) + (y > M11).to(tl.int32)
    return level + (y > M12).to(tl.int32) + (y > M13).to(tl.int32) + (y > M14).to(tl.int32)


@triton.jit
def _level_of_code(code):
    """nf4's levels, float32, by their numbers, bit by bit."""
    odd, second = (code & 1) != 0, (code & 2) != 0
    low = tl.where(second, tl.where(odd, L3, L2), tl.where(odd, L1, L0))
    high = tl.where(second, tl.where(odd, L7, L6), tl.where(odd, L5, L4))
    low_half = tl.where((code & 4) != 0, high, low)
    low = tl.where(second, tl.where(odd, L11, L10), tl.where(odd, L9, L8))
    high = tl.where(second, tl.where(odd, L15, L14), tl.where(odd, L13, L12))
    return tl.where((code & 8) != 0, tl.where((code & 4) != 0, high, low), low_half)


@triton.jit
def encode(x, word, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(codes int32 [R, BLOCK], scale float32 [R]) of float32 x [R, BLOCK], whose rows are blocks."""
    OF_FLOAT8: tl.constexpr = 448.0 if KIND == "fp8_e4m3" else 57344.0
    OF_FOUR: tl.constexpr = 7.0 if KIND == "int4" else 1.0
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else (OF_FOUR if KIND == "int4" or KIND == "nf4" else OF_FLOAT8)
    # As integers magnitudes are ordered too, with infinity and NaN at the top, which a maximum of floats may drop.
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    absmax = magnitude.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32)), SMALLEST)
    scale = tl.where(magnitude < 0x7F800000, scale, INFINITY)
    # x times the rounded inverse, as the definition divides.
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    y = tl.where(scale[:, None] < INFINITY, x * inverse[:, None], 0.0)
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)  # also keeps the product above from being fused with the sum below
    if KIND == "int8" or KIND == "int4":
        return _round_to_int(y, word, STOCHASTIC), scale
    if KIND == "nf4":
        return _level_next_to(y), scale
    MANTISSA: tl.constexpr = 3 if KIND == "fp8_e4m3" else 2
    LOWEST: tl.constexpr = (
        121 if KIND == "fp8_e4m3" else 113
    )  # float32's exponent field of the format's smallest normal number
    bits = y.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    step = ((254 + MANTISSA) - exponent) << 23  # the bits of 1 / (the distance of the format's numbers around y)
    rounded = _round_to_int(tl.abs(y) * step.to(tl.float32, bitcast=True), word, STOCHASTIC)  # the product is exact
    return ((exponent - LOWEST) << MANTISSA) + rounded + ((bits >> 24) & 0x80), scale


@triton.jit
def decode(codes, scale, KIND: tl.constexpr):
    """float32 [R, BLOCK] of codes (as `encode` gives) and scale float32 [R]."""
    if KIND == "int8" or KIND == "int4":
        return codes.to(tl.float32) * scale[:, None]
    code = codes.to(tl.int32)
    if KIND == "nf4":
        return _level_of_code(code) * scale[:, None]
    if KIND == "fp8_e5m2":  # the upper half of a float16
        value = ((code & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # a float16 whose exponent is too small by 8
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value * scale[:, None]


@triton.jit
def draw_words(KEY, start, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """The words (uint32 [R, BLOCK]) of `fzero.core.prng.bits` for the elements from start[r] on."""
    seed = tl.load(KEY) | (tl.load(KEY + 1) << 32)
    if ALIGNED:
        a, b, c, d = tl.randint4x(seed, (start >> 2)[:, None] + tl.arange(0, BLOCK // 4)[None, :])
        # join appends a dim of 2: the order is a, b, c, d of each counter.
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (start.shape[0], BLOCK))
    element = start[:, None] + tl.arange(0, BLOCK)[None, :]
    a, b, c, d = tl.randint4x(seed, element >> 2)
    lane = element & 3
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
