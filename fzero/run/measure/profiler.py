"""A Chrome trace of some steps: operators inside named phases and layers, and collectives beside them.

https://ui.perfetto.dev and chrome://tracing show it. Names come from the ledger's marks.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from fzero.comm.ledger import Ledger
from fzero.core import gpu
from fzero.core.files import replacing

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
        self.stack: contextlib.ExitStack | None = None
        self.start_s = 0.0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context of the step with this number."""
        if self.stack is None:
            self.stack = contextlib.ExitStack()
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
    """The events of a trace, with gloo's messages moved to a track beside the overlapping ranges of their thread."""
    for number, event in enumerate(events):
        if event.get("ph") == "X" and event["name"].startswith("gloo:"):
            common = {key: event[key] for key in ("name", "pid", "tid")} | {"cat": "gloo", "id": number}
            yield {**common, "ph": "b", "ts": event["ts"]}
            yield {**common, "ph": "e", "ts": event["ts"] + event["dur"]}
        else:
            yield event


def steps_of(text: str, first: int) -> tuple[int, int]:
    """(first, last) step of the run for a text "3-5" or "4", counted from the step after `first`; raises ValueError."""
    begin, dash, end = text.partition("-")
    if not (begin.isdecimal() and (end.isdecimal() or not dash)) or not 1 <= int(begin) <= int(end or begin):
        raise ValueError(
            f"--profile {text!r} is not of the form FROM-TO, such as 3-5, counted from the first step that "
            "this command makes"
        )
    return first + int(begin), first + int(end or begin)
