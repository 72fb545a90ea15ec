"""Delayed updates: each gradient is taken at the parameters before the last update, so that no rank of a pipeline
waits.

    theta[j+1] = theta[j] - u(gradient of the loss of batch j at theta[j-1]),  theta[-1] = theta[0]

u is the optimizer's update; where one is skipped, theta[j+1] = theta[j]. A step makes `plan.delayed` updates: their
number changes only how often the pipeline empties. The first `plan.delay_after` steps are not delayed. With optimizer
states in host memory, an update is made while the device computes the gradient of the next one.

Ref: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", arXiv:2006.09503, section 3.1
(PipeDream-2BW); Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840, section 5.2 (one-step delayed parameter update).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fzero.core import gpu_copies, pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding import Plan
from fzero.train.gradient import GradientResult, layer_draws
from fzero.train.pipeline_executor import MicroBatches, Turn
from fzero.train.state import LOSS, PREVIOUS, Metrics, TrainState
from fzero.train.step import Inputs, Seed, StepParts, TrainStep
from fzero.train.update.offloaded import Update


def expect_delayed(step: StepParts) -> None:
    """Raise ValueError for a plan or a model whose updates cannot be delayed."""
    plan, model = step.plan, step.model
    if not plan.delayed:
        return  # see `expect_options`
    if plan.policy.loss_scale:
        raise ValueError(
            f'update="delayed": policy {plan.policy.name} scales the loss, and a scale changes while the gradients of '
            "the next update are under way; use bf16"
        )
    moving = [name for name, rule in model.traits.leaf_rules.items() if rule] if isinstance(model, base.Model) else []
    if moving:
        raise ValueError(
            f'update="delayed": a rule of the model moves {moving[0]} after each step, and micro-batches under way '
            'would see it move; use update="end"'
        )
    if step.micro_batches % plan.delayed:
        raise ValueError(
            f"micro_batches is {step.micro_batches} and the plan has {plan.delayed} delayed updates a step, which "
            "cannot share them evenly; change one of them"
        )
    if plan.stages is not None:
        plan.schedule(step.micro_batches)  # which says so if two versions of the parameters are too few


def make_step(step: StepParts) -> TrainStep:
    """The step of `plan.delayed` updates."""
    expect_delayed(step)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with step.checked(state, batch) as (inputs, seed):
            new, metrics = run_delayed(step, step.count(state, inputs), inputs, seed)
            step.first.judge(new, inputs, metrics)
            return step.states.handed_over(state, new), metrics

    return train_step


def run_delayed(step: StepParts, state: TrainState, inputs: Inputs, seed: Seed) -> tuple[TrainState, Metrics]:
    """The state after the updates of a step, and its metrics. inputs: of all updates."""
    (parts, size, draws, scale), gradient, plan = inputs, step.gradient, step.plan
    device, reports = scale.device, list[Metrics]()
    per_update, firsts = len(parts) // plan.delayed, gradient.firsts(len(parts), size)
    slices = [slice(i * per_update, (i + 1) * per_update) for i in range(plan.delayed)]
    concurrent = ConcurrentUpdate()
    delays = not plan.delay_after or bool(state.step > plan.delay_after)  # `step` counts this one
    fields = layer_draws(draws, plan.layers, gradient.execution)
    if (pure := transforms() or needs_grad(*pytree.leaves((state.params, parts)))) or not delays:
        for window in slices:
            params = previous_params(plan, state) if delays else state.params
            if pure:
                result = gradient.pure(params, parts[window], firsts[window], draws, scale)
            else:
                turns = [gradient.turn(params, per_update, device)]
                losses = gradient.backward(turns, MicroBatches(parts[window], firsts[window], fields), scale)
                result = gradient.collect(turns.pop().sink, losses, per_update, device)
            pending, report = begin_update(step, seed, state, result)
            state = concurrent.finish(pending)
            reports.append(report)
        return state, join_metrics(reports)
    turns = [
        gradient.turn(version, per_update, device, parity=i % 2, on_layer=concurrent.advance)
        for i, version in enumerate((previous_params(plan, state), state.params)[: plan.delayed])
    ]

    def at_update(losses: list[base.Loss]) -> None:
        nonlocal state
        i = len(reports)
        # The update before must be complete: its result is what this one starts from.
        state = concurrent.finish(state)
        # The list would hold the gradients and the parameters of a turn that is over.
        sink, turns[i] = turns[i].sink, Turn((), None)
        result = gradient.collect(sink, losses, per_update, device)
        del sink
        pending, report = begin_update(step, seed, state, result)
        reports.append(report)
        # Over stages a rank may be in the next update but one: its parameters are complete before it goes on.
        last = plan.stages is not None or i + 1 == plan.delayed
        state = concurrent.finish(pending) if last else concurrent.start(pending)
        if i + 2 < plan.delayed:
            turns.append(gradient.turn(state.params, per_update, device, parity=i % 2, on_layer=concurrent.advance))

    gradient.backward(turns, MicroBatches(parts, firsts, fields, plan.delayed), scale, update=at_update)
    return state, join_metrics(reports)


def begin_update(
    step: StepParts, seed: Seed, state: TrainState, result: GradientResult
) -> tuple[TrainState | UpdateByUnits, Metrics]:
    """The state after one delayed update, or that update begun, and its metrics."""
    metrics, verdict, sums = step.measured(seed, state, result)
    skipped = metrics.skipped if step.skips else None
    next_state = state._replace(extra={**state.extra, LOSS: verdict.stats})
    # A checkpoint may still copy the state that is written over here.
    gpu_copies.await_readers(state.step.device)
    with step.plan.mesh.ledger.phase("update"):
        if not step.donate:
            new = step.finish(sums, next_state, skipped)
            return new._replace(extra={**new.extra, PREVIOUS: step.plan.trained(state.params)}), metrics
        next_state = swap_versions(step.plan, next_state)
        if step.streamed is None:
            return step.finish(sums, next_state, skipped), metrics
        return UpdateByUnits(Update(step.streamed, sums, next_state, skipped)), metrics


class UpdateByUnits:
    """An update with nothing on a disk, made unit by unit in the memory of `state`, until `finish`."""

    def __init__(self, update: Update) -> None:
        self.update, self.state = update, update.state
        self.units = update.streamed.units(update.width())
        self.turns, self.turn_count = update.by_units(self.units), 0

    @functools.cached_property
    def skips(self) -> bool:
        """Whether the step is skipped; waits for the norm."""
        return "skipped" in self.update.small and bool(self.update.small["skipped"])

    @torch.no_grad()
    def read_ahead(self) -> None:
        """Start to read the first units, before the device is given more to do."""
        if not self.turn_count:
            self.update_next()

    def update_next(self) -> None:
        """Update the unit whose rows have come, but for the first call, which begins to read."""
        next(self.turns, None)
        self.turn_count += 1

    @torch.no_grad()
    def advance(self, share: float) -> None:
        """Make the units of the first `share` of the update that are not made yet."""
        # `skips` waits for the norm: the write of the first unit cannot be taken back.
        while not self.skips and self.turn_count <= min(1.0, share) * len(self.units):
            self.update_next()

    @torch.no_grad()
    def finish(self) -> Tree:
        """The state after the update; unchanged if the step is skipped."""
        self.advance(1.0)
        return self.state if self.skips else self.update.finish()


class ConcurrentUpdate:
    """The update that the host makes while the device computes the gradients of the next one."""

    def __init__(self) -> None:
        self.update: UpdateByUnits | None = None
        self.layers = self.passed = 0  # gradients of layers that came in this turn; those since the update began

    def start(self, update: TrainState | UpdateByUnits) -> TrainState:
        """The state that an update writes in place; its parameters may be used."""
        # As many layers come in the next turn as in this one.
        self.layers, self.passed = self.passed, 0
        if not isinstance(update, UpdateByUnits):
            return update
        self.update = update
        update.read_ahead()
        return update.state

    def advance(self) -> None:
        """A layer's gradients have come: update the units whose turn it is."""
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
    """The state with its parameters in the memory of the version before, and the other way round."""
    current, spare = plan.trained(state.params), state.extra[PREVIOUS]
    # Micro-batches under way read `current`, which stays as it is; the update writes `spare`.
    pytree.map(lambda old, new: old.copy_(new), spare, current)
    return state._replace(params=plan.merge_trained(spare, state.params), extra={**state.extra, PREVIOUS: current})


def join_metrics(all_metrics: list[Metrics]) -> Metrics:
    """The Metrics of a step of several updates: means over its tokens, and the largest norm."""
    if len(all_metrics) == 1:
        return all_metrics[0]
    tokens = torch.stack([metrics.num_tokens for metrics in all_metrics])

    def mean(values: list[Tensor]) -> Tensor:
        counts = tokens.to(values[0].dtype)
        return (torch.stack(values) * (counts / torch.where(counts.sum() == 0, 1, counts.sum()))).sum()

    spikes = [metrics.spike for metrics in all_metrics if isinstance(metrics.spike, Tensor)]
    return all_metrics[-1]._replace(
        loss=mean([metrics.loss for metrics in all_metrics]),
        num_tokens=tokens.sum(),
        grad_norm=torch.stack([metrics.grad_norm for metrics in all_metrics]).max(),
        skipped=torch.stack([metrics.skipped for metrics in all_metrics]).any(),
        extra={name: mean([metrics.extra[name] for metrics in all_metrics]) for name in all_metrics[-1].extra},
        spike=torch.stack(spikes).any() if spikes else (),
    )
