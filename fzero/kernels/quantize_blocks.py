"""Blocks of numbers held in registers, to codes of eight or four bits and back: what the kernels of `quantize` do with
each block.

Integer operations, and float32 ones that IEEE 754 rounds one way: the bits are those of plain torch on every device,
and no float8 hardware is needed. The division is the exact one; Triton's x / y is not.
"""

# A number is a `tl.constexpr` where a kernel says so, which no type checker knows.
# pyright: reportAssignmentType=false

import itertools

from fzero.kernels.custom_operator import tl, triton
from fzero.kernels.quantize_codes import NF4

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
def _level_of(code):
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
        return _level_of(code) * scale[:, None]
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
