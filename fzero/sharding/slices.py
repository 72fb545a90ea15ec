"""All arithmetic of a rank's slice of a leaf: shapes, starts and views under a Spec, random values, blocks of rows."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.comm.axes import PP, TP
from fzero.core import prng
from fzero.core.storage import PAGE
from fzero.sharding.spec import Spec, runs_of

if TYPE_CHECKING:
    from fzero.sharding.mesh import Mesh

Index = TypeVar("Index", int, Tensor)
RUN = 1 << 11  # contiguous elements from which a run is drawn by a call of its own
CHUNK = 1 << 13  # elements that are drawn at a time if runs are shorter


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # the shape of a leaf, start and size of a part of it


def draw_leaf(key: Tensor, box: Box, mean: float, std: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A part of the leaf prng.normal(key, shape, mean, std), or `mean` if std is 0; the same bits whatever the part."""
    shape, start, size = box
    if dtype.is_floating_point:
        if std == 0.0:
            return torch.full(size, mean, dtype=dtype, device=device)
        return draw_normal_box(key, shape, start, size, mean, std, dtype, device)
    if std == 0.0:
        return torch.full(size, int(mean), dtype=dtype, device=device)
    limits = torch.iinfo(dtype)
    normal = draw_normal_box(key, shape, start, size, mean, std, torch.float32, device)
    return normal.round().clamp(limits.min, limits.max).to(dtype)


def draw_normal_box(
    key: Tensor,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
    mean: float,
    std: float,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """The elements [start, start + size) of prng.normal(key, shape, mean, std)."""
    if tuple(size) == tuple(shape):
        return prng.normal(key, shape, mean, std, dtype=dtype).to(device)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = max(d for d in range(len(shape)) if size[d] != shape[d])
    run, parts = math.prod(size[last:]), []
    if run >= RUN:
        for i in range(math.prod(size[:last])):
            first = _global(i, start[:last], size[:last], strides) + start[last] * strides[last]
            parts.append(prng.normal(key, (run,), mean, std, dtype=dtype, first=first))
    else:
        for begin in range(0, math.prod(size), CHUNK):
            local = torch.arange(begin, min(begin + CHUNK, math.prod(size)), device=key.device)
            parts.append(
                prng.normal(key, local.shape, mean, std, dtype=dtype, index=_global(local, start, size, strides))
            )
    return torch.cat(parts).reshape(size).to(device)


def _global(local: Index, start: tuple[int, ...], size: tuple[int, ...], strides: list[int]) -> Index:
    """The index in the whole leaf of element number `local` of a slice."""
    index = local * 0
    for dim in reversed(range(len(size))):
        index = index + (local % size[dim] + start[dim]) * strides[dim]
        local = local // size[dim]
    return index


# Leaves whose first dim counts layers: those of a model's stack, or of one of its stacks, such as "blocks_dense/w_in".
STACKED = r"^blocks(_\w+)?/"
MOST_ELEMENTS = 1 << 22  # of a row block
Dims = list[tuple[str, ...]]  # for each tensor dim the axes of size above 1 that shard it


# ---- a rank's slice under a spec ----


def sharded_dims(spec: Spec, mesh: Mesh, dims: int, leaf: str = "") -> Dims:
    """The axes of size above 1 that shard each of a tensor's `dims` dims."""
    if len(spec.dims) > dims:
        raise ValueError(f"{leaf or 'tensor'}: its spec {spec} has {len(spec.dims)} dims and the tensor has {dims}")
    used = [tuple(axis for axis in axes if mesh[axis].size > 1) for axes in spec.dims]
    return used + [()] * (dims - len(used))


def ranks_per_dim(spec: Spec, mesh: Mesh, dims: int, leaf: str = "") -> list[int]:
    """The number of ranks that each of a tensor's `dims` dims is divided among."""
    return [math.prod(mesh[axis].size for axis in axes) for axes in sharded_dims(spec, mesh, dims, leaf)]


def local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh, *, leaf: str = "") -> tuple[int, ...]:
    """The shape of a rank's shard by `spec` of a tensor of this shape. leaf: its name, for errors.

    Raises ValueError if the axes of a dim do not divide it, or if the spec has too many dims or an axis that the mesh
    has not.

    >>> from fzero.sharding import Spec, fake_mesh
    >>> local_shape((8, 6), Spec.parse("[D/dp, F/tp]"), fake_mesh({"dp": 4, "tp": 2}))
    (2, 3)
    """
    dims = sharded_dims(spec, mesh, len(shape), leaf)
    local = list(shape)
    for dim, axes in enumerate(dims):
        if spec.rows and dim == 0:
            check_rows(leaf or "tensor", local[0], spec, mesh.pp.size)
            local[0] = len(spec.rows[mesh.pp.rank])
            continue
        if spec.parts and dim == part_dim(spec):
            check_parts(leaf or "tensor", local[dim], spec, {axis: mesh[axis].size for axis in spec.dims[dim]})
            local[dim], axes = spec.parts[mesh[spec.part_axis].rank], axes[1:]
        ranks = math.prod(mesh[axis].size for axis in axes)
        if local[dim] % ranks:
            sizes = ", ".join(f"{axis}={mesh[axis].size}" for axis in axes)
            fit = f"pad it to {-(-local[dim] // ranks) * ranks}, or leave it whole"
            raise ValueError(
                f"{leaf or 'tensor'}: dim {dim} has size {local[dim]}, not divisible by {ranks} ({sizes}); {fit}"
            )
        local[dim] //= ranks
    return tuple(local)


