"""Time calls that take turns, so that other load on the machine affects all of them equally.

One thread is timed by its own CPU time, which stops while another program has the core; several threads by wall-clock
time. On a GPU the device is synchronised before and after a call. Figures are reduced to the tables of a device file.

Measure several processes running simultaneously: the links between them, and their computations.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fzero.comm.communicator import Communicator
from fzero.core import gpu
from fzero.core.process_pool import Pool
from fzero.planner.devices import Curve, Products
from fzero.sharding.mesh import Mesh, make_mesh

HEAP_BYTES = 512 << 20  # as a training step has
BLOCK_BYTES = 16 << 20  # below 32 MB, which glibc always maps
GROUP = 16  # cases that take turns
LEAST_S = 2e-4  # of one sample: shorter calls are repeated


class Case(NamedTuple):
    """A call to time: `make()` prepares it and returns the call."""

    key: tuple[Any, ...]
    make: Callable[[], Callable[[], Any]]


def on_operands(f: Callable[..., Any], *makers: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """The `make` of a Case that calls f with what each of the makers gives."""

    def make() -> Callable[[], Any]:
        operands = [maker() for maker in makers]
        return lambda: f(*operands)

    return make


class Figure(NamedTuple):
    """The seconds of a call: the first quartile of its samples, median / minimum, and the minimum."""

    s: float
    spread: float = 1.0
    min_s: float = 0.0


def clock(threads: int, device: str = "cpu") -> Callable[[], float]:
    """The clock for calls with this number of threads."""
    if device == "cuda":

        def synchronized() -> float:
            gpu.synchronize(torch.device(device))
            return time.perf_counter()

        return synchronized
    return time.thread_time if threads == 1 else time.perf_counter


@contextlib.contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """A context in which PyTorch computes with this number of threads."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def figure(samples: Sequence[float]) -> Figure:
    """The Figure of samples, near their first quartile, as disturbances only make a call longer."""
    ordered = sorted(samples)
    return Figure(ordered[(len(ordered) - 1) // 4], statistics.median(ordered) / max(ordered[0], 1e-12), ordered[0])


def time_cases(
    cases: Iterable[Case], seconds: float, *, threads: int = 1, device: str = "cpu", rounds: int = 5
) -> dict[tuple[Any, ...], Figure]:
    """The Figure of each case by its key, in about `seconds` for all, in turns within groups of 16."""
    cases, figures = list(cases), {}
    end, timer = time.perf_counter() + seconds, clock(threads, device)
    with on_threads(threads):
        for number, group in enumerate(_groups(cases)):
            calls = []
            for case in group:
                call = case.make()
                call()  # the first call allocates buffers and compiles kernels
                calls.append((case, call, _times(call, timer)))
            samples: dict[tuple[Any, ...], list[float]] = {case.key: [] for case in group}
            due = time.perf_counter() + max(0.0, end - time.perf_counter()) / max(1, len(cases) / GROUP - number)
            for turn in range(rounds):
                for case, call, times in calls:
                    if turn and time.perf_counter() > due:
                        break
                    begin = timer()
                    for _ in range(times):
                        call()
                    samples[case.key].append((timer() - begin) / times)
            figures.update({key: figure(values) for key, values in samples.items()})
    return figures


def _groups(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[i : i + GROUP] for i in range(0, len(cases), GROUP)]


def _times(call: Callable[[], Any], timer: Callable[[], float]) -> int:
    begin = timer()
    call()
    took = max(timer() - begin, 1e-7)
    # At least twice: with operands in memory first, then in a cache, as a step has both.
    return max(2, min(1000, round(LEAST_S / took)))


def warm_heap() -> None:
    """Grow the C library's heap to its size in a training step, so that blocks below 32 MB are reused."""
    # glibc maps large blocks one by one until one is freed; from then on blocks no larger come from the heap
    # (mallopt(3), "dynamic mmap threshold", 32 MB at most), whose free end is returned to the system. The last block is
    # kept, so that the others are not at the end.
    if _KEPT:
        return
    torch.empty(BLOCK_BYTES * 2 - (1 << 16), dtype=torch.uint8)
    blocks = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(HEAP_BYTES // BLOCK_BYTES)]
    _KEPT.append(torch.zeros(1 << 20, dtype=torch.uint8))
    del blocks


_KEPT: list[torch.Tensor] = []


def spread_of(figures: Iterable[Figure]) -> float:
    """The median of the spreads; 1 if there are none."""
    spreads = [figure.spread for figure in figures]
    return statistics.median(spreads) if spreads else 1.0


Figures = dict[str, dict[Any, Figure]]
STEP = 1.6  # sizes within this factor are merged into one point
DIGITS = 5  # significant digits of a figure


def round_rates(seconds: float) -> float:
    """Round seconds to DIGITS significant digits, as device files have them."""
    return float(f"{seconds:.{DIGITS}g}")


def curve_of(sizes: dict[float, Figure]) -> Curve:
    """The points (size, seconds) by size; sizes within a factor of STEP are merged at geometric means."""
    points: list[list[tuple[float, float]]] = []
    for size, figure in sorted(sizes.items()):
        if points and size <= points[-1][0][0] * STEP:
            points[-1].append((size, figure.s))
        else:
            points.append([(size, figure.s)])
    means = [[statistics.geometric_mean(max(point[i], 1e-12) for point in group) for i in (0, 1)] for group in points]
    return tuple((round_rates(size), round_rates(seconds)) for size, seconds in means)


def products_of(figures: dict[str, dict[tuple[int, ...], Figure]]) -> dict[str, Products]:
    """The rows (batch, m, n, k, seconds) by key; a layout has its own only if measured on most of the grid."""
    full_keys = {
        key
        for key in figures
        if len(figures[key]) > 0.5 * len(figures.get(key.removesuffix("/nt").removesuffix("/tn"), {}))
    }
    out: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for key, shapes in figures.items():
        plain = key.removesuffix("/nt").removesuffix("/tn")
        for shape, figure in shapes.items():
            out.setdefault(key if key in full_keys else plain, {}).setdefault(shape, []).append(figure.s)
    rows = {
        key: [(batch, m, n, k, round_rates(statistics.fmean(s))) for (batch, m, n, k), s in shapes.items()]
        for key, shapes in out.items()
    }
    return {key: tuple(sorted(table)) for key, table in rows.items()}


def join_curves(first: Figures, second: Figures, outside: bool = False) -> Figures:
    """Join figures; of `second` only sizes at least a factor of 2 outside those of `first`."""
    out = {key: dict(sizes) for key, sizes in first.items()}
    for key, sizes in second.items():
        curve = out.setdefault(key, {})
        low, high = (min(curve) / 2, max(curve) * 2) if outside and curve else (math.inf, -math.inf)
        for size, figure in sizes.items():
            if not (outside and low <= size <= high):
                curve.setdefault(size, figure)
    return out


R = TypeVar("R")
COLLECTIVES = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
MESSAGES = (1 << 10, 16 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes of the whole tensor
BETWEEN = 8  # products and sums computed between two collectives
IN_A_ROW = 4  # collectives in one sample
TIMEOUT_S = 600.0  # time for a process to answer; long, for busy machines


class MessageTimes(NamedTuple):
    """Seconds of messages between some ranks: medians over repetitions, of the slowest rank."""

    curves: dict[str, dict[float, float]]  # by collective, bytes of the whole tensor -> seconds
    call_s: float  # CPU time of the calling thread in a nearly empty collective
    hidden: float  # the fraction of a large all_gather hidden by computation on all ranks
    # extra time of a collective between computations, as ranks reach it at different times
    late_s: float = 0.0


def on_ranks(n: int, f: Callable[..., Any], *args: Any, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> list[Any]:
    """The results by rank of `f(mesh, *args)` in n new processes with one thread each; raises ValueError."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Pool(n) as pool:
        # Each waits for all others to begin, so that no process gets two of them.
        futures = [pool.submit(_work, rank, n, store.port, device, f, args) for rank in range(n)]
        try:
            for future in as_completed(futures, timeout_s):
                if (error := future.exception()) is not None:
                    text = f"{type(error).__name__}: {error}".splitlines()[0]
                    raise ValueError(f"process {futures.index(future)} of {n} of the measurement failed: {text}")
        except TimeoutError:
            waiting = [rank for rank, future in enumerate(futures) if not future.done()]
            raise ValueError(
                f"process {waiting[0]} of {n} of the measurement did not answer within {timeout_s:g} s"
            ) from None
        return [future.result() for future in futures]


def _work(rank: int, n: int, port: int, device: str, f: Callable[..., Any], args: Sequence[Any]) -> Any:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gpu.select_device(torch.device(device, rank) if device == "cuda" else gpu.HOST)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=n, timeout=timeout
    )
    result = f(make_mesh({"dp": n}, device=device), *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


# ---- messages --------------------------------------------------------------------------------------------------------


def messages(mesh: Mesh, seconds: float, sizes: Sequence[int] = MESSAGES) -> MessageTimes:
    """Measure collectives between the ranks of `mesh` for about `seconds`; called on all of them."""
    communicator = mesh.dp.communicator
    assert communicator is not None  # an axis of several ranks has one
    device = "cuda" if communicator.transport == "nccl" else "cpu"
    calls = {(kind, size): _call(communicator, kind, size, device) for kind in COLLECTIVES for size in sizes}
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    # All ranks must agree on the number of rounds.
    begin = time.perf_counter()
    _round(calls, samples, device)
    took = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    for _ in range(max(3, min(50, int(seconds / max(float(took), 1e-3))))):
        _round(calls, samples, device)
    curves: dict[str, dict[float, float]] = {}
    for (kind, size), times in samples.items():
        curves.setdefault(kind, {})[float(size)] = statistics.median(times)
    call = calls["all_gather", sizes[0]]
    begin = time.thread_time()
    for _ in range(50):
        call()
    call_s = (time.thread_time() - begin) / 50
    small = [(call, curves[kind][float(size)]) for (kind, size), call in calls.items() if size == sizes[0]]
    return MessageTimes(curves, call_s, _hidden(communicator, sizes[-1], device), _extra_delay(small, device))


def _round(
    calls: dict[tuple[str, int], Callable[[], Any]], samples: dict[tuple[str, int], list[float]], device: str
) -> None:
    for key, call in calls.items():
        dist.barrier()
        begin = time.perf_counter()
        call()
        gpu.synchronize(torch.device(device))
        samples[key].append(time.perf_counter() - begin)


def _extra_delay(calls: Sequence[tuple[Callable[[], Any], float]], device: str) -> float:
    """The extra seconds of small collectives between computations, compared with the seconds in `calls`."""
    a, x = torch.ones(256, 256, device=device), torch.ones(512, 256, device=device)

    def took(call: Callable[[], Any] | None) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            for _ in range(BETWEEN):
                (x @ a).add_(x)
            if call is not None:
                call()
        gpu.synchronize(torch.device(device))
        return (time.perf_counter() - begin) / IN_A_ROW

    longer = []
    for _ in range(7):
        alone = statistics.median(took(None) for _ in range(3))
        longer += [took(call) - alone - by_itself for call, by_itself in calls]
    return max(0.0, statistics.median(longer))


def _call(communicator: Communicator, kind: str, size: int, device: str) -> Callable[[], Any]:
    n, number = communicator.size, max(communicator.size, size // 4 // communicator.size * communicator.size)
    x = torch.ones(number // (n if kind == "all_gather" else 1), device=device)
    ring = [(i, (i + 1) % n) for i in range(n)]
    return {
        "psum": lambda: communicator.start_psum(x, guarded=False).wait(),
        "all_gather": lambda: communicator.start_all_gather(x).wait(),
        "psum_scatter": lambda: communicator.start_psum_scatter(x).wait(),
        "all_to_all": lambda: communicator.start_all_to_all(x).wait(),
        "ppermute": lambda: communicator.start_ppermute(x, ring).wait(),
    }[kind]


def _hidden(communicator: Communicator, size: int, device: str) -> float:
    """The fraction of an all_gather's time that is hidden while all ranks compute for about twice as long."""
    x, side = torch.ones(max(1, size // 4 // communicator.size), device=device), 256
    a = torch.ones(side, side, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            _ = a @ a

    def took(call: Callable[[], Any]) -> float:
        samples = []
        for _ in range(7):
            dist.barrier()
            begin = time.perf_counter()
            call()
            gpu.synchronize(torch.device(device))
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)

    def run_both() -> None:
        pending = communicator.start_all_gather(x)
        compute(times)
        pending.wait()

    alone = took(lambda: communicator.start_all_gather(x).wait())
    # Ranks may disagree on this number: an early rank waits.
    times = max(1, round(2 * alone / max(took(lambda: compute(10)) / 10, 1e-7)))
    computing, joint_s = took(lambda: compute(times)), took(run_both)
    return min(1.0, max(0.0, (alone + computing - joint_s) / alone))


def slowest(rank_times: Sequence[MessageTimes]) -> MessageTimes:
    """Merge the Messages of all ranks: curves of the slowest rank, medians of the rest."""
    curves = {
        kind: {size: max(times.curves[kind][size] for times in rank_times) for size in sizes}
        for kind, sizes in rank_times[0].curves.items()
    }
    call_s, hidden, late_s = (statistics.median(values) for values in zip(*(m[1:] for m in rank_times)))
    return MessageTimes(curves, call_s, hidden, late_s)


class Fit(NamedTuple):
    """Seconds of a message by its bytes: latency_s + bytes / bytes_s."""

    latency_s: float
    bytes_s: float


def fit(curve: dict[float, float], fraction: float = 1.0) -> Fit:
    """A curve in which a message has `fraction` of the bytes: t = alpha + n / beta (Hockney 1994)."""
    small, large = min(curve), max(curve)
    latency = curve[small]
    return Fit(latency, (large - small) * fraction / max(curve[large] - latency, 1e-12))


# ---- rates of processes that compute simultaneously --------------------------------------------------------------


def sweep(mesh: Mesh, measure: Callable[..., R], *args: Any) -> R:
    """Run `measure(*args)` on all ranks simultaneously; called on all of them."""
    warm_heap()
    dist.barrier()
    return measure(*args)


def merge_ranks(tables: Sequence[dict[str, dict[Any, Figure]]]) -> dict[str, dict[Any, Figure]]:
    """Merge the figures of several processes: means over all that have a figure."""
    first, out = tables[0], {}
    for key, sizes in first.items():
        for size in sizes:
            samples = [table[key][size] for table in tables if size in table.get(key, {})]
            s = statistics.fmean(f.s for f in samples)
            out.setdefault(key, {})[size] = Figure(s, max(f.spread for f in samples), min(f.min_s for f in samples))
    return out
