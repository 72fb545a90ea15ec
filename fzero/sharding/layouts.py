"""From one layout on the mesh to another, as a chain of collectives; whole leaves from shards; DTensors in and out.

On each axis a tensor is whole, sharded along a dim, or a part of a sum. A dim that several axes shard is divided by the
first one first, so only its last axis can be removed or added without moving the others.

Digests of whole leaves are the same on every mesh, for 8 bytes a leaf sent between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.comm.axes import TP
from fzero.comm.collectives import all_gather_same, all_to_all, own_slice, psum, psum_scatter
from fzero.comm.rank_tables import device_of, sum_rows
from fzero.core import pytree
from fzero.core.digest import Started, combine, read_digests, start_digest
from fzero.core.pytree import Tree, named_leaves
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import (
    Dims,
    global_shape,
    is_stacked,
    local_shape,
    local_windows,
    part_dim,
    parts_as_chunks,
    sharded_dims,
)
from fzero.sharding.spec import Spec


@torch.no_grad()
def digests(tree: Tree, specs: Tree, mesh: Mesh) -> dict[str, int]:
    """{name: digest of the whole leaf}, from this rank's shards by `specs`; the same on all ranks."""
    named, started = named_leaves(specs), []
    for number, (name, leaf) in enumerate(named_leaves(tree).items()):
        copies, copy = 1, 0
        for axis in mesh.axes:
            # The ranks with the same shard take turns, leaf by leaf, so that each digest is computed once.
            if axis.name not in named[name].axes:
                copies, copy = copies * axis.size, copy * axis.size + axis.rank
        started.append(shard_digests(leaf, named[name], mesh) if number % copies == copy else [])
    # int64 of the same bits, whose sums wrap.
    read = iter(read_digests([digest for parts in started for digest in parts]))
    values = [sum(next(read) for _ in parts) % (1 << 64) for parts in started]
    # The digests of shards add up to that of the leaf, modulo 2^64.
    row = torch.tensor([value - (value >> 63 << 64) for value in values], dtype=torch.int64, device=device_of(mesh))
    with mesh.ledger.phase("digest"):
        sums = sum_rows(row, mesh, leaf="digests")
    return {name: value % (1 << 64) for name, value in zip(named_leaves(tree), sums.tolist())}


def digest_text(tree: Tree, specs: Tree, mesh: Mesh) -> str:
    """One digest of all leaves under their names, in 16 hexadecimal digits."""
    return f"{combine(digests(tree, specs, mesh)):016x}"


def shard_digests(leaf: Tensor, spec: Spec, mesh: Mesh) -> list[Started]:
    """The digests of this rank's shard at its position in the whole leaf; those of all shards add up to the leaf's."""
    x = leaf if isinstance(leaf, Tensor) else leaf.tensor()
    full_shape = global_shape(x.shape, spec, mesh)
    return [start_digest(window.view(x), full_shape, window.start) for window in local_windows(full_shape, spec, mesh)]


if TYPE_CHECKING:  # a second to import
    from torch.distributed.tensor import DTensor


def redistribute(x: Tensor, src: Spec, dst: Spec, mesh: Mesh, *, leaf: str = "") -> Tensor:
    """This rank's shard by `dst` of the tensor of which `x` is this rank's shard by `src`; differentiable.

    On each axis: shard -> shard along another dim (all_to_all), shard -> whole (all_gather), whole -> shard
    (own_slice), owed sum -> whole (psum) or shard (psum_scatter), or no change. A whole tensor is the same on all
    ranks, and so is its cotangent; apply `pvary` to the result if each rank then uses it differently.

    x: the shard, of any dtype. src, dst: layouts of the same memory. leaf: a name for errors and the ledger.

    Communicates: the collectives above, those that make the tensor smaller first. An axis that blocks another one on a
    dim is gathered.
    Raises ValueError if the axes of a dim do not divide it, if `dst` owes a sum that `src` does not, or if the memories
    differ.

    >>> import torch
    >>> from fzero.sharding import Spec, fake_mesh
    >>> mesh = fake_mesh({"dp": 4}, rank=1)
    >>> redistribute(torch.arange(8), Spec(), Spec(("dp",)), mesh)
    tensor([2, 3])
    """
    if src.memory != dst.memory:
        raise ValueError(
            f"redistribute {leaf}: from memory {src.memory} to {dst.memory}; it only moves data between ranks"
        )
    for axis in dst.partial - src.partial:
        if mesh[axis].size > 1:
            raise ValueError(
                f"redistribute {leaf}: {dst} owes a sum over {axis} that {src} does not; a finished sum "
                "cannot be undone"
            )
    if src.rows != dst.rows or src.parts != dst.parts:
        raise ValueError(f"redistribute {leaf}: from {src} to {dst}; what ranks share unevenly stays on them")
    current, goal = (sharded_dims(spec, mesh, x.dim(), leaf) for spec in (src, dst))
    partial = {axis for axis in src.partial - dst.partial if mesh[axis].size > 1}
    local_shape(global_shape(x.shape, src, mesh), dst, mesh, leaf=leaf)
    while (step := _next(current, goal, partial)) is not None:
        kind, name, *dims = step
        axis = mesh[name]
        if kind == "all_to_all":
            x = all_to_all(x, axis, *dims, leaf=leaf)
        elif kind == "psum":
            x = psum(x, axis, leaf=leaf)
        else:
            x = _ALONG_A_DIM[kind](x, axis, dims[0], leaf=leaf)
        _note(current, partial, kind, name, dims)
    return x


