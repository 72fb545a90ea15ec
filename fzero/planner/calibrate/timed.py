"""Timing in company: figures of calls that take turns, so that what else the machine does falls on all alike.

One thread is timed by its own CPU time, which stands still while another program has the core. Several threads are timed by the clock on
the wall. On a GPU both ends of a call wait for the device.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

HEAP_BYTES = 512 << 20
BLOCK_BYTES = 16 << 20
GROUP = 16  # cases that take turns
LEAST_S = 2e-4  # of a figure: shorter calls are repeated


class Case(NamedTuple):
    """One thing to time: `make()` prepares it and returns the call."""

    key: tuple[Any, ...]
    make: Callable[[], Callable[[], Any]]


class Figure(NamedTuple):
    """The seconds of a call: the first quartile of its samples, the median over the minimum, and the minimum."""

    s: float
    spread: float = 1.0
    least: float = 0.0


def clock(threads: int, device: str = "cpu") -> Callable[[], float]:
    """The clock for calls on so many threads."""
    if device == "cuda":

        def synchronized() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return synchronized
    return time.thread_time if threads == 1 else time.perf_counter


@contextlib.contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """A context in which PyTorch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def figure(samples: Sequence[float]) -> Figure:
    """The Figure of samples: what disturbs a call only makes it longer, so the first quartile is nearer to what it takes alone."""
    ordered = sorted(samples)
    return Figure(ordered[(len(ordered) - 1) // 4], statistics.median(ordered) / max(ordered[0], 1e-12), ordered[0])


def time_cases(
    cases: Iterable[Case], seconds: float, *, threads: int = 1, device: str = "cpu", rounds: int = 5
) -> dict[tuple[Any, ...], Figure]:
    """The Figure of each case by its key, in about `seconds` in all.

    Each group of 16 cases is prepared, and its calls run in turn, round by round. A short call is repeated until the clock can tell. When
    the group's time is up the rest of its rounds are left out, but for the first.
    """
    cases, found = list(cases), {}
    end, now = time.perf_counter() + seconds, clock(threads, device)
    with on_threads(threads):
        for number, group in enumerate(_groups(cases)):
            calls = []
            for case in group:
                call = case.make()
                call()  # which prepares kernels and buffers
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
    # Twice at least: the first finds its operands in memory, the second in a cache, and a step has some of both.
    return max(2, min(1000, round(LEAST_S / took)))


def warm_heap() -> None:
    """Have the C library's heap grown as it is in a training step: then memory below 32 MB is used again, and not mapped anew each time.

    glibc maps large blocks one by one, until one was freed: from then on what is no larger comes from the heap (mallopt(3), "dynamic mmap
    threshold", 32 MB at most), whose free end it gives back. The last block stays, so that the others are not at the end.
    """
    if _KEPT:
        return
    torch.empty(BLOCK_BYTES * 2 - (1 << 16), dtype=torch.uint8)
    blocks = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(HEAP_BYTES // BLOCK_BYTES)]
    _KEPT.append(torch.zeros(1 << 20, dtype=torch.uint8))
    del blocks


_KEPT: list[torch.Tensor] = []


def spread_of(figures: Iterable[Figure]) -> float:
    """The middle one of the spreads, 1 where there are none."""
    spreads = [each.spread for each in figures]
    return statistics.median(spreads) if spreads else 1.0
