"""Exchanges beside `all_to_all`: of uneven numbers of rows, and within groups of an axis's ranks.

Both are linear maps as those of collectives.py, of values that vary over the ranks before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import call_of, communicator_over, dim_of, ppermute
from fzero.comm.communicator import Axis, Communicator
from fzero.comm.operators import ops
from fzero.core.autodiff import Function
from fzero.core.future import Future, ready


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


def exchange_rows(
    x: Tensor, counts: Tensor, axis: Axis, capacity: int, *, leaf: str = "", otherwise: str = "give more room"
) -> Tensor:
    """Return the rows that all N ranks of `axis` send to this one, in the order of the senders, and zeros behind them.

        y_r = concat over s of (counts[s, r] rows of x_s), 0

    x: [M, ...], the rows for rank 0 first, then those for rank 1; what is behind them all is sent to nobody. counts:
    int64 [N, N], counts[s, r] the rows from rank s to rank r, the same on all ranks. y: [room, ...]. The transpose is
    itself with the counts transposed.

    Communicates: the rows for other ranks; backward those from other ranks. Waits for a GPU, whose host needs the
    counts. Raises ValueError, on every rank before anything is sent, if one is sent more than `capacity` rows;
    otherwise: what to do then.

    >>> from fzero import one_process
    >>> exchange_rows(torch.ones(2, 1), torch.tensor([[2]]), one_process()["ep"], 3)
    tensor([[1.],
            [1.],
            [0.]])
    """
    return start_exchange_rows(x, counts, axis, capacity, leaf=leaf, otherwise=otherwise).wait()


def start_exchange_rows(
    x: Tensor, counts: Tensor, axis: Axis, capacity: int, *, leaf: str = "", otherwise: str = "give more room"
) -> Future[Tensor]:
    """Start `exchange_rows`; what is computed before `wait` overlaps with the messages, also in the backward pass.

    >>> from fzero import one_process
    >>> rows = start_exchange_rows(torch.ones(1, 1), torch.tensor([[1]]), one_process()["ep"], 1)
    >>> beside = torch.ones(1, 1) + 1.0
    >>> rows.wait() + beside
    tensor([[3.]])
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
