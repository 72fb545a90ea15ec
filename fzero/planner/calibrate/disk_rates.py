"""The ways to move bytes to and from a disk, and their rates: by our own DiskIO, by plain calls, by fio.

Every transfer is direct, so the page cache does not affect the figures. The files are unlinked as soon as they are
open.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fzero.core.files import naming
from fzero.core.storage import PAGE
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.disk_io import REFUSED, DiskIO, DiskSettings, file_system, mount_point, open_direct, serves_direct

MB = 1 << 20  # bytes
KINDS = {"read": (False,), "write": (True,), "mixed": (False, True)}  # kind -> whether its transfers write
ANCHOR_THREADS, ANCHOR_BLOCK, FIO_DEPTH = 8, 4 * MB, 8
MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Rate(NamedTuple):
    """Transfer rate in GB (1e9 bytes) per second, reads and writes together, and its CPU time."""

    gbs: float
    cpu_s_per_gb: float


class Files(NamedTuple):
    """Two nameless files of `size` bytes, written: one to read, one to write."""

    fds: dict[bool, int]
    size: int


@contextmanager
def open_files(folder: Path, size: int) -> Iterator[Files]:
    """Files of `size` bytes (a multiple of 1 MiB) without a name in `folder`; raises ValueError."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}; give a folder on the "
            "disk to measure"
        )
    if (kind := file_system(mount_point(folder))) in MEMORY:
        raise ValueError(f"{folder}: is in memory ({kind}); give a folder on a disk")
    fds: dict[bool, int] = {}
    try:
        if not serves_direct(folder):
            raise ValueError(
                f"{folder}: its file system refuses direct transfers (O_DIRECT), as network file systems do; offload "
                "works there through tensorstore, which has no settings to find; give a folder on a local disk"
            )
        system = os.statvfs(folder)
        free = system.f_bavail * system.f_frsize
        if free < 2 * size:
            raise ValueError(
                f"{folder}: has {free / 1e9:,.2f} GB free and {2 * size / 1e9:,.2f} GB are needed; use a "
                "smaller size (--size-gb)"
            )
        fill = memoryview(torch.randint(0, 256, (MB + PAGE,), dtype=torch.uint8).numpy())
        aligned = fill[-np.frombuffer(fill, np.uint8).ctypes.data % PAGE :][:MB]
        for write in (False, True):
            fds[write] = _nameless(folder)
            with naming(folder):
                os.posix_fallocate(fds[write], 0, size)
                for offset in range(0, size, MB):
                    os.pwritev(fds[write], [aligned], offset)
                os.fsync(fds[write])
        yield Files(fds, size)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ValueError(f"{folder}: {error.strerror}; give a folder that this user may write") from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"{folder}: {error.strerror} for {2 * size / 1e9:,.2f} GB; use a smaller size (--size-gb)"
            ) from None
        raise
    finally:
        for fd in fds.values():
            os.close(fd)


def _nameless(folder: Path) -> int:
    descriptor, path = tempfile.mkstemp(prefix=".fzero-bench-", dir=folder)
    try:
        os.close(descriptor)
        fd = open_direct(Path(path))
    finally:
        os.unlink(path)
    if fd is None:
        raise OSError(REFUSED[0], "direct transfers are refused", str(folder))
    return fd


