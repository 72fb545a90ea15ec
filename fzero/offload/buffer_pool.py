"""The memory that everything on its way to or from a disk passes through: allocated once, lent in pieces, never more than its size."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.storage import PAGE

HUGE = 2 << 20


def round_to_pages(n: int) -> int:
    """The smallest multiple of PAGE that is at least `n`."""
    return -(-n // PAGE) * PAGE


class Buffer(NamedTuple):
    """A piece of the buffer pool as a tensor. It is lent until the last tensor that shares its memory is gone."""

    raw: Tensor  # uint8, whole pages
    view: Tensor  # the same memory, in the shape and dtype asked for


class BufferPool:
    """`size` bytes (rounded up to whole huge pages) for Buffers.

    The memory is anonymous, in huge pages where the system has them (a direct transfer then describes it in few pieces), touched once,
    and pinned where there is CUDA.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE) * HUGE
        self.memory = mmap.mmap(-1, self.size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a shared one has small pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        start = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.base = -start % HUGE
        np.frombuffer(self.memory, np.uint8)[:: mmap.PAGESIZE] = 0
        if torch.cuda.is_available():
            address, runtime = start + self.base, torch.cuda.cudart()
            if code := int(runtime.cudaHostRegister(address, self.size, 1)):  # 1: for all devices
                raise ValueError(
                    f"CUDA cannot pin the {self.size:,} bytes of the offload buffers (error {code}); give them less memory "
                    "(nvme.buffer_mb, --buffer-mb), or allow more locked memory (ulimit -l)"
                )
            weakref.finalize(self.memory, runtime.cudaHostUnregister, address).atexit = False
        self.free: list[tuple[int, int]] = [(0, self.size)]  # (offset, size), in order
        self.returned: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.lock = threading.Lock()
        self.lent = self.peak = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, busy: Callable[[], bool] = lambda: False) -> Buffer:
        """A Buffer of `shape`; its values are whatever was there. Waits for one to be returned while `busy()`.

        Raises ValueError where the buffer pool is too small for what is held at a time.
        """
        n = math.prod(shape) * dtype.itemsize
        size = max(PAGE, round_to_pages(n))
        while True:
            working = busy()  # asked first: a request that ends after this has returned its memory before the next look
            offset = self._place(size)
            if offset is not None:
                break
            if not working and self.returned.empty():
                raise ValueError(
                    f"the offload buffers are {self.size:,} bytes, of which {self.lent:,} are in use, and {size:,} more are needed "
                    "at once; give them more (nvme.buffer_mb, --buffer-mb)"
                )
            with suppress(Empty):
                self.returned.put(self.returned.get(timeout=0.05))
        block = np.ndarray((size,), np.uint8, buffer=self.memory, offset=self.base + offset)
        raw = torch.from_numpy(block)
        weakref.finalize(block, self._give, offset, size).atexit = False
        return Buffer(raw, raw[:n].view(dtype).view(shape))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is a piece of this memory."""
        start = np.frombuffer(self.memory, np.uint8).ctypes.data + self.base
        return start <= storage.data_ptr() < start + self.size

    def _give(self, offset: int, size: int) -> None:
        # Called by whoever drops the last reference, in any thread, even by a garbage collection inside `take`: no lock may be needed.
        self.returned.put((offset, size))

    def _place(self, size: int) -> int | None:
        with self.lock:
            back = []
            with suppress(Empty):
                while True:
                    back.append(self.returned.get_nowait())
            if back:
                self._merge(back)
            for i, (offset, room) in enumerate(self.free):
                if room >= size:
                    self.free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    self.lent += size
                    self.peak = max(self.peak, self.lent)
                    return offset
            return None

    def _merge(self, back: list[tuple[int, int]]) -> None:
        self.lent -= sum(size for _, size in back)
        pieces = sorted([*self.free, *back])
        merged = [pieces[0]]
        for start, room in pieces[1:]:
            last, before = merged[-1]
            if last + before == start:
                merged[-1] = (last, before + room)
            else:
                merged.append((start, room))
        self.free = merged
