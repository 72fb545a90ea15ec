"""The clock of a step: how its time splits over phases and collectives, by the ledger's marks.

    clock = Clock()
    with mesh.ledger.watched(clock):
        with mesh.ledger.phase("data"):
            batch = next(batches)
        state, metrics = train_step(state, batch)
    times = clock.take()

While a step runs, a mark is a line in a list, or on a GPU an event: `cut` ends a stretch of marks without a wait, and
`read` interprets it later. pipeline.json: when each act of each rank of pp began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.comm.ledger import ActTimes
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import gpu
from fzero.core.storage import write_text
from fzero.core.text_parsing import json_text
from fzero.run.setup.build import Job, local_micro_batches
from fzero.sharding import pipeline as schedules

# The phases of a row, each second in one of them. Other phases of the ledger are "rest".
PHASES = ("data", "forward", "backward", "metrics", "update", "comm_exposed", "io", "evaluate", "checkpoint", "rest")
OUTER_PHASES = ("evaluate", "checkpoint")  # with their own collectives and their own waiting for a disk
COMM, IO, REST = "comm_exposed", "io", "rest"


class Comm(NamedTuple):
    """The seconds of the collectives over an axis."""

    exposed: float = 0.0  # the program waited
    hidden: float = 0.0  # from a start to the wait for it; the messages may have been there sooner


class Times(NamedTuple):
    """The time between two calls of `Clock.pop_times`, in seconds."""

    wall: float
    phases: dict[str, float]  # every one of PHASES; they add up to `wall`; {} if they were not marked
    comm: dict[str, Comm]  # by axis; exposed times add up to phases["comm_exposed"]

    @property
    def busy(self) -> float:
        """The seconds of the step's own computation, without data, waiting, evaluations and checkpoints."""
        return self.wall - sum(self.phases[name] for name in ("data", COMM, IO, *OUTER_PHASES))


class ClockSpan(NamedTuple):
    """The marks between two cuts of a clock."""

    marks: list[tuple[str, Any, Any, float]]
    phases: bool  # whether they have moments


class Clock:
    """A ledger.Watcher that measures time: by phase, "comm_exposed" and "io" (waits for a disk)."""

    # A second belongs to the outermost phase, whatever is entered inside it; but waiting for a collective is
    # "comm_exposed", and waiting for a disk and the commit of a store are "io", outside evaluations and checkpoints. On
    # a GPU marks are events in the current stream: exposed is how long that stream waited. waited: the seconds that
    # this thread has waited for a disk so far.
    def __init__(self, device: torch.device | str = "cpu", waited: Callable[[], float] | None = None) -> None:
        self.events: list[Any] | None = [] if torch.device(device).type == "cuda" else None  # to be used again
        self.timestamp: Callable[[], Any] = (
            time.perf_counter if self.events is None else partial(gpu.mark_time, self.events)
        )
        self.waited = waited or _none
        self.phases = True
        self.log: list[tuple[str, Any, Any, float]] = []
        self.open: list[str] = []  # phases that were entered before the last `read` and not left
        self.last = (self.timestamp(), self.waited())

    def _note(self, kind: str, value: Any) -> None:
        self.log.append((kind, value, self.timestamp(), self.waited()) if self.phases else (kind, value, None, 0.0))

    # ---- called by a ledger -------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._note("enter", phase)

    def leave(self, phase: str) -> None:
        """The innermost phase ends."""
        self._note("leave", phase)

    def reach(self, segment: str, layer: int | None) -> None:
        """Ignore a part of the model: only phases count."""

    def start(self, number: int, collective: str, axis: str, leaf: str, sent_bytes: int) -> None:
        """A collective is started."""
        self._note("start", (number, axis))

    def wait(self, number: int) -> None:
        """The program waits for collective `number`."""
        self._note("wait", number)

    def done(self, number: int) -> None:
        """Its result has arrived."""
        self._note("done", number)

    # ---- called by a loop ----------------------------------------------------------------------------------------

    def pop_times(self) -> Times:
        """The times since the last call, or since the clock was made. No collective may be under way."""
        return self.read(self.cut())

    def cut(self) -> ClockSpan:
        """The marks since the last cut; it does not wait. No collective may be under way."""
        self.log.append(("cut", None, self.timestamp(), self.waited()))
        log, self.log = self.log, []
        return ClockSpan(log, self.phases)

    def read(self, stretch: ClockSpan) -> Times:
        """The times of a stretch, read once and in order; waits for a GPU."""
        log, end = stretch.marks, stretch.marks[-1][2]
        if not isinstance(end, float):
            end.synchronize()
        (last, waited), self.last = self.last, log[-1][2:]
        times = self._split(stretch, last, waited)
        self._reuse(last, *(mark for _, _, mark, _ in log[:-1] if mark is not None))
        return times

    def seconds(self, begin: Any, end: Any) -> float:
        """The seconds between two moments of `now`, once both have passed; on a GPU they are used again."""
        spent = seconds_between(begin, end)
        self._reuse(begin, end)
        return spent

    def _reuse(self, *marks: Any) -> None:
        if self.events is not None:
            self.events += marks

    def _split(self, stretch: ClockSpan, last: Any, waited: float) -> Times:
        log, end = stretch.marks, stretch.marks[-1][2]
        if not stretch.phases:
            for kind, value, *_ in log:
                self._track_phase(kind, value)
            return Times(seconds_between(last, end), {}, {})
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        wall, axes = seconds_between(last, end), {}
        started: dict[int, tuple[str, Any]] = {}  # number -> (axis, the mark after which it travels)
        waiting = ""
        for kind, value, mark, disk in log:
            spent, idle, name = seconds_between(last, mark), 0.0, _name(self.open, waiting)
            if name not in (*OUTER_PHASES, COMM, IO):
                idle = min(disk - waited, spent)
                phases[IO] += idle
            phases[name] += spent - idle
            if name == COMM:
                comm = axes.get(waiting, Comm())
                axes[waiting] = comm._replace(exposed=comm.exposed + spent)
            last, waited = mark, disk
            self._track_phase(kind, value)
            if kind == "start" and not (self.open and self.open[0] in OUTER_PHASES):
                started[value[0]] = (value[1], mark)
            elif kind == "wait" and value in started:
                waiting, start_mark = started[value]
                comm = axes.get(waiting, Comm())
                axes[waiting] = comm._replace(hidden=comm.hidden + seconds_between(start_mark, mark))
            elif kind == "done" and value in started:
                started[value] = (waiting, mark)  # a large sum has a second half
                waiting = ""
        return Times(wall, phases, axes)

    def _track_phase(self, kind: str, value: Any) -> None:
        if kind == "enter":
            self.open.append(value)
        elif kind == "leave":
            self.open.pop()


