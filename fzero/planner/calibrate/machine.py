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
from fzero.core.compile_cache import have_compiler
from fzero.core.files import make_folder, replacing
from fzero.core.host_memory import cores
from fzero.kernels import tuning
from fzero.offload.buffer_pool import BufferPool
from fzero.offload.disk_io import load_settings
from fzero.planner.calibrate import case_timer, memory, step_operators
from fzero.planner.calibrate.case_timer import (
    Figure,
    curve_of,
    join_curves,
    on_threads,
    products_of,
    spread_of,
    warm_heap,
)
from fzero.planner.calibrate.disk import DEPTH, KINDS, MB, engine, open_files
from fzero.planner.devices import MARGIN, RESERVED_BYTES, Curve, Device, Level, MeasuredRates, from_json, to_json
from fzero.run.measure.memory_check import gigabytes
from fzero.run.setup.machine import processor
from fzero.sharding.spec import HOST_MEMORY

SHOWN = ("fused/float32", "norm/float32", "attention/float32", "cross_entropy/float32", "optimizer/float32")


def describe(device: Device) -> str:
    """Format the measured products, memory, operators, links, and how steady the measurement was."""
    units = "cores" if device.kind == "cpu" else "multiprocessors"
    lines = [f"{device.name}: {device.processors} {units}, {gigabytes(device.memory_bytes)}"]
    for rates in device.rates:
        several = f", each of {rates.processes} processes at once" if rates.processes > 1 else ""
        lines.append(f"{rates.threads} thread{'s' * (rates.threads > 1)}{several}:")
        lines += [f"  {line}" for line in _format_rates(rates)]
    for level in device.links:
        hidden = "" if level.hidden is None else f", {level.hidden:.0%} of it hidden behind computation"
        lines.append(
            f"links, {level.name}: {level.bytes_s / 1e9:.2f} GB/s and {level.latency_s * 1e6:.0f} us a message{hidden}"
        )
    for kind, rate in {**device.host, **device.nvme}.items():
        lines.append(f"{HOST_MEMORY if kind in device.host else 'disk'}, {kind}: {rate / 1e9:.2f} GB/s")
    return "\n".join([*lines, f"spread: {device.machine.get('spread', 'not known')}"])


def _format_rates(rates: MeasuredRates) -> list[str]:
    lines = []
    for key, rows in rates.gemm.items():
        best = max(rows, key=lambda row: row[0] * row[1] * row[2] * row[3] / row[4])
        b, m, n, k, seconds = best
        lines.append(
            f"products, {key}: {2 * b * m * n * k / seconds / 1e9:,.0f} GFLOP/s at best, of {len(rows)} shapes"
        )
    for key, curve in (
        ("sum of two", rates.bandwidth),
        *((key, rates.kernels[key]) for key in SHOWN if key in rates.kernels),
    ):
        lines.append(f"{key}: {_ends(curve)} {'GFLOP/s' if key.startswith('attention') else 'GB/s'}, small to large")
    return lines + [f"host, {key}: {seconds * 1e6:.1f} us" for key, seconds in rates.op_s.items()]


