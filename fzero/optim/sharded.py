"""What an optimizer that must see more than its own shard of a leaf asks of the other ranks.

`WHOLE` is the layout of leaves that are whole on every rank; `sharded(plan.opt, mesh, like=plan.like)` that of a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, all_gather, all_to_all, psum, pvary
from fzero.core import pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.core.device import kind_of
from fzero.core.pytree import Tree, nearest
from fzero.kernels.optim_leaf import safe_sqrt
from fzero.kernels.optim_multi_tensor import grad_norm
from fzero.sharding.draw import window
from fzero.sharding.mesh import Mesh
from fzero.sharding.plan import check_dims, shard_dim
from fzero.sharding.slices import walk
from fzero.sharding.spec import Spec

# Up to so many elements a sum over ranks is one exchange of everything, and not a scatter and a gather.
_SMALL = 1 << 12
# Elements of a piece of a leaf whose squares are summed in float64: the temporaries' size. A row's sum depends on
# _COLUMNS, and on nothing else.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 23
_COLUMNS = 1 << 16

Dims = Sequence[int] | None


@dataclass(frozen=True)
class Squared:
    """In place of a leaf in a tree of which the norm is asked: what `Layout.square` made of its pieces, in their order."""

    squares: list[tuple[int, Tensor]]  # (layer, square)
    shape: torch.Size
    dtype: torch.dtype

    def dim(self) -> int:
        """The number of the leaf's dims."""
        return len(self.shape)


