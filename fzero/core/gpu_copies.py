"""Values on their way: a Future, as of a collective, and copies to and from a GPU, on streams of their own.

`copy_in` and `copy_out` start a copy and return a `Copied`, whose `use` makes the current stream wait for it, and whose
`finish` makes the host wait. On a CPU, and in a plan, a copy is made at once. Snapshots leave on a third stream. Copies
of many tensors: fzero.core.copy_buckets.

Memory of the GPU that a copy reads or writes belongs to the stream that computes with it, which waits for the copy
before that memory is free, however far the host runs ahead. `record_stream` would keep it until the host has seen the
copy, and the copies of all layers would be alive at once. So what a copy brings is allocated on the computing stream,
and what it takes away is kept for two groups of a pass (`pass_group`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.core.gpu import HOST, is_capturing

T = TypeVar("T")


class Future(Generic[T]):
    """A value that was asked for; `wait()` returns it once it is there, and may be called once.

    >>> Future(lambda: 3).wait()
    3
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Wait for the value and return it; raises what `finish` does, such as RankError."""
        assert self._finish is not None, "a value was waited for twice"
        finish, self._finish = self._finish, None
        return finish()


def ready(value: T) -> Future[T]:
    """A Future whose value is there.

    >>> ready(3).wait()
    3
    """
    return Future(lambda: value)


class Copied:
    """A copy that was started; call `use` or `finish` before its tensor is read."""

    # event: after the copy; None: it is made. owner: the stream whose memory a tensor on the GPU is, which waits for
    # the copy before the tensor is freed, also if that was never used.
    __slots__ = ("_ordered", "event", "owner", "tensor")

    def __init__(self, tensor: Tensor, event: Any = None, owner: Any = None) -> None:
        self.tensor, self.event, self.owner = tensor, event, owner
        self._ordered = event is None or owner is None  # whether the owner is behind the copy

    def use(self) -> Tensor:
        """The tensor on the GPU, for the current stream, which waits for the copy; the host does not."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.event)
            if stream == self.owner:
                self._ordered = True
            else:
                self.tensor.record_stream(stream)  # its memory is another stream's
        return self.tensor

    def is_done(self) -> bool:
        """Whether the copy is made; nothing waits."""
        return self.event is None or self.event.query()

    def finish(self) -> Tensor:
        """The tensor, once the host has waited for the copy: its source may be reused."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor if self.tensor.device == HOST else self.use()

    def __del__(self) -> None:
        if not self._ordered and not sys.is_finalizing():
            self.owner.wait_event(self.event)


@functools.cache
def _copy_streams(device: torch.device) -> tuple[Any, Any]:
    # One each way for the whole process: memory that is freed on a stream is not given to another one, so a stream for
    # each pass would hold the buffers of each.
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _mark_copy(stream: Any) -> Any:
    event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps: it has no core of its own
    event.record(stream)
    return event


class Destination(NamedTuple):
    """Memory for a copy to write into."""

    tensor: Tensor
    ready: Any = None  # an event on `owner` that the copy waits for: what used the memory before is done
    owner: Any = None  # the stream whose memory it is


def reserve(x: Tensor, device: torch.device) -> Destination:
    """Memory on `device` like `x`, for `copy_in`, which any thread may call: it is the current stream's."""
    out = torch.empty_like(x, device=device)
    return _mark_destination(out) if device.type == "cuda" else Destination(out)


def _mark_destination(out: Tensor) -> Destination:
    owner = torch.cuda.current_stream(out.device)
    return Destination(out, owner.record_event(), owner)


def copy_in(x: Tensor, device: torch.device, *, event: Any = None, out: Tensor | Destination | None = None) -> Copied:
    """Start to copy `x` from the host's memory to `device`, after `event` if given; out: memory there."""
    # If `x` is pinned the host does not wait, and must not write into `x` before the copy is made. `out` is written
    # after the work that the current stream (of a Destination: the one that reserved it) was given so far.
    if device.type != "cuda":
        target = out.tensor if isinstance(out, Destination) else out
        return Copied(x.to(device) if target is None else target.copy_(x))
    out = reserve(x, device) if out is None else out if isinstance(out, Destination) else _mark_destination(out)
    target, stream = out.tensor, _copy_streams(device)[0]
    assert target.dtype == x.dtype, f"{x.dtype} is converted to {target.dtype} by a copy, which then waits"
    stream.wait_event(out.ready)
    with torch.cuda.stream(stream):
        if event is not None:
            stream.wait_event(event)
        target.copy_(x, non_blocking=True)
        return Copied(target, _mark_copy(stream), out.owner)


def copy_in_split(
    x: Tensor,
    device: torch.device,
    shapes: Sequence[torch.Size],
    *,
    events: Sequence[Any] = (),
    outs: Sequence[Tensor] | None = None,
) -> list[Copied]:
    """Start to copy `x`, a row of numbers in the host's memory, to a GPU as tensors of these shapes."""
    stream, _ = _copy_streams(device)
    row = reserve(x, device) if outs is None else _mark_destination(outs[0])
    stream.wait_event(row.ready)
    with torch.cuda.stream(stream):
        for event in {id(event): event for event in events if event is not None}.values():
            stream.wait_event(event)
        row_copy = row.tensor.copy_(x, non_blocking=True) if outs is None else x.to(device, non_blocking=True)
        pieces = row_copy.split([shape.numel() for shape in shapes])
        outputs = [piece.view(shape) for piece, shape in zip(pieces, shapes)]
        if outs is not None:
            torch_private.foreach_copy_(list(outs), outputs)
            outputs = list(outs)
        event = _mark_copy(stream)
    return [Copied(output, event, row.owner) for output in outputs]


