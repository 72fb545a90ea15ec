"""fzero's disk offload beside fio, tensorstore and DeepSpeed on one disk, in one sitting.

    python benchmarks/nvme.py --deepspeed PYTHON --out benchmarks/results/nvme.json
    python benchmarks/nvme.py --sections disk --smoke

Two sections. `disk` moves the same bytes by every engine: read; write; both at once ("mixed"); the optimizer's stream
(read block i + 1, write block i - 1), with no computation and with one that waits 1.5 times as long as fio's mixed I/O
takes, as a GPU would ("bound"). `steps` trains one model whose optimizer states are on the disk, ours and DeepSpeed's
ZeRO-Infinity; no speed is printed unless the losses of the warm-up steps agree. Contenders take turns, one operation
each a round, in an order that rotates; ratios are between figures of the same round, since a shared disk drifts within
minutes. GB is 1e9 bytes.

The page cache flatters nobody: all but tensorstore's writes pass it by (O_DIRECT); what is written counts until it is
synced (DeepSpeed does not sync, and is not asked to); before each operation the files are evicted (posix_fadvise) and
mincore must find them gone; and the kernel's count of what a process read from the disk must be what was asked for. fio
has huge-page buffers, without which it is two to three times slower.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import json
import mmap
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers import problem
from peers.disk_engines import PIECE, PLANES, RING
from turns import disagreement, machine

HERE = Path(__file__).resolve().parent
OPS = ("read", "write", "mixed", "stream", "bound")
BOUND = 1.5  # computation of the op "bound", in fio's mixed times
# Largest relative difference of two losses after an update. In AdamW's first updates an element whose gradient is near
# its eps moves by what rounding makes of it, and of a few tokens' gradients there are many: torch's own modules under
# DeepSpeed are 2e-5 off in fp32.
LATER = {"fp32": 1e-4, "bf16": 5e-3, "bf16-states": 2e-2}
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


# The section `disk`.


def expect_carried(folder: Path, name: str) -> None:
    """Raise ValueError unless a contender's stream has carried its source to its target."""
    pairs = [(folder / "a.bin", folder / "b.bin")]
    if name == "tensorstore":
        chunks = [path.relative_to(folder / "tensorstore-a") for path in folder.glob("tensorstore-a/c/*/*/*")]
        pairs = [(folder / "tensorstore-a" / path, folder / "tensorstore-b" / path) for path in chunks]
    elif name.startswith("fzero"):
        pairs = [
            (path, Path(str(path).replace("/c/0/", "/c/1/"))) for path in (folder / name).glob("arrays/*/c/0/*/*/*")
        ]
    for a, b in pairs:
        with open(a, "rb") as x, open(b, "rb") as y:
            while piece := x.read(PIECE):
                if piece != y.read(PIECE):
                    raise ValueError(
                        f"{name}: its stream has not carried {a.relative_to(folder)} to {b.relative_to(folder)}"
                    )
    if not pairs:
        raise ValueError(f"{name}: has left no files to compare")


