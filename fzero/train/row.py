"""A rank's row of a schedule: the passes of its stages in their order, and the activations that go from stage to stage.

A run without pp has one stage, and its row is F0 B0 F1 B1 ..., through the same code. With pp each rank holds the
layers of its stages; the other leaves are gathered before the row to the ranks that use them, and the sums of their
gradients scattered back behind it (train/over_stages.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.act_times import ActTimes
from fzero.comm.collectives import all_gather
from fzero.comm.tables import device_of
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding.pipeline import Act, Schedule, Stages, feeds, needs, with_updates, write_schedule
from fzero.sharding.pipeline.gathers import gather_row
from fzero.sharding.pipeline.simulate import simulate
from fzero.sharding.pipeline.table import BACKWARD
from fzero.sharding.pipelines import Pipeline, schedule_for, users_of
from fzero.sharding.plan import Plan
from fzero.sharding.prefetch import Kept, Prefetcher, Resident
from fzero.train.between import Between, signature_of
from fzero.train.over_stages import gather_over_pp, share_losses
from fzero.train.parts import Part, stages_of
from fzero.train.streamed import Activations, Headed, Held, Passed, StreamedModel, Told


class Batches(NamedTuple):
    """The micro-batches of a rank's row."""

    parts: list[Any]
    firsts: list[int]  # the number of the first row of each in the step's global batch
    drawn: dict[str, Any]  # see layer_draws
    updates: int = 0  # those that are made within the row; 0: one behind it


class Turn(NamedTuple):
    """What the micro-batches of one update are computed with, and where their gradients go."""

    params: Tree  # as they are used, see `gather_over_pp`
    sink: Any  # a GradientReducer, or what takes its place
    kept: Kept | None = None  # of parameters that rest over rp too, what their nodes hold: see ParamFetcher


def schedule_of(plan: Plan, parts: int, updates: int | None = None) -> Schedule:
    """The schedule of a step of so many micro-batches; raises ValueError if they do not suit it.

    updates: those that are made within it; None: as the plan says.
    """
    assert plan.stages is not None and plan.pipeline is not None
    return made(plan.pipeline, plan.stages, parts, plan.delayed if updates is None else updates)[0]


@functools.lru_cache(maxsize=64)
def made(pipeline: Pipeline, stages: Stages, parts: int, updates: int) -> tuple[Schedule, int]:
    """A schedule, and its `room_of`."""
    found = schedule_for(pipeline, stages, parts)
    found = with_updates(found, updates) if updates else found
    return found, room_of(found)


def room_for(plan: Plan, parts: int, updates: int | None = None) -> int:
    """The messages on their way that a channel has room for in a step of so many micro-batches."""
    if plan.stages is None or plan.pipeline is None:
        return 0
    return made(plan.pipeline, plan.stages, parts, plan.delayed if updates is None else updates)[1]