def measure_rate(work: Callable[[bool, float], int], kinds: Sequence[bool], seconds: float, parallel: int = 1) -> Rate:
    """The rate of `work(write, end)`, which moves bytes until the time `end`, in `parallel` threads a kind."""
    jobs = [write for write in kinds for _ in range(parallel)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        cpu, begin = time.process_time(), time.perf_counter()
        total_bytes = sum(pool.map(lambda write: work(write, begin + seconds), jobs))
        gb = total_bytes / 1e9
        return Rate(gb / (time.perf_counter() - begin), (time.process_time() - cpu) / gb)


def engine(
    files: Files, buffers: BufferPool, settings: DiskSettings, depth: int, kinds: Sequence[bool], seconds: float
) -> Rate:
    """The rate of a DiskIO on requests of one block each, `depth` of them under way for each thread."""
    disk, block = DiskIO(settings), settings.block_bytes

    def stream(write: bool, end: float) -> int:
        request, fd, offset, total = disk.write if write else disk.read, files.fds[write], 0, 0
        ring = deque()
        for _ in range(depth * (settings.writers if write else settings.readers)):
            ring.append((None, buffers.allocate((block,), torch.uint8)))
        while ring:
            pending, buffer = ring.popleft()
            if pending is not None:
                pending.wait()
                total += block
            if pending is None or time.perf_counter() < end:
                ring.append((request(fd, buffer.raw, offset), buffer))
                offset = (offset + block) % (files.size // block * block)
        return total

    try:
        return measure_rate(stream, kinds, seconds)
    finally:
        disk.close()


def anchor(files: Files, buffers: BufferPool, kinds: Sequence[bool], seconds: float) -> Rate:
    """The rate of plain direct transfers in many threads: the disk's limit."""
    block = min(ANCHOR_BLOCK, files.size)
    turns = {write: iter(range(1 << 62)) for write in kinds}

    def loop(write: bool, end: float) -> int:
        buffer, total = buffers.allocate((block,), torch.uint8), 0
        move, fd, view = os.pwritev if write else os.preadv, files.fds[write], [memoryview(buffer.raw.numpy())]
        while not total or time.perf_counter() < end:
            total += move(fd, view, next(turns[write]) * block % (files.size // block * block))
        return total

    return measure_rate(loop, kinds, seconds, ANCHOR_THREADS)


def fio(files: Files, kinds: Sequence[bool], seconds: float) -> Rate:
    """The rate of fio (libaio, direct, 4 MiB, depth 8, buffers in huge pages); raises ValueError."""
    args = [
        "fio",
        "--output-format=json",
        "--ioengine=libaio",
        "--direct=1",
        f"--bs={min(ANCHOR_BLOCK, files.size)}",
        f"--iodepth={FIO_DEPTH}",
    ]
    args += [
        "--iomem=malloc",
        "--iomem_align=2M",
        f"--size={files.size}",
        "--time_based",
        f"--runtime={round(seconds * 1000)}ms",
    ]
    for write in kinds:
        kind = "write" if write else "read"
        args += [f"--name={kind}", f"--filename=/proc/{os.getpid()}/fd/{files.fds[write]}", f"--rw={kind}"]
    tuned = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # small pages would halve it
    done = subprocess.run(args, env=tuned, capture_output=True, text=True)
    try:
        jobs = json.loads(done.stdout)["jobs"]
        directions = [job["read"] if job["read"]["io_bytes"] else job["write"] for job in jobs]
        gb, gbs = sum(x["io_bytes"] for x in directions) / 1e9, sum(x["bw_bytes"] for x in directions) / 1e9
        cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs)
        return Rate(gbs, cpu / gb)
    except (ValueError, KeyError, ZeroDivisionError):
        message = (done.stderr or done.stdout or "no message").strip().splitlines()[0]
        raise ValueError(f"fio failed with exit code {done.returncode}: {message}") from None


def has_fio() -> bool:
    """Whether the program fio is on PATH."""
    return shutil.which("fio") is not None


def cached_fraction(files: Files) -> float | None:
    """The fraction of the files' pages in the page cache; None if unknown."""
    cached_pages = pages = 0
    for fd in files.fds.values():
        with mmap.mmap(fd, files.size, prot=mmap.PROT_READ) as mapped:
            memory = np.frombuffer(mapped, np.uint8)
            present = np.zeros(-(-files.size // mmap.PAGESIZE), np.uint8)
            libc = ctypes.CDLL(None)
            refused = libc.mincore(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(files.size), ctypes.c_void_p(present.ctypes.data)
            )
            del memory  # its reference would keep the map open
            if refused:
                return None
            cached_pages, pages = cached_pages + int((present & 1).sum()), pages + len(present)
    return cached_pages / pages
