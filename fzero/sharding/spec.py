"""Spec: for one leaf, the mesh axes that shard each tensor dim, the axes over which a sum is owed, and its memory; the
rules over leaf names that say so, and Offload, the memory of each group of a state.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fzero.comm.axes import AXES, DP, EP, PP, TP
from fzero.core.arguments import checked
from fzero.core.copy_buckets import bring
from fzero.core.host_memory import to_host
from fzero.core.pytree import nearest

Value = TypeVar("Value")
Rules = Sequence[tuple[str, Value]]  # (regex searched in the leaf name, value)


@checked()
def match_rules(
    rules: Rules[Value], names: Sequence[str], *, subject: str = "rules", partial: bool = False
) -> dict[str, Value]:
    """{leaf name: value of the first rule whose regular expression is found in it}.

    rules: (regular expression, value) pairs, in order. names: the names of a tree's leaves. subject: the rules' name in
    errors.
    partial: whether `names` are only some of the tree's, so that a rule may match none of them.
    Raises ValueError for a leaf that no rule matches, a rule that is the first match of no leaf, or an invalid regular
    expression.

    >>> match_rules([("bias$", 0.0), (".*", 0.1)], ["mlp/w", "mlp/bias"])
    {'mlp/w': 0.1, 'mlp/bias': 0.0}
    """
    try:
        compiled = [(re.compile(pattern), value) for pattern, value in rules]
    except re.error as error:
        raise ValueError(f"{subject}: {error.pattern!r} is not a regular expression: {error}") from None
    matched: dict[str, Value] = {}
    used: set[int] = set()
    for name in names:
        for i, (pattern, value) in enumerate(compiled):
            if pattern.search(name):
                matched[name] = value
                used.add(i)
                break
        else:
            raise ValueError(
                f"{subject}: no rule matches leaf {name!r}{nearest(name, [p for p, _ in rules])}; add a rule, or "
                "a last one ('.*', ...)"
            )
    for i, (pattern, _) in enumerate(rules):
        if i not in used and not partial:
            raise ValueError(
                f"{subject}: rule {pattern!r} matches no leaf first{nearest(pattern, names)}; remove or reorder it"
            )
    return matched


if TYPE_CHECKING:
    from fzero.sharding.mesh import Mesh


class StateMemory(str):
    """A memory that leaves of a state may rest in. It is its name, as specs, offloads, plans and files have it.

    Of the three kinds one is true: `on_device`, what a step computes with; `on_host`, tensors that are copied from and
    to the device; `on_disk`, leaves of a store, of which a step reads rows into buffers. A subclass that is entered
    into MEMORIES is one more.
    """

    __slots__ = ()
    on_device = on_host = on_disk = False

    def put(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors where they rest in this memory, of a state whose step computes on `device`."""
        raise NotImplementedError


