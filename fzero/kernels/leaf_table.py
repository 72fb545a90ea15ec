"""Many leaves in one launch: the table of their addresses and sizes, and which program takes which stretch of which
leaf.

The optimizers' kernels (optim_multi_tensor) and that of the gradients' norm (grad_norm) read both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.device import kind_of
from fzero.kernels.op_function import INTERPRETED
from fzero.kernels.optim_leaf import Leaf
from fzero.kernels.optim_lowbit import Place
from fzero.kernels.optional_triton import tl, triton

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A row of the table: addresses of p, g, m, v, copy, scales of m and of v; elements, columns; the bits of float32 decay;
# and the Place.
P, G, M, V, COPY, SM, SV, SIZE, COLUMNS, DECAY, KEY, FIRST, FIELDS = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 17)
)


@triton.jit
def field_pointer(ROW, FIELD: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """The address in a field of a row, as a pointer to elements of TYPE. WIDE: it is a multiple of 16."""
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
    there = host.to(device, non_blocking=True)
    if capturing:
        _CAPTURED.append((host, there))
        return there
    if len(_TABLES) >= 64:
        del _TABLES[next(iter(_TABLES))]
    _TABLES[device, key] = there
    return there


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


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def leaf_row(leaf: Leaf, moments: int) -> tuple[int, ...]:
    """The row of the table of a leaf; `moments`: how many its optimizer has, 0 for the gradient alone."""
    state = [*map(_address, leaf.state), 0, 0, 0, 0]
    coded = leaf.state and leaf.state[0].dtype == torch.uint8
    m, v = state[0], state[1] if moments == 2 else 0
    sm, sv = (state[moments], state[moments + 1] if moments == 2 else 0) if coded else (0, 0)
    decay = int.from_bytes(struct.pack("<f", leaf.decay), "little", signed=True)
    where = leaf.place or Place()
    columns = leaf.p.shape[-1] if leaf.p.dim() else 1
    return (
        leaf.p.data_ptr(), leaf.g.data_ptr(), m, v, _address(leaf.copy), sm, sv, leaf.p.numel(), columns, decay,
        *where.key, where.first, where.size0, where.stride0, where.size1, where.stride1,
    )  # fmt: skip


def one_device(tensors: Sequence[Tensor]) -> str:
    """Why the kernels cannot run on these tensors where they are, or "" if they can."""
    devices = {x.device for x in tensors}
    if len(devices) == 1 and (kind_of(tensors[0]) == "cuda" or INTERPRETED):
        return ""
    return f"a tensor is on {', '.join(sorted(str(d) for d in devices))}, and Triton's kernels run on one cuda device"


def on_cuda(leaves: Sequence[Any], *rest: Any) -> str:
    """Why "auto" should not take a Triton kernel for these leaves."""
    devices = {kind_of(leaf.p if isinstance(leaf, Leaf) else leaf) for leaf in leaves}
    return "" if devices <= {"cuda"} else "interpreted, for checking numbers alone"
