"""The training step: `state, metrics = train_step(state, batch)`. Read this file first.

A step is gradients of a sum, one division by the global number of tokens, and an optimizer's update of values. What is
sharded, kept in which dtype, recomputed or compiled is data that the step is made with; nothing in it branches on them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.core import gpu_copies, pytree
from fzero.core.arguments import STEP, checked
from fzero.core.autodiff import transforms
from fzero.core.config_tables import AtLeastOne
from fzero.core.precision import Policy, ScalerState, overflow_at_floor, update_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation
from fzero.optim.base import expect_optimizer
from fzero.optim.norm import summed_by_kernel
from fzero.optim.sharded_leaves import ShardedLeaves, bind_to_plan, shards_of_sums
from fzero.optim.sharded_leaves import squares as layer_squares
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.error_feedback import ERRORS, ErrorFeedback
from fzero.sharding.pipeline_plan import expect_parts
from fzero.sharding.slices import is_stacked, narrow_to
from fzero.train import update as updates
from fzero.train.batch import expect_distinct_rows, positions, split_batch
from fzero.train.capture import CapturedStep, refusal_of
from fzero.train.checks import (
    FirstStep,
    StateCheck,
    expect_options,
    expect_plan,
    expect_program,
    noting_sums,
    refusing_jointly,
)
from fzero.train.execution import Execution, Skip
from fzero.train.gradient import EarlySums, GradientResult, StepGradient
from fzero.train.loss import LossFn, draws_of
from fzero.train.pipeline_executor import expect_equal_schedules
from fzero.train.state import LOSS, LossStats, Metrics, TrainState
from fzero.train.state_on_disk import commit
from fzero.train.update.in_memory import Gradients, InMemoryUpdate


def move_leaves(
    model: Any, plan: Plan, state: TrainState, tables: Mapping[str, Tensor], skipped: Tensor | None, *, donate: bool
) -> TrainState:
    """The state with the leaves that a rule moves once a step, such as biases of experts; as it is if skipped."""
    leaf_rules = model.traits.leaf_rules if isinstance(model, base.Model) else {}
    rules = {name: rule for name, rule in leaf_rules.items() if rule}
    if not rules:
        return state
    leaves = pytree.named_leaves(state.params)
    for name, rule in rules.items():
        spec, stack = plan.leaves[name].params, name.split("/")[0]
        local_tables = {
            table_name: local_layers(table_name, x, spec, plan.mesh)
            for table_name, x in tables.items()
            if table_name.split("/")[0] == stack
        }
        leaf = leaves[name]
        value = rule(leaf, local_tables).to(leaf.dtype)
        value = value if skipped is None else torch.where(skipped, leaf, value)
        leaves[name] = leaf.copy_(value) if donate else value
    return state if donate else state._replace(params=pytree.from_named(leaves, state.params))


def local_layers(name: str, table: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The rows of a table that belong to this rank's layers of a leaf."""
    assert is_stacked(name), f"{name}: a table has the name of a stack of layers"
    layers = replace(spec, dims=(spec.dims[0], *((),) * (table.dim() - 1)))
    return narrow_to(table, layers, mesh)


# The updates that are not made at the end of a step: each is a file of fzero/train/update that nothing else needs, with
# `make_step(StepParts) -> train_step`.
UPDATE_MODULES = {"speculate": "speculation", "backward": "in_backward", "delayed": "delayed"}

TrainStep = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


