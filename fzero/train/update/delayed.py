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
from fzero.train.pipeline_executor import MicroBatches, Turn
from fzero.train.state import PREVIOUS, TrainState
from fzero.train.update.offloaded import UpdateByUnits

M = TypeVar("M")


def run_delayed(
    gradient: StepGradient,
    state: TrainState,
    parts: list[Any],
    size: int,
    draws: Any,
    seed: Tensor,
    update: Callable[[TrainState, Any], tuple[TrainState | UpdateByUnits, M]],
) -> tuple[TrainState, list[M]]:
    """The state after the updates of a step, and what `update` says of each.

    parts: the micro-batches of all updates, of `size` rows each. update: (state, what `gradient` found) -> (the state
    after the update, with the version before it in `extra`, or the update begun; and anything).
    """
    plan, device, reports = gradient.plan, seed.device, list[M]()
    per_update, firsts = len(parts) // plan.delayed, gradient.firsts(len(parts), size)
    slices = [slice(i * per_update, (i + 1) * per_update) for i in range(plan.delayed)]
    concurrent = ConcurrentUpdate()
    delays = not plan.delay_after or bool(state.step > plan.delay_after)  # `step` counts this one
    fields = layer_draws(draws, plan, gradient.execution)
    if (pure := transforms() or needs_grad(*pytree.leaves((state.params, parts)))) or not delays:
        for window in slices:
            params = previous_params(plan, state) if delays else state.params
            if pure:
                result = gradient.pure(params, parts[window], firsts[window], draws, seed)
            else:
                turns = [gradient.turn(params, per_update, device)]
                losses = gradient.backward(turns, MicroBatches(parts[window], firsts[window], fields), seed)
                result = gradient.collect(turns.pop().sink, losses, per_update, device)
            pending, report = update(state, result)
            state = concurrent.finish(pending)
            reports.append(report)
        return state, reports
    turns = [
        gradient.turn(version, per_update, device, parity=i % 2, on_layer=concurrent.advance)
        for i, version in enumerate((previous_params(plan, state), state.params)[: plan.delayed])
    ]

    def at_update(losses: list[base.Loss]) -> None:
        nonlocal state
        i = len(reports)
        state = concurrent.finish(state)
        sink, turns[i] = turns[i].sink, Turn((), None)
        result = gradient.collect(sink, losses, per_update, device)
        del sink
        pending, report = update(state, result)
        reports.append(report)
        # Over stages a rank may be in the next update but one: its parameters are complete before it goes on.
        last = plan.stages is not None or i + 1 == plan.delayed
        state = concurrent.finish(pending) if last else concurrent.start(pending)
        if i + 2 < plan.delayed:
            turns.append(gradient.turn(state.params, per_update, device, parity=i % 2, on_layer=concurrent.advance))

    gradient.backward(turns, MicroBatches(parts, firsts, fields, plan.delayed), seed, update=at_update)
    return state, reports


class ConcurrentUpdate:
    """The update that the host makes while the device computes the gradients of the next one."""

    def __init__(self) -> None:
        self.update: UpdateByUnits | None = None
        self.layers = self.passed = 0  # gradients of layers that came in this turn; those since the update began

    def start(self, update: TrainState | UpdateByUnits) -> TrainState:
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

    def finish(self, update: TrainState | UpdateByUnits) -> TrainState:
        """The state after `update`, or after the one that was begun."""
        update, self.update = self.update or update, None
        return update.finish() if isinstance(update, UpdateByUnits) else update


def previous_params(plan: Plan, state: TrainState) -> Any:
    """The parameters before the last update, at rest."""
    return plan.merge_trained(state.extra[PREVIOUS], state.params)


@torch.no_grad()
def swap_versions(plan: Plan, state: TrainState) -> TrainState:
    """The state with its parameters in the memory of the version before, which the micro-batches of an update that is
    made need no longer, and the version before in theirs, where those under way still read it."""
    current, spare = plan.trained(state.params), state.extra[PREVIOUS]
    pytree.map(lambda old, new: old.copy_(new), spare, current)
    return state._replace(params=plan.merge_trained(spare, state.params), extra={**state.extra, PREVIOUS: current})


def keep_previous(plan: Plan, old: TrainState, new: TrainState) -> TrainState:
    """`new`, a pure function of `old`, with the parameters of `old` as the version before."""
    return new._replace(extra={**new.extra, PREVIOUS: plan.trained(old.params)})
