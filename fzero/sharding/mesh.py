"""The mesh: named axes over the processes of a run. Every mesh has all axes; collectives over one of size 1 return
their input.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import math
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.comm.axes import AXES, CP, DP, EP, PP, RP, TP, joined_links, links_of
from fzero.comm.communicator import Axis, Communicator
from fzero.comm.ledger import Ledger
from fzero.comm.messages import ProgramAgreement, RankError
from fzero.core import gpu
from fzero.core.arguments import checked, expect_kind
from fzero.core.config_tables import Allowed
from fzero.core.pytree import nearest
from fzero.core.text_parsing import environment_number

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by the device of the run; small tables stay on the host
# What to do where one cannot start, by the device of the run.
STARTING = {
    "cpu": ("gloo", "GLOO_SOCKET_IFNAME names the network interface, such as lo for one host and eth0 for several"),
    "cuda": (
        "NCCL",
        "NCCL_DEBUG=INFO shows more, NCCL_SOCKET_IFNAME names the network interface, such as eth0, and device=cpu "
        "(--device cpu) trains without GPUs",
    ),
}
_MESHES = itertools.count()  # every rank makes the same meshes in the same order


@dataclass(frozen=True)
class Mesh:
    """The six axes of a run as this process sees them; `mesh["dp"]` is one of them. Make it by `make_mesh`.

    An axis that a run does not use has size 1. Two meshes are equal if their axes are.

    >>> from fzero.sharding import fake_mesh
    >>> mesh = fake_mesh({"dp": 2, "tp": 4}, rank=5)
    >>> print(mesh, mesh.size, mesh["dp"].rank, mesh["tp"].rank)
    Mesh(dp=2, tp=4) 8 1 1
    """

    axes: tuple[Axis, ...]
    device_mesh: DeviceMesh | None = field(
        default=None, compare=False
    )  # over the axes in use, outermost first; for DTensor
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)
    store: dist.Store | None = field(default=None, compare=False, repr=False)
    agreement: ProgramAgreement | None = field(default=None, compare=False, repr=False)
    owned: bool = field(default=False, compare=False, repr=False)  # whether make_mesh initialised torch.distributed
    # Several of dp, ep and cp as one, where they are in use: see joined_links.
    links: tuple[Axis, ...] = field(default=(), compare=False, repr=False)
    members: Axis = field(default_factory=lambda: Axis(RP))  # of whose ranks this is the mesh of one, see `member`

    def __getitem__(self, name: str) -> Axis:
        for axis in (*self.axes, *self.links):
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {name!r}; its axes are {', '.join(AXES)}{nearest(name, AXES)}")

    @property
    def dp(self) -> Axis:
        """The axis of data, and of the shards of ZeRO."""
        return self[DP]

    @property
    def rp(self) -> Axis:
        """That of replicas of the dp group."""
        return self[RP]

    @property
    def tp(self) -> Axis:
        """That of tensor parallelism."""
        return self[TP]

    @property
    def pp(self) -> Axis:
        """That of the pipeline."""
        return self[PP]

    @property
    def cp(self) -> Axis:
        """That of context parallelism."""
        return self[CP]

    @property
    def ep(self) -> Axis:
        """That of experts."""
        return self[EP]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes, by name."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(a.size for a in self.axes)

    @property
    def stage_size(self) -> int:
        """The number of processes with the same layers, next to each other."""
        return self.size // self.pp.size

    @property
    def rank(self) -> int:
        """This process's number among all of them."""
        rank = 0
        for name in AXES.by_rank:
            rank = rank * self[name].size + self[name].rank
        return rank

    def link(self, axes: Sequence[str] | None = None) -> Axis:
        """The ranks of those of dp, ep and cp that are among `axes` (None: of all), as one axis: those over which ZeRO
        shards a leaf.

        >>> from fzero.sharding import fake_mesh
        >>> mesh = fake_mesh({"dp": 2, "ep": 2, "cp": 2}, rank=5)
        >>> mesh.link()[:3], mesh.link(("dp", "cp"))[:3]
        (('dp+ep+cp', 8, 5), ('dp+cp', 4, 3))
        """
        names = links_of([axis for axis in AXES.shards if axes is None or axis in axes], self.sizes)
        return self[names[0]] if names else self[AXES.shards[0]]

    def member(self) -> Mesh:
        """The mesh of one member of local steps (see make_local_step): of the processes with this one's number along
        rp, which has size 1 in it. Rows of batches are still those of the run.

        >>> from fzero.sharding import fake_mesh
        >>> mesh = fake_mesh({"dp": 2, "rp": 4}, rank=5).member()
        >>> print(mesh, mesh.size, mesh.data_size, mesh.data_rank)
        Mesh(dp=2) 2 8 5
        """
        axes = tuple(Axis(RP) if axis.name == RP else axis for axis in self.axes)
        return replace(self, axes=axes, members=self.rp, owned=False)

    @property
    def data_size(self) -> int:
        """The number of ranks with data of their own: rp times dp times ep, those of other members among them."""
        return self.members.size * math.prod(self[name].size for name in AXES.by_data_rank)

    @property
    def data_rank(self) -> int:
        """This process's number among those."""
        rank = self.members.rank
        for name in AXES.by_data_rank:
            rank = rank * self[name].size + self[name].rank
        return rank

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """A context in which each collective first makes sure that all ranks of its axis are at the same one (see
        comm.messages).

        A mismatch then raises RankError naming both ranks and their calls, as does a rank that does not arrive within
        the mesh's timeout; a psum of a tensor that is the same on all ranks raises ValueError. Each collective costs
        about a millisecond more.
        """
        return contextlib.nullcontext() if self.agreement is None else self.agreement.checked()

    def fail(self, reason: str) -> None:
        """Leave for the other ranks why this one ends: their errors will say it."""
        if self.agreement is not None:
            self.agreement.fail(reason)

    def abort(self) -> None:
        """End the collectives on GPUs under way, whose results are then anything: before this process ends with them
        unfinished."""
        for communicator in self._communicators():
            communicator.abort()

    def close(self) -> None:
        """Wait for all ranks, and end torch.distributed if make_mesh began it; the mesh cannot be used afterwards.

        Raises RankError if another rank has ended before, by an error of its own, say.
        """
        if not (self.owned and dist.is_initialized()):
            return
        try:
            dist.barrier()
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                self.abort()
                dist.destroy_process_group()
            message = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise RankError(
                f"mesh.close: another rank ended before it closed its mesh, and its own error says why ({message})"
            ) from None
        for communicator in self._communicators():
            communicator.close()
        dist.destroy_process_group()

    def _communicators(self) -> list[Communicator]:
        return [axis.communicator for axis in (*self.axes, *self.links) if axis.communicator is not None]

    def __str__(self) -> str:
        return f"Mesh({_sizes_text(self.sizes).removeprefix('of ')})"