@checked(
    **STEP,
    model=expect_program,
    tx=expect_optimizer,
    plan="plan is {}; write make_train_step(model, tx, zero_plan(stage, model, mesh))",
    micro_batches="micro_batches is {}; it must be a whole number of at least 1",
    execution='execution is {}; write fzero.Execution(remat="full", compiled=True)',
    skip="skip is {}; write fzero.Skip(nonfinite=True), fzero.Skip(spike=fzero.Spike())",
)
def make_train_step(
    model: base.Model | LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    micro_batches: AtLeastOne = 1,
    execution: Execution = Execution(),  # noqa: B008
    donate: bool = True,
    skip: Skip = Skip(),  # noqa: B008
    nvme: Nvme | None = None,
) -> TrainStep:
    """The function `(state, batch) -> (state, Metrics)` of one training step.

    model: a Model, or a function loss(params, batch) of whole parameters (see make_loss). tx: the optimizer.
    plan: where every leaf lives, on which mesh, in which dtypes. On a mesh the batch is this rank's rows of the global
        batch (see `local_batch`), the same on the ranks of tp.
    micro_batches: the equal parts of this rank's batch, along the first dim of its leaves, one after the other.
    execution: what changes speed and memory alone, and when the state is updated (see Execution).
    skip: which steps make no update (see Skip).
    donate: whether the new state takes the buffers of the old one, whose next use raises. With False alone the step
        composes with torch.func (vmap over states, grad through steps).
    nvme: that of `init_state`, made before or after, if the plan puts anything on a disk; a step commits its store.

    The first call checks that all ranks run the same program (RankError names the first difference), on rows of their
    own, that tokens are in a Model's vocabulary, and that parameters reach the loss. A step raises ValueError if the
    batch does not divide, or the state was donated or is of another plan; FloatingPointError at the floor of the scale.

    >>> model, tx = fzero.models.mlp(fzero.models.MLPConfig(4, 8, 1, 2)), fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, model, fzero.one_process())
    >>> step = fzero.make_train_step(model, tx, plan)
    """
    if plan.stages is not None and plan.pipeline is not None:
        expect_parts(plan.pipeline, plan.stages, micro_batches)
    tx, module = bind_to_plan(tx, plan), UPDATE_MODULES.get(execution.update)
    expect_plan(model, tx, plan)
    streamed = updates.StreamedUpdate(tx, plan, nvme) if plan.offloaded else None
    expect_options(plan, execution, donate, isinstance(model, base.Model))
    if nvme is None and plan.on_disk:
        raise ValueError("the plan puts a part of the state on a disk; give nvme=, the one given to init_state")
    gradient = StepGradient(model, plan.for_update(execution.update), execution, nvme)
    update = InMemoryUpdate(tx, plan)
    parts = StepParts(
        model,
        update,
        plan,
        micro_batches,
        donate,
        skip.nonfinite or skip.spike is not None,
        nvme,
        streamed.run if streamed is not None else update.donated if donate else update.pure,
        streamed,
        gradient,
        partial(measure, plan.mesh, shards_of_sums(plan), skip, execution.norms),
        StateCheck(plan, pytree.names(tx.spec(plan.trained(plan.opt))), donate, nvme),
        FirstStep(model, gradient),
        # In a plan there are no ranks to be compared.
        [(plan, micro_batches, execution._dealt)] if plan.mesh.store is not None else [],
    )
    make = update_at_end if module is None else importlib.import_module(f"fzero.train.update.{module}").make_step
    step = make(parts)
    return step if execution.capture == "off" else CapturedStep(step, plan.mesh, refusal_of(plan, tx, donate))


class StepParts(NamedTuple):
    """What a step is put together from."""

    model: base.Model | LossFn
    update: InMemoryUpdate
    plan: Plan
    micro_batches: int
    donate: bool
    skips: bool  # whether a step may be skipped
    nvme: Nvme | None
    finish: Callable[[Gradients, TrainState, Tensor | None], TrainState]  # the update, see `InMemoryUpdate`
    streamed: updates.StreamedUpdate | None  # that of an offloaded state
    gradient: StepGradient
    measured: Callable[[Seed, TrainState, GradientResult], Measured]
    states: StateCheck
    first: FirstStep
    unchecked: Unchecked

    @contextlib.contextmanager
    def checked(self, state: TrainState, batch: Any) -> Iterator[tuple[Inputs, Seed]]:
        """The context of a step, with what its gradient is of; raises ValueError."""
        with refusing_jointly(self.plan.mesh, bool(self.unchecked)):
            self.states.expect(state)
            size, micro_batches = split_batch(batch, self.micro_batches)
            self.first.look(batch)
        self.first.check(state.params, micro_batches[0])
        seed = seed_of(self.plan.policy, state, micro_batches[0])
        # A pure step may itself be differentiated: through the gradient, the update, and several steps.
        with torch.no_grad() if self.donate else contextlib.nullcontext(), checking_ranks(self.unchecked, batch):
            yield (micro_batches, size, draws_of(self.model, state), seed.value), seed

    def count(self, state: TrainState, inputs: Inputs) -> TrainState:
        """The state with a step of these inputs counted."""
        samples = inputs[1] * self.micro_batches * self.plan.mesh.data_size
        return state._replace(step=state.step + 1, data_cursor=state.data_cursor + samples)


