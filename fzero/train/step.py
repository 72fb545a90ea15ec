"""The training step: `state, metrics = train_step(state, batch)`. Read this file first.

A step is gradients of a sum, one division by the global number of tokens, and an optimizer's update of values. What is
sharded, kept in which dtype, recomputed or compiled is data that the step is made with; nothing in it branches on them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu_copies, pytree
from fzero.core.arguments import STEP, checked
from fzero.core.autodiff import transforms
from fzero.core.precision import Policy, ScalerState, overflow_at_floor, update_scaler
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation
from fzero.optim.norm import Squared, summed_by_kernel
from fzero.optim.sharded_leaves import ShardedLeaves, bind_to_plan, shards_of_sums
from fzero.optim.sharded_leaves import squares as layer_squares
from fzero.sharding import Mesh, Plan
from fzero.sharding.error_feedback import ERRORS, ErrorFeedback
from fzero.train.batch import expect_distinct_rows, positions, split_batch
from fzero.train.capture import CapturedStep, refusal_of
from fzero.train.checks import expect_arguments, expect_options, expect_plan
from fzero.train.execution import Execution
from fzero.train.expert_slack import with_expert_slack
from fzero.train.first_step import FirstStep, noting_sums, refusing_jointly
from fzero.train.gradient import GradientResult, StepGradient
from fzero.train.leaf_rules import move_leaves
from fzero.train.loss import LossFn, draws_of
from fzero.train.masters import StateCheck
from fzero.train.pipeline_executor import expect_equal_schedules
from fzero.train.rank_divergence import with_local_params
from fzero.train.spike import LOSS, Skip, Verdict, judge_step
from fzero.train.state import TrainState
from fzero.train.state_on_disk import commit
from fzero.train.update.delayed import keep_previous, run_delayed, swap_versions
from fzero.train.update.in_backward import EarlyUpdate, expect_early
from fzero.train.update.in_memory import Gradients, update_donated, update_pure
from fzero.train.update.offloaded import StreamedUpdate, UpdateByUnits
from fzero.train.update.speculation import Speculation, SpeculativeUpdate, expect_speculation


class Metrics(NamedTuple):
    """The results that a train step reports, as scalars.

    >>> def loss(params, batch):  # (sum, number of tokens)
    ...     return (batch["x"] @ params["w"]).square().sum(), batch["x"].shape[0]
    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> state = fzero.init_state(params, tx, plan, seed=0)
    >>> state, metrics = fzero.make_train_step(loss, tx, plan)(state, {"x": torch.eye(2)})
    >>> metrics.loss, metrics.num_tokens, metrics.skipped
    (tensor(1.), tensor(2), tensor(False))
    """

    loss: Tensor  # nats per token (float32 or wider)
    num_tokens: Tensor  # negative or not finite only if a loss function counted so: the loss is then NaN
    grad_norm: Tensor  # of the gradient of that loss, before clipping
    # bool: loss or gradient not finite, nothing that counts, or the loss a spike; parameters and optimizer state are as
    # they were
    skipped: Tensor
    loss_scale: Tensor
    extra: dict[str, Tensor]  # the loss function's own sums, per token
    spike: Tensor | tuple[()] = ()  # bool: the loss was a spike; () where that is not judged
    squares: dict[str, Squared] | tuple[()] = ()  # of this rank's sums of gradients, leaf by leaf: see Execution.norms
    factor: Tensor | tuple[()] = ()  # beside the squares: by which those sums are gradients of the mean loss
    tables: dict[str, Tensor] = {}  # noqa: RUF012  (the loss function's own sums by layer, see Loss; as they are)
    # With update="speculate": the layers that were updated in the backward pass, and how many of them were put right
    # afterwards, as the step was clipped or skipped: all or none.
    speculated: Tensor | tuple[()] = ()
    put_right: Tensor | tuple[()] = ()
    # int64: how often the gradient was computed again, as experts of a rank were sent more rows than there was room for
    # (see Experts); () where that cannot be.
    recomputed: Tensor | tuple[()] = ()


@checked("model tx plan micro_batches execution skip", **STEP)
def make_train_step(
    model: base.Model | LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    micro_batches: int = 1,
    execution: Execution = Execution(),  # noqa: B008
    donate: bool = True,
    skip: Skip = Skip(),  # noqa: B008
    update: str = "end",
    nvme: Nvme | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The function `(state, batch) -> (state, Metrics)` of one training step.

    model: a Model, or a function loss(params, batch) of whole parameters (see make_loss). tx: the optimizer.
    plan: where every leaf lives, on which mesh, in which dtypes. On a mesh the batch is this rank's rows of the global
        batch (see `local_batch`), the same on the ranks of tp.
    micro_batches: the equal parts of this rank's batch, along the first dim of its leaves, one after the other.
    execution: what changes speed and memory alone (see Execution). skip: which steps make no update (see Skip).
    donate: whether the new state takes the buffers of the old one, whose next use raises. With False alone the step
        composes with torch.func (vmap over states, grad through steps).
    update: when the state is updated: "end"; "speculate" (optimizer state offloaded): layer by layer in the backward
        pass, and put right exactly where the step is clipped or skipped (see Metrics); "backward" (offloaded, without
        clipping by the norm): the same, and no gradient of layers is kept; "delayed" (a plan `.with_updates(k)`): k
        updates a step, of a k-th of its micro-batches each, with gradients at the parameters before the last update
        (PipeDream-2BW: other numbers). `grad_norm` is then the largest one, and `skipped` says if any update was.
    nvme: that of `init_state`, made before or after, if the plan puts anything on a disk; a step commits its store.

    The first call checks that all ranks run the same program (RankError names the first difference), on rows of their
    own, that tokens are in a Model's vocabulary, and that parameters reach the loss. A step raises ValueError if the
    batch does not divide, or the state was donated or is of another plan; FloatingPointError at the floor of the scale.

    >>> model, tx = fzero.models.mlp(fzero.models.MLPConfig(4, 8, 1, 2)), fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, model, fzero.one_process())
    >>> step = fzero.make_train_step(model, tx, plan)
    """
    expect_arguments(model, tx, plan, micro_batches, execution, skip)
    mesh, tx = plan.mesh, bind_to_plan(tx, plan)
    expect_plan(model, tx, plan)
    streamed = StreamedUpdate(tx, plan, nvme) if plan.offloaded else None
    expect_options(plan, execution, donate, update, streamed is not None, isinstance(model, base.Model))
    skips = skip.nonfinite or skip.spike is not None
    start_early = early_start(update, streamed, plan, nvme, skips)
    finish = streamed.run if streamed is not None else partial(update_donated if donate else update_pure, tx, plan)
    gradient = StepGradient(model, with_expert_slack(plan, update), execution, nvme, ({}, streamed is not None))
    states = StateCheck(plan, pytree.names(tx.spec(plan.trained(plan.opt))), donate, nvme)
    unchecked, first = unchecked_of(plan, micro_batches, execution), FirstStep(model, plan, execution)
    measured = partial(measure, plan, shards_of_sums(plan), skip, execution.norms)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with refusing_jointly(mesh, bool(unchecked)):
            states.expect(state)
            size, parts = split_batch(batch, micro_batches)
            first.look(batch)
        first.check(state.params, parts[0])
        seed = seed_of(plan.policy, state, parts[0])
        # A pure step may itself be differentiated: through the gradient, the update, and several steps.
        with torch.no_grad() if donate else contextlib.nullcontext(), checking_ranks(unchecked, batch):
            early = start_early(state) if start_early is not None else None
            on_loss = None if early is None else lambda total: early.begin(seed.mean_factor(total))
            inputs, rows = (parts, size, draws_of(model, state)), size * micro_batches
            if plan.delayed:
                later = partial(update_delayed, plan, donate, skips, streamed or finish, partial(measured, seed))
                new, all_metrics = run_delayed(gradient, count_step(plan, state, rows), *inputs, seed.value, later)
                first.expect_loss(gradient, new, (*inputs, seed.value), join_metrics(all_metrics))
                return states.handed_over(state, new), join_metrics(all_metrics)
            result = gradient(with_local_params(tx, plan, state), *inputs, seed.value, early, on_loss)
            metrics, verdict, sums = measured(seed, state, result)
            first.expect_loss(gradient, state, (*inputs, seed.value), metrics)
            next_state = advance(plan, state, verdict, rows)
            gpu_copies.await_readers(state.step.device)  # a checkpoint may still copy what the update writes over
            with mesh.ledger.phase("update"):
                skipped = metrics.skipped if skips else None
                next_state = settle_errors(next_state, sums.errors, skipped, donate=donate)
                new = (finish if early is None else early.finish)(sums, next_state, skipped)
                new = move_leaves(model, plan, new, metrics.tables, skipped, donate=donate)
                commit(nvme, new, plan)
            return states.handed_over(state, new), count_layers(metrics, early)

    return train_step if execution.capture == "off" else CapturedStep(train_step, mesh, refusal_of(plan, tx, donate))


