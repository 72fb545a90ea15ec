"""What ranks exchange beside the plain collectives: small tables that all of them fill together, uneven numbers of
rows, rows within groups of an axis's ranks, and messages between two ranks.

The exchanges of rows are linear maps as those of collectives.py, of values that vary over the ranks before and after.

The ranks of a pipeline run different programs and meet in no collective: a channel takes tensors from one to another,
in order, by messages that are started early and that both ends count.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comm.axes import AXES
from fzero.comm.collectives import all_gather, all_gather_same, call_of, communicator_over, dim_of, ppermute
from fzero.comm.communicator import Axis, Communicator
from fzero.comm.messages import Connection
from fzero.comm.operators import ops
from fzero.core import pytree
from fzero.core.autodiff import Function
from fzero.core.device import HOST
from fzero.core.gpu import current_device
from fzero.core.gpu_copies import Future, ready
from fzero.core.storage import Damaged

Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


def open_channels(link: Communicator, channels: Sequence[tuple[str, int, int]]) -> None:
    """Connect over NCCL the new ones of `channels` (label, sender, receiver) that end at this rank."""
    for label, source, target in channels:
        if link.transport != "nccl" or label in link.connections or link.rank not in (source, target):
            continue
        # gloo's messages have tags; NCCL's have none and go one after the other on the stream of their communicator,
        # where an early receive would hold up what is sent after it. So each channel has a communicator.
        assert link.agreement.store is not None  # ranks with NCCL have one
        name, sends = f"channel/{link.ranks[source]}-{link.ranks[target]}/{label}", link.rank == source
        backend = pair_over_nccl(dist.PrefixStore(name, link.agreement.store), int(not sends))
        # NCCL makes a communicator at its first message, for which both hosts wait. Two ranks in the middle of unlike
        # programs could wait for each other, so the first message is sent here, on all ranks in the same order of
        # channels.
        connection = link.connections[label] = Connection(backend, int(sends))
        connection.start(torch.zeros(1, device=current_device()), sends=sends).wait()


def pair_over_nccl(store: dist.Store, number: int) -> Any:
    """NCCL between two processes, of which this one is `number` (0 or 1), beside torch.distributed's groups."""
    # Not dist.new_group: that may split the group of all processes, in which all of these then take part.
    backend = getattr(dist, "ProcessGroupNCCL")  # noqa: B009  (which a build of torch for CPUs has not)
    return backend(store, number, 2, backend.Options())


class Sender:
    """The end of a channel that sends."""

    def __init__(self, communicator: Communicator, peer: int, label: str, capacity: int) -> None:
        self.communicator, self.peer, self.label, self.capacity = communicator, peer, label, capacity
        self.sent = 0
        self.header_sends: list[Future[Tensor]] = []  # what was told since the last message
        self.flying: deque[list[Future[Tensor]]] = deque()

    def send_header(self, value: Any) -> None:
        """Start to send a picklable value, which comes before the next message's tensors."""
        self.header_sends = self._start(_as_bytes(value, header_device(self.communicator)))

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors, which must not be written to."""
        # Buffers may be freed only once they have arrived; the limit bounds their memory.
        while len(self.flying) >= self.capacity:
            self._finish()
        # Contiguous, as a message is one range of memory.
        self.flying.append(self.header_sends + self._start([x.contiguous() for x in tensors]))
        self.header_sends = []
        self.sent += 1

    def _start(self, messages: Sequence[Tensor]) -> list[Future[Tensor]]:
        route, header_count = (self.communicator, self.peer, self.label, self.sent), len(self.header_sends)
        return [_start(*route, header_count + i, x, sends=True) for i, x in enumerate(messages)]

    def close(self) -> None:
        """Wait until everything has arrived."""
        while self.flying:
            self._finish()

    def _finish(self) -> None:
        for message in self.flying.popleft():
            message.wait()


class Receiver:
    """The end of a channel that receives: `expect` before or after the other end sends, then `receive`."""

    def __init__(self, communicator: Communicator, peer: int, label: str) -> None:
        self.communicator, self.peer, self.label = communicator, peer, label
        self.received = 0
        self.pending: deque[list[Future[Tensor]]] = deque()

    def receive_header(self) -> Any:
        """Wait for the value that comes before the next message's tensors, which `expect` has not been called for."""
        device = header_device(self.communicator)
        # Two messages: the size first, as the receiver must allocate the second.
        size = self._start(0, torch.empty(1, dtype=torch.int64, device=device)).wait()
        return pickle.loads(
            self._start(1, torch.empty(int(size), dtype=torch.uint8, device=device)).wait().cpu().numpy()
        )

    def expect(self, shapes: Shapes, device: torch.device, offset: int = 0) -> None:
        """Start to receive the next message, of these shapes and dtypes; offset: 2 if a value came before it."""
        buffers = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in shapes]
        self.pending.append([self._start(offset + i, buffer) for i, buffer in enumerate(buffers)])
        self.received += 1

    def receive(self) -> list[Tensor]:
        """Wait for the oldest message that is expected, and return its tensors."""
        return [message.wait() for message in self.pending.popleft()]

    def _start(self, index: int, buffer: Tensor) -> Future[Tensor]:
        return _start(self.communicator, self.peer, self.label, self.received, index, buffer, sends=False)


