"""The rows of a batch: which are a rank's, and which are a micro-batch's; which batches this process dealt."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.axes import CP, TP
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.arguments import checked, expect_kind
from fzero.core.autodiff import transforms
from fzero.core.config_tables import AtLeastOne
from fzero.sharding import Mesh

MAX_DEALINGS = 16  # dealings that are remembered
MAX_ELEMENTS = 4096  # elements of a row that are looked at
MASK = (1 << 62) - 1  # keeps a number in an int64, beside a sign


class Dealing(NamedTuple):
    """The rows that one call of `local_batch` dealt to this rank."""

    mesh: Mesh
    micro_batches: int
    rows: Tensor  # int64, a number for each row
    source: Tensor  # int64 scalar, of the batch that was dealt
    is_repeat: Tensor  # bool scalar: all rows of that batch had been dealt to this rank before
    leaves: list[Any]  # weak references to the tensors


DEALINGS: deque[Dealing] = deque(maxlen=MAX_DEALINGS)


def row_numbers(batch: Any) -> Tensor:
    """A number for each row of a batch, int64, by the values of all leaves; copies have the same."""
    leaves = [leaf.detach() for leaf in pytree.leaves(batch)]
    total = torch.zeros(leaves[0].shape[0], dtype=torch.int64, device=leaves[0].device)
    for i, leaf in enumerate(leaves, 1):
        flat = leaf.reshape(leaf.shape[0], -1)
        flat = flat[:, :: max(1, flat.shape[1] // MAX_ELEMENTS)]
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
    previous_rows = [dealing.rows for dealing in DEALINGS if dealing.mesh == mesh]
    past_numbers = torch.cat([numbers[:0], *(x.to(numbers.device) for x in previous_rows)])
    is_repeat = torch.isin(numbers, past_numbers).all()
    source = (numbers * (2 * torch.arange(len(numbers)).to(numbers) + 1)).sum()
    leaves = [weakref.ref(leaf) for leaf in pytree.leaves(dealt)]
    DEALINGS.append(Dealing(mesh, micro_batches, numbers[rows.to(numbers.device)], source, is_repeat, leaves))


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
            label = f"batch[{name!r}]" if name else "the batch"
            raise ValueError(
                f"{label} was dealt by local_batch: its rows are this rank's; give them to the step as they are"
            )


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
    """The leaves of a batch by name; raises TypeError or ValueError."""
    named = pytree.named_leaves(batch)
    if not named:
        raise ValueError("the batch has no tensors; give a tree of tensors whose first dim counts the samples")
    for name, leaf in named.items():
        label = f"batch[{name!r}]" if name else "the batch"
        expect_kind(label, leaf, Tensor, instead_of(leaf))
        if leaf.dim() == 0:
            raise ValueError(f"{label} is a scalar; the first dim counts the samples: write {name or 'x'}.expand(rows)")
        if leaf.shape[0] == 0:
            raise ValueError(f"{label} has no rows: its shape is {list(leaf.shape)}")
    return named


def instead_of(leaf: Any) -> str:
    """The advice for a leaf that is no tensor."""
    if leaf is None or isinstance(leaf, (str, bytes)):
        return "leave it out: a batch holds tensors"
    return "write dict(...) of it" if isinstance(leaf, Mapping) else "use torch.as_tensor"


def positions(micro_batch: Any) -> int:
    """The number of elements of the first leaf of a batch: known before its tokens are counted."""
    return max(1, pytree.leaves(micro_batch)[0].numel())


def rows_of(mesh: Mesh, rows: int, micro_batches: int = 1) -> list[int]:
    """The rows of a global batch that are this rank's, in the order of its step; raises ValueError if unequal."""
    parts = micro_batches * mesh.data_size
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {micro_batches} micro-batches for each of {mesh.data_size} "
            "data ranks"
        )
    size = rows // parts
    return [(j * mesh.data_size + mesh.data_rank) * size + i for j in range(micro_batches) for i in range(size)]


@checked(
    mesh="mesh is {}; write local_batch(batch, mesh, micro_batches)",
    micro_batches="micro_batches is {}; it must be a whole number of at least 1",
)
def local_batch(batch: Any, mesh: Mesh, micro_batches: AtLeastOne = 1) -> Any:
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


def expect_distinct_rows(batch: Any, mesh: Mesh, micro_batches: int, dealt: bool = False) -> None:
    """Raise ValueError, the same on all ranks, if data ranks have equal rows or a group's ranks unlike ones."""
    named, content = pytree.named_leaves(batch), hashlib.sha256()
    for name, leaf in named.items():
        data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content.update(f"{name} {leaf.dtype} {list(leaf.shape)}".encode() + data.numpy().tobytes())
    one_row = dealt or all(bool((leaf == leaf[:1]).all()) for leaf in named.values())
    dealing = dealing_of(batch, mesh) if mesh.data_size > 1 else None
    parts, twice = (dealing.micro_batches, int(dealing.is_repeat) * (int(dealing.source) & MASK)) if dealing else (0, 0)
    row = [int.from_bytes(content.digest()[:8], "big", signed=True), next(iter(named.values())).shape[0]]
    row += [one_row or dealing is not None, 0 if one_row else parts, 0 if one_row else twice]
    table = gather_rows(torch.tensor(row, device=device_of(mesh)), mesh, leaf="batch").tolist()
    group, first = mesh.stage_size, {}
    alike, tp = (
        mesh.cp.size * mesh.tp.size,
        mesh.tp.size,
    )  # neighbours of one data rank, and those of one tp group
    for rank, (digest, rows, passes, parts, source) in enumerate(table):
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
        if rank % alike and digest != table[rank - rank % alike][0]:
            kind = TP if rank % alike < tp else CP
            raise ValueError(
                f"ranks {rank - rank % alike} and {rank} are of one {kind} group and were given different batches; "
                f"give all ranks of a {kind} group the same one, as local_batch(batch, mesh, micro_batches) does"
            )
        if rows != table[0][1]:
            raise ValueError(
                f"rank 0 was given {table[0][1]} rows and rank {rank} {rows}; give every rank as many, as "
                f"local_batch(batch, mesh, micro_batches={micro_batches}) does"
            )
        if rank >= group and digest != table[rank % group][0]:
            raise ValueError(
                f"ranks {rank % group} and {rank} are of one pipeline and were given different batches; give all ranks "
                "of a pp group the same one, as local_batch(batch, mesh, micro_batches) does"
            )
        first_index = first.setdefault(digest, rank % group // alike)
        if first_index != rank % group // alike and not passes:
            raise ValueError(
                f"ranks {first_index * alike} and {rank} were given the same batch, and each data rank trains on rows "
                f"of its own; write step(state, local_batch(batch, mesh, micro_batches={micro_batches}))"
            )
