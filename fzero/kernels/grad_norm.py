"""The norm of all gradients with the count of non-finite elements, in one pass over many leaves in one launch.

The table of addresses and sizes of leaves, and which program takes which stretch, serves the optimizers' kernels too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.device import fake_device_of, kind_of, record_launch
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import INTERPRETED, address, tl, triton
from fzero.kernels.optim_leaf import OptimLeaf
from fzero.kernels.optim_lowbit import LeafPosition
from fzero.kernels.registry import Form, Op

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A row of the table: addresses of p, g, m, v, copy, scales of m and of v; elements, columns; the bits of float32 decay;
# and the Place.
P, G, M, V, COPY, SM, SV, SIZE, COLUMNS, DECAY, KEY, FIRST, FIELDS = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 17)
)


@triton.jit
def field_pointer(ROW, FIELD: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """The address in a field of a row, as a pointer; WIDE: a multiple of 16."""
    # An address is a number in the table, as leaves are of any count.
    pointer = tl.load(ROW + FIELD).to(tl.pointer_type(TYPE))
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


_TABLES: dict[tuple, Tensor] = {}
_CAPTURED: list[tuple[Tensor, ...]] = []  # tables of graphs; a replay copies again what the host's memory has


def _cache_on_device(key: tuple, make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return `make()` on the device, from a cache of the 64 newest keys; the host does not wait."""
    capturing = gpu.is_capturing(device)
    if (device, key) in _TABLES:
        _CAPTURED.extend([(_TABLES[device, key],)] * capturing)  # a graph keeps it, whatever is newer
        return _TABLES[device, key]
    host = gpu.pinned(make(), device)
    device_copy = host.to(device, non_blocking=True)
    if capturing:
        _CAPTURED.append((host, device_copy))
        return device_copy
    if len(_TABLES) >= 64:
        del _TABLES[next(iter(_TABLES))]
    _TABLES[device, key] = device_copy
    return device_copy


def work_list(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 [programs]: leaf << 40 | stretch, for leaves with these numbers of stretches."""

    def make() -> Tensor:
        counts = torch.tensor(sizes)
        leaf = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        return leaf << 40 | torch.arange(len(leaf)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)

    return _cache_on_device(sizes, make, device)


def leaf_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return int64 [leaves, FIELDS] on the device, of rows from `leaf_row`."""
    return _cache_on_device(rows, lambda: torch.tensor(rows, dtype=torch.int64), device)


def leaf_row(leaf: OptimLeaf, moments: int) -> tuple[int, ...]:
    """The row of the table of a leaf with so many moments of its optimizer."""
    state = [*map(address, leaf.state), 0, 0, 0, 0]
    coded = leaf.state and leaf.state[0].dtype == torch.uint8
    m, v = state[0], state[1] if moments == 2 else 0
    sm, sv = (state[moments], state[moments + 1] if moments == 2 else 0) if coded else (0, 0)
    decay = int.from_bytes(struct.pack("<f", leaf.decay), "little", signed=True)
    position = leaf.position or LeafPosition()
    columns = leaf.p.shape[-1] if leaf.p.dim() else 1
    return (
        leaf.p.data_ptr(), leaf.g.data_ptr(), m, v, address(leaf.copy) or 0, sm, sv, leaf.p.numel(), columns, decay,
        *position.key, position.first, position.size0, position.stride0, position.size1, position.stride1,
    )  # fmt: skip


def device_mismatch(tensors: Sequence[Tensor]) -> str:
    """Why the kernels cannot run on these tensors where they are, or "" if they can."""
    devices = {x.device for x in tensors}
    if len(devices) == 1 and (kind_of(tensors[0]) == "cuda" or INTERPRETED):
        return ""
    return f"a tensor is on {', '.join(sorted(str(d) for d in devices))}, and Triton's kernels run on one cuda device"


def on_cuda(leaves: Sequence[Any], *arguments: Any) -> str:
    """Why "auto" should not take a Triton kernel for these leaves."""
    devices = {kind_of(leaf.p if isinstance(leaf, OptimLeaf) else leaf) for leaf in leaves}
    return "" if devices <= {"cuda"} else "interpreted, for checking numbers alone"


NORM = {"BLOCK": 16384, "num_warps": 8}


def grad_norm_reference(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm of all elements, float32 0-dim; how many are not finite, int64 0-dim): the definition."""
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    bad: Any = sum((~g.isfinite()).sum() for g in grads)  # a tensor: there is a leaf
    return torch.linalg.vector_norm(norms), bad


@triton.jit
def _square_sums(T, WORK, OUT, WIDE: tl.constexpr, GT: tl.constexpr, BLOCK: tl.constexpr):
    """Store in OUT [programs, 2] a stretch's sum of squares and number of non-finite elements."""
    pid = tl.program_id(0).to(tl.int64)
    work = tl.load(WORK + pid)
    # A number of the list is leaf << 40 | stretch.
    ROW = T + (work >> 40) * FIELDS
    n = tl.load(ROW + SIZE)
    if WIDE:
        n = tl.multiple_of(n, 16)
    offsets = (work & 0xFFFFFFFFFF) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(field_pointer(ROW, G, GT, WIDE) + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    # An exponent of ones is infinity or NaN. The squares may overflow where all are finite, so their sum does not tell.
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    # One pair a program, which the caller adds up in their order: no atomic adds, so the norm has the same bits each
    # time.
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
        table = leaf_table(tuple(leaf_row(OptimLeaf(g, g, ()), 0) for g in group), device)
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
    return device_mismatch(grads) or ("" if all(g.is_contiguous() for g in grads) else "a gradient is not contiguous")


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
        types, constants = "T:*i64 WORK:*i64 OUT:*fp32", {"WIDE": True, "GT": dtype}
        yield build(_square_sums, f"{dtype} {NORM['BLOCK']}", NORM, constants, types)