def _ends(curve: Curve) -> str:
    picked = [curve[i] for i in sorted({0, len(curve) // 2, len(curve) - 1})]
    return ", ".join(f"{size / seconds / 1e9:.1f}" for size, seconds in picked)


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
FigureTable = dict[str, dict[Any, Figure]]


class Effort(NamedTuple):
    """The parts to measure, and how long."""

    parts: tuple[str, ...] = PARTS
    quick: bool = False
    device: str = "cpu"

    def seconds(self, section: str) -> float:
        """The seconds for the figures of a part, without their preparation."""
        return SECONDS[section] * (QUICK if self.quick else 1.0)


class Sweep(NamedTuple):
    """The figures of one process, measured while a number of processes did the same."""

    memory: FigureTable
    gemm: FigureTable
    kernels: FigureTable
    fused: FigureTable
    host: dict[str, dict[Any, Figure]]  # "eager" -> "op": see steps.host_of


def measure(
    effort: Effort,
    *,
    disk: Path | None = None,
    previous: Device | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Device:
    """Measure this machine and return its Device: one thread, all threads, one process for each core."""
    for section in effort.parts:
        if section not in PARTS:
            raise ValueError(f"there is no part {section!r} of a machine to measure; the parts are {', '.join(PARTS)}")
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
        overhead = step_operators.measure_overhead(effort.seconds("overhead"), compiled=True)
    earlier = {(r.threads, r.processes): r for r in previous.rates} if previous is not None else {}
    rates = [rates_of(alone, 1, 1, overhead, earlier.get((1, 1)))]
    messages: dict[int, case_timer.MessageTimes] = {}
    if count > 1 and not effort.quick:
        say(f"{count} threads")
        rates.append(rates_of(sweep(effort, count, True), count, 1, overhead, earlier.get((count, 1))))
    sizes = _rank_counts(effort, count)
    for n in sizes:
        say(f"{n} processes")
        results = case_timer.on_ranks(
            n, _measure_rank, effort, n == count and not effort.quick, "links" in effort.parts, device=effort.device
        )
        if results[0][0] is not None:
            merged = Sweep(
                *(case_timer.merge_ranks([result[0][i] for result in results]) for i in range(len(Sweep._fields)))
            )
            rates.append(rates_of(merged, 1, n, overhead, earlier.get((1, n))))
        if results[0][1] is not None:
            messages[n] = case_timer.slowest([result[1] for result in results])
    previous_rates = [r for key, r in earlier.items() if key not in {(new.threads, new.processes) for new in rates}]
    device = assemble_device(effort, [*rates, *previous_rates], messages, previous)
    if effort.device == "cuda" and "attention" in effort.parts:
        say("attention")
        tuning.write_measured(device.name, memory.measure_attention(effort.seconds("attention")))
    if disk is not None:
        say(f"the disk of {disk}")
        device = replace(device, nvme=disk_rates(disk, effort.quick))
    return replace(device, machine=machine(effort, time.perf_counter() - begin, rates))


def sweep(effort: Effort, threads: int, coarse: bool = False) -> Sweep:
    """Measure this process with `threads` threads; coarse: with a smaller grid of products."""
    device, quick, parts = effort.device, effort.quick, effort.parts
    options = {"threads": threads, "device": device}
    share = 1.0 if "memory" in parts else 0.3  # every device file has the bandwidth
    memory_figures = memory.measure_memory(effort.seconds("memory") * share, quick=quick or share < 1.0, **options)
    products = (
        memory.measure_products(effort.seconds("gemm"), quick=quick or coarse, **options) if "gemm" in parts else {}
    )
    kernels, host = {}, {}
    if "steps" in parts and device == "cpu":
        ladder = step_operators.QUICK if quick else step_operators.LADDER
        recorded = step_operators.record(effort.seconds("steps"), threads=threads, ladder=ladder)
        kernels = recorded.kernels
        host = {
            "eager": {"op": Figure(step_operators.host_of(recorded.steps, min(memory_figures["add"].items())[1].s))}
        }
        products = join_curves(recorded.gemm, products)
    loops = (
        memory.measure_fused(effort.seconds("fused"), **options)
        if "fused" in parts and have_compiler() and not quick
        else {}
    )
    return Sweep(memory_figures, products, kernels, loops, host)


def _measure_rank(
    mesh: Any, effort: Effort, sweeps: bool, links: bool
) -> tuple[Sweep | None, case_timer.MessageTimes | None]:
    """On each of several processes: measure them computing simultaneously, and the links between them."""
    figures = (
        case_timer.sweep(mesh, sweep, effort._replace(parts=tuple(p for p in effort.parts if p != "links")), 1, True)
        if sweeps
        else None
    )
    return figures, case_timer.messages(mesh, effort.seconds("links")) if links else None


def _rank_counts(effort: Effort, count: int) -> list[int]:
    """The numbers of processes to start: 2 and 4 for links, and one for each core."""
    if effort.device == "cuda":
        gpus = gpu.count_gpus()
        return [n for n in (2, 4, 8) if n <= gpus] if "links" in effort.parts else []
    links = ([2] if effort.quick else [2, 4]) if "links" in effort.parts else []
    core_counts = [count] if 1 < count <= 8 and not effort.quick and set(effort.parts) - {"links"} else []
    return sorted({*links, *core_counts})


def rates_of(
    sweep_figures: Sweep,
    threads: int,
    processes: int,
    overhead: step_operators.Overhead | None,
    previous: MeasuredRates | None,
) -> MeasuredRates:
    """The Rates of a sweep; parts not measured come from `previous`."""
    add = sweep_figures.memory["add"]
    memory_curves = {key: sizes for key, sizes in sweep_figures.memory.items() if key != "add"}
    kernels = {
        key: curve_of(sizes)
        for key, sizes in join_curves(
            join_curves(sweep_figures.kernels, memory_curves, outside=True), sweep_figures.fused
        ).items()
    }
    figures = [f for table in sweep_figures[:4] for sizes in table.values() for f in sizes.values()]
    op_s, step_s = {}, {}
    if sweep_figures.host:
        op_s["eager"] = sweep_figures.host["eager"]["op"].s
    if overhead is not None and sweep_figures.host:
        # Overhead was measured on steps that compute nothing; scale it by the ratio of the eager time in real steps.
        longer = op_s["eager"] / overhead.op_s["eager"]
        op_s = {key: s * longer for key, s in overhead.op_s.items()}
        # an eager step's is part of its operators'
        step_s = {key: s * longer for key, s in overhead.step_s.items() if key != "eager"}
    old = previous or MeasuredRates(threads, processes, (), {}, {}, {}, {})
    return MeasuredRates(
        threads,
        processes,
        curve_of(add),
        {**old.gemm, **products_of(sweep_figures.gemm)},
        {**old.kernels, **kernels},
        {**old.op_s, **op_s},
        {**old.step_s, **step_s},
        round(spread_of(figures), 3),
    )


def assemble_device(
    effort: Effort,
    rate_tables: list[MeasuredRates],
    messages: dict[int, case_timer.MessageTimes],
    previous: Device | None,
) -> Device:
    """The Device of these rates and messages; parts not measured come from `previous`, or are left open."""
    flops: dict[str, float] = dict(previous.flops) if previous is not None else {}
    for rates in rate_tables:
        for key, rows in rates.gemm.items():
            best = max(2.0 * b * m * n * k / s for b, m, n, k, s in rows) * rates.processes
            flops[key.split("/")[0]] = max(flops.get(key.split("/")[0], 0.0), best)
    large = max(size / s * r.processes for r in rate_tables for size, s in r.bandwidth[-2:])
    links, collectives = (previous.links, previous.collectives) if previous is not None else ((UNKNOWN,), {})
    if messages:
        links, collectives = (link_of(messages, effort.device),), dict(collectives)
        for n, timings in messages.items():
            collectives |= {f"{kind}/{n}": tuple(sorted(sizes.items())) for kind, sizes in timings.curves.items()}
            collectives[f"late/{n}"] = ((1.0, max(timings.late_s, 1e-9)),)
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
        rates=tuple(rate_tables),
        collectives=collectives,
        host_memory_bytes=total_bytes() if on_gpu else None,
        host_memory_bytes_s=host_memory_rate() if on_gpu else None,
        host=host_rates() if on_gpu else {},
        nvme=previous.nvme if previous is not None else {},
        sources={
            "all": "measured by fzero bench, see machine",
            "margin": "assumption: 5% lost to fragments of the heap",
        },
    )


# Links that were not measured are assumed to cost nothing.
UNKNOWN = Level("not measured", "gloo", None, 1e9, 1e-4)


def link_of(messages: dict[int, case_timer.MessageTimes], device: str) -> Level:
    """The level between the processes of this machine, from the messages of two and of more ranks."""
    min_ranks, max_ranks = min(messages), max(messages)
    fitted = case_timer.fit(messages[min_ranks].curves["ppermute"])
    size, seconds = max(messages[max_ranks].curves["all_to_all"].items())
    call_s = messages[min_ranks].call_s
    name, kind = ("GPUs of this machine", "nccl") if device == "cuda" else ("this machine", "gloo")
    latency, total = max(fitted.latency_s - call_s, 0.0), size * (max_ranks - 1) / seconds
    return Level(
        name, kind, None, fitted.bytes_s, latency, max(total, fitted.bytes_s), call_s, messages[min_ranks].hidden
    )


def disk_rates(folder: Path, quick: bool = False) -> dict[str, float]:
    """The bytes/s of the disk of `folder`, with the settings that a run would use there."""
    settings = load_settings(folder)
    size = max(DISK_BYTES // (8 if quick else 1), 4 * settings.block_bytes)
    with open_files(folder, size) as files:
        buffers = BufferPool(4 * max(settings.readers, settings.writers) * DEPTH * settings.block_bytes)
        seconds = 0.2 if quick else 1.0
        rates = {
            kind: engine(files, buffers, settings, DEPTH, writes, seconds).gbs * 1e9 for kind, writes in KINDS.items()
        }
    return {"read": rates["read"], "write": rates["write"], "both": rates["mixed"]}


def host_rates(size: int = 256 << 20) -> dict[str, float]:
    """The bytes/s between a GPU and pinned memory of its host, in each direction."""
    host_buffer, device_buffer = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    rates = {}
    for name, target, source in (("read", device_buffer, host_buffer), ("write", host_buffer, device_buffer)):
        samples = []
        for _ in range(6):
            gpu.synchronize(device_buffer.device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            gpu.synchronize(device_buffer.device)
            samples.append(time.perf_counter() - begin)
        rates[name] = size / min(samples[1:])
    return rates


def host_memory_rate(size: int = 256 << 20) -> float:
    """The bytes/s at which all threads of a GPU's process add numbers in its host's memory."""
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


def machine(effort: Effort, took: float, rates: list[MeasuredRates]) -> dict[str, str]:
    """The facts of the measurement: processor, time, versions, and how steady it was."""
    spreads = ", ".join(
        f"{r.spread:.2f} ({r.threads} thread{'s' * (r.threads > 1)}, {r.processes} at once)" for r in rates
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
