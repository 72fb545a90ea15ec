"""Peak bytes of live tensors in a step, counted by torch's CPU allocator.

Every CPU tensor's storage comes from c10's CPU allocator, whoever asks: ATen, autograd, a workspace inside an operator,
and Inductor's generated code, which never meets the dispatcher and so is invisible to a TorchDispatchMode. The profiler
reports each allocation and release there with the running total, the bytes of all live storages, each once. By itself
it counts only in threads that it knows, and a storage freed in a thread of gloo's would stay in the total; so the
allocator is told to count in all threads, from the first tensor on. Memory owned by others (numpy arrays, oneDNN's
scratch) is not counted.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_MARK = "live_bytes.measured"


def peak(setup: Callable[[], Callable[[], None]]) -> dict[str, int]:
    """{"peak_bytes", "before_bytes"} of one call of what `setup()` returns: the highest total, the total at its start.

    `setup` makes every tensor that should count (parameters, optimizer state) and warms up. Call it once, first thing
    in a fresh process: a tensor older than the count is not in the totals.
    """
    count_in_all_threads()
    run = setup()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile, torch.profiler.record_function(_MARK):
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return peak_of_trace(events)


def count_in_all_threads() -> None:
    """Nothing; from here on torch's CPU allocator keeps its total whichever thread asks (c10's own flag, a C++
    global)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def peak_of_trace(events: list[dict]) -> dict[str, int]:
    """The same from the events of a Chrome trace; raises ValueError where the measured step allocated nothing."""
    (mark,) = [e for e in events if e.get("name") == _MARK and e.get("ph") == "X"]
    start, end = mark["ts"], mark["ts"] + mark["dur"]
    # The sort is by time alone: events of one microsecond keep the order in which they were recorded.
    counts = sorted((e for e in events if e["name"] == "[memory]" and start <= e["ts"] <= end), key=lambda e: e["ts"])
    if not counts:
        raise ValueError(
            "no allocation was recorded in the measured step; is it run on the CPU by torch in this thread?"
        )
    totals = [e["args"]["Total Allocated"] for e in counts]
    before_bytes = totals[0] - counts[0]["args"]["Bytes"]  # the bytes of a release are negative
    return {"peak_bytes": max(before_bytes, *totals), "before_bytes": before_bytes}
