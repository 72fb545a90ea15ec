"""Record selected steps of a run: the ledger of one, the memory of one, the profile of some.

A recorded step takes longer, so its row has "recorded" and no statistic of time counts it. All ranks record the same
steps. A Chrome trace, for https://ui.perfetto.dev, has operators inside named phases and layers, and collectives.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from fzero.comm.ledger import Ledger, LedgerRow
from fzero.core import gpu, pytree
from fzero.core.config_tables import Table
from fzero.core.files import replacing
from fzero.core.storage import write_text
from fzero.core.text_parsing import json_text
from fzero.kernels.registry import describe, observe
from fzero.optim.base import AVERAGE
from fzero.run import measure
from fzero.run.measure.metrics_rows import process_peak_bytes
from fzero.run.measure.timer import recording_acts
from fzero.run.setup.build import Job
from fzero.sharding.error_feedback import ERROR
from fzero.train.state import TrainState

TRACE = "trace.json.gz"


def hush() -> None:
    """Keep the profiler's own lines off stderr; call it before the first profile."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def profiler() -> Any:
    """torch's profiler, as a context."""
    hush()
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *[kinds.CUDA] * gpu.in_use()])


class Named:
    """A ledger.Watcher that gives phases, parts and waits to torch's profiler as nested ranges."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, str, Any]] = []  # (kind, name, the range), outermost first
        self.sent: list[tuple[int, str, str, float, float]] = []  # collectives: number, name, axis, started and done
        self.under_way: dict[int, tuple[str, str, float]] = {}

    def _push(self, kind: str, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self.ranges.append((kind, name, entered))

    def _pop(self) -> str:
        kind, _, entered = self.ranges.pop()
        entered.__exit__(None, None, None)
        return kind

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._push("phase", phase)

    def leave(self, phase: str) -> None:
        """The innermost phase ends, and its current part."""
        while self._pop() != "phase":
            pass

    def reach(self, segment: str, layer: int | None) -> None:
        """The program comes to a part of the model, and leaves the one before it."""
        if self.ranges and self.ranges[-1][0] == "part":
            self._pop()
        phase = self.ranges[-1][1] if self.ranges else ""
        self._push("part", f"{phase} {segment}{'' if layer is None else f'/{layer}'}".strip())

    def start(self, number: int, collective: str, axis: str, leaf: str, sent_bytes: int) -> None:
        """A collective is started."""
        name = f"{collective} {leaf}" if len(leaf) < 60 else f"{collective} {leaf[:56]} ..."
        self.under_way[number] = (name, axis, time.perf_counter())

    def wait(self, number: int) -> None:
        """The program waits for collective `number`."""
        self._push("wait", f"wait {self.under_way[number][1]}" if number in self.under_way else "wait")

    def done(self, number: int) -> None:
        """Its result has arrived."""
        self._pop()
        if number in self.under_way:
            name, axis, begin = self.under_way[number]
            self.sent.append((number, name, axis, begin, time.perf_counter()))


class Profile:
    """The trace of the run's steps `first` to `last`, written into `path` after the last one."""

    def __init__(self, path: Path, ledger: Ledger, first: int, last: int) -> None:
        self.path, self.ledger, self.first, self.last = path, ledger, first, last
        self.named = Named()
        self.stack: ExitStack | None = None
        self.start_s = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context of the step with this number."""
        if self.stack is None:
            self.stack = ExitStack()
            self.profile = self.stack.enter_context(profiler())
            self.stack.enter_context(self.ledger.watched(self.named))
        self.start_s = self.start_s or time.perf_counter()
        with record_function(f"step {number}"):
            yield
        if number == self.last:
            self.close()

    def close(self) -> None:
        """End the profile, if it was begun, and write its trace."""
        if self.stack is None:
            return
        self.stack.close()
        self.stack, self.first = None, self.last + 1  # it is over
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        for name in ("host_name", "traceName"):
            trace.pop(name, None)
        trace["traceEvents"] = [*split_gloo_events(trace["traceEvents"]), *self.messages(trace["traceEvents"])]
        with replacing(self.path) as raw, gzip.open(raw, "wt", encoding="utf-8") as file:
            json.dump(trace, file)

    def messages(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The collectives as separate events, from start to arrival: they overlap, so they do not nest."""
        first = min(
            (e for e in events if e.get("ph") == "X" and str(e.get("name")).startswith("step ")), key=lambda e: e["ts"]
        )
        out = []
        for number, name, axis, begin, end in self.named.sent:
            common = {"cat": axis, "name": name, "id": number, "pid": first["pid"], "tid": first["tid"]}
            out += [
                {**common, "ph": ph, "ts": first["ts"] + 1e6 * (seconds - self.start_s)}
                for ph, seconds in (("b", begin), ("e", end))
            ]
        return out


