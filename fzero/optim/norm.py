"""Norms of gradients and parameters, summed in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.core.device import kind_of
from fzero.core.pytree import Tree
from fzero.kernels.grad_norm import grad_norm
from fzero.sharding.slices import iterate_blocks, shard_dim

# Elements of a piece of a leaf whose squares are summed in float64: the temporaries' size. A row's sum depends on
# _COLUMNS, and on nothing else.
_PIECE = {"cpu": 1 << 18}


_PIECE_ELSEWHERE = 1 << 23


_COLUMNS = 1 << 16


@dataclass(frozen=True)
class Squared:
    """In place of a leaf in a tree whose norm is asked for: the squares of its pieces, in order."""

    squares: list[tuple[int, Tensor]]  # (layer, square)
    shape: torch.Size  # of the whole leaf, or of a shard: its number of dims counts
    dtype: torch.dtype

    def dim(self) -> int:
        """The number of the leaf's dims."""
        return len(self.shape)


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all elements of the tree, 0-dim, in the widest of the dtypes, at least float32 (so also its sum).

    An empty tree has norm 0. Differentiable; the gradient of a zero tree is zero.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    dtype, leaves = _wide(tree), pytree.leaves(tree)
    if _by_kernel(leaves, dtype):
        return grad_norm(leaves, impl="triton")[0]
    norms = [torch.linalg.vector_norm(leaf, dtype=dtype) for leaf in leaves]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=dtype)


def _piece_square(piece: Tensor) -> Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)).square()


def summed_by_kernel(tree: Tree) -> bool:
    """Whether `norm` of the tree is one kernel's work, which gives no norms of leaves."""
    leaves = pytree.leaves(tree)
    return all(isinstance(leaf, Tensor) for leaf in leaves) and _by_kernel(leaves, _wide(tree))


def _by_kernel(leaves: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether the kernel sums the squares of all leaves: on a GPU, in float32, if nothing is differentiated."""
    plain = bool(leaves) and dtype == torch.float32 and not transforms() and not needs_grad(*leaves)
    return plain and all(kind_of(x) == "cuda" and x.is_contiguous() for x in leaves)


def _wide(tree: Tree) -> torch.dtype:
    dtype = torch.float32
    for leaf in pytree.leaves(tree):
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


def _set_sums(named: dict[str, Any], used: dict[str, tuple[str, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """{name of a leaf: the sum of squares [1] of this rank's part of it and of all leaves on its axes}."""
    # By the pieces of each leaf, so that its bits are the same for a leaf that is not in memory as a whole.
    members: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(named, key=lambda name: (used[name], name)):  # the same order on all ranks
        members.setdefault(used[name], []).append(name)

    def total(names: list[str]) -> Tensor:
        if all(isinstance(named[name], Tensor) for name in names) and _by_kernel(
            [named[name] for name in names], dtype
        ):
            return grad_norm([named[name] for name in names], impl="triton")[0].square()
        squares = [square for name in names for _, square in _squared(named[name], shard_dim(name) == 1, _piece_square)]
        if not squares:  # no layer of these leaves is on this rank
            return torch.zeros((), dtype=dtype)
        return torch.stack([square.to(squares[0].device, dtype) for square in squares]).sum()

    return {names[0]: total(names)[None] for names in members.values()}


def _squares_of(x: Any, stacked: bool, f: Callable[[Tensor], Tensor]) -> Squared:
    return x if isinstance(x, Squared) else Squared(_squared(x, stacked, f), x.shape, x.dtype)


def _squared(x: Any, stacked: bool, f: Callable[[Tensor], Tensor]) -> list[tuple[int, Tensor]]:
    return (
        x.squares
        if isinstance(x, Squared)
        else [(layer, f(piece)) for layer, piece in widen(iterate_blocks(x, stacked))]
    )


def widen(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """The pieces (layer, tensor) in float32 or wider, each of which lasts until the next."""
    buffer = torch.empty(0)
    for layer, piece in pieces:
        wide = torch.promote_types(piece.dtype, torch.float32)
        if piece.dtype == wide or transforms() or needs_grad(piece):
            yield layer, piece.to(wide)
            continue
        if buffer.numel() < piece.numel() or buffer.device != piece.device:
            buffer = torch.empty(piece.numel(), dtype=wide, device=piece.device)
        yield layer, buffer[: piece.numel()].view(piece.shape).copy_(piece)


def _row_squares(piece: Tensor) -> Tensor:
    """The sums of squares, float64, of the rows of a piece."""
    rows = piece.reshape(1, 1) if not piece.dim() else piece[:, None] if piece.dim() == 1 else piece.flatten(1)
    max_rows = max(1, _PIECE.get(kind_of(piece), _PIECE_ELSEWHERE) // max(1, min(rows.shape[1], _COLUMNS)))
    sums = [
        _fold(torch.stack([_fold(block.to(torch.float64).square()) for block in chunk.split(_COLUMNS, 1)], -1))
        for chunk in rows.split(max_rows)
    ]
    return torch.cat(sums)


Layers = tuple[Sequence[int], tuple[int, ...]]  # the numbers of a rank's layers, and the shape of the whole leaf


class LeafRows(NamedTuple):
    """Which rows of a leaf, along the dim that dp shards, a rank has."""

    first: int = 0
    number: int = 1
    total: int = 1  # those of the whole leaf


def _row_sums(named: dict[str, Any], rows: dict[str, LeafRows], layers: dict[str, Layers]) -> dict[str, Tensor]:
    """{name of each leaf: this rank's part of the sums of squares of its rows}, by name."""
    return {name: _local_row_sums(named[name], shard_dim(name), rows[name], layers.get(name)) for name in sorted(named)}


def _fold(x: Tensor) -> Tensor:
    """The sum over the last dim by halves: the same order on any device, with any number of threads."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        low, high, odd = x[..., : x.shape[-1] - half], x[..., half:], x[..., x.shape[-1] - half : half]
        x = torch.cat([low + high, odd], -1) if odd.shape[-1] else low + high
    return x.sum(-1)  # of one element, or of none


def _local_row_sums(x: Any, dim: int, rows: LeafRows, local_layers: Layers | None) -> Tensor:
    """The sums of squares, float64 [rows of the whole leaf], of the rows of dim `dim`; zero for other ranks' rows."""
    rows = rows if x.dim() > dim else LeafRows()  # without such a dim there is one
    layers: dict[int, list[Tensor]] = {}
    for layer, squares in _squared(x, dim == 1, _row_squares):
        layers.setdefault(layer, []).append(squares)
    sums = [torch.cat(layer_squares) for layer_squares in layers.values()]
    if local_layers is None:
        local_sums = _fold(torch.stack(sums, -1))
    else:
        numbers, shape = local_layers
        local_sums = torch.zeros(rows.number, shape[0], dtype=torch.float64, device=sums[0].device if sums else None)
        for number, layer_squares in zip(numbers, sums):
            local_sums[:, number] = layer_squares
    pads = (rows.first, rows.total - rows.first - rows.number)
    return torch.nn.functional.pad(local_sums, pads if local_layers is None else (0, 0, *pads)).flatten()
