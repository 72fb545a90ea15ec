"""What a machine is and does at best, for ten.py: versions, memory, copies, products, waits; and NVIDIA's memcheck."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from ten_rows import NEEDS_GPU, Rows, Where, fzero, median_seconds, must, said_by, synchronize

from fzero.core import gpu, host_memory
from fzero.run.setup import machine

TOOLS = ("g++", "nvidia-smi", "compute-sanitizer", "nsys", "ncu", "numactl")
PACKAGES = ("numpy", "triton", "transformers", "crc32c", "zstandard", "xdist", "pytest_timeout", "flash_attn_interface")
ASKED = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
)


def rows(where: Where) -> Rows:
    """Versions; the host; ceilings of copies and products; what a wait costs; free memory twice, 5 s apart."""
    begin, first = time.monotonic(), free_memory(where)
    yield "versions", functools.partial(versions, where)
    yield "card", lambda: said_by(["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"])
    yield "host", functools.partial(host, where)
    for name, run in copies(where).items():
        yield f"copy {name}", run
    yield "product bf16", functools.partial(product, where)
    yield "event wait", functools.partial(event_wait, where)

    def later() -> dict[str, Any]:
        time.sleep(max(0.0, 5.0 - (time.monotonic() - begin)) if not where.tiny else 0.0)
        return {"first": first, "later": free_memory(where), "s between": round(time.monotonic() - begin, 1)}

    yield "free memory", later


def doctor_rows(where: Where) -> Rows:
    """What `fzero doctor` says."""
    yield "doctor", lambda: must(said_by(fzero("doctor"), 60))


def versions(where: Where) -> dict[str, Any]:
    """Of Python, PyTorch, what it brings, and packages that matter ("": not here)."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    found["cudnn"] = torch.backends.cudnn.version()
    if where.cuda:
        found |= {"card": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
        found["properties"] = str(torch.cuda.get_device_properties(0))
    for name in PACKAGES:
        here = importlib.util.find_spec(name) is not None
        found[name] = getattr(importlib.import_module(name), "__version__", "here") if here else ""
    return found


def host(where: Where) -> dict[str, Any]:
    """The host's cores, memory, disk and tools."""
    disk = shutil.disk_usage(where.folder)
    return {
        "cores": machine.cores(),
        "free -g": said_by(["free", "-g"])["said"],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "binding": host_memory.find_placement(gpu.local_device(where.device)).line,
        "disk_free_bytes": disk.free,
        "tools": {name: shutil.which(name) or "" for name in TOOLS},
    }


def free_memory(where: Where) -> dict[str, int]:
    """Bytes that are free now, on the host and on the device."""
    found = {"available_bytes": machine.available_bytes()}
    return found | ({"device_free_bytes": torch.cuda.mem_get_info()[0]} if where.cuda else {})


def copies(where: Where) -> dict[str, Callable[[], dict[str, Any]]]:
    """{kind of copy: what measures its bytes/s}; on the device read and write are counted. Both: each way at once."""
    n = 1 << 16 if where.tiny else 1 << 30
    device = gpu.local_device(where.device)

    def memory(pinned: bool) -> torch.Tensor:
        if pinned:
            return torch.empty(n, dtype=torch.uint8, pin_memory=where.cuda)
        return torch.empty(n, dtype=torch.uint8, device=device)

    def rate(kind: str) -> dict[str, Any]:
        pairs = {"D2D": [(False, False)], "H2D": [(True, False)], "D2H": [(False, True)]}
        pairs["both"] = pairs["H2D"] + pairs["D2H"]
        tensors = [(memory(source), memory(target)) for source, target in pairs[kind]]
        streams = [torch.cuda.Stream() if where.cuda else None for _ in tensors]

        def run() -> float:
            synchronize(where.device)
            begin = time.perf_counter()
            for stream, (source, target) in zip(streams, tensors):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            synchronize(where.device)
            return time.perf_counter() - begin

        run()
        seconds = [run() for _ in range(3 if where.tiny else 7)]
        moved = n * len(tensors) * (2 if kind == "D2D" else 1)
        return {"bytes_per_s": moved / statistics.median(seconds), "bytes": n}

    return {kind: functools.partial(rate, kind) for kind in ("D2D", "H2D", "D2H", "both")}


def product(where: Where) -> dict[str, Any]:
    """FLOP/s of a square product in bfloat16."""
    if where.cuda:
        return {"flop_per_s": gpu.product_rate(torch.bfloat16, gpu.local_device("cuda"))}
    side = 64
    a = torch.randn(side, side, dtype=torch.bfloat16)
    return {"flop_per_s": 2.0 * side**3 / median_seconds(lambda: a @ a, where.device)}


def event_wait(where: Where) -> dict[str, Any]:
    """Microseconds from the end of a kernel of some 200 us until the host goes on, beyond the kernel's own time: by an
    event for which the thread sleeps, and by one for which it spins."""
    if not where.cuda:
        return NEEDS_GPU
    x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, Any] = {}
    for blocking in (True, False):
        event, us = torch.cuda.Event(blocking=blocking), []
        for _ in range(100):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            first.record()
            x.zero_()
            last.record()
            event.record()
            event.synchronize()
            us.append(1e6 * (time.perf_counter() - begin) - 1e3 * first.elapsed_time(last))
        found["sleeps_us" if blocking else "spins_us"] = statistics.median(us[10:])
    return found | {"sleeps_less_spins_us": found["sleeps_us"] - found["spins_us"]}


def memcheck_rows(where: Where) -> Rows:
    """Accesses out of bounds in the norms' backward pass, by NVIDIA's tool where it is here."""
    yield "norm backward", functools.partial(memcheck, where)


def memcheck(where: Where) -> dict[str, Any]:
    """The tool's summary; raises RuntimeError where it found an access."""
    words = [sys.executable, str(where.folder / "norm.py")]
    (where.folder / "norm.py").write_text(
        "import torch\nfrom fzero.kernels.registry import op\n"
        f"x = torch.randn(67, 4099, device='{where.device}').bfloat16().requires_grad_()\n"
        f"w = torch.rand(4099, device='{where.device}').requires_grad_()\n"
        "op('rms_norm')(x, w, 1e-5).sum().backward()\nprint('mean', float(x.grad.float().mean()))\n"
    )
    here = shutil.which("compute-sanitizer") is not None
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"] if here else []
    found = must(said_by([*tool, *words], env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", found["said"])
    return found | ({"errors": int(errors[-1])} if errors else {"tool": "compute-sanitizer is not here; run without"})
