"""The clock of a step: how its time splits over phases and collectives, by the ledger's marks.

    clock = Clock()
    with mesh.ledger.watched(clock):
        with mesh.ledger.phase("data"):
            batch = next(batches)
        state, metrics = train_step(state, batch)
    times = clock.take()

While a step runs, a mark is a line in a list, or on a GPU an event: `cut` ends a stretch of marks without a wait, and
`read` interprets it later. pipeline.json: when each act of each rank of pp began and ended.

The norms of gradients and parameters, layer by layer.

    by_part(sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor))

The squares of gradients come from the step's own norm, so nothing is read again and no gradient is held longer. Also
how evenly a step's tokens are spread over experts, and stragglers by the times of every rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import sharding
from fzero.comm.collectives import psum
from fzero.comm.ledger import ActTimes
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import gpu, pytree
from fzero.core.copy_buckets import start_fetch
from fzero.core.pytree import Tree
from fzero.core.storage import write_text
from fzero.core.text_parsing import json_text
from fzero.models.base import BIAS, DROPPED, ENTROPY, LOAD
from fzero.optim.norm import Squared
from fzero.optim.sharded_leaves import WHOLE, squares
from fzero.run.setup.build import Job, local_micro_batches
from fzero.sharding import Mesh, Plan
from fzero.sharding import pipeline as schedules
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec

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


def imbalance(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{"imbalance": the worst layer's most tokens over its mean}, or {}.

    >>> float(imbalance({"blocks/moe/load": torch.tensor([[3.0, 1.0], [2.0, 2.0]])})["imbalance"])
    1.5
    """
    loads = [table for name, table in tables.items() if name.endswith(f"/{LOAD}")]
    worst = [(load.amax(-1) / load.mean(-1).clamp_min(1e-30)).amax() for load in loads]
    return {"imbalance": torch.stack(worst).amax()} if worst else {}


def spread_of(tables: Mapping[str, Tensor], params: Tree, plan: Plan, top_k: int) -> dict[str, Any]:
    """{"experts": {stack: load, dropped, entropy, bias}} for a row of metrics; {} without experts."""
    leaves, stacks = pytree.named_leaves(params), dict[str, Any]()
    for name, load in tables.items():
        stack, _, kind = name.rpartition("/")
        if kind != LOAD:
            continue
        every = load.sum(-1, keepdim=True).clamp_min(1.0)
        row = {LOAD: load / every, ENTROPY: tables[f"{stack}/{ENTROPY}"] / (every[:, 0] / top_k)}
        if f"{stack}/{DROPPED}" in tables:
            row[DROPPED] = tables[f"{stack}/{DROPPED}"] / every
        if (bias := f"{stack}/{BIAS}") in leaves:
            spec = plan.leaves[bias].params
            row[BIAS] = (
                sharding.layouts.gather_layers(leaves[bias], spec, plan.mesh, leaf=bias) if spec.rows else leaves[bias]
            )
        stacks[stack.split("/")[0]] = {key: rounded(x.tolist()) for key, x in row.items()}
    return {"experts": stacks} if stacks else {}


def rounded(value: Any) -> Any:
    """Nested lists of numbers with six significant digits: a row is read by people too."""
    return [rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")


BEHIND = 1.05  # times the others' median: above it a rank is a straggler
COLUMNS = ("busy_s", "comm_s", "data_s", "io_s")


class RankTimes:
    """The summed times of this rank's steps since they were last gathered."""

    def __init__(self) -> None:
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)

    def add(self, times: Times) -> None:
        """Add the times of a step."""
        phases = times.phases
        self.steps += 1
        for i, value in enumerate((times.busy, phases[COMM], phases["data"], phases[IO])):
            self.sums[i] += value

    def gather(self, mesh: Mesh) -> dict[str, Any]:
        """The times of all ranks, as lists by rank, and the straggler; resets the sums. All ranks call it."""
        with mesh.ledger.phase("ranks"):
            row = torch.tensor(self.sums, dtype=torch.float64, device=device_of(mesh))
            rows = gather_rows(row, mesh, leaf="ranks").tolist()
        out = {"steps": self.steps, **{name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}}
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)
        straggler, behind = find_straggler([row[0] + row[2] + row[3] for row in rows])
        return {**out, "straggler": straggler, "behind": behind}