def row_of(plan: Plan, parts: int, updates: int) -> list[Act]:
    """This rank's acts in a step of so many micro-batches, with so many updates in between."""
    if plan.stages is not None:
        return list(schedule_of(plan, parts, updates).rows[plan.mesh["pp"].rank])
    each, row = parts // max(1, updates), []
    for part in range(parts):
        row += [Act(kind, part, 0) for kind in "FB"]
        row += [Act("U", part // each, 0)] if updates and (part + 1) % each == 0 else []
    return row


def expect_one_schedule(plan: Plan, parts: int) -> None:
    """Raise ValueError, the same on all ranks, if the ranks of pp have unlike schedules.

    Communicates: an all_gather over pp of one int64.
    """
    if plan.stages is None:
        return
    text = write_schedule(schedule_of(plan, parts)) + repr(plan.stages.layers)
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    words = all_gather(torch.tensor([word], device=device_of(plan.mesh)), plan.mesh["pp"], leaf="schedule").tolist()
    for rank, other in enumerate(words):
        if other != words[0]:
            raise ValueError(
                f"ranks 0 and {rank} of pp have unlike schedules; give all ranks one schedule, layout and number of "
                "micro-batches"
            )


def forward_row(plan: Plan) -> list[Act]:
    """This rank's acts in the evaluation of one batch."""
    stages = (0,) if plan.stages is None else plan.stages.chunks(plan.mesh["pp"].rank)
    return [Act("F", 0, stage) for stage in stages]


def run_row(
    model: StreamedModel,
    turns: Sequence[Turn],
    batches: Batches,
    seed: Tensor,
    ready: Callable[[base.Loss], None] = lambda loss: None,
    update: Callable[[list[base.Loss]], None] = lambda losses: None,
) -> list[base.Loss]:
    """The losses of the micro-batches, on the rank of the last stage; gradients of total * seed go to the turns' sinks.

    turns: of the updates. ready: is called with each loss before its backward pass; update: at each update within the
    row, with the losses of its micro-batches: it appends the turn of the next update but one.
    Communicates: the activations between stages, there and their gradients back.
    """
    plan, each = model.plan, len(batches.parts) // max(1, batches.updates)
    stages, row = stages_of(model.parts, plan), row_of(plan, len(batches.parts), batches.updates)
    device = pytree.leaves(batches.parts[0])[0].device
    between = Between(plan, row, room_for(plan, len(batches.parts), batches.updates), model.known, device)
    between.open([signature_of(part) for part in batches.parts])
    held: dict[tuple[int, int], Held] = {}
    headed: dict[tuple[int, int], Headed] = {}
    owed: dict[tuple[int, int], list[Passed]] = {}  # between gradients by inputs and those by weights
    whole: dict[int, Resident] = {}  # by stage
    losses: list[base.Loss] = []
    stay = functools.partial(model.resident_stage, params=turns[0].params, device=device)
    acts = gather_row(row, model.resident) if model.resident else row
    for act, after in in_turn(acts, stages, whole, stay, between.acts):
        if plan.stages is not None:
            plan.mesh.ledger.at(str(act), None)  # a plan counts each act's memory and time
        if act.kind == "U":
            update(losses[act.part * each : (act.part + 1) * each])
            continue
        parts, at, phase, turn = (
            stages[act.stage],
            (act.part, act.stage),
            plan.mesh.ledger.phase,
            turns[act.part // each],
        )
        head = parts[-1] if parts[-1].kind == "head" else None
        if act.kind == "F":
            # A head whose backward pass follows at once runs in this phase, its leaves on their way before.
            now = head if after in [act._replace(kind=kind) for kind in BACKWARD] else None
            body, early = parts if head is None else parts[:-1], [] if now is None else now.groups
            batch = batches.parts[act.part]
            ctx = model.context(batch, batches.drawn, batches.firsts[act.part])
            with phase("forward"):
                x, ahead, told = enter(model, act, body, batch, ctx, turn, whole, between)
                one = held[at] = model.forward(body, x, batch, ctx, ahead, early, told)
                if now is not None:
                    headed[at] = model.head_forward(now, one)
                elif head is None:
                    between.give(*at, one.x, True)
            del ctx, batch, x, one, ahead
            continue
        final, sink = (act.part + 1) % each == 0, turn.sink
        if act.kind == "W":
            with phase("backward"):
                model.backward_weights(owed.pop(at), sink, final)
            continue
        one, later = held.pop(at), None if act.kind == "B" else owed.setdefault(at, [])
        if act.stage in whole or isinstance(one.ahead, Resident):  # which may be dropped since
            one = one._replace(ahead=whole.get(act.stage) or model.fetcher(turn.params, device, turn.kept))
        if head is not None:
            headed[at] = headed.get(at) or late_head(model, head, one)
            losses.append(headed[at].loss)
            ready(losses[-1])
        with phase("backward"):
            if head is not None:
                x_grads = model.head_backward(head, headed.pop(at), seed, sink, final)
            else:
                x_grads = between.take(*at, False).leaves
                one.ahead.expect(one.order(), "backward")
            x_grads = model.backward(one, x_grads, sink, final, later)
            if act.stage:
                between.give(*at, x_grads, False)
        del one, later, x_grads
    if plan.stages is not None:
        plan.mesh.ledger.at("row", None)
    between.close()
    return losses


def enter(
    model: StreamedModel,
    act: Act,
    body: Sequence[Part],
    batch: Any,
    ctx: base.Ctx,
    turn: Turn,
    whole: dict[int, Resident],
    between: Between,
) -> tuple[Activations, Prefetcher | Resident, Told]:
    """(what a stage's forward pass is given, its parameters, and who is told of its stacks)."""
    told = between.teller(act.part, act.stage, body)
    x = between.take(act.part, act.stage, True, preparer(model, body, batch, ctx, turn.params, told))
    ahead = whole.get(act.stage) or model.fetcher(turn.params, pytree.leaves(batch)[0].device, turn.kept)
    return x, ahead, told


def late_head(model: StreamedModel, head: Part, one: Held) -> Headed:
    """The forward pass of a head that did not follow at once on the one of its stage."""
    with model.plan.mesh.ledger.phase("forward"):
        one.ahead.expect(head.groups, "forward")
        return model.head_forward(head, one)


def in_turn(
    row: Sequence[Act],
    stages: dict[int, tuple[Part, ...]],
    whole: dict[int, Resident],
    stay: Callable[..., Resident],
    times: ActTimes | None,
) -> Iterator[tuple[Act, Act | None]]:
    """Each act of a row that computes, and what follows it there; between them stages come to `whole`, and are dropped.

    stay: fetches the parameters of a stage's parts, for a forward pass first or a backward one. times: of the acts.
    """
    for act, after in itertools.zip_longest(row, row[1:]):
        if act.kind == "G":
            assert after is not None  # an act of the stage
            whole[act.stage] = stay(stages[act.stage], forward=after.kind == "F")
        elif act.kind == "D":
            whole.pop(act.stage).drop()
        else:
            if times is not None:
                times.next()
            yield act, after
    if times is not None:
        times.next()


def evaluate_row(model: StreamedModel, params: Tree, batch: Any) -> base.Loss:
    """The loss of a batch without dropout, and without anything kept; the same on all ranks of pp.

    params: at rest.
    """
    plan, device = model.plan, pytree.leaves(batch)[0].device
    stages, row = stages_of(model.parts, plan), forward_row(plan)
    ctx = model.context(batch, {}, 0)
    between = Between(plan, row, 2, model.known, device)
    users = users_of(plan)
    params = gather_over_pp(params, plan, users, device)
    between.open([signature_of(batch)])
    losses = []
    ahead = model.fetcher(params, device, exact=True)
    for act in row:
        parts = stages[act.stage]
        told = between.teller(0, act.stage, parts)
        x = between.take(0, act.stage, True, preparer(model, parts, batch, ctx, params, told))
        x = model.primal(parts, x, batch, ctx, ahead, told)
        if parts[-1].kind == "head":
            losses.append(x)
        else:
            between.give(0, act.stage, x, True)
    if plan.stages is None:
        return losses[0]
    between.close()
    return share_losses(losses, 1, plan, model.known, device)[0]


def preparer(
    model: StreamedModel, parts: Sequence[Part], batch: Any, ctx: base.Ctx, params: Tree, told: Told
) -> Callable[[Activations], None]:
    """The function that makes a stage's programs, once it is known what it will be given looks like.

    The first rank of a pipeline makes its own as it comes to them; without this each rank would wait for the one before
    it, and then begin.
    """

    def prepare(x: Activations) -> None:
        if parts[0].depth:  # else something else runs before the stack
            told(parts[0], x)
            model.prepare(parts[0], x, batch, ctx, params)

    return prepare


def room_of(s: Schedule) -> int:
    """The least number of messages on their way in a channel, of at least 2, with which a schedule ends.

    A rank that has sent so many waits until the oldest is wanted, which a schedule may not survive.
    """
    wanted, place = needs(s), {act: i for row in s.rows for i, act in enumerate(row)}
    channels: dict[tuple[int, int, bool], list[tuple[Act, Act]]] = {}
    for source, target in feeds(s).items():
        ends = s.stages.ranks[source.stage], s.stages.ranks[target.stage]
        if ends[0] != ends[1]:
            channels.setdefault((*ends, source.kind == "F"), []).append((source, target))
    rows, room = [[(act,) for act in row] for row in s.rows], 2
    while True:
        more = dict(wanted)
        for messages in channels.values():
            ordered = sorted(messages, key=lambda pair: place[pair[0]])
            for (source, _), (_, target) in zip(ordered[room + 1 :], ordered):
                more[source] = (*more[source], target)
        if not simulate(rows, more, lambda group: 1.0, lambda source, target: 0.0).stuck:
            return room
        room *= 2
