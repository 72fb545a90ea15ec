"""Block quantisation: a code of eight or four bits for each element, and a scale for each block of consecutive
elements.

    scale = max(max |x| / L, 2^-126),   code = round(x / scale),   x ~ code * scale

Blocks are `block` consecutive elements of the last dim, the last of a row being shorter if that does not come out
even; no block holds elements of two rows. L is the largest code: 127 (int8), 7 (int4, two codes a byte, the earlier in
the low half), 448 (fp8_e4m3), 57344 (fp8_e5m2), 1 (nf4, whose codes are numbers of
levels). Dividing by the scale is multiplying by the float32 next to 1 / scale.
Rounding is to nearest, ties to even, or stochastic: up or down with probabilities that make the expectation x. The
arithmetic is in float32.

A block with an infinity or a NaN has scale infinity and the codes of zeros, so that all of it dequantises to NaN. The
least scale is the smallest normal number, so that a block of zeros or of subnormal numbers needs no case of its own and
|x - code * scale| <= scale / 2 holds for it. (Within 2^-23 of float32's maximum, code * scale may overflow to
infinity.) Refs: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.1;
Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3; Micikevicius et al. 2022, "FP8 formats for deep learning",
arXiv:2209.05433, table 1.

None of this is differentiable: results carry no gradient, and no straight-through estimate is implied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import quantize_codes, tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.quantize_codes import (
    FLOAT8,
    KINDS,
    Quantized,
    codes_a_byte,
    decode,
    dequantize_reference,
    dequantize_sum_requantize_reference,
    draw_words,
    empty_codes,
    encode,
    quantize_reference,
    size_of,
)
from fzero.kernels.registry import Form, Op


@triton.jit
def _block_offsets(block, n, total, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """(first offset [ROWS], offsets [ROWS, BLOCK], mask [ROWS, BLOCK]) of blocks given by their numbers."""
    # Rows have n elements and ceil(n / BLOCK) blocks, so block number i is block i % ceil(n / BLOCK) of row i // ceil(n
    # / BLOCK). The mask excludes the end of a row's last block, and blocks from `total` on. FLAT: the tensor is one row
    # (or BLOCK divides n): offset = i BLOCK.
    if FLAT:
        offsets = (block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        return block * BLOCK, offsets, offsets < n
    # In int64, as `block` is; a division for each block and not for each element.
    row = block // tl.cdiv(n, BLOCK)
    column = (block - row * tl.cdiv(n, BLOCK)) * BLOCK
    columns = column[:, None] + tl.arange(0, BLOCK)[None, :]
    return row * n + column, (row * n)[:, None] + columns, (columns < n) & (block < total)[:, None]


@triton.jit
def _load_values(DATA, SCALE, block, n, total, KIND: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """Load and dequantise blocks: float32 [ROWS, BLOCK], 0 beyond the end."""
    scale = tl.load(SCALE + block, mask=block < total, other=0.0)
    if KIND == "int4" or KIND == "nf4":
        # Two codes per byte, the earlier in the low half: rows of ceil(n / 2) bytes in blocks of BLOCK / 2.
        _, offsets, mask = _block_offsets(block, n - n // 2, total, FLAT, BLOCK // 2)
        # int4: shifted up and down again, so that the sign comes along.
        pair = tl.load(DATA + offsets, mask=mask, other=0).to(tl.int32)
        nibbles = tl.join((pair << 28) >> 28, (pair << 24) >> 28) if KIND == "int4" else tl.join(pair & 15, pair >> 4)
        codes = tl.reshape(nibbles, (block.shape[0], BLOCK))
    else:
        _, offsets, mask = _block_offsets(block, n, total, FLAT, BLOCK)
        codes = tl.load(DATA + offsets, mask=mask, other=0)
    x = decode(codes, scale, KIND)
    if KIND == "nf4":  # whose code 0 is no zero
        _, offsets, mask = _block_offsets(block, n, total, FLAT, BLOCK)
        # So that sums over blocks, and their largest magnitudes, have nothing from beyond the end.
        x = tl.where(mask, x, 0.0)
    return x


@triton.jit
def _store_codes(
    x, KEY, first, DATA, SCALE, block, n, total,
    KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise and store blocks x, float32 [ROWS, BLOCK], 0 beyond the end."""
    start, offsets, mask = _block_offsets(block, n, total, FLAT, BLOCK)
    # Words are numbered by element (`first` on), so a shard rounds as the whole tensor would. Without STOCHASTIC x
    # stands for them, unread.
    codes, scale = encode(x, draw_words(KEY, start + first, BLOCK, ALIGNED) if STOCHASTIC else x, KIND, STOCHASTIC)
    if KIND == "int4" or KIND == "nf4":
        codes = tl.where(mask, codes, 0)  # nf4's code of 0, which stands beyond the end, is none
        _, offsets, mask = _block_offsets(block, n - n // 2, total, FLAT, BLOCK // 2)
        low, high = tl.split(tl.reshape(codes, (block.shape[0], BLOCK // 2, 2)))
        # A row of odd length ends in a half byte of 0.
        codes = (low & 15) | ((high & 15) << 4)
    tl.store(DATA + offsets, codes.to(DATA.dtype.element_ty), mask=mask)
    tl.store(SCALE + block, scale, mask=block < total)


@triton.jit
def _quantize(
    X, KEY, first, DATA, SCALE, n, total,
    KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A program handles ROWS blocks, a block a row of its tile: the largest magnitude is found in registers, and x read
    # once.
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _, offsets, mask = _block_offsets(block, n, total, FLAT, BLOCK)
    x = tl.load(X + offsets, mask=mask, other=0.0).to(tl.float32)
    _store_codes(x, KEY, first, DATA, SCALE, block, n, total, KIND, STOCHASTIC, ALIGNED, FLAT, BLOCK)


@triton.jit
def _dequantize(
    DATA, SCALE, OUT, n, total, KIND: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x = _load_values(DATA, SCALE, block, n, total, KIND, FLAT, BLOCK)
    _, offsets, mask = _block_offsets(block, n, total, FLAT, BLOCK)
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _sum_requantize(
    PARTS, SCALES, stride, KEY, first, DATA, SCALE, n, total,
    COUNT: tl.constexpr, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Over the ranks in their order, in float32: the sum alone is rounded again.
    x = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.range(0, COUNT, loop_unroll_factor=4):
        # In int64: rank * stride may pass 2^31.
        rank_index = tl.cast(rank, tl.int64)
        x += _load_values(PARTS + rank_index * stride, SCALES + rank_index * total, block, n, total, KIND, FLAT, BLOCK)
    _store_codes(x, KEY, first, DATA, SCALE, block, n, total, KIND, STOCHASTIC, ALIGNED, FLAT, BLOCK)


def _configs(block: int, flat: bool) -> list[tuning.Config]:
    # (elements of a program, warps); fewer elements if each needs its own address.
    tiles = ((2048, 4), (4096, 8)) if flat else ((1024, 4), (2048, 8))
    return [{"ROWS": max(1, tile // block), "num_warps": max(warps, block // 512)} for tile, warps in tiles]


def _launch(
    kernel: triton.JITFunction, arguments: Sequence[Any], shape: Sequence[int], kind: str, block: int, **constants: Any
) -> None:
    """Run a kernel over all blocks of a tensor of `shape`."""
    rows, n = math.prod(shape[:-1]), shape[-1]
    if total := rows * -(-n // block):
        flat, size = rows == 1 or n % block == 0, (kind, block, rows, n, *constants.values())
        arguments = [_as_bytes(t) if isinstance(t, Tensor) else t for t in arguments]
        # Without fused multiply-adds the bits equal those of the reference.
        constants |= {"KIND": kind, "FLAT": flat, "BLOCK": block, "enable_fp_fusion": False}
        arguments += [rows * n if flat else n, total]
        tuning.launch(
            kernel,
            lambda c: (triton.cdiv(total, c["ROWS"]),),
            arguments,
            _configs(block, flat),
            shape=size,
            **constants,
        )


def _as_bytes(t: Tensor) -> Tensor:
    # float8 as bytes: its bits are made and read by integer arithmetic, the same on every device.
    return t.contiguous().view(torch.uint8) if t.dtype in FLOAT8 else t.contiguous()


def _rounding(key: Tensor | None, first: int, shape: Sequence[int]) -> dict[str, bool]:
    aligned = first % 4 == 0 and (shape[-1] % 4 == 0 or math.prod(shape[:-1]) == 1)
    return {"STOCHASTIC": key is not None, "ALIGNED": aligned}


@operator(
    "quantize(Tensor x, str kind, int block, Tensor? key, int first) -> (Tensor, Tensor)",
    lambda x, kind, block, key, first: empty_codes(x.shape, kind, block, x.device),
)
def quantize_launch(x: Tensor, kind: str, block: int, key: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
    """(data, scale) of x [.., n], in one pass."""
    data, scale = empty_codes(x.shape, kind, block, x.device)
    arguments = x, scale if key is None else key, first, data, scale
    _launch(_quantize, arguments, x.shape, kind, block, **_rounding(key, first, x.shape))
    return data, scale


@operator(
    "dequantize(Tensor data, Tensor scale, str kind, int block, ScalarType dtype, int size) -> Tensor",
    lambda data, scale, kind, block, dtype, size: scale.new_empty((*data.shape[:-1], size), dtype=dtype),
)
def dequantize_launch(data: Tensor, scale: Tensor, kind: str, block: int, dtype: torch.dtype, size: int) -> Tensor:
    """The tensor [.., size] that data and scale stand for, in one pass."""
    out = torch.empty((*data.shape[:-1], size), dtype=dtype, device=data.device)
    _launch(_dequantize, (data, scale, out), out.shape, kind, block)
    return out


@operator(
    "dequantize_sum_requantize(Tensor data, Tensor scale, str kind, int block, int size, Tensor? key, int "
    "first) -> (Tensor, Tensor)",
    lambda data, scale, kind, block, size, key, first: empty_codes((*data.shape[1:-1], size), kind, block, data.device),
)
def sum_launch(
    data: Tensor, scale: Tensor, kind: str, block: int, size: int, key: Tensor | None, first: int
) -> tuple[Tensor, Tensor]:
    """(data, scale) of the sum over the first dim, in one pass."""
    shape = (*data.shape[1:-1], size)
    total, scales = empty_codes(shape, kind, block, data.device)
    arguments = data, scale, total.numel(), scales if key is None else key, first, total, scales
    _launch(_sum_requantize, arguments, shape, kind, block, COUNT=data.shape[0], **_rounding(key, first, shape))
    return total, scales


def _quantize_triton(x: Tensor, kind: str, block: int, *, key: Tensor | None = None, first: int = 0) -> Quantized:
    return Quantized(*quantize_launch(x.detach(), kind, block, key, first))


def _dequantize_triton(
    q: Quantized, kind: str, block: int, dtype: torch.dtype = torch.float32, size: int | None = None
) -> Tensor:
    data, scale = (t.detach() for t in q)
    return dequantize_launch(data, scale, kind, block, dtype, size_of(data, scale, kind, block, size))


def _sum_triton(
    data: Tensor,
    scale: Tensor,
    kind: str,
    block: int,
    size: int | None = None,
    *,
    key: Tensor | None = None,
    first: int = 0,
) -> Quantized:
    n = size_of(data, scale, kind, block, size)
    return Quantized(*sum_launch(data.detach(), scale.detach(), kind, block, n, key, first))


def _supports(dtype: torch.dtype, kind: str, block: int, key: Tensor | None, *tensors: Tensor) -> str:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the dtype is {dtype}; it takes float32, bfloat16 or float16"
    if kind not in KINDS or not 16 <= block <= 8192 or block & (block - 1):
        return f"kind is {kind!r} and block {block}; it takes {', '.join(KINDS)}, and powers of two from 16 to 8192"
    if key is not None and KINDS[kind].levels:
        return f"rounding is stochastic; {kind} goes to the nearest level"
    return triton_runs(*tensors, *([] if key is None else [key]))


def _elements(data: Tensor, kind: str) -> int:
    return data.numel() * codes_a_byte(kind)


quantize = Op(
    "quantize",
    quantize_reference,
    Form(
        "cpp",
        quantize_codes.quantize_in_cpp,
        lambda x, kind, block, key=None, first=0: quantize_codes.cpp_serves(x.dtype, kind, block, key, x),
        lambda x, *_, **__: quantize_codes.cpp_preferred(x.numel()),
    ),
    Form(
        "triton",
        _quantize_triton,
        lambda x, kind, block, key=None, first=0: _supports(x.dtype, kind, block, key, x),
        on_cuda,
    ),
    flops=lambda x, *_, **__: 6 * x.numel(),
    bytes=lambda x, kind, block, **_: sum(t.nbytes for t in (x, *empty_codes(x.shape, kind, block, "meta"))),
)
dequantize = Op(
    "dequantize",
    dequantize_reference,
    Form(
        "cpp",
        quantize_codes.dequantize_in_cpp,
        lambda q, kind, block, dtype=torch.float32, size=None: quantize_codes.cpp_serves(dtype, kind, block, None, *q),
        lambda q, kind, *_, **__: quantize_codes.cpp_preferred(_elements(q[0], kind)),
    ),
    Form(
        "triton",
        _dequantize_triton,
        supports=lambda q, kind, block, dtype=torch.float32, size=None: _supports(dtype, kind, block, None, *q),
        prefers=lambda q, *_, **__: on_cuda(*q),
    ),
    flops=lambda q, kind, *_, **__: _elements(q[0], kind),
    bytes=lambda q, kind, block, dtype=torch.float32, size=None: (
        q[0].nbytes + q[1].nbytes + dtype.itemsize * _elements(q[0], kind)
    ),
)
dequantize_sum_requantize = Op(
    "dequantize_sum_requantize",
    dequantize_sum_requantize_reference,
    Form(
        "cpp",
        quantize_codes.add_in_cpp,
        lambda data, scale, kind, block, size=None, key=None, first=0: quantize_codes.cpp_serves(
            torch.float32, kind, block, key, data, scale
        ),
        lambda data, scale, kind, *_, **__: quantize_codes.cpp_preferred(_elements(data, kind)),
    ),
    Form(
        "triton",
        _sum_triton,
        supports=lambda data, scale, kind, block, size=None, key=None, first=0: _supports(
            torch.float32, kind, block, key, data, scale
        ),
        prefers=on_cuda,
    ),
    flops=lambda data, scale, kind, *_, **__: 2 * _elements(data, kind) + 6 * _elements(data[0], kind),
    bytes=lambda data, scale, *_, **__: sum(t.nbytes for t in (data, scale, data[0], scale[0])),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    flat = [
        ("int8", 256, False),
        ("int8", 8192, True),
        ("int4", 256, True),
        ("fp8_e4m3", 128, True),
        ("fp8_e5m2", 32, False),
        ("nf4", 64, False),
    ]
    cases = [(True, *case) for case in flat] + [(False, "int8", 256, True), (False, "fp8_e4m3", 32, True)]
    for kernel, (flat, kind, block, stochastic) in itertools.product((_quantize, _dequantize, _sum_requantize), cases):
        constants = {"STOCHASTIC": stochastic, "ALIGNED": flat, "COUNT": 8, "KIND": kind, "FLAT": flat, "BLOCK": block}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        code = "*i8" if kind == "int8" else "*u8"
        types = f"KEY:*i64 DATA:{code} PARTS:{code} SCALE:*fp32 SCALES:*fp32"
        for config in _configs(block, flat)[: 1 + (flat and block == 256)]:
            ways = f"{' stochastic' * constants.get('STOCHASTIC', 0)}{' ragged' * (not flat)}"
            label = f"{kind} {config['ROWS']}x{block}{ways}"
            # Narrow are the scales, the key, four bits an element, and rows that begin anywhere.
            wide = flat and codes_a_byte(kind) == 1 and kernel is not _sum_requantize
            aligned = ("n", "first", "stride") if flat else ()
            unfused = config | {"enable_fp_fusion": False}
            yield build(kernel, label, unfused, constants, types, wide=wide, aligned=aligned)