def disk_section(args: argparse.Namespace) -> dict[str, Any]:
    """Every engine, every operation, in turns; ValueError where a stream does not carry the bytes over."""
    names = args.contenders or list(DEFAULT["disk"])
    order = {"section": "disk", "blocks": args.blocks, "plane_bytes": args.plane_mb << 20, "threads": args.threads}
    total = args.blocks * PLANES * order["plane_bytes"]
    asked = {op: (total * (op != "write"), total * (op != "read")) for op in OPS}  # bytes read and written
    rows: dict[str, dict[str, list]] = {op: {name: [] for name in names} for op in OPS}
    with contenders(names, order, args) as started:
        anchor, others = started["fio"], [name for name in names if name != "fio"]
        for name in others:
            started[name].run("write")
            started[name].run("stream")
            expect_carried(Path(anchor.order["folder"]), name)
        for i in range(args.repeats):
            for op in OPS:
                fio_op = op if op in ("read", "write") else "mixed"
                around = [anchor.run(fio_op)]
                compute_s = BOUND * around[0]["s"] if op == "bound" else 0.0
                found = {
                    name: started[name].run("stream" if op == "bound" else op, compute_s / args.blocks)
                    for name in rotated(others, i)
                }
                around.append(anchor.run(fio_op))
                base_s = statistics.fmean(row["s"] for row in around)
                for name, row in [*found.items(), *(("fio", row) for row in around)]:
                    if row["read_bytes"] < 0.99 * asked[op][0] or row["write_bytes"] < 0.99 * asked[op][1]:
                        raise ValueError(
                            f"{name}, {op}: of {asked[op]} bytes to read and write the disk saw too few, a "
                            f"cache flatters: {row}"
                        )
                    rows[op][name].append(row | {"fio_s": base_s} | ({"compute_s": compute_s} if op == "bound" else {}))
        versions = {name: contender.versions for name, contender in started.items()}
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for op in OPS:
        moved = sum(asked[op])
        for name, found in rows[op].items():
            over = (
                [row["s"] / row["compute_s"] for row in found]
                if op == "bound"
                else [row["fio_s"] / row["s"] for row in found]
            )
            results[name][op] = {
                "gb_per_s": spread([moved / row["s"] / 1e9 for row in found]),
                "of_computation" if op == "bound" else "of_fio": spread(over),
                "cpu_s_per_gb": spread([row["cpu_s"] / moved * 1e9 for row in found]),
                "s": [row["s"] for row in found],
            }
    return order | {"bytes": total, "repeats": args.repeats, "versions": versions, "results": results}


def disk_table(run: dict[str, Any]) -> str:
    """Two tables: of fio's rate in the same round, and CPU seconds per GB."""
    width = 2 + max(map(len, run["results"]))
    lines = [
        (
            f"disk: {run['bytes'] / 1e9:.2f} GB, blocks of {PLANES} x {run['plane_bytes'] >> 20} MiB, {run['repeats']} "
            "rounds"
        ),
        "of fio's rate around it (stream: of its mixed rate; bound: time over the computation's), median [min, max]",
        f"{'':{width}}" + "".join(f"{op:>22}" for op in OPS),
    ]
    for name, found in run["results"].items():
        lines.append(
            f"{name:{width}}" + "".join(f"{bounds(x.get('of_fio') or x['of_computation']):>22}" for x in found.values())
        )
    lines += ["GB/s | CPU seconds per GB, medians"]
    for name, found in run["results"].items():
        texts = [f"{x['gb_per_s']['median']:.2f} | {x['cpu_s_per_gb']['median']:.4f}" for x in found.values()]
        lines.append(f"{name:{width}}" + "".join(f"{text:>22}" for text in texts))
    return "\n".join(lines)


# The section `steps`.


def expect_equal_losses(losses: dict[str, list[float]], dtype: str) -> None:
    """Raise ValueError where the first losses differ by more than rounding, or the later ones by more than LATER."""
    if wrong := disagreement(
        {name: found[:1] for name, found in losses.items()}, "fp32" if dtype == "fp32" else "bf16"
    ):
        raise ValueError(f"steps, {dtype}: {wrong}")
    for i, at_step in enumerate(zip(*losses.values())):
        apart = (max(at_step) - min(at_step)) / min(at_step)
        if not apart <= LATER[dtype]:
            raise ValueError(
                f"steps, {dtype}: losses of step {i + 1} differ by {apart:.1e}, allowed {LATER[dtype]:.0e}: {losses}"
            )


