"""Leaves as zarr3 arrays, with an uncompressed chunk for each slot, layer and rank: the file of a chunk is its bytes.

tensorstore creates and opens the arrays. On a local disk that takes direct transfers, rows of chunks are read and
overwritten in place; elsewhere tensorstore reads and writes them.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.files import make_folder
from fzero.core.gpu import HOST
from fzero.core.gpu_copies import Copied, Future, copy_in, reserve
from fzero.core.host_memory import round_to_pages
from fzero.core.storage import PAGE, Damaged, context, is_url, kvstore
from fzero.core.text_parsing import expect_regular
from fzero.offload.buffer_pool import Buffer, BufferPool
from fzero.offload.disk_io import (
    FOLDER,
    NEXT,
    DiskIO,
    DiskRequest,
    allocate_space,
    file_system,
    mount_point,
    open_direct,
    serves_direct,
)
from fzero.sharding.slices import largest_shard, row_blocks
from fzero.sharding.spec import Spec


class LeafFiles(NamedTuple):
    """The shape, dtype and files of one rank's shard of a leaf in a store."""

    shape: tuple[int, ...]  # of the shard; the first dim of a stacked leaf counts the layers
    dtype: torch.dtype
    stacked: bool = False
    slots: int = 2
    cut: Spec | None = None  # of a leaf of which ranks have unlike shards; None: all have as much

    @property
    def described(self) -> tuple[int, ...]:
        """The shape that the store's description has for all ranks: that of the largest shard."""
        return self.shape if self.cut is None else largest_shard(self.shape, self.cut)

    @property
    def layers(self) -> int:
        """The number of chunks of a slot: one for each layer."""
        return self.shape[0] if self.stacked else 1

    @property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a layer, or of the whole shard if it is not stacked."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk without the padding of its last page."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """The elements of a chunk of the largest shard."""
        return math.prod(self.described[1:] if self.stacked else self.described)

    @property
    def file_bytes(self) -> int:
        """The bytes of a chunk's file, on all ranks: whole pages, at least one."""
        return max(PAGE, round_to_pages(self.elements * self.dtype.itemsize))

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of a chunk: of one index of its first dim."""
        return math.prod(self.chunk[1:]) * self.dtype.itemsize


Rows = tuple[int, int]


class RowRead(NamedTuple):
    """A read of rows of a chunk into a buffer."""

    buffer: Buffer
    pending: DiskRequest | Future[None]  # the latter of a plan
    failed: Callable[[OSError], ValueError]  # the error to raise for a failed transfer
    retain: Callable[[Tensor, Copied], None] | None = None  # BufferPool.retain; a plan has none

    def wait(self) -> Tensor:
        """Wait for the rows and return them; raises ValueError if they cannot be read."""
        try:
            self.pending.wait()
        except OSError as error:
            raise self.failed(error) from error
        return self.buffer.view

    def copy_to(self, device: torch.device) -> Future[Tensor]:
        """Copy the rows to `device` as soon as they are read; the current stream has the memory there from now on."""
        if device == HOST:
            return Future(self.wait)
        # Here, as the memory is ordered behind the work of this thread's stream; the disk's thread has another one.
        out = reserve(self.buffer.view, device)
        if device.type != "cuda":  # a plan
            return Future(lambda: out.tensor.copy_(self.wait()))
        started: list[Copied] = []

        def start() -> None:
            assert self.retain is not None
            started.append(copy_in(self.buffer.view, device, out=out))
            # The copy still reads the buffer when the last reference to it is dropped.
            self.retain(self.buffer.raw, started[0])

        def arrive() -> Tensor:
            self.wait()
            return started[0].use()

        assert isinstance(self.pending, DiskRequest)  # a plan's tensors are on no GPU
        self.pending.call_at_end(start)
        return Future(arrive)


class Chunks:
    """One rank's chunks of the arrays of a store; create: make missing arrays and files."""

    def __init__(
        self,
        folder: str | Path,
        leaves: dict[str, LeafFiles],
        rank: int,
        ranks: int,
        buffers: BufferPool,
        disk: DiskIO,
        *,
        create: bool,
    ) -> None:
        self.folder, self.leaves, self.rank, self.ranks, self.buffers, self.disk = (
            folder,
            leaves,
            rank,
            ranks,
            buffers,
            disk,
        )
        self.read_only = not create and not is_url(folder) and not os.access(folder, os.W_OK)
        self.direct = not is_url(folder) and (self.reads_direct() if self.read_only else serves_direct(Path(folder)))
        self.files: dict[tuple[str, int, int], int] = {}  # (leaf, slot, layer) -> descriptor
        self.arrays: dict[str, Any] = {}
        self.created: list[Path] = []
        # A file with newly allocated space needs a sync of its own after its first write. Later, if the file system
        # overwrites in place, only the disk's cache must be flushed, which a sync of any one file does.
        self.synced: set[int] = set()  # slots all of whose files were synced since they were opened
        self.in_place = self.direct and file_system(mount_point(folder)) in IN_PLACE
        if not self.direct and not is_url(folder):
            warnings.warn(
                f"{folder}: its file system refuses direct transfers (O_DIRECT); it is used through "
                "tensorstore, slower",
                stacklevel=3,
            )
        if create and rank == 0:
            for name, leaf in leaves.items():
                _open_array(folder, name, leaf, ranks, create=True)
        if not self.direct:
            return
        _allow_files(sum(leaf.slots * leaf.layers for leaf in leaves.values()))

    def open(self, resident: set[int]) -> None:
        """Open this rank's chunks of existing arrays; missing files of slots that are not `resident` are created."""
        if not self.direct:
            self.arrays = {
                name: _open_array(self.folder, name, leaf, self.ranks, create=False)
                for name, leaf in self.leaves.items()
            }
            return
        for name, leaf in self.leaves.items():
            for slot in range(leaf.slots):
                create = not resident or (slot not in resident and leaf.slots > 1)
                for layer in range(leaf.layers if not (create and self.read_only) else 0):
                    self.files[name, slot, layer] = self._open_file(name, leaf, slot, layer, create)

    def expect_writable(self) -> None:
        """Raise ValueError for a store that was opened to be read alone."""
        if self.read_only:
            raise ValueError(
                f"{self.folder}: may be read and not written by this user; its state can be looked at, and not "
                f"trained: copy the store, or give a folder that this user may write ({FOLDER})"
            )

    def reads_direct(self) -> bool:
        """Whether the files that are there, of a store that may not be written, take direct reads."""
        for name, leaf in self.leaves.items():
            for slot in range(leaf.slots):
                path = self.path(name, slot, 0)
                if path.is_file():
                    fd = open_direct(path, write=False)
                    os.close(fd) if fd is not None else None
                    return fd is not None
        return False

    @property
    def is_removed(self) -> bool:
        """Whether somebody removed the store."""
        return not is_url(self.folder) and not Path(self.folder, "arrays").is_dir()

    def path(self, name: str, slot: int, layer: int) -> Path:
        """The file of a chunk."""
        return Path(self.folder, "arrays", name, "c", str(slot), str(layer), str(self.rank), "0")

    def _open_file(self, name: str, leaf: LeafFiles, slot: int, layer: int, create: bool) -> int:
        path, size = self.path(name, slot, layer), leaf.file_bytes
        if create:
            make_folder(self.folder, *path.parent.relative_to(self.folder).parts)
        elif not path.is_file():
            raise Damaged(
                f"{path}: is missing, a part of {name}; the store in {self.folder} is damaged: resume from a checkpoint"
            )
        if create and not path.exists():  # those that are there may be in use, by the store that is open
            self.created.append(path)
        fd = open_direct(path, make=create, write=not self.read_only)
        assert fd is not None, f"{path} refuses direct transfers, and the store's folder does not"
        if create:
            try:
                # All of it now, so that no later write finds the disk full.
                allocate_space(fd, 0, size)
            except OSError as error:
                os.close(fd)
                raise self.failed(error) from error
            os.ftruncate(fd, size)
        elif (actual_size := os.fstat(fd).st_size) != size:
            os.close(fd)
            raise Damaged(
                f"{path}: has {actual_size:,} bytes and not {size:,}, a part of {name}; the store in {self.folder} is "
                "damaged: resume from a checkpoint"
            )
        return fd

    def failed(self, error: OSError) -> ValueError:
        """The ValueError to raise for a failed transfer."""
        if error.errno == errno.ENOSPC:
            total = sum(k.slots * k.layers * k.file_bytes for k in self.leaves.values()) * self.ranks
            return ValueError(
                f"{self.folder}: {error.strerror}; the store needs {total:,} bytes: make room, or give "
                f"another folder ({FOLDER})"
            )
        if self.is_removed:
            return ValueError(f"{self.folder}: is gone, with the state in it; resume from a checkpoint")
        return ValueError(
            f"{self.folder}: {error.strerror or error}; the store holds its last complete step: resume from it when "
            "the disk works again, or from a checkpoint"
        )

    def row_blocks(self, name: str, max_bytes: int) -> list[Rows]:
        """Ranges of a chunk's rows, of about `max_bytes` bytes at most, that begin at pages."""
        leaf = self.leaves[name]
        return row_blocks((leaf.chunk[0] if leaf.chunk else 1, leaf.row_bytes), max_bytes)

    def _span(self, name: str, rows: Rows | None) -> tuple[LeafFiles, tuple[int, ...], int]:
        leaf = self.leaves[name]
        if rows is None or not leaf.chunk:
            return leaf, leaf.chunk, 0
        return leaf, (rows[1] - rows[0], *leaf.chunk[1:]), rows[0] * leaf.row_bytes

    def read(self, name: str, slot: int, layer: int, rows: Rows | None = None, *, priority: int = NEXT) -> RowRead:
        """Start to read rows of a chunk (None: all of it), which must begin at a page."""
        leaf, shape, offset = self._span(name, rows)
        buffer = self.buffers.allocate(shape, leaf.dtype, self.disk.busy)
        if self.direct:
            assert offset % PAGE == 0, f"{name}: rows {rows} begin inside a page"
            return RowRead(
                buffer,
                self.disk.read(self.files[name, slot, layer], buffer.raw, offset, priority=priority),
                self.failed,
                self.buffers.retain,
            )
        first, count = offset // leaf.dtype.itemsize, math.prod(shape)

        def work() -> int:
            values = self.arrays[name][slot, layer, self.rank, first : first + count].read().result()
            np.copyto(_numpy(buffer.view), values)
            return buffer.view.nbytes

        reading = self.disk.run(_raise_os_error(work), write=False, priority=priority)
        return RowRead(buffer, reading, self.failed, self.buffers.retain)

    def write(
        self,
        name: str,
        slot: int,
        layer: int,
        rows: Rows | None,
        buffer: Buffer,
        *,
        priority: int = NEXT,
        note: Callable[[memoryview], None] | None = None,
    ) -> DiskRequest:
        """Start to write rows of a chunk from a buffer; note: called with each block before it is written."""
        leaf, shape, offset = self._span(name, rows)
        assert tuple(buffer.view.shape) == shape and buffer.view.dtype == leaf.dtype, (
            f"{name}: {buffer.view.shape} is not {shape}"
        )
        if self.direct:
            assert offset % PAGE == 0, f"{name}: rows {rows} begin inside a page"
            return self.disk.write(self.files[name, slot, layer], buffer.raw, offset, priority=priority, note=note)
        first, count = offset // leaf.dtype.itemsize, math.prod(shape)

        def work() -> int:
            if note is not None:
                note(memoryview(buffer.raw.numpy()))
            self.arrays[name][slot, layer, self.rank, first : first + count].write(_numpy(buffer.view)).result()
            return buffer.view.nbytes

        return self.disk.run(_raise_os_error(work), write=True, priority=priority)

    def sync(self, slot: int) -> None:
        """Make all writes to a slot durable, also against a loss of power."""
        if not self.direct:
            return
        slots = max((leaf.slots for leaf in self.leaves.values()), default=1)
        names = [name for name, leaf in self.leaves.items() if leaf.slots == slots or slot not in self.synced]
        fds = [
            fd
            for (name, s, _), fd in self.files.items()
            if name in names and (s == slot or self.leaves[name].slots == 1)
        ]
        # No new blocks, so no metadata: one flush of the disk's cache makes all writes durable.
        if slot in self.synced and self.in_place:
            fds = fds[:1]
        # Each sync waits for the disk, so that several threads wait at the same time.
        group_size = max(1, -(-len(fds) // max(1, self.disk.settings.writers)))

        def work(group: list[int]) -> int:
            for fd in group:
                os.fdatasync(fd)
            return 0

        parts = [fds[start : start + group_size] for start in range(0, len(fds), group_size)]
        for pending in [self.disk.run(lambda group=group: work(group), write=True) for group in parts]:
            pending.wait()
        self.synced.add(slot)

    def trim(self, resident: set[int]) -> None:
        """Free the disk space of the slots that are not `resident`."""
        for (name, slot, layer), fd in list(self.files.items()):
            if slot not in resident and self.leaves[name].slots > 1:
                os.close(fd)
                del self.files[name, slot, layer]
                self.path(name, slot, layer).unlink(missing_ok=True)

    def discard(self) -> None:
        """Close the files and remove those that this object made: nobody will write them."""
        self.close()
        for path in self.created:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()


def _open_array(folder: str | Path, name: str, leaf: LeafFiles, ranks: int, *, create: bool) -> Any:
    """The array [slots, layers, ranks, elements of a chunk with the padding of its last page] of a leaf."""
    import tensorstore

    n = leaf.file_bytes // leaf.dtype.itemsize
    # Chunks that equal the fill value are written too, so that a missing file always means damage.
    spec = {"driver": "zarr3", "kvstore": kvstore(folder, "arrays", name), "store_data_equal_to_fill_value": True}
    if create:
        spec["metadata"] = {
            "shape": [leaf.slots, leaf.described[0] if leaf.stacked else 1, ranks, n],
            "data_type": str(leaf.dtype).removeprefix("torch."),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1, 1, n]}},
            "codecs": [
                {"name": "bytes", **({"configuration": {"endian": "little"}} if leaf.dtype.itemsize > 1 else {})}
            ],
            "attributes": {"shape": list(leaf.described), "stacked": leaf.stacked, "elements": leaf.elements},
        }
    else:
        _expect_no_pipe(folder, name, "zarr.json")
    try:
        return tensorstore.open(spec, open=True, create=create, context=context()).result()
    except (ValueError, RuntimeError) as error:
        message = str(error).split(" [")[0].splitlines()[0]
        raise Damaged(
            f"{folder}/arrays/{name}: {message}; resume from a checkpoint, or start the run in another folder "
            f"({FOLDER})"
        ) from None


