"""A rank's row of a schedule: the passes of its stages in their order, and what goes from stage to stage.

A run without pp has one stage, and its row is F0 B0 F1 B1 ..., through the same code. With pp the leaves outside the
layers are gathered before the row, and their gradients' sums scattered back behind it (train/stage_exchange.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.comm.ledger import ActTimes
from fzero.comm.rank_tables import device_of
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding import pipeline as schedules
from fzero.sharding.pipeline import Act
from fzero.sharding.pipeline.check import gather_row
from fzero.sharding.pipeline.table import BACKWARD
from fzero.sharding.plan import Plan
from fzero.sharding.prefetch import NodeShards, Prefetcher, Resident
from fzero.train.stage_exchange import (
    Segment,
    SegmentActivations,
    StackHook,
    StageExchange,
    StageSharing,
    signature_of,
    stages_of,
)
from fzero.train.streamed_model import ForwardResult, HeadResult, SegmentPass, StreamedModel


class MicroBatches(NamedTuple):
    """The micro-batches of a rank's row."""

    parts: list[Any]
    firsts: list[int]  # the number of the first row of each in the step's global batch
    draws: dict[str, Any]  # see layer_draws
    updates: int = 0  # those that are made within the row; 0: one behind it


class Turn(NamedTuple):
    """What the micro-batches of one update are computed with, and where their gradients go."""

    params: Tree  # as they are used, see `StageSharing.gather`
    sink: Any  # a GradientReducer, or what takes its place
    # of parameters that rest over rp too, what their nodes hold: see ParamFetcher
    node_shards: NodeShards | None = None