def global_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole tensor, from that of a rank's shard by `spec`."""
    full = [size * ranks for size, ranks in zip(shape, ranks_per_dim(spec, mesh, len(shape)))]
    full = [sum(spec.parts) if spec.parts and dim == part_dim(spec) else size for dim, size in enumerate(full)]
    return (sum(map(len, spec.rows)), *full[1:]) if spec.rows else tuple(full)


class Window(NamedTuple):
    """A box of a whole tensor, all of which one rank holds."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int = 0  # where it begins along the first dim of the rank's shard

    def view(self, shard: Tensor) -> Tensor:
        """The view of the box in the shard."""
        return shard.narrow(0, self.offset, self.size[0]) if self.size else shard


def local_windows(shape: Sequence[int], spec: Spec, mesh: Mesh, *, leaf: str = "") -> list[Window]:
    """The windows along the first dim that make up this rank's slice: one for each run of the spec's rows.

    >>> from fzero.sharding import Spec, fake_mesh
    >>> spec = Spec(("pp",), rows=((0, 1, 4), (2, 3)))
    >>> [(w.start, w.size, w.offset) for w in local_windows((5, 3), spec, fake_mesh({"pp": 2}))]
    [((0, 0), (2, 3), 0), ((4, 0), (1, 3), 2)]
    """
    size, start = local_shape(shape, spec, mesh, leaf=leaf), []
    for dim, (extent, axes) in enumerate(zip(size, sharded_dims(spec, mesh, len(shape), leaf))):
        base, index = 0, 0
        if spec.parts and dim == part_dim(spec):
            base, axes = sum(spec.parts[: mesh[spec.part_axis].rank]), axes[1:]
        for axis in axes:
            index = index * mesh[axis].size + mesh[axis].rank
        start.append(base + index * extent)
    if not spec.rows:
        return [Window(tuple(start), size)]
    out, offset = [], 0
    for first, number in runs_of(spec.rows[mesh.pp.rank]):
        out.append(Window((first, *start[1:]), (number, *size[1:]), offset))
        offset += number
    return out


def local_slice(
    shape: Sequence[int], spec: Spec, mesh: Mesh, *, leaf: str = ""
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) per dim of this rank's slice by `spec`; raises ValueError for one of several windows."""
    windows = local_windows(shape, spec, mesh, leaf=leaf)
    if not windows:  # no layer is this rank's
        return (0,) * len(shape), local_shape(shape, spec, mesh)
    if len(windows) != 1:
        raise ValueError(f"{leaf or 'tensor'}: a rank's slice by {spec} is {len(windows)} windows of it, not one")
    return windows[0].start, windows[0].size


