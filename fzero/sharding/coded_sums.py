"""Sums of gradients over ranks in codes: each rank's term is rounded once, sent to the rank that keeps its part of the
sum, and added there in float32, in the order of a plain sum (see core.tree_sum).

Source: Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.3 (qgZ).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.comm.bucket import pack, unpack
from fzero.comm.collectives import Axis, Ledger, start_all_gather, start_all_to_all
from fzero.core.tree_sum import TreeSum
from fzero.sharding.codec import Coder


def padded(elements: int, ranks: int) -> int:
    """The elements of a whole sum in codes, of which each rank adds up as many: a multiple of 16 of them."""
    return elements + -elements % (16 * ranks)


def sum_coded(
    op: str, names: Sequence[str], tensors: list[Tensor], axis: Axis, coder: Coder, dtype: torch.dtype, ledger: Ledger
) -> Iterator[Any]:
    """The tensors after a "scatter" or a "psum" over `axis`, float32 or `dtype` if that is wider; `tensors` is emptied.

    Of a psum the sums are rounded once more, and are the same on all ranks. Yields whenever collectives have been
    started.
    Communicates: an all_to_all of codes and one of scales; for a psum then an all_gather of both.
    """
    shapes, label, ranks = [t.shape for t in tensors], " ".join(names), axis.size
    dtype, wide = torch.promote_types(dtype, torch.float32), torch.promote_types(tensors[0].dtype, torch.float32)
    rows = pack(tensors, ranks if op == "scatter" else 1, wide)
    tensors.clear()
    if op == "psum":
        rows = F.pad(rows, (0, padded(rows.shape[1], ranks) - rows.shape[1])).view(ranks, -1)
    width = rows.shape[1]
    sent = coder.encode(rows)
    del rows
    with ledger.phase("reduce"):
        pending = [start_all_to_all(chunk, axis, leaf=label) for chunk in sent]
    yield pending
    parts = tuple(collective.wait() for collective in pending)
    if op == "scatter":
        total = TreeSum()
        for rank in range(ranks):
            total.add(coder.decode(tuple(chunk[rank : rank + 1] for chunk in parts), dtype, width))
        return unpack(total.sum(), [(shape[0] // ranks, *shape[1:]) for shape in shapes])
    with ledger.phase("reduce"):
        pending = [start_all_gather(chunk[None], axis, leaf=label) for chunk in coder.add(parts, width)]
    yield pending
    full = coder.decode(tuple(collective.wait() for collective in pending), dtype, width).flatten()
    return unpack(full[None, : sum(math.prod(shape) for shape in shapes)].contiguous(), shapes)
