"""What a run sets for its whole process, and sets back at its end."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import torch

from fzero.core import gpu, numa
from fzero.run.machine import onednn_switch

# Each is read once, by gloo, NCCL, CUDA or the profiler, when they begin.
VARIABLES = (
    *gpu.ALLOCATOR_SETTINGS,
    gpu.QUEUES,
    "GLOO_SOCKET_IFNAME",
    "KINETO_LOG_LEVEL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """A context, or a decorator, at whose end the process has the settings of its beginning, also after an error: its
    threads, how float32 products are made, its cores, its current GPU, its limit of open files, and VARIABLES.

    So numbers that a caller computes after a run have the bits that they had before it.

    >>> before = torch.get_num_threads()
    >>> with settings_restored():
    ...     torch.set_num_threads(before + 1)
    >>> torch.get_num_threads() == before
    True
    """
    threads, switch = torch.get_num_threads(), onednn_switch()
    products = switch.fp32_precision if switch is not None else ""
    variables = {name: os.environ.get(name) for name in VARIABLES}
    cores = numa.cores_allowed()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    device = gpu.current_device()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if switch is not None and switch.fp32_precision != products:
            switch.fp32_precision = products
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if numa.cores_allowed() != cores:
            numa.bind_threads(cores)
        if resource.getrlimit(resource.RLIMIT_NOFILE) != files:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        gpu.select_device(device)
