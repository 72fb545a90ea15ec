"""Memory of the host that lasts, whole pages, pinned if this process uses a GPU; and the host's NUMA node of a GPU.

PyTorch's allocator of pinned memory rounds each tensor up to a power of two and never gives memory back, so the leaves
of a state are taken here: a large one has pages of its own, small ones lie in one arena.

Threads of a process belong on the cores of its GPU's node, whose copies cross to no other socket; memory follows, as
Linux takes a page from the node of the thread that first writes to it. A process that is bound already (taskset,
numactl, Slurm, torchrun's --numa-binding, OpenMP's variables) is left alone.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.storage import PAGE

SYS = Path("/sys")  # where Linux tells of its devices
TASKS = Path("/proc/self/task")  # a folder for each thread of this process
# The user's own choice of cores for the threads of GCC's, Intel's and LLVM's OpenMP.
VARIABLES = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class ThreadPlacement(NamedTuple):
    """Where the threads of a process belong."""

    cores: frozenset[int]  # the numbers of those that they are bound to; none: they are left as they are
    processes: int  # of this host, that share the cores which this one may use
    line: str  # what is done, and why; "" on a host of one node


def cores() -> int:
    """The cores this process may use; of macOS, which does not say, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_allowed() -> frozenset[int]:
    """The numbers of the cores this process may use; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def parse_cores(text: str) -> frozenset[int]:
    """The numbers in a list of Linux.

    >>> sorted(parse_cores("0-2,8\\n"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for interval in filter(None, text.strip().split(",")):
        first, _, last = interval.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def nodes_of(root: Path = SYS) -> dict[int, frozenset[int]]:
    """{number: cores} of the NUMA nodes of this host that have cores; {} if unknown; root: in place of /sys."""
    nodes = {}
    for path in (root / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            nodes[int(path.name.removeprefix("node"))] = parse_cores((path / "cpulist").read_text())
    return {node: cores for node, cores in sorted(nodes.items()) if cores}


def node_of(device: torch.device, root: Path = SYS) -> int | None:
    """The number of a GPU's NUMA node; None where the system does not tell."""
    address = gpu.pci_address(device)
    if not address:
        return None
    try:
        node = int((root / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def find_placement(device: torch.device, processes: int = 1, root: Path = SYS) -> ThreadPlacement:
    """Where the threads of this process belong: on the cores of its GPU's NUMA node, unless bound already."""
    everywhere = frozenset[int]()
    nodes = nodes_of(root)
    if device.type != "cuda" or len(nodes) < 2 or not hasattr(os, "sched_setaffinity"):
        return ThreadPlacement(everywhere, processes, "")
    prefix = f"not bound to a NUMA node of {len(nodes)}"
    variables = [name for name in VARIABLES if os.environ.get(name)]
    if variables:
        return ThreadPlacement(everywhere, processes, f"{prefix}: {variables[0]} says where threads run")
    allowed, all_cores = frozenset(os.sched_getaffinity(0)), frozenset.union(*nodes.values())
    if not allowed >= all_cores:
        return ThreadPlacement(
            everywhere,
            processes,
            f"{prefix}: what started this process has bound it to {len(allowed)} of {len(all_cores)} cores",
        )
    node = node_of(device, root)
    if node not in nodes:
        return ThreadPlacement(everywhere, processes, f"{prefix}: the system does not tell which is the GPU's")
    sharing = sum(node_of(torch.device("cuda", i), root) == node for i in range(processes))
    cores_text = f"{len(nodes[node])} cores of NUMA node {node} of {len(nodes)}, that of GPU {device.index or 0}"
    return ThreadPlacement(nodes[node], max(1, sharing), f"bound to the {cores_text} (OMP_PLACES says otherwise)")


def bind_threads(cores: frozenset[int], tasks: Path = TASKS) -> None:
    """Have all threads of this process, also later ones, run on these cores alone."""
    if not cores:
        return
    os.sched_setaffinity(0, cores)  # first this one, so that new threads are born there
    for task in tasks.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


HUGE = 2 << 20  # bytes of a huge page of x86-64
LARGE_BYTES = 1 << 20  # bytes from which on a tensor has pages of its own
ALIGNED = 64  # bytes; where tensors of an arena begin
# Dead memory that could not be given back yet: a graph was being recorded.
_PENDING_RELEASES: list[tuple[mmap.mmap, torch.device, Callable[[], object]]] = []


def round_to_pages(n: int) -> int:
    """The smallest multiple of PAGE that is at least `n`."""
    return -(-n // PAGE) * PAGE


def bytes_taken(sizes: Iterable[int]) -> int:
    """The bytes of the host's memory that `empty_packed` takes for tensors of so many bytes.

    >>> bytes_taken([3 << 20, 100, 4])
    3149824
    """
    sizes = [*sizes]
    small = sum(-(-n // ALIGNED) * ALIGNED for n in sizes if n < LARGE_BYTES)
    return sum(round_to_pages(n) for n in sizes if n >= LARGE_BYTES) + round_to_pages(small)


def bytes_cached(size: int) -> int:
    """The bytes that PyTorch's allocator of pinned memory takes for a tensor of `size` bytes.

    >>> bytes_cached(5000), bytes_cached(4096), bytes_cached(0)
    (8192, 4096, 0)
    """
    return 1 << (size - 1).bit_length() if size else 0


def _map_pages(size: int, align: int) -> tuple[mmap.mmap, np.ndarray]:
    # anonymous and private: a shared one has small pages
    memory = mmap.mmap(-1, size + (align if align > PAGE else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without them, as small virtual machines have
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % align
    return memory, np.ndarray((size,), np.uint8, buffer=memory, offset=first)


def aligned_memory(size: int) -> np.ndarray:
    """`size` zero bytes in whole pages, large ones from a huge page on."""
    return _map_pages(round_to_pages(max(size, 1)), HUGE if size >= HUGE else PAGE)[1]


def allocate_pages(size: int, label: str, remedy: str, *, align: int = PAGE, awaited: bool = False) -> np.ndarray:
    """`size` bytes of fresh memory as uint8, touched by this thread, pinned if this process uses a GPU."""
    # Huge pages where the system has them: a direct transfer then needs few descriptors. The memory goes back to the
    # system after the work that the GPU has been given by then, unless the owner waits for all copies itself (awaited).
    _release_pending()
    memory, pages = _map_pages(size, align)
    pages[:: mmap.PAGESIZE] = 0
    if gpu.in_use():
        code, unpin = gpu.pin_pages(pages.ctypes.data, size)
        if code:
            raise ValueError(f"CUDA cannot pin the {size:,} bytes of {label} (error {code}); {remedy}, or {_limit()}")
        if hasattr(mmap, "MADV_DONTFORK"):  # else a page that is written after a fork is another than CUDA's
            memory.madvise(mmap.MADV_DONTFORK)
        busy = None if awaited else gpu.current_device()
        weakref.finalize(pages, _release_pages, memory, busy, unpin).atexit = False
    return pages


def _limit() -> str:
    """What to do about the limit of locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "is not limited here" if soft == resource.RLIM_INFINITY else f"is {soft:,} bytes here"
    return f"allow more locked memory (ulimit -l, which {limit})"


def _release_pages(memory: mmap.mmap, busy: torch.device | None, unpin: Callable[[], object]) -> None:
    """Unpin and unmap memory that nobody has, once `busy`, a GPU, has made its copies."""
    if busy is not None and gpu.in_use():
        if gpu.is_capturing(busy):  # which a wait would end
            _PENDING_RELEASES.append((memory, busy, unpin))
            return
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed, on which nothing is under way
            gpu.synchronize(busy)
    unpin()


def _release_pending() -> None:
    """Give back what could not be while a graph was being recorded."""
    pending = [*_PENDING_RELEASES]
    _PENDING_RELEASES.clear()
    for allocation in pending:
        _release_pages(*allocation)


def empty_packed(like: Sequence[tuple[Sequence[int], torch.dtype]], label: str) -> list[Tensor]:
    """Uninitialised tensors in memory of the host that lasts, each with a storage of its own."""
    remedy = "offload less (offload= of zero_plan, --offload of a run), or to a disk"
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
    starts, arena = {}, 0
    for i, size in enumerate(sizes):
        if size < LARGE_BYTES:
            starts[i], arena = arena, arena + -(-size // ALIGNED) * ALIGNED
    small = allocate_pages(round_to_pages(arena), label, remedy) if arena else np.empty(0, np.uint8)
    out = []
    for i, (shape, dtype) in enumerate(like):
        if not sizes[i]:
            out.append(torch.empty(tuple(shape), dtype=dtype, device=gpu.HOST))
            continue
        pages = small[starts[i] :] if i in starts else allocate_pages(round_to_pages(sizes[i]), label, remedy)
        out.append(torch.from_numpy(pages[: sizes[i]]).view(dtype).view(tuple(shape)))
    return out


def empty_persistent(shape: Sequence[int], dtype: torch.dtype, label: str, *, pinned: bool) -> Tensor:
    """One of `empty_packed`; plain memory unless `pinned`, as on a CPU and in a plan."""
    return empty_packed([(shape, dtype)], label)[0] if pinned else torch.empty(shape, dtype=dtype, device=gpu.HOST)


def to_host(tensors: Sequence[Tensor], device: torch.device, label: str) -> list[Tensor]:
    """The tensors in memory of the host that lasts, pinned if `device` is a GPU."""
    if device.type != "cuda":
        return [x.to(gpu.HOST) for x in tensors]
    indices = [i for i, x in enumerate(tensors) if x.is_cuda or not x.is_pinned()]
    buffers = empty_packed([(tensors[i].shape, tensors[i].dtype) for i in indices], label)
    copies = {i: buffer.copy_(tensors[i]) for i, buffer in zip(indices, buffers)}
    return [copies.get(i, x) for i, x in enumerate(tensors)]