def _name(phases: list[str], waiting: str) -> str:
    """The phase of a row for a second inside these phases of the ledger."""
    if phases and phases[0] in OUTER_PHASES:
        return phases[0]
    if waiting:
        return COMM
    if "commit" in phases:
        return IO
    return phases[0] if phases and phases[0] in PHASES else REST


def _none() -> float:
    return 0.0


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two moments of a Clock's `now`, once both have passed."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


PIPELINE = "pipeline.json"
BARRIERS = 9  # at which the clocks of ranks are compared


@contextmanager
def recording_acts(job: Job, folder: Path, named: dict[str, Any]) -> Iterator[None]:
    """A context of one step on a mesh with pp, whose acts rank 0 writes into `folder`; all ranks call it."""
    # No rank leaves a barrier before all are there, but one may leave it late: so clocks are compared at several, and
    # the median of what they say counts.
    mesh, ledger = job.mesh, job.mesh.ledger
    clock = time.perf_counter if job.device == gpu.HOST else partial(gpu.mark_time, [])
    times = ActTimes(clock)
    barrier_ends = []
    with ledger.phase("ranks"):
        for _ in range(BARRIERS):
            float(gather_rows(torch.zeros(1, device=device_of(mesh)), mesh, leaf="acts").sum())
            barrier_ends.append(clock())
    began = barrier_ends[-1]
    ledger.acts = times
    try:
        yield
    finally:
        ledger.acts = None
    gpu.synchronize(job.device)
    schedule = job.plan.schedule(local_micro_batches(job.config, mesh))[0]
    spans = [(seconds_between(began, a), seconds_between(began, b)) for a, b in zip(times.begins, times.ends)]
    table = torch.zeros(max(map(len, schedule.rows)) + BARRIERS, 2, dtype=torch.float64, device=device_of(mesh))
    barrier_times = [-seconds_between(moment, began) for moment in barrier_ends]
    table[:BARRIERS, 0] = torch.tensor(barrier_times, dtype=torch.float64)
    table[BARRIERS : BARRIERS + len(spans)] = torch.tensor(spans, dtype=torch.float64)
    with ledger.phase("ranks"):
        tables = gather_rows(table, mesh, leaf="acts")
    delays = (tables[:, :BARRIERS, 0] - tables[:1, :BARRIERS, 0]).median(1).values
    rows = (tables[:, BARRIERS:] - delays[:, None, None]).tolist()
    if mesh.rank == 0:
        # The ranks of pp are the outermost: of each stage the first.
        firsts = [rows[rank * mesh.stage_size][: len(row)] for rank, row in enumerate(schedule.rows)]
        record = {"schedule": schedules.write_schedule(schedule), "start": [[a for a, _ in row] for row in firsts]}
        record["end"] = [[b for _, b in row] for row in firsts]
        write_text(folder, PIPELINE, json_text({**named, **record}, str(folder / PIPELINE)) + "\n")
