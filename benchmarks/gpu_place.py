"""Where the parts of gpu.py run, and what they share."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
Cases = Iterator[tuple[str, Callable[[], Any]]]  # (a name, what measures it)


class Where(NamedTuple):
    """The place of a measurement."""

    device: str  # cuda or cpu
    tiny: bool  # sizes that mean nothing, to find the mistakes of the program
    folder: Path  # for what a part leaves beside the JSON
    best: dict[str, float] = {}  # noqa: RUF012  # what the device does: bytes/s of a copy, FLOP/s of a bf16 product
    peak: dict[str, float] = {}  # noqa: RUF012  # FLOP/s for MFU: measured, and of the data sheet
    compiled: bool = True
    words: str = ""  # only cases whose name contains this


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: str, times: int) -> list[float]:
    """The seconds of each of some calls, to the end of the device's work."""
    found = []
    for _ in range(times):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median, least, most and how many."""
    return {
        "median": 1e3 * statistics.median(seconds),
        "min": 1e3 * min(seconds),
        "max": 1e3 * max(seconds),
        "count": len(seconds),
    }


def allocated(device: str) -> int:
    """Bytes of tensors on the device now; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak_since(device: str, before: int) -> int:
    """The most bytes that tensors had on the device since `forget_peak`, less those of `before`."""
    return torch.cuda.max_memory_allocated() - before if device == "cuda" else 0


def forget_peak(device: str) -> None:
    """Begin to count the peak anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def said_by(command: list[str], lines: int = 40, **options: Any) -> dict[str, Any]:
    """What a program says: {"code", "s", "said": its last lines}; code None where it is not here."""
    if shutil.which(command[0]) is None:
        return {"code": None, "s": 0.0, "said": f"{command[0]} is not here"}
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-lines:])
    return {"code": done.returncode, "s": time.perf_counter() - begin, "said": said}


def must(found: dict[str, Any]) -> dict[str, Any]:
    """What `said_by` found; raises RuntimeError if the program failed."""
    if found["code"] != 0:
        raise RuntimeError(f"exit code {found['code']}: {' | '.join(found['said'].splitlines()[-3:])}")
    return found


def fzero(*words: str) -> list[str]:
    """The command line of `fzero`, in this Python."""
    return [sys.executable, "-m", "fzero", *words]
