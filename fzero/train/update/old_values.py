"""The values that an update in the backward pass overwrites, kept in the host's memory until the update is known to be
right."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fzero.core.device import HOST
from fzero.offload.update_units import BlockRead, RowBlock, UpdateUnit


class OldValues:
    """Copies of the leaves of layers that an update overwrites; their memory lasts from step to step.

    Rows from a disk are not among them: their old version stays there until the step is committed.
    """

    def __init__(self) -> None:
        self.rooms: dict[str, Tensor] = {}  # a leaf's column, or "target/" and its name -> memory like the leaf
        self.held: set[tuple[str, RowBlock]] = set()
        self.back = False  # whether `exchange` gives back

    def reserve(self, leaves: Mapping[str, Tensor]) -> None:
        """Have memory for these leaves, and hold nothing."""
        self.held.clear()
        self.back = False
        for name, leaf in leaves.items():
            room = self.rooms.get(name)
            if room is None or (room.shape, room.dtype) != (leaf.shape, leaf.dtype):
                self.rooms[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device=HOST)

    def exchange(
        self, unit: UpdateUnit, found: Mapping[str, dict[str, BlockRead]], values: Mapping[str, dict[str, Tensor]]
    ) -> None:
        """Copy the rows of a unit here before they are updated; or, once `back` is set, copy those that are here over
        them."""
        for part in unit:
            for column, one in found[part.name].items():
                if column == "grad" or one.reading is not None:
                    continue
                key, value = f"target/{part.name}" if column == "target" else column, values[part.name][column]
                if not self.back:
                    part.of(self.rooms[key]).copy_(value)
                    self.held.add((key, part))
                elif (key, part) in self.held:
                    value.copy_(part.of(self.rooms[key]))
