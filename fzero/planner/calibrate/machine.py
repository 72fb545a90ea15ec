"""`fzero bench`: measure this machine, part by part, and write its device file (see fzero.planner.devices)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.core import gpu
from fzero.core.compile import have_compiler
from fzero.core.files import make_folder, replacing
from fzero.kernels import chips
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.disk_config import load_settings
from fzero.planner.calibrate import attention, fused, memory, products, ranks, steps
from fzero.planner.calibrate.curves import curve_of, join_curves, products_of
from fzero.planner.calibrate.disk import DEPTH
from fzero.planner.calibrate.disk_rates import KINDS, MB, engine, open_files
from fzero.planner.calibrate.timed import Figure, on_threads, spread_of, warm_heap
from fzero.planner.devices import MARGIN, RESERVED_BYTES, Device, Level, Rates, from_json, to_json
from fzero.run.machine import cores, processor

PARTS = ("memory", "gemm", "steps", "fused", "links", "attention")
SECONDS = {
    "memory": 4.0,
    "gemm": 12.0,
    "steps": 8.0,
    "overhead": 3.0,
    "fused": 3.0,
    "links": 6.0,
    "attention": 20.0,
}  # time of the figures in one sweep
QUICK = 0.2  # factor of these times with --quick
DISK_BYTES = 512 * MB
Found = dict[str, dict[Any, Figure]]


class Effort(NamedTuple):
    """The parts to measure, and how long."""

    parts: tuple[str, ...] = PARTS
    quick: bool = False
    device: str = "cpu"

    def seconds(self, part: str) -> float:
        """The seconds for the figures of a part, without their preparation."""
        return SECONDS[part] * (QUICK if self.quick else 1.0)


class Sweep(NamedTuple):
    """The figures of one process, measured while a number of processes did the same."""

    memory: Found
    gemm: Found
    kernels: Found
    fused: Found
    host: dict[str, dict[Any, Figure]]  # "eager" -> "op": see steps.host_of


def measure(
    effort: Effort,
    *,
    disk: Path | None = None,
    before: Device | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Device:
    """Measure this machine and return its Device. before: keep its figures of parts not measured now. disk: a folder
    whose disk to measure too.

    Measures three sweeps: one thread, all threads, and one process for each core simultaneously. A GPU has one sweep,
    and the forms of attention, whose speeds go to a file of their own (see kernels.chips).
    Raises ValueError for an unknown part, and if a process of the measurement fails.
    """
    for part in effort.parts:
        if part not in PARTS:
            raise ValueError(f"there is no part {part!r} of a machine to measure; the parts are {', '.join(PARTS)}")
    begin, count = time.perf_counter(), cores() if effort.device == "cpu" else 1
    warm_heap()
    say("one thread")
    alone = sweep(effort, 1)
    overhead = None
    if (
        "steps" in effort.parts
        and "fused" in effort.parts
        and effort.device == "cpu"
        and have_compiler()
        and not effort.quick
    ):
        say("compiled steps")
        overhead = steps.measure_overhead(effort.seconds("overhead"), compiled=True)
    earlier = {(r.threads, r.processes): r for r in before.rates} if before is not None else {}
    found = [rates_of(alone, 1, 1, overhead, earlier.get((1, 1)))]
    messages: dict[int, ranks.Messages] = {}
    if count > 1 and not effort.quick:
        say(f"{count} threads")
        found.append(rates_of(sweep(effort, count, True), count, 1, overhead, earlier.get((count, 1))))
    sizes = _rank_counts(effort, count)
    for n in sizes:
        say(f"{n} processes")
        both = ranks.on_ranks(
            n, _together, effort, n == count and not effort.quick, "links" in effort.parts, device=effort.device
        )
        if both[0][0] is not None:
            merged = Sweep(*(ranks.merge_ranks([each[0][i] for each in both]) for i in range(len(Sweep._fields))))
            found.append(rates_of(merged, 1, n, overhead, earlier.get((1, n))))
        if both[0][1] is not None:
            messages[n] = ranks.slowest([each[1] for each in both])
    kept = [r for key, r in earlier.items() if key not in {(new.threads, new.processes) for new in found}]
    device = assemble_device(effort, [*found, *kept], messages, before)
    if effort.device == "cuda" and "attention" in effort.parts:
        say("attention")
        chips.write_measured(device.name, attention.measure_attention(effort.seconds("attention")))
    if disk is not None:
        say(f"the disk of {disk}")
        device = replace(device, nvme=disk_rates(disk, effort.quick))
    return replace(device, machine=machine(effort, time.perf_counter() - begin, found))


def sweep(effort: Effort, threads: int, few: bool = False) -> Sweep:
    """Measure this process with `threads` threads; few: with a smaller grid of products."""
    device, quick, parts = effort.device, effort.quick, effort.parts
    options = {"threads": threads, "device": device}
    share = 1.0 if "memory" in parts else 0.3  # every device file has the bandwidth
    found = memory.measure_memory(effort.seconds("memory") * share, quick=quick or share < 1.0, **options)
    gemm = products.measure_products(effort.seconds("gemm"), quick=quick or few, **options) if "gemm" in parts else {}
    kernels, host = {}, {}
    if "steps" in parts and device == "cpu":
        ladder = steps.QUICK if quick else steps.LADDER
        recorded = steps.record(effort.seconds("steps"), threads=threads, ladder=ladder)
        kernels = recorded.kernels
        host = {"eager": {"op": Figure(steps.host_of(recorded.steps, min(found["add"].items())[1].s))}}
        gemm = join_curves(recorded.gemm, gemm)
    loops = (
        fused.measure_fused(effort.seconds("fused"), **options)
        if "fused" in parts and have_compiler() and not quick
        else {}
    )
    return Sweep(found, gemm, kernels, loops, host)


def _together(mesh: Any, effort: Effort, sweeps: bool, links: bool) -> tuple[Sweep | None, ranks.Messages | None]:
    """On each of several processes: measure them computing simultaneously, and the links between them."""
    found = (
        ranks.sweep(mesh, sweep, effort._replace(parts=tuple(p for p in effort.parts if p != "links")), 1, True)
        if sweeps
        else None
    )
    return found, ranks.messages(mesh, effort.seconds("links")) if links else None


def _rank_counts(effort: Effort, count: int) -> list[int]:
    """The numbers of processes to start: 2 and 4 for links, and one for each core."""
    if effort.device == "cuda":
        gpus = gpu.count_gpus()
        return [n for n in (2, 4, 8) if n <= gpus] if "links" in effort.parts else []
    links = ([2] if effort.quick else [2, 4]) if "links" in effort.parts else []
    together = [count] if 1 < count <= 8 and not effort.quick and set(effort.parts) - {"links"} else []
    return sorted({*links, *together})


def rates_of(
    found: Sweep, threads: int, processes: int, overhead: steps.Overhead | None, before: Rates | None
) -> Rates:
    """The Rates of a sweep; parts not measured come from `before`."""
    add = found.memory["add"]
    others = {key: sizes for key, sizes in found.memory.items() if key != "add"}
    kernels = {
        key: curve_of(sizes)
        for key, sizes in join_curves(join_curves(found.kernels, others, outside=True), found.fused).items()
    }
    figures = [f for part in found[:4] for sizes in part.values() for f in sizes.values()]
    op_s, step_s = {}, {}
    if found.host:
        op_s["eager"] = found.host["eager"]["op"].s
    if overhead is not None and found.host:
        # Overhead was measured on steps that compute nothing; scale it by the ratio of the eager time in real steps.
        longer = op_s["eager"] / overhead.op_s["eager"]
        op_s = {key: s * longer for key, s in overhead.op_s.items()}
        # an eager step's is part of its operators'
        step_s = {key: s * longer for key, s in overhead.step_s.items() if key != "eager"}
    old = before or Rates(threads, processes, (), {}, {}, {}, {})
    return Rates(
        threads,
        processes,
        curve_of(add),
        {**old.gemm, **products_of(found.gemm)},
        {**old.kernels, **kernels},
        {**old.op_s, **op_s},
        {**old.step_s, **step_s},
        round(spread_of(figures), 3),
    )


def assemble_device(
    effort: Effort, found: list[Rates], messages: dict[int, ranks.Messages], before: Device | None
) -> Device:
    """The Device of these rates and messages; parts not measured come from `before`, or are left open."""
    flops: dict[str, float] = dict(before.flops) if before is not None else {}
    for rates in found:
        for key, rows in rates.gemm.items():
            best = max(2.0 * b * m * n * k / s for b, m, n, k, s in rows) * rates.processes
            flops[key.split("/")[0]] = max(flops.get(key.split("/")[0], 0.0), best)
    large = max(size / s * r.processes for r in found for size, s in r.bandwidth[-2:])
    links, collectives = (before.links, before.collectives) if before is not None else ((UNKNOWN,), {})
    if messages:
        links, collectives = (link_of(messages, effort.device),), dict(collectives)
        for n, each in messages.items():
            collectives |= {f"{kind}/{n}": tuple(sorted(sizes.items())) for kind, sizes in each.curves.items()}
            collectives[f"late/{n}"] = ((1.0, max(each.late_s, 1e-9)),)
    on_gpu = effort.device == "cuda"
    card = gpu.properties(torch.device("cuda", 0)) if on_gpu else None
    return Device(
        name=card.name if card is not None else processor(),
        kind=effort.device,
        measured=True,
        processors=card.multi_processor_count if card is not None else cores(),
        memory_bytes=card.total_memory if card is not None else total_bytes(),
        reserved_bytes=RESERVED_BYTES,
        margin=MARGIN,
        flops=flops,
        bandwidth_bytes_s=large,
        links=links,
        capability=(card.major, card.minor) if card is not None else (0, 0),
        cache_bytes=getattr(card, "L2_cache_size", None) if card is not None else cache_bytes(),
        rates=tuple(found),
        collectives=collectives,
        host_memory_bytes=total_bytes() if on_gpu else None,
        host_memory_bytes_s=host_memory_rate() if on_gpu else None,
        host=host_rates() if on_gpu else {},
        nvme=before.nvme if before is not None else {},
        sources={
            "all": "measured by fzero bench, see machine",
            "margin": "assumption: 5% lost to fragments of the heap",
        },
    )


# Links that were not measured are assumed to cost nothing.
UNKNOWN = Level("not measured", "gloo", None, 1e9, 1e-4)


def link_of(messages: dict[int, ranks.Messages], device: str) -> Level:
    """The level between the processes of this machine, from the messages of two and of more ranks."""
    few, many = min(messages), max(messages)
    fitted = ranks.fit(messages[few].curves["ppermute"])
    size, seconds = max(messages[many].curves["all_to_all"].items())
    call_s = messages[few].call_s
    name, kind = ("GPUs of this machine", "nccl") if device == "cuda" else ("this machine", "gloo")
    latency, total = max(fitted.latency_s - call_s, 0.0), size * (many - 1) / seconds
    return Level(name, kind, None, fitted.bytes_s, latency, max(total, fitted.bytes_s), call_s, messages[few].hidden)


def disk_rates(folder: Path, quick: bool = False) -> dict[str, float]:
    """The bytes/s of the disk of `folder`, with the settings that a run would use there (see calibrate/disk_rates.py).

    Raises ValueError for an unsuitable folder.
    """
    settings = load_settings(folder)
    size = max(DISK_BYTES // (8 if quick else 1), 4 * settings.block_bytes)
    with open_files(folder, size) as files:
        buffers = BufferPool(4 * max(settings.readers, settings.writers) * DEPTH * settings.block_bytes)
        seconds = 0.2 if quick else 1.0
        found = {
            kind: engine(files, buffers, settings, DEPTH, writes, seconds).gbs * 1e9 for kind, writes in KINDS.items()
        }
    return {"read": found["read"], "write": found["write"], "both": found["mixed"]}


def host_rates(size: int = 256 << 20) -> dict[str, float]:
    """The bytes/s between a GPU and pinned memory of its host, in each direction."""
    here, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    found = {}
    for name, target, source in (("read", there, here), ("write", here, there)):
        samples = []
        for _ in range(6):
            gpu.synchronize(there.device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            gpu.synchronize(there.device)
            samples.append(time.perf_counter() - begin)
        found[name] = size / min(samples[1:])
    return found


def host_memory_rate(size: int = 256 << 20) -> float:
    """The bytes/s, read and written, at which all threads of a GPU's process add numbers in its host's memory: as the
    optimizer of an offloaded state."""
    a, b, out = (torch.ones(size // 4) for _ in range(3))
    with on_threads(cores()):
        samples = []
        for _ in range(4):
            begin = time.perf_counter()
            torch.add(a, b, out=out)
            samples.append(time.perf_counter() - begin)
    return 3 * out.nbytes / min(samples[1:])


# ---- facts about the machine -------------------------------------------------------------------------------------


def total_bytes() -> int:
    """The memory of this machine, or its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (limit := group.read_text().strip()) != "max":
        limits.append(int(limit))
    return min(limits)


def cache_bytes() -> int | None:
    """The bytes of the last-level cache, if the system reports it."""
    if "SC_LEVEL3_CACHE_SIZE" not in os.sysconf_names:
        return None
    return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0) or None


def machine(effort: Effort, took: float, found: list[Rates]) -> dict[str, str]:
    """The facts of the measurement: processor, time, versions, and how steady it was."""
    spreads = ", ".join(
        f"{r.spread:.2f} ({r.threads} thread{'s' * (r.threads > 1)}, {r.processes} at once)" for r in found
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "processor": processor(),
        "cores": str(cores()),
        "torch": torch.__version__,
        "fzero": fzero.__version__,
        "parts": ", ".join(effort.parts) + (" (quick)" if effort.quick else ""),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "took": f"{took:.0f} s",
        "load": f"{load:.2f} processes at the end, by the system",
        "spread": f"median over minimum of a figure, the middle one: {spreads}",
    }


def save(device: Device, path: Path) -> None:
    """Write the device file atomically."""
    make_folder(path.parent)
    text = to_json(device)
    assert from_json(text, str(path)) == device
    with replacing(path, cache=True) as file:
        file.write(text.encode())
