"""Collectives as linear maps: each is differentiable, works under vmap, and has its transpose as its backward pass.

For each mesh axis, a value is either the same on all ranks or varying (a shard, or a term of a sum).

| collective | from -> to | transpose |
|---|---|---|
| `psum` | varying -> the same on all | `pvary` |
| `pvary` (no data moves) | the same on all -> varying | `psum` |
| `all_gather`, `psum_scatter` | varying -> varying | each other |
| `all_gather_same` | varying -> the same on all | `own_slice` |
| `own_slice` (no data moves) | the same on all -> varying | `all_gather_same` |
| `all_to_all` | varying -> varying | itself, dims swapped |
| `ppermute` | varying -> varying | itself, the inverse permutation |

To differentiate a loss that is the same on all ranks, each rank seeds its backward pass with 1.

Exchanges of uneven rows, and within groups of ranks of an axis: rank_tables.py.

All of them compose under torch.func (grad, vjp, jvp, vmap, nested in any order), and make_fx traces them into operators
of the namespace `fzero`. On an axis of size 1 each returns its input. `leaf` is a name for errors and for the ledger.

Ref: the transposes follow Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3 (the conjugate operators f
and g).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.communicator import Axis, Communicator
from fzero.comm.ledger import Ledger, LedgerRow
from fzero.comm.messages import RankError
from fzero.comm.operators import ops
from fzero.core.autodiff import Function, vary
from fzero.core.device import is_traced
from fzero.core.gpu_copies import Future, ready
from fzero.core.torch_private import FakeTensor

__all__ = [
    "Communicator",
    "Ledger",
    "LedgerRow",
    "RankError",
    "all_gather",
    "all_gather_same",
    "all_to_all",
    "own_slice",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "start_all_gather",
    "start_all_to_all",
    "start_psum",
    "start_psum_scatter",
]


# ---- linear maps ----------------------------------------------------------------------------------------------------


# A dataclass and not a NamedTuple, in which torch.func would look for tensors.
@dataclass(frozen=True)
class _Map:
    """One collective as a linear map of a tensor."""

    kind: str
    communicator: Communicator
    leaf: str
    dims: tuple[int, ...] = ()  # (dim,), or for all_to_all (split, concat); never negative
    perm: tuple[tuple[int, int], ...] = ()

    def run(self, x: Tensor) -> Tensor:
        number = self.communicator.number
        if self.kind == "pvary":
            return x.view_as(x)
        if self.kind == "psum":
            return ops.psum(x, number, self.leaf)
        if self.kind == "ppermute":
            return ops.ppermute(x, number, [r for pair in self.perm for r in pair], self.leaf)
        if self.kind == "all_to_all":
            return self._all_to_all(x)
        (dim,) = self.dims
        if self.kind == "own_slice":
            n = x.shape[dim] // self.communicator.size
            return vary(x.narrow(dim, self.communicator.rank * n, n), self.communicator.axis)
        op = ops.psum_scatter if self.kind == "psum_scatter" else ops.all_gather
        return op(x.movedim(dim, 0).contiguous(), number, self.leaf).movedim(0, dim)

    def _all_to_all(self, x: Tensor) -> Tensor:
        split, concat = self.dims
        out = ops.all_to_all(x.movedim(split, 0).contiguous(), self.communicator.number, self.leaf)
        # [N senders, piece, ...]: move the piece's dim back to `split`, and the senders' dim in front of `concat`.
        out = out.unflatten(0, (self.communicator.size, x.shape[split] // self.communicator.size)).movedim(1, split + 1)
        return out.movedim(0, concat).flatten(concat, concat + 1)

    def transpose(self) -> _Map:
        return replace(self, kind=_TRANSPOSE[self.kind], dims=self.dims[::-1], perm=tuple((d, s) for s, d in self.perm))

    def batched(self, batch_dim: int) -> _Map:
        """The same map for a tensor with an additional batch dim at `batch_dim`."""
        return replace(self, dims=tuple(d + (d >= batch_dim) for d in self.dims))


_PAIRS = {
    "psum": "pvary",
    "all_gather": "psum_scatter",
    "all_gather_same": "own_slice",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}
_TRANSPOSE = _PAIRS | {b: a for a, b in _PAIRS.items()}


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, f: _Map) -> Tensor:
        return f.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.f = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Linear.apply(grad, ctx.f.transpose()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _Linear.apply(tangent, ctx.f)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, f: _Map) -> tuple[Tensor, int]:
        return _Linear.apply(x, f.batched(in_dims[0])), in_dims[0]


# ---- the collectives ------------------------------------------------------------------------------------------------


def call_of(collective: str, axis: Axis, leaf: str) -> str:
    """A call in the words of an error, such as "psum over dp of embed/tokens"."""
    return f"{collective} over {axis.name}" + (f" of {leaf}" if leaf else "")


def _apply(
    kind: str, x: Tensor, axis: Axis, leaf: str, dims: tuple[int, ...] = (), perm: tuple[tuple[int, int], ...] = ()
) -> Tensor:
    return x if axis.size == 1 else _Linear.apply(x, _Map(kind, communicator_over(kind, axis, leaf), leaf, dims, perm))


def communicator_over(collective: str, axis: Axis, leaf: str) -> Communicator:
    """The communicator of an axis; raises ValueError for an axis of several ranks that has none."""
    if axis.communicator is None:
        raise ValueError(
            f"{call_of(collective, axis, leaf)}: the axis has {axis.size} ranks and no communicator; take it from "
            "a mesh of make_mesh, or of fake_mesh for planning"
        )
    return axis.communicator


def dim_of(x: Tensor, dim: int, axis: Axis, label: str, *, divide: bool = False) -> int:
    """`dim` as a non-negative number; raises ValueError if x has no such dim, or (divide) if it does not divide."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{label}: x has shape {list(x.shape)} and no dim {dim}")
    dim %= x.dim()
    size = x.shape[dim]
    if divide and size % axis.size:
        fit = f"pad it to {-(-size // axis.size) * axis.size}, or choose another size of the axis"
        raise ValueError(f"{label}: dim {dim} has size {size}, not divisible by {axis.name}={axis.size}; {fit}")
    return dim


