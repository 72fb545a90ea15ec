"""A rank's row of a schedule: the passes of its stages in their order, and the activations that go from stage to stage.

A run without pp has one stage, and its row is F0 B0 F1 B1 ..., through the same code. With pp each rank holds the
layers of its stages; the other leaves are gathered before the row to the ranks that use them, and the sums of their
gradients scattered back behind it (train/over_stages.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.channel import Receiver, Sender, open_channels
from fzero.comm.collectives import all_gather
from fzero.comm.tables import device_of
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding.pipeline import Act, Schedule, Stages, feeds, needs, write_schedule
from fzero.sharding.pipeline.simulate import simulate
from fzero.sharding.pipeline.table import BACKWARD
from fzero.sharding.pipelines import Pipeline, schedule_for
from fzero.sharding.plan import Plan
from fzero.sharding.reduce import GradientReducer
from fzero.train.over_stages import gather_over_pp, share_losses, users_of
from fzero.train.streamed import Activations, Headed, Held, Passed, StreamedModel, stages_of

Signature = tuple[Any, ...]
Channel = tuple[int, bool]  # the rank of pp at its other end, and whether activations or gradients travel


class Batches(NamedTuple):
    """The micro-batches of a rank's row."""

    parts: list[Any]
    firsts: list[int]  # the number of the first row of each in the step's global batch
    key: dict[str, Any]  # of dropout, see layer_keys


def channel_name(source: int, target: int, forward: bool) -> str:
    """The label of a channel from one rank of pp to another."""
    return f"{'x' if forward else 'grad'}:{source}-{target}"


def channels_of(ranks: Sequence[int]) -> list[tuple[str, int, int]]:
    """(label, rank that sends, rank that receives) of the channels between stages on these ranks, in an order that is
    the same for all of them."""
    ends = [(a, b, True) for a, b in itertools.pairwise(ranks)]
    ends += [(b, a, False) for a, b, _ in ends]
    return sorted({(channel_name(*end), end[0], end[1]) for end in ends if end[0] != end[1]})


def schedule_of(plan: Plan, parts: int) -> Schedule:
    """The schedule of a step of so many micro-batches; raises ValueError if they do not suit it."""
    assert plan.stages is not None and plan.pipeline is not None
    return made(plan.pipeline, plan.stages, parts)[0]


@functools.lru_cache(maxsize=64)
def made(pipeline: Pipeline, stages: Stages, parts: int) -> tuple[Schedule, int]:
    """A schedule, and its `room_of`."""
    found = schedule_for(pipeline, stages, parts)
    return found, room_of(found)


def room_for(plan: Plan, parts: int) -> int:
    """The messages on their way that a channel has room for in a step of so many micro-batches."""
    return 0 if plan.stages is None or plan.pipeline is None else made(plan.pipeline, plan.stages, parts)[1]


def row_of(plan: Plan, parts: int) -> list[Act]:
    """This rank's acts in a step of so many micro-batches."""
    if plan.stages is None:
        return [Act(kind, part, 0) for part in range(parts) for kind in "FB"]
    return list(schedule_of(plan, parts).rows[plan.mesh["pp"].rank])


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


