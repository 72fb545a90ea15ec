"""The rows of a batch: which are a rank's, and which are a micro-batch's."""

from __future__ import annotations

from typing import Any

import torch

from fzero.core import pytree
from fzero.sharding import Mesh


def split_batch(batch: Any, micro_batches: int) -> tuple[int, list[Any]]:
    """(rows of a part, the batch's equal parts along the first dim of its leaves)."""
    named = pytree.named_leaves(batch)
    for name, leaf in named.items():
        if leaf.shape[0] % micro_batches:
            raise ValueError(f"batch[{name!r}] has {leaf.shape[0]} rows, not divisible by micro_batches={micro_batches}")
    rows = {leaf.shape[0] // micro_batches for leaf in named.values()}
    if len(rows) != 1:
        raise ValueError(f"the batch's leaves have {sorted(r * micro_batches for r in rows)} rows; they must agree")
    size = rows.pop()
    return size, [pytree.map(lambda leaf, i=i: leaf[i * size : (i + 1) * size], batch) for i in range(micro_batches)]


def positions(part: Any) -> int:
    """The number of elements of the first leaf of a batch: known before its tokens are counted."""
    return max(1, pytree.leaves(part)[0].numel())


def rows_of(mesh: Mesh, rows: int, micro_batches: int = 1) -> list[int]:
    """The rows of a global batch of `rows` that are this rank's, in the order in which its step takes them.

    The batch is cut into micro_batches x (data ranks) parts; part m goes to data rank m mod R, so that the parts which all ranks work on
    at one time are neighbours. Raises ValueError where that does not divide.
    """
    parts = micro_batches * mesh.data_size
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows cannot be cut into {micro_batches} micro-batches for each of {mesh.data_size} data ranks")
    size = rows // parts
    return [(j * mesh.data_size + mesh.data_rank) * size + i for j in range(micro_batches) for i in range(size)]


def local_batch(batch: Any, mesh: Mesh, micro_batches: int = 1) -> Any:
    """This rank's rows of a global batch, for its train step."""
    rows = torch.tensor(rows_of(mesh, pytree.leaves(batch)[0].shape[0], micro_batches))
    return pytree.map(lambda leaf: leaf[rows], batch)
