"""The ledger of what went over the axes: how many elements and bytes each collective sent, counted as in the papers, in
integers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.core.text_parsing import text_table


# An act begins when the message that it takes has arrived, and ends when the next act is looked at.
class ActTimes:
    """The moments of the acts of one row of a schedule; waiting for a message is in no act.

    >>> times = ActTimes(iter([1.0, 2.0, 3.0, 4.0]).__next__)
    >>> times.next(), times.mark_arrival(), times.next()  # an act that waits for a message, and its end
    (None, None, None)
    >>> times.begins, times.ends
    ([2.0], [3.0])
    """

    def __init__(self, clock: Callable[[], Any]) -> None:
        self.clock = clock
        self.moments: list[Any] = []  # at each act, and behind the last one
        self.arrivals: dict[int, Any] = {}  # by act, when its message was there

    def next(self) -> None:
        """The act before has ended; another one begins, if there is one."""
        self.moments.append(self.clock())

    def mark_arrival(self) -> None:
        """The message that the act under way needs is there."""
        self.arrivals[len(self.moments) - 1] = self.clock()

    @property
    def begins(self) -> list[Any]:
        """When each act began."""
        return [self.arrivals.get(i, moment) for i, moment in enumerate(self.moments[:-1])]

    @property
    def ends(self) -> list[Any]:
        """When each act ended."""
        return self.moments[1:]


class LedgerRow(NamedTuple):
    """How often collectives of one kind ran, and how much one rank sent in all of them."""

    phase: str
    collective: str
    axis: str
    leaf: str
    dtype: str
    calls: int
    elements: int
    bytes: int


# A watcher with a false attribute `phases` keeps no moments, so that a step may be replayed as a whole
# (train/capture.py).
class Watcher(Protocol):
    """The interface of an observer that is notified while a program runs: a timer, a memory trace, a plan."""

    def enter(self, phase: str) -> None:
        """A phase begins; phases nest."""

    def leave(self, phase: str) -> None:
        """The innermost phase ends."""

    def reach(self, segment: str, layer: int | None) -> None:
        """The program reaches a part of the model: "embed", "blocks" with the number of a layer, or "head"."""

    def start(self, number: int, collective: str, axis: str, leaf: str, sent_bytes: int) -> None:
        """A collective is started; `number`, from 1, identifies it within this process."""

    def wait(self, number: int) -> None:
        """The program waits for the result of a collective."""

    def done(self, number: int) -> None:
        """The result of a collective has arrived."""


class Ledger:
    """The communication of this process, summed by (phase, collective, axis, leaf, dtype); printed, a table.

    >>> ledger = Ledger()
    >>> with ledger.phase("forward"):
    ...     ledger.add("all_gather", "dp", "w", torch.float32, 96)
    >>> ledger.total(phase="forward").bytes
    384
    """

    def __init__(self) -> None:
        self.phase_name = ""
        self.watches: list[Watcher] = []
        self.acts: ActTimes | None = None  # of the row of a pipeline, in a step of which they are wanted
        self.entered: tuple[tuple[str, str, str, str, torch.dtype], int] | None = (
            None  # the last entry: its key and its elements
        )
        self._sums: dict[tuple[str, str, str, str, torch.dtype], list[int]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which collectives are recorded under the phase `name`; the innermost context counts."""
        previous = self.phase_name
        for watch in self.watches:
            watch.enter(name)
        self.phase_name = name
        try:
            yield
        finally:
            self.phase_name = previous
            for watch in self.watches:
                watch.leave(name)

    @contextlib.contextmanager
    def watched(self, watch: Watcher) -> Iterator[None]:
        """A context in which `watch` is notified."""
        self.watches = [*self.watches, watch]
        try:
            yield
        finally:
            self.watches = [watcher for watcher in self.watches if watcher is not watch]

    def reach(self, segment: str, layer: int | None) -> None:
        """Notify the watchers that the program reaches a part of the model."""
        for watch in self.watches:
            watch.reach(segment, layer)

    def holds(self, component: str, tensors: Sequence[Tensor]) -> None:
        """Tell the watchers that have a method `holds` (memory traces) what these tensors are: "grads", "gathered"."""
        for watch in self.watches:
            if (holds := getattr(watch, "holds", None)) is not None:
                holds(component, tensors)

    def add(self, collective: str, axis: str, leaf: str, dtype: torch.dtype, elements: int) -> None:
        """Record one collective in which one rank sends `elements` elements."""
        self.entered = (self.phase_name, collective, axis, leaf, dtype), elements
        sums = self._sums.setdefault(self.entered[0], [0, 0, 0])
        for i, increment in enumerate((1, elements, elements * dtype.itemsize)):
            sums[i] += increment

    def rows(self) -> list[LedgerRow]:
        """The rows, in the order in which they first appeared."""
        return [LedgerRow(*key[:4], str(key[4]).removeprefix("torch."), *sums) for key, sums in self._sums.items()]

    def entries(self) -> dict[Any, tuple[int, int, int]]:
        """The sums so far by their keys, for `repeat`."""
        return {key: (sums[0], sums[1], sums[2]) for key, sums in self._sums.items()}

    def repeat(self, start: Mapping[Any, Sequence[int]], end: Mapping[Any, Sequence[int]]) -> None:
        """Record again what was recorded between two calls of `entries`."""
        for key in {**start, **end}:
            totals, none = self._sums.setdefault(key, [0, 0, 0]), (0, 0, 0)
            for i, (start_sums, sums) in enumerate(zip(start.get(key, none), end.get(key, none))):
                totals[i] += sums - start_sums

    def total(self, phase: str | None = None, collective: str | None = None, axis: str | None = None) -> LedgerRow:
        """The sum of the rows of this phase, collective and axis (None: all), with `*` in fields summed over."""
        filters = (phase, collective, axis)
        rows = [row for row in self.rows() if all(w is None or w == value for w, value in zip(filters, row[:3]))]
        names = ["*" if w is None else w for w in filters]
        return LedgerRow(
            *(names[0], names[1], names[2], "*", "*"),
            calls=sum(row.calls for row in rows),
            elements=sum(row.elements for row in rows),
            bytes=sum(row.bytes for row in rows),
        )

    def clear(self) -> None:
        """Forget all rows."""
        self._sums.clear()

    def __str__(self) -> str:
        rows = [(*row[:5], *(f"{n:,}" for n in row[5:])) for row in self.rows()]
        return "\n".join(text_table(LedgerRow._fields, rows, text=range(5)))


def sent_elements(collective: str, elements: int, ranks: int) -> int:
    """The number of elements that each of N = `ranks` ranks sends, rounded up.

    elements: of the whole tensor, which is the result of all_gather and the input of the others. all_gather,
    psum_scatter and all_to_all send (N-1)/N of it, psum 2 (N-1)/N, ppermute all of it.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7.1; Thakur et al. 2005, "Optimization of collective
    communication operations in MPICH", section 4.
    """
    if collective == "ppermute":
        return elements
    return -(-(2 if collective == "psum" else 1) * (ranks - 1) * elements // ranks)
