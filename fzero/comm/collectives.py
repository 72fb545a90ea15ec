"""Collectives as linear maps: each is differentiable, batches, and has its transpose as its backward pass.

A value is, for each mesh axis, the same on all its ranks or varying (a shard, or a part of a sum).

| collective | from -> to | transpose |
|---|---|---|
| `psum` | varying -> the same on all | `pvary` |
| `pvary` (no data moves) | the same on all -> varying | `psum` |
| `all_gather`, `psum_scatter` | varying -> varying | each other |
| `all_gather_same` | varying -> the same on all | `own_slice` |
| `own_slice` (no data moves) | the same on all -> varying | `all_gather_same` |
| `all_to_all` | varying -> varying | itself, dims swapped |
| `ppermute` | varying -> varying | itself, the inverse permutation |

A loss that is the same on all ranks is seeded with 1 on each of them.

Everything composes under torch.func (grad, vjp, jvp, vmap, and these of each other) and is traced by make_fx into operators of the
namespace `fzero`. On an axis of size 1 each returns its input. `leaf` is a name for errors and for the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.comm.agreement import RankError
from fzero.comm.communicator import Communicator, Pending, done
from fzero.comm.ledger import Ledger, Row
from fzero.comm.operators import ops
from fzero.core.device import traced

__all__ = [
    "Axis",
    "Communicator",
    "Ledger",
    "Pending",
    "RankError",
    "Row",
    "all_gather",
    "all_gather_same",
    "all_to_all",
    "own_slice",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "start_all_gather",
    "start_psum",
    "start_psum_scatter",
]


class Axis(NamedTuple):
    """One axis of a mesh as this process sees it."""

    name: str
    size: int = 1
    rank: int = 0
    link: Communicator | None = None  # None where size is 1


# ---- linear maps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Map:
    """One collective as a linear map of a tensor. A dataclass, as torch.func would look for tensors inside a tuple."""

    kind: str
    link: Communicator
    leaf: str
    dims: tuple[int, ...] = ()  # the dim; of all_to_all (split, concat); none is negative
    perm: tuple[tuple[int, int], ...] = ()

    def run(self, x: Tensor) -> Tensor:
        number = self.link.number
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
            return x.narrow(dim, self.link.rank * (x.shape[dim] // self.link.size), x.shape[dim] // self.link.size)
        op = ops.psum_scatter if self.kind == "psum_scatter" else ops.all_gather
        return op(x.movedim(dim, 0).contiguous(), number, self.leaf).movedim(0, dim)

    def _all_to_all(self, x: Tensor) -> Tensor:
        split, concat = self.dims
        out = ops.all_to_all(x.movedim(split, 0).contiguous(), self.link.number, self.leaf)
        # [N, piece, ...] by sender: the piece goes back to `split`, the senders in front of `concat`.
        out = out.unflatten(0, (self.link.size, x.shape[split] // self.link.size)).movedim(1, split + 1)
        return out.movedim(0, concat).flatten(concat, concat + 1)

    def transpose(self) -> _Map:
        return replace(self, kind=_TRANSPOSE[self.kind], dims=self.dims[::-1], perm=tuple((d, s) for s, d in self.perm))

    def batched(self, at: int) -> _Map:
        """The same map of a tensor with one more dim, which is at `at` and stays there."""
        return replace(self, dims=tuple(d + (d >= at) for d in self.dims))


_PAIRS = {"psum": "pvary", "all_gather": "psum_scatter", "all_gather_same": "own_slice", "all_to_all": "all_to_all", "ppermute": "ppermute"}
_TRANSPOSE = _PAIRS | {b: a for a, b in _PAIRS.items()}


class _Linear(torch.autograd.Function):
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


def _what(collective: str, axis: Axis, leaf: str) -> str:
    return f"{collective} over {axis.name}" + (f" of {leaf}" if leaf else "")


def _apply(kind: str, x: Tensor, axis: Axis, leaf: str, dims: tuple[int, ...] = (), perm: tuple[tuple[int, int], ...] = ()) -> Tensor:
    return x if axis.size == 1 else _Linear.apply(x, _Map(kind, _link(kind, axis, leaf), leaf, dims, perm))


def _link(collective: str, axis: Axis, leaf: str) -> Communicator:
    if axis.link is None:
        raise ValueError(
            f"{_what(collective, axis, leaf)}: the axis has {axis.size} ranks and no link between them; take it from a mesh of "
            "make_mesh, or of fake_mesh for planning"
        )
    return axis.link


def _dim(x: Tensor, dim: int, axis: Axis, what: str, *, divide: bool = False) -> int:
    """`dim` counted from 0; raises ValueError where x has no such dim, or it is to be divided and does not."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: x has shape {list(x.shape)} and no dim {dim}")
    dim %= x.dim()
    size = x.shape[dim]
    if divide and size % axis.size:
        fit = f"pad it to {-(-size // axis.size) * axis.size}, or choose another size of the axis"
        raise ValueError(f"{what}: dim {dim} has size {size}, not divisible by {axis.name}={axis.size}; {fit}")
    return dim


def psum(x: Tensor, axis: Axis, *, leaf: str = "") -> Tensor:
    """The sum of `x` over the ranks of `axis`, the same on all of them; x's shape and dtype.

    Communicates: 2 (N-1)/N of x. Raises ValueError for a bool tensor; in checked mode, for an x that is the same on all ranks.
    """
    if x.dtype == torch.bool:
        raise ValueError(f"{_what('psum', axis, leaf)}: x is bool; convert it to an integer dtype to count, or to a floating one")
    return _apply("psum", x, axis, leaf)


