"""Layers updated during the backward pass with the clip factor that is expected: that of a gradient that is not
clipped.

So the host's optimizer works while the device computes, with the bits of an update at the end. A step speculates if the
last update was not clipped. A wrong guess is put right by copies of the old values and the same update again; undoing
the arithmetic would not give back the bits. The copies take as much as what an update writes of layers in memory (12
bytes a parameter, with master weights and two moments in float32); rows on a disk need none.

Ref: Lian et al. 2025, "SuperOffload", arXiv:2509.21271, section 4.5 (speculation-then-validation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.device import HOST
from fzero.core.gpu_copies import Copied
from fzero.core.pytree import Tree
from fzero.offload.update_units import OFF, BlockRead, RowBlock, UpdateUnit, begin_ahead
from fzero.optim.base import columns_of
from fzero.sharding import Plan
from fzero.train.step import StepParts, TrainStep, update_at_end
from fzero.train.update.in_backward import EarlyUpdate, expect_layers
from fzero.train.update.in_memory import Gradients
from fzero.train.update.offloaded import AHEAD, StreamedUpdate, Update


def make_step(step: StepParts) -> TrainStep:
    """The step whose layers are updated in the backward pass, and put right."""
    streamed = expect_layers(step, "speculate")
    expect_speculation(step.plan, step.nvme.slots if step.nvme is not None else 1)
    return update_at_end(step, Speculation(streamed).start)


def expect_speculation(plan: Plan, slots: int) -> None:
    """Raise ValueError if the host does not update, or could not put an update right."""
    trained = plan.trained_leaves.values()
    if trained and all(leaf.opt.memory.on_device for leaf in trained):
        raise ValueError(
            'update="speculate" has the host update layers while the device computes, and the optimizer\'s state is on '
            'the device; give the plan offload="opt=host" or "opt=nvme", or use update="end"'
        )
    if slots < 2 and any(leaf.params.memory.on_disk or leaf.opt.memory.on_disk for leaf in trained):
        raise ValueError(
            f'update="speculate": an update on a disk is put right from its old version, and the store has {slots} '
            'slot; give it two (slots=2 of fzero.Nvme; nvme.slots=2 of a run), or use update="end"'
        )


class OldValues:
    """Copies of the leaves of layers in memory that an update overwrites; rows on a disk have their old slot."""

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
                # Kept from step to step, as the first touch of pages takes long.
                self.buffers[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device=HOST)

    def exchange(
        self, unit: UpdateUnit, reads: Mapping[str, dict[str, BlockRead]], values: Mapping[str, dict[str, Tensor]]
    ) -> None:
        """Copy the rows of a unit here before they are updated; or, with `restores`, back over them."""
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


class Speculation:
    """What lasts from step to step: the memory of old values, and whether the last update was unclipped."""

    def __init__(self, streamed: StreamedUpdate) -> None:
        self.streamed, self.old, self.expected = streamed, OldValues(), True

    def start(self, state: Tree) -> SpeculativeUpdate:
        """The update of a step from `state`."""
        return SpeculativeUpdate(self, state)


class SpeculativeUpdate(EarlyUpdate):
    """One step's update: `begin`, `receive` for every layer's leaf, `finish` when the norm is known."""

    keeps = True

    def __init__(self, speculation: Speculation, state: Tree) -> None:
        super().__init__(speculation.streamed, state, speculation.old.exchange)
        self.speculation, self.old, self.speculates = speculation, speculation.old, speculation.expected
        self.old.reserve(self.overwritten(state))
        self.wrong = False

    @property
    def counts(self) -> dict[str, int]:
        """Fields of Metrics: the layers updated early, and those put right."""
        layers = len({unit[0].layer for unit in self.done})
        return {"speculated": layers, "put_right": layers * self.wrong}

    def overwritten(self, state: Tree) -> dict[str, Tensor]:
        """The leaves of layers in memory that an update overwrites, without copies of master weights."""
        targets = pytree.named_leaves(state.master) or pytree.named_leaves(self.streamed.plan.trained(state.params))
        columns, owner = columns_of(self.streamed.parts.state(state.opt_state), list(targets))
        leaves = {f"target/{name}": (name, leaf) for name, leaf in targets.items()}
        leaves |= {column: (owner[column], leaf) for column, leaf in columns.items()}
        return {
            key: leaf for key, (param, leaf) in leaves.items() if param in self.stacked and not isinstance(leaf, OFF)
        }

    def receive(self, name: str, layer: int, value: Any, copied: Copied | None = None) -> None:
        """Receive the reduced gradient of one leaf of one layer."""
        if self.speculates:
            super().receive(name, layer, value, copied)

    def finish(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """`state` after the update; if the step is skipped, without any."""
        early_update = self.update
        full_update = Update(self.streamed, grads, state, skipped, self.old.exchange)
        self.catch_up()
        skips = skipped is not None and bool(full_update.small["skipped"])
        # Equal bits, as the update must have those of one at the end.
        clipped = bool(full_update.small["factor"] != early_update.small["factor"])
        self.wrong = skips or clipped
        if not skips:
            self.speculation.expected = not clipped
        store, done = self.streamed.nvme.store, self.done
        if not self.wrong and done:
            early_update.state, early_update.grads, early_update.exchange = state, full_update.grads, None
            early_update.run(self.layers.get(None, []))
            return early_update.finish()
        if done:
            early_update.settle()  # what it sent is read again, and written over
            self.old.restores = True
        if skips:
            self.undo(full_update)
            return state
        if store is not None:
            store.flush()  # no earlier write may end after a later one
        if not done:
            full_update.exchange = None
        return full_update.update_all()

    def undo(self, update: Update) -> None:
        """Give everything back that was updated, also in the parameters."""
        if self.old.saved_rows or not all(isinstance(update.params[name], OFF) for name in self.stacked):
            for unit, transfer in begin_ahead(self.done, update.begin, AHEAD):
                update.update(unit, transfer, change=False)
            update.settle()
        if self.streamed.nvme.store is not None:
            self.streamed.nvme.store.abandon()