class Between:
    """The activations and gradients that pass between the stages of a rank's row and those before and behind them.

    shapes: {(stage, signature of a batch): (shapes, tree) of what the stage gives}, for later steps too: what it gives
    for the first such batch, its sender tells.
    """

    def __init__(self, plan: Plan, row: Sequence[Act], room: int, shapes: dict[Any, Any], device: torch.device) -> None:
        self.shapes, self.device, axis, self.acts = shapes, device, plan.mesh["pp"], plan.mesh.ledger.acts
        self.ranks, self.rank = (0,) if plan.stages is None else plan.stages.ranks, axis.rank
        self.here: dict[tuple[int, int, bool], Activations] = {}  # between two stages of this rank
        self.senders: dict[Channel, Sender] = {}
        self.receivers: dict[Channel, Receiver] = {}
        self.wanted: dict[Channel, list[tuple[int, int]]] = {}  # the messages that this row takes, in its order
        if axis.communicator is not None:
            open_channels(axis.communicator, channels_of(self.ranks))
        for act in row:
            if act.kind == "W":
                continue  # nobody waits for it
            forward = act.kind == "F"
            source, target = (act.stage - 1, act.stage + 1) if forward else (act.stage + 1, act.stage - 1)
            for stage, sends in ((source, False), (target, True)):
                if not 0 <= stage < len(self.ranks) or self.ranks[stage] == axis.rank:
                    continue
                assert axis.communicator is not None  # another rank has that stage
                channel = self.ranks[stage], forward
                ends = (axis.rank, channel[0]) if sends else (channel[0], axis.rank)
                name = channel_name(*ends, forward)
                if not sends:
                    self.wanted.setdefault(channel, []).append((act.part, act.stage))
                if sends and channel not in self.senders:
                    self.senders[channel] = Sender(axis.communicator, channel[0], name, room)
                elif not sends and channel not in self.receivers:
                    self.receivers[channel] = Receiver(axis.communicator, channel[0], name)

    def boundary(self, stage: int, forward: bool) -> int:
        """The stage whose result has the shapes of what `stage` takes."""
        return stage - 1 if forward else stage

    def give(self, part: int, stage: int, x: Activations | list[Tensor], forward: bool, signature: Signature) -> None:
        """Hand what `stage` made of a micro-batch to the stage behind it, or before it."""
        target = stage + 1 if forward else stage - 1
        if self.ranks[target] == self.rank:
            self.here[part, target, forward] = (
                Activations(list(x.leaves), x.treedef) if isinstance(x, Activations) else Activations(x, None)
            )
            return
        sender = self.senders[self.ranks[target], forward]
        if not isinstance(x, Activations):
            sender.send(x)
            return
        known, told = (stage, signature), None
        if known not in self.shapes:
            shapes = [(tuple(t.shape), t.dtype) for t in x.leaves]
            self.shapes[known] = shapes, x.treedef
            told = shapes, pytree.unflatten(range(len(shapes)), x.treedef)
        sender.send(x.leaves, told)

    def post(self, channel: Channel, signatures: Sequence[Signature]) -> None:
        """Start to receive the next message of a channel, if its shapes are known."""
        if self.wanted[channel]:
            part, stage = self.wanted[channel][0]
            shapes = self.shapes.get((self.boundary(stage, channel[1]), signatures[part]))
            if shapes is not None:
                self.receivers[channel].expect(shapes[0], self.device)

    def take(self, part: int, stage: int, forward: bool, signatures: Sequence[Signature]) -> Activations:
        """What `stage` needs of a micro-batch: the activations of the stage before it, or the gradient for its own."""
        source = stage - 1 if forward else stage + 1
        if self.ranks[source] == self.rank:
            return self.here.pop((part, stage, forward))
        channel = self.ranks[source], forward
        receiver, known = self.receivers[channel], (self.boundary(stage, forward), signatures[part])
        assert self.wanted[channel][0] == (part, stage), (
            f"{(part, stage)} is wanted and {self.wanted[channel][0]} is next"
        )
        if not receiver.coming:
            after = 0
            if known not in self.shapes:
                (shapes, tree), after = receiver.told(), 2
                self.shapes[known] = shapes, pytree.flatten(tree)[1]
            receiver.expect(self.shapes[known][0], self.device, after)
        self.wanted[channel].pop(0)
        leaves = receiver.take()
        if self.acts is not None:
            self.acts.taken()
        self.post(channel, signatures)
        return Activations(leaves, self.shapes[known][1])

    def open(self, signatures: Sequence[Signature]) -> None:
        """Start to receive the first message of every channel."""
        for channel in self.wanted:
            self.post(channel, signatures)

    def close(self) -> None:
        """Wait until all that was sent has arrived."""
        for sender in self.senders.values():
            sender.close()