Measured = tuple[Metrics, Verdict, Gradients]


def measure(
    plan: Plan, shards: ShardedLeaves, skip: Skip, norms: bool, seed: Seed, state: TrainState, result: GradientResult
) -> Measured:
    """The metrics of an update, whether it is made, and its gradients, from what StepGradient found."""
    grads, total, squares, errors, recomputed = result
    factor = seed.mean_factor(total)
    norm, by_leaf = norms_of(shards, plan.mesh, grads, squares, factor if norms else None)
    loss = total.total.to(factor.dtype) / tokens_of(total)
    verdict = judge_step(skip, state.extra[LOSS], loss, norm * factor, total.num_tokens)
    metrics = metrics_of(total, loss, norm * factor, verdict, seed.scale)._replace(**by_leaf, recomputed=recomputed)
    return metrics, verdict, Gradients(grads, factor, norm, errors)


def update_delayed(
    plan: Plan,
    donate: bool,
    skips: bool,
    finish: StreamedUpdate | Callable[..., TrainState],
    measured: Callable[[TrainState, Any], Measured],
    state: TrainState,
    result: Any,
) -> tuple[TrainState | UpdateByUnits, Metrics]:
    """The state after one delayed update, or that update begun, with the parameters before it in `extra`, and its
    metrics."""
    metrics, verdict, sums = measured(state, result)
    next_state = state._replace(extra={**state.extra, LOSS: verdict.stats})
    gpu_copies.await_readers(state.step.device)
    with plan.mesh.ledger.phase("update"):
        begin = finish.begin if isinstance(finish, StreamedUpdate) else finish
        new = begin(sums, swap_versions(plan, next_state) if donate else next_state, metrics.skipped if skips else None)
    if donate:
        return new, metrics
    assert isinstance(new, TrainState)  # an offloaded state is donated
    return keep_previous(plan, state, new), metrics


