"""What passes between the stages of a pipeline: activations, gradients, and once what they look like.

Ranks with neighbouring stages have a channel in each direction, with messages in the order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.exchanges import Receiver, Sender, open_channels
from fzero.core import pytree
from fzero.sharding.pipeline import Act
from fzero.sharding.plan import Plan
from fzero.train.stage_sharing import Segment, SegmentActivations, StackHook

Signature = tuple[Any, ...]
Channel = tuple[int, bool]  # the rank of pp at its other end, and whether activations or gradients travel


def channel_name(source: int, target: int, forward: bool) -> str:
    """The label of a channel from one rank of pp to another."""
    return f"{'x' if forward else 'grad'}:{source}-{target}"


def channels_of(ranks: Sequence[int]) -> list[tuple[str, int, int]]:
    """(label, sender, receiver) of the channels between stages on these ranks, in one order for all ranks."""
    ends = [(a, b, True) for a, b in itertools.pairwise(ranks)]
    ends += [(b, a, False) for a, b, _ in ends]
    return sorted({(channel_name(*end), end[0], end[1]) for end in ends if end[0] != end[1]})


def signature_of(batch: Any) -> Signature:
    """What the shapes of a batch's activations depend on."""
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in pytree.named_leaves(batch).items())


class StageExchange:
    """The activations and gradients between the stages of a rank's row and their neighbours."""

    def __init__(
        self, plan: Plan, row: Sequence[Act], capacity: int, shapes: dict[Any, Any], device: torch.device
    ) -> None:
        self.shapes, self.device, axis, self.acts = shapes, device, plan.mesh.pp, plan.mesh.ledger.acts
        self.ranks, self.rank = (0,) if plan.stages is None else plan.stages.ranks, axis.rank
        self.signatures: Sequence[Signature] = ()  # of the micro-batches, see `open`
        self.local: dict[tuple[int, int, bool], SegmentActivations] = {}  # between two stages of this rank
        self.senders: dict[Channel, Sender] = {}
        self.receivers: dict[Channel, Receiver] = {}
        self.expected: dict[Channel, list[tuple[int, int]]] = {}  # the messages that this row takes, in its order
        if axis.communicator is not None:
            # Before any work and in one order, as each new channel of NCCL waits for both ranks.
            open_channels(axis.communicator, channels_of(self.ranks))
        for act in row:
            if act.kind in "WU":
                continue  # nobody waits for its result
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
                    self.expected.setdefault(channel, []).append((act.micro_batch, act.stage))
                if sends and channel not in self.senders:
                    self.senders[channel] = Sender(axis.communicator, channel[0], name, capacity)
                elif not sends and channel not in self.receivers:
                    self.receivers[channel] = Receiver(axis.communicator, channel[0], name)

    def boundary(self, stage: int, forward: bool) -> int:
        """The stage whose result has the shapes of what `stage` takes."""
        return stage - 1 if forward else stage

    def send(self, micro_batch: int, stage: int, x: SegmentActivations | list[Tensor], forward: bool) -> None:
        """Hand what `stage` made of a micro-batch to the stage behind it, or before it; activations leave `x`."""
        target = stage + 1 if forward else stage - 1
        if self.ranks[target] == self.rank:
            self.local[micro_batch, target, forward] = (
                SegmentActivations(list(x.leaves), x.treedef)
                if isinstance(x, SegmentActivations)
                else SegmentActivations(x, None)
            )
        else:
            self.senders[self.ranks[target], forward].send(x.leaves if isinstance(x, SegmentActivations) else x)
        if isinstance(x, SegmentActivations):
            x.leaves.clear()

    def send_shapes(self, stage: int, x: SegmentActivations, signature: Signature) -> None:
        """Tell the stage behind `stage`, unless it knows, that it will be given what looks like `x`."""
        key, target = (stage, signature), stage + 1
        if key in self.shapes or target == len(self.ranks) or self.ranks[target] == self.rank:
            return
        shapes = [(tuple(t.shape), t.dtype) for t in x.leaves]
        self.shapes[key] = shapes, x.treedef
        # Before the stage computes, so that all ranks make their programs at the same time.
        self.senders[self.ranks[target], True].send_header((shapes, pytree.unflatten(range(len(shapes)), x.treedef)))

    def shape_sender(self, micro_batch: int, stage: int, parts: Sequence[Segment]) -> StackHook:
        """The function that is called with each stack of a stage, and with what it takes, before it runs."""
        last = [part.name for part in parts if part.depth][-1:]  # a model that is trained whole has no stack
        return lambda segment, x: (
            self.send_shapes(stage, x, self.signatures[micro_batch]) if [segment.name] == last else None
        )

    def post(self, channel: Channel) -> None:
        """Start to receive the next message of a channel, if its shapes are known."""
        if self.expected[channel]:
            micro_batch, stage = self.expected[channel][0]
            shapes = self.shapes.get((self.boundary(stage, channel[1]), self.signatures[micro_batch]))
            if shapes is not None:
                self.receivers[channel].expect(shapes[0], self.device)

    def receive(
        self,
        micro_batch: int,
        stage: int,
        forward: bool,
        on_shapes: Callable[[SegmentActivations], None] = lambda x: None,
    ) -> SegmentActivations:
        """What `stage` needs of a micro-batch: activations or a gradient; on_shapes: called when shapes come."""
        source = stage - 1 if forward else stage + 1
        if source < 0:
            return SegmentActivations([], pytree.flatten(())[1])
        if self.ranks[source] == self.rank:
            return self.local.pop((micro_batch, stage, forward))
        channel = self.ranks[source], forward
        receiver, key = self.receivers[channel], (self.boundary(stage, forward), self.signatures[micro_batch])
        assert self.expected[channel][0] == (micro_batch, stage), (
            f"{(micro_batch, stage)} is wanted and {self.expected[channel][0]} is next"
        )
        # The first message of these shapes: only its sender knows them.
        if not receiver.pending:
            offset = 0
            if key not in self.shapes:
                (shapes, tree), offset = receiver.receive_header(), 2
                self.shapes[key] = shapes, pytree.flatten(tree)[1]
                like = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
                on_shapes(SegmentActivations(like, self.shapes[key][1]))
                del like
            receiver.expect(self.shapes[key][0], self.device, offset)
        self.expected[channel].pop(0)
        leaves = receiver.receive()
        if self.acts is not None:
            self.acts.mark_arrival()
        # The next receive is started now, so that it overlaps with the work on this message.
        self.post(channel)
        return SegmentActivations(leaves, self.shapes[key][1])

    def open(self, signatures: Sequence[Signature]) -> None:
        """Start to receive the first message of every channel. signatures: of the micro-batches."""
        self.signatures = signatures
        for channel in self.expected:
            self.post(channel)

    def close(self) -> None:
        """Wait until all that was sent has arrived."""
        for sender in self.senders.values():
            sender.close()
