"""Memory of the host that lasts: whole pages, as many as are asked for, pinned if this process uses a GPU.

PyTorch's allocator of pinned memory rounds each tensor up to a power of two and never gives memory back, so the leaves
of a state are taken here: a large one has pages of its own, small ones lie in one arena.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import resource
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.storage import PAGE

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
    """Unpin memory that nobody has any more, once `busy`, a GPU, has made the copies under way; then it is unmapped."""
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
