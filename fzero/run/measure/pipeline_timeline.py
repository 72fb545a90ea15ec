"""The record of one step of a pipeline: when each act of each rank of pp began and ended, in pipeline.json."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fzero.comm.ledger import ActTimes
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import gpu
from fzero.core.storage import write_text
from fzero.core.text_parsing import json_text
from fzero.run.build import Job, local_micro_batches
from fzero.run.measure.timer import seconds_between
from fzero.sharding.pipeline import write_schedule
from fzero.train.pipeline_executor import schedule_of

PIPELINE = "pipeline.json"
BARRIERS = 9  # at which the clocks of ranks are compared


@contextmanager
def recording_acts(job: Job, folder: Path, named: dict[str, Any]) -> Iterator[None]:
    """A context of one step on a mesh with pp, whose acts rank 0 writes into `folder`. named: what else it writes.

    All ranks call it for the same step. No rank leaves a barrier before all are there, but one may leave it late: so
    clocks are compared at several, and the median of what they say counts.
    Communicates: the barriers, and behind the step two float64 for each act and one for each barrier, over all ranks.
    """
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
    schedule = schedule_of(job.plan, local_micro_batches(job.config, mesh))
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
        record = {"schedule": write_schedule(schedule), "start": [[a for a, _ in row] for row in firsts]}
        record["end"] = [[b for _, b in row] for row in firsts]
        write_text(folder, PIPELINE, json_text({**named, **record}, str(folder / PIPELINE)) + "\n")
