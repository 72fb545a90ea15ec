"""What the sections of `nvme.py` share: the contenders, the processes that serve them, and the turns they take."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers.disk_engines import PIECE, PLANES

HERE = Path(__file__).resolve().parent
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
KEEP_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
    "glibc.malloc.trim_threshold=8589934592:glibc.malloc.arena_max=1"
)
# contender: (the process that serves it, its environment)
CONTENDERS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "disk": {
        "fio": ("", HUGE_PAGES),
        "raw": ("fzero", {}),
        "fzero": ("fzero", {}),
        "fzero+unchecked": ("fzero", {}),
        "tensorstore": ("fzero", {"GLIBC_TUNABLES": KEEP_MEMORY}),
        "deepspeed-locked": ("deepspeed", {}),
        "deepspeed-ordinary": ("deepspeed", {}),
        "deepspeed-locked+huge": ("deepspeed", HUGE_PAGES),
    },
    "steps": {
        "fio": ("", HUGE_PAGES),
        "fzero": ("fzero", {}),
        "fzero+huge": ("fzero", HUGE_PAGES),
        "fzero+huge+unchecked": ("fzero", HUGE_PAGES),
        "deepspeed": ("deepspeed", {}),
        "deepspeed+tuned": ("deepspeed", HUGE_PAGES),
    },
}
DEFAULT = {"disk": tuple(CONTENDERS["disk"]), "steps": ("fzero+huge", "fio", "deepspeed+tuned")}
NOTES = {
    "fio": "libaio, O_DIRECT, 4 MiB, depth 8, huge-page buffers; a job for reading and one for writing",
    "raw": (
        f"preadv and pwritev from Python, O_DIRECT, {PIECE >> 20} MiB, 2 + 2 threads, huge-page buffers, in a "
        "process like ours"
    ),
    "fzero": "fzero/offload: two slots, checksums at write, synced and committed",
    "fzero+unchecked": "the same without checksums",
    "fzero+huge": (
        "the same in a process whose memory is in huge pages (glibc.malloc.hugetlb), as DeepSpeed's is where tuned"
    ),
    "fzero+huge+unchecked": "the same without checksums",
    "tensorstore": (
        "zarr3, a chunk a plane, direct reads, an allocator that keeps memory; writes end with an fsync of each chunk"
    ),
    "deepspeed-locked": "aio handles of 4 MiB and depth 8 with memory of new_cpu_locked_tensor",
    "deepspeed-ordinary": "the same with torch.empty, a block at a time",
    "deepspeed-locked+huge": "the same as locked, with huge pages (glibc.malloc.hugetlb)",
    "deepspeed": "stage 3, offload_optimizer nvme, at the defaults of that section and of aio",
    "deepspeed+tuned": "pipelined reads and writes, 8 MiB blocks, two threads a transfer, huge pages",
}


# What a file and fio cost.


def evict(folder: Path) -> float:
    """Ask the kernel to forget the files under a folder; the fraction of their pages that is in memory still."""
    libc, pages, found = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in folder.rglob("*"):
        if not path.is_file() or not (size := path.stat().st_size):
            continue
        fd = os.open(path, os.O_RDWR)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(fd, size) as mapped:
                present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
                address = ctypes.addressof(start := ctypes.c_char.from_buffer(mapped))
                if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present):
                    raise OSError(ctypes.get_errno(), "mincore failed")
                del start
        finally:
            os.close(fd)
        pages, found = pages + len(present), found + int((np.frombuffer(present, np.uint8) & 1).sum())
    return found / max(pages, 1)


def fio(op: str, order: dict[str, Any]) -> dict[str, float]:
    """Seconds, CPU seconds and bytes of fio's read, write or both at once of the two flat files."""
    size = order["blocks"] * PLANES * order["plane_bytes"]
    common = (
        f"--ioengine=libaio --direct=1 --bs=4M --iodepth=8 --iomem=malloc --iomem_align=2M --thread --size={size} "
        "--output-format=json"
    )
    jobs = {
        "read": "--name=r --rw=read --filename=a.bin",
        "write": "--name=w --rw=write --filename=b.bin --end_fsync=1",
    }
    wanted = [jobs[name] for name in ((op,) if op in jobs else jobs)]
    command = ["fio", *common.split(), *" ".join(wanted).split()]
    done = subprocess.run(
        command, cwd=order["folder"], env=os.environ | HUGE_PAGES, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    seconds = [max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3 for job in found]
    return {
        "s": max(seconds),
        "cpu_s": sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in found),
        "read_bytes": sum(job["read"]["io_bytes"] for job in found),
        "write_bytes": sum(job["write"]["io_bytes"] for job in found),
    }