def early_start(
    update: str, streamed: StreamedUpdate | None, plan: Plan, nvme: Nvme | None, skips: bool
) -> Callable[[TrainState], EarlyUpdate | SpeculativeUpdate] | None:
    """The function from a state to its update in the backward pass; None for an update at the end."""
    if nvme is None and plan.on_disk:
        raise ValueError("the plan puts a part of the state on a disk; give nvme=, the one given to init_state")
    slots = nvme.slots if nvme is not None else 1
    if streamed is not None and update == "backward":
        streamed.expect_layers(update)
        expect_early(streamed, plan, slots, skips)
        return partial(EarlyUpdate, streamed)
    if streamed is not None and update == "speculate":
        streamed.expect_layers(update)
        expect_speculation(plan, slots)
        return Speculation(streamed).start
    return None


Unchecked = list[tuple[Plan, int, bool]]  # (plan, micro-batches, whether a run's loader dealt the batch)


def unchecked_of(plan: Plan, micro_batches: int, execution: Execution) -> Unchecked:
    """What `checking_ranks` compares; [] in a plan, which has no ranks."""
    return [(plan, micro_batches, execution._dealt)] if plan.mesh.store is not None else []


@contextlib.contextmanager
def checking_ranks(unchecked: Unchecked, batch: Any) -> Iterator[None]:
    """A context of a step that, until one was made, compares with the other ranks: first whose rows it has and its
    schedule, then each collective.

    unchecked: is emptied by the first step made.
    """
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