def split_gloo_events(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events of a trace, with gloo's messages on a track of their own."""
    for number, event in enumerate(events):
        if event.get("ph") == "X" and event["name"].startswith("gloo:"):
            common = {key: event[key] for key in ("name", "pid", "tid")} | {"cat": "gloo", "id": number}
            yield {**common, "ph": "b", "ts": event["ts"]}
            yield {**common, "ph": "e", "ts": event["ts"] + event["dur"]}
        else:
            yield event


def steps_of(text: str, first: int) -> tuple[int, int]:
    """(first, last) step of a text "3-5" or "4" after `first`; raises ValueError."""
    begin, dash, end = text.partition("-")
    if not (begin.isdecimal() and (end.isdecimal() or not dash)) or not 1 <= int(begin) <= int(end or begin):
        raise ValueError(
            f"--profile {text!r} is not of the form FROM-TO, such as 3-5, counted from the first step that "
            "this command makes"
        )
    return first + int(begin), first + int(end or begin)


LEDGER, MEMORY = "ledger.json", "memory.json"
LEDGER_AT = 2  # of an attempt's steps, from 1 on: the first also makes sure that the ranks run one program
MEMORY_AT = 8  # one-time allocations are over by then; a shorter attempt has no such record
UNSEEN = "memory that no operator has as an argument or a result: scratch inside an operator, Python's own"
COMPILED = "; inner buffers of compiled blocks"


class StepSelection(NamedTuple):
    """The recorded steps of an attempt, by their numbers in the run (from 1 on); 0 for none."""

    ledger: int = 0
    memory: int = 0
    profile: tuple[int, int] = (0, 0)  # first and last

    def recorder_of(self, number: int) -> str:
        """The recorder of a step: "memory", "profile", or "" for a timed step."""
        if self.profile[0] <= number <= self.profile[1]:
            return "profile"
        return "memory" if number == self.memory else ""


def select_steps(first: int, last: int, measured: bool, profile: tuple[int, int] = (0, 0)) -> StepSelection:
    """The steps to record of an attempt after step `first`, up to `last`."""
    memory = first + MEMORY_AT if measured and first + MEMORY_AT <= last else 0
    if memory and profile[0] <= memory <= profile[1]:
        memory = profile[1] + 1 if profile[1] < last else 0
    return StepSelection(min(first + LEDGER_AT, last) if measured else 0, memory, profile)


class StepRecorder:
    """Records the chosen steps of an attempt into the run folder; close it after the last one."""

    def __init__(self, job: Job, folder: Path, attempt: int, selection: StepSelection) -> None:
        self.job, self.folder, self.attempt, self.selection = job, folder, attempt, selection
        self.profile = Profile(folder / TRACE, job.mesh.ledger, *selection.profile)
        self.close = self.profile.close
        self.kernels: dict[str, set[str]] = {}  # compiled blocks choose theirs in the first step
        self.named: Table = {}  # the step, in its records
        self.memory: Any = None  # the MemoryTrace of the step, if that is recorded
        self.ledger_rows: list[LedgerRow] = []  # before the step whose ledger is recorded

    @contextmanager
    def step(self, number: int, state: TrainState, batch: Any) -> Iterator[None]:
        """A context of the step with this number, from `state`; call `write` behind it."""
        job, ledger, recorder = self.job, self.job.mesh.ledger, self.selection.recorder_of(number)
        self.named = {"attempt": self.attempt, "step": number, "rank": job.mesh.rank}
        self.ledger_rows = ledger.rows() if number == self.selection.ledger else []
        every = job.config.train.measure_every if job.plan.stages is not None else 0
        with ExitStack() as stack:
            forms = stack.enter_context(observe())
            if every > 0 and number % every == 0:  # on all ranks
                stack.enter_context(recording_acts(job, self.folder, self.named))
            if recorder == "profile":
                stack.enter_context(self.profile.step(number))
            elif recorder == "memory":
                device, buffers = state.step.device, job.nvme.buffers if job.nvme is not None else None
                gpu.reset_peak(device)
                options = {"buffers": buffers, "device": device if device.type == "cuda" else None}
                self.memory = measure.live_bytes.MemoryTrace(state, batch, **options)
                stack.enter_context(measure.live_bytes.recorded(self.memory, ledger))
            yield
        self.kernels = self.kernels or forms

    def write(self, state: TrainState) -> None:
        """Write the records of the step that led to `state`."""
        if self.memory is not None:
            self.memory.close(state)
            write(self.folder, MEMORY, {**self.named, **memory_table(self.job, self.memory, state)})
            self.memory = None
        if self.named["step"] == self.selection.ledger:
            rows = [row._asdict() for row in rows_since(self.job.mesh.ledger, self.ledger_rows)]
            write(self.folder, LEDGER, {**self.named, "kernels": describe(self.kernels), "rows": rows})


def rows_since(ledger: Ledger, previous_rows: list[LedgerRow]) -> list[LedgerRow]:
    """The entries of a ledger since its rows were `previous_rows`."""
    totals = {row[:5]: row[5:] for row in previous_rows}
    since = [
        LedgerRow(*row[:5], *(current - previous for current, previous in zip(row[5:], totals.get(row[:5], (0, 0, 0)))))
        for row in ledger.rows()
    ]
    return [row for row in since if row.calls]


def write(folder: Path, name: str, value: Table) -> None:
    """Write a record into the run folder, atomically replacing that of an earlier attempt."""
    write_text(folder, name, json_text(value, str(folder / name)) + "\n")


# -- memory


def memory_table(job: Job, record: Any, state: TrainState) -> Table:
    """The table of memory.json: bytes alive by component in the step of a MemoryTrace, which led to `state`."""
    device = state.step.device
    moments = record.moments()
    peak = max(moments, key=lambda moment: moment.bytes)
    compiled = bool(job.config.train.compiled)
    return {
        "components": measure.memory_timeline.COMPONENTS,
        "timeline": [moment._asdict() for moment in moments],
        "peak": peak._asdict(),
        "alive": record.alive(peak),
        "state": device_state_bytes(state, device),
        "allocator_peak_bytes": gpu.peak_bytes(device),
        "host_peak_bytes": record.off_device_peak if device.type == "cuda" else None,
        "rss_peak_bytes": process_peak_bytes(),
        "compiled": compiled,
        "not_seen": UNSEEN + COMPILED * compiled,
    }


def device_state_bytes(state: TrainState, device: torch.device) -> dict[str, int]:
    """{group of the state: bytes of its leaves on `device`}."""
    out: dict[str, int] = dict.fromkeys(("params", "master", "opt", "ema", "other"), 0)
    for name, leaf in pytree.named_leaves(state._asdict()).items():
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
            group = {"params": "params", "master": "master", "opt_state": "opt"}.get(name.split("/")[0], "other")
            group = "ema" if name.startswith(AVERAGE) else "errors" if name.startswith(ERROR) else group
            out[group] = out.get(group, 0) + leaf.nbytes
    return out
