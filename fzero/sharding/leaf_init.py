"""A part of a random leaf, drawn without the rest of it."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from fzero.core import prng

Index = TypeVar("Index", int, Tensor)
RUN = 1 << 11  # contiguous elements from which a run is drawn by a call of its own
CHUNK = 1 << 13  # elements that are drawn at a time if runs are shorter


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # the shape of a leaf, start and size of a part of it


def draw_leaf(key: Tensor, box: Box, mean: float, std: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A part of a leaf: of prng.normal(key, shape, mean, std), or the constant `mean` if std is 0; the same bits
    whatever the part. Integers are the normal float32 values rounded, and clamped to their dtype."""
    shape, start, size = box
    if dtype.is_floating_point:
        if std == 0.0:
            return torch.full(size, mean, dtype=dtype, device=device)
        return draw_normal_box(key, shape, start, size, mean, std, dtype, device)
    if std == 0.0:
        return torch.full(size, int(mean), dtype=dtype, device=device)
    limits = torch.iinfo(dtype)
    normal = draw_normal_box(key, shape, start, size, mean, std, torch.float32, device)
    return normal.round().clamp(limits.min, limits.max).to(dtype)


def draw_normal_box(
    key: Tensor,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
    mean: float,
    std: float,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """The elements [start, start + size) of prng.normal(key, shape, mean, std)."""
    if tuple(size) == tuple(shape):
        return prng.normal(key, shape, mean, std, dtype=dtype).to(device)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = max(d for d in range(len(shape)) if size[d] != shape[d])
    run, parts = math.prod(size[last:]), []
    if run >= RUN:
        for i in range(math.prod(size[:last])):
            first = _global(i, start[:last], size[:last], strides) + start[last] * strides[last]
            parts.append(prng.normal(key, (run,), mean, std, dtype=dtype, first=first))
    else:
        for begin in range(0, math.prod(size), CHUNK):
            local = torch.arange(begin, min(begin + CHUNK, math.prod(size)), device=key.device)
            parts.append(
                prng.normal(key, local.shape, mean, std, dtype=dtype, index=_global(local, start, size, strides))
            )
    return torch.cat(parts).reshape(size).to(device)


def _global(local: Index, start: tuple[int, ...], size: tuple[int, ...], strides: list[int]) -> Index:
    """The index in the whole leaf of element number `local` of a slice, over the leading dims that are given."""
    index = local * 0
    for dim in reversed(range(len(size))):
        index = index + (local % size[dim] + start[dim]) * strides[dim]
        local = local // size[dim]
    return index