def narrow_box(x: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """The view of the elements [start, start + size) of a tensor."""
    for dim, (begin, extent) in enumerate(zip(start, size)):
        x = x.narrow(dim, begin, extent)
    return x


def narrow_part(x: Tensor, index: int, parts: int, dim: int) -> Tensor:
    """The view of part number `index` of x cut into `parts` along a dim."""
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size) if parts > 1 else x


def narrow_to(x: Tensor, spec: Spec, mesh: Mesh, *, leaf: str = "") -> Tensor:
    """This rank's slice by `spec` of the whole tensor `x`, as a view of `x`, or a copy of several windows. leaf: its
    name, for errors.

    Communicates: nothing.
    Raises ValueError if the spec owes a sum, and as `local_shape` does.

    >>> import torch
    >>> from fzero.sharding import Spec, fake_mesh
    >>> narrow_to(torch.arange(8), Spec(("dp",)), fake_mesh({"dp": 4}, rank=1))
    tensor([2, 3])
    """
    if spec.partial:
        raise ValueError(f"{leaf or 'tensor'}: {spec} owes a sum; a whole tensor has no parts of one")
    windows = local_windows(x.shape, spec, mesh, leaf=leaf)
    if len(windows) < 2:
        return narrow_box(x, *local_slice(x.shape, spec, mesh, leaf=leaf))
    return torch.cat([narrow_box(x, window.start, window.size) for window in windows])


# ---- the same by the sizes of a mesh's axes alone ----


@functools.cache
def is_stacked(name: str) -> bool:
    """Whether a leaf's first dim counts layers, by its name.

    >>> [is_stacked(name) for name in ("blocks/attn/w_q", "blocks_dense/w_in", "embed/tokens")]
    [True, True, False]
    """
    return re.match(STACKED, name) is not None


def shard_dim(name: str) -> int:
    """The dim of a leaf that dp shards: the first of a layer."""
    return 1 if is_stacked(name) else 0


def largest_block(sizes: Iterable[int], max_block: int) -> int:
    """The largest power of two from 16 to `max_block` that divides all of these sizes; 0 if none does.

    >>> largest_block([64, 96], 4096), largest_block([24], 4096)
    (32, 0)
    """
    common = math.gcd(*sizes)
    return max((n for n in (1 << i for i in range(4, max_block.bit_length())) if common % n == 0), default=0)