_ALONG_A_DIM: dict[str, Callable[..., Tensor]] = {
    "psum_scatter": psum_scatter,
    "own_slice": own_slice,
    "all_gather": all_gather_same,
}
Step = tuple[str, str] | tuple[str, str, int] | tuple[str, str, int, int]  # (collective, axis, its dims)


def _next(current: Dims, goal: Dims, partial: set[str]) -> Step | None:
    """The next collective on the way from `current` to `goal`, first those that shrink the tensor; None at the goal."""
    # An axis can be added to a dim once all axes before it, and no others, shard the dim.
    ready = {
        want[len(axes)]: d
        for d, (axes, want) in enumerate(zip(current, goal))
        if len(axes) < len(want) and want[: len(axes)] == axes
    }
    # Only the last axis of a dim can be removed from it; it must be if it is not the goal's axis there.
    leaving = {axes[-1]: d for d, (axes, want) in enumerate(zip(current, goal)) if axes != want[: len(axes)]}
    sharding = {axis for axes in current for axis in axes}
    for axis, dim in ready.items():
        if axis in partial:
            return "psum_scatter", axis, dim
        if axis not in sharding:
            return "own_slice", axis, dim
    for axis, dim in leaving.items():
        if axis in ready:
            return "all_to_all", axis, ready[axis], dim
    goal_axes = {axis for want in goal for axis in want}
    # Sorted, as sets have no order that all ranks share.
    for axis in sorted(partial - goal_axes):
        return "psum", axis
    # Last, as a gather makes the tensor larger; first the axes that the goal does not have.
    for axis, dim in sorted(leaving.items(), key=lambda item: item[0] in goal_axes):
        return "all_gather", axis, dim
    assert current == goal and not partial, f"no way from {current} to {goal}, owed {partial}"
    return None


def _note(current: Dims, partial: set[str], kind: str, axis: str, dims: Sequence[int]) -> None:
    """Apply one step to the layout `current` and the sums `partial`."""
    partial.discard(axis)
    if kind in ("all_to_all", "all_gather"):
        current[dims[-1]] = current[dims[-1]][:-1]
    if kind in ("all_to_all", "psum_scatter", "own_slice"):
        current[dims[0]] = (*current[dims[0]], axis)


def gather_full(x: Tensor, spec: Spec, mesh: Mesh, *, leaf: str = "") -> Tensor:
    """The whole tensor, on every rank, from this rank's shard `x` of it by `spec`."""
    if spec.rows:
        x, spec = gather_layers(x, spec, mesh, leaf=leaf), Spec(((), *spec.dims[1:]), parts=spec.parts)
    if spec.parts:
        dim = part_dim(spec)
        for axis in reversed(spec.dims[dim][1:]):
            x = all_gather_same(x, mesh[axis], dim, leaf=leaf)
        x = gather_parts(x, spec, mesh, leaf=leaf)
        spec = Spec((*spec.dims[:dim], (), *spec.dims[dim + 1 :]))
    return redistribute(x, Spec(spec.dims), Spec(), mesh, leaf=leaf)


def gather_layers(
    x: Tensor, spec: Spec, mesh: Mesh, gather: Callable[..., Tensor] = all_gather_same, *, leaf: str = ""
) -> Tensor:
    """The tensor with the layers of all ranks of pp, in their order, from this rank's, which `spec.rows` numbers."""
    # A gather needs equal sizes: ranks with fewer layers send zeros, which `index_select` leaves out.
    max_layers = max(map(len, spec.rows))
    padded = torch.cat([x, x.new_zeros((max_layers - x.shape[0], *x.shape[1:]))])
    places = {row: rank * max_layers + i for rank, rows in enumerate(spec.rows) for i, row in enumerate(rows)}
    order = torch.tensor([places[row] for row in range(len(places))], device=x.device)
    return gather(padded, mesh.pp, 0, leaf=leaf).index_select(0, order)