def find_straggler(own_s: list[float]) -> tuple[int | None, float]:
    """(the rank that the others wait for, or None; by what factor its time is above the others' median)."""
    if len(own_s) < 2:
        return None, 1.0
    rank = max(range(len(own_s)), key=lambda i: own_s[i])
    median = statistics.median(own_s[:rank] + own_s[rank + 1 :])
    behind = own_s[rank] / median if median > 0 else 1.0
    return rank if behind > BEHIND else None, behind


Norms = dict[str, Any]  # {"embed": norm, "blocks": [norm of each layer], "head": norm}


def sums(squared: Mapping[str, Squared]) -> dict[str, Tensor]:
    """{leaf: its sum of squares [layers] on this rank, float64}."""
    out = {}
    for name, leaf in squared.items():
        layers: dict[int, list[Tensor]] = {}
        for layer, square in leaf.squares:
            layers.setdefault(layer, []).append(square.to(torch.float64).sum())
        layer_sums = [torch.stack(layers[layer]).sum() for layer in sorted(layers)]
        # Without layer_sums other stages have its layers.
        out[name] = torch.stack(layer_sums) if layer_sums else torch.zeros(0, dtype=torch.float64)
    return out


@torch.no_grad()
def of_params(params: Tree) -> dict[str, Tensor]:
    """`sums` of this rank's parameters; leaves on a disk are left out, to avoid reading them."""
    local_leaves = {name: leaf for name, leaf in pytree.named_leaves(params).items() if isinstance(leaf, Tensor)}
    return sums(squares(WHOLE, local_leaves))


@torch.no_grad()
def segment_norms(local: Mapping[str, Tensor], specs: Tree, mesh: Mesh, like: Tree, factor: float = 1.0) -> Norms:
    """The 2-norms, times `factor`, of the parts of a model: embedding, layers, head; the same on all ranks."""
    named = pytree.named_leaves(specs)
    # One place for all: those of leaves in the host's memory, and of other stages' layers, are not on the GPU.
    device_sums = dict(zip(local, start_fetch(list(local.values())).wait()))
    totals = {name: scatter_layers(sums.to(device_of(mesh)), named[name], mesh) for name, sums in device_sums.items()}
    with mesh.ledger.phase("norms"):
        for axis in mesh.axes:
            names = [name for name in sorted(totals) if axis.size > 1 and axis.name in named[name].axes]
            if names:
                summed = psum(torch.cat([totals[name] for name in names]), axis, leaf="norms")
                totals.update(zip(names, summed.split([totals[name].shape[0] for name in names])))
    parts: dict[str, list[str]] = {}
    for name in pytree.names(like):
        parts.setdefault(name.split("/")[0], []).append(name)
    complete_parts = {segment: names for segment, names in parts.items() if all(name in totals for name in names)}
    norms = [factor * torch.stack([totals[name] for name in names]).sum(0).sqrt() for names in complete_parts.values()]
    out: Norms = dict.fromkeys(parts)
    for (segment, names), values in zip(complete_parts.items(), start_fetch(norms).wait()):
        finite = [value if math.isfinite(value) else None for value in values.tolist()]
        out[segment] = finite if is_stacked(names[0]) else finite[0]
    return out


def scatter_layers(sums: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The sums of this rank's layers at their indices among all layers of a leaf, 0 elsewhere."""
    if not spec.rows:
        return sums
    indices = torch.tensor(spec.rows[mesh.pp.rank], dtype=torch.int64, device=device_of(mesh))
    placed = torch.zeros(sum(len(rows) for rows in spec.rows), dtype=sums.dtype, device=device_of(mesh))
    return placed.index_copy_(0, indices, sums)
