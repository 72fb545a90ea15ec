"""Delayed updates: each gradient is taken at the parameters before the last update, so that no rank of a pipeline waits
for the update before it goes on.

    theta[j+1] = theta[j] - u(gradient of the loss of batch j at theta[j-1]),  theta[-1] = theta[0]

u is the optimizer's update, with its state and clipping as ever; where an update is skipped, theta[j+1] = theta[j]. The
state has two versions of the trained parameters. A step makes `plan.delayed` updates; how many it makes changes no
number, only how often the pipeline empties.

Ref: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", arXiv:2006.09503, section 3.1
(PipeDream-2BW).
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

M = TypeVar("M")


def run_delayed(
    gradient: StepGradient,
    state: TrainState,
    parts: list[Any],
    size: int,
    drawn: Any,
    seed: Tensor,
    update: Callable[[TrainState, Any], tuple[TrainState, M]],
) -> tuple[TrainState, list[M]]:
    """The state after the updates of a step, and what `update` says of each.

    parts: the micro-batches of all updates, of `size` rows each. update: (state, what `gradient` found) -> (the state
    after the update, with the version before it in `extra`, and anything).
    """
    plan, device, made = gradient.plan, seed.device, list[M]()
    each, firsts = len(parts) // plan.delayed, gradient.firsts(len(parts), size)
    if transforms() or needs_grad(*pytree.leaves((state.params, parts))):
        for i in range(plan.delayed):
            own = slice(i * each, (i + 1) * each)
            state, said = update(state, gradient.pure(before(plan, state), parts[own], firsts[own], drawn, seed))
            made.append(said)
        return state, made
    turns = [gradient.turn(at, each, device) for at in (before(plan, state), state.params)[: plan.delayed]]

    def at_update(losses: list[base.Loss]) -> None:
        nonlocal state
        i = len(made)
        sink, turns[i] = turns[i].sink, Turn((), None)
        found = gradient.collect(sink, losses, each, device)
        del sink
        state, said = update(state, found)
        made.append(said)
        if i + 2 < plan.delayed:
            turns.append(gradient.turn(state.params, each, device))

    batches = Batches(parts, firsts, layer_draws(drawn, plan, gradient.how), plan.delayed)
    gradient.backward(turns, batches, seed, update=at_update)
    return state, made


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
