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
        self.buffers: dict[str, Tensor] = {}  # a leaf's column, or "target/" and its name -> memory like the leaf
        self.saved_rows: set[tuple[str, RowBlock]] = set()
        self.restores = False  # whether `exchange` gives back

    def reserve(self, leaves: Mapping[str, Tensor]) -> None:
        """Have memory for these leaves, and hold nothing."""
        self.saved_rows.clear()
        self.restores = False
        for name, leaf in leaves.items():
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (leaf.shape, leaf.dtype):
                self.buffers[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device=HOST)

    def exchange(
        self, unit: UpdateUnit, reads: Mapping[str, dict[str, BlockRead]], values: Mapping[str, dict[str, Tensor]]
    ) -> None:
        """Copy the rows of a unit here before they are updated; or, once `back` is set, copy those that are here over
        them."""
        for block in unit:
            for column, read in reads[block.name].items():
                if column == "grad" or read.reading is not None:
                    continue
                key, value = f"target/{block.name}" if column == "target" else column, values[block.name][column]
                if not self.restores:
                    block.narrow(self.buffers[key]).copy_(value)
                    self.saved_rows.add((key, block))
                elif (key, block) in self.saved_rows:
                    value.copy_(block.narrow(self.buffers[key]))
