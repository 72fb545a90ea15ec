"""Compare two checkpoints: by the digests in their manifests, then element by element, a few MB at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint import CheckpointReader, Folder
from fzero.checkpoint.restore_tree import dtype_name
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.run.runner.checkpoint_list import path_of
from fzero.run.setup.build import Job, specs_of
from fzero.sharding.layouts import digests, gather_full
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
    """Compare a state with a checkpoint by digests; explain: say where the first leaf differs, and by how much."""
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
    """Where and by how much two leaves differ; "" if all bits are equal."""
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


BLOCK = 4 << 20  # bytes of each leaf in memory at a time, unless its chunks are larger
Index = tuple[int, ...]


class LeafDifference(NamedTuple):
    """The difference of a leaf that both checkpoints have."""

    name: str
    differing: int  # elements
    elements: int
    largest: float  # absolute difference; infinite if one is no number
    largest_relative: float  # as a fraction of the larger of both
    first: list[int]  # the index of the first element that differs, rows first; [] if none does
    values: tuple[Any, Any] | None  # of that element

    def __str__(self) -> str:
        if not self.differing:
            return f"leaf {self.name}: no element differs by more; the largest difference is {self.largest:.3g}"
        count = f"{self.differing:,} of {self.elements:,} elements differ"
        amount = f"by {self.largest:.3g} at most, relatively {self.largest_relative:.3g}"
        x, y = self.values or (None, None)
        return f"leaf {self.name}: {count}, {amount}; the first at {self.first}, {x!r} and {y!r}"


class Difference(NamedTuple):
    """The result of a comparison of two checkpoints."""

    a: Folder
    b: Folder
    only_a: list[str]
    only_b: list[str]
    other: list[str]  # leaves whose shapes or dtypes differ, with both
    differing: list[str]  # leaves whose digests differ, in the order of the tree
    compared: list[LeafDifference]  # those of them that were read
    leaves: int  # that both have

    @property
    def equal(self) -> bool:
        """Whether they are the same: to the bit, or within the tolerance."""
        return not (self.only_a or self.only_b or self.other or any(leaf.differing for leaf in self.compared))


def compare(a: str, b: str, *, tolerance: float = 0.0, every: bool = False) -> Difference:
    """Compare the checkpoints `a` and `b` (a run, folder or URL: its newest), reading only leaves whose digests differ.

    tolerance: elements that differ by no more than this count as equal; 0: compare bits, so -0.0 is not 0.0 and a NaN
    equals itself. every: read all leaves that differ; else up to the first that differs by more than the tolerance.
    Raises ValueError if there is no checkpoint, and Damaged if one does not match its digests.
    """
    if not tolerance >= 0 or math.isinf(tolerance):
        raise ValueError(f"--atol is {tolerance}; it must be a number of at least 0")
    x, y = (checkpoint.open_checkpoint(path_of(location)) for location in (a, b))
    try:
        common = [name for name in x.leaves if name in y.leaves]
        kinds = {name: [(reader.leaves[name].shape, reader.leaves[name].dtype) for reader in (x, y)] for name in common}
        mismatches = [
            f"{name}: {describe_kind(*kinds[name][0])} and {describe_kind(*kinds[name][1])}"
            for name in common
            if kinds[name][0] != kinds[name][1]
        ]
        differing = [
            name
            for name in common
            if kinds[name][0] == kinds[name][1] and x.leaves[name].digest != y.leaves[name].digest
        ]
        compared = []
        for name in differing:
            compared.append(compare_leaf(x, y, name, tolerance))
            if compared[-1].differing and not every:
                break
    finally:
        x.close()
        y.close()
    only_x, only_y = ([name for name in reader.leaves if name not in peer.leaves] for reader, peer in ((x, y), (y, x)))
    return Difference(x.path, y.path, only_x, only_y, mismatches, differing, compared, len(common))


def describe_kind(shape: Index, dtype: torch.dtype) -> str:
    """A shape and a dtype in words."""
    return f"{dtype_name(dtype)} {list(shape)}"


def compare_leaf(x: CheckpointReader, y: CheckpointReader, name: str, tolerance: float) -> LeafDifference:
    """Compare a leaf that has the same shape and dtype in two checkpoints."""
    leaf_x, leaf_y = x.leaves[name], y.leaves[name]
    differing, largest, relative = 0, 0.0, 0.0
    first: tuple[int, list[int], tuple[Any, Any]] | None = None
    for start, size in blocks(leaf_x.shape, leaf_x.layout.chunk, leaf_y.layout.chunk, leaf_x.dtype.itemsize):
        p, q = x.read(name, start, size).reshape(-1), y.read(name, start, size).reshape(-1)
        mask, max_error, max_ratio = differences(p, q, tolerance)
        differing, largest, relative = differing + int(mask.sum()), max(largest, max_error), max(relative, max_ratio)
        if not bool(mask.any()):
            continue
        position = int(mask.to(torch.uint8).argmax())
        index = [int(i) + s for i, s in zip(torch.unravel_index(torch.tensor(position), size), start)]
        number = sum(i * math.prod(leaf_x.shape[dim + 1 :]) for dim, i in enumerate(index))
        if first is None or number < first[0]:
            first = number, index, (p[position].item(), q[position].item())
    index, values = first[1:] if first else ([], None)
    return LeafDifference(name, differing, math.prod(leaf_x.shape), largest, relative, index, values)


def differences(p: Tensor, q: Tensor, tolerance: float) -> tuple[Tensor, float, float]:
    """(which elements differ by more than the tolerance, the largest absolute difference, the largest relative one)."""
    size = p.dtype.itemsize
    mask = (p.view(torch.uint8).view(-1, size) != q.view(torch.uint8).view(-1, size)).any(-1)
    if not bool(mask.any()):
        return mask, 0.0, 0.0
    positions = mask.nonzero().squeeze(-1)
    v, w = p[positions].double(), q[positions].double()
    if p.dtype.is_floating_point:
        alike = (v.isnan() & w.isnan()) | (v == w)
        errors = torch.where(alike, 0.0, (v - w).abs()).nan_to_num(math.inf, math.inf)
    else:
        # Large ones that float64 takes for equal are not.
        errors = (p[positions].long() - q[positions].long()).double().abs()
    scale = torch.maximum(v.abs(), w.abs()).nan_to_num(math.inf, math.inf)
    relative = torch.where(errors == 0, 0.0, torch.where(errors.isinf(), math.inf, errors / scale))
    if tolerance:
        mask[positions[errors <= tolerance]] = False
    return mask, float(errors.max()), float(relative.max())


def blocks(shape: Index, chunk_x: Index, chunk_y: Index, itemsize: int) -> Iterator[tuple[Index, Index]]:
    """(start, size) of boxes that make up a leaf: of a chunk or some, of about BLOCK bytes."""
    if not math.prod(shape):
        return
    step = [max(1, a, b) for a, b in zip(chunk_x, chunk_y)]
    for dim in reversed(range(len(shape))):
        while step[dim] < shape[dim] and 2 * math.prod(step) * itemsize <= BLOCK:
            step[dim] = min(2 * step[dim], shape[dim])
        if step[dim] < shape[dim]:
            break
    for start in itertools.product(*(range(0, n, k) for n, k in zip(shape, step))):
        yield start, tuple(min(k, n - offset) for offset, k, n in zip(start, step, shape))
