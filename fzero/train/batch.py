"""The rows of a batch: which are a rank's, and which are a micro-batch's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.comm.tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.arguments import checked, expect_count, expect_kind
from fzero.sharding import Mesh
from fzero.train.dealt import MASK, dealing_of, expect_undealt, record


def split_batch(batch: Any, micro_batches: int) -> tuple[int, list[Any]]:
    """(rows of a part, the batch's equal parts along the first dim of its leaves)."""
    named = tensors_of(batch)
    for name, leaf in named.items():
        if leaf.shape[0] % micro_batches:
            raise ValueError(
                f"batch[{name!r}] has {leaf.shape[0]} rows, not divisible by micro_batches={micro_batches}"
            )
    rows = {leaf.shape[0] // micro_batches for leaf in named.values()}
    if len(rows) != 1:
        raise ValueError(f"the batch's leaves have {sorted(r * micro_batches for r in rows)} rows; they must agree")
    size = rows.pop()
    return size, [pytree.map(lambda leaf, i=i: leaf[i * size : (i + 1) * size], batch) for i in range(micro_batches)]


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """The leaves of a batch by name; raises TypeError or ValueError for what is no tree of tensors with rows."""
    named = pytree.named_leaves(batch)
    if not named:
        raise ValueError("the batch has no tensors; give a tree of tensors whose first dim counts the samples")
    for name, leaf in named.items():
        at = f"batch[{name!r}]" if name else "the batch"
        expect_kind(at, leaf, Tensor, instead_of(leaf))
        if leaf.dim() == 0:
            raise ValueError(f"{at} is a scalar; the first dim counts the samples: write {name or 'x'}.expand(rows)")
        if leaf.shape[0] == 0:
            raise ValueError(f"{at} has no rows: its shape is {list(leaf.shape)}")
    return named


def instead_of(leaf: Any) -> str:
    """The advice for a leaf that is no tensor."""
    if leaf is None or isinstance(leaf, (str, bytes)):
        return "leave it out: a batch holds tensors"
    return "write dict(...) of it" if isinstance(leaf, Mapping) else "use torch.as_tensor"


def positions(part: Any) -> int:
    """The number of elements of the first leaf of a batch: known before its tokens are counted."""
    return max(1, pytree.leaves(part)[0].numel())


def rows_of(mesh: Mesh, rows: int, micro_batches: int = 1) -> list[int]:
    """The rows of a global batch of `rows` that are this rank's, in the order in which its step takes them.

    The batch is cut into micro_batches x (data ranks) parts; part m goes to data rank m mod R, so that the parts which
    all ranks work on at one time are neighbours. Raises ValueError if that does not divide.
    """
    parts = micro_batches * mesh.data_size
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {micro_batches} micro-batches for each of {mesh.data_size} "
            "data ranks"
        )
    size = rows // parts
    return [(j * mesh.data_size + mesh.data_rank) * size + i for j in range(micro_batches) for i in range(size)]


@checked("mesh micro_batches")
def local_batch(batch: Any, mesh: Mesh, micro_batches: int = 1) -> Any:
    """Return this rank's rows of a global batch, for its train step.

    batch: a tree of tensors with the same number of rows (first dim). micro_batches: as in the train step.
    The batch is cut into micro_batches x (data ranks) parts, and part m goes to data rank m mod (data ranks). The
    last dealings are remembered by the values of their rows, so that the first step refuses rows, or copies of them,
    that were dealt for another number of micro-batches, or twice.
    Raises ValueError if the rows do not divide, and for tensors that it dealt, or views of them.

    >>> mesh = fzero.fake_mesh({"dp": 2}, rank=1)
    >>> local_batch({"tokens": torch.arange(8)}, mesh, micro_batches=2)
    {'tokens': tensor([2, 3, 6, 7])}
    """
    expect_kind("mesh", mesh, Mesh, "write local_batch(batch, mesh, micro_batches)")
    expect_count("micro_batches", micro_batches)
    sizes = {name: leaf.shape[0] for name, leaf in tensors_of(batch).items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the batch's tensors have unlike numbers of rows: {sizes}; they must agree")
    rows = torch.tensor(rows_of(mesh, next(iter(sizes.values())), micro_batches))

    if mesh.data_size == 1:  # alone a rank has the same rows for any number of micro-batches
        return pytree.map(lambda leaf: leaf[rows], batch)
    expect_undealt(batch, mesh)
    dealt = pytree.map(lambda leaf: leaf[rows], batch)
    record(batch, rows, dealt, mesh, micro_batches)
    return dealt


def expect_own_rows(batch: Any, mesh: Mesh, micro_batches: int, dealt: bool = False) -> None:
    """Raise ValueError, the same on all ranks, if data ranks have the same rows or unlike numbers of rows, the ranks
    of a tp or cp group have different ones, or `local_batch` dealt them for another number of micro-batches, or twice.

    Equal rows that `local_batch` dealt pass, or the loader of a run (dealt), and those of a batch whose rows are all
    alike, as of zeros in a trial.
    Communicates: an all_gather of five int64.
    """
    named, content = pytree.named_leaves(batch), hashlib.sha256()
    for name, leaf in named.items():
        held = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content.update(f"{name} {leaf.dtype} {list(leaf.shape)}".encode() + held.numpy().tobytes())
    one_row = dealt or all(bool((leaf == leaf[:1]).all()) for leaf in named.values())
    dealing = dealing_of(batch, mesh) if mesh.data_size > 1 else None
    parts, twice = (dealing.micro_batches, int(dealing.again) * (int(dealing.source) & MASK)) if dealing else (0, 0)
    row = [int.from_bytes(content.digest()[:8], "big", signed=True), next(iter(named.values())).shape[0]]
    row += [one_row or dealing is not None, 0 if one_row else parts, 0 if one_row else twice]
    table = gather_rows(torch.tensor(row, device=device_of(mesh)), mesh, leaf="batch").tolist()
    group, first = mesh.size // mesh["pp"].size, {}
    alike, tp = (
        mesh["cp"].size * mesh["tp"].size,
        mesh["tp"].size,
    )  # neighbours of one data rank, and those of one tp group
    for rank, (same, rows, passes, parts, source) in enumerate(table):
        if parts not in (0, micro_batches):
            raise ValueError(
                f"local_batch dealt this batch for micro_batches={parts} and the step has "
                f"micro_batches={micro_batches}, which takes other rows for this rank's; write "
                f"local_batch(batch, mesh, micro_batches={micro_batches})"
            )
        if source and table[0][4] not in (0, source):
            raise ValueError(
                f"ranks 0 and {rank} dealt different batches with local_batch, whose rows had all been dealt to them "
                "before: each would train on a part of its part; give the step what local_batch returned, or a copy"
            )
        if rank % alike and same != table[rank - rank % alike][0]:
            kind = "tp" if rank % alike < tp else "cp"
            raise ValueError(
                f"ranks {rank - rank % alike} and {rank} are of one {kind} group and were given different batches; "
                f"give all ranks of a {kind} group the same one, as local_batch(batch, mesh, micro_batches) does"
            )
        if rows != table[0][1]:
            raise ValueError(
                f"rank 0 was given {table[0][1]} rows and rank {rank} {rows}; give every rank as many, as "
                f"local_batch(batch, mesh, micro_batches={micro_batches}) does"
            )
        if rank >= group and same != table[rank % group][0]:
            raise ValueError(
                f"ranks {rank % group} and {rank} are of one pipeline and were given different batches; give all ranks "
                "of a pp group the same one, as local_batch(batch, mesh, micro_batches) does"
            )
        other = first.setdefault(same, rank % group // alike)
        if other != rank % group // alike and not passes:
            raise ValueError(
                f"ranks {other * alike} and {rank} were given the same batch, and each data rank trains on rows of its "
                f"own; write step(state, local_batch(batch, mesh, micro_batches={micro_batches}))"
            )
