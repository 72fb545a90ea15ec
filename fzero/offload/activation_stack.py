"""Activations kept for the backward pass in host memory or on a disk: last in, first out, with the next list
prefetched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.core.future import Future
from fzero.core.gpu_copies import Copied, copy_in, copy_out
from fzero.offload.scratch import ScratchFile


class DiskActivations:
    """A stack of lists of tensors on a disk: `append` starts a write, and `pop` starts the read of the next list.

    Several may be in use at a time, one for each micro-batch under way; a file has room for as many as ever were.
    """

    def __init__(self, scratch: ScratchFile) -> None:
        self.scratch, self.sizes = scratch, []
        self.ahead: Future[list[Tensor]] | None = None
        self.number: int | None = None  # among the stacks of the file that hold anything

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors. They may be freed from then on; those of a GPU may not be written over before `pop`
        has returned them, as no stream waits for their copies."""
        assert self.ahead is None, "all lists must be popped before the next append"
        if self.number is None:
            self.number = self.scratch.stacks.take()
        for j, tensor in enumerate(tensors):
            self.scratch.write(("acts", self.number, len(self.sizes), j), tensor.detach())
        self.sizes.append([tensor.device for tensor in tensors])

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        found = self.ahead or self._fetch()
        self.ahead = self._fetch() if self.sizes else None
        tensors = found.wait()
        if not self:  # all is read, so another stack may write over it
            assert self.number is not None  # something was appended
            self.scratch.stacks.give_back(self.number)
            self.number = None
        return tensors

    def _fetch(self) -> Future[list[Tensor]]:
        devices, at = self.sizes.pop(), len(self.sizes)
        arriving = [self.scratch.read(("acts", self.number, at, j)).copy_to(device) for j, device in enumerate(devices)]
        return Future(lambda: [tensor.wait() for tensor in arriving])

    def __bool__(self) -> bool:
        return bool(self.sizes) or self.ahead is not None


class HostActivations:
    """The same stack in pinned host memory, for tensors of `device`, a GPU; the host waits for no copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: list[list[Copied]] = []
        self.ahead: Future[list[Tensor]] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors. They may be freed from then on, but not written over before `pop` has returned them:
        no stream waits for their copies."""
        self.held.append([copy_out(tensor.detach()) for tensor in tensors])

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        found = self.ahead or self._fetch()
        self.ahead = self._fetch() if self.held else None
        return found.wait()

    def _fetch(self) -> Future[list[Tensor]]:
        arriving = [copy_in(out.tensor, self.device, after=out.event) for out in self.held.pop()]
        return Future(lambda: [copied.use() for copied in arriving])

    def __bool__(self) -> bool:
        return bool(self.held) or self.ahead is not None
