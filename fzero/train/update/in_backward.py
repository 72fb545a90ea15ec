"""Layers updated during the backward pass, each as soon as its gradient is reduced: no gradient of layers is kept.

The same bits as an update at the end. Where a gradient is found not to be finite after others were updated, the slot of
the store is not committed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.copy_buckets import SMALL_COPY, allocate_adjacent, copy_out_buckets
from fzero.core.device import HOST, kind_of
from fzero.core.gpu_copies import Copied, await_readers, copy_out
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload.update_units import UpdateUnit, begin_ahead
from fzero.sharding import Plan
from fzero.sharding.slices import shard_dim
from fzero.train.step import StepParts, TrainStep, update_at_end
from fzero.train.update.in_memory import Gradients
from fzero.train.update.offloaded import AHEAD, Exchange, StreamedUpdate, Update


def make_step(step: StepParts) -> TrainStep:
    """The step whose layers are updated in the backward pass."""
    streamed = expect_layers(step, "backward")
    expect_early(streamed, step.plan, step.nvme.slots if step.nvme is not None else 1, step.skips)
    return update_at_end(step, partial(EarlyUpdate, streamed))


def expect_layers(step: StepParts, update: str) -> StreamedUpdate:
    """The update that can be made layer by layer; raises ValueError for others."""
    plan = step.plan
    if plan.codec is not None and plan.codec.loco is not None:
        raise ValueError(
            f'update="{update}" updates layers before the step is decided, and codec {plan.codec} keeps errors until '
            'then; use update="end", or leave loco out'
        )
    if plan.stages is not None:
        raise ValueError(
            f'update="{update}" updates layers in the backward pass of a whole model, and pp={plan.mesh.pp.size} cuts '
            'it into stages; use update="end"'
        )
    if step.streamed is None or not isinstance(step.model, base.Model):
        raise ValueError(
            f'update="{update}" is for a layered Model with offloaded states; give the plan '
            f'offload="{"opt=host" if update == "speculate" else "params=nvme,opt=nvme"}"'
        )
    if step.streamed.stacks:
        raise ValueError(
            f'update="{update}" updates layers in the backward pass, and the optimizer\'s state of '
            f"{min(step.streamed.stacks)} has leaves without layers, for which all of them are updated at once; use "
            'update="end"'
        )
    return step.streamed


def expect_early(streamed: StreamedUpdate, plan: Plan, slots: int, skips: bool) -> None:
    """Raise ValueError if layers cannot be updated before all gradients are known."""
    if streamed.parts.heads:
        raise ValueError(
            'update="backward": the optimizer begins with clip_by_global_norm, which needs all gradients before the '
            "first update; "
            'leave it out (optim.clip=0), or use update="speculate" or "end"'
        )
    specs = [
        spec
        for tree in (plan.params, plan.opt)
        for name, spec in pytree.named_leaves(tree).items()
        if name not in plan.frozen
    ]
    all_on_disk = all(spec.memory.on_disk for spec in specs)
    if skips and not (slots > 1 and all_on_disk):
        fixes = ['the plan offload="params=nvme,opt=nvme"'] * (not all_on_disk) + ["fzero.Nvme slots=2"] * (slots < 2)
        raise ValueError(
            'update="backward": a step whose gradient is not finite is undone by not committing it, which needs '
            f"params=nvme,opt=nvme and two slots; give {' and '.join(fixes)}, or the step "
            "skip=fzero.Skip(nonfinite=False)"
        )


class EarlyUpdate:
    """One step's update: `begin`, `receive` for every layer's leaf, then `finish` with the others."""

    keeps = False  # whether the sums of layers are kept to the end of the step

    def __init__(self, streamed: StreamedUpdate, state: Tree, exchange: Exchange | None = None) -> None:
        self.streamed, self.state, self.exchange = streamed, state, exchange
        self.stacked = {name for name in streamed.shards if shard_dim(name) == 1}
        self._update: Update | None = None
        self.layers: dict[int | None, list[UpdateUnit]] = {}
        self.names: dict[int | None, set[str]] = {}  # of the leaves that have the layer
        self.waiting: dict[int, dict[str, tuple[Any, Copied | None]]] = {}  # layers of which leaves are missing
        # The layer to be updated next, see `Update.layer`.
        self.ready: tuple[int, dict[str, tuple[Any, Callable[[], Any] | None]]] | None = None
        self.done: list[UpdateUnit] = []

    @property
    def update(self) -> Update:
        """The update that was begun."""
        assert self._update is not None, "begin was not called"
        return self._update

    @property
    def counts(self) -> dict[str, int]:
        """Fields of Metrics."""
        return {}

    def begin(self, factor: Tensor) -> None:
        """Begin the update; `factor` scales the sums of gradients."""
        await_readers(self.state.step.device)  # a checkpoint may still copy what the update writes over
        sums = Gradients({}, factor, torch.zeros_like(factor))
        self._update = Update(self.streamed, sums, self.state, exchange=self.exchange)
        # Layers are views of one leaf, and autograd counts the writes to a leaf, not to a layer: a written layer would
        # make what was saved of the others invalid. `data` has a count of its own.
        params = self.update.params
        self.update.params = {n: leaf.data if isinstance(leaf, Tensor) else leaf for n, leaf in params.items()}
        self.update.begin_store()
        for unit in self.streamed.units(self.update.width()):
            self.layers.setdefault(unit[0].layer, []).append(unit)
        # A stack may have fewer layers than another.
        self.names = {layer: {block.name for unit in units for block in unit} for layer, units in self.layers.items()}

    def receive(self, name: str, layer: int, value: Any, copied: Copied | None = None) -> None:
        """Receive the reduced gradient of one leaf of one layer; update layers all of whose leaves have arrived."""
        # A layer is updated when all its leaves have come; its small gradients leave the GPU by one copy.
        entries = self.waiting.setdefault(layer, {})
        entries[name] = value, copied
        # A large gradient leaves at once, so that its copy overlaps with the backward pass.
        if self.leaves(entries[name]) and value.nbytes >= SMALL_COPY:
            copied = copy_out(value)
            entries[name] = copied.tensor, copied
        if entries.keys() == self.names[layer]:
            small = {n: x for n, (x, copy) in entries.items() if self.leaves((x, copy))}
            small_copies = copy_out_buckets([*small.values()], allocate_adjacent([*small.values()])) if small else []
            entries |= {n: (copy.tensor, copy) for n, copy in zip(small, small_copies)}
            # The layer before, now that this one's kernels are launched: the GPU computes while the host updates.
            self.catch_up()
            # The copies are on one stream, the small ones last, so the last one is waited for.
            copies = [small_copies[-1]] if small_copies else [copy for _, copy in entries.values() if copy is not None]
            last = copies[-1] if copies else None
            arrive = None if last is None else functools.cache(last.finish)
            self.ready = layer, {n: (x, None if copy is None else arrive) for n, (x, copy) in entries.items()}
            del self.waiting[layer]
            if kind_of(self.state.step) != "cuda":
                self.catch_up()

    def leaves(self, entry: tuple[Any, Copied | None]) -> bool:
        """Whether a gradient is on a GPU, and is to be copied to the host, which updates."""
        value, copied = entry
        on_gpu = copied is None and isinstance(value, Tensor) and kind_of(value) == "cuda"
        return on_gpu and self.update.device == HOST

    def catch_up(self) -> None:
        """Update the layer that has arrived, if there is one."""
        if self.ready is None:
            return
        layer, self.update.layer = self.ready
        self.ready = None
        for unit, transfer in begin_ahead(self.layers[layer], self.update.begin, AHEAD):
            self.update.update(unit, transfer)
            self.done.append(unit)
        self.update.layer = {}

    def finish(self, grads: Gradients, state: Tree, skipped: Tensor | None) -> Tree:
        """`state` after the update of the leaves without layers; if the step is skipped, without any update."""
        self.catch_up()
        if skipped is not None and bool(skipped):
            if self.streamed.nvme.store is not None:
                self.streamed.nvme.store.abandon()
            return state
        # The leaves without layers come last: their gradients are final only with the embedding's.
        self.update.state, self.update.grads = state, pytree.named_leaves(grads.sums)
        self.update.run(self.layers.get(None, []))
        return self.update.finish()
