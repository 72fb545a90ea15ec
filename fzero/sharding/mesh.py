"""The mesh: named axes over the processes of a run. An axis of size 1 is an identity, never a missing thing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup

from fzero.pytree import nearest

AXES = {
    "dp": "data, and the shards of ZeRO",
    "rp": "replicas of the dp group (hybrid sharding)",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "experts",
}


class Axis(NamedTuple):
    """One axis of a mesh as this process sees it."""

    name: str
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None  # None where size is 1


@dataclass(frozen=True)
class Mesh:
    """All six axes, in the order of AXES; those a run does not use have size 1."""

    axes: tuple[Axis, ...]

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {name!r}; its axes are {', '.join(AXES)}{nearest(name, AXES)}")

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(a.size for a in self.axes)

    def __str__(self) -> str:
        used = [f"{a.name}={a.size}" for a in self.axes if a.size > 1]
        return f"Mesh({', '.join(used) or 'one process'})"


def make_mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """The mesh with these axis sizes, e.g. `{"dp": 1}`; axes that are not named have size 1.

    Raises ValueError for an unknown axis, a size below 1, and sizes that do not multiply to the number of processes, which is 1 in
    this version.
    """
    sizes = dict(sizes or {})
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(AXES)}{nearest(name, AXES)}")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh: axis {name} has size {size!r}; a size is a whole number of at least 1")
    world = math.prod(sizes.values())
    if world != 1:
        raise ValueError(f"mesh {sizes} asks for {world} processes and this version runs in 1; make every axis 1, or leave the mesh out")
    return Mesh(tuple(Axis(name) for name in AXES))


def one_process() -> Mesh:
    """The mesh of a single process: every axis has size 1."""
    return make_mesh({})