def check_dims(name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if a spec's dims or axes do not fit a leaf."""
    if len(spec.dims) != len(shape):
        raise ValueError(f"{name}: its spec {spec} has {len(spec.dims)} dims and the leaf has {len(shape)}")
    for dim, (size, axes) in enumerate(zip(shape, spec.dims)):
        if spec.rows and dim == 0:
            check_rows(name, size, spec, sizes[PP])
            continue
        if spec.parts and dim == part_dim(spec):
            check_parts(name, size, spec, sizes)
            continue
        ranks = math.prod(sizes[a] for a in axes)
        if size % ranks:
            factors = " x ".join(f"{a}={sizes[a]}" for a in axes if sizes[a] > 1)
            fits = [str(n) for n in range(1, 65) if size % n == 0]
            padded = -(-size // ranks) * ranks
            raise ValueError(
                f"{name}: dim {dim} has size {size}, not divisible by {factors}; use one of {', '.join(fits)}, "
                f"or pad it to {padded}"
            )


def check_rows(name: str, size: int, spec: Spec, ranks: int) -> None:
    """Raise ValueError if a spec's rows do not hold each layer once."""
    if len(spec.rows) != ranks or sorted(row for rows in spec.rows for row in rows) != list(range(size)):
        raise ValueError(f"{name}: its spec {spec} does not give each of {size} layers to one of pp={ranks} ranks")


def part_dim(spec: Spec) -> int:
    """The dim that a spec's parts are of."""
    return next(dim for dim, axes in enumerate(spec.dims) if axes[:1] == (spec.part_axis,))


def parts_as_chunks(size: int, ranks: int) -> tuple[int, ...]:
    """The sizes of the parts of a dim that torch.chunk cuts.

    >>> parts_as_chunks(50257, 2), parts_as_chunks(5, 4)
    ((25129, 25128), (2, 2, 1, 0))
    """
    chunk = -(-size // ranks)
    return tuple(min(chunk, max(0, size - rank * chunk)) for rank in range(ranks))


def check_parts(name: str, size: int, spec: Spec, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if a spec's parts are not those of a dim."""
    axis, inner = spec.part_axis, math.prod(sizes[axis] for axis in spec.dims[part_dim(spec)][1:])
    ranks = sizes[axis]
    if len(spec.parts) != ranks or sum(spec.parts) != size or any(share % inner for share in spec.parts):
        raise ValueError(f"{name}: the parts of its spec {spec} do not share {size} among {axis}={ranks} ranks")
    if axis == TP and (spec.parts != parts_as_chunks(size, ranks) or not spec.parts[-1] or ranks == 1):
        expected = parts_as_chunks(size, ranks)
        instead = f"they must be %{','.join(map(str, expected))}" if expected[-1] and ranks > 1 else "use a smaller tp"
        raise ValueError(f"{name}: the parts of its spec {spec} are not those of torch.chunk, of 1 or more; {instead}")


def largest_shard(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """The shape of the largest shard by a spec that shares unevenly.

    >>> largest_shard((128, 24), Spec(("tp", None), parts=(129, 128)))
    (129, 24)
    """
    sizes = list(shape)
    if spec.rows:
        sizes[0] = max(map(len, spec.rows))
    if spec.parts:
        sizes[part_dim(spec)] = max(spec.parts)
    return tuple(sizes)


def shard_of_rank(largest: tuple[int, ...], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of this rank's shard by such a spec, from that of the largest."""
    sizes = list(largest)
    if spec.rows:
        sizes[0] = len(spec.rows[mesh.pp.rank])
    if spec.parts:
        sizes[part_dim(spec)] = spec.parts[mesh[spec.part_axis].rank]
    return tuple(sizes)


def local_numel(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> int:
    """The number of elements that one rank holds of a leaf: of unequal shards, the largest."""
    if spec.parts:
        dim = part_dim(spec)
        shape = (*shape[:dim], max(spec.parts), *shape[dim + 1 :])
        spec = replace(spec, dims=(*spec.dims[:dim], spec.dims[dim][1:], *spec.dims[dim + 1 :]), parts=())
    if spec.rows:
        shape, spec = (max(map(len, spec.rows)), *shape[1:]), Spec(((), *spec.dims[1:]))
    return math.prod(shape) // math.prod(sizes[a] for a in spec.axes)


# ---- blocks of rows ----


def row_blocks(shape: Sequence[int], max_elements: int = MOST_ELEMENTS) -> list[tuple[int, int]]:
    """Ranges of the first dim of a layer, of about `max_elements` elements at most, that begin at pages."""
    # At pages of the memory in every dtype, so that each can be read, written and summed apart from the others.
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if rows * row <= max_elements:
        return [(0, rows)]
    step = PAGE // math.gcd(PAGE, row)
    length = max(step, max_elements // row // step * step)
    return [(start, min(start + length, rows)) for start in range(0, rows, length)]


def iterate_blocks(x: Any, stacked: bool) -> Iterator[tuple[int, Tensor]]:
    """(layer, row block) for all row blocks, in order, of a tensor or a leaf with its own `iterate_blocks`."""
    if not isinstance(x, Tensor):
        yield from x.iterate_blocks()
        return
    for i, layer in enumerate(x if stacked else [x]):
        for start, end in row_blocks(tuple(layer.shape)):
            yield i, layer[start:end] if layer.dim() else layer
