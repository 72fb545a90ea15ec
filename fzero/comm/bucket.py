"""Buckets: the small leaves of a layer share one message, each large leaf has its own.

A bucket is a matrix [n, width]: row i holds, side by side, the part of every tensor that belongs to rank i of an axis.
A collective changes the number of rows (a gather 1 -> N, a scatter N -> 1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

SMALL = 1 << 16  # bytes of a shard below which a message is mostly latency


def bucket_groups(tensors: Sequence[Tensor], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The indices of the tensors by bucket: small ones of equal kind and dtype share a bucket."""
    groups: dict[Hashable, list[int]] = {}
    for i, (tensor, kind) in enumerate(zip(tensors, kinds)):
        small = tensor.numel() * tensor.element_size() < SMALL
        groups.setdefault((kind, tensor.dtype) if small else i, []).append(i)
    return list(groups.values())


def pack(tensors: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Pack tensors into a bucket [rows, width] of `dtype`; the first dim of each is split into `rows` equal parts."""
    # A bucket of one tensor is a view of it, without a copy.
    if len(tensors) == 1:
        return tensors[0].to(dtype).contiguous().view(rows, -1)
    return torch.cat([t.reshape(rows, -1).to(dtype) for t in tensors], 1)


def unpack(bundle: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes in a bucket [rows, width]; the rows' parts are joined along each first dim."""
    if len(shapes) == 1:
        return [bundle.reshape(shapes[0])]
    widths = [torch.Size(shape).numel() // bundle.shape[0] for shape in shapes]
    return [chunk.reshape(shape) for chunk, shape in zip(bundle.split(widths, 1), shapes)]


def padded(elements: int, ranks: int) -> int:
    """The elements of a whole sum in codes, of which each rank adds up as many: a multiple of 16 of them."""
    return elements + -elements % (16 * ranks)