def steps_section(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Whole training steps in turns, and fio's mixed rate of the same round; ValueError where the losses differ."""
    names = args.step_contenders
    config = problem.Config(
        256, d_model=1024, n_layers=args.layers, n_heads=16, n_kv_heads=8, d_ff=2816, max_len=args.tokens
    )
    parameters = sum(int(np.prod(shape)) for shape in problem.shapes(config).values())
    order = {"section": "steps", "config": dataclasses.asdict(config), "dtype": dtype, "offload": args.offload}
    order |= {
        "batch": 1,
        "threads": args.threads,
        "seed": 0,
        "blocks": 8,
        "plane_bytes": 16 << 20,
        "buffer_bytes": args.buffer_mb << 20,
    }
    rows: dict[str, list] = {name: [] for name in names}
    trained = [name for name in names if name != "fio"]
    with contenders(names, order, args) as started:
        losses = {name: [started[name].run("step", i)["loss"] for i in range(args.warmup)] for name in trained}
        expect_equal_losses(losses, dtype)
        for i in range(args.repeats):
            for name in rotated(names, i):
                rows[name].append(
                    started[name].run("mixed") if name == "fio" else started[name].run("step", args.warmup + i)
                )
        versions = {name: contender.versions for name, contender in started.items()}
    results, base = {}, rows[trained[0]]
    for name in trained:
        found = rows[name]
        moved = [row["optimizer_read_bytes"] + row["optimizer_write_bytes"] for row in found]
        results[name] = {key: spread([row[key] for row in found]) for key in ("s", "optimizer_s", "cpu_s")} | {
            "losses": losses[name],
            "read_gb": spread([row["read_bytes"] / 1e9 for row in found]),
            "written_gb": spread([row["write_bytes"] / 1e9 for row in found]),
            "optimizer_gb_per_s": spread([n / 1e9 / row["optimizer_s"] for n, row in zip(moved, found)]),
            "slower_than_first": spread([row["s"] / first["s"] for row, first in zip(found, base)]),
            "optimizer_slower_than_first": spread(
                [row["optimizer_s"] / first["optimizer_s"] for row, first in zip(found, base)]
            ),
            "rows": found,
        }
        if "fio" in rows:
            rates = [(row["read_bytes"] + row["write_bytes"]) / row["s"] for row in rows["fio"]]
            results[name]["optimizer_of_fio_mixed"] = spread(
                [n / row["optimizer_s"] / rate for n, row, rate in zip(moved, found, rates)]
            )
    return order | {
        "parameters": parameters,
        "warmup": args.warmup,
        "repeats": args.repeats,
        "loss_tolerance": LATER[dtype],
        "versions": versions,
        "results": results,
    }


def steps_table(run: dict[str, Any]) -> str:
    """One line a contender, the first being what the ratios refer to."""
    width = 2 + max(map(len, run["results"]))
    lines = [
        f"steps: {run['parameters'] / 1e6:.0f}M parameters, {run['dtype']}, 1 x {run['config']['max_len']} tokens, "
        f"{run['threads']} threads, {run['repeats']} rounds; ratios are to {next(iter(run['results']))}, of the same "
        "round",
        f"{'':{width}}{'step s':>8}{'slower [min, max]':>22}{'optimizer s':>13}{'slower [min, max]':>22}"
        f"{'GB read':>9}{'written':>9}{'CPU s':>8}{'of fio mixed':>22}",
    ]
    for name, x in run["results"].items():
        lines.append(
            f"{name:{width}}{x['s']['median']:8.3f}{bounds(x['slower_than_first']):>22}{x['optimizer_s']['median']:13.3f}{bounds(x['optimizer_slower_than_first']):>22}"
            f"{x['read_gb']['median']:9.2f}{x['written_gb']['median']:9.2f}{x['cpu_s']['median']:8.2f}{bounds(x.get('optimizer_of_fio_mixed')):>22}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default="disk,steps", help="comma list of disk, steps")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="where the files are made, on the disk in question (default: here)",
    )
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", help="the Python with DeepSpeed; without it DeepSpeed is left out"
    )
    parser.add_argument(
        "--contenders", help=f"disk: comma list of {', '.join(CONTENDERS['disk'])}; fio must be among them"
    )
    listed = f"{', '.join(CONTENDERS['steps'])} (default: {', '.join(DEFAULT['steps'])})"
    parser.add_argument("--step-contenders", help=f"steps: comma list of {listed}")
    parser.add_argument("--blocks", type=int, default=24, help="disk: blocks, of three planes each")
    parser.add_argument("--plane-mb", type=int, default=16, help="disk: MiB of a plane")
    parser.add_argument("--layers", type=int, default=18, help="steps: layers of 11.8M parameters")
    parser.add_argument("--tokens", type=int, default=32, help="steps: tokens of a step")
    parser.add_argument("--dtype", default="bf16", help="steps: comma list of fp32, bf16, bf16-states")
    parser.add_argument("--offload", default="opt=nvme", help="steps: what of ours is on the disk")
    parser.add_argument(
        "--buffer-mb", type=int, default=512, help="steps: MiB of our buffers; DeepSpeed's are 570 where tuned"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, at least 5")
    parser.add_argument(
        "--smoke", action="store_true", help="2 small rounds: whether everything runs, not how fast it is"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write, after every section")
    args = parser.parse_args()
    for name, least in (
        ("blocks", RING),
        ("plane_mb", 8),
        ("layers", 1),
        ("tokens", 1),
        ("threads", 1),
        ("warmup", 2),
        ("repeats", 5),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.plane_mb % 8:
        parser.error(f"--plane-mb {args.plane_mb}: must be a multiple of 8")
    for flag, value, allowed in (
        ("sections", args.sections, CONTENDERS),
        ("contenders", args.contenders or "fio", CONTENDERS["disk"]),
        ("step-contenders", args.step_contenders or "fio", CONTENDERS["steps"]),
        ("dtype", args.dtype, ("fp32", "bf16", "bf16-states")),
    ):
        for part in value.split(","):
            if part not in allowed:
                parser.error(f"--{flag}: {part!r} is not one of {', '.join(allowed)}")
    chosen = {"disk": args.contenders, "steps": args.step_contenders}
    for section, given in chosen.items():
        names = given.split(",") if given else list(DEFAULT[section])
        chosen[section] = [
            name for name in names if args.deepspeed or given or CONTENDERS[section][name][0] != "deepspeed"
        ]
        if any(CONTENDERS[section][name][0] == "deepspeed" for name in chosen[section]) and not args.deepspeed:
            parser.error("DeepSpeed is asked for: give its --deepspeed PYTHON")
    args.contenders, args.step_contenders = chosen["disk"], chosen["steps"]
    if "fio" not in args.contenders:
        parser.error("--contenders: fio must be among them, ratios are to it")
    if all(name == "fio" for name in args.step_contenders):
        parser.error("--step-contenders: none of them trains")
    args.python = {"fzero": sys.executable, "deepspeed": args.deepspeed}
    if args.smoke:
        args.repeats, args.blocks, args.layers = 2, 2 * RING, min(args.layers, 4)
    return args


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("nvme.py: ended by SIGTERM")
    )  # the files are removed all the same
    args = parse()
    hidden = {"--deepspeed": "PYTHON", "--folder": "FOLDER"}  # where somebody keeps things is not part of the result
    given = [hidden.get(before, part) for before, part in zip(["", *sys.argv[1:]], sys.argv[1:])]
    command = shlex.join(["python", "benchmarks/nvme.py", *given])
    sittings = [(disk_section, disk_table, (args,))] if "disk" in args.sections else []
    sittings += (
        [(steps_section, steps_table, (dtype, args)) for dtype in args.dtype.split(",")]
        if "steps" in args.sections
        else []
    )
    runs = []
    for section, table, given_to in sittings:
        load = os.getloadavg()
        run = section(*given_to)
        run |= {
            "notes": {name: NOTES[name] for name in run["versions"]},
            "load_average": {"before": load, "after": os.getloadavg()},
        }
        runs.append(run)
        print("\n".join([table(run), *(f"{name}: {note}" for name, note in run["notes"].items())]) + "\n", flush=True)
        if args.out:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(
                json.dumps({"command": command, "date": now, "machine": machine(), "runs": runs}, indent=1) + "\n"
            )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"nvme.py: {error}")
