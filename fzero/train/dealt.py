"""Which batches this process dealt: known by the values of their rows, which copies keep."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import transforms
from fzero.sharding import Mesh

LAST = 16  # dealings that are remembered
MOST = 4096  # elements of a row that are looked at
MASK = (1 << 62) - 1


class Dealing(NamedTuple):
    """The rows that one call of `local_batch` dealt to this rank."""

    mesh: Mesh
    micro_batches: int
    rows: Tensor  # int64, a number for each row
    source: Tensor  # int64 scalar, of the batch that was dealt
    again: Tensor  # bool scalar: all rows of that batch had been dealt to this rank before
    leaves: list[Any]  # weak references to the tensors


DEALINGS: deque[Dealing] = deque(maxlen=LAST)


def row_numbers(batch: Any) -> Tensor:
    """A number for each row of a batch, int64, by the values of all leaves: a copy in another integer dtype, or on
    another device, has the same."""
    leaves = [leaf.detach() for leaf in pytree.leaves(batch)]
    total = torch.zeros(leaves[0].shape[0], dtype=torch.int64, device=leaves[0].device)
    for i, leaf in enumerate(leaves, 1):
        flat = leaf.reshape(leaf.shape[0], -1)
        flat = flat[:, :: max(1, flat.shape[1] // MOST)]
        words = flat.to(torch.float32).view(torch.int32) if flat.is_floating_point() else flat
        # Odd factors, another for each element and leaf; the xor of halves mixes what products leave in the high bits.
        factors = torch.arange(1, words.shape[1] + 1, device=flat.device) * 0x9E3779B97F4A7C1 * (2 * i + 1) | 1
        mixed = (words.to(torch.int64) + 0x2545F491) * factors
        total = total + ((mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D).sum(1).to(total.device)
    return total


def record(batch: Any, rows: Tensor, dealt: Any, mesh: Mesh, micro_batches: int) -> None:
    """Remember that `dealt`, these rows of `batch`, are this rank's."""
    if transforms() or any(leaf.is_meta for leaf in pytree.leaves(batch)):
        return  # without values, or with values that a transform will have
    numbers = row_numbers(batch)
    known = [dealing.rows for dealing in DEALINGS if dealing.mesh == mesh]
    seen = torch.cat([numbers[:0], *(x.to(numbers.device) for x in known)])
    again, source = torch.isin(numbers, seen).all(), (numbers * (2 * torch.arange(len(numbers)).to(numbers) + 1)).sum()
    leaves = [weakref.ref(leaf) for leaf in pytree.leaves(dealt)]
    DEALINGS.append(Dealing(mesh, micro_batches, numbers[rows.to(numbers.device)], source, again, leaves))


def dealing_of(batch: Any, mesh: Mesh) -> Dealing | None:
    """The last dealing that dealt exactly the rows of a batch, in their order, or None."""
    numbers = row_numbers(batch).cpu()
    return next(
        (dealing for dealing in reversed(DEALINGS) if dealing.mesh == mesh and dealing.rows.cpu().equal(numbers)), None
    )


def expect_undealt(batch: Any, mesh: Mesh) -> None:
    """Raise ValueError for tensors, or views of tensors, that `local_batch` dealt on this mesh."""
    if transforms():
        return
    dealt = {
        ref().untyped_storage().data_ptr()
        for dealing in DEALINGS
        if dealing.mesh == mesh
        for ref in dealing.leaves
        if ref() is not None
    }
    for name, leaf in pytree.named_leaves(batch).items():
        if leaf.numel() and leaf.untyped_storage().data_ptr() in dealt:
            at = f"batch[{name!r}]" if name else "the batch"
            raise ValueError(
                f"{at} was dealt by local_batch: its rows are this rank's; give them to the step as they are"
            )