def header_device(link: Communicator) -> torch.device:
    """The device that headers are sent from: the host, unless there is NCCL alone."""
    alone = link.transport == "nccl" and "cpu" not in dist.get_backend_config(link.group)
    return current_device() if alone else HOST


def _as_bytes(value: Any, device: torch.device) -> list[Tensor]:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    return [torch.tensor([data.numel()], device=device), data]


def _start(
    communicator: Communicator, peer: int, label: str, number: int, index: int, x: Tensor, *, sends: bool
) -> Future[Tensor]:
    """Start to send or receive tensor `index` of message `number`."""
    return communicator.start_message(
        x, peer, f"{label} {number}.{index}" if index else f"{label} {number}", sends=sends
    )


@dataclass(frozen=True)
class _RowExchange:
    """An exchange of rows but for its counts."""

    communicator: Communicator
    leaf: str
    capacity: int  # rows of the result
    rows: int  # of what is sent
    otherwise: str

    def transpose(self) -> _RowExchange:
        return replace(self, capacity=self.rows, rows=self.capacity)


# Between the two halves goes one row that stands for those on their way. Nobody reads it or its cotangent; autograd
# needs it to order the two.
class _Half(Function):
    """The start of an exchange, or the wait for it: each is the transpose of the other, of the exchange transposed."""

    @staticmethod
    def forward(x: Tensor, counts: Tensor, f: _RowExchange, starts: bool) -> Tensor:
        number = f.communicator.number
        if starts:
            return ops.start_rows(x, counts, number, f.capacity, f.leaf, f.otherwise)
        return ops.wait_rows(x, [], number, f.capacity)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, counts, ctx.f, ctx.starts = inputs
        ctx.save_for_backward(counts)
        ctx.save_for_forward(counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (counts,) = ctx.saved_tensors
        return _Half.apply(grad, counts.t(), ctx.f.transpose(), not ctx.starts), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (counts,) = ctx.saved_tensors
        return _Half.apply(tangent, counts, ctx.f, ctx.starts)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, counts: Tensor, f: _RowExchange, starts: bool) -> tuple[Tensor, int]:
        if in_dims[1] is not None:
            raise ValueError(
                f"exchange_rows of {f.leaf}: under vmap each sample sends other numbers of rows; use experts=gather"
            )
        return _Half.apply(x.movedim(in_dims[0], 1), counts, f, starts), 1