# Schedules are checked and simulated once, not in every step.
def row_of(plan: Plan, parts: int, updates: int) -> tuple[Sequence[Act], int]:
    """This rank's acts in a step, and the messages that a channel has room for."""
    if plan.stages is not None:
        schedule, capacity = plan.schedule(parts, updates)
        return schedule.rows[plan.mesh.pp.rank], capacity
    per_update, row = parts // max(1, updates), list[Act]()
    for micro_batch in range(parts):
        row += [Act(kind, micro_batch, 0) for kind in "FB"]
        row += [Act("U", micro_batch // per_update, 0)] if updates and (micro_batch + 1) % per_update == 0 else []
    return row, 0


def expect_equal_schedules(plan: Plan, parts: int) -> None:
    """Raise ValueError, the same on all ranks, if the ranks of pp have unlike schedules."""
    if plan.stages is None:
        return
    text = schedules.write_schedule(plan.schedule(parts)[0]) + repr(plan.stages.layers)
    local_digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    digests = all_gather(
        torch.tensor([local_digest], device=device_of(plan.mesh)), plan.mesh.pp, leaf="schedule"
    ).tolist()
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"ranks 0 and {rank} of pp have unlike schedules; give all ranks one schedule, layout and number of "
                "micro-batches"
            )


def run_row(
    model: StreamedModel,
    turns: Sequence[Turn],
    batches: MicroBatches,
    seed: Tensor,
    ready: Callable[[base.Loss], None] = lambda loss: None,
    update: Callable[[list[base.Loss]], None] = lambda losses: None,
) -> list[base.Loss]:
    """The losses of the micro-batches, on the rank of the last stage; gradients go to the turns' sinks."""
    plan, per_update = model.plan, len(batches.parts) // max(1, batches.updates)
    stages, (row, capacity) = stages_of(model.parts, plan), row_of(plan, len(batches.parts), batches.updates)
    device = pytree.leaves(batches.parts[0])[0].device
    exchange = StageExchange(plan, row, capacity, model.shape_cache, device)
    # Receives are started before any work, so that a message finds its buffer.
    exchange.open([signature_of(micro_batch) for micro_batch in batches.parts])
    results: dict[tuple[int, int], ForwardResult] = {}
    headed: dict[tuple[int, int], HeadResult] = {}
    weight_passes: dict[tuple[int, int], list[SegmentPass]] = {}  # between gradients by inputs and those by weights
    resident: dict[int, Resident] = {}  # by stage
    losses: list[base.Loss] = []
    stay = functools.partial(model.resident_stage, params=turns[0].params, device=device)
    resident_stages = model.execution.resident
    acts = gather_row(row, resident_stages) if resident_stages else row
    for act, next_act in in_turn(acts, stages, resident, stay, exchange.acts):
        if plan.stages is not None:
            plan.mesh.ledger.reach(str(act), None)  # a plan counts each act's memory and time
        if act.kind == "U":
            update(losses[act.micro_batch * per_update : (act.micro_batch + 1) * per_update])
            continue
        parts, key = stages[act.stage], (act.micro_batch, act.stage)
        phase, turn = plan.mesh.ledger.phase, turns[act.micro_batch // per_update]
        head = parts[-1] if parts[-1].kind == "head" else None
        if act.kind == "F":
            # A head whose backward pass follows at once runs in this phase, its leaves on their way before.
            fused_head = head if next_act in [act._replace(kind=kind) for kind in BACKWARD] else None
            # A head runs in its backward pass's turn otherwise: its residuals are large, and only one micro-batch under
            # way has them.
            body, early = parts if head is None else parts[:-1], [] if fused_head is None else fused_head.groups
            batch = batches.parts[act.micro_batch]
            ctx = model.context(batch, batches.draws, batches.firsts[act.micro_batch])
            with phase("forward"):
                x, ahead, on_stack = enter(model, act, body, batch, ctx, turn, resident, exchange)
                result = results[key] = model.forward(body, x, batch, ctx, ahead, early, on_stack)
                if fused_head is not None:
                    headed[key] = model.head_forward(fused_head, result)
                elif head is None:
                    # At once, before the next act: the next stage waits for it.
                    exchange.send(*key, result.x, True)
            # A name that stays would hold activations until the next forward pass.
            del ctx, batch, x, result, ahead
            continue
        # Backward passes of a stage come in the order of micro-batches, so that the last one ends the sums.
        final, sink = (act.micro_batch + 1) % per_update == 0, turn.sink
        if act.kind == "W":
            with phase("backward"):
                model.backward_weights(weight_passes.pop(key), sink, final)
            continue
        result, later = results.pop(key), None if act.kind == "B" else weight_passes.setdefault(key, [])
        if act.stage in resident or isinstance(result.ahead, Resident):  # which may be dropped since
            result = result._replace(
                ahead=resident.get(act.stage) or model.fetcher(turn.params, device, turn.node_shards)
            )
        if head is not None:
            headed[key] = headed.get(key) or run_head(model, head, result)
            losses.append(headed[key].loss)
            ready(losses[-1])
        with phase("backward"):
            if head is not None:
                x_grads = model.head_backward(head, headed.pop(key), seed, sink, final)
            else:
                x_grads = exchange.receive(*key, False).leaves
                result.ahead.expect(result.order(), "backward")
            x_grads = model.backward(result, x_grads, sink, final, later)
            if act.stage:
                exchange.send(*key, x_grads, False)
        del result, later, x_grads
    if plan.stages is not None:
        plan.mesh.ledger.reach("row", None)
    exchange.close()
    return losses


def enter(
    model: StreamedModel,
    act: Act,
    body: Sequence[Segment],
    batch: Any,
    ctx: base.Ctx,
    turn: Turn,
    resident: dict[int, Resident],
    exchange: StageExchange,
) -> tuple[SegmentActivations, Prefetcher | Resident, StackHook]:
    """(what a stage's forward pass is given, its parameters, and who is told of its stacks)."""
    on_stack = exchange.shape_sender(act.micro_batch, act.stage, body)
    x = exchange.receive(act.micro_batch, act.stage, True, preparer(model, body, batch, ctx, turn.params, on_stack))
    ahead = resident.get(act.stage) or model.fetcher(turn.params, pytree.leaves(batch)[0].device, turn.node_shards)
    return x, ahead, on_stack


def run_head(model: StreamedModel, head: Segment, result: ForwardResult) -> HeadResult:
    """The forward pass of a head that did not follow at once on the one of its stage."""
    with model.plan.mesh.ledger.phase("forward"):
        result.ahead.expect(head.groups, "forward")
        return model.head_forward(head, result)


def in_turn(
    row: Sequence[Act],
    stages: dict[int, tuple[Segment, ...]],
    resident: dict[int, Resident],
    stay: Callable[..., Resident],
    times: ActTimes | None,
) -> Iterator[tuple[Act, Act | None]]:
    """Each act of a row that computes; stages come to `resident` before it and are dropped after it."""
    for act, next_act in itertools.zip_longest(row, row[1:]):
        if act.kind == "G":
            assert next_act is not None  # an act of the stage
            resident[act.stage] = stay(stages[act.stage], forward=next_act.kind == "F")
        elif act.kind == "D":
            resident.pop(act.stage).drop()
        else:
            if times is not None:
                times.next()
            yield act, next_act
    if times is not None:
        times.next()


def evaluate_row(model: StreamedModel, params: Tree, batch: Any) -> base.Loss:
    """The loss of a batch without dropout, and without anything kept; the same on all ranks of pp."""
    plan, device = model.plan, pytree.leaves(batch)[0].device
    stages = stages_of(model.parts, plan)
    row = [Act("F", 0, stage) for stage in stages]
    ctx = model.context(batch, {}, 0)
    exchange = StageExchange(plan, row, 2, model.shape_cache, device)
    sharing = StageSharing(plan, device)
    params = sharing.gather(params)
    exchange.open([signature_of(batch)])
    losses = []
    ahead = model.fetcher(params, device, exact=True)
    for act in row:
        parts = stages[act.stage]
        on_stack = exchange.shape_sender(0, act.stage, parts)
        x = exchange.receive(0, act.stage, True, preparer(model, parts, batch, ctx, params, on_stack))
        x = model.primal(parts, x, batch, ctx, ahead, on_stack)
        if parts[-1].kind == "head":
            losses.append(x)
        else:
            exchange.send(0, act.stage, x, True)
    if plan.stages is None:
        return losses[0]
    exchange.close()
    return sharing.losses(losses, 1, model.shape_cache)[0]


def preparer(
    model: StreamedModel, parts: Sequence[Segment], batch: Any, ctx: base.Ctx, params: Tree, on_stack: StackHook
) -> Callable[[SegmentActivations], None]:
    """The function that makes a stage's programs once shapes are known, so that ranks do it together."""

    def prepare(x: SegmentActivations) -> None:
        if parts[0].depth:  # else something else runs before the stack
            on_stack(parts[0], x)
            model.prepare(parts[0], x, batch, ctx, params)

    return prepare
