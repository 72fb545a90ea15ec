"""Delayed updates: each gradient is taken at the parameters before the last update, so that no rank of a pipeline waits
for the update before it goes on.

    theta[j+1] = theta[j] - u(gradient of the loss of batch j at theta[j-1]),  theta[-1] = theta[0]

u is the optimizer's update, with its state and clipping as ever; where an update is skipped, theta[j+1] = theta[j]. The
state has two versions of the trained parameters. A step makes `plan.delayed` updates; how many it makes changes no
number, only how often the pipeline empties. The first `plan.delay_after` steps are not delayed.

Where the optimizer's states rest in the host's memory, an update is made there while the device computes the gradient
of the next one: unit by unit, as the layers of that one come back. The last update of a step has nothing beside it.

Ref: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", arXiv:2006.09503, section 3.1
(PipeDream-2BW); Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840, section 5.2 (one-step delayed parameter update).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.models import base
from fzero.sharding import Plan
from fzero.train.gradient import StepGradient, layer_draws
from fzero.train.row import Batches, Turn
from fzero.train.state import PREVIOUS, TrainState
from fzero.train.update.offloaded import UpdateByUnits

M = TypeVar("M")


def run_delayed(
    gradient: StepGradient,
    state: TrainState,
    parts: list[Any],
    size: int,
    drawn: Any,
    seed: Tensor,
    update: Callable[[TrainState, Any], tuple[TrainState | UpdateByUnits, M]],
) -> tuple[TrainState, list[M]]:
    """The state after the updates of a step, and what `update` says of each.

    parts: the micro-batches of all updates, of `size` rows each. update: (state, what `gradient` found) -> (the state
    after the update, with the version before it in `extra`, or the update begun; and anything).
    """
    plan, device, made = gradient.plan, seed.device, list[M]()
    each, firsts = len(parts) // plan.delayed, gradient.firsts(len(parts), size)
    slices = [slice(i * each, (i + 1) * each) for i in range(plan.delayed)]
    beside = UpdateBeside()
    delays = not plan.delay_after or bool(state.step > plan.delay_after)  # `step` counts this one
    fields = layer_draws(drawn, plan, gradient.how)
    if (pure := transforms() or needs_grad(*pytree.leaves((state.params, parts)))) or not delays:
        for own in slices:
            params = before(plan, state) if delays else state.params
            if pure:
                found = gradient.pure(params, parts[own], firsts[own], drawn, seed)
            else:
                turns = [gradient.turn(params, each, device)]
                losses = gradient.backward(turns, Batches(parts[own], firsts[own], fields), seed)
                found = gradient.collect(turns.pop().sink, losses, each, device)
            begun, said = update(state, found)
            state = beside.ended(begun)
            made.append(said)
        return state, made
    turns = [
        gradient.turn(at, each, device, parity=i % 2, beside=beside.advance)
        for i, at in enumerate((before(plan, state), state.params)[: plan.delayed])
    ]

    def at_update(losses: list[base.Loss]) -> None:
        nonlocal state
        i = len(made)
        state = beside.ended(state)
        sink, turns[i] = turns[i].sink, Turn((), None)
        found = gradient.collect(sink, losses, each, device)
        del sink
        begun, said = update(state, found)
        made.append(said)
        # Over stages a rank may be in the next update but one: its parameters are complete before it goes on.
        last = plan.stages is not None or i + 1 == plan.delayed
        state = beside.ended(begun) if last else beside.begun(begun)
        if i + 2 < plan.delayed:
            turns.append(gradient.turn(state.params, each, device, parity=i % 2, beside=beside.advance))

    gradient.backward(turns, Batches(parts, firsts, fields, plan.delayed), seed, update=at_update)
    return state, made


class UpdateBeside:
    """The update that the host makes while the device computes the gradients of the next one."""

    def __init__(self) -> None:
        self.update: UpdateByUnits | None = None
        self.layers = self.passed = 0  # gradients of layers that came in this turn; those since the update began

    def begun(self, update: TrainState | UpdateByUnits) -> TrainState:
        """The state that an update goes on to write in place, of which its parameters alone may be used."""
        self.layers, self.passed = self.passed, 0
        if not isinstance(update, UpdateByUnits):
            return update
        self.update = update
        update.read_ahead()
        return update.state

    def advance(self) -> None:
        """A layer's gradients have come: update the units whose turn it is, the last one with the last layer."""
        self.passed += 1
        if self.update is not None:
            self.update.advance(self.passed / max(1, self.layers))

    def ended(self, update: TrainState | UpdateByUnits) -> TrainState:
        """The state after `update`, or after the one that was begun."""
        update, self.update = self.update or update, None
        return update.finish() if isinstance(update, UpdateByUnits) else update


def before(plan: Plan, state: TrainState) -> Any:
    """The parameters before the last update, at rest."""
    return plan.whole(state.extra[PREVIOUS], state.params)


@torch.no_grad()
def exchanged(plan: Plan, state: TrainState) -> TrainState:
    """The state with its parameters in the memory of the version before, which the micro-batches of an update that is
    made need no longer, and the version before in theirs, where those under way still read it."""
    now, spare = plan.trained(state.params), state.extra[PREVIOUS]
    pytree.map(lambda old, new: old.copy_(new), spare, now)
    return state._replace(params=plan.whole(spare, state.params), extra={**state.extra, PREVIOUS: now})


def keep_previous(plan: Plan, old: TrainState, new: TrainState) -> TrainState:
    """`new`, a pure function of `old`, with the parameters of `old` as the version before."""
    return new._replace(extra={**new.extra, PREVIOUS: plan.trained(old.params)})
