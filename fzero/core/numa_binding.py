"""The NUMA node of a GPU: the cores and the memory of a host that its copies reach without crossing to another socket.

Threads of a process belong on the cores of its GPU's node; memory follows, as Linux takes a page from the node of the
thread that first writes to it. A process that is bound already (taskset, numactl, Slurm, torchrun's --numa-binding,
OpenMP's variables) is left alone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import torch

from fzero.core import gpu

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
    """The number of the NUMA node that a GPU is at; None where the system does not tell, as in some containers."""
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
    """Have all threads of this process run on these cores alone, and those that they start later; nothing for none."""
    if not cores:
        return
    os.sched_setaffinity(0, cores)  # first this one, so that new threads are born there
    for task in tasks.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)
