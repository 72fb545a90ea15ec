"""Channels: tensors from one rank of an axis to another, in order, by point-to-point messages that are started early.

The ranks of an axis that run different programs, as those of a pipeline do, meet in no collective; a channel joins two
of them in one direction. Both ends count its messages, so that they need no other numbers.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.communicator import Communicator
from fzero.core.future import Future

Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


class Sender:
    """The end of a channel that sends.

    peer: the rank of the axis to send to. label: of the channel, for errors and the ledger; the same at both ends.
    room: the most messages whose buffers are kept because they may not have arrived; with so many, `send` waits for the
    oldest.
    """

    def __init__(self, communicator: Communicator, peer: int, label: str, room: int) -> None:
        self.communicator, self.peer, self.label, self.room = communicator, peer, label, room
        self.sent = 0
        self.flying: deque[list[Future[Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], told: Any = None) -> None:
        """Start to send the tensors, which must not be written to. told: a picklable value to send before them."""
        while len(self.flying) >= self.room:
            self._finish()
        messages = _as_bytes(told) if told is not None else []
        messages += [x.contiguous() for x in tensors]
        to = self.communicator, self.peer, self.label, self.sent
        self.flying.append([_start(*to, i, x, sends=True) for i, x in enumerate(messages)])
        self.sent += 1

    def close(self) -> None:
        """Wait until everything has arrived."""
        while self.flying:
            self._finish()

    def _finish(self) -> None:
        for message in self.flying.popleft():
            message.wait()


class Receiver:
    """The end of a channel that receives: `expect` before or after the other end sends, then `take`."""

    def __init__(self, communicator: Communicator, peer: int, label: str) -> None:
        self.communicator, self.peer, self.label = communicator, peer, label
        self.received = 0
        self.coming: deque[list[Future[Tensor]]] = deque()

    def told(self, device: torch.device) -> Any:
        """Wait for the value that comes before the next message's tensors, which `expect` has not been called for."""
        size = self._start(0, torch.empty(1, dtype=torch.int64, device=device)).wait()
        return pickle.loads(
            self._start(1, torch.empty(int(size), dtype=torch.uint8, device=device)).wait().cpu().numpy()
        )

    def expect(self, shapes: Shapes, device: torch.device, after: int = 0) -> None:
        """Start to receive the next message, tensors of these shapes and dtypes. after: 2 if a value came before it."""
        rooms = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in shapes]
        self.coming.append([self._start(after + i, room) for i, room in enumerate(rooms)])
        self.received += 1

    def take(self) -> list[Tensor]:
        """Wait for the oldest message that is expected, and return its tensors."""
        return [message.wait() for message in self.coming.popleft()]

    def _start(self, place: int, room: Tensor) -> Future[Tensor]:
        return _start(self.communicator, self.peer, self.label, self.received, place, room, sends=False)


def _as_bytes(value: Any) -> list[Tensor]:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [torch.tensor([data.numel()]), data]


def _start(
    communicator: Communicator, peer: int, label: str, number: int, place: int, x: Tensor, *, sends: bool
) -> Future[Tensor]:
    """Start to send or receive tensor `place` of message `number`."""
    return communicator.start_message(
        x, peer, f"{label} {number}.{place}" if place else f"{label} {number}", sends=sends
    )
