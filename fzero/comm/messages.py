"""Messages between this process and the other ranks of one mesh axis.

Transports: gloo, NCCL (beside it gloo, for tensors in the host's memory), and "fake" without a process group, for plans
on fake tensors.

The small leaves of a layer share a message, a bucket: a matrix [n, width] whose row i holds, side by side, the part of
every tensor that belongs to rank i of an axis. A collective changes the number of rows (a gather 1 -> N, a scatter N ->
1).

The agreement check: do all ranks run the same program? In checked mode each rank compares every collective, before it
runs, with that of its left neighbour on the axis, through the store. If all neighbours agree, all ranks do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comm.axes import PP
from fzero.comm.ledger import Ledger
from fzero.core.gpu_copies import Future, copy_in, copy_out

SMALL = 1 << 16  # bytes of a shard below which a message is mostly latency


def bucket_groups(tensors: Sequence[Tensor], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The indices of the tensors by bucket: small ones of equal kind and dtype share a bucket."""
    groups: dict[Hashable, list[int]] = {}
    for i, (tensor, kind) in enumerate(zip(tensors, kinds)):
        small = tensor.numel() * tensor.element_size() < SMALL
        groups.setdefault((kind, tensor.dtype) if small else i, []).append(i)
    return list(groups.values())


def pack(tensors: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """A bucket [rows, width] of tensors, whose first dims are split into `rows` equal parts."""
    # A bucket of one tensor is a view of it, without a copy.
    if len(tensors) == 1:
        return tensors[0].to(dtype).contiguous().view(rows, -1)
    return torch.cat([t.reshape(rows, -1).to(dtype) for t in tensors], 1)


def unpack(bundle: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes in a bucket [rows, width]; the rows' parts are joined along each first dim."""
    if len(shapes) == 1:
        return [bundle.reshape(shapes[0])]
    widths = [torch.Size(shape).numel() // bundle.shape[0] for shape in shapes]
    return [chunk.reshape(shape) for chunk, shape in zip(bundle.split(widths, 1), shapes)]


def padded(elements: int, ranks: int) -> int:
    """The elements of a whole sum in codes, padded to multiples of 16 for each rank."""
    return elements + -elements % (16 * ranks)


class RankError(RuntimeError):
    """Raised if another rank is gone, is late, or runs another program; the message says which rank and where.

    >>> from fzero.comm.messages import CollectiveCall, ProgramAgreement
    >>> agreement = ProgramAgreement(torch.distributed.HashStore(), rank=0, timeout_s=0.05)  # no rank 1 writes to it
    >>> agreement.compare(CollectiveCall("psum", "dp", 2, "loss", "", "float32", [1], 1), neighbor=1)
    Traceback (most recent call last):
    fzero.comm.messages.RankError: rank 0: psum over dp (2 ranks) of loss: rank 1 did not arrive within 0.05 s; ...
    """


class CollectiveCall(NamedTuple):
    """The properties of a collective that all ranks must agree on, and that errors name."""

    collective: str
    axis: str
    ranks: int
    leaf: str
    phase: str
    dtype: str
    shape: list[int]
    number: int  # among all collectives of the axis, from 1
    order: int = 0  # among all collectives of the process, from 1; the ranks of pp need not agree on it

    def __str__(self) -> str:
        leaf_text = f" of {self.leaf}" if self.leaf else ""
        return f"{self.collective} over {self.axis} ({self.ranks} ranks){leaf_text}" + (
            f" in {self.phase}" if self.phase else ""
        )

    @property
    def signature(self) -> str:
        """All fields as a text."""
        return f"#{self.number} {self}, {self.dtype} {self.shape}"


class ProgramAgreement:
    """The agreement check of a mesh and the ranks' messages about failures, through one store for all axes."""

    def __init__(self, store: dist.Store | None, rank: int, timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        # Ranks that run different programs hang, or one receives a tensor that was meant for another collective.
        self.number = 0  # collectives so far; the same at the same point of the program on all ranks of one stage
        self.checking = False
        # In checked mode: None: a psum of what is the same on all ranks is refused; a list: it is added to it.
        self.noted: list[CollectiveCall] | None = None
        # Read from another thread by run/setup/watchdog.py, which looks for ranks that hang.
        self.last: CollectiveCall | None = None  # the last collective that this rank began
        self.waiting: CollectiveCall | None = None  # the collective in which this rank now waits for others

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """A context in which the ranks compare every collective before it runs."""
        previous, self.checking = (
            self.checking,
            self.store is not None,
        )  # a mesh for planning has no other ranks to compare with
        try:
            yield
        finally:
            self.checking = previous

    def compare(self, call: CollectiveCall, neighbor: int) -> None:
        """Wait until rank `neighbor` is at the same call; raises RankError if it is at another one or late."""
        store, text, self.waiting = self.store, json.dumps(call), call
        assert store is not None  # `checked` does not compare without one
        # The key contains the axis, so that it has exactly one reader. A neighbour on another axis learns from the key
        # `last` where this rank is.
        store.set(f"{self.rank}/{call.axis}/{call.number}", text)
        store.set(f"{self.rank}/last", text)
        try:
            neighbor_call = self._arrival(store, call, neighbor)
        finally:
            self.waiting = None
        if neighbor_call._replace(order=call.order) != call:
            positions = "; ".join(
                f"rank {rank} is at {rank_call.signature}"
                for rank, rank_call in sorted([(self.rank, call), (neighbor, neighbor_call)])
            )
            fix = "give all ranks the same code, config, mesh and shapes of data"
            raise self.error(call, f"the ranks run different programs: {positions}; {fix}")
        # This rank is the only reader of that key; delete it, so that the store does not grow.
        store.delete_key(f"{neighbor}/{call.axis}/{call.number}")

    def _arrival(self, store: dist.Store, call: CollectiveCall, neighbor: int) -> CollectiveCall:
        """The collective with the same number on rank `neighbor`; raises RankError if that rank is late."""
        key, end = f"{neighbor}/{call.axis}/{call.number}", time.monotonic() + self.timeout_s
        while True:
            # In slices of a second: a neighbour at another call never writes this key; only its `last` says so.
            left_s = end - time.monotonic()
            with contextlib.suppress(RuntimeError):
                store.wait([key], datetime.timedelta(seconds=max(0.01, min(1.0, left_s))))
                return self._read(store, key)
            try:
                last = self._read(store, f"{neighbor}/last") if store.check([f"{neighbor}/last"]) else None
                if last is not None and call.axis != PP and last.order >= call.order:
                    # Ranks of pp run different programs, so that their orders cannot be compared.
                    # That rank has reached this place: its key exists by now, or its collective was over another axis.
                    return self._read(store, key) if store.check([key]) else last
            except RuntimeError:
                raise self.error(call, "the store, which rank 0 keeps, does not answer") from None
            if left_s <= 0.0:
                status = (
                    f"the last it began is {last.signature}" if last else "it has begun no collective in checked mode"
                )
                raise self.error(call, f"rank {neighbor} did not arrive within {self.timeout_s:g} s; {status}")

    def _read(self, store: dist.Store, key: str) -> CollectiveCall:
        return CollectiveCall(*json.loads(store.get(key)))

    def error(self, call: CollectiveCall, reason: str) -> RankError:
        """Make this rank's error at `call`; it also quotes the rank that failed first, if that differs."""
        text = f"rank {self.rank}: {call}: {reason}"
        first = self.fail(text)
        is_local = first.startswith(f"rank {self.rank}:") or reason in first
        return RankError(text + (f" (before that, {first})" if first and not is_local else ""))

    def fail(self, text: str) -> str:
        """Publish why this rank fails; the reason of the rank that failed first, or ""."""
        try:
            # compare_set keeps the first text: the rank that failed first is the cause, the others fail because of it.
            return "" if self.store is None else self.store.compare_set("failed", "", text).decode()
        except RuntimeError:
            return ""


T = TypeVar("T")
Message = tuple[Callable[..., Any], Tensor, int]  # dist.isend or dist.irecv, what it moves, the other rank


def through_host(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[Tensor, Tensor]]]:
    """The messages with host buffers in place of GPU tensors, and [(buffer, tensor)] of those received."""
    # Pinned, so that the copies to the GPU need not block the host.
    buffers = {id(t): torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for op, t, _ in messages if op is dist.irecv}
    leaving = {id(t): copy_out(t) for op, t, _ in messages if op is dist.isend}  # one tensor may go to many ranks
    arriving = [(buffers[id(t)], t) for op, t, _ in messages if op is dist.irecv]
    buffers |= {key: copied.finish() for key, copied in leaving.items()}
    return [(op, buffers[id(t)], j) for op, t, j in messages], arriving


class Connection(NamedTuple):
    """A communicator of two ranks with a stream of its own, for NCCL's messages of one channel."""

    backend: Any  # of torch.distributed, over two processes
    peer: int  # the number of the other end in it

    def start(self, x: Tensor, *, sends: bool) -> dist.Work:
        """Start to send or receive x behind the work of the current stream."""
        return self.backend.send([x], self.peer, 0) if sends else self.backend.recv([x], self.peer, 0)


class InFlight:
    """The messages of a call that have not been waited for, with their buffers."""

    def __init__(self, call: CollectiveCall, transport: str, messages: list[Message], dropped: deque[InFlight]) -> None:
        self.call, self.transport, self.messages, self.dropped = call, transport, messages, dropped
        self.work: list[tuple[dist.Work, int]] = []  # with the rank of the axis that each goes to or comes from

    # gloo reads no further on a connection on which a message comes for memory that is gone, and all later messages of
    # those two ranks hang. So the buffers of what an error left under way live on in `dropped`.
    def __del__(self) -> None:
        if self.work:
            self.dropped.append(self)


class AxisMessages:
    """Starts the messages of one axis, and names the call in the error of one that fails."""

    def __init__(
        self,
        ranks: Sequence[int],
        transport: str,
        group: dist.ProcessGroup | None,
        agreement: ProgramAgreement,
        ledger: Ledger,
    ) -> None:
        self.ranks, self.rank = tuple(ranks), list(ranks).index(agreement.rank)
        self.transport, self.group, self.agreement, self.ledger = transport, group, agreement, ledger
        self.dropped: deque[InFlight] = deque()  # begun, and left by an error before they were waited for
        self.failed: list[InFlight] = []  # of which another rank is gone or late: nobody waits for the others' again
        self.connections: dict[str, Connection] = {}  # of NCCL's messages, by the first word of their labels

    def transport_of(self, x: Tensor) -> str:
        """The transport of a tensor: beside NCCL, gloo carries those in the host's memory."""
        return "gloo" if self.transport == "nccl" and not x.is_cuda else self.transport

    def exchange(
        self,
        call: CollectiveCall,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        result: Callable[[], T],
        half: int = 0,
    ) -> Future[T]:
        """Start messages to and from ranks of the axis; once they have arrived, the Future's value is `result()`."""
        if self.transport == "fake":
            buffers = [*sends.values(), *receives.values()]

            def arrive() -> T:
                with self.waiting(call):
                    buffers.clear()  # held exactly as long as on gloo
                return result()

            return Future(arrive)
        # First what an error left under way, as the other ranks began it too.
        self.drain()
        # The tag keeps messages of different collectives apart. half: the round of messages within a collective.
        signature = f"{call.number} {call.collective} {call.leaf} {call.dtype} {call.shape} {half}"
        tag = zlib.crc32(signature.encode()) & 0x3FFFFFFF
        # Receives first, so that data is received directly into its buffer.
        messages: list[Message] = [(dist.irecv, t, j) for j, t in receives.items() if t.numel()]
        messages += [(dist.isend, t, j) for j, t in sends.items() if t.numel()]
        transport = self.transport_of(messages[0][1]) if messages else self.transport
        arriving: list[tuple[Tensor, Tensor]] = []
        if transport == "gloo" and messages and messages[0][1].is_cuda:
            messages, arriving = through_host(messages)
        in_flight = InFlight(call, transport, messages, self.dropped)
        if transport == "nccl":
            ops = [dist.P2POp(op, t, group=self.group, group_peer=j) for op, t, j in messages]
            in_flight.work += [(w, self.rank) for w in (dist.batch_isend_irecv(ops) if ops else ())]
        else:
            for op, t, j in messages:
                peer = {"group_src" if op is dist.irecv else "group_dst": j}
                try:
                    in_flight.work.append((op(t, group=self.group, tag=tag, **peer), j))
                except RuntimeError as error:
                    self.failed.append(in_flight)
                    raise self.lost(call, j, error) from None

        def finish() -> T:
            with self.waiting(call):
                self.wait_for(in_flight)
            in_flight.messages.clear()
            while arriving:
                buffer, t = arriving.pop()
                copy_in(buffer, t.device, out=t).use()
            return result()

        return Future(finish)

    def wait_for(self, in_flight: InFlight) -> None:
        """Wait for messages; raises RankError if the rank at the other end is gone or late."""
        most_s = datetime.timedelta(seconds=self.agreement.timeout_s)
        while in_flight.work:
            started, j = in_flight.work[0]
            try:
                # With a timeout NCCL's wait would block the host; without one it only orders the streams.
                started.wait(*([] if in_flight.transport == "nccl" else [most_s]))
            except RuntimeError as error:
                self.failed.append(in_flight)
                raise self.lost(in_flight.call, j, error) from None
            in_flight.work.pop(0)

    def drain(self) -> None:
        """Wait for what an error left under way: the other ranks began it too."""
        while self.dropped:
            self.wait_for(self.dropped.popleft())

    def native(
        self, call: CollectiveCall, x: Tensor, start: Callable[[], dist.Work | None], out: Tensor
    ) -> Future[Tensor]:
        """Start one of NCCL's own collectives of `x`, whose result is in `out`."""
        if self.transport == "fake":
            return self.exchange(call, {0: x}, {0: out}, lambda: out)
        work = start()
        assert work is not None  # only a rank outside the group gets none

        def finish() -> Tensor:
            with self.waiting(call):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self.lost(call, self.rank, error) from None
            return out

        return Future(finish)

    def lost(self, call: CollectiveCall, index: int, error: RuntimeError) -> Exception:
        """Make this rank's error after a message from or to rank `index` of the axis failed."""
        peer, text = f"rank {self.ranks[index]}", re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0])
        if re.search("closed by peer|reset by peer|broken pipe|refused|endpoint is not connected", text, re.IGNORECASE):
            reason = f"{peer} is gone (connection closed)"
        elif "Timed out" in text:
            reason = (
                f"{peer} did not answer within {self.agreement.timeout_s:g} s: it is late, or runs another "
                "program (mesh.checked() tells)"
            )
        else:
            reason = text if self.transport == "nccl" else f"{peer}: {text}"
        return self.agreement.error(call, reason)

    @contextlib.contextmanager
    def waiting(self, call: CollectiveCall) -> Iterator[None]:
        """A context for waiting for a collective: notify the watchers, and let errors name the call."""
        self.agreement.waiting = call
        for watch in self.ledger.watches:
            watch.wait(call.order)
        try:
            yield
        finally:
            self.agreement.waiting = None
        for watch in self.ledger.watches:
            watch.done(call.order)

    def abort(self) -> None:
        """End what NCCL has under way on this rank; nothing on gloo, whose messages end with the process."""
        if self.transport == "nccl" and self.group is not None:
            self.group.abort()
        for connection in self.connections.values():
            connection.backend.abort()

    def close(self) -> None:
        """Shut the connections down, once what they carry has arrived."""
        while self.connections:
            self.connections.popitem()[1].backend.shutdown()
