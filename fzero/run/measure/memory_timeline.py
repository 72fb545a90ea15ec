"""The stays of a step at the parts of a model, the storages born and dead in each, and so the bytes alive by component.

A storage belongs to one component, by where it was born and where it died:

| component | content |
|---|---|
| params, master, optimizer, ema, batch | inputs of the step, by the group of the state |
| grads | gradients on their way to their sums, and the sums; what a codec's rounding took from them |
| gathered | parameters whole for use |
| activations | made in one part of the model and freed in another: inputs of the backward pass, and its gradients |
| workspace | made and freed in one part of the model, or in the update |
| buffers | the whole buffer pool of offloaded leaves; the counters, keys and statistics of the state |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPONENTS = (
    "params",
    "master",
    "optimizer",
    "ema",
    "batch",
    "grads",
    "gathered",
    "activations",
    "workspace",
    "buffers",
)


class Moment(NamedTuple):
    """The live bytes at one time of a step."""

    at: int  # index into the step's events: the operator or transfer under way
    phase: str
    layer: int | None
    op: str
    bytes: int
    parts: dict[str, int]  # bytes by component, in the order of COMPONENTS; their sum is `bytes`
    change: int = 0  # number of births and deaths before it


class Visit(NamedTuple):
    """A stay of the program at one place."""

    number: int
    span: int  # number of the phase it is in, counted from the start of the step
    phase: str  # "" between phases
    segment: str
    layer: int | None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.phase, self.segment, "" if self.layer is None else str(self.layer))))


@dataclass(slots=True)
class Life:
    """The lifetime of a storage."""

    bytes: int
    name: str  # of an input of the step, or the operator that made it
    born: Visit
    group: str = ""  # of an input of the step, or as given by the program (see Ledger.holds)
    reducing: bool = False  # born inside the start of a sum over ranks
    died: Visit | None = None
    dropped: bool = False  # died before the end of the record

    def component(self) -> str:
        """The component that it belongs to."""
        if self.group:
            return self.group
        ended = self.died or self.born
        if self.born.phase == "backward" and (not self.dropped or ended.span != self.born.span):
            return "grads"
        if self.reducing:
            return "grads"
        crossed = self.dropped and ended.number != self.born.number
        return "activations" if crossed and self.born.phase in ("forward", "backward") else "workspace"


class Change(NamedTuple):
    """A birth (+1) or a death (-1)."""

    life: Life
    sign: int
    event_index: int  # index, in the stay, of the event that was under way; -1 before the first


class Stay(NamedTuple):
    """The events of one visit, in order."""

    visit: Visit
    events: list[Any]
    changes: list[Change]
    sent: list[tuple[tuple, int]]  # (all but the sums of a ledger's row, elements) of collectives


START = Visit(0, 0, "", "", None)


def moments(stays: Iterable[Stay]) -> tuple[Moment, ...]:
    """The start of the step with its inputs; then for each stay its fullest moment and its last, in order."""
    out: list[Moment] = []
    parts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    total, end, changes, starts = 0, 0, 0, {}
    for stay in stays:
        if id(stay.events) not in starts:
            starts[id(stay.events)], end = end, end + len(stay.events)
        totals = []
        for change in stay.changes:
            total += change.sign * change.life.bytes
            totals.append(total)
        last = len(totals) - 1
        fullest = last if stay.visit is START else totals.index(max(totals)) if totals else last
        for i, change in enumerate(stay.changes):
            parts[change.life.component()] += change.sign * change.life.bytes
            if i in (fullest, last):
                event_index = starts[id(stay.events)] + max(0, change.event_index)
                out.append(
                    Moment(
                        event_index,
                        stay.visit.phase,
                        stay.visit.layer,
                        change.life.name,
                        totals[i],
                        dict(parts),
                        changes + i,
                    )
                )
        changes += len(totals)
    return tuple(out)


def alive(stays: Iterable[Stay], moment: Moment, max_count: int = 20) -> tuple[tuple[str, str, int], ...]:
    """(name, component, bytes) of the largest storages alive at a moment of `moments(stays)`."""
    sums: dict[tuple[str, str], int] = {}
    changes = itertools.chain.from_iterable(stay.changes for stay in stays)
    for life, sign, _ in itertools.islice(changes, moment.change + 1):
        key = (
            life.name if life.born is START else f"{life.name} in {life.born._replace(layer=None)}",
            life.component(),
        )
        sums[key] = sums.get(key, 0) + sign * life.bytes
    largest = sorted(((size, key) for key, size in sums.items() if size > 0), reverse=True)[:max_count]
    return tuple((name, component, size) for size, (name, component) in largest)
