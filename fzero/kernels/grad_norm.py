"""The norm of all gradients with the count of non-finite elements, in one pass over many leaves in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.device import fake_device_of, record_launch
from fzero.kernels.aot import Build
from fzero.kernels.leaf_table import (
    FIELDS,
    FLOATS,
    SIZE,
    G,
    field_pointer,
    leaf_row,
    leaf_table,
    on_cuda,
    one_device,
    work_list,
)
from fzero.kernels.optim_leaf import Leaf
from fzero.kernels.optional_triton import tl, triton
from fzero.kernels.registry import Form, Op

NORM = {"BLOCK": 16384, "num_warps": 8}


def grad_norm_reference(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm of all elements, float32 0-dim; how many are not finite, int64 0-dim): the definition. One leaf at
    least.
    """
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    bad: Any = sum((~g.isfinite()).sum() for g in grads)  # a tensor: there is a leaf
    return torch.linalg.vector_norm(norms), bad


@triton.jit
def _square_sums(T, WORK, OUT, WIDE: tl.constexpr, GT: tl.constexpr, BLOCK: tl.constexpr):
    """Store in OUT [programs, 2] the sum of squares of one stretch of a leaf, and the number of its non-finite
    elements.
    """
    pid = tl.program_id(0).to(tl.int64)
    work = tl.load(WORK + pid)
    ROW = T + (work >> 40) * FIELDS
    n = tl.load(ROW + SIZE)
    if WIDE:
        n = tl.multiple_of(n, 16)
    at = (work & 0xFFFFFFFFFF) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(field_pointer(ROW, G, GT, WIDE) + at, mask=at < n, other=0.0).to(tl.float32)
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    tl.store(OUT + pid * 2, tl.sum(g * g))
    tl.store(OUT + pid * 2 + 1, tl.sum(tl.where(finite, 0.0, 1.0)))


@torch.no_grad()
def _grad_norm(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device, groups = grads[0].device, {}
    if fake_device_of(grads[0]) is not None:
        parts = torch.empty(1 + sum(triton.cdiv(g.numel(), NORM["BLOCK"]) for g in grads), 2, device=device)
        record_launch("grad_norm", list(grads), [parts])
        return _combine_norms([parts])
    for g in grads:
        if g.numel():
            groups.setdefault((g.dtype, g.numel() % 16 == 0 and g.data_ptr() % 16 == 0), []).append(g)
    parts = [torch.zeros(1, 2, device=device)]
    for (dtype, wide), group in groups.items():
        table = leaf_table(tuple(leaf_row(Leaf(g, g, ()), 0) for g in group), device)
        work = work_list(tuple(triton.cdiv(g.numel(), NORM["BLOCK"]) for g in group), device)
        parts.append(torch.empty(len(work), 2, device=device))
        with gpu.on_device(device):
            _square_sums[(len(work),)](table, work, parts[-1], WIDE=wide, GT=FLOATS[dtype], **NORM)
    return _combine_norms(parts)


def _combine_norms(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    total, bad = torch.cat(tuple(parts)).to(torch.float64).sum(0)
    return total.sqrt().to(torch.float32), bad.to(torch.int64)


def _norm_supports(grads: Sequence[Tensor]) -> str:
    if not grads or any(g.dtype not in FLOATS for g in grads):
        return (
            f"the dtypes are {', '.join(sorted({str(g.dtype) for g in grads})) or 'none'}; it takes those of 32 "
            "and 16 bits"
        )
    return one_device(grads) or ("" if all(g.is_contiguous() for g in grads) else "a gradient is not contiguous")


grad_norm = Op(
    "grad_norm",
    grad_norm_reference,
    Form("triton", _grad_norm, supports=_norm_supports, prefers=on_cuda),
    flops=lambda grads: 2 * sum(g.numel() for g in grads),
    bytes=lambda grads: sum(g.numel() * g.element_size() for g in grads),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for dtype in (tl.float32, tl.bfloat16):
        signature = {
            "T": "*i64",
            "WORK": "*i64",
            "OUT": "*fp32",
            "WIDE": "constexpr",
            "GT": "constexpr",
            "BLOCK": "constexpr",
        }
        yield Build(
            f"_square_sums {dtype} {NORM['BLOCK']}", "_square_sums", signature, {"WIDE": True, "GT": dtype}, NORM
        )
