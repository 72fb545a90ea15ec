"""The GPU of this process: which it is, its memory, its streams, events and pinned memory. Nothing else in fzero calls
torch.cuda.

A process uses one GPU. Copies to and from it run on two streams of their own, one for each direction, beside its
computation: `copy_in` and `copy_out` start one and return a `Copied`, whose `use` makes the current stream wait for it,
and whose `finish` makes the host wait. On a CPU, and in a plan, a copy is made at once, and nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOST = torch.device("cpu")
# PyTorch's settings of its GPU allocator; the second name is that of 2.9 and later, which reads both.
# Segments that grow in place lose less memory to fragments where sizes vary (compiled blocks, evaluations).
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
KINDS = ("auto", "cpu", "cuda")  # values of a config's `device`; AMD's GPUs are "cuda" to PyTorch too


# ---- which device ----


def count_gpus() -> int:
    """The number of GPUs that PyTorch finds on this machine; 0 on a CPU build.

    >>> count_gpus() >= 0
    True
    """
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(wanted: str) -> str:
    """ "cpu" or "cuda": what `wanted` is; for "auto", the GPU where there is one.

    >>> resolve_device("cpu")
    'cpu'
    """
    if wanted != "auto":
        return wanted
    return "cuda" if count_gpus() else "cpu"


def local_rank() -> int:
    """The number of this process among those of its host, by torchrun's LOCAL_RANK; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device_here(kind: str) -> torch.device:
    """The device of this process: the CPU, or the GPU of its local rank. It touches no GPU."""
    return HOST if kind == "cpu" else torch.device(kind, local_rank())


def use_device(kind: str, processes: int = 1) -> torch.device:
    """Make the device of this process the current one, and return it.

    processes: those of this host; each takes a GPU of its own.
    Raises ValueError if "cuda" is asked for and there is no GPU, or fewer GPUs than processes.
    """
    if kind == "cpu":
        return HOST
    found = count_gpus()
    if not found:
        raise ValueError("device is cuda and PyTorch finds no GPU here; use --device cpu, or a CUDA build of PyTorch")
    if max(processes, local_rank() + 1) > found:
        raise ValueError(
            f"device is cuda and {max(processes, local_rank() + 1)} processes of this host share {found} "
            f"GPU{'s' * (found > 1)}; a process takes a GPU of its own: start {found} a host "
            f"(torchrun --nproc-per-node {found}), or use --device cpu"
        )
    device = device_here(kind)
    if not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):  # read once, when PyTorch begins to use the GPU
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    select_device(device)
    return device


def select_device(device: torch.device) -> None:
    """Make a GPU the current one of this process, and begin to use it; nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()


def in_use() -> bool:
    """Whether this process uses a GPU, not whether the machine has one: a run on the CPU must not begin to."""
    return torch.cuda.is_initialized()


def describe_device(device: torch.device) -> str:
    """The device in words: "the CPU", or the GPU with its number and name."""
    return "the CPU" if device.type == "cpu" else f"GPU {device.index or 0}, {torch.cuda.get_device_name(device)}"


def properties(device: torch.device) -> Any:
    """PyTorch's description of a GPU: name, multi_processor_count, major, minor, total_memory."""
    return torch.cuda.get_device_properties(device)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which `device` is the current GPU, as launches of Triton need; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- memory ----


def free_bytes(device: torch.device) -> int:
    """The memory of a GPU that this process can still have: what no process holds, and what its allocator keeps
    unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that tensors have held on a GPU since `reset_peak`; None for a CPU, which does not count it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak of a GPU's memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def pin_pages(address: int, size: int) -> tuple[int, Callable[[], None]]:
    """Pin memory that is there already, for all GPUs: (CUDA's error code, 0 for none; the function that unpins it)."""
    runtime = torch.cuda.cudart()
    assert runtime is not None  # there is a GPU
    everywhere = 1  # cudaHostRegisterPortable
    return int(runtime.cudaHostRegister(address, size, everywhere)), lambda: runtime.cudaHostUnregister(address)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """`x`, a tensor in the host's memory, pinned if `device` is a GPU, so that copies to it need no wait."""
    return x.pin_memory() if device.type == "cuda" else x


def to_host(x: Tensor, device: torch.device) -> Tensor:
    """`x` in the host's memory, pinned if `device`, which the copies will go to, is a GPU."""
    if device.type != "cuda":
        return x.to(HOST)
    if not x.is_cuda:
        return x if x.is_pinned() else x.pin_memory()
    return torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True).copy_(x)


# ---- order ----


def synchronize(device: torch.device) -> None:
    """Wait until all that was given to a GPU is done; on a CPU it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_time() -> Any:
    """A moment in the work of the current stream; seconds between two of them: `first.elapsed_time(second) / 1e3`."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def product_rate(dtype: torch.dtype, device: torch.device, side: int = 8192, times: int = 10) -> float:
    """The FLOP/s of square products on a GPU, timed by its own clock.

    Of random numbers: products of ones take less power, and run at a higher clock than any training does.
    """
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    first = mark_time()
    for _ in range(times):
        torch.mm(a, b)
    last = mark_time()
    synchronize(device)
    return 2.0 * side**3 * times / (first.elapsed_time(last) / 1e3)


class Copied(NamedTuple):
    """A copy that was started. One of `use` and `finish` must be called before its tensor is read."""

    tensor: Tensor
    event: Any = None  # after the copy; None: it is made

    def use(self) -> Tensor:
        """The tensor on the GPU, for the current stream, which waits for the copy; the host does not."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.event)
            self.tensor.record_stream(stream)  # its memory is another stream's
        return self.tensor

    def finish(self) -> Tensor:
        """The tensor, once the host has waited for the copy: its source may be reused."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor if self.tensor.device == HOST else self.use()


@functools.cache
def _copy_streams(device: torch.device) -> tuple[Any, Any]:
    # One each way for the whole process: memory that is freed on a stream is not given to another one, so a stream for
    # each pass would hold the buffers of each.
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def copy_in(x: Tensor, device: torch.device, *, after: Any = None) -> Copied:
    """Start to copy `x` from the host's memory to `device`.

    If `x` is pinned the host does not wait, and must not write into `x` before the copy is made. after: an event that
    the copy waits for.
    """
    if device.type != "cuda":
        return Copied(x.to(device))
    stream, _ = _copy_streams(device)
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        there = x.to(device, non_blocking=True)
        return Copied(there, stream.record_event())


def copy_out(x: Tensor) -> Copied:
    """Start to copy `x` to memory of the host, pinned for a GPU's, behind what the current stream was given so far."""
    out = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.is_cuda)
    if not x.is_cuda:
        return Copied(out.copy_(x))
    _, stream = _copy_streams(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        out.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return Copied(out, stream.record_event())
