"""Channels: tensors from one rank of an axis to another, in order, by point-to-point messages that are started early.

The ranks of a pipeline run different programs and meet in no collective; a channel joins two of them in one direction,
and both ends count its messages.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comm.communicator import Communicator
from fzero.comm.messages import Connection
from fzero.core.device import HOST
from fzero.core.future import Future
from fzero.core.gpu import current_device

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
    """Where a value that is told is sent from: the host, for which no GPU waits, unless there is NCCL alone."""
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