def _check_sizes(sizes: Mapping[str, int] | None) -> dict[str, int]:
    expect_kind("mesh", {} if sizes is None else sizes, Mapping, 'write the sizes of its axes, such as {"dp": 2}')
    sizes = dict(sizes or {})
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(AXES)}{nearest(name, AXES)}")
        if type(size) is not int or size < 1:
            raise ValueError(f"mesh: axis {name} has size {size!r}; a size is a whole number of at least 1")
    return {name: sizes.get(name, 1) for name in AXES}


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "of one process"


def _coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    coordinates = {}
    for name in reversed(AXES.by_rank):
        rank, coordinates[name] = divmod(rank, sizes[name])
    return coordinates


SECONDS = Allowed(lambda s: 0 < s <= 1e9, "a number of seconds above 0 and at most 1e9")


@checked("sizes")
def make_mesh(
    sizes: Mapping[str, int] | None = None,
    *,
    timeout_s: Annotated[float, SECONDS] = 600.0,
    device: str | None = None,
    ordered: bool = False,
) -> Mesh:
    """The mesh with these axis sizes; axes that are not named have size 1. Every process calls it.

    Under torchrun it initialises torch.distributed, if that was not done before: gloo for tensors in the host's memory,
    NCCL for those on a GPU, of which each process takes its own.
    Ranks are numbered with pp outermost, then rp, dp, ep, cp, and tp innermost.

    sizes: {axis: number of ranks}, e.g. {"dp": 2, "tp": 2}; None: one process.
    timeout_s: seconds that a rank waits for another one.
    device: "cpu" or "cuda"; None: that of torch.distributed if it is initialised, else cuda if there is one.
    ordered: whether sums over ranks are added in the order of `core.tree_sum` with NCCL too; with gloo they always are.

    Communicates: what DeviceMesh sends to make its groups.
    Raises ValueError for an unknown axis or device, a size below 1, a timeout out of range, or sizes whose product is
    not the number of processes.

    >>> print(make_mesh())
    Mesh(one process)
    >>> make_mesh({"data": 2})
    Traceback (most recent call last):
    ValueError: mesh: unknown axis 'data'; the axes are dp, rp, tp, pp, cp, ep
    """
    sizes = _check_sizes(sizes)
    process_count = math.prod(sizes.values())
    started = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if started else environment_number("WORLD_SIZE", 1, 1)
    if process_count != world:
        raise ValueError(
            f"mesh {_sizes_text(sizes)} asks for {process_count} process{'es' * (process_count > 1)} and this run has "
            f"{world}; start it with `torchrun --nproc-per-node {process_count} ...`, or choose sizes whose product is "
            f"{world}"
        )
    if device not in (None, *BACKENDS):
        raise ValueError(f"mesh: device is {device!r}; it must be cpu or cuda")
    if process_count == 1:
        return one_process()
    if not started:
        device = gpu.resolve_device(device or "auto")
        if sizes[PP] > 1:
            gpu.widen_queues()
        start_processes(gpu.use_device(device, environment_number("LOCAL_WORLD_SIZE", 1, 1)), timeout_s)
    device = device or ("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    used = [name for name in AXES.by_rank if sizes[name] > 1]
    with _naming_transport(device, dist.get_rank()):
        device_mesh = init_device_mesh(device, tuple(sizes[name] for name in used), mesh_dim_names=tuple(used))
    store = dist.PrefixStore(f"fzero/{next(_MESHES)}", dist.distributed_c10d._get_default_store())
    ledger, agreement = Ledger(), ProgramAgreement(store, dist.get_rank(), timeout_s)
    coordinates, communicators = _coordinates(sizes, dist.get_rank()), {}
    joined = {"+".join(axes): axes for axes in joined_links(sizes)}
    for name in (*used, *joined):
        group = device_mesh[joined[name]]._flatten().get_group() if name in joined else device_mesh.get_group(name)
        communicators[name] = Communicator(
            name,
            dist.get_process_group_ranks(group),
            transport="nccl" if device == "cuda" else "gloo",
            ledger=ledger,
            agreement=agreement,
            group=group,
            ordered=ordered,
        )
    axes = tuple(Axis(name, sizes[name], coordinates[name], communicators.get(name)) for name in AXES)
    links = tuple(
        Axis(name, math.prod(sizes[a] for a in joined[name]), communicator.rank, communicator)
        for name, communicator in communicators.items()
        if name in joined
    )
    return Mesh(axes, device_mesh, ledger, store, agreement, owned=not started, links=links)


def start_processes(device: torch.device, timeout_s: float, **rendezvous: Any) -> None:
    """Initialise torch.distributed; raises ValueError with this rank, its host and what gloo or NCCL said."""
    kind, timeout = device.type, datetime.timedelta(seconds=timeout_s)
    # NCCL is told its GPU: otherwise it guesses one for a barrier.
    bound = {"device_id": device} if kind == "cuda" else {}
    with _naming_transport(kind, rendezvous.get("rank", environment_number("RANK", 0))):
        dist.init_process_group(BACKENDS[kind], timeout=timeout, **bound, **rendezvous)


@contextlib.contextmanager
def _naming_transport(kind: str, rank: int) -> Iterator[None]:
    """A context in which an error of gloo or NCCL becomes one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # both, by PyTorch's functions
        transport, fix = STARTING[kind]
        location = f"rank {rank} on host {socket.gethostname()}"
        raise ValueError(f"{location}: {transport} does not start: {_gist(str(error))}; {fix}") from None


def _gist(text: str) -> str:
    """The gist of an error of PyTorch's transports: NCCL's last error, else its kind, else the first line."""
    text = re.sub(r"^\[[^]]*\]:? *", "", text.strip())
    kind = re.search(r"^nccl\w+: .*", text, re.MULTILINE)
    last = re.search(r"Last error:\s*(\S.*)", text)
    summary = " ".join(fragment for fragment in (kind and kind[0], last and last[1]) if fragment)
    return (summary or text.partition("\n")[0]).rstrip(". ")


def one_process() -> Mesh:
    """The mesh of a single process: every axis has size 1, and nothing is communicated.

    >>> one_process().size
    1
    """
    return Mesh(tuple(Axis(name) for name in AXES))


@checked("sizes")
def fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Mesh:
    """The mesh of these axis sizes as process `rank` sees it, without other processes: for plans on fake or meta
    tensors, and for shapes.

    Collectives return results of the right shape, without the other ranks' values, and are entered in its ledger.
    Raises ValueError for an unknown axis, a size below 1, or a rank that the mesh has not.

    >>> from fzero.sharding import Spec, local_shape
    >>> local_shape((8, 6), Spec(("dp",)), fake_mesh({"dp": 4}))
    (2, 6)
    """
    sizes = _check_sizes(sizes)
    world = math.prod(sizes.values())
    if not 0 <= rank < world:
        raise ValueError(f"fake_mesh: rank is {rank} and mesh {_sizes_text(sizes)} has ranks 0 to {world - 1}")
    coordinates, ledger, agreement, axes = _coordinates(sizes, rank), Ledger(), ProgramAgreement(None, rank, 0.0), []

    def stride(name: str) -> int:
        return math.prod(sizes[inner] for inner in AXES.by_rank[AXES.by_rank.index(name) + 1 :])

    def communicator(names: Sequence[str]) -> Communicator:
        first = rank - sum(coordinates[name] * stride(name) for name in names)
        places = itertools.product(*(range(sizes[name]) for name in names))
        ranks = [first + sum(i * stride(name) for i, name in zip(position, names)) for position in places]
        return Communicator("+".join(names), ranks, transport="fake", ledger=ledger, agreement=agreement)

    for name in AXES:
        size = sizes[name]
        axes.append(Axis(name, size, coordinates[name], communicator((name,)) if size > 1 else None))
    link_groups = [communicator(names) for names in joined_links(sizes)]
    links = tuple(Axis(link_group.axis, link_group.size, link_group.rank, link_group) for link_group in link_groups)
    return Mesh(tuple(axes), ledger=ledger, agreement=agreement, links=links)
