"""Comparisons of leaves, of digests and of elements, between two states."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.run.build import Job, specs_of
from fzero.sharding.digests import digests
from fzero.sharding.redistribute import gather_whole
from fzero.train.state import TrainState

PIECE = 1 << 22  # elements compared at a time


class Comparison(NamedTuple):
    """A recorded number, or digest of a leaf, beside the replayed one."""

    step: int
    name: str
    recorded: Any
    replayed: Any
    leaf: bool = False
    note: str = ""  # where in a leaf, and how far apart

    @property
    def same(self) -> bool:
        """Whether they are equal, to the bit."""
        return self.recorded == self.replayed

    @property
    def apart(self) -> float:
        """The relative difference from the recorded number."""
        a, b = self.recorded, self.replayed
        if self.same or a is None or b is None:
            return 0.0 if self.same else math.inf
        return abs(b - a) / abs(a) if a else math.inf

    def __str__(self) -> str:
        what = f"step {self.step}: {'leaf ' * self.leaf}{self.name}"
        if self.leaf:
            return f"{what} differs{self.note}"
        by = (
            f" (by {self.apart:.1e} of it)"
            if isinstance(self.recorded, float) and isinstance(self.replayed, float)
            else ""
        )
        return f"{what} was {self.recorded!r} and is {self.replayed!r}{by}"


def recorded_digests(path: checkpoint.Folder) -> dict[str, int]:
    """{name: digest} of the leaves of a checkpoint."""
    return {name: int(leaf.digest, 16) for name, leaf in checkpoint.open_checkpoint(path).leaves.items()}


def compare_leaves(
    job: Job, state: TrainState, path: checkpoint.Folder, step: int, *, explain: bool
) -> list[Comparison]:
    """Compare the leaves of a state and of a checkpoint by digest. explain: say where the first differs, and by how
    much."""
    specs = specs_of(job)
    theirs, mine = recorded_digests(path), digests(state, specs, job.mesh)
    if theirs.keys() != mine.keys():
        odd = next(name for name in [*mine, *theirs] if (name in mine) != (name in theirs))
        raise ValueError(f"{path}: has not the leaves of the run: {odd} is in one only")
    found = [Comparison(step, name, theirs[name], mine[name], True) for name in mine]
    first = next((i for i, row in enumerate(found) if not row.same), None) if explain else None
    if first is not None:
        name = found[first].name
        leaf, spec = pytree.named_leaves(state)[name], pytree.named_leaves(specs)[name]
        here = gather_whole(leaf if isinstance(leaf, Tensor) else leaf.tensor(), spec, job.mesh, leaf=name)
        found[first] = found[first]._replace(
            note=describe_difference(checkpoint.restore_leaves(path, name.__eq__)[name], here, "which was {} and is {}")
        )
    return found


def describe_difference(a: Tensor, b: Tensor, values: str) -> str:
    """Where and by how much two leaves differ; "" if all bits are equal. values: the format of the first pair."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f": {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}".replace("torch.", "")
    differ, largest, first = 0, 0.0, None
    for at, (x, y) in enumerate(zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE))):
        x, y = (x, y) if x.device == y.device else (x.to(HOST), y.to(HOST))  # one of a state, one of a checkpoint
        one, two = x.view(torch.uint8), y.view(torch.uint8)
        if torch.equal(one, two):
            continue
        other = (one.reshape(len(x), -1) != two.reshape(len(y), -1)).any(-1)
        differ += int(other.sum())
        largest = max(
            largest, float((x.to(torch.float64) - y.to(torch.float64))[other].abs().nan_to_num(math.inf).max())
        )
        first = at * PIECE + int(other.to(torch.uint8).argmax()) if first is None else first
    if first is None:
        return ""
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    before, after = a.reshape(-1)[first].item(), b.reshape(-1)[first].item()
    count = f"{differ:,} of {a.numel():,} elements, by {largest:.3g} at most"
    return f": {count}; the first at {index}, {values.format(repr(before), repr(after))}"
