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
from fzero.sharding.redistribute import digests, gather_full
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
    def equal(self) -> bool:
        """Whether they are equal, to the bit."""
        return self.recorded == self.replayed

    @property
    def relative_error(self) -> float:
        """The relative difference from the recorded number."""
        a, b = self.recorded, self.replayed
        if self.equal or a is None or b is None:
            return 0.0 if self.equal else math.inf
        return abs(b - a) / abs(a) if a else math.inf

    def __str__(self) -> str:
        subject = f"step {self.step}: {'leaf ' * self.leaf}{self.name}"
        if self.leaf:
            return f"{subject} differs{self.note}"
        error_text = (
            f" (by {self.relative_error:.1e} of it)"
            if isinstance(self.recorded, float) and isinstance(self.replayed, float)
            else ""
        )
        return f"{subject} was {self.recorded!r} and is {self.replayed!r}{error_text}"


def recorded_digests(path: checkpoint.Folder) -> dict[str, int]:
    """{name: digest} of the leaves of a checkpoint."""
    return {name: int(leaf.digest, 16) for name, leaf in checkpoint.open_checkpoint(path).leaves.items()}


def compare_leaves(
    job: Job, state: TrainState, path: checkpoint.Folder, step: int, *, explain: bool
) -> list[Comparison]:
    """Compare the leaves of a state and of a checkpoint by digest. explain: say where the first differs, and by how
    much."""
    specs = specs_of(job)
    theirs, actual = recorded_digests(path), digests(state, specs, job.mesh)
    if theirs.keys() != actual.keys():
        odd = next(name for name in [*actual, *theirs] if (name in actual) != (name in theirs))
        raise ValueError(f"{path}: has not the leaves of the run: {odd} is in one only")
    comparisons = [Comparison(step, name, theirs[name], actual[name], True) for name in actual]
    first = next((i for i, row in enumerate(comparisons) if not row.equal), None) if explain else None
    if first is not None:
        name = comparisons[first].name
        leaf, spec = pytree.named_leaves(state)[name], pytree.named_leaves(specs)[name]
        tensor = gather_full(leaf if isinstance(leaf, Tensor) else leaf.tensor(), spec, job.mesh, leaf=name)
        comparisons[first] = comparisons[first]._replace(
            note=describe_difference(
                checkpoint.restore_leaves(path, name.__eq__)[name], tensor, "which was {} and is {}"
            )
        )
    return comparisons


def describe_difference(a: Tensor, b: Tensor, values: str) -> str:
    """Where and by how much two leaves differ; "" if all bits are equal. values: the format of the first pair."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f": {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}".replace("torch.", "")
    differ, largest, first = 0, 0.0, None
    for block, (x, y) in enumerate(zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE))):
        x, y = (x, y) if x.device == y.device else (x.to(HOST), y.to(HOST))  # one of a state, one of a checkpoint
        bytes_x, bytes_y = x.view(torch.uint8), y.view(torch.uint8)
        if torch.equal(bytes_x, bytes_y):
            continue
        mask = (bytes_x.reshape(len(x), -1) != bytes_y.reshape(len(y), -1)).any(-1)
        differ += int(mask.sum())
        largest = max(
            largest, float((x.to(torch.float64) - y.to(torch.float64))[mask].abs().nan_to_num(math.inf).max())
        )
        first = block * PIECE + int(mask.to(torch.uint8).argmax()) if first is None else first
    if first is None:
        return ""
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    value_a, value_b = a.reshape(-1)[first].item(), b.reshape(-1)[first].item()
    count = f"{differ:,} of {a.numel():,} elements, by {largest:.3g} at most"
    return f": {count}; the first at {index}, {values.format(repr(value_a), repr(value_b))}"
