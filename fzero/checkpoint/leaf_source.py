"""Where the elements of a leaf that is saved come from: memory, a disk, or a function that makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.offload import DiskTensor
from fzero.sharding.slices import narrow_box


@dataclass(frozen=True, eq=False)
class Lazy:
    """A leaf to save that is made when its turn comes, and dropped then: `give()` returns a tensor of this dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


def box_reader(leaf: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """A function that returns the box of a leaf of a given start and size."""
    if isinstance(leaf, Lazy):
        leaf_made = leaf.give()
        assert leaf_made.dtype == leaf.dtype and tuple(leaf_made.shape) == tuple(leaf.shape), f"{leaf} gave {leaf_made.shape}"
        leaf = leaf_made
    if isinstance(leaf, DiskTensor):
        return disk_box_reader(leaf)
    return lambda start, size: narrow_box(leaf.detach(), start, size)


def disk_box_reader(leaf: DiskTensor) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """`source` of a leaf on a disk, of which the layers that were asked for last are in memory."""
    held: tuple[Any, Tensor] | None = None

    def give(start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        nonlocal held
        layers = (start[0], size[0]) if leaf.kept.stacked else (0, 1)
        if held is None or held[0] != layers:
            held = None
            held = (layers, leaf.tensor(layers=layers))
        return narrow_box(held[1], (0, *start[1:]), size) if leaf.kept.stacked else narrow_box(held[1], start, size)

    return give
