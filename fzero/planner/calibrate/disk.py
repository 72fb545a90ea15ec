"""Find the DiskSettings that suit a disk, for `fzero bench disk`, by the rates of our own DiskIO, of plain calls and of
fio.

Every transfer is direct, so the page cache does not affect the figures. The files are unlinked as soon as they are
open.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import statistics
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
from fzero.offload.disk_io import (
    REFUSED,
    DiskIO,
    DiskSettings,
    file_system,
    load_settings,
    mount_point,
    open_direct,
    save_settings,
    serves_direct,
)

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


BLOCKS = tuple(m * MB for m in (1, 2, 4, 8, 16))
THREADS = (1, 2, 4)  # readers or writers that are tried
DEPTHS = (1, 2, 4)  # requests under way, for each thread
DEPTH = 2  # requests under way for each thread
CLOSE = 0.95  # rates above this fraction of each other count as equal: disks are no steadier
NOISY = 1.5  # how much the raw rates may vary during a measurement whose best settings are kept


class DiskMeasurement(NamedTuple):
    """One way to use the disk, and its rates by kind, without kinds that were not measured."""

    name: str
    rates: dict[str, Rate]
    settings: DiskSettings | None = None
    depth: int = DEPTH


class SweepResult(NamedTuple):
    """The result of `sweep`."""

    anchors: list[DiskMeasurement]
    rows: list[DiskMeasurement]  # of our own DiskIO
    best: DiskMeasurement
    spread: float  # the largest ratio between two measurements of an anchor


def named(settings: DiskSettings, depth: int = DEPTH) -> str:
    """Format the settings for the table."""
    size = settings.block_bytes
    return f"{size // MB} MiB, {settings.readers} + {settings.writers} threads" + (
        f", depth {depth}" if depth != DEPTH else ""
    )


def sweep(
    files: Files,
    seconds: float,
    *,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    depths: Sequence[int] = DEPTHS,
    rounds: int = 3,
    say: Callable[[DiskMeasurement], None] = lambda row: None,
) -> SweepResult:
    """The rates of the anchors and of DiskIO by block sizes, readers and writers, and depths."""
    blocks = [block for block in blocks if block <= files.size]
    buffers = BufferPool(
        2 * max(ANCHOR_THREADS * min(ANCHOR_BLOCK, files.size), max(threads) * max(depths) * max(blocks))
    )
    fill = buffers.allocate((buffers.size,), torch.uint8)  # a disk may write zeros faster
    fill.view.view(-1, 2 * MB).copy_(torch.randint(0, 256, (2 * MB,), dtype=torch.uint8))
    del fill
    anchors: dict[str, dict[str, list[Rate]]] = {}

    def measure(settings: DiskSettings, depth: int = DEPTH) -> DiskMeasurement:
        return DiskMeasurement(
            named(settings, depth),
            {k: engine(files, buffers, settings, depth, KINDS[k], seconds) for k in KINDS},
            settings,
            depth,
        )

    def measure_anchors() -> None:
        for kind, writes in KINDS.items():
            ways = {
                f"raw O_DIRECT, {ANCHOR_THREADS} threads a kind": lambda writes=writes: anchor(
                    files, buffers, writes, seconds
                )
            }
            if has_fio():
                ways[f"fio, libaio, depth {FIO_DEPTH} a kind"] = lambda writes=writes: fio(files, writes, seconds)
            for name, rate in ways.items():
                anchors.setdefault(name, {}).setdefault(kind, []).append(rate())

    rows: list[DiskMeasurement] = []

    def add(row: DiskMeasurement) -> None:
        rows.append(row)
        say(row)

    for block in blocks:
        measure_anchors()
        for count in threads:
            add(measure(DiskSettings(block, count, count)))
    measured = choose(rows).settings
    assert measured is not None  # anchors are not among the rows
    block = measured.block_bytes
    for readers in threads:
        for writers in threads:
            if readers != writers:
                add(measure(DiskSettings(block, readers, writers)))
    finals = _finals(rows, blocks, rounds, measure, measure_anchors)
    best = choose(finals)
    assert best.settings is not None  # as of all finals
    rows = [next((final for final in finals if final.settings == row.settings), row) for row in rows]
    for depth in depths:
        if depth != DEPTH:
            add(measure(best.settings, depth=depth))
    medians = [
        DiskMeasurement(name, {kind: median(measured) for kind, measured in kinds.items()})
        for name, kinds in anchors.items()
    ]
    spread = max(max(measured).gbs / min(measured).gbs for kinds in anchors.values() for measured in kinds.values())
    return SweepResult(medians, rows, best, spread)


def _finals(
    rows: Sequence[DiskMeasurement],
    blocks: Sequence[int],
    rounds: int,
    measure: Callable[[DiskSettings], DiskMeasurement],
    measure_anchors: Callable[[], None],
) -> list[DiskMeasurement]:
    """The four best rows and the defaults, measured again: the medians of `rounds` alternating rounds."""
    finalists = [row.settings for row in sorted(rows, key=_score)[-4:] if row.settings is not None]
    default = DiskSettings()
    if default.block_bytes in blocks and default not in finalists:
        finalists.append(default)
    repeats: dict[DiskSettings, list[DiskMeasurement]] = {settings: [] for settings in finalists}
    for _ in range(rounds):
        measure_anchors()
        for settings in finalists:
            repeats[settings].append(measure(settings))
    return [
        DiskMeasurement(
            measurements[0].name, {kind: median([row.rates[kind] for row in measurements]) for kind in KINDS}, settings
        )
        for settings, measurements in repeats.items()
    ]


def median(rates: Sequence[Rate]) -> Rate:
    """The medians of both fields."""
    return Rate(*(statistics.median(figure) for figure in zip(*rates)))


def _score(row: DiskMeasurement) -> float:
    return math.prod(rate.gbs for rate in row.rates.values()) ** (1 / len(row.rates))


def choose(rows: Sequence[DiskMeasurement]) -> DiskMeasurement:
    """Of the rows within 5% of the fastest the defaults, else the one of the least CPU time."""
    close = [row for row in rows if _score(row) >= CLOSE * max(map(_score, rows))]
    return min(close, key=lambda row: (row.settings != DiskSettings(), row.rates["mixed"].cpu_s_per_gb))


def choose_depth(rows: Sequence[DiskMeasurement]) -> int:
    """The smallest depth within 5% of the fastest."""
    return min(row.depth for row in rows if _score(row) >= CLOSE * max(map(_score, rows)))


def table(result: SweepResult) -> str:
    """The rates as text: GB/s, the ratio to the faster anchor, and CPU seconds per GB."""
    bar = {kind: max(row.rates[kind].gbs for row in result.anchors) for kind in KINDS}
    lines = [f"{'':34}" + "".join(f"{title:>15}" for title in ("read", "write", "read+write")) + f"{'CPU s/GB':>10}"]
    for row in (*result.anchors, *result.rows):
        cells = [f"{row.rates[k].gbs:8.2f}  ({row.rates[k].gbs / bar[k]:.2f})"[-15:].rjust(15) for k in KINDS]
        chosen = row.settings == result.best.settings and row.depth == result.best.depth
        lines.append(
            f"{row.name:34}{''.join(cells)}{row.rates['mixed'].cpu_s_per_gb:10.4f}{'  <- best' if chosen else ''}"
        )
    return "\n".join(lines)


def bench_disk(
    folder: Path, *, size: int, seconds: float, write_config: bool, progress: Callable[[str], None] = lambda line: None
) -> str:
    """Measure the disk of `folder` with two files of `size` bytes, save the best settings; return a text."""
    if write_config and folder.exists():
        load_settings(folder)  # reports an invalid file now instead of a minute later
    with open_files(folder, size) as files:
        mount = mount_point(folder)

        def say(row: DiskMeasurement) -> None:
            progress(f"{row.name}: {', '.join(f'{kind} {rate.gbs:.2f}' for kind, rate in row.rates.items())} GB/s")

        result = sweep(files, seconds, say=say)
        cached_ratio = cached_fraction(files)
    best, busy = result.best, result.spread > NOISY
    assert best.settings is not None  # as of all rows of a sweep
    enough = choose_depth([row for row in result.rows if row.settings == best.settings])
    lines = [
        (
            f"{folder}, on {mount} ({file_system(mount) or 'unknown'}): two files of {size / 1e9:.2f} GB, {seconds:g} "
            "s for each figure"
        ),
        table(result),
        "GB/s (ratio to the fastest of the first lines); the CPU time is for simultaneous reading and writing.",
        "page cache: bypassed (O_DIRECT)"
        + ("" if cached_ratio is None else f"; afterwards it held {100 * cached_ratio:.0f}% of the files")
        + ". Caches of a host or of the drive itself are unknown.",
        *([] if has_fio() else ["fio is not installed; with it the bar is the faster of two."]),
        *([f"the disk was busy: its raw rates varied by {result.spread:.1f}x meanwhile; measure again."] * busy),
        f"best: {named(best.settings)}; a depth of {enough} (requests under way for each thread) is enough.",
    ]
    if busy:
        lines.append("no settings were written: others would be the best on a disk that is not busy")
    elif write_config:
        path = save_settings(mount, best.settings, {kind: rate.gbs for kind, rate in best.rates.items()})
        lines.append(f'written to {path}, [disk."{mount}"]')
    else:
        lines.append("no settings were written (--no-write-config)")
    return "\n".join(lines)