def metrics_of(total: base.Loss, loss: Tensor, grad_norm: Tensor, verdict: Verdict, scale: Tensor) -> Metrics:
    """The Metrics of a step from its sums over the batch and what was judged of them."""
    extra = {name: value / tokens_of(total) for name, value in total.extra.items()}
    metrics = Metrics(loss, total.num_tokens, grad_norm, verdict.skipped, scale, extra, verdict.spike)
    return metrics._replace(tables=total.tables)


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


def count_layers(metrics: Metrics, early: EarlyUpdate | SpeculativeUpdate | None) -> Metrics:
    """The metrics with the layers that an update in the backward pass counts."""
    counts, device = {} if early is None else early.counts, metrics.loss.device
    return metrics._replace(**{k: torch.full((), n, dtype=torch.int64, device=device) for k, n in counts.items()})


class Seed(NamedTuple):
    """The scale of a sum of losses before its gradient is taken, and the factor that makes it that of the mean."""

    scale: Tensor  # the loss scale, 0-dim
    # A constant brings the sum to the size of a mean before it is scaled: float16 gradients need that room.
    divisor: int

    @property
    def value(self) -> Tensor:
        return self.scale / self.divisor

    def mean_factor(self, total: base.Loss) -> Tensor:
        """The factor that turns sums of gradients into the gradient of the mean loss; the update multiplies by it. NaN
        if the number of tokens is impossible."""
        count = tokens_of(total).to(torch.promote_types(total.total.dtype, torch.float32))
        return torch.where(total.num_tokens >= 0, self.divisor / (count * self.scale), math.nan)


def seed_of(policy: Policy, state: TrainState, micro_batch: Any) -> Seed:
    """The seed of a step whose first micro-batch is `micro_batch`."""
    if policy.loss_scale:
        assert isinstance(state.scaler, ScalerState)  # expect_state compares it with the policy
        return Seed(state.scaler.scale, positions(micro_batch))
    return Seed(torch.ones((), device=state.step.device), 1)


def tokens_of(total: base.Loss) -> Tensor:
    """The number to divide by; it may be a sum of weights below 1, so that only 0, and what is impossible, is
    replaced."""
    return torch.where(total.num_tokens > 0, total.num_tokens, 1)


def norms_of(
    shards: ShardedLeaves, mesh: Mesh, sums: Tree, saved_squares: dict[str, Any], factor: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """(the norm of all sums of gradients; with a `factor` the fields `squares`, leaf by leaf, and `factor` of Metrics).

    saved_squares: squares of leaves that were taken before their sums left the device.
    """
    sums = {**pytree.named_leaves(sums), **saved_squares} if saved_squares else sums
    with mesh.ledger.phase("metrics"):
        if factor is None:
            return shards.norm(sums), {}
        squares = layer_squares(shards, sums)
        norm = shards.norm(sums if summed_by_kernel(sums) else squares)
        return norm, {"squares": squares, "factor": factor}


def advance(plan: Plan, state: TrainState, verdict: Verdict, samples: int) -> TrainState:
    """The state with what every step moves, skipped or not: the counts, the loss scale, the statistics of the loss."""
    return count_step(plan, state, samples)._replace(
        scaler=move_scaler(plan.policy, state.scaler, verdict.overflow),
        extra={**state.extra, LOSS: verdict.stats},
    )


def settle_errors(
    state: TrainState, errors: ErrorFeedback | None, skipped: Tensor | None, *, donate: bool
) -> TrainState:
    """The state with the errors after a step of what it sent in codes."""
    if errors is None:
        return state
    return state._replace(extra={**state.extra, ERRORS: errors.settle(skipped, donate=donate)})


def count_step(plan: Plan, state: TrainState, samples: int) -> TrainState:
    """The state with a step counted, of so many samples of a data rank."""
    return state._replace(step=state.step + 1, data_cursor=state.data_cursor + samples * plan.mesh.data_size)


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