def pvary(x: Tensor, axis: Axis, *, leaf: str = "") -> Tensor:
    """`x`, the same on all ranks of `axis`, for each of them to use differently: its cotangents are summed.

    Communicates: nothing; its transpose, psum, does.
    """
    return _apply("pvary", x, axis, leaf)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """The shards `x` of the ranks of `axis` put together along `dim` in rank order: its size n there becomes N n.

    The result is varying to the transpose, which sums the ranks' cotangents (psum_scatter).
    Communicates: (N-1)/N of the result.
    """
    return _apply("all_gather", x, axis, leaf, (_dim(x, dim, axis, _what("all_gather", axis, leaf)),))


def all_gather_same(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """As `all_gather`, where the result is the same on all ranks to what follows too: its cotangent is, so the transpose is `own_slice`.

    all_gather is pvary of this.
    Communicates: (N-1)/N of the result.
    """
    return _apply("all_gather_same", x, axis, leaf, (_dim(x, dim, axis, _what("all_gather", axis, leaf)),))


def own_slice(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """This rank's shard along `dim` of `x`, which is the same on all ranks of `axis`: its size n there becomes n / N.

    Communicates: nothing; its transpose, all_gather_same, does. Raises ValueError where N does not divide n.
    """
    return _apply("own_slice", x, axis, leaf, (_dim(x, dim, axis, _what("own_slice", axis, leaf), divide=True),))


def psum_scatter(x: Tensor, axis: Axis, dim: int = 0, *, leaf: str = "") -> Tensor:
    """This rank's shard along `dim` of the sum of `x` over the ranks of `axis`: its size n there becomes n / N.

    Communicates: (N-1)/N of x. Raises ValueError where N does not divide n.
    """
    return _apply("psum_scatter", x, axis, leaf, (_dim(x, dim, axis, _what("psum_scatter", axis, leaf), divide=True),))


def all_to_all(x: Tensor, axis: Axis, split: int, concat: int, *, leaf: str = "") -> Tensor:
    """`x` cut along `split` into a piece for each rank of `axis`, the pieces received put together along `concat` in rank order.

    So what was whole along `split` and sharded along `concat` becomes sharded along `split` and whole along `concat`.
    Communicates: (N-1)/N of x. Raises ValueError where N does not divide x's size in `split`.
    """
    what = _what("all_to_all", axis, leaf)
    return _apply("all_to_all", x, axis, leaf, (_dim(x, split, axis, what, divide=True), _dim(x, concat, axis, what)))


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]], *, leaf: str = "") -> Tensor:
    """The `x` of the rank that sends to this one by the pairs (source, destination) of `perm`; zeros where none does.

    Communicates: x, from each rank that is a source.
    Raises ValueError for a rank that the axis has not, and for one that is twice a source or twice a destination.
    """
    perm = tuple((int(source), int(destination)) for source, destination in perm)
    for word, ranks in zip(("source", "destination"), zip(*perm)):
        for rank in ranks:
            if not 0 <= rank < axis.size or ranks.count(rank) > 1:
                rule = f"each is a rank from 0 to {axis.size - 1}, and is there once"
                raise ValueError(f"{_what('ppermute', axis, leaf)}: {word} {rank} in {list(perm)}; {rule}")
    if axis.size == 1 and not perm:
        return torch.zeros_like(x)
    return _apply("ppermute", x, axis, leaf, perm=perm)


# ---- below functorch, for the streaming engine ----------------------------------------------------------------------


def _start(collective: str, x: Tensor, axis: Axis, leaf: str, **options: Any) -> Pending:
    link = _link(collective, axis, leaf)
    if (link.transport != "fake" and (isinstance(x, FakeTensor) or x.is_meta)) or traced(x):
        return done(getattr(ops, collective)(x, link.number, leaf))
    return getattr(link, f"start_{collective}")(x, leaf, **options)


def start_all_gather(x: Tensor, axis: Axis, *, leaf: str = "", out: Tensor | None = None) -> Pending:
    """`all_gather` along dim 0 of a plain contiguous tensor, started: [n, ...] -> [N n, ...]. On an axis of size 1, x itself (or out).

    out: a contiguous tensor to be written and returned; x may be this rank's slice of it.
    Communicates: (N-1)/N of the result. Raises ValueError for an out of another shape, dtype or layout.
    """
    if axis.size == 1:
        return done(x if out is None else out.copy_(x))
    return _start("all_gather", x, axis, leaf, out=out)


def start_psum_scatter(x: Tensor, axis: Axis, *, leaf: str = "") -> Pending:
    """`psum_scatter` along dim 0 of a plain contiguous tensor, started: [N n, ...] -> [n, ...]. On an axis of size 1, x itself.

    Communicates: (N-1)/N of x. Raises ValueError where N does not divide x's first size.
    """
    _dim(x, 0, axis, _what("psum_scatter", axis, leaf), divide=True)
    return done(x) if axis.size == 1 else _start("psum_scatter", x, axis, leaf)


def start_psum(x: Tensor, axis: Axis, *, leaf: str = "") -> Pending:
    """`psum` of a plain contiguous tensor, started. On an axis of size 1, x itself.

    Communicates: 2 (N-1)/N of x.
    """
    return done(x) if axis.size == 1 else _start("psum", x, axis, leaf, guarded=False)
