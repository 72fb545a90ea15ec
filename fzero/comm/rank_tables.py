"""Small tables that all ranks fill together: a row of each, sums of rows, a flag that any may raise, a barrier."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comm.axes import AXES
from fzero.comm.collectives import all_gather, all_gather_same
from fzero.core import pytree
from fzero.core.storage import Damaged

Mesh = Any  # fzero.sharding.Mesh, which is above
Refusal = ValueError | TypeError  # of what the caller gave


def gather_rows(row: Tensor, mesh: Mesh, *, leaf: str, axes: Sequence[str] | None = None) -> Tensor:
    """The rows of all ranks, [ranks, *row.shape] in their order, the same on each; axes: those to gather over."""
    table = row[None]
    # The innermost first, so that the rows end in the order of the ranks.
    for name in reversed(AXES.by_rank if axes is None else axes):
        table = all_gather_same(table, mesh[name], leaf=leaf)
    return table


def sum_rows(row: Tensor, mesh: Mesh, *, leaf: str) -> Tensor:
    """The sum of the rows of all ranks; for integers, whose sums do not depend on the order."""
    for axis in mesh.axes:
        row = all_gather(row[None], axis, leaf=leaf).sum(0)
    return row


def any_rank(flag: int, mesh: Mesh) -> int:
    """The largest `flag` of all ranks, the same on each of them: 0 where none has raised one."""
    highest = torch.tensor([flag], device=device_of(mesh))
    with mesh.ledger.phase("stop"):
        for axis in mesh.axes:
            highest = all_gather(highest, axis, leaf="stop").amax(0, keepdim=True)
    return int(highest)


def barrier(mesh: Mesh) -> None:
    """Return when all ranks of the mesh have called this."""
    token = torch.zeros(1, device=device_of(mesh))
    with mesh.ledger.phase("commit"):
        for axis in mesh.axes:
            token = all_gather(token, axis, leaf="commit")[:1]
    float(token)  # a GPU's collective has come this far


def raise_together(failure: Refusal | None, mesh: Mesh, phase: str = "commit") -> None:
    """Raise on every rank if any rank has a failure: its own, or that of the first rank that has one."""
    kind = 0 if failure is None else 2 if isinstance(failure, Damaged) else 1
    with mesh.ledger.phase(phase):
        sound = torch.full((1,), float(not kind), device=device_of(mesh))
        for axis in mesh.axes:
            sound = all_gather(sound, axis, leaf="commit").amin(0, keepdim=True)
        if float(sound):  # a GPU's collective has come this far; 1 in a plan
            return
        text = list(str(failure or "").encode())
        sizes = gather_rows(torch.tensor([kind, len(text)], device=device_of(mesh)), mesh, leaf="commit").tolist()
        row = torch.tensor(text + [0] * (max(size for _, size in sizes) - len(text)), dtype=torch.uint8)
        texts = gather_rows(row.to(device_of(mesh)), mesh, leaf="commit").tolist()
    if failure is not None:
        raise failure
    rank = next(rank for rank, (kind, _) in enumerate(sizes) if kind)
    message = f"rank {rank}: {bytes(texts[rank][: sizes[rank][1]]).decode()}"
    raise Damaged(message) if sizes[rank][0] == 2 else ValueError(message)


def raise_local(failure: Refusal | None) -> None:
    """`raise_together` of one rank."""
    if failure is not None:
        raise failure


@contextlib.contextmanager
def failing_together(agree: Callable[[Refusal | None], None]) -> Iterator[None]:
    """A context after which the ranks agree by `agree` (`raise_together`): if one fails, all fail."""
    failure = None
    try:
        yield
    except (ValueError, TypeError) as error:
        failure = error
    agree(failure)


def device_of(mesh: Mesh) -> str:
    """The kind of device that small tables are sent from: the host, unless the processes have NCCL alone."""
    if mesh.device_mesh is None or "cpu" in dist.get_backend_config(mesh.device_mesh.get_group(0)):
        return "cpu"
    return mesh.device_mesh.device_type


class TreeLayout(NamedTuple):
    """The structure of a tree of tensors, with the shape and dtype of each leaf."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def from_tree(cls, tree: Any) -> TreeLayout:
        """The layout of a tree."""
        leaves, treedef = pytree.flatten(tree)
        return cls(treedef, tuple(tuple(leaf.shape) for leaf in leaves), tuple(leaf.dtype for leaf in leaves))

    @property
    def size(self) -> int:
        """The numbers that its leaves have together."""
        return sum(map(math.prod, self.shapes))

    def unpack(self, row: Tensor) -> Any:
        """The tree of these numbers, [size]."""
        parts = row.split([math.prod(shape) for shape in self.shapes])
        leaves = [x.reshape(shape).to(dtype) for x, shape, dtype in zip(parts, self.shapes, self.dtypes)]
        return pytree.unflatten(leaves, self.treedef)


def packed(trees: Sequence[Any]) -> tuple[Tensor, TreeLayout]:
    """(the numbers of trees of one layout as float64 [trees, size], the layout)."""
    rows = [torch.cat([leaf.to(torch.float64).reshape(-1) for leaf in pytree.leaves(tree)]) for tree in trees]
    return torch.stack(rows), TreeLayout.from_tree(trees[0])
