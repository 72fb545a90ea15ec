"""The row that a step adds to metrics.jsonl: its numbers and times; and where rows go: file, terminal, TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fzero.run import run_folder
from fzero.run.build import Job
from fzero.run.corpus import Say
from fzero.run.measure import norms
from fzero.run.measure.attempts import Flop
from fzero.run.measure.rank_times import RankTimes
from fzero.run.measure.timer import Clock
from fzero.train.state import TrainState
from fzero.train.step import Metrics


def metrics_row(job: Job, metrics: Metrics, step: int) -> dict[str, Any]:
    """The row of a step's metrics, with None for numbers that are not finite. step: the steps made before."""
    values = {
        "loss": float(metrics.loss),
        **{name: float(value) for name, value in metrics.extra.items()},
        "grad_norm": float(metrics.grad_norm),
        "lr": float(job.schedule(step)),
        "loss_scale": float(metrics.loss_scale),
    }
    values = {name: value if math.isfinite(value) else None for name, value in values.items()}
    row = {"step": step + 1, **values, "skipped": bool(metrics.skipped), "num_tokens": int(metrics.num_tokens)}
    if row["skipped"]:
        row["reason"] = "spike" if values["grad_norm"] is not None else "nonfinite"
    return row


class Meter:
    """The times and rates in the rows of an attempt. Every rank has one. peak_flops: FLOP/s of all processes together."""

    def __init__(self, job: Job, flop: Flop, peak_flops: float) -> None:
        self.job, self.flop, self.peak = job, flop, peak_flops
        space = job.space
        self.clock = Clock(waited=None if space is None else lambda: space.moved().waited_s)
        self.tokens = job.config.train.batch * job.config.data.seq_len
        self.every = job.config.train.measure_every
        self.spent = RankTimes()
        self.began = self.waited = 0.0

    def fetch(self, batches: Iterator[tuple[int, Any]]) -> Any:
        """The next batch. A step begins with this call."""
        self.began = time.perf_counter()
        with self.job.mesh.ledger.phase("data"):
            _, batch = next(batches)
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
        """The norms of gradients and parameters layer by layer, where this step is one in `train.measure_every`; {} elsewhere."""
        if not self.every or step % self.every:
            return {}
        plan, mesh = self.job.plan, self.job.mesh
        grads = norms.by_part(norms.sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor))
        params = norms.by_part(norms.of_params(state.params), plan.params, mesh, plan.like)
        return {"grad_norms": grads, "param_norms": params}

    def times(self, step: int, how: str) -> dict[str, Any]:
        """The seconds since the row before by phase, and every `train.measure_every` steps those of all ranks.

        how: what recorded the step ("" for nothing); the time of a recorded step is not counted for its rank.
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
def metrics_writer(folder: Path, first: int, until: int, every: int, bar: bool, say: Say) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a step's row to metrics.jsonl, to the terminal, and to TensorBoard where that is installed."""
    with ExitStack() as stack:
        file = stack.enter_context((folder / run_folder.METRICS).open("a", encoding="utf-8"))
        shown = board = None
        if bar:
            from tqdm import tqdm

            shown = stack.enter_context(tqdm(total=until, initial=first, unit="step", dynamic_ncols=True))
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            board = stack.enter_context(SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1))
        recent: list[float] = []
        val = ""

        def record(row: dict[str, Any]) -> None:
            nonlocal val
            file.write(json.dumps(row) + "\n")
            file.flush()
            for name, value in row.items() if board else ():
                if name != "step" and isinstance(value, (int, float)):
                    board.add_scalar(name, value, row["step"])
            recent[:] = [*recent[-19:], row["step_s"]]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            val = f"  val {row['val_loss']:.4f}" if "val_loss" in row else val
            speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {100 * row['mfu']:.0f}%"
            if shown is not None:
                shown.set_postfix_str(f"loss {loss}{val}  {speed}", refresh=False)
                shown.update()
            elif row["step"] % every == 0 or row["step"] in (first + 1, until) or "val_loss" in row:
                left = format_duration((until - row["step"]) * sum(recent) / len(recent))
                say(f"step {row['step']}/{until}  loss {loss}{val}  {speed}  ETA {left}{'  SKIPPED' if row['skipped'] else ''}")

        yield record


def format_duration(seconds: float) -> str:
    """A duration in words: 0:42, 12:05, 3:00:00."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
