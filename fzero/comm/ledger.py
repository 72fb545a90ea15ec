"""The ledger: what was communicated, in the counting of the papers, as integers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Row(NamedTuple):
    """Collectives of one kind: how often they ran, and what one rank sent in all of them."""

    phase: str
    collective: str
    axis: str
    leaf: str
    dtype: str
    calls: int
    elements: int
    bytes: int


class Watcher(Protocol):
    """Who is told what a program does while it runs, in its order: a clock, a record of memory, a plan."""

    def enter(self, phase: str) -> None:
        """A phase begins; phases nest."""

    def leave(self, phase: str) -> None:
        """The innermost phase ends."""

    def at(self, part: str, layer: int | None) -> None:
        """The program comes to a part of the model: "embed", "blocks" with the number of a layer, or "head"."""

    def start(self, number: int, collective: str, axis: str, leaf: str, sent_bytes: int) -> None:
        """A collective is started; `number` tells it from the others of this process."""

    def wait(self, number: int) -> None:
        """The program needs its result and waits for it."""

    def done(self, number: int) -> None:
        """The result is there."""


class Ledger:
    """What was communicated, summed by (phase, collective, axis, leaf, dtype); `print(ledger)` shows the table.

    A collective is entered when it runs, in a compiled graph too, and not when it is traced. Elements and bytes are
    those that one rank sends (see `sent_elements`), whatever the messages that carry them.

    >>> ledger = Ledger()
    >>> with ledger.phase("forward"):
    ...     ledger.add("all_gather", "dp", "w", torch.float32, 96)
    >>> ledger.total(phase="forward").bytes
    384
    """

    def __init__(self) -> None:
        self.phase_name = ""
        self.watches: list[Watcher] = []
        self.entered: tuple[tuple[str, str, str, str, torch.dtype], int] | None = (
            None  # what was entered last, and its elements
        )
        self._sums: dict[tuple[str, str, str, str, torch.dtype], list[int]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which collectives are entered under the phase `name`; the innermost context names it."""
        before = self.phase_name
        for watch in self.watches:
            watch.enter(name)
        self.phase_name = name
        try:
            yield
        finally:
            self.phase_name = before
            for watch in self.watches:
                watch.leave(name)

    @contextlib.contextmanager
    def watched(self, watch: Watcher) -> Iterator[None]:
        """A context in which `watch` is told what happens."""
        self.watches = [*self.watches, watch]
        try:
            yield
        finally:
            self.watches = [other for other in self.watches if other is not watch]

    def at(self, part: str, layer: int | None) -> None:
        """Tell who watches that the program comes to a part of the model."""
        for watch in self.watches:
            watch.at(part, layer)

    def holds(self, component: str, tensors: Sequence[Tensor]) -> None:
        """Tell who watches memory (a Watch that has `holds` too) what some tensors are: "grads", "gathered"."""
        for watch in self.watches:
            if hasattr(watch, "holds"):
                watch.holds(component, tensors)

    def add(self, collective: str, axis: str, leaf: str, dtype: torch.dtype, elements: int) -> None:
        """Enter one collective in which one rank sends `elements` elements."""
        self.entered = (self.phase_name, collective, axis, leaf, dtype), elements
        sums = self._sums.setdefault(self.entered[0], [0, 0, 0])
        for i, more in enumerate((1, elements, elements * dtype.itemsize)):
            sums[i] += more

    def rows(self) -> list[Row]:
        """The rows, in the order in which they were first entered."""
        return [Row(*key[:4], str(key[4]).removeprefix("torch."), *sums) for key, sums in self._sums.items()]

    def total(self, phase: str | None = None, collective: str | None = None, axis: str | None = None) -> Row:
        """The sum of the rows of this phase, collective and axis (None: any), as a row with `*` for what it does not
        tell apart.
        """
        wanted = (phase, collective, axis)
        rows = [row for row in self.rows() if all(w is None or w == value for w, value in zip(wanted, row[:3]))]
        sums = (sum(row[i] for row in rows) for i in (5, 6, 7))
        return Row(*("*" if w is None else w for w in wanted), "*", "*", *sums)

    def clear(self) -> None:
        """Forget all rows."""
        self._sums.clear()

    def __str__(self) -> str:
        table = [Row._fields, *((*row[:5], *(f"{n:,}" for n in row[5:])) for row in self.rows())]
        widths = [max(len(row[i]) for row in table) for i in range(len(Row._fields))]

        def line(row: tuple[str, ...]) -> str:
            return "  ".join(cell.ljust(w) if i < 5 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))

        return "\n".join(line(row) for row in table)


def sent_elements(collective: str, elements: int, ranks: int) -> int:
    """The elements that one of `ranks` ranks sends, rounded up.

    elements: of the whole tensor: the result of all_gather, the input of the others. all_gather, psum_scatter and
    all_to_all send (N-1)/N of it, psum 2 (N-1)/N, ppermute all of it.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7.1; Thakur et al. 2005, "Optimization of collective
    communication operations in MPICH", section 4.
    """
    if collective == "ppermute":
        return elements
    return -(-(2 if collective == "psum" else 1) * (ranks - 1) * elements // ranks)