def psum(x: Tensor, axis: Axis, *, leaf: str = "") -> Tensor:
    """Return the sum of `x` over the N ranks of `axis`, the same on all of them.

        y = sum_r x_r

    x: any shape, any numeric dtype; y has both. leaf: a name for errors and the ledger. The transpose is `pvary`.

    Communicates: 2 (N-1)/N of x. Raises ValueError for a bool tensor, and in checked mode for an x that is the same on
    all ranks already (the sum would be N x).

    >>> from fzero import one_process
    >>> psum(torch.tensor([1.0, 2.0]), one_process()["dp"])  # one rank: the sum is x
    tensor([1., 2.])
    """
    if x.dtype == torch.bool:
        raise ValueError(
            f"{call_of('psum', axis, leaf)}: x is bool; convert it to an integer dtype to count, or to a floating one"
        )
    return _apply("psum", x, axis, leaf)


def pvary(x: Tensor, axis: Axis, *, leaf: str = "") -> Tensor:
    """Return `x`, which is the same on all ranks of `axis`, as a value that each rank uses differently.

        y_r = x;   backward: dx = sum_r dy_r

    x: any shape and dtype; y has both. Use it before a computation that differs by rank (a shard of the weights), so
    that the gradients of x are summed. The transpose is `psum`.

    Communicates: nothing forward; backward a psum of x's shape.
    Raises ValueError if the axis has several ranks but does not come from a mesh.

    >>> from fzero import one_process
    >>> pvary(torch.tensor([1.0]), one_process()["tp"])
    tensor([1.])
    """
    return _apply("pvary", x, axis, leaf)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """Return the shards `x` of the N ranks of `axis` concatenated along `dim` in rank order.

        y = concat(x_0, ..., x_{N-1});   backward: dx_r = sum over ranks of their dy, slice r

    x: size n along `dim`, any dtype; y: size N n there. Every rank may use y differently: the transpose `psum_scatter`
    sums their gradients.

    Communicates: (N-1)/N of the result; backward as much.
    Raises ValueError if x has no dim `dim`.

    >>> from fzero import one_process
    >>> all_gather(torch.ones(2, 3), one_process()["dp"], 1).shape  # one rank: x itself
    torch.Size([2, 3])
    """
    return _apply("all_gather", x, axis, leaf, (dim_of(x, dim, axis, call_of("all_gather", axis, leaf)),))


