"""Time calls that take turns, so that other load on the machine affects all of them equally.

One thread is timed by its own CPU time, which stops while another program has the core; several threads by wall-clock
time. On a GPU the device is synchronised before and after a call. Figures are reduced to the tables of a device file.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core import gpu
from fzero.planner.devices import Curve, Products

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