Inputs = tuple[list[Any], int, dict[str, Any], Tensor]  # micro-batches, the rows of each, the draws, the seed's value


class Early(EarlySums, Protocol):
    """An update in the backward pass: `begin`, then `receive` for every layer's leaf, then `finish`."""

    @property
    def counts(self) -> dict[str, int]: ...  # fields of Metrics

    def begin(self, factor: Tensor) -> None: ...

    def finish(self, grads: Gradients, state: TrainState, skipped: Tensor | None) -> TrainState: ...


def update_at_end(step: StepParts, start_early: Callable[[TrainState], Early] | None = None) -> TrainStep:
    """The step with one update, of the whole gradient."""
    plan, gradient = step.plan, step.gradient

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with step.checked(state, batch) as (inputs, seed):
            early = start_early(state) if start_early is not None else None
            on_loss = None if early is None else lambda total: early.begin(seed.mean_factor(total))
            result = gradient(step.update.with_local_params(state), *inputs, early, on_loss)
            metrics, verdict, sums = step.measured(seed, state, result)
            step.first.judge(state, inputs, metrics)
            scaler = move_scaler(plan.policy, state.scaler, verdict.overflow)
            next_state = step.count(state, inputs)._replace(scaler=scaler, extra={**state.extra, LOSS: verdict.stats})
            gpu_copies.await_readers(state.step.device)  # a checkpoint may still copy what the update writes over
            with plan.mesh.ledger.phase("update"):
                skipped = metrics.skipped if step.skips else None
                next_state = settle_errors(next_state, sums.errors, skipped, donate=step.donate)
                new = (step.finish if early is None else early.finish)(sums, next_state, skipped)
                new = move_leaves(step.model, plan, new, metrics.tables, skipped, donate=step.donate)
                commit(step.nvme, new, plan)
            counts = {} if early is None else early.counts
            device = metrics.loss.device
            counts = {k: torch.full((), n, dtype=torch.int64, device=device) for k, n in counts.items()}
            return step.states.handed_over(state, new), metrics._replace(**counts)

    return train_step


class Verdict(NamedTuple):
    """Whether a step makes its update, and why not."""

    skipped: Tensor  # bool scalar
    overflow: Tensor  # bool scalar: the gradient is not finite, and such steps are skipped
    spike: Tensor | tuple  # bool scalar: the loss is a spike; () if that is not judged
    stats: LossStats  # after the step


def judge_step(skip: Skip, stats: LossStats, loss: Tensor, grad_norm: Tensor, num_tokens: Tensor) -> Verdict:
    """The verdict on a step with this mean loss, gradient norm and number of tokens; pure, without branches."""
    none = num_tokens == 0
    skipped = none | ~torch.isfinite(grad_norm) | ~torch.isfinite(loss)
    overflow = (num_tokens >= 0) & ~torch.isfinite(grad_norm)  # an impossible number makes a sound gradient NaN
    if not skip.nonfinite:
        overflow = skipped = torch.zeros_like(overflow)
    if skip.spike is None:
        return Verdict(skipped, overflow, (), stats)
    spike, next_stats = skip.spike.judge(stats, loss)
    spike, stats = spike & ~none, LossStats(*(torch.where(none, old, new) for old, new in zip(stats, next_stats)))
    return Verdict(skipped | spike, overflow, spike, stats)


Measured = tuple[Metrics, Verdict, Gradients]


