"""Steps of a run that are looked at more closely: the ledger of one, the memory of one, the profile of some.

A step under a recorder takes longer than others, so its row says so ("recorded") and no statistic of time counts it. Which steps these are
is the same on all ranks.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.comm.ledger import Ledger, Row
from fzero.core import pytree
from fzero.core.storage import write_text
from fzero.core.tables import Table
from fzero.kernels.registry import describe, observe
from fzero.run.build import Job
from fzero.run.measure.live_bytes import COMPONENTS, record_step
from fzero.run.measure.profiler import TRACE, Profile
from fzero.train.state import TrainState

LEDGER, MEMORY = "ledger.json", "memory.json"
ERRORS = 2  # of c10's levels
LEDGER_AT = 2  # of an attempt's steps, from 1 on: the first also makes sure that the ranks run one program
MEMORY_AT = 8  # what is made once is made by then; a shorter attempt has no such record
UNSEEN = "memory that no operator has as an argument or a result: scratch inside an operator, Python's own"
COMPILED = "; inner buffers of compiled blocks"


class Chosen(NamedTuple):
    """Which steps of an attempt are recorded, by their numbers in the run (from 1 on); 0 for none."""

    ledger: int = 0
    memory: int = 0
    profile: tuple[int, int] = (0, 0)  # first and last

    def how(self, number: int) -> str:
        """What a row says of its step: "memory", "profile", or "" for a step that is timed."""
        if self.profile[0] <= number <= self.profile[1]:
            return "profile"
        return "memory" if number == self.memory else ""


def chosen(first: int, until: int, measured: bool, profile: tuple[int, int] = (0, 0)) -> Chosen:
    """The steps to record of an attempt that goes on behind step `first`, up to `until`; measured: the ledger and the memory, too."""
    memory = first + MEMORY_AT if measured and first + MEMORY_AT <= until else 0
    if memory and profile[0] <= memory <= profile[1]:
        memory = profile[1] + 1 if profile[1] < until else 0
    return Chosen(min(first + LEDGER_AT, until) if measured else 0, memory, profile)


@contextmanager
def recording(program: Job, folder: Path, attempt: int, which: Chosen) -> Iterator[Callable[[TrainState, Any, int], tuple]]:
    """A function `(state, batch, number of the step) -> (state, metrics)`: the program's step, recorded where it is one of the chosen.

    It writes ledger.json, memory.json and trace.json.gz into `folder`: the records of this process.
    """
    ledger = program.mesh.ledger
    profile, used = Profile(folder / TRACE, ledger, *which.profile), {}

    def step(state: TrainState, batch: Any, number: int) -> tuple:
        before, named = ledger.rows() if number == which.ledger else [], {"attempt": attempt, "step": number, "rank": program.mesh.rank}
        with observe() as forms:
            how = which.how(number)
            if how == "profile":
                with profile.step(number):
                    state, metrics = program.train_step(state, batch)
            elif how == "memory":
                state, metrics, said = measured_memory(program, state, batch)
                write(folder, MEMORY, {**named, **said})
            else:
                state, metrics = program.train_step(state, batch)
        used.update(forms if not used else {})  # compiled blocks choose their kernels in the first step
        if number == which.ledger:
            rows = [row._asdict() for row in rows_since(ledger, before)]
            write(folder, LEDGER, {**named, "kernels": describe(used), "rows": rows})
        return state, metrics

    try:
        yield step
    finally:
        profile.close()


def rows_since(ledger: Ledger, before: list[Row]) -> list[Row]:
    """What was entered in a ledger since its rows were `before`."""
    known = {row[:5]: row[5:] for row in before}
    since = [Row(*row[:5], *(now - then for now, then in zip(row[5:], known.get(row[:5], (0, 0, 0))))) for row in ledger.rows()]
    return [row for row in since if row.calls]


def write(folder: Path, name: str, value: Table) -> None:
    """Put a record into the run folder, in the place of an earlier attempt's, at once."""
    write_text(folder, name, json.dumps(value) + "\n")


# -- memory


def measured_memory(program: Job, state: TrainState, batch: Any) -> tuple[TrainState, Any, Table]:
    """(state, metrics, the table of memory.json) of one step: bytes alive by component, and on a GPU the peak that its allocator counts."""
    buffers = program.space.buffers if program.space is not None else None
    device = next((leaf.device for leaf in pytree.leaves(state.params) if isinstance(leaf, torch.Tensor) and leaf.is_cuda), None)
    if device is not None:
        torch.cuda.reset_peak_memory_stats(device)
    after, metrics, record = record_step(program.train_step, state, batch, program.mesh.ledger, buffers=buffers)
    moments = record.moments()
    peak = max(moments, key=lambda moment: moment.bytes)
    compiled = bool(program.config.train.compiled)
    said = {
        "components": COMPONENTS,
        "timeline": [moment._asdict() for moment in moments],
        "peak": peak._asdict(),
        "alive": record.alive(peak),
        "state": bytes_at_rest(after),
        "allocator_peak_bytes": None if device is None else torch.cuda.max_memory_allocated(device),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "compiled": compiled,
        "not_seen": UNSEEN + COMPILED * compiled,
    }
    return after, metrics, said


def bytes_at_rest(state: TrainState) -> dict[str, int]:
    """{group of the state: bytes of its leaves in memory}: "params", "master", "opt", "ema" and "other"."""
    out = dict.fromkeys(("params", "master", "opt", "ema", "other"), 0)
    for name, leaf in pytree.named_leaves(state._asdict()).items():
        if isinstance(leaf, torch.Tensor):
            part = name.split("/")[0]
            group = {"params": "params", "master": "master", "opt_state": "opt"}.get(
                part, "ema" if name.startswith("extra/ema") else "other"
            )
            out[group] += leaf.nbytes
    return out
