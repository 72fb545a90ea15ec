"""Time calls that take turns, so that other load on the machine affects all of them equally.

One thread is timed by its own CPU time, which stops while another program has the core. Several threads are timed by
wall-clock time. On a GPU the device is synchronised before and after a call.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core import gpu

HEAP_BYTES = 512 << 20
BLOCK_BYTES = 16 << 20
GROUP = 16  # cases that take turns
LEAST_S = 2e-4  # of one sample: shorter calls are repeated


class Case(NamedTuple):
    """A call to time: `make()` prepares it and returns the call."""

    key: tuple[Any, ...]
    make: Callable[[], Callable[[], Any]]


class Figure(NamedTuple):
    """The seconds of a call: the first quartile of its samples, median / minimum, and the minimum."""

    s: float
    spread: float = 1.0
    least: float = 0.0


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
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def figure(samples: Sequence[float]) -> Figure:
    """The Figure of samples. Disturbances only make a call longer, so its undisturbed time is near the first
    quartile."""
    ordered = sorted(samples)
    return Figure(ordered[(len(ordered) - 1) // 4], statistics.median(ordered) / max(ordered[0], 1e-12), ordered[0])


def time_cases(
    cases: Iterable[Case], seconds: float, *, threads: int = 1, device: str = "cpu", rounds: int = 5
) -> dict[tuple[Any, ...], Figure]:
    """The Figure of each case by its key, in about `seconds` for all.

    Cases are timed in groups of 16: prepared, then called in turn, round by round. A short call is repeated until the
    clock can resolve it. When the group's time is up, its remaining rounds are skipped, except the first.
    """
    cases, found = list(cases), {}
    end, now = time.perf_counter() + seconds, clock(threads, device)
    with on_threads(threads):
        for number, group in enumerate(_groups(cases)):
            calls = []
            for case in group:
                call = case.make()
                call()  # the first call allocates buffers and compiles kernels
                calls.append((case, call, _times(call, now)))
            samples: dict[tuple[Any, ...], list[float]] = {case.key: [] for case in group}
            due = time.perf_counter() + max(0.0, end - time.perf_counter()) / max(1, len(cases) / GROUP - number)
            for turn in range(rounds):
                for case, call, times in calls:
                    if turn and time.perf_counter() > due:
                        break
                    begin = now()
                    for _ in range(times):
                        call()
                    samples[case.key].append((now() - begin) / times)
            found.update({key: figure(each) for key, each in samples.items()})
    return found


def _groups(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[i : i + GROUP] for i in range(0, len(cases), GROUP)]


def _times(call: Callable[[], Any], now: Callable[[], float]) -> int:
    begin = now()
    call()
    took = max(now() - begin, 1e-7)
    # At least twice: with operands in memory first, then in a cache, as a step has both.
    return max(2, min(1000, round(LEAST_S / took)))


def warm_heap() -> None:
    """Grow the C library's heap to its size in a training step, so that blocks below 32 MB are reused and not mapped
    each time.

    glibc maps large blocks one by one until one is freed; from then on blocks no larger come from the heap (mallopt(3),
    "dynamic mmap threshold", 32 MB at most), whose free end is returned to the system. The last block is kept, so that
    the others are not at the end."""
    if _KEPT:
        return
    torch.empty(BLOCK_BYTES * 2 - (1 << 16), dtype=torch.uint8)
    blocks = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(HEAP_BYTES // BLOCK_BYTES)]
    _KEPT.append(torch.zeros(1 << 20, dtype=torch.uint8))
    del blocks


_KEPT: list[torch.Tensor] = []


def spread_of(figures: Iterable[Figure]) -> float:
    """The median of the spreads; 1 if there are none."""
    spreads = [each.spread for each in figures]
    return statistics.median(spreads) if spreads else 1.0