def all_gather_same(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """As `all_gather`, for a result that all ranks use in the same way: its gradient is the same on all, so the
    transpose is `own_slice`.

    all_gather(x) = pvary(all_gather_same(x)).
    Communicates: (N-1)/N of the result.
    """
    return _apply("all_gather_same", x, axis, leaf, (dim_of(x, dim, axis, call_of("all_gather", axis, leaf)),))


def own_slice(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """Return this rank's slice along `dim` of `x`, which is the same on all ranks of `axis`: size n becomes n / N.

    Communicates: nothing; its transpose, all_gather_same, does. Raises ValueError if N does not divide n.
    """
    return _apply("own_slice", x, axis, leaf, (dim_of(x, dim, axis, call_of("own_slice", axis, leaf), divide=True),))


def psum_scatter(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """Return this rank's slice along `dim` of the sum of `x` over the N ranks of `axis` (a reduce-scatter).

        y_r = slice r of sum_s x_s

    x: size n along `dim`, any numeric dtype; y: size n / N there. The transpose is `all_gather`.

    Communicates: (N-1)/N of x; backward as much.
    Raises ValueError if N does not divide n, or x has no dim `dim`.

    >>> from fzero import one_process
    >>> psum_scatter(torch.tensor([1.0, 2.0]), one_process()["dp"])  # one rank: x itself
    tensor([1., 2.])
    """
    return _apply(
        "psum_scatter", x, axis, leaf, (dim_of(x, dim, axis, call_of("psum_scatter", axis, leaf), divide=True),)
    )


def all_to_all(x: Tensor, axis: Axis, split: int, concat: int, *, leaf: str = "") -> Tensor:
    """Return the pieces that all N ranks of `axis` send to this one, concatenated along `concat` in rank order.

        y_r = concat over s of (piece r of x_s, cut along split)

    So a tensor that is whole along `split` and sharded along `concat` becomes sharded along `split` and whole along
    `concat`. x: size n along `split` and m along `concat`, any dtype; y: n / N and N m. The transpose is itself with
    the dims swapped.

    Communicates: (N-1)/N of x; backward as much.
    Raises ValueError if N does not divide n, or x lacks one of the dims.

    >>> from fzero import one_process
    >>> all_to_all(torch.ones(4, 2), one_process()["ep"], 0, 1).shape  # one rank: x itself
    torch.Size([4, 2])
    """
    label = call_of("all_to_all", axis, leaf)
    return _apply(
        "all_to_all", x, axis, leaf, (dim_of(x, split, axis, label, divide=True), dim_of(x, concat, axis, label))
    )


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]], *, leaf: str = "") -> Tensor:
    """Return the `x` of the rank that sends to this one by the pairs (source, destination) of `perm`; zeros if none
    does.

        y_d = x_s for each (s, d) in perm, else 0

    x: any shape and dtype, the same on all ranks; y has both. The transpose is itself with the pairs reversed.

    Communicates: x, from each rank that is a source; backward from each that is a destination.
    Raises ValueError for a rank outside the axis, and for one that is a source or a destination twice.

    >>> from fzero import one_process
    >>> ppermute(torch.ones(2), one_process()["pp"], [])  # nobody sends
    tensor([0., 0.])
    """
    perm = tuple((int(source), int(destination)) for source, destination in perm)
    for word, ranks in zip(("source", "destination"), zip(*perm)):
        for rank in ranks:
            if not 0 <= rank < axis.size or ranks.count(rank) > 1:
                rule = f"each is a rank from 0 to {axis.size - 1}, and is there once"
                raise ValueError(f"{call_of('ppermute', axis, leaf)}: {word} {rank} in {list(perm)}; {rule}")
    if axis.size == 1 and not perm:
        return torch.zeros_like(x)
    return _apply("ppermute", x, axis, leaf, perm=perm)


# ---- asynchronous, on plain tensors: not differentiable --------------------------------------------------------------


def _start(collective: str, x: Tensor, axis: Axis, leaf: str, **options: Any) -> Future[Tensor]:
    communicator = communicator_over(collective, axis, leaf)
    # In a traced graph a collective is one operator, which also waits.
    if (communicator.transport != "fake" and (isinstance(x, FakeTensor) or x.is_meta)) or is_traced(x):
        return ready(getattr(ops, collective)(x, communicator.number, leaf))
    return getattr(communicator, f"start_{collective}")(x, leaf, **options)


def start_all_gather(x: Tensor, axis: Axis, *, leaf: str = "", out: Tensor | None = None) -> Future[Tensor]:
    """Start `all_gather` along dim 0 of a plain contiguous tensor, [n, ...] -> [N n, ...]; on an axis of size 1 the
    result is x (or out).

    out: a contiguous tensor to write and return; x may be this rank's slice of it.
    Communicates: (N-1)/N of the result. Raises ValueError for an out of another shape, dtype or layout.
    """
    if axis.size == 1:
        return ready(x if out is None else out.copy_(x))
    return _start("all_gather", x, axis, leaf, out=out)


def start_psum_scatter(x: Tensor, axis: Axis, *, leaf: str = "") -> Future[Tensor]:
    """Start `psum_scatter` along dim 0 of a plain contiguous tensor, [N n, ...] -> [n, ...]; on an axis of size 1 the
    result is x.

    Communicates: (N-1)/N of x. Raises ValueError if N does not divide the size of dim 0.
    """
    dim_of(x, 0, axis, call_of("psum_scatter", axis, leaf), divide=True)
    return ready(x) if axis.size == 1 else _start("psum_scatter", x, axis, leaf)


def start_all_to_all(x: Tensor, axis: Axis, *, leaf: str = "") -> Future[Tensor]:
    """Start `all_to_all` along dim 0 of a plain contiguous tensor, [N n, ...] -> [N n, ...], in the order of the
    senders; on an axis of size 1 the result is x.

    Communicates: (N-1)/N of x. Raises ValueError if N does not divide the size of dim 0.
    """
    dim_of(x, 0, axis, call_of("all_to_all", axis, leaf), divide=True)
    return ready(x) if axis.size == 1 else _start("all_to_all", x, axis, leaf)


def start_psum(x: Tensor, axis: Axis, *, leaf: str = "") -> Future[Tensor]:
    """Start `psum` of a plain contiguous tensor; on an axis of size 1 the result is x.

    Communicates: 2 (N-1)/N of x.
    """
    return ready(x) if axis.size == 1 else _start("psum", x, axis, leaf, guarded=False)