def _expect_no_pipe(folder: str | Path, name: str, *file: str) -> None:
    """Raise ValueError for an array's file that is not a regular one, such as a FIFO."""
    path = Path(folder, "arrays", name, *file)
    if not is_url(folder) and path.exists():
        expect_regular(path)


def read_chunk(folder: str | Path, name: str, leaf: LeafFiles, slot: int, layer: int, rank: int) -> np.ndarray:
    """The bytes (uint8) of one chunk of any rank, through tensorstore."""
    _expect_no_pipe(folder, name, "c", str(slot), str(layer), str(rank), "0")
    chunk = _open_array(folder, name, leaf, 0, create=False)[slot, layer, rank].read().result()
    return np.ascontiguousarray(chunk).view(np.uint8)


def _numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).reshape(-1)
    return tensor.numpy().reshape(-1)


def _raise_os_error(work: Any) -> Any:
    """`work` with tensorstore's errors raised as OSError."""

    def run() -> int:
        try:
            return work()
        except (ValueError, RuntimeError) as error:
            raise OSError(errno.EIO, str(error).splitlines()[0]) from error

    return run


IN_PLACE = ("ext4", "xfs")  # file systems that overwrite a file's own blocks


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files by `count`, or raise ValueError saying how."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = count + 512
    if soft >= required or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < required:
        raise ValueError(
            f"the store has {count:,} chunk files and a process may open {hard:,} (ulimit -Hn); raise the "
            f"limit to {required:,}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))
