"""The row of a step in metrics.jsonl: its numbers and times; and its writers: file, terminal, loggers."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from fzero.core.storage import naming
from fzero.run import run_folder
from fzero.run.build import Job
from fzero.run.measure import norms
from fzero.run.measure.flops import TokenFlop
from fzero.run.measure.loggers import Log, open_loggers
from fzero.run.measure.rank_times import RankTimes
from fzero.run.measure.timer import Clock
from fzero.train.state import TrainState
from fzero.train.step import Metrics


def metrics_row(job: Job, metrics: Metrics, step: int) -> dict[str, Any]:
    """The row of a step's metrics, with None for numbers that are not finite. step: the number of steps before."""
    shown = {
        "loss": metrics.loss,
        **metrics.extra,
        "grad_norm": metrics.grad_norm,
        "loss_scale": metrics.loss_scale,
        "skipped": metrics.skipped,
        "num_tokens": metrics.num_tokens,
    }
    # In one copy, as each one waits for a GPU. float64 holds all of them exactly.
    read = dict(
        zip(shown, torch.stack([value.to(metrics.loss.device, torch.float64) for value in shown.values()]).tolist())
    )
    skipped, num_tokens, scale = bool(read.pop("skipped")), int(read.pop("num_tokens")), read.pop("loss_scale")
    values = {**read, "lr": float(job.schedule(step)), "loss_scale": scale}
    values = {name: value if math.isfinite(value) else None for name, value in values.items()}
    row = {"step": step + 1, **values, "skipped": skipped, "num_tokens": num_tokens}
    if row["skipped"]:
        row["reason"] = "spike" if values["grad_norm"] is not None else "nonfinite"
    return row


class Meter:
    """The times and rates in the rows of an attempt. Every rank has one. peak_flops: FLOP/s of all processes
    together."""

    def __init__(self, job: Job, flop: TokenFlop, peak_flops: float) -> None:
        self.job, self.flop, self.peak = job, flop, peak_flops
        nvme = job.nvme
        self.clock = Clock(job.device, waited=None if nvme is None else lambda: nvme.moved().waited_s)
        self.tokens = job.config.train.batch * job.config.data.seq_len
        self.every = job.config.train.measure_every
        self.spent = RankTimes()
        self.began = self.waited = 0.0

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch. A step begins with this call."""
        self.began = time.perf_counter()
        with self.job.mesh.ledger.phase("data"):
            batch = next(batches)
        self.waited = time.perf_counter() - self.began
        return batch

    def rates(self, step: int) -> dict[str, Any]:
        """The speed of the step that ends now, the run's step number `step`."""
        spent = time.perf_counter() - self.began
        rate = self.tokens / spent
        share = rate / self.peak
        return {
            "tokens": step * self.tokens,
            "step_s": spent,
            "data_s": self.waited,
            "tokens_per_s": rate,
            "mfu": share * self.flop.model,
            "mfu_causal": share * self.flop.model_causal,
            "hfu": share * self.flop.hardware,
            "hfu_causal": share * self.flop.hardware_causal,
        }

    def norms(self, state: TrainState, metrics: Metrics, step: int) -> dict[str, Any]:
        """The norms of gradients and parameters by layer, every `train.measure_every` steps; else {}."""
        if not self.every or step % self.every:
            return {}
        plan, mesh = self.job.plan, self.job.mesh
        # A step that measures has both.
        assert not isinstance(metrics.squares, tuple) and not isinstance(metrics.factor, tuple)
        grads = norms.by_part(
            norms.sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor)
        )
        params = norms.by_part(norms.of_params(state.params), plan.params, mesh, plan.like)
        return {"grad_norms": grads, "param_norms": params}

    def times(self, step: int, how: str) -> dict[str, Any]:
        """The seconds since the row before by phase, and every `train.measure_every` steps those of all ranks.

        how: the recorder of the step, or ""; the time of a recorded step is not counted for its rank.
        """
        times = self.clock.take()
        if not how:
            self.spent.add(times)
        row: dict[str, Any] = {"wall_s": times.wall, "phases": times.phases}
        row["comm"] = {axis: comm._asdict() for axis, comm in sorted(times.comm.items())}
        if self.every and step % self.every == 0:
            row["ranks"] = self.spent.gather(self.job.mesh)
        return row | ({"recorded": how} if how else {})


@contextlib.contextmanager
def metrics_writer(
    folder: Path, first: int, show: Log, loggers: Sequence[str], config: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context of a function that writes a step's row to metrics.jsonl, the terminal and the loggers."""
    path = folder / run_folder.METRICS
    with ExitStack() as stack:
        with naming(path):
            file = path.open("a", encoding="utf-8")
        stack.callback(close_flushed, file)
        log = stack.enter_context(open_loggers(loggers, folder, first=first, config=config))

        def record(row: Mapping[str, Any]) -> None:
            with naming(path):
                file.write(json.dumps(row) + "\n")
                file.flush()
            log(row)
            show(row)

        yield record


def close_flushed(file: IO[str]) -> None:
    """Close a file that was flushed after every write: what is left could not be written, which was said then."""
    with contextlib.suppress(OSError):
        file.close()