class StateOnDevice(StateMemory):
    """The memory of the device."""

    __slots__ = ()
    on_device = True

    def put(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [bring(tensor, device) for tensor in tensors]


class StateOnHost(StateMemory):
    """The memory of the host, pinned if the device is a GPU."""

    __slots__ = ()
    on_host = True

    def put(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return to_host(tensors, device, "the state in the host's memory")


class StateOnDisk(StateMemory):
    """A store on a disk, which is written on its own: tensors stay where they are."""

    __slots__ = ()
    on_disk = True

    def put(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return list(tensors)


DEVICE, HOST_MEMORY, DISK = StateOnDevice("device"), StateOnHost("host"), StateOnDisk("nvme")
MEMORIES: dict[str, StateMemory] = {memory: memory for memory in (DEVICE, HOST_MEMORY, DISK)}
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Spec:
    """The layout of one tensor on a mesh. It is a leaf in trees; `Spec()` is a tensor that is whole on every rank.

    dims: for each tensor dim the mesh axes that shard it, outermost first; a trailing dim that is not given is whole.
    partial: the axes over which a sum is partial_axes: the tensor is the sum of their ranks' values.
    memory: "device", "host" or "nvme", which becomes that StateMemory.
    rows: where pp shards the first dim, which counts layers: by its rank the numbers of the layers that it holds.
    parts: where ep, or tp where ep shards none, does not divide the size of a dim that it shards first: by its rank the
    size of its part. Those of tp are as torch.chunk has them: equal, and what is left for the last rank.

    The text form, which `parse` reads, is "[L/pp, E/ep, D/tp+dp] +cp @host #0-2|3 %2,1": a letter for each dim, its
    axes after a slash, owed sums after "+", the memory after "@", the rows after "#", those of a rank of pp before each
    "|", the parts after "%".

    >>> spec = Spec((None, ("tp", "dp")), memory="host")
    >>> print(spec, spec == Spec.parse("[D, F/tp+dp] @host"))
    [·, ·/tp+dp] @host True
    """

    dims: tuple[tuple[str, ...], ...] = ()
    partial: frozenset[str] = frozenset()
    memory: StateMemory = DEVICE
    rows: Rows = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # None, "dp" and ("tp", "dp") are all accepted for a dim; one form is kept.
        dims = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in self.dims)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "partial", frozenset(self.partial))
        used = [axis for d in dims for axis in d]
        for axis in used:
            if used.count(axis) > 1 or axis in self.partial:
                raise ValueError(f"spec {self}: axis {axis!r} appears twice; an axis shards one dim or is owed, once")
        if self.memory not in MEMORIES:
            raise ValueError(f"spec {self}: memory is {self.memory!r}; it must be one of {', '.join(MEMORIES)}")
        object.__setattr__(self, "memory", MEMORIES[self.memory])
        if self.rows and self.dims[:1] != ((PP,),):
            raise ValueError(f"spec {self}: rows are those of pp, which must shard the first dim, alone")
        if self.parts and self.part_axis not in {d[0] for d in dims if d}:
            raise ValueError(f"spec {self}: parts are those of ep or tp, which must shard a dim, before other axes")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """The Spec of a text such as "[L/pp, D/tp+dp, F] +cp @host", or of `str(spec)`.

        Raises ValueError if the text has another form.
        """
        form = re.fullmatch(
            r"\s*\[([^\]]*)\]((?:\s*\+\w+)*)(?:\s*@(\w+))?(?:\s*#([\d|,-]+))?(?:\s*%([\d,]+))?\s*", text
        )
        if form is None:
            raise ValueError(f"spec {text!r} is not of the form '[L/pp, D/tp+dp, F] +cp @host'")
        dims = []
        for dim in form[1].split(",") if form[1].strip() else []:
            field = re.fullmatch(r"\s*(?:\w+|·)(?:/(\w+(?:\+\w+)*))?\s*", dim)
            if field is None:
                raise ValueError(f"spec {text!r}: dim {dim.strip()!r} is not of the form 'D' or 'D/tp+dp'")
            dims.append(tuple(field[1].split("+")) if field[1] else ())
        rows = tuple(_parse_rows(field) for field in form[4].split("|")) if form[4] else ()
        sizes = tuple(map(int, form[5].split(","))) if form[5] else ()
        memory: Any = form[3] or DEVICE
        return cls(tuple(dims), frozenset(re.findall(r"\+(\w+)", form[2])), memory, rows, sizes)

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard any dim."""
        return tuple(axis for d in self.dims for axis in d)

    @property
    def over_data(self) -> bool:
        """Whether ZeRO shards it, over dp and the axes beside it."""
        return DP in self.axes

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient of a leaf that is used in this layout is owed: those whose ranks use it
        differently and that do not shard it, then those in `partial`."""
        return (*(axis for axis in AXES.varying if axis not in self.axes), *sorted(self.partial))

    @property
    def part_axis(self) -> str:
        """The axis that `parts` are of; "" without parts."""
        return "" if not self.parts else EP if EP in self.axes else TP

    @property
    def layer(self) -> Spec:
        """The layout of a layer of a stacked leaf, whole as far as sums are owed, on the device."""
        return Spec(self.dims[1:], parts=self.parts)

    def with_dims(self, dims: Sequence[tuple[str, ...]]) -> Spec:
        """The layout of a tensor with some of the leaf's dims, whose parts are left out with their dim."""
        has_parts = self.part_axis in {d[0] for d in dims if d}
        return replace(self, dims=tuple(dims), parts=self.parts if has_parts else ())

    def placements(self, mesh: Mesh) -> tuple[Any, ...]:
        """The placements of a DTensor of this layout, one for each axis of `mesh.device_mesh`.

        Raises ValueError if the mesh has one process, or the spec names an axis that the mesh has not.
        """
        from torch.distributed.tensor import Partial, Placement, Replicate, Shard

        from fzero.core.torch_private import StridedShard

        if self.part_axis == EP:
            raise ValueError(f"spec {self}: a DTensor has no placement for parts of these sizes; use ep that divides")
        if mesh.device_mesh is None:
            raise ValueError(f"spec {self}: a mesh of one process has no DeviceMesh, and a tensor on it no placements")
        names = [name for name in mesh.device_mesh.mesh_dim_names or () if mesh[name].size > 1]
        by_axis: dict[str, Placement] = {name: Partial() if name in self.partial else Replicate() for name in names}
        for dim, axes in enumerate(self.dims):
            sizes = [(axis, mesh[axis].size) for axis in axes if mesh[axis].size > 1]
            for i, (axis, _) in enumerate(sizes):
                # A DTensor divides a dim by the mesh's axes in their order; one that comes before those that divide it
                # first is "strided".
                inner_sizes = [size for name, size in sizes[:i] if names.index(name) > names.index(axis)]
                by_axis[axis] = StridedShard(dim, split_factor=math.prod(inner_sizes)) if inner_sizes else Shard(dim)
        return tuple(by_axis[name] for name in names)

    def __str__(self) -> str:
        dims = ", ".join("·" + ("/" + "+".join(d) if d else "") for d in self.dims)
        partial = "".join(f" +{axis}" for axis in sorted(self.partial))
        rows = "|".join(map(_rows_text, self.rows))
        return (
            f"[{dims}]{partial}"
            + (f" @{self.memory}" if self.memory != DEVICE else "")
            + (f" #{rows}" if self.rows else "")
            + (f" %{','.join(map(str, self.parts))}" if self.parts else "")
        )


def runs_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """(first, number) of each run of consecutive numbers.

    >>> runs_of((0, 1, 2, 6, 7))
    [(0, 3), (6, 2)]
    """
    out: list[tuple[int, int]] = []
    for row in rows:
        if out and row == sum(out[-1]):
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((row, 1))
    return out


def _rows_text(rows: Sequence[int]) -> str:
    return ",".join(f"{start}-{start + n - 1}" if n > 1 else str(start) for start, n in runs_of(rows))


def _parse_rows(text: str) -> tuple[int, ...]:
    ends = [span.split("-") for span in text.split(",") if span]
    return tuple(row for span in ends for row in range(int(span[0]), int(span[-1]) + 1))


GROUPS = {
    "params": "the parameters that the model computes with",
    "grads": "the sums of the gradients of a step",
    "opt": "master weights, optimizer state and average",
    "acts": "the activations that a remat policy keeps",
}


@dataclass(frozen=True)
class Tier:
    """A memory, and the fraction of a group's bytes, in whole leaves, that rests in it, not on the device."""

    memory: StateMemory = DEVICE
    fraction: float = 1.0

    def __str__(self) -> str:
        return self.memory + (f":{self.fraction:g}" if self.fraction < 1.0 else "")


@dataclass(frozen=True)
class Offload:
    """A Tier for each group. `str` gives the text that `parse` reads."""

    params: Tier = Tier()
    grads: Tier = Tier()
    opt: Tier = Tier()
    acts: Tier = Tier()

    @classmethod
    def parse(cls, text: str) -> Offload:
        """The Offload of a text such as "params=nvme,acts=host" or "opt=host:0.5" (half of the bytes)."""
        tiers: dict[str, Tier] = {}
        for entry in filter(None, text.replace(" ", "").split(",")):
            group, equals, tier_text = entry.partition("=")
            memory, colon, fraction = tier_text.partition(":")
            if group not in GROUPS or not equals:
                raise ValueError(
                    f"offload {text!r}: {group!r} is not a group{nearest(group, GROUPS)}; "
                    f"use {', '.join(GROUPS)}, as in params=nvme,opt=nvme"
                )
            if memory not in MEMORIES:
                raise ValueError(
                    f"offload {text!r}: {memory!r} is not a memory{nearest(memory, MEMORIES)}; use "
                    f"{', '.join(MEMORIES)}"
                )
            if group in tiers:
                raise ValueError(f"offload {text!r}: {group} is given twice")
            try:
                share = float(fraction) if colon else 1.0
            except ValueError:
                share = -1.0
            if MEMORIES[memory].on_device and colon:
                raise ValueError(f"offload {text!r}: {group}=device has no fraction; give that of host or nvme")
            if not 0.0 < share <= 1.0 or (group == "acts" and share < 1.0):
                raise ValueError(
                    f"offload {text!r}: the fraction {fraction!r} of {group} must be above 0 and at most 1 "
                    "(acts: all of them)"
                )
            tiers[group] = Tier(MEMORIES[memory], share)
        return cls(**tiers)

    @property
    def on_disk(self) -> bool:
        """Whether any group rests on a disk."""
        return any(tier.memory.on_disk for tier in (self.params, self.grads, self.opt, self.acts))

    def __str__(self) -> str:
        tiers = {group: getattr(self, group) for group in GROUPS}
        return ",".join(f"{group}={tier}" for group, tier in tiers.items() if not tier.memory.on_device)


ALL_ON_DEVICE = Offload()


def select_largest(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """The names of the largest leaves that together hold at least `fraction` of all bytes. sizes: {name: bytes}."""
    names, selected_bytes, total = set(), 0, sum(sizes.values())
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if selected_bytes >= fraction * total:
            break
        names.add(name)
        selected_bytes += sizes[name]
    return names
