"""Functions for optimizers that must see more than their own shard of a leaf.

`WHOLE` serves leaves that are whole on every rank; `sharded(plan.opt, mesh, like=plan.like)` those of a plan, which a
train step gives a transformation by its `on`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import sharding
from fzero.comm.axes import DP
from fzero.comm.collectives import all_gather, all_to_all, psum, pvary
from fzero.comm.communicator import Axis
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.gpu import pinned
from fzero.core.gpu_copies import copy_in
from fzero.core.pytree import Tree, nearest
from fzero.kernels.optim_leaf import safe_sqrt
from fzero.optim.base import NEEDS, UNITS, GradientTransformation, expect_optimizer
from fzero.optim.norm import (
    Layers,
    LeafRows,
    Squared,
    _fold,
    _piece_square,
    _row_squares,
    _row_sums,
    _set_sums,
    _squares_of,
    _wide,
    global_norm,
)
from fzero.sharding import Mesh, Plan
from fzero.sharding.leaf_plan import LeafPlan
from fzero.sharding.slices import Window, check_dims, local_shape, local_windows, narrow_part, shard_dim
from fzero.sharding.spec import Spec

# Up to this many elements, sum over ranks by one exchange, not by a scatter and a gather.
_SMALL = 1 << 12

Dims = Sequence[int] | None


class ShardedLeaves(NamedTuple):
    """Functions with which an optimizer looks beyond its own shards of the leaves; `sharded` makes them.

    They take a leaf's full name ("blocks/attn/w_q") and tensors of this rank. `dims` are dims of the leaf, counted from
    the front or (negative) from the back; None is all of them. Where a shard is asked for, that of some layers of a
    stacked leaf serves as well. What comes back is for use with the shard: its gradient is this rank's own part.

    >>> plan = fzero.zero_plan(1, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4}, rank=3))
    >>> shards = sharded(plan.opt, plan.mesh, like=plan.like)
    >>> shards.parts("w", (0,)), shards.parts("w", (1,))
    (4, 1)
    >>> shards.windows("w", (2, 2))  # this rank's rows begin at row 6 of 8
    ([Window(start=(6, 0), size=(2, 2), offset=0)], (8, 2))
    """

    parts: Callable[[str, Dims], int]  # (name, dims) -> into how many parts those dims are cut: 1 if they are whole
    gather: Callable[..., Tensor]  # (name, shard, dims=None) -> the shard with those dims whole
    # (name, x, dims=None) -> this rank's part of an x with those dims whole: no communication
    local: Callable[..., Tensor]
    # (name, x of any shape, dims) -> summed over the axes that shard those dims
    psum: Callable[[str, Tensor, Dims], Tensor]
    # (name, x of any shape, dims) -> its largest value, element by element, over the axes that shard those dims
    amax: Callable[[str, Tensor, Dims], Tensor]
    # (name, shard, f) -> the shard of f(x), with whole matrices in the last two dims of x, of some of the layers
    on_matrices: Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]
    norm: Callable[[Tree], Tensor]  # tree of shards -> the 2-norm of the whole tree, the same on all ranks
    vary: Callable[[str, Tensor], Tensor]  # (name, a replicated value) -> the same, for use with the shard
    # (name, shape of the shard) -> (the boxes of the whole leaf that make up the shard, shape of the whole leaf)
    windows: Callable[[str, tuple[int, ...]], tuple[list[Window], tuple[int, ...]]]
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]]  # (name, shape of the shard) -> that of the whole leaf
    square: Callable[[Tensor], Tensor]  # a piece of a leaf (see sharding.iterate_blocks) -> its squares, for `norm`
    # of a plan with codec grads=1bit: the sums that its optimizer makes of this rank's own terms
    signs: sharding.SignSums | None = None


WHOLE = ShardedLeaves(
    parts=lambda name, dims: 1,
    gather=lambda name, x, dims=None: x,
    local=lambda name, x, dims=None: x,
    psum=lambda name, x, dims: x,
    amax=lambda name, x, dims: x,
    on_matrices=lambda name, x, f: f(x),
    norm=global_norm,
    vary=lambda name, x: x,
    windows=lambda name, shape: ([Window((0,) * len(shape), shape)], shape),
    shape=lambda name, shape: shape,
    square=_piece_square,
)


@checked()
def sharded(specs: Tree, mesh: Mesh, *, like: Tree, ordered: bool = False) -> ShardedLeaves:
    """Return the ShardedLeaves of leaves that rest on `mesh` as `specs` says.

    specs: a tree of Specs, such as a plan's `opt`. like: the tree of their whole shapes, such as a plan's `like`.
    A tree handed to `norm` may have some of the leaves only, and any structure that gives them their names.
    ordered: `norm` has the same bits however many ranks of dp share the leaves, one process included: squares are
    summed in float64, first within a row of the dim that dp shards, which lies whole on a rank (or in parts on the
    ranks of other axes), then over the rows of the whole leaf, always in the same order.

    Communicates: `norm` one psum per axis that shards any leaf, of one number per set of axes, or if ordered of one
    float64 number per row; `on_matrices` an all_to_all per axis there and back if the layers divide by its ranks, else
    a gather; `gather`, `psum` and `amax` one collective per axis; the others nothing.
    Raises ValueError for a leaf without a shape, dims that their axes do not divide, and, if ordered, an axis dp on
    another dim than that of the rows; and in each function for a leaf without a spec.

    >>> plan = fzero.zero_plan(1, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4}, rank=1))
    >>> shards = sharded(plan.opt, plan.mesh, like=plan.like)
    >>> shards.gather("w", torch.empty(2, 2, device="meta")).shape
    torch.Size([8, 2])
    >>> shards.local("w", torch.arange(16).reshape(8, 2))
    tensor([[4, 5],
            [6, 7]])
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in pytree.named_leaves(like).items()}
    named_specs = pytree.named_leaves(specs)
    axes = {name: _axes_of(name, spec, shapes, mesh) for name, spec in named_specs.items()}
    if ordered:
        _expect_whole_rows(axes)
    rows = {name: _local_rows(name, spec, shapes[name], mesh) for name, spec in named_specs.items()} if ordered else {}

    def axes_over(name: str, dims: Dims) -> list[tuple[int, Axis]]:
        # Innermost first: the order in which parts are put together.
        all_dims = _dims_of(name, axes)
        chosen = range(len(all_dims)) if dims is None else sorted({range(len(all_dims))[d] for d in dims})
        return [(dim, axis) for dim in chosen for axis in reversed(all_dims[dim])]

    def parts(name: str, dims: Dims) -> int:
        return math.prod(axis.size for _, axis in axes_over(name, dims))

    def gather(name: str, x: Tensor, dims: Dims = None) -> Tensor:
        return _gather(name, x, axes_over(name, dims), named_specs[name], mesh)

    def local(name: str, x: Tensor, dims: Dims = None) -> Tensor:
        return _local_shard(x, axes_over(name, dims), named_specs[name])

    def total(name: str, x: Tensor, dims: Dims) -> Tensor:
        return _total(name, x, axes_over(name, dims))

    def amax(name: str, x: Tensor, dims: Dims) -> Tensor:
        return _amax(name, x, axes_over(name, dims))

    def on_matrices(name: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return _run_whole(name, x, f, axes_over(name, (-2, -1)), named_specs[name], mesh)

    def norm(tree: Tree) -> Tensor:
        named: dict[str, Any] = pytree.named_leaves(tree)
        used = {name: tuple(sorted(axis.name for _, axis in axes_over(name, None))) for name in named}
        layers = _local_layers(named, named_specs, shapes, mesh) if ordered else {}
        sums = _row_sums(named, rows, layers) if ordered else _set_sums(named, used, _wide(tree))
        _sum_over_ranks(sums, used, mesh)
        sums |= {name: _fold(sums[name].view(-1, shape[0])) for name, (_, shape) in layers.items()}
        leaf_totals = [_fold(leaf_sums) for leaf_sums in sums.values()]
        total = _fold(torch.stack(_colocate(leaf_totals))) if sums else torch.zeros(())
        return safe_sqrt(total).to(_wide(tree))

    def vary(name: str, x: Tensor) -> Tensor:
        for _, axis in axes_over(name, None):
            x = pvary(x, axis, leaf=name)
        return x

    def windows(name: str, shape: tuple[int, ...]) -> tuple[list[Window], tuple[int, ...]]:
        axes_over(name, None)  # refuses a leaf that is not there
        size = local_shape(shapes[name], named_specs[name], mesh)
        assert size == shape, f"{name}: the shard has shape {shape}, and {size} by its spec"
        return local_windows(shapes[name], named_specs[name], mesh), shapes[name]

    square = _row_squares if ordered else _piece_square
    return ShardedLeaves(
        parts, gather, local, total, amax, on_matrices, norm, vary, windows, lambda name, _: shapes[name], square
    )


def _gather(name: str, x: Tensor, axes: list[tuple[int, Axis]], spec: Spec, mesh: Mesh) -> Tensor:
    for dim, axis in axes:
        if dim == 0 and spec.rows:
            x = sharding.gather_layers(x, spec, mesh, all_gather, leaf=name)
        elif axis.name == spec.part_axis:
            x = sharding.gather_parts(x, spec, mesh, all_gather, leaf=name)
        else:
            x = all_gather(x, axis, dim, leaf=name)
    return x


def _total(name: str, x: Tensor, axes: list[tuple[int, Axis]]) -> Tensor:
    for _, axis in axes:
        if x.numel() <= _SMALL:
            x = functools.reduce(torch.add, all_gather(x[None], axis, 0, leaf=name).unbind(0))
        else:
            x = pvary(psum(x, axis, leaf=name), axis, leaf=name)
    return x


def _amax(name: str, x: Tensor, axes: list[tuple[int, Axis]]) -> Tensor:
    for _, axis in axes:
        x = all_gather(x[None], axis, 0, leaf=name).amax(0)
    return x


def _local_shard(x: Tensor, axes: list[tuple[int, Axis]], spec: Spec) -> Tensor:
    for dim, axis in reversed(axes):
        if dim == 0 and spec.rows:
            x = x.index_select(0, torch.tensor(spec.rows[axis.rank], dtype=torch.int64, device=x.device))
        elif axis.name == spec.part_axis:
            x = x.narrow(dim, sum(spec.parts[: axis.rank]), spec.parts[axis.rank])
        else:
            x = narrow_part(x, axis.rank, axis.size, dim)
    return x


def _local_rows(name: str, spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> LeafRows:
    """The rows of a leaf that this rank has."""
    dim, windows = shard_dim(name), local_windows(shape, spec, mesh, leaf=name)
    if dim >= len(shape):
        return LeafRows()
    return LeafRows(windows[0].start[dim] if windows else 0, local_shape(shape, spec, mesh)[dim], shape[dim])


def _local_layers(
    named: dict[str, Any], specs: dict[str, Spec], shapes: dict[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, Layers]:
    """The layers that this rank has of leaves whose layers are on several ranks."""
    with_rows = [name for name in named if name in specs and specs[name].rows]
    return {name: (specs[name].rows[mesh.pp.rank], shapes[name]) for name in with_rows}


def shards_of(plan: Plan) -> ShardedLeaves:
    """The ShardedLeaves of a plan."""
    shards = sharded(plan.opt, plan.mesh, like=plan.like, ordered=plan.reduce == "canonical")
    return shards._replace(signs=sharding.SignSums(plan)) if plan.signs else shards


def shards_of_sums(plan: Plan) -> ShardedLeaves:
    """The ShardedLeaves of what a plan's optimizer is given, with terms as parts."""
    if not plan.signs:
        return shards_of(plan)
    specs = {name: spec for name, (_, spec) in plan.terms.items()}
    like = {name: torch.empty(shape, device="meta") for name, (shape, _) in plan.terms.items()}
    return sharded(specs, plan.mesh, like=like)


def squares(shards: ShardedLeaves, tree: Tree) -> dict[str, Squared]:
    """{name: the squares of a leaf}, which `shards.norm` takes in place of the tree, with the same bits."""
    return {
        name: _squares_of(leaf, shard_dim(name) == 1, shards.square) for name, leaf in pytree.named_leaves(tree).items()
    }


@checked(tx=expect_optimizer)
def bind(tx: GradientTransformation, shards: ShardedLeaves) -> GradientTransformation:
    """The same transformation on leaves that are cut as `shards` says; `tx` itself if it is elementwise.

    >>> import torch, fzero
    >>> from fzero import optim
    >>> plan = fzero.zero_plan(1, {"w": torch.zeros(4, 2)}, fzero.fake_mesh({"dp": 2}))
    >>> tx = bind(optim.clip_by_global_norm(1.0), sharded(plan.opt, plan.mesh, like=plan.like))
    """
    return tx if tx.with_shards is None else tx.with_shards(shards)


def on_shards(
    make: Callable[[ShardedLeaves], GradientTransformation], needs: str = "elementwise"
) -> GradientTransformation:
    """`make(WHOLE)`, which `bind` makes anew; its `needs` are those before it is bound."""

    def with_shards(shards: ShardedLeaves) -> GradientTransformation:
        return make(shards)._replace(needs=needs if shards is WHOLE else "elementwise", with_shards=with_shards)

    return with_shards(WHOLE)


def around(
    txs: Sequence[GradientTransformation], remake: Callable[..., GradientTransformation], tx: GradientTransformation
) -> GradientTransformation:
    """`tx`, which is `remake(*txs)`: it needs what the neediest of them does, and is bound by binding them."""
    return tx._replace(
        needs=max((inner.needs for inner in txs), key=NEEDS.index),
        unit=max((inner.unit for inner in txs), key=UNITS.index),
        with_shards=(lambda shards: remake(*(bind(inner, shards) for inner in txs)))
        if any(inner.with_shards for inner in txs)
        else None,
    )


def bind_to_plan(tx: GradientTransformation, plan: Plan) -> GradientTransformation:
    """`tx` on the shards of a plan; raises ValueError where the plan cuts what it must see whole."""
    tx = bind(tx, shards_of(plan))
    if tx.needs == "elementwise":
        return tx
    cut = [name for name, leaf in plan.trained_leaves.items() if cuts(leaf, tx.needs)]
    if cut:
        unit = "rows" if tx.needs == "row" else "leaves"
        raise ValueError(
            f"the optimizer needs whole {unit} (needs={tx.needs!r}) and the plan cuts "
            f"{'those of ' if tx.needs == 'row' else ''}{cut[0]} and {len(cut) - 1} more; "
            "give it an `on`, which makes it one for shards (see fzero.optim.GradientTransformation), or use stage 0"
        )
    return tx


def cuts(leaf: LeafPlan, needs: str) -> bool:
    """Whether the optimizer's shards of a leaf are cut in a dim that `needs` (see GradientTransformation) has whole."""
    dims = [*leaf.opt.dims, *[()] * (len(leaf.shape) - len(leaf.opt.dims))]  # a Spec may leave out trailing ones
    needed_dims = dims if needs == "tree" else dims[shard_dim(leaf.name) :][0 if needs == "matrix" else -1 :]
    return any(leaf.sizes[axis] > 1 for axes in needed_dims for axis in axes)


def layer_norm2(shards: ShardedLeaves, name: str, x: Tensor, lead: int) -> Tensor:
    """The 2-norm of each layer of a leaf of which `x` is the shard, over all dims but the first `lead`."""
    dims = tuple(range(lead, x.dim()))
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True) if dims else x.abs()
    return safe_sqrt(shards.psum(name, norm.square(), dims))  # the root of a square is exact


def rms(shards: ShardedLeaves, name: str, x: Tensor, lead: int) -> Tensor:
    """The root mean square of each layer of a leaf of which `x` is the shard."""
    elements = math.prod(shards.shape(name, tuple(x.shape))[lead:])
    return layer_norm2(shards, name, x, lead) / math.sqrt(max(1, elements))


def _expect_whole_rows(axes: dict[str, tuple[tuple[Axis, ...], ...]]) -> None:
    for name, dims in axes.items():
        for dim, dim_axes in enumerate(dims):
            if dim != shard_dim(name) and any(axis.name == DP for axis in dim_axes):
                raise ValueError(
                    f"{name}: dp shards dim {dim}; ordered sums need it on dim {shard_dim(name)}; use ordered=False"
                )


def _dims_of(name: str, axes: dict[str, tuple[tuple[Axis, ...], ...]]) -> tuple[tuple[Axis, ...], ...]:
    if name not in axes:
        raise ValueError(
            f"sharded: there is no leaf {name!r}{nearest(name, axes)}; make it from the plan of these parameters"
        )
    return axes[name]


def _sum_over_ranks(sums: dict, used: dict, mesh: Mesh) -> None:
    for axis in mesh.axes:
        if keys := [key for key in sums if axis.name in used[key]]:
            summed = psum(torch.cat([sums[key] for key in keys]), axis, leaf="norm")
            sums.update(zip(keys, summed.split([sums[key].shape[0] for key in keys])))


def _run_whole(
    name: str, x: Tensor, f: Callable[[Tensor], Tensor], axes: list[tuple[int, Axis]], spec: Spec, mesh: Mesh
) -> Tensor:
    if not axes:
        return f(x)
    (dim, axis), *outer_axes = axes
    if x.dim() > 2 and x.shape[0] % axis.size == 0 and axis.name != spec.part_axis:
        layers = _run_whole(name, all_to_all(x, axis, 0, dim, leaf=name), f, outer_axes, spec, mesh)
        return all_to_all(layers, axis, dim, 0, leaf=name)
    return _local_shard(
        _run_whole(name, _gather(name, x, axes[:1], spec, mesh), f, outer_axes, spec, mesh), axes[:1], spec
    )


def _axes_of(name: str, spec: Spec, shapes: dict[str, tuple[int, ...]], mesh: Mesh) -> tuple[tuple[Axis, ...], ...]:
    if name not in shapes:
        raise ValueError(
            f"sharded: {name} has a spec and no shape{nearest(name, shapes)}; give `like` of the same plan"
        )
    full_spec = replace(spec, dims=(*spec.dims, *((),) * (len(shapes[name]) - len(spec.dims))))
    check_dims(name, shapes[name], full_spec, {axis.name: axis.size for axis in mesh.axes})
    return tuple(tuple(mesh[a] for a in dim if mesh[a].size > 1) for dim in full_spec.dims)


def _colocate(sums: list[Tensor]) -> list[Tensor]:
    """The sums on the GPU, if one is there."""
    device = next((x.device for x in sums if x.is_cuda), None)
    if device is None:
        return sums
    return [x if x.is_cuda else copy_in(pinned(x, device), device).use() for x in sums]
