"""The memory through which all transfers to and from a disk pass: allocated ahead of them, and lent as buffers."""

from __future__ import annotations

import bisect
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.gpu_copies import Copied
from fzero.core.host_memory import HUGE, allocate_pages, round_to_pages
from fzero.core.storage import PAGE
from fzero.offload.disk_io import BUFFERS


class Buffer(NamedTuple):
    """Memory of a buffer pool as a tensor; it is returned to the pool when the last tensor that shares it is freed."""

    raw: Tensor  # uint8, whole pages
    view: Tensor  # the same memory, in the shape and dtype asked for


class BufferPool:
    """A pool of `size` bytes, rounded up to whole huge pages, from which `allocate` lends Buffers.

    The memory is that of `allocate_pages`: one region, and one more for each time that the pool grew. fixed: whether it
    never grows.
    """

    def __init__(self, size: int, *, fixed: bool = True) -> None:
        self.size, self.fixed = 0, fixed
        self.regions: list[tuple[int, np.ndarray]] = []  # the offset of its first byte, and its memory
        self.free: list[tuple[int, int]] = []  # (offset, size), in order
        self.returned: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.leaving: deque[Copied] = deque()  # memory that copies to a GPU read, oldest first
        self.lock = threading.Lock()
        self.lent = self.peak = 0
        self.grow(size)

    def grow(self, size: int) -> None:
        """Add a region of `size` bytes, rounded up to whole huge pages."""
        size = -(-size // HUGE) * HUGE
        memory = allocate_pages(
            size, "the offload buffers", f"give them less memory ({BUFFERS})", align=HUGE, awaited=True
        )
        with self.lock:
            # a page lies between two regions, so that free memory of both is never merged
            start = self.regions[-1][0] + len(self.regions[-1][1]) + PAGE if self.regions else 0
            self.regions.append((start, memory))
            self.free.append((start, size))
            self.size += size

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, busy: Callable[[], bool] = lambda: False) -> Buffer:
        """Lend an uninitialised Buffer of `shape`; while `busy()`, wait for memory to be returned.

        If the pool is too small for the buffers that are held at the same time it grows, or raises ValueError if it is
        fixed.
        """
        n = math.prod(shape) * dtype.itemsize
        size = max(PAGE, round_to_pages(n))
        while True:
            # called first: a request that ends after this call has returned its memory before the next check
            working = busy()
            self._release()
            offset = self._find_range(size)
            if offset is not None:
                break
            if self._release(wait=True):
                continue
            if not working and self.returned.empty():
                if self.fixed:
                    raise ValueError(
                        f"the offload buffers are {self.size:,} bytes, of which {self.lent:,} are in use, and {size:,} "
                        f"more are needed at once; give them more, or leave their size out ({BUFFERS})"
                    )
                self.grow(size)
                continue
            with suppress(Empty):
                # Put back, as `_find_range` merges it. Seconds: then everything is looked at again, as a transfer may
                # end without returning memory.
                self.returned.put(self.returned.get(timeout=0.05))
        start, memory = self.regions[bisect.bisect(self.regions, offset, key=lambda region: region[0]) - 1]
        block = memory[offset - start : offset - start + size]
        raw = torch.from_numpy(block)
        weakref.finalize(block, self._return, offset, size).atexit = False
        return Buffer(raw, raw[:n].view(dtype).view(shape))

    def retain(self, raw: Tensor, copied: Copied) -> None:
        """Lend `raw`, memory of a buffer, until a copy that reads it is made, whoever drops it before."""
        with self.lock:
            self.leaving.append(Copied(raw, copied.event))  # not what the GPU has of it

    def _release(self, *, wait: bool = False) -> bool:
        """Forget what `retain` was given and is copied; returns whether there was any; wait: for the oldest copy."""
        with self.lock:
            oldest = self.leaving[0] if wait and self.leaving else None
        if oldest is not None:
            # Without the lock, which the disk's threads take in `retain`.
            oldest.finish()
        with self.lock:
            finished = []
            while self.leaving and self.leaving[0].is_done():
                finished.append(self.leaving.popleft())
        return bool(finished)

    def drain(self) -> None:
        """Wait until nothing that `retain` was given is being copied."""
        with self.lock:
            newest = self.leaving[-1] if self.leaving else None
        if newest is not None:
            newest.finish()  # on one stream, so the others are made too
        self._release()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lies in this memory."""
        address = storage.data_ptr()
        return any(memory.ctypes.data <= address < memory.ctypes.data + len(memory) for _, memory in self.regions)

    def _return(self, offset: int, size: int) -> None:
        # Called when the last reference is dropped, in any thread, even by a garbage collection inside `allocate`:
        # so it may not take a lock.
        self.returned.put((offset, size))

    def _find_range(self, size: int) -> int | None:
        with self.lock:
            returned = []
            with suppress(Empty):
                while True:
                    returned.append(self.returned.get_nowait())
            if returned:
                self._merge(returned)
            for i, (offset, length) in enumerate(self.free):
                if length >= size:
                    self.free[i : i + 1] = [(offset + size, length - size)] if length > size else []
                    self.lent += size
                    self.peak = max(self.peak, self.lent)
                    return offset
            return None

    def _merge(self, returned: list[tuple[int, int]]) -> None:
        # Neighbours are merged, so that a large buffer fits again.
        self.lent -= sum(size for _, size in returned)
        pieces = sorted([*self.free, *returned])
        merged = [pieces[0]]
        for start, length in pieces[1:]:
            last, last_length = merged[-1]
            if last + last_length == start:
                merged[-1] = (last, last_length + length)
            else:
                merged.append((start, length))
        self.free = merged
