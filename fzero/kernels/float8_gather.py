"""Weights on their way between ranks as float8: half the bytes of bfloat16, where products round them anyway.

    numbers = round(s w),   w' = bfloat16(numbers / s),   s = 448 / max |w|,   the maximum over the whole weight

A tensorwise float8 product (see float8.py) of w' is that of w, bit for bit: the largest element, and so the scale,
comes back as it was, and each other one within a part in 2^9.

Shapes: w any, bfloat16; most, the largest magnitude, a float32 scalar; numbers like w, uint8, the bits of E4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.float8 import E4M3, SMALLEST, scale_of
from fzero.kernels.registry import Form, Op

CONFIGS = tuning.ConfigTable("_float8_move")
CHUNK = 1 << 20  # elements that the reference widens at a time
LIMIT = tl.constexpr(torch.finfo(E4M3).max)
LEAST = tl.constexpr(SMALLEST)


def _numbers(w: Tensor, amax: Tensor) -> Tensor:
    return w.new_empty(w.shape, dtype=torch.uint8)


def _weights(numbers: Tensor, amax: Tensor) -> Tensor:
    return numbers.new_empty(numbers.shape, dtype=torch.bfloat16)


@operator("float8_narrow_reference(Tensor w, Tensor amax) -> Tensor", _numbers)
def narrow_reference(w: Tensor, amax: Tensor) -> Tensor:
    """The numbers of w under the scale of `amax`: the definition."""
    out, scale = torch.empty(w.shape, dtype=torch.uint8, device=w.device), scale_of(amax, E4M3, False)
    for chunk, target in zip(w.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK)):
        target.view(E4M3).copy_(chunk.to(torch.float32) * scale)
    return out


@operator("float8_widen_reference(Tensor numbers, Tensor amax) -> Tensor", _weights)
def widen_reference(numbers: Tensor, amax: Tensor) -> Tensor:
    """w' of `numbers`, bfloat16: the definition."""
    out = torch.empty(numbers.shape, dtype=torch.bfloat16, device=numbers.device)
    inverse = 1.0 / scale_of(amax, E4M3, False)
    for chunk, target in zip(numbers.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK)):
        target.copy_(chunk.view(E4M3).to(torch.float32) * inverse)
    return out


@triton.jit
def _float8_move(X, MOST, OUT, n, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    """NARROW: OUT = round(s X), else OUT = X / s, with the bits of float8.py."""
    # In int64: a gathered weight may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(MOST)
    # One scale for the whole weight, from a number that all ranks agree on: the shards of a rank round as the whole
    # would.
    scale = tl.div_rn(tl.full((), LIMIT, tl.float32), tl.where(amax < LEAST, LEAST, amax))
    # Narrow: bfloat16 to E4M3; back: E4M3 to bfloat16, in float32 between.
    x = tl.load(X + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    # The inverse is rounded and multiplied by, as where a product is scaled back.
    x = x * scale if NARROW else x * tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=offsets < n)


def _move(x: Tensor, amax: Tensor, out: Tensor, narrow: bool) -> None:
    def grid(config: tuning.Config) -> tuple[int]:
        return (triton.cdiv(out.numel(), config["BLOCK"]),)

    if out.numel():
        arguments = (x, amax, out, out.numel())
        tuning.launch(_float8_move, grid, arguments, CONFIGS, shape=(out.numel(), narrow), NARROW=narrow)


@operator("float8_narrow(Tensor w, Tensor amax) -> Tensor", _numbers)
def float8_narrow(w: Tensor, amax: Tensor) -> Tensor:
    """`narrow_reference` in one pass over memory."""
    out = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    _move(w.contiguous(), amax, out.view(E4M3), True)
    return out


@operator("float8_widen(Tensor numbers, Tensor amax) -> Tensor", _weights)
def float8_widen(numbers: Tensor, amax: Tensor) -> Tensor:
    """`widen_reference` in one pass over memory."""
    out = torch.empty(numbers.shape, dtype=torch.bfloat16, device=numbers.device)
    _move(numbers.contiguous().view(E4M3), amax, out, False)
    return out


def _supports(x: Tensor, amax: Tensor) -> str:
    return triton_runs(x, amax)


def _op(name: str, reference: Callable[..., Tensor], launcher: Callable[..., Tensor]) -> Op:
    return Op(
        name,
        reference,
        Form("triton", launcher, supports=_supports, prefers=on_cuda),
        flops=lambda x, amax: x.numel(),
        bytes=lambda x, amax: 3 * x.numel(),
    )


narrow_weight = _op("narrow_weight", narrow_reference, float8_narrow)
widen_weight = _op("widen_weight", widen_reference, float8_widen)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for config in CONFIGS.for_gpu(gpu):
        for narrow, pointer in ((True, "OUT"), (False, "X")):
            label, types = f"{'narrow' if narrow else 'widen'} {config['BLOCK']}", f"MOST:*fp32 {pointer}:*fp8e4nv"
            yield build(_float8_move, label, config, {"NARROW": narrow}, types, aligned=("n",))
