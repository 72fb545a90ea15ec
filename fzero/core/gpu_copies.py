"""Copies to and from a GPU, on streams of their own beside its computation.

Each direction has a stream: `copy_in` and `copy_out` start a copy and return a `Copied`, whose `use` makes the current
stream wait for it, and whose `finish` makes the host wait. On a CPU, and in a plan, a copy is made at once, and nothing
waits. Snapshots leave on a third stream, by a `Reading`. Copies of many tensors: fzero.core.copy_buckets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.core.gpu import HOST


class Copied(NamedTuple):
    """A copy that was started. One of `use` and `finish` must be called before its tensor is read."""

    tensor: Tensor
    event: Any = None  # after the copy; None: it is made

    def use(self) -> Tensor:
        """The tensor on the GPU, for the current stream, which waits for the copy; the host does not."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.event)
            self.tensor.record_stream(stream)  # its memory is another stream's
        return self.tensor

    def made(self) -> bool:
        """Whether the copy is made; nothing waits."""
        return self.event is None or self.event.query()

    def finish(self) -> Tensor:
        """The tensor, once the host has waited for the copy: its source may be reused."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor if self.tensor.device == HOST else self.use()


@functools.cache
def _copy_streams(device: torch.device) -> tuple[Any, Any]:
    # One each way for the whole process: memory that is freed on a stream is not given to another one, so a stream for
    # each pass would hold the buffers of each.
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _mark_copy(stream: Any) -> Any:
    event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps: it has no core of its own
    event.record(stream)
    return event


def copy_in(x: Tensor, device: torch.device, *, after: Any = None, out: Tensor | None = None) -> Copied:
    """Start to copy `x` from the host's memory to `device`.

    If `x` is pinned the host does not wait, and must not write into `x` before the copy is made. after: an event that
    the copy waits for. out: memory there of the same shape and dtype, written after the work that the current stream
    was given so far; None: new memory.
    """
    if device.type != "cuda":
        return Copied(x.to(device) if out is None else out.copy_(x))
    stream, _ = _copy_streams(device)
    if out is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        if out is None:
            out = x.to(device, non_blocking=True)
        else:
            assert out.dtype == x.dtype, f"{x.dtype} is converted to {out.dtype} by a copy, which then waits"
            out.copy_(x, non_blocking=True)
            out.record_stream(stream)
        return Copied(out, _mark_copy(stream))


def copy_in_parts(
    x: Tensor,
    device: torch.device,
    shapes: Sequence[torch.Size],
    *,
    after: Sequence[Any] = (),
    outs: Sequence[Tensor] | None = None,
) -> list[Copied]:
    """Start to copy `x`, a row of numbers in the host's memory, to a GPU at once, as tensors of these shapes in turn.

    after, outs: as for `copy_in`, several events and a memory for each shape.
    """
    stream, _ = _copy_streams(device)
    if outs is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for event in {id(event): event for event in after if event is not None}.values():
            stream.wait_event(event)
        row = x.to(device, non_blocking=True).split([shape.numel() for shape in shapes])
        parts = [part.view(shape) for part, shape in zip(row, shapes)]
        if outs is not None:
            torch_private.foreach_copy_(list(outs), parts)
            for out in outs:
                out.record_stream(stream)
            parts = list(outs)
        event = _mark_copy(stream)
    return [Copied(part, event) for part in parts]


def copy_out(x: Tensor, *, out: Tensor | None = None) -> Copied:
    """Start to copy `x` to memory of the host, after the work that the current stream was given so far.

    out: pinned memory of the same shape and dtype; None: new memory, pinned for a GPU's tensor.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.is_cuda)
    if not x.is_cuda:
        return Copied(out.copy_(x))
    assert out.dtype == x.dtype, f"{x.dtype} is converted to {out.dtype} by a copy, which then waits"
    _, stream = _copy_streams(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        out.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return Copied(out, _mark_copy(stream))


class Reading:
    """Copies of what a GPU's tensors hold when this is made, into the host's memory, beside the computation.

    Any thread whose current GPU is that one may call `copy`; `end` follows the last copy, whatever happens. The tensors
    may be freed; who writes over them calls `await_readers` first.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, readings = _snapshots(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.last: Any = None
        self.ended = threading.Event()
        readings.append(self)

    def copy(self, x: Tensor, out: Tensor, write: Callable[[Tensor], Any]) -> Copied:
        """Start to write `x` into `out`, pinned memory of the host: `write(memory)` puts it into memory like `out`.

        On the GPU it takes memory like `out` once, however many copies are under way.
        """
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
def _snapshots(device: torch.device) -> tuple[Any, list[Reading]]:
    """The stream of a device's readings, and those that nothing has waited for yet."""
    return torch.cuda.Stream(device), []


def await_readers(device: torch.device) -> None:
    """Make the current stream of a GPU wait for the copies of each Reading: it may then write over what they read.

    The host waits for the thread that makes them, until it has started the last; it does not wait for the GPU.
    """
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
