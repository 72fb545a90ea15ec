"""The row of a step in metrics.jsonl: its numbers and times; and its writers: file, terminal, loggers."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.compile import on_first_compile
from fzero.core.files import cut_half_line, naming, open_to_write
from fzero.core.gpu import HOST, memory_of, reset_peak
from fzero.core.gpu_copies import Copied, copy_out
from fzero.core.text_parsing import json_text
from fzero.data.mixture import Mixture
from fzero.models.batch import KINDS
from fzero.optim.schedules import LR_SCALE
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import count_tokens
from fzero.run.measure import norms
from fzero.run.measure.flops import TokenFlop
from fzero.run.measure.loggers import open_loggers
from fzero.run.measure.norms import RankTimes
from fzero.run.measure.timer import Clock, ClockSpan
from fzero.run.setup import run_folder, run_lock
from fzero.run.setup.build import Job
from fzero.run.setup.coordinator import Say
from fzero.train.state import Metrics, TrainState

COLUMNS, ROWS = 80, 24  # of a terminal that does not say how large it is
RECENT = 20  # steps whose mean predicts the rest
COMPILING = "compiling (about 25 s on two cores, once a machine)"


@contextlib.contextmanager
def show_progress(
    first: int, last: int, *, every: int, bar: bool, say: Say
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context of a function that shows a step's row, by a line every `every` steps or a bar."""
    recent: list[float] = []
    val = ""
    with ExitStack() as stack:
        progress_bar = stack.enter_context(open_bar(first, last)) if bar else None
        show_note = (
            partial(say, COMPILING) if progress_bar is None else partial(progress_bar.set_postfix_str, COMPILING)
        )
        waiting = stack.enter_context(elapsing(progress_bar, "first step"))
        stack.enter_context(on_first_compile(show_note))

        def show(row: Mapping[str, Any]) -> None:
            nonlocal val
            is_first = row["step"] == first + 1
            waiting()
            if not is_first:
                recent[:] = [*recent[1 - RECENT :], row["step_s"]]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            val = f"  val {row['val_loss']:.4f}" if "val_loss" in row else val
            speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {100 * row['mfu']:.0f}%"
            if progress_bar is not None:
                progress_bar.set_postfix_str(f"loss {loss}{val}  {speed}", refresh=False)
                progress_bar.update()
                if is_first:  # the bar counts its rate from here on
                    progress_bar.initial, progress_bar.start_t = progress_bar.n, progress_bar.last_print_t
            elif row["step"] % every == 0 or is_first or row["step"] == last or "val_loss" in row:
                eta = f"  ETA {format_duration((last - row['step']) * sum(recent) / len(recent))}" if recent else ""
                say(f"step {row['step']}/{last}  loss {loss}{val}  {speed}{eta}{'  SKIPPED' * bool(row['skipped'])}")

        yield show


def open_bar(first: int, last: int) -> Any:
    """A progress bar on stderr."""
    return sized_bar(total=last, initial=first, unit="step")


def sized_bar(**options: Any) -> Any:
    """A bar of tqdm on stderr that follows the terminal's width; one of 0 columns is taken for 80."""
    from tqdm import tqdm

    columns = rows = 1  # where stderr is no terminal tqdm decides
    with contextlib.suppress(OSError, ValueError):
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    size: dict[str, Any] = (
        {"dynamic_ncols": True} if columns and rows else {"ncols": columns or COLUMNS, "nrows": rows or ROWS}
    )
    return tqdm(**options, **size)


@contextlib.contextmanager
def elapsing(progress_bar: Any, text: str) -> Iterator[Callable[[], None]]:
    """A context in which a bar says `text` and counts seconds."""
    end = threading.Event()

    def count() -> None:
        while not end.wait(1.0):
            progress_bar.refresh()

    if progress_bar is not None:
        progress_bar.set_postfix_str(text)
        threading.Thread(target=count, name="fzero-progress", daemon=True).start()
    try:
        yield end.set
    finally:
        end.set()