def gather_parts(
    x: Tensor, spec: Spec, mesh: Mesh, gather: Callable[..., Tensor] = all_gather_same, *, leaf: str = ""
) -> Tensor:
    """The tensor with the parts of all ranks, in their order, from this rank's, whose sizes `spec.parts` has."""
    dim, max_size = part_dim(spec), max(spec.parts)
    padding = x.new_zeros((*x.shape[:dim], max_size - x.shape[dim], *x.shape[dim + 1 :]))
    full = gather(torch.cat([x, padding], dim), mesh[spec.part_axis], dim, leaf=leaf)
    return torch.cat([chunk.narrow(dim, 0, size) for chunk, size in zip(full.split(max_size, dim), spec.parts)], dim)


@torch.no_grad()
def gather_on_first(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """The tree of whole leaves on rank 0, and () on every other rank, from this rank's shards by `specs`."""
    named, first = pytree.named_leaves(specs), mesh.rank == 0

    def gather(name: str, leaf: Tensor) -> Tensor:
        spec = named[name]
        if not any(mesh[axis].size > 1 for axis in spec.axes):
            return leaf
        if not is_stacked(name) or spec.dims[0]:
            full = gather_full(leaf, spec, mesh, leaf=name)
            return full if first else leaf
        inner, layers = spec.layer, []
        # Layer by layer, so that no rank but the first has more than one whole layer.
        for layer in leaf:
            full = gather_full(layer, inner, mesh, leaf=name)
            layers += [full] if first else []
        return torch.stack(layers) if first else leaf

    out = pytree.map_named(gather, tree)
    return out if first else ()


def to_dtensor(x: Tensor, spec: Spec, mesh: Mesh) -> DTensor:
    """The DTensor on `mesh.device_mesh` whose local tensor is `x`, this rank's shard by `spec`.

    It shares the memory of `x`.
    Communicates: nothing.
    Raises ValueError on a mesh of one process, which has no DeviceMesh.

    >>> import torch
    >>> from fzero.sharding import Spec, one_process
    >>> to_dtensor(torch.ones(2), Spec(), one_process())
    Traceback (most recent call last):
    ValueError: spec []: a mesh of one process has no DeviceMesh, and a tensor on it no placements
    """
    from torch.distributed.tensor import DTensor

    shape = global_shape(x.shape, spec, mesh)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x, mesh.device_mesh, spec.placements(mesh), run_check=False, shape=torch.Size(shape), stride=stride
    )


def from_dtensor(t: DTensor, mesh: Mesh) -> tuple[Tensor, Spec]:
    """Return (x, spec) of a DTensor: its local tensor and its layout on `mesh`; the inverse of `to_dtensor`.

    x shares the memory of the DTensor.
    Communicates: nothing.
    Raises ValueError if its DeviceMesh is not that of `mesh`, or if it is partial other than by a sum.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore  # in place of a second process
    >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    >>> mesh = make_mesh({"dp": 2}, device="cpu")
    >>> t = to_dtensor(torch.zeros(4, 3), Spec(("dp", None)), mesh)
    >>> x, spec = from_dtensor(t, mesh)
    >>> print(t.shape, x.shape, spec)
    torch.Size([8, 3]) torch.Size([4, 3]) [·/dp, ·]
    >>> dist.destroy_process_group()
    """
    from fzero.core.torch_private import StridedShard

    if t.device_mesh != mesh.device_mesh:
        raise ValueError(
            f"a DTensor on {t.device_mesh} is not on this mesh, {mesh.device_mesh}; make it on mesh.device_mesh"
        )
    dims: Dims = [()] * t.dim()
    partial = set()
    # From the last axis to the first: each finds those that divide its dim before it.
    named_placements: list[tuple[str, Any]] = list(zip(t.device_mesh.mesh_dim_names or (), t.placements))
    for name, placement in reversed(named_placements):
        if placement.is_partial():
            if placement.reduce_op != "sum":
                raise ValueError(
                    f"a DTensor with {placement} over {name}: only sums are owed here; redistribute it first"
                )
            partial.add(name)
        elif not placement.is_replicate():
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            axes, position = dims[placement.dim], 0
            while factor > 1:
                factor //= mesh[axes[position]].size
                position += 1
            dims[placement.dim] = (*axes[:position], name, *axes[position:])
    parts = next((parts_as_chunks(size, mesh.tp.size) for size, axes in zip(t.shape, dims) if axes == (TP,)), ())
    return t.to_local(), Spec(tuple(dims), frozenset(partial), parts=parts if len(set(parts)) > 1 else ())