class Layout(NamedTuple):
    """Functions of a leaf's full name ("blocks/attn/w_q") and tensors of this rank.

    `dims` are dims of the leaf, counted from the front or (negative) from the back; None is all of them. Where a shard
    is asked for, that of some layers of a stacked leaf serves as well. What comes back is for use with the shard: its
    gradient is this rank's own part.
    """

    parts: Callable[[str, Dims], int]  # (name, dims) -> into how many parts those dims are cut: 1 where they are whole
    gather: Callable[..., Tensor]  # (name, shard, dims=None) -> the shard with those dims whole
    own: Callable[..., Tensor]  # (name, x, dims=None) -> this rank's part of an x with those dims whole: no communication
    psum: Callable[[str, Tensor, Dims], Tensor]  # (name, x of any shape, dims) -> summed over the axes that shard those dims
    # (name, shard, f) -> the shard of f(x), where x has whole matrices, in its last two dims, of some of the layers
    on_matrices: Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]
    norm: Callable[[Tree], Tensor]  # tree of shards -> the 2-norm of the whole tree, the same on all ranks
    vary: Callable[[str, Tensor], Tensor]  # (name, what is the same on all ranks) -> the same, for use with the shard
    # (name, shape of the shard) -> (where the shard begins in each dim, shape of the whole leaf)
    window: Callable[[str, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
    square: Callable[[Tensor], Tensor]  # a piece of a leaf (see sharding.pieces) -> what `norm` needs of it


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all elements of the tree, 0-dim, in the widest of the dtypes, at least float32 (so also its sum).

    An empty tree has norm 0. Differentiable; the gradient of a zero tree is zero.
    """
    dtype, leaves = _wide(tree), pytree.leaves(tree)
    if _by_kernel(leaves, dtype):
        return grad_norm(leaves, impl="triton")[0]
    norms = [torch.linalg.vector_norm(leaf, dtype=dtype) for leaf in leaves]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=dtype)


def _piece_square(piece: Tensor) -> Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)).square()


WHOLE = Layout(
    parts=lambda name, dims: 1,
    gather=lambda name, x, dims=None: x,
    own=lambda name, x, dims=None: x,
    psum=lambda name, x, dims: x,
    on_matrices=lambda name, x, f: f(x),
    norm=global_norm,
    vary=lambda name, x: x,
    window=lambda name, shape: ((0,) * len(shape), shape),
    square=_piece_square,
)


def sharded(specs: Tree, mesh: Mesh, *, like: Tree, ordered: bool = False) -> Layout:
    """The layout of leaves that rest on `mesh` as `specs` says (a plan's `opt`); `like` has their whole shapes.

    A tree handed to `norm` may have some of the leaves only, and any structure that gives them their names.
    ordered: `norm` has the same bits however many ranks of dp share the leaves, one process included: squares are summed
    in float64, first within a row of the dim that dp shards, which lies whole on a rank (or in parts on the ranks of
    other axes), then over the rows of the whole leaf, always in the same order.

    Communicates: `norm` one psum per axis that shards any leaf, of one number per set of axes, or if ordered of one
    float64 number per row; `on_matrices` an all_to_all per axis there and back where the layers divide by its ranks, a
    gather where they do not; the others what they say, one collective per axis.
    Raises ValueError for a leaf without a spec, dims that their axes do not divide, and, if ordered, an axis dp on
    another dim than that of the rows.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in pytree.named_leaves(like).items()}
    named_specs = pytree.named_leaves(specs)
    axes = {name: _axes_of(name, spec, shapes, mesh) for name, spec in named_specs.items()}
    if ordered:
        for name, dims in axes.items():
            for dim, over in enumerate(dims):
                if dim != shard_dim(name) and any(axis.name == "dp" for axis in over):
                    raise ValueError(f"{name}: dp shards dim {dim}; ordered sums need it on dim {shard_dim(name)}; use ordered=False")

    def over(name: str, dims: Dims) -> list[tuple[int, Axis]]:
        # Innermost first: the order in which parts are put together.
        if name not in axes:
            raise ValueError(f"layout: it has no leaf {name!r}{nearest(name, axes)}; make it from the plan of these parameters")
        all_dims = axes[name]
        chosen = range(len(all_dims)) if dims is None else sorted({range(len(all_dims))[d] for d in dims})
        return [(dim, axis) for dim in chosen for axis in reversed(all_dims[dim])]

    def parts(name: str, dims: Dims) -> int:
        return math.prod(axis.size for _, axis in over(name, dims))

    def gather(name: str, x: Tensor, dims: Dims = None) -> Tensor:
        for dim, axis in over(name, dims):
            x = all_gather(x, axis, dim, leaf=name)
        return x

    def own(name: str, x: Tensor, dims: Dims = None) -> Tensor:
        for dim, axis in reversed(over(name, dims)):
            x = _part(x, dim, axis)
        return x

    def total(name: str, x: Tensor, dims: Dims) -> Tensor:
        for _, axis in over(name, dims):
            if x.numel() <= _SMALL:
                x = functools.reduce(torch.add, all_gather(x[None], axis, 0, leaf=name).unbind(0))
            else:
                x = pvary(psum(x, axis, leaf=name), axis, leaf=name)
        return x

    def on_matrices(name: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        def run(x: Tensor, axes: list[tuple[int, Axis]]) -> Tensor:
            if not axes:
                return f(x)
            (dim, axis), *rest = axes
            if x.dim() > 2 and x.shape[0] % axis.size == 0:
                return all_to_all(run(all_to_all(x, axis, 0, dim, leaf=name), rest), axis, dim, 0, leaf=name)
            return _part(run(all_gather(x, axis, dim, leaf=name), rest), dim, axis)

        return run(x, over(name, (-2, -1)))

    def norm(tree: Tree) -> Tensor:
        named: dict[str, Any] = pytree.named_leaves(tree)
        used = {name: tuple(sorted(axis.name for _, axis in over(name, None))) for name in named}
        sums = _row_sums(named, axes) if ordered else _set_sums(named, used, _wide(tree))
        for axis in mesh.axes:
            keys = [key for key in sums if axis.name in used[key]]
            if keys:
                summed = psum(torch.cat([sums[key] for key in keys]), axis, leaf="norm")
                sums.update(zip(keys, summed.split([sums[key].shape[0] for key in keys])))
        total = _fold(torch.stack([_fold(part) for part in sums.values()])) if sums else torch.zeros(())
        return safe_sqrt(total).to(_wide(tree))

    def vary(name: str, x: Tensor) -> Tensor:
        for _, axis in over(name, None):
            x = pvary(x, axis, leaf=name)
        return x

    def place(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        over(name, None)  # refuses a leaf that is not there
        start, size = window(shapes[name], named_specs[name], mesh)
        assert size == shape, f"{name}: the shard has shape {shape}, and {size} by its spec"
        return start, shapes[name]

    return Layout(parts, gather, own, total, on_matrices, norm, vary, place, _row_squares if ordered else _piece_square)


def squares(layout: Layout, tree: Tree) -> dict[str, Squared]:
    """{name: what `layout.norm` needs of a leaf}: it takes this in place of the tree, with the same bits; it serves norms of layers too."""
    return {name: _squares_of(leaf, shard_dim(name) == 1, layout.square) for name, leaf in pytree.named_leaves(tree).items()}


def summed_by_kernel(tree: Tree) -> bool:
    """Whether `norm` of the tree is one kernel's work, which tells nothing of its leaves."""
    leaves = pytree.leaves(tree)
    return all(isinstance(leaf, Tensor) for leaf in leaves) and _by_kernel(leaves, _wide(tree))


def check_layout(owner: str, layout: Layout) -> None:
    """Raise ValueError where `layout` is none."""
    if not isinstance(layout, Layout):
        raise ValueError(f"{owner}: layout is {layout!r}; it must be a Layout: WHOLE, or sharded(plan.opt, mesh, like=plan.like)")


def layer_norm2(layout: Layout, name: str, x: Tensor, lead: int) -> Tensor:
    """The 2-norm of each layer of a leaf of which `x` is the shard, over all dims but the first `lead`; those are kept with size 1."""
    dims = tuple(range(lead, x.dim()))
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True) if dims else x.abs()
    return safe_sqrt(layout.psum(name, norm.square(), dims))  # the root of a square is exact


def rms(layout: Layout, name: str, x: Tensor, lead: int) -> Tensor:
    """The root mean square of each layer of a leaf of which `x` is the shard, shaped as by `layer_norm2`."""
    dims = tuple(range(lead, x.dim()))
    return layer_norm2(layout, name, x, lead) / math.sqrt(max(1, math.prod(x.shape[lead:]) * layout.parts(name, dims)))


def _by_kernel(leaves: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether the kernel sums the squares of all leaves: on a GPU, in float32, where nothing is differentiated."""
    plain = bool(leaves) and dtype == torch.float32 and not transforms() and not needs_grad(*leaves)
    return plain and all(kind_of(x) == "cuda" and x.is_contiguous() for x in leaves)


def _wide(tree: Tree) -> torch.dtype:
    dtype = torch.float32
    for leaf in pytree.leaves(tree):
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


def _axes_of(name: str, spec: Spec, shapes: dict[str, tuple[int, ...]], mesh: Mesh) -> tuple[tuple[Axis, ...], ...]:
    if name not in shapes:
        raise ValueError(f"layout: {name} has a spec and no shape{nearest(name, shapes)}; give `like` of the same plan")
    whole = replace(spec, dims=(*spec.dims, *((),) * (len(shapes[name]) - len(spec.dims))))
    check_dims(name, shapes[name], whole, {axis.name: axis.size for axis in mesh.axes})
    return tuple(tuple(mesh[a] for a in dim if mesh[a].size > 1) for dim in whole.dims)


def _set_sums(named: dict[str, Any], used: dict[str, tuple[str, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """{a leaf's name: the sum of squares [1] of this rank's part of it and of all leaves on the same set of axes}.

    By the pieces of each leaf, so that its bits are the same where the leaf is not in memory as a whole.
    """
    members: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(named, key=lambda name: (used[name], name)):  # the same order on all ranks
        members.setdefault(used[name], []).append(name)

    def total(names: list[str]) -> Tensor:
        if all(isinstance(named[name], Tensor) for name in names) and _by_kernel([named[name] for name in names], dtype):
            return grad_norm([named[name] for name in names], impl="triton")[0].square()
        found = [square for name in names for _, square in _squared(named[name], shard_dim(name) == 1, _piece_square)]
        return torch.stack([square.to(found[0].device, dtype) for square in found]).sum()

    return {names[0]: total(names)[None] for names in members.values()}


def _squares_of(x: Any, stacked: bool, f: Callable[[Tensor], Tensor]) -> Squared:
    return x if isinstance(x, Squared) else Squared(_squared(x, stacked, f), x.shape, x.dtype)


def _squared(x: Any, stacked: bool, f: Callable[[Tensor], Tensor]) -> list[tuple[int, Tensor]]:
    return x.squares if isinstance(x, Squared) else [(layer, f(piece)) for layer, piece in widened(walk(x, stacked))]


def widened(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """The pieces (layer, tensor) in float32 or wider, those that are not in one buffer, so that a piece lasts until the next."""
    room = torch.empty(0)
    for layer, piece in pieces:
        wide = torch.promote_types(piece.dtype, torch.float32)
        if piece.dtype == wide or transforms() or needs_grad(piece):
            yield layer, piece.to(wide)
            continue
        if room.numel() < piece.numel() or room.device != piece.device:
            room = torch.empty(piece.numel(), dtype=wide, device=piece.device)
        yield layer, room[: piece.numel()].view(piece.shape).copy_(piece)


def _row_squares(piece: Tensor) -> Tensor:
    """The sums of squares, float64, of the rows of a piece."""
    rows = piece.reshape(1, 1) if not piece.dim() else piece[:, None] if piece.dim() == 1 else piece.flatten(1)
    most = max(1, _PIECE.get(kind_of(piece), _PIECE_ELSEWHERE) // max(1, min(rows.shape[1], _COLUMNS)))
    sums = [
        _fold(torch.stack([_fold(block.to(torch.float64).square()) for block in some.split(_COLUMNS, 1)], -1)) for some in rows.split(most)
    ]
    return torch.cat(sums)


def _row_sums(named: dict[str, Any], axes: dict[str, tuple[tuple[Axis, ...], ...]]) -> dict[str, Tensor]:
    """{name of each leaf: this rank's part of the sums of squares of its rows}, by name."""
    return {name: _own_rows(named[name], shard_dim(name), axes[name]) for name in sorted(named)}


def _part(x: Tensor, dim: int, axis: Axis) -> Tensor:
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


def _fold(x: Tensor) -> Tensor:
    """The sum over the last dim by halves: its order is that of the size alone, on any device, with any number of threads."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        low, high, odd = x[..., : x.shape[-1] - half], x[..., half:], x[..., x.shape[-1] - half : half]
        x = torch.cat([low + high, odd], -1) if odd.shape[-1] else low + high
    return x.sum(-1)  # of one element, or of none


def _own_rows(x: Any, dim: int, axes: tuple[tuple[Axis, ...], ...]) -> Tensor:
    """The sums of squares, float64 [rows of the whole leaf], of the rows of dim `dim`; zero for the rows of other ranks."""
    over = axes[dim] if x.dim() > dim else ()  # without such a dim there is one row
    layers: dict[int, list[Tensor]] = {}
    for layer, rows in _squared(x, dim == 1, _row_squares):
        layers.setdefault(layer, []).append(rows)
    mine = _fold(torch.stack([torch.cat(sums) for sums in layers.values()], -1))
    start = 0
    for axis in over:
        start = start * axis.size + axis.rank
    size, ranks = mine.shape[0], math.prod(axis.size for axis in over)
    return torch.nn.functional.pad(mine, (start * size, (ranks - 1 - start) * size))