def format_duration(seconds: float) -> str:
    """A duration in words: 0:42, 12:05, 3:00:00."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def losses_by_source(config: RunConfig, sums: dict[str, float], name: str = "loss") -> dict[str, dict[str, float]]:
    """{"loss_by_source": {source: nats a token}} of the sums of `models.by_source`, which leave `sums`.

    >>> from fzero.run.config.run_config import Data
    >>> config = RunConfig(data=Data(mixture="web:1,code:1"))
    >>> losses_by_source(config, {"source_loss/0": 6.0, "source_tokens/0": 2.0, "source_tokens/1": 0.0})
    {'loss_by_source': {'web': 3.0}}
    """
    losses, names = {}, Mixture.parse(config.data.mixture).names if config.data.mixture else ()
    for i, source in enumerate(names):
        loss, tokens = (sums.pop(f"{kind}/{i}", 0.0) for kind in KINDS)
        if tokens:
            losses[source] = loss / tokens
    return {f"{name}_by_source": losses} if losses else {}


class StepMeasurement(NamedTuple):
    """A step that was made, or given to a GPU: what its row is made of."""

    step: int  # the run's step number, from 1 on
    names: tuple[str, ...]  # of its numbers
    numbers: Copied  # float64 [names], on their way to the host, copied after the step's end
    moments: tuple[Any, Any]  # of the clock: the step's begin and its end
    data_s: float  # waiting for the batch
    measured: dict[str, Any]  # fields of the row that are known already


def pack_numbers(metrics: Metrics) -> tuple[tuple[str, ...], Tensor]:
    """(the names of a step's numbers, the numbers as float64 [names])."""
    numbers = {
        "loss": metrics.loss,
        **metrics.extra,
        **norms.imbalance(metrics.tables),
        "grad_norm": metrics.grad_norm,
        "loss_scale": metrics.loss_scale,
        "skipped": metrics.skipped,
        "num_tokens": metrics.num_tokens,
    }
    if isinstance(metrics.speculated, Tensor) and isinstance(metrics.put_right, Tensor):
        numbers |= {"speculated": metrics.speculated, "put_right": metrics.put_right}
    if isinstance(metrics.recomputed, Tensor):
        numbers["recomputed"] = metrics.recomputed
    # float64 holds all of them exactly.
    return tuple(numbers), torch.stack([value.to(metrics.loss.device, torch.float64) for value in numbers.values()])


def metrics_row(job: Job, metrics: Metrics, step: int) -> dict[str, Any]:
    """The row of a step's metrics, with None for numbers that are not finite."""
    names, values = pack_numbers(metrics)
    return numbers_row(job, dict(zip(names, values.tolist())), step)


def numbers_row(job: Job, read: dict[str, float], step: int) -> dict[str, Any]:
    """`metrics_row` of numbers that are in the host's memory, by name."""
    skipped, num_tokens, scale = bool(read.pop("skipped")), read.pop("num_tokens"), read.pop("loss_scale")
    if not job.config.data.token_weights:  # else it is the sum of the weights
        num_tokens = int(num_tokens)
    layers = {name: int(read.pop(name)) for name in ("speculated", "put_right", "recomputed") if name in read}
    by_source = losses_by_source(job.config, read)
    rate = float(job.schedule(step)) * read.get(LR_SCALE, 1.0)
    values = {**read, "lr": rate, "loss_scale": scale}
    values = {name: value if math.isfinite(value) else None for name, value in values.items()}
    row = {"step": step + 1, **values, "skipped": skipped, "num_tokens": num_tokens, **layers, **by_source}
    if row["skipped"]:
        finite = values["loss"] is not None and values["grad_norm"] is not None
        row["reason"] = "nonfinite" if not finite else "spike" if num_tokens else "empty"
    return row


class Meter:
    """The times and rates in the rows of an attempt after step `first`; every rank has one."""

    def __init__(self, job: Job, flop: TokenFlop, peak_flops: float, first: int = 0) -> None:
        self.job, self.flop, self.peak = job, flop, peak_flops
        nvme = job.nvme
        self.clock = Clock(job.device, waited=None if nvme is None else lambda: nvme.traffic().waited_s)
        self.tokens = job.config.train.batch * job.config.data.seq_len
        self.first, self.past_tokens = first, count_tokens(job.config, first)
        self.every = job.config.train.measure_every
        self.spent = RankTimes()
        self.began: Any = None
        self.waited = 0.0
        self.clock.phases = self.splits(first + 1)

    def measures(self, step: int) -> bool:
        """Whether step `step` is one of those that are measured: every `train.measure_every`."""
        return self.every > 0 and step % self.every == 0

    def splits(self, step: int) -> bool:
        """Whether the time of step `step` is split over phases."""
        return self.job.device == HOST or self.measures(step)

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch. A step begins with this call."""
        self.began, begin = self.clock.timestamp(), time.perf_counter()
        with self.job.mesh.ledger.phase("data"):
            batch = next(batches)
        self.waited = time.perf_counter() - begin
        return batch

    def end_step(self, state: TrainState, metrics: Metrics, step: int) -> StepMeasurement:
        """The end of the step that made `state`, numbered `step`; on a GPU it waits for a measured step alone."""
        (names, values), measured = pack_numbers(metrics), {}
        end = self.clock.timestamp()
        numbers = copy_out(values)
        if self.measures(step):
            measured = self.norms(state, metrics) | self.experts(state, metrics) | memory_row(self.job.device)
        return StepMeasurement(step, names, numbers, (self.began, end), self.waited, measured)

    def row(self, measurement: StepMeasurement) -> dict[str, Any]:
        """The numbers of a step, its speed and measurements; waits for a GPU."""
        row = numbers_row(
            self.job, dict(zip(measurement.names, measurement.numbers.finish().tolist())), measurement.step - 1
        )
        spent = self.clock.seconds(*measurement.moments)
        rate = self.tokens / spent
        share = rate / self.peak
        rates = {
            "tokens": self.past_tokens + (measurement.step - self.first) * self.tokens,
            "step_s": spent,
            "data_s": measurement.data_s,
            "tokens_per_s": rate,
            "mfu": share * self.flop.model,
            "mfu_causal": share * self.flop.model_causal,
            "hfu": share * self.flop.hardware,
            "hfu_causal": share * self.flop.hardware_causal,
        }
        return row | rates | measurement.measured

    def norms(self, state: TrainState, metrics: Metrics) -> dict[str, Any]:
        """The norms of gradients and parameters by layer, of a step that is measured."""
        plan, mesh = self.job.plan, self.job.mesh
        # A step that measures has both.
        assert not isinstance(metrics.squares, tuple) and not isinstance(metrics.factor, tuple)
        grads = norms.segment_norms(
            norms.sums(metrics.squares),
            {name: spec for name, (_, spec) in plan.terms.items()},
            mesh,
            plan.trained(plan.like),
            float(metrics.factor),
        )
        params = norms.segment_norms(norms.of_params(state.params), plan.params, mesh, plan.like)
        return {"grad_norms": grads, "param_norms": params}

    def experts(self, state: TrainState, metrics: Metrics) -> dict[str, Any]:
        """How the tokens of a step that is measured are spread over the experts; {} without any."""
        top_k = getattr(self.job.model.config, "top_k", 1)
        return norms.spread_of(metrics.tables, state.params, self.job.plan, top_k)

    def cut(self, step: int) -> ClockSpan:
        """The time since the row before, which ends here with that of step `step`, for `times`."""
        stretch = self.clock.cut()
        self.clock.phases = self.splits(step + 1)
        return stretch

    def times(self, stretch: ClockSpan, step: int, recorder: str) -> dict[str, Any]:
        """The seconds of a stretch by phase, and every `train.measure_every` steps those of all ranks."""
        times = self.clock.read(stretch)
        row: dict[str, Any] = {"wall_s": times.wall}
        if times.phases:
            if not recorder:
                self.spent.add(times)
            comm = {axis: comm._asdict() for axis, comm in sorted(times.comm.items())}
            row |= {"phases": times.phases, "comm": comm}
        if self.measures(step):
            row["ranks"] = self.spent.gather(self.job.mesh)
        return row | ({"recorded": recorder} if recorder else {})


def memory_row(device: torch.device) -> dict[str, Any]:
    """The memory of a GPU and of this process since the last call; {} for a CPU."""
    # Nothing is waited for: the allocator counts when an operator is given to the GPU.
    if device == HOST:
        return {}
    usage = memory_of(device)
    reset_peak(device)
    ratio = {"gpu_reserved_ratio": usage.reserved / usage.peak} if usage.peak else {}
    return {
        "gpu_peak_bytes": usage.peak,
        "gpu_reserved_bytes": usage.reserved,
        **ratio,
        "rss_peak_bytes": process_peak_bytes(),
    }


def process_peak_bytes() -> int:
    """The most of the host's memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def metrics_writer(
    folder: Path,
    first: int,
    show: Callable[[Mapping[str, Any]], None],
    loggers: Sequence[str],
    config: Mapping[str, Any],
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context of a function that writes a step's row to metrics.jsonl, the terminal and the loggers."""
    path = folder / run_folder.METRICS
    with ExitStack() as stack:
        file = open(open_to_write(path, "append"), "a", encoding="utf-8")  # noqa: SIM115  (closed by the stack)
        cut_half_line(file.fileno())
        stack.callback(lambda: close_flushed(file))
        log = stack.enter_context(open_loggers(loggers, folder, first=first, config=config))

        def record(row: Mapping[str, Any]) -> None:
            nonlocal file
            if not is_same_file(file.fileno(), path):
                run_lock.expect_owned(folder)  # of a folder that is moved or removed the run ends
                print(
                    f"fzero: {path}: was moved or removed while the run goes on; the rows from step {row['step']} on "
                    "are in a new file",
                    file=sys.stderr,
                    flush=True,
                )
                close_flushed(file)
                file = open(open_to_write(path, "append"), "a", encoding="utf-8")  # noqa: SIM115
            with naming(path):
                file.write(json_text(row, str(path)) + "\n")
                file.flush()
            log(row["step"], row)
            show(row)

        yield record


def is_same_file(fd: int, path: Path) -> bool:
    """Whether a file that is open is the one at this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def close_flushed(file: IO[str]) -> None:
    """Close a file that was flushed after every write."""
    with contextlib.suppress(OSError):
        file.close()
