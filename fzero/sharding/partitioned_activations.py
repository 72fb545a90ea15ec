"""Layer inputs that a remat policy keeps, cut over the ranks of tp: each has a part, and all gather the whole again.

Under plain tensor parallelism the ranks of tp have the same layer inputs, so that each of them keeping all is a waste;
with sequence parallelism they are parts already.
Ref: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 6.1 (partitioned activation checkpointing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, start_all_gather
from fzero.core.future import Future, ready

SMALL = 1024  # elements of a tensor that is not worth a message: it is kept whole


class PartitionedActivations:
    """A stack of lists of tensors, the same on all ranks of `axis`, of which `stack` has this rank's parts.

    `append` keeps a copy of the part, and `pop` starts to gather the next list. stack: a list, or one that keeps
    tensors in another memory (see fzero.offload.scratch).
    Communicates: (N-1)/N of each tensor, when it is popped.
    """

    def __init__(self, axis: Axis, stack: Any) -> None:
        self.axis, self.stack = axis, stack
        self.shapes: list[list[torch.Size]] = []
        self.ahead: Future[list[Tensor]] | None = None

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Push a list of tensors."""
        self.shapes.append([x.shape for x in tensors])
        self.stack.append([self.shard(x.detach()) for x in tensors])

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor, flat; the last rank's ends in zeros, if need be."""
        if x.numel() < SMALL:
            return x
        size = -(-x.numel() // self.axis.size)
        chunk = x.reshape(-1)[self.axis.rank * size : (self.axis.rank + 1) * size]
        return chunk.clone() if chunk.numel() == size else torch.cat([chunk, chunk.new_zeros(size - chunk.numel())])

    def pop(self) -> list[Tensor]:
        """Remove and return the last list of tensors."""
        gathering = self.ahead or self._gather()
        self.ahead = self._gather() if self.shapes else None
        return gathering.wait()

    def _gather(self) -> Future[list[Tensor]]:
        shapes, parts = self.shapes.pop(), self.stack.pop()
        wholes = [
            start_all_gather(shard, self.axis) if shape.numel() >= SMALL else ready(shard.reshape(-1))
            for shape, shard in zip(shapes, parts)
        ]
        return Future(lambda: [gathered.wait()[: shape.numel()].view(shape) for shape, gathered in zip(shapes, wholes)])

    def __bool__(self) -> bool:
        return bool(self.shapes) or self.ahead is not None
