"""The process of a part of ten.py: it measures row after row, and says each as a line `FIGURE {...}`.

A row that raises is a row too, and the next one follows. Where CUDA is of no use any more after an error, the process
ends with a code for which ten.py goes on with the next row in a new one."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ten_process import die_with_parent, is_sticky

from fzero.core import gpu

ROOT = Path(__file__).resolve().parent.parent
AGAIN = 75  # as in ten.py
Rows = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # (its name, what measures it)


class Where(NamedTuple):
    """The place of a measurement."""

    device: str  # cuda or cpu
    tiny: bool  # sizes that mean nothing
    out: Path  # for the few files that are kept
    folder: Path  # for all others
    name: str  # of the part
    failed: frozenset[str] = frozenset()  # rows that failed in an earlier process of the part

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"


NEEDS_GPU = {"needs a GPU": True}  # the row of what a CPU has not


def say(**row: Any) -> None:
    """Print a row. last: whether it is the one that counts; a later row of its name takes its place."""
    print("\nFIGURE " + json.dumps(row, default=str), flush=True)


def gist_of(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def run_rows(rows: Rows, done: set[str], where: Where) -> int:
    """Measure what is not done; returns the exit code."""
    name = "the beginning"
    while True:
        try:
            name, measure = next(rows)
        except StopIteration:
            return 0
        except Exception as error:  # between two rows
            print(traceback.format_exc(), flush=True)
            say(row=f"behind {name}", failed=gist_of(error))
            return AGAIN if is_sticky(str(error)) else 1
        if name in done:
            continue
        say(starts=name)
        begin = time.perf_counter()
        try:
            found = measure()
            synchronize(where.device)  # a fault of its kernels is this row's
            forget(where.device)
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            found = {"failed": gist_of(error)}
            memory = isinstance(error, torch.OutOfMemoryError)
            if where.cuda and not memory and is_sticky(str(error)):
                say(row=name, **found)
                return AGAIN
        say(row=name, **found, s=round(time.perf_counter() - begin, 2))


# ---- what rows share ----


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def forget(device: str) -> None:
    """Free what nothing names any more, and count the device's memory anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def allocated(device: str) -> int:
    """Bytes of tensors on the device now; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def memory(device: str) -> dict[str, Any]:
    """Bytes of the allocator since `forget`: what tensors, blocks in use and segments took at most; how often it freed
    all to go on; and what the reserved peak is above the active one, which one stream's pool does not lend another."""
    if device != "cuda":
        return {"peak_bytes": 0}
    stats = torch.cuda.memory_stats()
    peak, active, reserved = (stats[f"{what}_bytes.all.peak"] for what in ("allocated", "active", "reserved"))
    return {
        "peak_bytes": peak,
        "active_bytes": active,
        "reserved_bytes": reserved,
        "reserved_less_active": reserved - active,
        "alloc_retries": stats["num_alloc_retries"],
    }


def seconds_of(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """(seconds until a call has returned, and until the device has done its work)."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    issued = time.perf_counter() - begin
    synchronize(device)
    return issued, time.perf_counter() - begin


def median_seconds(run: Callable[[], Any], device: str, budget: float = 0.1) -> float:
    """The median time of a call of a kernel, of those that fit into `budget` seconds, behind one that is not timed."""
    run()
    if device != "cuda":
        return seconds_of(run, device)[1]
    from triton.testing import do_bench  # its second-level cache is cold, as in a step

    return do_bench(run, warmup=10, rep=int(1000 * budget), return_mode="median") / 1e3


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median, least, most, and how many."""
    ms = [1e3 * s for s in seconds]
    return {"median": statistics.median(ms), "min": min(ms), "max": max(ms), "count": len(ms)}


def waits_of(run: Callable[[], Any], device: str) -> dict[str, int]:
    """Where a call waits for the GPU, by PyTorch's own count: {"file:line": times}; {} on a CPU."""
    if device != "cuda":
        run()
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [
        f"{os.path.relpath(one.filename, ROOT)}:{one.lineno}" for one in said if "synchronizing" in str(one.message)
    ]
    return dict(Counter(lines))


def said_by(command: list[str], lines: int = 25, **options: Any) -> dict[str, Any]:
    """What a program says: {"code", "said": its last lines}; code None where it is not here."""
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, **options)
    except FileNotFoundError:
        return {"code": None, "said": f"{command[0]} is not here"}
    print(run.stdout, flush=True)
    return {"code": run.returncode, "said": "\n".join(run.stdout.splitlines()[-lines:])}


def must(found: dict[str, Any]) -> dict[str, Any]:
    """What `said_by` found; raises RuntimeError if the program failed."""
    if found["code"] != 0:
        raise RuntimeError(f"exit code {found['code']}: {' | '.join(found['said'].splitlines()[-3:])}")
    return found


def fzero(*words: str) -> list[str]:
    """The command line of `fzero`, in this Python."""
    return [sys.executable, "-m", "fzero", *words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("rows", "name", "device", "out", "folder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--done", type=json.loads, default=[], help="rows that are not measured any more")
    parser.add_argument("--failed", type=json.loads, default=[], help="those of them that failed")
    args = parser.parse_args()
    die_with_parent()
    where = Where(args.device, args.tiny, Path(args.out), Path(args.folder), args.name, frozenset(args.failed))
    module, _, function = args.rows.partition(":")
    rows = getattr(importlib.import_module(module), function)
    with contextlib.suppress(BrokenPipeError):
        gpu.use_device(where.device)
        return run_rows(rows(where), {*args.done}, where)
    return 1


if __name__ == "__main__":
    sys.exit(main())