def copy_out(x: Tensor, *, out: Tensor | None = None) -> Copied:
    """Start to copy `x` to the host after the work of the current stream; nobody may write over `x` meanwhile."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.is_cuda)
    if not x.is_cuda:
        if x.device != HOST:  # a plan's, of a GPU: what it keeps of memory is planned too
            _sources(x.device).add(CopySource(x))
        return Copied(out.copy_(x))
    assert out.dtype == x.dtype, f"{x.dtype} is converted to {out.dtype} by a copy, which then waits"
    _, stream = _copy_streams(x.device)
    owner = torch.cuda.current_stream(x.device)
    stream.wait_stream(owner)
    with torch.cuda.stream(stream):
        out.copy_(x, non_blocking=True)
        copied = Copied(out, _mark_copy(stream))
    _sources(x.device).add(CopySource(x, copied.event, owner))
    return copied


# ---- the sources of copies that leave a GPU ----


class CopySource(NamedTuple):
    """A tensor of a GPU that a copy to the host reads; in a plan the tensor alone."""

    tensor: Tensor
    event: Any = None  # after the copy
    owner: Any = None  # the stream whose memory it is


class CopySources:
    """The sources of copies that leave a GPU, each kept until its owner has waited for its copy."""

    # Two groups, so that the GPU computes a group while the tensors of the one before it leave.
    def __init__(self) -> None:
        self.waiting: deque[tuple[int, CopySource]] = deque()  # with the number of the group that was passed last
        self.group, self.fetched = 0, None
        self.lock = threading.RLock()  # a destructor may run while it is held

    def add(self, source: CopySource) -> None:
        """Keep a source."""
        with self.lock:
            self.waiting.append((self.group, source))
            self.drop_copied()

    def advance(self, group: Any, fetched: bool) -> None:
        """See `pass_group`."""
        with self.lock:
            if fetched or group != self.fetched:
                self.group += 1
            self.fetched = group if fetched else None
            self.drop_copied()
            self._drop(self.group - 1)

    def drop_all(self) -> None:
        """Have the owners wait for all copies under way, and keep nothing."""
        with self.lock:
            self._drop(self.group + 1)

    def drop_copied(self) -> None:
        """Drop the oldest ones whose copies the GPU has made, for which nothing must wait."""
        with self.lock:
            while self.waiting:
                oldest = self.waiting[0]
                if oldest[1].event is None or not oldest[1].event.query():
                    break
                if self.waiting and self.waiting[0] is oldest:  # else a destructor has dropped it meanwhile
                    self.waiting.popleft()

    def _drop(self, group: int) -> None:
        """Drop those of before a group, once their owners wait for their copies."""
        last: dict[Any, Any] = {}  # copies leave on one stream, so an owner waits for the last of its sources alone
        dropped: list[CopySource] = []
        while self.waiting and self.waiting[0][0] < group:
            source = self.waiting.popleft()[1]
            last[source.owner] = source.event
            dropped.append(source)
        for owner, event in last.items():
            if owner is not None:
                owner.wait_event(event)


@functools.cache
def _sources(device: torch.device) -> CopySources:
    return CopySources()


def pass_group(device: torch.device, group: Any, *, fetched: bool) -> None:
    """Note that a pass comes to a group of leaves, so that sources of copies two groups ago are freed."""
    # Both calls for a group count once. Nothing for a CPU, and while a graph is recorded.
    if device != HOST and not is_capturing(device):
        _sources(device).advance(group, fetched)


def free_copied(device: torch.device) -> None:
    """Free the sources of copies from a GPU for which the host has waited."""
    if device != HOST:
        _sources(device).drop_copied()


def free_sources(device: torch.device) -> None:
    """Free all sources of copies from a GPU, once its streams wait for the copies."""
    if device != HOST and not is_capturing(device):
        _sources(device).drop_all()


class SnapshotReader:
    """Copies of what a GPU's tensors hold when this is made, into the host's memory, beside the computation."""

    # Any thread whose current GPU is that one may call `copy`; `end` follows the last copy, whatever happens.
    def __init__(self, device: torch.device) -> None:
        self.stream, readings = _snapshots(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.last: Any = None
        self.ended = threading.Event()
        readings.append(self)

    def copy(self, x: Tensor, out: Tensor, write: Callable[[Tensor], Any]) -> Copied:
        """Start to write `x` into `out`, pinned memory of the host, in the order of `write(memory)`."""
        with torch.cuda.stream(self.stream):
            # In the order of `out` on the GPU already: a copy of strided memory to the host would wait.
            staged = torch.empty(out.shape, dtype=out.dtype, device=x.device)
            write(staged)
            out.copy_(staged, non_blocking=True)
            x.record_stream(self.stream)
            self.last = _mark_copy(self.stream)
            return Copied(out, self.last)

    def end(self) -> None:
        """There is no further copy."""
        self.ended.set()


@functools.cache
def _snapshots(device: torch.device) -> tuple[Any, list[SnapshotReader]]:
    """The stream of a device's readings, and those that nothing has waited for yet."""
    return torch.cuda.Stream(device), []


def await_readers(device: torch.device) -> None:
    """Make the current stream of a GPU wait for the copies of each SnapshotReader, to write over what they read."""
    # The host waits for the thread that makes the copies, until it has started the last; it does not wait for the GPU.
    if device.type != "cuda":
        return
    _, readings = _snapshots(device)
    while readings:
        reading = readings[0]
        reading.ended.wait()
        if reading.last is not None:
            torch.cuda.current_stream(device).wait_event(reading.last)
        readings.pop(0)


def has_readers(device: torch.device) -> bool:
    """Whether there is a Reading whose copies nothing has waited for yet."""
    return device.type == "cuda" and bool(_snapshots(device)[1])
