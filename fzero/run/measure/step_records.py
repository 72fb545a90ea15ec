"""Record selected steps of a run: the ledger of one, the memory of one, the profile of some.

A recorded step takes longer, so its row has "recorded" and no statistic of time counts it. All ranks record the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.comm.ledger import Ledger, LedgerRow
from fzero.core import gpu, pytree
from fzero.core.config_tables import Table
from fzero.core.storage import write_text
from fzero.core.text_parsing import json_text
from fzero.kernels.registry import describe, observe
from fzero.optim.wrappers import AVERAGE
from fzero.run.build import Job
from fzero.run.measure.live_bytes import record_step
from fzero.run.measure.memory_timeline import COMPONENTS
from fzero.run.measure.metrics_rows import process_peak_bytes
from fzero.run.measure.pipeline_timeline import recording_acts
from fzero.run.measure.profiler import TRACE, Profile
from fzero.sharding.error_feedback import ERROR
from fzero.train.state import TrainState

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
    """The steps to record of an attempt after step `first`, up to `last`. measured: record ledger and memory too."""
    memory = first + MEMORY_AT if measured and first + MEMORY_AT <= last else 0
    if memory and profile[0] <= memory <= profile[1]:
        memory = profile[1] + 1 if profile[1] < last else 0
    return StepSelection(min(first + LEDGER_AT, last) if measured else 0, memory, profile)


@contextmanager
def recording(
    job: Job, folder: Path, attempt: int, selection: StepSelection
) -> Iterator[Callable[[TrainState, Any, int], tuple]]:
    """A function `(state, batch, number of the step) -> (state, metrics)`: the job's step, recorded if it is
    chosen.

    It writes ledger.json, memory.json and trace.json.gz into `folder`: the records of this process; and on a mesh with
    pp pipeline.json, of all ranks.
    """
    ledger = job.mesh.ledger
    every = job.config.train.measure_every if job.plan.stages is not None else 0
    records_acts = lambda number: every > 0 and number % every == 0  # noqa: E731 - on all ranks
    profile, used = Profile(folder / TRACE, ledger, *selection.profile), {}

    def step(state: TrainState, batch: Any, number: int) -> tuple:
        previous_rows, named = (
            ledger.rows() if number == selection.ledger else [],
            {"attempt": attempt, "step": number, "rank": job.mesh.rank},
        )
        with observe() as forms, recording_acts(job, folder, named) if records_acts(number) else nullcontext():
            recorder = selection.recorder_of(number)
            if recorder == "profile":
                with profile.step(number):
                    state, metrics = job.train_step(state, batch)
            elif recorder == "memory":
                state, metrics, table = measure_memory(job, state, batch)
                write(folder, MEMORY, {**named, **table})
            else:
                state, metrics = job.train_step(state, batch)
        used.update(forms if not used else {})  # compiled blocks choose their kernels in the first step
        if number == selection.ledger:
            rows = [row._asdict() for row in rows_since(ledger, previous_rows)]
            write(folder, LEDGER, {**named, "kernels": describe(used), "rows": rows})
        return state, metrics

    try:
        yield step
    finally:
        profile.close()


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


def measure_memory(job: Job, state: TrainState, batch: Any) -> tuple[TrainState, Any, Table]:
    """(state, metrics, the table of memory.json) of one step: bytes alive by component; on a GPU those of its memory,
    the peak that its allocator counts, and the peak of tensors in the host's memory beside it."""
    buffers = job.nvme.buffers if job.nvme is not None else None
    device, on_gpu = state.step.device, state.step.device.type == "cuda"
    gpu.reset_peak(device)
    next_state, metrics, record = record_step(
        job.train_step, state, batch, job.mesh.ledger, buffers=buffers, device=device if on_gpu else None
    )
    moments = record.moments()
    peak = max(moments, key=lambda moment: moment.bytes)
    compiled = bool(job.config.train.compiled)
    table = {
        "components": COMPONENTS,
        "timeline": [moment._asdict() for moment in moments],
        "peak": peak._asdict(),
        "alive": record.alive(peak),
        "state": device_state_bytes(next_state, device),
        "allocator_peak_bytes": gpu.peak_bytes(device),
        "host_peak_bytes": record.off_device_peak if on_gpu else None,
        "rss_peak_bytes": process_peak_bytes(),
        "compiled": compiled,
        "not_seen": UNSEEN + COMPILED * compiled,
    }
    return next_state, metrics, table


def device_state_bytes(state: TrainState, device: torch.device) -> dict[str, int]:
    """{group of the state: bytes of its leaves on `device`}: "params", "master", "opt", "ema", "other", and "errors" of
    a codec that keeps them."""
    out: dict[str, int] = dict.fromkeys(("params", "master", "opt", "ema", "other"), 0)
    for name, leaf in pytree.named_leaves(state._asdict()).items():
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
            group = {"params": "params", "master": "master", "opt_state": "opt"}.get(name.split("/")[0], "other")
            group = "ema" if name.startswith(AVERAGE) else "errors" if name.startswith(ERROR) else group
            out[group] = out.get(group, 0) + leaf.nbytes
    return out