def start_exchange_rows(
    x: Tensor, counts: Tensor, axis: Axis, capacity: int, *, leaf: str = "", otherwise: str = "give more room"
) -> Future[Tensor]:
    """Start to exchange rows, and return those that all N ranks of `axis` send to this one, in the order of the
    senders, and zeros behind them.

        y_r = concat over s of (counts[s, r] rows of x_s), 0

    x: [M, ...], the rows for rank 0 first, then those for rank 1; what is behind them all is sent to nobody. counts:
    int64 [N, N], counts[s, r] the rows from rank s to rank r, the same on all ranks. y: [capacity, ...]. The transpose
    is itself with the counts transposed. What is computed before `wait` overlaps with the messages, also backward.

    Communicates: the rows for other ranks; backward those from other ranks. Waits for a GPU, whose host needs the
    counts. Raises ValueError, on every rank before anything is sent, if one is sent more than `capacity` rows;
    otherwise: what to do then.

    >>> from fzero import one_process
    >>> rows = start_exchange_rows(torch.ones(2, 1), torch.tensor([[2]]), one_process()["ep"], 3)
    >>> beside = torch.ones(3, 1)
    >>> (rows.wait() + beside).flatten()
    tensor([2., 2., 1.])
    """
    if axis.size == 1:
        return ready(torch.cat([x[:capacity], x.new_zeros((max(0, capacity - x.shape[0]), *x.shape[1:]))]))
    f = _RowExchange(communicator_over("exchange_rows", axis, leaf), leaf, capacity, x.shape[0], otherwise)
    row = _Half.apply(x, counts, f, True)
    return Future(lambda: _Half.apply(row, counts, f, False))