def run_row(
    model: StreamedModel,
    params: Tree,
    batches: Batches,
    seed: Tensor,
    sink: GradientReducer,
    ready: Callable[[base.Loss], None] | None = None,
) -> list[base.Loss]:
    """The losses of the micro-batches, on the rank of the last stage; the gradients of total * seed go to `sink`.

    params: as they are used (see `gather_over_pp`). ready: is called with each loss before its backward pass.
    Communicates: the activations between stages, there and their gradients back.
    """
    plan, last = model.plan, len(batches.parts) - 1
    stages, row = stages_of(model.parts, plan), row_of(plan, len(batches.parts))
    device = pytree.leaves(batches.parts[0])[0].device
    signatures = [signature_of(part) for part in batches.parts]
    between = Between(plan, row, room_for(plan, len(batches.parts)), model.known, device)
    between.open(signatures)

    held: dict[tuple[int, int], Held] = {}
    headed: dict[tuple[int, int], Headed] = {}
    owed: dict[tuple[int, int], list[Passed]] = {}  # between gradients by inputs and those by weights
    losses: list[base.Loss] = []
    for i, act in enumerate(row):
        if between.acts is not None:
            between.acts.next()
        parts, at, phase = stages[act.stage], (act.part, act.stage), plan.mesh.ledger.phase
        if plan.stages is not None:
            plan.mesh.ledger.at(str(act), None)  # a plan counts each act's memory and time
        head = parts[-1] if parts[-1].kind == "head" else None
        if act.kind == "F":
            # A head whose backward pass follows at once runs in this phase, its leaves on their way before.
            now = head if row[i + 1 : i + 2] in ([act._replace(kind=kind)] for kind in BACKWARD) else None
            body, early = parts if head is None else parts[:-1], [] if now is None else now.groups
            ctx = model.context(batches.parts[act.part], batches.key, batches.firsts[act.part])
            with phase("forward"):
                x = between.take(*at, True, signatures) if act.stage else Activations([], pytree.flatten(())[1])
                one = model.forward(body, x, batches.parts[act.part], ctx, model.fetcher(params, device), early)
                if now is not None:
                    headed[at] = model.head_forward(now, one)
                elif head is None:
                    between.give(*at, one.x, True, signatures[act.part])
                    one.x.leaves.clear()
            held[at] = one
            del ctx, x, one
            continue
        final = act.part == last
        if act.kind == "W":
            with phase("backward"):
                model.backward_weights(owed.pop(at), sink, final)
            continue
        one, later = held.pop(at), None if act.kind == "B" else owed.setdefault(at, [])
        if head is not None:
            if at not in headed:
                with phase("forward"):
                    one.ahead.expect(head.groups, "forward")
                    headed[at] = model.head_forward(head, one)
            losses.append(headed[at].loss)
            if ready is not None:
                ready(losses[-1])
        with phase("backward"):
            if head is not None:
                x_grads = model.head_backward(head, headed.pop(at), seed, sink, final)
            else:
                x_grads = between.take(*at, False, signatures).leaves
                one.ahead.expect(one.order(), "backward")
            x_grads = model.backward(one, x_grads, sink, final, later)
            if act.stage:
                between.give(*at, x_grads, False, signatures[act.part])
        del one, later, x_grads
    if between.acts is not None:
        between.acts.next()
    if plan.stages is not None:
        plan.mesh.ledger.at("row", None)
    between.close()
    return losses


def evaluate_row(model: StreamedModel, params: Tree, batch: Any) -> base.Loss:
    """The loss of a batch without dropout, and without anything kept; the same on all ranks of pp.

    params: at rest.
    """
    plan, device = model.plan, pytree.leaves(batch)[0].device
    stages, row = stages_of(model.parts, plan), forward_row(plan)
    ctx, signatures = model.context(batch, {}, 0), [signature_of(batch)]
    between = Between(plan, row, 2, model.known, device)
    users = users_of(model.parts, plan)
    params = gather_over_pp(params, plan, users, device)
    between.open(signatures)
    losses = []
    ahead = model.fetcher(params, device)
    for act in row:
        parts = stages[act.stage]
        x = between.take(0, act.stage, True, signatures) if act.stage else Activations([], pytree.flatten(())[1])
        x = model.primal(parts, x, batch, ctx, ahead)
        if parts[-1].kind == "head":
            losses.append(x)
        else:
            between.give(0, act.stage, x, True, signatures[0])
    if plan.stages is None:
        return losses[0]
    between.close()
    return share_losses(losses, 1, plan, model.known, device)[0]


def signature_of(batch: Any) -> Signature:
    """What the shapes of a batch's activations depend on."""
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in pytree.named_leaves(batch).items())


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
