"""Weights in MXFP4, the format of gpt-oss's published experts: numbers of four bits (e2m1) in blocks of 32 along the
rows of a product, each block with a scale that is a power of two (e8m0).

    w[e, 32 g + 2 i + h, f] = VALUES[half h of byte i of blocks[e, f, g]] 2^(scales[e, f, g] - 127)

with h = 0 the lower half of a byte. Every such number within bfloat16's range is exact in it.
Ref: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0, sections 5.3.3 and 6.3.

Shapes: blocks uint8 [E, F, G, 16], scales uint8 [E, F, G], w bfloat16 [E, D, F] with D = 32 G.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fzero.checkpoint.convert.safetensors import Entry

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES = 16  # of a block
BLOCKS, SCALES = "_blocks", "_scales"
NAN, BIAS = 255, 127  # of a scale


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights w [E, D, F] of blocks and scales.

    >>> block = torch.full((1, 1, 1, 16), 0x92, dtype=torch.uint8)  # its lower half is 1.0, its upper -0.5
    >>> dequantized(block, torch.full((1, 1, 1), 128, dtype=torch.uint8))[0, :2, 0]
    tensor([ 2., -1.], dtype=torch.bfloat16)
    """
    values = torch.tensor([*VALUES, *(-x for x in VALUES)])
    e, f, g, _ = blocks.shape
    w = torch.empty(e, 2 * BYTES * g, f, dtype=torch.bfloat16)
    for to, halves, scale in zip(w, blocks, scales):  # an expert at a time: the codes as indices take much memory
        codes = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
        factor = torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - BIAS).masked_fill(scale == NAN, torch.nan)
        to.copy_((values[codes.to(torch.int32)] * factor[..., None]).flatten(1).t())
    return w


def unpacked(source: Path, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """The tensors with NAME in place of each pair NAME_blocks and NAME_scales, dequantised on request.

    Raises ValueError naming a tensor of such a pair whose other half is missing, or that has another dtype or shape.
    """
    out: dict[str, Entry] = {}
    for name, entry in tensors.items():
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            scales = _half(source, tensors, whole + SCALES, entry.shape[:-1])
            if len(entry.shape) != 4 or entry.shape[-1] != BYTES:
                raise ValueError(
                    f"{source}: tensor {name} has shape {list(entry.shape)}; in MXFP4 it must be [E, F, G, {BYTES}]"
                )
            _half(source, tensors, name, entry.shape)
            if whole in tensors:
                raise ValueError(f"{source}: tensor {whole} is there twice, once in MXFP4")
            e, f, g, _ = entry.shape
            shape = e, 2 * BYTES * g, f
            give = lambda blocks=entry, scales=scales: dequantized(blocks.give(), scales.give())  # noqa: E731
            out[whole] = Entry(torch.bfloat16, shape, give)
        elif name.endswith(SCALES):
            _half(source, tensors, name.removesuffix(SCALES) + BLOCKS, None)
        else:
            out[name] = entry
    return out


def _half(source: Path, tensors: dict[str, Entry], name: str, shape: tuple[int, ...] | None) -> Entry:
    if name not in tensors:
        raise ValueError(f"{source}: tensor {name} is missing: in MXFP4 a weight has {BLOCKS} and {SCALES}")
    found = tensors[name]
    if found.dtype != torch.uint8 or shape not in (None, found.shape):
        wanted = "" if shape is None else f" {list(shape)}"
        raise ValueError(
            f"{source}: tensor {name} is {found.dtype} {list(found.shape)}; in MXFP4 it must be torch.uint8{wanted}"
        )
    return found