def exchange_within(x: Tensor, axis: Axis, size: int, split: int, concat: int, *, leaf: str = "") -> Tensor:
    """As `all_to_all` among each `size` ranks of `axis` next to each other, by size - 1 messages.

    Communicates: (size-1)/size of x; backward as much. Raises ValueError if size divides neither the ranks of the axis
    nor x along `split`.

    >>> from fzero import one_process
    >>> exchange_within(torch.ones(4, 2), one_process()["cp"], 1, 0, 1).shape  # one rank: x itself
    torch.Size([4, 2])
    """
    label = f"exchange_within {size} ranks, {call_of('all_to_all', axis, leaf)}"
    split, concat = dim_of(x, split, axis._replace(size=size), label, divide=True), dim_of(x, concat, axis, label)
    if axis.size % size:
        raise ValueError(f"{label}: the axis has {axis.size} ranks, not divisible by {size}")
    # In each round every rank sends one piece, to the rank `shift` after it, and receives one.
    pieces, local_index = list(x.chunk(size, split)), axis.rank % size
    parts = [pieces[local_index]] * size
    for shift in range(1, size):
        perm = [(rank, rank // size * size + (rank + shift) % size) for rank in range(axis.size)]
        parts[(local_index - shift) % size] = ppermute(pieces[(local_index + shift) % size], axis, perm, leaf=leaf)
    return torch.cat(parts, concat) if size > 1 else x


Mesh = Any  # fzero.sharding.Mesh, which is above
Refusal = ValueError | TypeError  # of what the caller gave


def gather_rows(row: Tensor, mesh: Mesh, *, leaf: str, axes: Sequence[str] | None = None) -> Tensor:
    """The rows of all ranks, [ranks, *row.shape] in their order, the same on each; axes: those to gather over."""
    table = row[None]
    # The innermost first, so that the rows end in the order of the ranks.
    for name in reversed(AXES.by_rank if axes is None else axes):
        table = all_gather_same(table, mesh[name], leaf=leaf)
    return table


def sum_rows(row: Tensor, mesh: Mesh, *, leaf: str) -> Tensor:
    """The sum of the rows of all ranks; for integers, whose sums do not depend on the order."""
    for axis in mesh.axes:
        row = all_gather(row[None], axis, leaf=leaf).sum(0)
    return row


def any_rank(flag: int, mesh: Mesh) -> int:
    """The largest `flag` of all ranks, the same on each of them: 0 where none has raised one."""
    highest = torch.tensor([flag], device=device_of(mesh))
    with mesh.ledger.phase("stop"):
        for axis in mesh.axes:
            highest = all_gather(highest, axis, leaf="stop").amax(0, keepdim=True)
    return int(highest)


def barrier(mesh: Mesh) -> None:
    """Return when all ranks of the mesh have called this."""
    token = torch.zeros(1, device=device_of(mesh))
    with mesh.ledger.phase("commit"):
        for axis in mesh.axes:
            token = all_gather(token, axis, leaf="commit")[:1]
    float(token)  # a GPU's collective has come this far


def raise_together(failure: Refusal | None, mesh: Mesh, phase: str = "commit") -> None:
    """Raise on every rank if any rank has a failure: its own, or that of the first rank that has one."""
    kind = 0 if failure is None else 2 if isinstance(failure, Damaged) else 1
    with mesh.ledger.phase(phase):
        sound = torch.full((1,), float(not kind), device=device_of(mesh))
        for axis in mesh.axes:
            sound = all_gather(sound, axis, leaf="commit").amin(0, keepdim=True)
        if float(sound):  # a GPU's collective has come this far; 1 in a plan
            return
        text = list(str(failure or "").encode())
        sizes = gather_rows(torch.tensor([kind, len(text)], device=device_of(mesh)), mesh, leaf="commit").tolist()
        row = torch.tensor(text + [0] * (max(size for _, size in sizes) - len(text)), dtype=torch.uint8)
        texts = gather_rows(row.to(device_of(mesh)), mesh, leaf="commit").tolist()
    if failure is not None:
        raise failure
    rank = next(rank for rank, (kind, _) in enumerate(sizes) if kind)
    message = f"rank {rank}: {bytes(texts[rank][: sizes[rank][1]]).decode()}"
    raise Damaged(message) if sizes[rank][0] == 2 else ValueError(message)


def raise_local(failure: Refusal | None) -> None:
    """`raise_together` of one rank."""
    if failure is not None:
        raise failure


@contextlib.contextmanager
def failing_together(agree: Callable[[Refusal | None], None]) -> Iterator[None]:
    """A context after which the ranks agree by `agree` (`raise_together`): if one fails, all fail."""
    failure = None
    try:
        yield
    except (ValueError, TypeError) as error:
        failure = error
    agree(failure)


def device_of(mesh: Mesh) -> str:
    """The kind of device that small tables are sent from: the host, unless the processes have NCCL alone."""
    if mesh.device_mesh is None or "cpu" in dist.get_backend_config(mesh.device_mesh.get_group(0)):
        return "cpu"
    return mesh.device_mesh.device_type


class TreeLayout(NamedTuple):
    """The structure of a tree of tensors, with the shape and dtype of each leaf."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def from_tree(cls, tree: Any) -> TreeLayout:
        """The layout of a tree."""
        leaves, treedef = pytree.flatten(tree)
        return cls(treedef, tuple(tuple(leaf.shape) for leaf in leaves), tuple(leaf.dtype for leaf in leaves))

    @property
    def size(self) -> int:
        """The numbers that its leaves have together."""
        return sum(map(math.prod, self.shapes))

    def unpack(self, row: Tensor) -> Any:
        """The tree of these numbers, [size]."""
        parts = row.split([math.prod(shape) for shape in self.shapes])
        leaves = [x.reshape(shape).to(dtype) for x, shape, dtype in zip(parts, self.shapes, self.dtypes)]
        return pytree.unflatten(leaves, self.treedef)


def packed(trees: Sequence[Any]) -> tuple[Tensor, TreeLayout]:
    """(the numbers of trees of one layout as float64 [trees, size], the layout)."""
    rows = [torch.cat([leaf.to(torch.float64).reshape(-1) for leaf in pytree.leaves(tree)]) for tree in trees]
    return torch.stack(rows), TreeLayout.from_tree(trees[0])
