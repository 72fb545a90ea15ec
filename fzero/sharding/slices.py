"""Which part of a leaf is a rank's: shapes, starts and slices under a Spec; and rows of a layer that are read, written and summed apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fzero.sharding.mesh import Mesh
from fzero.sharding.spec import Spec

PAGE = 4096  # bytes: what a direct transfer to or from a disk begins and ends at
STACKED = "blocks/"  # leaves whose first dim counts the layers
Dims = list[tuple[str, ...]]

MOST = 1 << 22  # elements of a piece


def pieces(shape: tuple[int, ...], most: int = MOST) -> list[tuple[int, int]]:
    """Ranges of the first dim of a layer of `shape`, of at most about `most` elements each, that begin at pages in every dtype."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if rows * row <= most:
        return [(0, rows)]
    step = PAGE // math.gcd(PAGE, row)
    length = max(step, most // row // step * step)
    return [(at, min(at + length, rows)) for at in range(0, rows, length)]


def walk(x: Any, stacked: bool) -> Iterator[tuple[int, Tensor]]:
    """(layer, rows of it) for all pieces of a leaf, in order: a tensor, or one that streams itself by a method of this name."""
    if not isinstance(x, Tensor):
        yield from x.walk()
        return
    for i, layer in enumerate(x if stacked else [x]):
        for start, end in pieces(tuple(layer.shape)):
            yield i, layer[start:end] if layer.dim() else layer


def shard_dim(name: str) -> int:
    """The dim of a leaf that dp shards: the first of a layer."""
    return 1 if name.startswith(STACKED) else 0


def check_dims(name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> None:
    """Raise ValueError where a spec has another number of dims than the leaf, or its axes do not divide a dim."""
    if len(spec.dims) != len(shape):
        raise ValueError(f"{name}: its spec {spec} has {len(spec.dims)} dims and the leaf has {len(shape)}")
    for dim, (size, axes) in enumerate(zip(shape, spec.dims)):
        parts = math.prod(sizes[a] for a in axes)
        if size % parts:
            said = " x ".join(f"{a}={sizes[a]}" for a in axes if sizes[a] > 1)
            fits = [str(n) for n in range(1, 65) if size % n == 0]
            padded = -(-size // parts) * parts
            raise ValueError(
                f"{name}: dim {dim} has size {size}, not divisible by {said}; use one of {', '.join(fits)}, or pad it to {padded}"
            )


def local_numel(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> int:
    """The elements that one rank holds of a leaf."""
    return math.prod(shape) // math.prod(sizes[a] for a in spec.axes)


def window(shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) per dim of this rank's slice of a leaf of `shape`."""
    start, size = [], []
    for dim, whole in enumerate(shape):
        at, parts = 0, 1
        for name in spec.dims[dim] if dim < len(spec.dims) else ():
            at, parts = at * mesh[name].size + mesh[name].rank, parts * mesh[name].size
        size.append(whole // parts)
        start.append(at * size[-1])
    return tuple(start), tuple(size)


def _used_dims(spec: Spec, mesh: Mesh, rank: int, leaf: str) -> Dims:
    """The axes of size above 1 that shard each of `rank` dims; raises ValueError where the spec has more dims."""
    if len(spec.dims) > rank:
        raise ValueError(f"{leaf or 'tensor'}: its spec {spec} has {len(spec.dims)} dims and the tensor has {rank}")
    dims = [tuple(axis for axis in axes if mesh[axis].size > 1) for axes in spec.dims]
    return dims + [()] * (rank - len(dims))


def local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh, *, leaf: str = "") -> tuple[int, ...]:
    """The shape of a rank's part in layout `spec` of a tensor of this shape.

    Raises ValueError where the axes of a dim do not divide it, the spec has too many dims, or names an axis that the mesh has not.
    """
    local = list(shape)
    for dim, axes in enumerate(_used_dims(spec, mesh, len(local), leaf)):
        ranks = math.prod(mesh[axis].size for axis in axes)
        if local[dim] % ranks:
            sizes = ", ".join(f"{axis}={mesh[axis].size}" for axis in axes)
            fit = f"pad it to {-(-local[dim] // ranks) * ranks}, or leave it whole"
            raise ValueError(f"{leaf or 'tensor'}: dim {dim} has size {local[dim]}, not divisible by {ranks} ({sizes}); {fit}")
        local[dim] //= ranks
    return tuple(local)


def whole_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the tensor whose part on a rank, in layout `spec`, has this shape: the inverse of `local_shape`."""
    dims = _used_dims(spec, mesh, len(shape), "")
    return tuple(size * math.prod(mesh[axis].size for axis in axes) for size, axes in zip(shape, dims))


def shard(x: Tensor, spec: Spec, mesh: Mesh, *, leaf: str = "") -> Tensor:
    """This rank's part of the whole tensor `x` in layout `spec`, as a view of `x`; nothing is communicated.

    Raises ValueError where the layout does not fit (see `local_shape`), and where the spec owes a sum.
    """
    if spec.partial:
        raise ValueError(f"{leaf or 'tensor'}: {spec} owes a sum; a whole tensor has no parts of one")
    local = local_shape(x.shape, spec, mesh, leaf=leaf)
    for dim, axes in enumerate(_used_dims(spec, mesh, x.dim(), leaf)):
        place = 0
        for axis in axes:
            place = place * mesh[axis].size + mesh[axis].rank
        x = x.narrow(dim, place * local[dim], local[dim])
    return x
