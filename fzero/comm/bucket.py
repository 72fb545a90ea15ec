"""Tensors that travel together: one message for the small leaves of a layer, one each for the others.

A bundle is a matrix [n, width]: row i is what belongs to rank i of an axis, the tensors side by side. A collective
along the first dim changes the number of rows (a gather 1 -> N, a scatter N -> 1); a bundle of one tensor is a view of
it, without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

SMALL = 1 << 16  # bytes of a shard below which a message is mostly latency


def bucket_groups(tensors: Sequence[Tensor], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The numbers of the tensors, in groups that travel together: small ones of one kind and dtype; the order is that
    of the tensors.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (tensor, kind) in enumerate(zip(tensors, kinds)):
        small = tensor.numel() * tensor.element_size() < SMALL
        groups.setdefault((kind, tensor.dtype) if small else i, []).append(i)
    return list(groups.values())


def pack(tensors: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """The bundle [rows, width] in `dtype` of tensors whose first dim is cut into `rows` parts."""
    if len(tensors) == 1:
        return tensors[0].to(dtype).contiguous().view(rows, -1)
    return torch.cat([t.reshape(rows, -1).to(dtype) for t in tensors], 1)


def unpack(bundle: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes in a bundle [rows, width], the first dim of each being the rows' parts one behind the
    other.
    """
    if len(shapes) == 1:
        return [bundle.view(shapes[0])]
    widths = [torch.Size(shape).numel() // bundle.shape[0] for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(bundle.split(widths, 1), shapes)]
