"""Optimizer state in 16 and 8 bits: stochastic rounding to bfloat16, and block codes of a byte. Integer operations: one
result everywhere.

Stochastic rounding adds 16 random bits below the 16 that bfloat16 keeps of a float32, and cuts: E[rounded x] = x.
Ref: Gupta et al. 2015, "Deep learning with limited numerical precision", arXiv:1502.02551, section 3.

A block code states how far an element is below the block's largest magnitude s, in steps of 2^20 of float32's bit
pattern: eight steps per octave, linear within an octave, like a float with 3 bits of mantissa whose exponents begin at
s. Code 0 is zero; the largest is s itself. With a sign 126 steps reach 16 octaves below s, without one 254 steps reach
32. Blocks: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.1; its
codes are a table, of 23 octaves, and let small second moments fall to 0.
"""

# A number is a `tl.constexpr` where a kernel says so, which no type checker knows.
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.autodiff import reinterpret
from fzero.kernels.custom_operator import tl, triton

SHIFT = tl.constexpr(20)  # a step of the codes in float32's bits
HALF = tl.constexpr(1 << 19)
FOLD_INT = tl.constexpr(prng._FOLD_INT)


class LeafPosition(NamedTuple):
    """The elements of a whole leaf that a shard holds, and the words of the key for its random numbers."""

    key: tuple[int, int] = (0, 0)
    # Local element i has the global index first + (i // size1) stride1 + (i % size1 // size0) stride0 + i % size0. A
    # whole leaf has size0 = size1 = its number of elements.
    first: int = 0
    size0: int = 1 << 62
    stride0: int = 0
    size1: int = 1 << 62
    stride1: int = 0

    def index(self, local: Tensor) -> Tensor:
        """The global indices (int64) of local ones."""
        within = local % self.size1
        outer = local // self.size1 * self.stride1 + within // self.size0 * self.stride0
        return self.first + outer + within % self.size0


def make_position(
    key: tuple[int, int], shape: tuple[int, ...], start: tuple[int, ...], full_shape: tuple[int, ...]
) -> LeafPosition:
    """The LeafPosition of the elements [start, start + shape) of a leaf; raises ValueError for too many cuts."""
    runs: list[
        list[int]
    ] = []  # [size, stride, offset], innermost first: dims that lie whole join the one outside of them
    stride = 1
    for size, begin, full in reversed(list(zip(shape, start, full_shape))):
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = [runs[-1][0] * size, runs[-1][1], runs[-1][2] + begin * stride]
        else:
            runs.append([size, stride, begin * stride])
        stride *= full
    if len(runs) > 3:
        raise ValueError(
            f"a shard {list(shape)} of a leaf {list(full_shape)} is cut in {len(runs)} dims; an optimizer's "
            "rounding knows up to three"
        )
    first = sum(offset for _, _, offset in runs)
    size0 = runs[0][0] if len(runs) > 1 else 1 << 62
    size1 = size0 * runs[1][0] if len(runs) > 2 else 1 << 62
    return LeafPosition(
        key, first, size0, runs[1][1] if len(runs) > 1 else 0, size1, runs[2][1] if len(runs) > 2 else 0
    )


# ---- stochastic rounding ----