def measure(
    mesh: Mesh, shards: ShardedLeaves, skip: Skip, norms: bool, seed: Seed, state: TrainState, result: GradientResult
) -> Measured:
    """The metrics of an update, whether it is made, and its gradients, from what StepGradient found."""
    grads, total, squares, errors, recomputed = result
    factor = seed.mean_factor(total)
    norm, by_leaf = norms_of(shards, mesh, grads, squares, factor if norms else None)
    loss = total.total.to(factor.dtype) / tokens_of(total)
    verdict = judge_step(skip, state.extra[LOSS], loss, norm * factor, total.num_tokens)
    extra = {name: value / tokens_of(total) for name, value in total.extra.items()}
    metrics = Metrics(loss, total.num_tokens, norm * factor, verdict.skipped, seed.scale, extra, verdict.spike)
    metrics = metrics._replace(tables=total.tables, **by_leaf, recomputed=recomputed)
    return metrics, verdict, Gradients(grads, factor, norm, errors)


Unchecked = list[tuple[Plan, int, bool]]  # (plan, micro-batches, whether a run's loader dealt the batch)


@contextlib.contextmanager
def checking_ranks(unchecked: Unchecked, batch: Any) -> Iterator[None]:
    """A context in which the first step made compares rows, schedule and collectives with other ranks."""
    if not unchecked:
        yield
        return
    plan, micro_batches, dealt = unchecked[0]
    with plan.mesh.checked(), noting_sums(plan.mesh):
        if not transforms():
            with plan.mesh.ledger.phase("check"):
                expect_distinct_rows(batch, plan.mesh, micro_batches, dealt)
                expect_equal_schedules(plan, micro_batches)
        yield
    unchecked.clear()  # a refused step is no first one


class Seed(NamedTuple):
    """The scale of a sum of losses, and the factor to the mean's gradient."""

    scale: Tensor  # the loss scale, 0-dim
    # A constant brings the sum to the size of a mean before it is scaled: float16 gradients need that room.
    divisor: int

    @property
    def value(self) -> Tensor:
        return self.scale / self.divisor

    def mean_factor(self, total: base.Loss) -> Tensor:
        """The factor from sums of gradients to the gradient of the mean loss; NaN for an impossible count."""
        count = tokens_of(total).to(torch.promote_types(total.total.dtype, torch.float32))
        return torch.where(total.num_tokens >= 0, self.divisor / (count * self.scale), math.nan)


def seed_of(policy: Policy, state: TrainState, micro_batch: Any) -> Seed:
    """The seed of a step whose first micro-batch is `micro_batch`."""
    if policy.loss_scale:
        assert isinstance(state.scaler, ScalerState)  # expect_state compares it with the policy
        return Seed(state.scaler.scale, positions(micro_batch))
    return Seed(torch.ones((), device=state.step.device), 1)


def tokens_of(total: base.Loss) -> Tensor:
    """The number to divide by, which may be below 1; only 0 and what is impossible is replaced."""
    return torch.where(total.num_tokens > 0, total.num_tokens, 1)


def norms_of(
    shards: ShardedLeaves, mesh: Mesh, sums: Tree, saved_squares: dict[str, Any], factor: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """(the norm of all sums of gradients; with `factor` the fields `squares` and `factor` of Metrics)."""
    sums = {**pytree.named_leaves(sums), **saved_squares} if saved_squares else sums
    with mesh.ledger.phase("metrics"):
        if factor is None:
            return shards.norm(sums), {}
        squares = layer_squares(shards, sums)
        norm = shards.norm(sums if summed_by_kernel(sums) else squares)
        return norm, {"squares": squares, "factor": factor}


def settle_errors(
    state: TrainState, errors: ErrorFeedback | None, skipped: Tensor | None, *, donate: bool
) -> TrainState:
    """The state with the errors after a step of what it sent in codes."""
    if errors is None:
        return state
    return state._replace(extra={**state.extra, ERRORS: errors.settle(skipped, donate=donate)})


def move_scaler(policy: Policy, scaler: ScalerState | tuple[()], skipped: Tensor) -> ScalerState | tuple[()]:
    """The scaler after a step; raises FloatingPointError for an overflow at the floor where the policy says so."""
    config = policy.loss_scale
    if config is None:
        return ()
    assert isinstance(scaler, ScalerState)
    if config.at_floor == "raise":
        if transforms():
            raise ValueError('under a torch.func transform a step cannot raise; use LossScale(at_floor="hold")')
        if bool(overflow_at_floor(config, scaler, skipped)):
            raise FloatingPointError(f"the gradient is not finite and the loss scale is at its floor {config.floor:g}")
    return update_scaler(config, scaler, skipped)
