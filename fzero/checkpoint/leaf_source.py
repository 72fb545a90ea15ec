"""The sources of a leaf to save: a tensor in memory, a leaf on a disk, or a function that makes it."""

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
    """A leaf to save that is made only when it is written, and then freed: `give()` returns a tensor of this dtype and shape.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> leaf = checkpoint.Lazy(torch.float32, (2,), lambda: torch.ones(2))
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": leaf}, step=0)
    >>> checkpoint.restore_leaves(path, lambda name: True)
    {'w': tensor([1., 1.])}
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


def box_reader(leaf: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """A function (start, size) -> the elements [start, start + size) of a leaf."""
    if isinstance(leaf, Lazy):
        leaf_made = leaf.give()
        assert leaf_made.dtype == leaf.dtype and tuple(leaf_made.shape) == tuple(leaf.shape), f"{leaf} gave {leaf_made.shape}"
        leaf = leaf_made
    if isinstance(leaf, DiskTensor):
        return disk_box_reader(leaf)
    return lambda start, size: narrow_box(leaf.detach(), start, size)


def disk_box_reader(leaf: DiskTensor) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """`box_reader` of a leaf on a disk; the layers that were read last stay in memory."""
    held: tuple[Any, Tensor] | None = None

    def give(start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        nonlocal held
        layers = (start[0], size[0]) if leaf.kept.stacked else (0, 1)
        if held is None or held[0] != layers:
            held = None
            held = (layers, leaf.tensor(layers=layers))
        return narrow_box(held[1], (0, *start[1:]), size) if leaf.kept.stacked else narrow_box(held[1], start, size)

    return give