def step_words(position: LeafPosition, count: Tensor, local: int, shape: torch.Size) -> Tensor:
    """The 32-bit words (int64, of `shape`) of step `count` for a shard's elements from `local` on."""
    key = prng.fold_in(torch.tensor(position.key, dtype=torch.int64).to(count.device), count)
    n = shape.numel()
    if local + n <= position.size0:
        return prng.bits(key, shape, first=position.first + local)
    return prng.bits(
        key, shape, index=position.index(torch.arange(local, local + n, device=count.device)).reshape(shape)
    )


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """float32 `x` as bfloat16, up or down by 16 random bits; non-finite values stay."""
    rounded = reinterpret((reinterpret(x, torch.int32) + bits.to(torch.int32)) & -0x10000, torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


@triton.jit
def _step_key(k0, k1, count):
    """random.fold_in(key, count): two words."""
    zero = (count & 0).to(tl.uint32)
    low, high = (count & 0xFFFFFFFF).to(tl.uint32), (count >> 32).to(tl.uint32)
    a, b, _, _ = tl.random.philox_impl(low, high, zero, zero + FOLD_INT, k0, k1, 10)
    return a, b


@triton.jit
def _block_words(block, k0, k1):
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low & 0
    return tl.random.philox_impl(low, high, zero, zero, k0, k1, 10)


@triton.jit
def _global_index(i, first, size0, stride0, size1, stride1):
    # A shard of several runs: size0 elements stride0 apart, within size1 elements that are stride1 apart.
    within = i % size1
    return first + i // size1 * stride1 + within // size0 * stride0 + within % size0


@triton.jit
def draw_words(begin, ROW, k0, k1, PLACED: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr):
    """random.bits (uint32 [BLOCK]) of the local elements begin, begin + 1, ..."""
    first = tl.load(ROW)
    STEP: tl.constexpr = 4 if QUADS else 1
    e = begin + tl.arange(0, BLOCK // STEP) * STEP
    e = (
        _global_index(e, first, tl.load(ROW + 1), tl.load(ROW + 2), tl.load(ROW + 3), tl.load(ROW + 4))
        if PLACED
        else first + e
    )
    w0, w1, w2, w3 = _block_words(e >> 2, k0, k1)
    if QUADS:
        # join appends a dim of 2: the order is w0, w1, w2, w3 of each block.
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    else:
        words = tl.where(e % 4 < 2, tl.where(e % 4 == 0, w0, w1), tl.where(e % 4 == 2, w2, w3))
    return words


@triton.jit
def round_bf16(x, bits):
    """float32 x as bfloat16 by 16 random bits (uint32)."""
    raw = x.to(tl.uint32, bitcast=True)
    rounded = ((raw + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # By the addition a NaN could become infinity, or carry into the sign.
    return tl.where((raw & 0x7F800000) != 0x7F800000, rounded, x).to(tl.bfloat16)


# ---- block codes ----


def blocks_of(columns: int, block: int) -> int:
    """How many blocks a row of `columns` elements has."""
    return -(-columns // block)


def _by_block(x: Tensor, block: int) -> Tensor:
    """[..., C] -> [..., blocks, block], filled up with zeros."""
    count = blocks_of(x.shape[-1], block)
    return torch.nn.functional.pad(x, (0, count * block - x.shape[-1])).unflatten(-1, (count, block))


def encode(x: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., C], largest magnitudes float32 [..., blocks]) of float32 x [..., C]."""
    # Unsigned, values above 0 keep codes above 0: a second moment of 0 would make a step of m / eps.
    levels = 127 if signed else 255
    raw = reinterpret(_by_block(x, block).contiguous(), torch.int32)
    size = raw & 0x7FFFFFFF
    top = size.amax(-1, keepdim=True)  # as integers magnitudes are ordered too
    code = levels - ((top - size + HALF.value) >> SHIFT.value)
    code = torch.where(size == 0, 0, code.clamp(min=0 if signed else 1))
    code = code | ((raw >> 24) & 0x80) if signed else code
    codes = code.flatten(-2)[..., : x.shape[-1]].to(torch.uint8)
    return codes, reinterpret(top.squeeze(-1), torch.float32)


def decode(codes: Tensor, scales: Tensor, signed: bool, block: int) -> Tensor:
    """float32 [..., C] of the result of `encode`."""
    levels = 127 if signed else 255
    code = _by_block(codes, block).to(torch.int32)
    steps = code & levels
    top = reinterpret(scales.contiguous(), torch.int32).unsqueeze(-1)
    raw = (top - ((levels - steps) << SHIFT.value)).clamp(min=0)
    raw = torch.where(steps == 0, 0, raw)
    raw = raw | ((code & 0x80) << 24) if signed else raw
    return reinterpret(raw, torch.float32).flatten(-2)[..., : codes.shape[-1]].contiguous()


@triton.jit
def encode_blocks(x, SIGNED: tl.constexpr):
    """(codes uint8 [R, BLOCK], largest magnitudes float32 [R]) of float32 x, whose rows are blocks."""
    LEVELS: tl.constexpr = 127 if SIGNED else 255
    LEAST: tl.constexpr = 0 if SIGNED else 1
    raw = x.to(tl.int32, bitcast=True)
    # Magnitudes are ordered as their bits are; a step is 2^SHIFT of these.
    size = raw & 0x7FFFFFFF
    top = tl.max(size, axis=1)
    # Codes count down from LEVELS, rounded to the nearest step. Without a sign 1 is the least: only zero becomes 0.
    code = tl.maximum(((top[:, None] - size + HALF) >> SHIFT) * -1 + LEVELS, LEAST)
    code = tl.where(size == 0, 0, code)
    if SIGNED:
        code = code | ((raw >> 24) & 0x80)
    return code.to(tl.uint8), top.to(tl.float32, bitcast=True)


@triton.jit
def decode_blocks(codes, scales, SIGNED: tl.constexpr):
    """float32 [R, BLOCK] of codes uint8 [R, BLOCK] and scales float32 [R]."""
    LEVELS: tl.constexpr = 127 if SIGNED else 255
    code = codes.to(tl.int32)
    steps = code & LEVELS
    # Below 0 bits there is no number: magnitudes stop at zero.
    raw = tl.maximum(scales.to(tl.int32, bitcast=True)[:, None] - (((steps * -1) + LEVELS) << SHIFT), 0)
    raw = tl.where(steps == 0, 0, raw)
    if SIGNED:
        raw = raw | ((code & 0x80) << 24)
    return raw.to(tl.float32, bitcast=True)
