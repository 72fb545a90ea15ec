"""Exchanges beside `all_to_all`: of uneven numbers of rows, and within groups of an axis's ranks.

Both are linear maps as those of collectives.py, whose values vary over the ranks before and after. The transpose of
`exchange_rows` is itself with the counts transposed, that of `exchange_within` itself with the dims swapped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, call_of, communicator_over, dim_of, ppermute
from fzero.comm.communicator import Communicator
from fzero.comm.operators import ops


@dataclass(frozen=True)
class _Rows:
    """An exchange of rows but for its counts."""

    communicator: Communicator
    leaf: str
    room: int  # rows of the result
    otherwise: str

    def run(self, x: Tensor, counts: Tensor) -> Tensor:
        return ops.exchange_rows(x, counts, self.communicator.number, self.room, self.leaf, self.otherwise)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, counts: Tensor, f: _Rows) -> Tensor:
        return f.run(x, counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, counts, ctx.f = inputs
        ctx.rows = x.shape[0]
        ctx.save_for_backward(counts)
        ctx.save_for_forward(counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        return _Exchange.apply(grad, counts.t(), replace(ctx.f, room=ctx.rows)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (counts,) = ctx.saved_tensors
        return _Exchange.apply(tangent, counts, ctx.f)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, counts: Tensor, f: _Rows) -> tuple[Tensor, int]:
        if in_dims[1] is not None:
            raise ValueError(
                f"exchange_rows of {f.leaf}: under vmap each sample sends other numbers of rows; use experts=gather"
            )
        return _Exchange.apply(x.movedim(in_dims[0], 1), counts, f), 1


def exchange_rows(
    x: Tensor, counts: Tensor, axis: Axis, room: int, *, leaf: str = "", otherwise: str = "give more room"
) -> Tensor:
    """Return the rows that all N ranks of `axis` send to this one, in the order of the senders, and zeros behind them.

        y_r = concat over s of (counts[s, r] rows of x_s), 0

    x: [M, ...], the rows for rank 0 first, then those for rank 1; what is behind them all is sent to nobody. counts:
    int64 [N, N], counts[s, r] the rows from rank s to rank r, the same on all ranks. y: [room, ...]. The transpose is
    itself with the counts transposed.

    Communicates: the rows for other ranks; backward those from other ranks. Waits for a GPU, whose host needs the
    counts. Raises ValueError, on every rank before anything is sent, if one is sent more than `room` rows;
    otherwise: what to do then.

    >>> from fzero import one_process
    >>> exchange_rows(torch.ones(2, 1), torch.tensor([[2]]), one_process()["ep"], 3)
    tensor([[1.],
            [1.],
            [0.]])
    """
    if axis.size == 1:
        return torch.cat([x[:room], x.new_zeros((max(0, room - x.shape[0]), *x.shape[1:]))])
    communicator = communicator_over("exchange_rows", axis, leaf)
    return _Exchange.apply(x, counts, _Rows(communicator, leaf, room, otherwise))


def exchange_within(x: Tensor, axis: Axis, size: int, split: int, concat: int, *, leaf: str = "") -> Tensor:
    """As `all_to_all` among each `size` ranks of `axis` next to each other, by size - 1 messages.

    Communicates: (size-1)/size of x; backward as much. Raises ValueError if size divides neither the ranks of the axis
    nor x along `split`.

    >>> from fzero import one_process
    >>> exchange_within(torch.ones(4, 2), one_process()["cp"], 1, 0, 1).shape  # one rank: x itself
    torch.Size([4, 2])
    """
    what = f"exchange_within {size} ranks, {call_of('all_to_all', axis, leaf)}"
    split, concat = dim_of(x, split, axis._replace(size=size), what, divide=True), dim_of(x, concat, axis, what)
    if axis.size % size:
        raise ValueError(f"{what}: the axis has {axis.size} ranks, not divisible by {size}")
    pieces, own = list(x.chunk(size, split)), axis.rank % size
    parts = [pieces[own]] * size
    for shift in range(1, size):
        perm = [(rank, rank // size * size + (rank + shift) % size) for rank in range(axis.size)]
        parts[(own - shift) % size] = ppermute(pieces[(own + shift) % size], axis, perm, leaf=leaf)
    return torch.cat(parts, concat) if size > 1 else x
