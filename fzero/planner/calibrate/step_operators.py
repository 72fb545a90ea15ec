"""Training steps of small models with each operator timed in place: the rates of operations as a step uses them.

LADDER has sizes of its own; a plan interpolates others on the curves. The host's overhead is the difference between two
depths of a model too small to compute anything.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.compile import jit
from fzero.core.torch_private import TorchDispatchMode
from fzero.kernels.attention_tiled import MAX_BLOCKS, MIN_BLOCK
from fzero.planner.calibrate.case_timer import Case, Figure, clock, figure, on_threads, time_cases
from fzero.planner.operations import ExecutedOp, describe_op, layout
from fzero.run.config.config_table import from_table
from fzero.run.setup.build import Job, build, first_state
from fzero.sharding import one_process

FAMILIES = {"llama": "llama-tiny", "gpt2": "gpt2-tiny", "mixtral": "mixtral-tiny"}


class Sizes(NamedTuple):
    """The sizes of a step to record."""

    family: str
    d_model: int
    n_layers: int
    seq_len: int
    batch: int
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        return self.seq_len * self.batch


# Longer sequences than blockwise attention handles on a CPU without small products (attention_tiled.py): torch's own
# attention computes them.
LONG = Sizes("llama", 64, 1, MIN_BLOCK * MAX_BLOCKS + 128, 1)
LADDER = (
    Sizes("llama", 64, 2, 64, 2),
    Sizes("llama", 128, 2, 128, 4, "muon"),
    Sizes("gpt2", 192, 2, 192, 4),
    Sizes("mixtral", 128, 1, 128, 4),
    Sizes("llama", 320, 2, 256, 4, "muon"),
    Sizes("gpt2", 384, 1, 512, 2),
    Sizes("llama", 512, 1, 1024, 2),
    LONG,
)
QUICK = (*LADDER[:3], LONG)
EMPTY = Sizes("llama", 16, 1, 8, 1)  # computes next to nothing
DEEPER = 3  # layers of the deeper of two models


def job_of(sizes: Sizes, precision: str, compiled: bool = False) -> Job:
    """The job of a step of these sizes, in this process alone."""
    heads = max(1, sizes.d_model // 64)
    model: dict[str, Any] = {
        "d_model": sizes.d_model,
        "n_layers": sizes.n_layers,
        "n_heads": heads,
        "d_ff": sizes.d_model * 11 // 4,
    }
    if sizes.family != "gpt2":
        model["n_kv_heads"] = max(1, heads // 2) if heads % 2 == 0 else heads
    model["max_len"] = max(1024, sizes.seq_len)
    train = {"batch": sizes.batch, "micro_batch": sizes.batch, "compiled": compiled}
    table = {"preset": FAMILIES[sizes.family], "model": model, "data": {"seq_len": sizes.seq_len}, "train": train}
    table["precision"] = {"policy": precision, "fp32_matmul": "default"}
    table["optim"] = {"name": sizes.optimizer}
    return build(from_table(table), one_process())  # each of several processes measures by itself


def batch_of(sizes: Sizes, vocab: int) -> dict[str, Tensor]:
    """Random tokens."""
    tokens = torch.randint(0, vocab, (sizes.batch, sizes.seq_len + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class TimedOp(NamedTuple):
    """A timed operator."""

    op: ExecutedOp
    layout: str  # for a product, see `layout`
    inside: bool  # of a compiled graph, whose products write into its own buffers (aten.mm.out)
    s: float


class OpTimer(TorchDispatchMode):
    """A context that calls `report(ran)` for each operator that runs in it."""

    def __init__(self, timer: Callable[[], float], report: Callable[[TimedOp], None]):
        super().__init__()
        self.now, self.report = timer, report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = self.now()
        out = func(*args, **(kwargs or {}))
        took = self.now() - begin
        op = describe_op(func, args, kwargs or {}, out, "", None)
        if op is not None:
            operands = [x for x in args if isinstance(x, Tensor)] if op.kind == "gemm" else []
            self.report(TimedOp(op, layout(operands) if operands else "", func._overloadname == "out", took))
        return out


class Step(NamedTuple):
    """The seconds of a whole step, those of its operators, and their number."""

    s: float
    ops_s: float
    ops: int


class RecordedFigures(NamedTuple):
    """The figures of recorded steps."""

    # "name/dtype" and "kind/dtype" -> bytes moved, or FLOP of attention -> Figure
    kernels: dict[str, dict[float, Figure]]
    gemm: dict[str, dict[tuple[int, ...], Figure]]  # as in products
    steps: list[Step]


def record(
    seconds: float, *, threads: int = 1, ladder: Sequence[Sizes] = LADDER, precisions: Sequence[str] = ("bf16", "fp32")
) -> RecordedFigures:
    """Measure the operators of the steps of `ladder`, in turns for `seconds`, at least twice each."""
    programs = []
    for sizes in ladder:
        for precision in precisions:
            job = job_of(sizes, precision)
            programs.append([job, first_state(job), batch_of(sizes, job.model.config.vocab_size)])
    # Samples are kept by job and position in its step, as operators of one size differ in shape: the figure of a
    # position is a quartile, the figure of a size the mean over positions.
    samples: dict[tuple[int, int], tuple[TimedOp, list[float]]] = {}
    step_samples: dict[int, list[float]] = {}
    timer = clock(threads)
    end, turn = time.perf_counter() + seconds, 0
    with on_threads(threads):
        while turn < 3 or time.perf_counter() < end:
            for number, entry in enumerate(programs):
                job, state, batch = entry
                if turn < 3 or time.perf_counter() < end:
                    places = itertools.count()

                    def add_sample(ran: TimedOp, number: int = number, places: Iterator[int] = places) -> None:
                        samples.setdefault((number, next(places)), (ran, []))[1].append(ran.s)

                    with (
                        OpTimer(timer, add_sample) if turn else contextlib.nullcontext()
                    ):  # the first step allocates buffers and compiles kernels
                        state, _ = job.train_step(state, batch)
                    begin = timer()
                    entry[1], _ = job.train_step(state, batch)
                    step_samples.setdefault(number, []).append(timer() - begin)
            turn += 1
    kernels: dict[str, dict[float, list[Figure]]] = {}
    products: dict[str, dict[tuple[int, ...], list[Figure]]] = {}
    for ran, took in samples.values():
        op = ran.op
        if op.kind == "gemm":
            products.setdefault(op.dtype + ran.layout, {}).setdefault(op.shape, []).append(figure(took))
        elif size := op.flop if op.kind == "attention" else op.bytes:
            for key in (f"{op.name}/{op.dtype}", f"{op.kind}/{op.dtype}"):
                kernels.setdefault(key, {}).setdefault(float(size), []).append(figure(took))
    steps = []
    for number, took in step_samples.items():
        places = [figure(entry).s for (job, _), (_, entry) in samples.items() if job == number]
        steps.append(Step(figure(took).s, sum(places), len(places)))
    return RecordedFigures(_means(kernels), _means(products), steps)


def host_of(steps: Sequence[Step], dispatch_s: float) -> float:
    """The host's seconds for an operator: the median of the steps' other time by their operators."""
    return max(statistics.median((step.s - step.ops_s) / step.ops for step in steps) + dispatch_s, 1e-7)


def _means(tables: dict[str, dict[Any, list[Figure]]]) -> dict[str, dict[Any, Figure]]:
    return {
        key: {
            size: Figure(statistics.fmean(f.s for f in figures), statistics.median(f.spread for f in figures))
            for size, figures in sizes.items()
        }
        for key, sizes in tables.items()
    }


class Overhead(NamedTuple):
    """The host's seconds for an operator, a compiled graph's call, a kernel in one, and a step besides."""

    op_s: dict[str, float]
    step_s: dict[str, float]


def measure_overhead(seconds: float, *, compiled: bool, threads: int = 1) -> Overhead:
    """The Overhead of steps that compute next to nothing, uncompiled and compiled, from two depths."""
    pairs = {
        way: [_Counted(depth, way == "compiled", threads) for depth in (1, DEEPER)]
        for way in ("eager", "compiled")[: 1 + compiled]
    }
    kernel_s = _kernel_s() if compiled else 0.0
    samples: dict[tuple[str, int], list[float]] = {}
    end, timer = time.perf_counter() + seconds, clock(threads)
    with on_threads(threads):
        while len(samples) < 2 * len(pairs) or time.perf_counter() < end:
            for way, pair in pairs.items():
                for i, program in enumerate(pair):
                    begin = timer()
                    program.step()
                    samples.setdefault((way, i), []).append(timer() - begin)
    took = {way: [figure(samples[way, i]).s for i in (0, 1)] for way in pairs}
    shallow, deep = pairs["eager"]
    eager_s = max((took["eager"][1] - took["eager"][0]) / (deep.outside - shallow.outside), 1e-7)
    op_s, step_s = {"eager": eager_s}, {"eager": max(took["eager"][0] - shallow.outside * eager_s, 0.0)}
    if compiled:
        shallow, deep = pairs["compiled"]
        operator_s = [program.outside * eager_s + program.inside * kernel_s for program in (shallow, deep)]
        calls = 2 * (DEEPER - 1)
        op_s["compiled"] = max(
            (took["compiled"][1] - took["compiled"][0] - (operator_s[1] - operator_s[0])) / calls, 1e-7
        )
        op_s["kernel"] = kernel_s
        step_s["compiled"] = max(took["compiled"][0] - operator_s[0] - 2 * op_s["compiled"], 0.0)
    return Overhead(op_s, step_s)


class _Counted:
    """A step with its state, and the numbers of its operators outside and inside of compiled graphs."""

    def __init__(self, depth: int, compiled: bool, threads: int):
        sizes = EMPTY._replace(n_layers=depth)
        self.job = job_of(sizes, "fp32", compiled)
        self.batch = batch_of(sizes, self.job.model.config.vocab_size)
        self.state = first_state(self.job)
        self.outside = self.inside = 0
        with on_threads(threads):
            self.step()
            self.step()
            with OpTimer(lambda: 0.0, self._count):
                self.step()

    def step(self) -> None:
        self.state, _ = self.job.train_step(self.state, self.batch)

    def _count(self, ran: TimedOp) -> None:
        # Fused kernels are not operators and not counted: their time is part of the graph's own.
        self.inside += ran.inside
        self.outside += not ran.inside


def _kernel_s() -> float:
    """The seconds of a tiny product inside a compiled graph, with its share of the graph's Python."""
    x, lengths = torch.ones(8, 8), (2, 18)
    took = []
    for length in lengths:

        def chain(x: Tensor, length: int = length) -> list[Tensor]:
            y = x
            for _ in range(length):
                y = y @ x
            return [y]

        run = jit(chain)
        case = Case((length,), lambda run=run: lambda: run(x))
        took.append(time_cases([case], 0.2, rounds=50)[(length,)].min_s)
    return max((took[1] - took[0]) / (lengths[1] - lengths[0]), 1e-7)
