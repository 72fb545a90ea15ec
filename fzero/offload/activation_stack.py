"""Activations kept for the backward pass in host memory or on a disk: last in, first out, with the next list
prefetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.core.device import ELSEWHERE
from fzero.offload.scratch import ScratchFile


class DiskActivations:
    """A stack of lists of tensors on a disk: `append` starts a write, and `pop` starts the read of the next list."""

    def __init__(self, scratch: ScratchFile) -> None:
        self.scratch, self.sizes = scratch, []
        self.ahead: Callable[[], list[Tensor]] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors; they may be changed as soon as this returns."""
        assert self.ahead is None, "all lists must be popped before the next append"
        for j, tensor in enumerate(tensors):
            self.scratch.write(("acts", len(self.sizes), j), tensor.detach())
        self.sizes.append([tensor.device for tensor in tensors])

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        finish = self.ahead or self._fetch()
        self.ahead = self._fetch() if self.sizes else None
        return finish()

    def _fetch(self) -> Callable[[], list[Tensor]]:
        devices = self.sizes.pop()
        readings = [self.scratch.read(("acts", len(self.sizes), j)) for j in range(len(devices))]
        return lambda: [reading.wait().to(device) for reading, device in zip(readings, devices)]

    def __bool__(self) -> bool:
        return bool(self.sizes) or self.ahead is not None


class HostActivations:
    """The same stack in pinned host memory, for tensors of a CUDA device, copied by its own stream (in a plan:
    none)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device == ELSEWHERE else torch.cuda.Stream(device)
        self.held: list[list[Tensor]] = []
        self.ahead: tuple[list[Tensor], torch.cuda.Event | None] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        if self.stream is None:
            self.held.append([torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in tensors])
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.held.append(
                [
                    torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t.detach(), non_blocking=True)
                    for t in tensors
                ]
            )
        for tensor in tensors:
            tensor.record_stream(self.stream)

    def pop(self) -> list[Tensor]:
        found, event = self.ahead or self._fetch()
        self.ahead = self._fetch() if self.held else None
        if event is None:
            return found
        torch.cuda.current_stream().wait_event(event)
        for tensor in found:
            tensor.record_stream(torch.cuda.current_stream())
        return found

    def _fetch(self) -> tuple[list[Tensor], torch.cuda.Event | None]:
        if self.stream is None:
            return [t.to(self.device) for t in self.held.pop()], None
        with torch.cuda.stream(self.stream):
            found = [t.to(self.device, non_blocking=True) for t in self.held.pop()]
            event = torch.cuda.Event()
            event.record(self.stream)
        return found, event

    def __bool__(self) -> bool:
        return bool(self.held) or self.ahead is not None
