"""Rows of a table by their numbers, whose gradient is summed over tokens in float32 or wider.

torch's own gradient on a CPU is summed in the table's dtype, which in bfloat16 stops at 256 ones.

Shapes: table [V, D], index int64 of any shape [...]; the result is [..., D] in the table's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core.autodiff import first_order
from fzero.core.device import kind_of
from fzero.kernels.custom_operator import Fused, operator

CHUNK = 1 << 20  # numbers of a gradient that are widened at a time


def _gradient_like(g: Tensor, index: Tensor, rows: int) -> Tensor:
    return g.new_empty((rows, g.shape[-1]))


@operator("embedding_backward(Tensor g, Tensor index, int rows) -> Tensor", _gradient_like)
def embedding_backward(g: Tensor, index: Tensor, rows: int) -> Tensor:
    """The gradient [rows, D] of the table from that of the result: float32 sums, rounded once."""
    out, size = torch.zeros_like(_gradient_like(g, index, rows)), max(1, CHUNK // max(1, g.shape[-1]))
    ids, inverse = torch.unique(index, return_inverse=True)
    sums = g.new_zeros((len(ids), g.shape[-1]), dtype=torch.float32)
    for g_chunk, inverse_chunk in zip(g.split(size), inverse.split(size)):
        sums.index_add_(0, inverse_chunk, g_chunk.to(torch.float32))
    return out.index_copy_(0, ids, sums.to(g.dtype))


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """The rows of `table` with the numbers `index`: torch's `embedding`, but for how its gradient is summed.

    >>> look_up(torch.eye(3, dtype=torch.bfloat16), torch.tensor([2, 0])).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    if table.dtype not in (torch.bfloat16, torch.float16) or kind_of(table) != "cpu":
        return F.embedding(index, table)
    if not first_order():
        return F.embedding(index, table.to(torch.float32)).to(table.dtype)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor]:
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return (embedding_backward(flat, saved[0].reshape(-1), rows),)

    rows = table.shape[0]
    return Fused(
        "embedding",
        lambda table, index: (F.embedding(index, table),),
        backward,
        select_saved=lambda inputs, _: (inputs[1],),
    )(table, index)
