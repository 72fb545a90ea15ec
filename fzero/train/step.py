"""The training step: `state, metrics = train_step(state, batch)`. Read this file first.

A step is gradients of a sum, one division by the global number of tokens, and an optimizer's update of values. What is sharded, kept in
which dtype, recomputed or compiled is data that the step is made with; nothing in it branches on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.autodiff import transforms
from fzero.core.precision import Policy, ScalerState, overflow_at_floor, update_scaler
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation
from fzero.optim.norm import Squared, summed_by_kernel
from fzero.optim.sharded_leaves import bind, sharded_by
from fzero.optim.sharded_leaves import squares as layer_squares
from fzero.sharding import Plan
from fzero.train.batch import positions, split_batch
from fzero.train.checks import expect_options, expect_plan, expect_state
from fzero.train.execution import Execution
from fzero.train.gradient import make_gradient
from fzero.train.loss import LossFn, dropout_key
from fzero.train.spike import LOSS, Skip, judge
from fzero.train.state import TrainState
from fzero.train.state_on_disk import commit
from fzero.train.update.delayed import Delayed, expect_delayed, waiting
from fzero.train.update.in_backward import EarlyUpdate, expect_early
from fzero.train.update.in_memory import Gradients, update_donated, update_pure
from fzero.train.update.offloaded import StreamedUpdate, is_offloaded


class Metrics(NamedTuple):
    """What a step reports, as scalars."""

    loss: Tensor  # nats per token (float32 or wider)
    num_tokens: Tensor
    grad_norm: Tensor  # of the gradient of that loss, before clipping
    skipped: Tensor  # bool: the gradient was not finite, or the loss a spike; parameters and optimizer state are as they were
    loss_scale: Tensor
    extra: dict[str, Tensor]  # the loss function's own sums, per token
    spike: Tensor | tuple = ()  # bool: the loss was a spike; () where that is not judged
    squares: dict[str, Squared] | tuple = ()  # of this rank's sums of gradients, leaf by leaf: see Execution.norms
    factor: Tensor | tuple = ()  # beside the squares: by which those sums are gradients of the mean loss


def make_train_step(
    model: base.Model | LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    micro_batches: int = 1,
    execution: Execution = Execution(),  # noqa: B008
    donate: bool = True,
    ema_decay: float = 0.0,
    skip: Skip = Skip(),  # noqa: B008
    update: str = "end",
    nvme: Nvme | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The function `(state, batch) -> (state, Metrics)` of one training step.

    model: a Model, or a function loss(params, batch) of whole parameters (see make_loss).
    tx: the optimizer. The step binds it to the plan's shards.
    plan: where every leaf lives, on which mesh, in which dtypes. On a mesh the batch is this rank's rows of the global batch (see
        `local_batch`), the same on the ranks of tp.
    micro_batches: equal parts of this rank's batch (along the first dim of its leaves) whose gradients are summed one after the other.
    execution: what changes speed and memory alone (see Execution).
    donate: the buffers of the state are overwritten by the new state's; False leaves them valid, and only then does the step compose
        with torch.func (vmap over states, grad through steps).
    ema_decay: the average's memory; the state must have been made with `ema=True`.
    skip: which steps make no update (see Skip). The loss scale moves by what is not finite alone.
    update: "end"; for offloaded states also "backward": each layer is updated as soon as its gradient is reduced, and no gradient of layers
        is kept, without clipping by the norm; or "delayed": the update runs beside the next step's computation, whose parameters are one
        gradient behind: other numbers (see update_delayed).
    nvme: that of `init_state`, where the plan puts anything on a disk; each step then ends with a commit of its store.

    The first call makes sure that all ranks run the same program: RankError says where two differ.
    Raises ValueError where the batch does not divide, the state was made for another plan, the plan for another model, or the optimizer
    would take shards for whole leaves; FloatingPointError at the floor of the loss scale (see LossScale).
    """
    shards, mesh, policy = sharded_by(plan), plan.mesh, plan.policy
    tx = bind(tx, shards)
    expect_plan(model, tx, plan)
    streamed = StreamedUpdate(tx, plan, nvme) if is_offloaded(plan) else None
    expect_options(plan, execution.remat, donate, update, streamed is not None, isinstance(model, base.Model))
    skips = skip.nonfinite or skip.spike is not None
    if update == "delayed":
        expect_delayed(streamed, plan, policy.has_master)
    if update == "backward":
        expect_early(streamed, plan, nvme.slots if nvme is not None else 1, skips)
    rooms: dict[Any, Tensor] | None = {} if update != "delayed" else None  # a gradient that waits keeps its memory
    gradient = make_gradient(model, plan, execution, nvme, (rooms, streamed is not None))
    unchecked = [mesh] if mesh.store is not None else []  # a mesh for planning has nobody to compare with

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if donate and transforms():
            raise ValueError("a train step under a torch.func transform overwrites its input; make it with donate=False")
        expect_state(plan, state, ema_decay)
        key = dropout_key(model, state)
        size, parts = split_batch(batch, micro_batches)
        scale = state.scaler.scale if policy.loss_scale else torch.ones((), device=state.step.device)
        # A constant brings the sum to the size of a mean before it is scaled: float16 gradients need that room.
        seed_divisor = positions(parts[0]) if policy.loss_scale else 1
        # A pure step may itself be differentiated: through the gradient, the update, and several steps.
        with contextlib.ExitStack() as stack:
            if donate:
                stack.enter_context(torch.no_grad())
            if unchecked:
                stack.enter_context(unchecked.pop().checked())
            late = Delayed(streamed, state, ema_decay) if update == "delayed" else None
            early = EarlyUpdate(streamed, shards, state, ema_decay) if update == "backward" else None

            def mean(total: base.Loss) -> tuple[Tensor, Tensor]:
                """(tokens, the factor that makes gradients of the mean of sums): they are sums until the update multiplies them."""
                tokens = torch.where(total.num_tokens == 0, 1, total.num_tokens)  # a count may be a sum of weights, below 1
                return tokens, seed_divisor / (tokens.to(torch.promote_types(total.total.dtype, torch.float32)) * scale)

            grads, total = gradient(state, parts, size, key, scale / seed_divisor, early, lambda total: early.begin(mean(total)[1]))
            wide = torch.promote_types(total.total.dtype, torch.float32)
            tokens, factor = mean(total)
            with mesh.ledger.phase("metrics"):
                held = grads if early is None else early.squares(grads)
                by_leaf = layer_squares(shards, held) if execution.norms else ()
                norm = shards.norm(held if not execution.norms or summed_by_kernel(held) else by_leaf)
                del held
            grad_norm = norm * factor
            overflow = ~torch.isfinite(grad_norm) if skip.nonfinite else torch.zeros_like(grad_norm, dtype=torch.bool)
            loss = total.total.to(wide) / tokens
            bad, stats = ((), state.extra[LOSS]) if skip.spike is None else judge(skip.spike, state.extra[LOSS], loss)
            skipped = overflow if skip.spike is None else overflow | bad
            metrics = Metrics(
                loss,
                total.num_tokens,
                grad_norm,
                skipped,
                scale,
                {name: value / tokens for name, value in total.extra.items()},
                bad,
                by_leaf,
                factor if execution.norms else (),
            )
            moved = state._replace(
                step=state.step + 1,
                data_cursor=state.data_cursor + size * micro_batches * mesh.data_size,
                scaler=move_scaler(policy, state.scaler, overflow),
                extra={**state.extra, LOSS: stats},
            )

            def on(new: TrainState) -> TrainState:
                """The state `new`, made of the one before the step, with what every step moves on."""
                extra = {**new.extra, LOSS: stats}
                return new._replace(step=moved.step, data_cursor=moved.data_cursor, scaler=moved.scaler, extra=extra)

            sums, rest = Gradients(grads, factor, norm), (moved, skipped if skips else None, ema_decay)
            del grads
            with mesh.ledger.phase("update"):
                if late is not None:
                    new = waiting(on(late.join()), sums, skips and bool(skipped))
                    commit(nvme, new, mesh)
                elif early is not None:
                    new = on(early.finish(sums.sums, skips and bool(skipped)))
                    commit(nvme, new, mesh)
                elif streamed is not None:
                    new = streamed.run(sums, *rest)
                    commit(nvme, new, mesh)
                else:
                    new = (update_donated if donate else update_pure)(tx, plan, sums, *rest)
            return new, metrics

    return train_step


def move_scaler(policy: Policy, scaler: ScalerState | tuple, skipped: Tensor) -> ScalerState | tuple:
    """The scaler after a step; raises FloatingPointError for an overflow at the floor where the policy says so."""
    config = policy.loss_scale
    if config is None:
        return ()
    if config.at_floor == "raise":
        if transforms():
            raise ValueError('under a torch.func transform a step cannot raise; use LossScale(at_floor="hold")')
        if bool(overflow_at_floor(config, scaler, skipped)):
            raise FloatingPointError(f"the gradient is not finite and the loss scale is at its floor {config.floor:g}")
    return update_scaler(config, scaler, skipped)
