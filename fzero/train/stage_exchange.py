"""What the stages of a pipeline share and pass on: activations, gradients, the leaves outside the layers, the losses.

Ranks with neighbouring stages have a channel in each direction, with messages in the order of the schedule.

At rest a leaf outside the layers is sharded over pp too. It is gathered once before a step's row, to the ranks whose
stages use it; the sums of its gradients (several of a tied embedding) are added and scattered back behind it.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.axes import PP
from fzero.comm.collectives import start_all_gather
from fzero.comm.communicator import Axis, Communicator
from fzero.comm.rank_tables import Receiver, Sender, TreeLayout, open_channels, packed
from fzero.core import pytree
from fzero.core.gpu_copies import Future, copy_in
from fzero.core.pytree import Tree
from fzero.core.stack import in_turn
from fzero.models import base
from fzero.sharding import Plan
from fzero.sharding.pipeline import Act
from fzero.sharding.prefetch import LeafGroup
from fzero.sharding.slices import is_stacked


class Segment(NamedTuple):
    """A part of a layered model: a stack of layers, or a function that a pass calls once."""

    kind: str  # "embed", "join", "block" or "head"
    name: str
    functions: tuple[Callable[..., Any], ...]  # of a stack, those that its layers take in turn; else one
    leaves: tuple[str, ...]  # full names, frozen ones first
    depth: int = 0  # the layers of a stack; 0 for a function that is called once
    first: int = 0  # the number of its first layer among those of all stacks
    local_first: int = 0  # the number of its first layer among those that this rank holds of its stack

    @property
    def groups(self) -> list[LeafGroup]:
        """The leaves that are fetched together: each layer, or all of its leaves."""
        return [
            LeafGroup(self.name, self.leaves, self.local_first + i if self.depth else None)
            for i in range(self.depth or 1)
        ]


class SegmentActivations(NamedTuple):
    """The activations between two parts: their leaves, and the structure of their tree."""

    leaves: list[Tensor]
    treedef: Any


StackHook = Callable[[Segment, SegmentActivations], None]


def segments_of(model: base.Model, plan: Plan, layers: int = 0) -> tuple[Segment, ...]:
    """The parts of a model in the order of a forward pass; raises ValueError for a leaf outside of them."""
    leaves = pytree.named_leaves(plan.like)
    for name in model.shared:
        if name not in leaves:
            raise ValueError(
                f"the model says that its head uses {name!r}, which is no leaf of it{pytree.nearest(name, leaves)}"
            )
    names: dict[str, list[str]] = {}
    for name in leaves:
        names.setdefault(name.split("/")[0], []).append(name)

    def pop_leaves(name: str, *shared: str) -> tuple[str, ...]:
        return tuple(sorted([*names.pop(name, ()), *shared], key=lambda leaf: leaf not in plan.frozen))

    parts, first = [Segment("embed", "embed", (model.embed,), pop_leaves("embed"))], 0
    for stack in base.stacks_of(model):
        if stack.join is not None:
            parts.append(Segment("join", stack.join_name, (stack.join,), pop_leaves(stack.join_name, *model.shared)))
        if stack.name not in names:
            raise ValueError(f"the model has a stack {stack.name!r} and no leaf under {stack.name}/")
        depth = leaves[names[stack.name][0]].shape[0]
        parts.append(Segment("block", stack.name, in_turn(stack.block), pop_leaves(stack.name), depth, first))
        first += depth
    parts.append(Segment("head", "head", (model.head,), pop_leaves("head", *model.shared)))
    if names:
        folders = ", ".join(f"{segment.name}/" for segment in parts[:-1])
        raise ValueError(
            f"{next(iter(names.values()))[0]}: this layered model's leaves are under {folders} and head/; move it, or "
            "train a plain loss function"
        )
    deepest = max(segment.depth for segment in parts)
    return tuple(
        segment._replace(depth=layers) if layers and segment.depth == deepest else segment for segment in parts
    )


def stages_of(parts: Sequence[Segment], plan: Plan, rank: int | None = None) -> dict[int, tuple[Segment, ...]]:
    """{number of a stage: its parts} of the stages of a rank of pp; without pp all parts are stage 0."""
    if plan.stages is None:
        return {0: tuple(parts)}
    out, count, rank = {}, len(plan.stages.layers), plan.mesh.pp.rank if rank is None else rank
    for stage in plan.stages.chunks(rank):
        low, high = plan.stages.layers[stage][0], plan.stages.layers[stage][-1] + 1
        local_segments: list[Segment] = []
        for i, segment in enumerate(parts):
            behind = parts[i + 1].first if segment.kind == "join" else 0
            if segment.kind in ("embed", "head"):
                local_segments += [segment] if stage == (0 if segment.kind == "embed" else count - 1) else []
            elif segment.kind == "join":
                local_segments += [segment] if low <= behind < high else []
            elif low < segment.first + segment.depth and segment.first < high:
                first, end = max(low, segment.first), min(high, segment.first + segment.depth)
                turn = (first - segment.first) % len(segment.functions)
                rows = plan.leaves[segment.leaves[0]].params.rows[rank]
                functions = (*segment.functions[turn:], *segment.functions[:turn])
                local_first = rows.index(first - segment.first)
                local_segments.append(
                    segment._replace(functions=functions, depth=end - first, first=first, local_first=local_first)
                )
        out[stage] = tuple(local_segments)
    return out


def link_of(axis: Axis) -> Communicator:
    """The communicator of an axis of several ranks."""
    assert axis.communicator is not None
    return axis.communicator


class StageSharing(NamedTuple):
    """What the ranks of pp share in a step, on the device of its batch."""

    plan: Plan
    device: torch.device

    @torch.no_grad()
    def gather(self, params: Tree) -> Tree:
        """The parameters as this rank's stages use them: what pp shards at rest is whole on its users."""
        plan = self.plan
        if plan.stages is None:
            return params
        axis, leaves = plan.mesh.pp, pytree.named_leaves(params)

        def start(name: str, leaf: Any) -> Future[Tensor | None] | None:
            if is_stacked(name) or plan.leaves[name].params.dims == plan.leaves[name].use.dims:
                return None
            readers = sorted({rank for _, rank in plan.users[name]})
            return link_of(axis).start_gather_to(bring_leaf(leaf, self.device), readers, name)

        def finish_gather(name: str, started: Future[Tensor | None] | None) -> Any:
            value = started.wait() if started is not None else None
            if value is None:
                return leaves[name]
            if plan.leaves[name].params.over_data and not plan.leaves[name].use.over_data:
                value = start_all_gather(value, plan.link(name), leaf=name).wait()
            return value

        with plan.mesh.ledger.phase("gather"):
            started = {name: start(name, leaf) for name, leaf in leaves.items()}  # all, before the first is waited for
            return pytree.from_named({name: finish_gather(name, pending) for name, pending in started.items()}, params)

    def scatter(self, sums: dict[tuple[str, str], Any]) -> dict[str, Tensor]:
        """This rank's parts of the gradient sums outside the layers, which leave `sums`; [0, ...] for absent stacks."""
        plan, device = self
        link, accumulate = link_of(plan.mesh.pp), plan.policy.accumulate

        def start(name: str, stream: str, source: int, shape: tuple[int, ...]) -> Future[Tensor]:
            value = sums.pop((stream, name)).to(accumulate) if source == link.rank else None
            piece = torch.empty(shape, dtype=accumulate, device=device)
            return link.start_scatter_from(value, source, piece, name, cut=PP in plan.leaves[name].opt.axes)

        out, started = {}, {}
        with plan.mesh.ledger.phase("reduce"):
            for name, shape in plan.local_shapes["opt"].items():
                if is_stacked(name):
                    out |= {} if shape[0] else {name: torch.zeros(shape, dtype=accumulate, device=device)}
                else:  # all are on their way before the first is waited for
                    started[name] = [start(name, stream, source, shape) for stream, source in plan.users[name]]
            for name, pending in started.items():
                out[name] = pending[0].wait()
                for piece in pending[1:]:
                    out[name].add_(piece.wait())
        return out

    def losses(self, losses: Sequence[base.Loss], parts: int, shape_cache: dict[Any, Any]) -> list[base.Loss]:
        """The losses of a step's micro-batches on every rank of pp, from the rank of the last stage."""
        plan, device = self
        assert plan.stages is not None
        axis, source = plan.mesh.pp, plan.stages.ranks[-1]
        with plan.mesh.ledger.phase("metrics"):
            if "loss" not in shape_cache:
                treedef, *leaf_fields = TreeLayout.from_tree(losses[0]) if losses else (pytree.flatten(())[1], (), ())
                header = pytree.unflatten(range(treedef.num_leaves), treedef), *leaf_fields
                tree, *leaf_fields = broadcast_value(header, source, axis, device)
                shape_cache["loss"] = TreeLayout(pytree.flatten(tree)[1], *leaf_fields)
            layout: TreeLayout = shape_cache["loss"]
            rows = torch.empty(parts, layout.size, dtype=torch.float64, device=device)
            local_rows = packed(losses)[0] if losses else None
            rows = link_of(axis).start_scatter_from(local_rows, source, rows, "loss", cut=False).wait()
        return [layout.unpack(row) for row in rows]


def bring_leaf(leaf: Any, device: torch.device) -> Tensor:
    """A leaf outside the layers on `device`, from where it rests."""
    if not isinstance(leaf, Tensor):
        return leaf.read().copy_to(device).wait()
    return leaf if leaf.device == device else copy_in(leaf, device).use()


def broadcast_value(value: Any, source: int, axis: Axis, device: torch.device) -> Any:
    """The value that rank `source` of an axis gives, on all of its ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    sizes = start_all_gather(torch.tensor([data.numel()], device=device), axis, leaf="told").wait()
    buffer = torch.empty(int(sizes[source]), dtype=torch.uint8, device=device)
    payload = (
        link_of(axis)
        .start_scatter_from(data if axis.rank == source else None, source, buffer, "told", cut=False)
        .wait()
    )
    return pickle.loads(payload.cpu().numpy())


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