# The processes of the contenders.


class Contender:
    """A contender's process, or fio, which needs none between its turns; `versions` is what it runs on."""

    def __init__(self, order: dict[str, Any], python: dict[str, str]):
        self.order, self.name, self.process = order, order["contender"], None
        where, env = CONTENDERS[order["section"]][self.name]
        if self.name == "fio":
            found = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
            self.versions = {"fio": found.stdout.strip()}
            return
        threads = str(order["threads"])
        own = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "DS_ACCELERATOR": "cpu",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}  # what torchrun sets
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        command = [python[where], "-m", "peers.deepspeed_nvme" if where == "deepspeed" else "peers.disk_engines"]
        self.process = subprocess.Popen(
            command, cwd=HERE, env=os.environ | own | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self._say(order)["versions"]

    def _say(self, value: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        reply = (
            json.loads(line)
            if line
            else {"error": f"its process ended with code {self.process.wait()}; its error is above"}
        )
        if "error" in reply:
            self.close()
            raise ValueError(f"{self.name}: {reply['error']}")
        return reply

    def run(self, op: str, argument: float = 0.0) -> dict[str, float]:
        """One operation: seconds, CPU seconds, bytes read and written, from files that are not in memory before."""
        resident = evict(Path(self.order["folder"]))
        if resident > 0.001:
            raise ValueError(
                f"{resident:.1%} of the files are in memory after their eviction; the page cache would flatter"
            )
        return fio(op, self.order) if self.process is None else self._say({"op": op, "argument": argument})

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port() -> str:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@contextlib.contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A new folder on a disk; it, and what DeepSpeed leaves in /dev/shm, are gone at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    kind = max((len(at), fs) for at, fs in mounts if Path(at) in (parent.resolve(), *parent.resolve().parents))[1]
    if kind in ("tmpfs", "ramfs"):
        raise ValueError(f"--folder {parent} is in memory ({kind}); give one on a disk")
    shared, before = Path("/dev/shm"), set(Path("/dev/shm").glob("deepspeed_*"))
    folder = Path(tempfile.mkdtemp(prefix="nvme-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in set(shared.glob("deepspeed_*")) - before:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def contenders(names: list[str], order: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Contender]]:
    """The contenders of a section, started in turn, beside the two flat files; closed, and the files removed, at the
    end."""
    with workplace(args.folder) as folder:
        block = PLANES * order["plane_bytes"]
        for name in ("a.bin", "b.bin"):
            with open(folder / name, "wb") as file:
                for _ in range(order["blocks"]):
                    file.write(np.random.default_rng().bytes(block))
                os.fsync(file.fileno())
        started: dict[str, Contender] = {}
        try:
            for name in names:
                print(f"{order['section']}: starting {name}", file=sys.stderr)
                started[name] = Contender(order | {"contender": name, "folder": str(folder)}, args.python)
            yield started
        finally:
            for contender in started.values():
                contender.close()


def rotated(names: list[str], i: int) -> list[str]:
    """The order of round i."""
    return names[i % len(names) :] + names[: i % len(names)]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bounds(x: dict[str, float] | None) -> str:
    return f"{x['median']:.2f} [{x['min']:.2f}, {x['max']:.2f}]" if x else "-"
