"""Training steps of small models, each operator timed where it runs: the rates of operations as a step uses them.

The sizes are a ladder of their own; a plan reads other sizes off the curves. What the host does besides (Python, autograd, dispatch) is the
difference of two depths of a model too small to compute anything.
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
from fzero.kernels.attention_blocked import MAX_BLOCKS, MIN_BLOCK
from fzero.planner.calibrate.timed import Case, Figure, clock, figure, on_threads, time_cases
from fzero.planner.operations import Op, describe_op
from fzero.run.build import Job, build, first_state
from fzero.run.config_table import from_table
from fzero.sharding import one_process

FAMILIES = {"llama": "llama-tiny", "gpt2": "gpt2-tiny", "mixtral": "mixtral-tiny"}


class Sizes(NamedTuple):
    """A step to record."""

    family: str
    d_model: int
    n_layers: int
    seq_len: int
    batch: int
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq_len * self.batch


# Beyond the sequences that attention by blocks serves: on a CPU without small products (see kernels/tiled.py), torch's own takes these.
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
DEEPER = 3


def program_of(sizes: Sizes, precision: str, compiled: bool = False) -> Job:
    """The program of a step of these sizes, on this process alone."""
    heads = max(1, sizes.d_model // 64)
    model: dict[str, Any] = {"d_model": sizes.d_model, "n_layers": sizes.n_layers, "n_heads": heads, "d_ff": sizes.d_model * 11 // 4}
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


class Ran(NamedTuple):
    """An operator that ran."""

    op: Op
    layout: str  # of a product, see `layout`
    inside: bool  # of a compiled graph, which has its products written into buffers of its own (aten.mm.out)
    s: float


class Watching(TorchDispatchMode):
    """Calls `told(ran)` for each operator that runs while this is entered."""

    def __init__(self, now: Callable[[], float], told: Callable[[Ran], None]):
        super().__init__()
        self.now, self.told = now, told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = self.now()
        out = func(*args, **(kwargs or {}))
        took = self.now() - begin
        op = describe_op(func, args, kwargs or {}, out, "", None)
        if op is not None:
            self.told(Ran(op, layout(args) if op.kind == "gemm" else "", func._overloadname == "out", took))
        return out


def layout(args: Sequence[Any]) -> str:
    """Which operand of a product is a transpose: "/tn" the first, "/nt" the second, "" none."""
    a, b = [x for x in args if isinstance(x, Tensor)][-2:]
    by_columns = [x.dim() > 1 and x.stride(-2) == 1 < x.stride(-1) for x in (a, b)]
    return "/tn" if by_columns[0] else "/nt" if by_columns[1] else ""


class Step(NamedTuple):
    """A whole step: its seconds, those of its operators, and their number."""

    s: float
    ops_s: float
    ops: int


class Recorded(NamedTuple):
    """What recorded steps took."""

    kernels: dict[str, dict[float, Figure]]  # "name/dtype" and "kind/dtype" -> bytes moved, or FLOP of attention -> Figure
    gemm: dict[str, dict[tuple[int, ...], Figure]]  # as in products
    steps: list[Step]


def record(seconds: float, *, threads: int = 1, ladder: Sequence[Sizes] = LADDER, precisions: Sequence[str] = ("bf16", "fp32")) -> Recorded:
    """The figures of the operators of the steps of `ladder`, which take turns for `seconds`; two rounds of timing at least."""
    programs = []
    for sizes in ladder:
        for precision in precisions:
            program = program_of(sizes, precision)
            programs.append([program, first_state(program), batch_of(sizes, program.model.config.vocab_size)])
    # By program and place in its step, as the operators of one size differ in shape: of one place the quartile, of several places the mean.
    samples: dict[tuple[int, int], tuple[Ran, list[float]]] = {}
    whole: dict[int, list[float]] = {}
    now = clock(threads)
    end, turn = time.perf_counter() + seconds, 0
    with on_threads(threads):
        while turn < 3 or time.perf_counter() < end:
            for number, each in enumerate(programs):
                program, state, batch = each
                if turn < 3 or time.perf_counter() < end:
                    places = itertools.count()

                    def told(ran: Ran, number: int = number, places: Iterator[int] = places) -> None:
                        samples.setdefault((number, next(places)), (ran, []))[1].append(ran.s)

                    with Watching(now, told) if turn else contextlib.nullcontext():  # the first step prepares kernels and buffers
                        state, _ = program.train_step(state, batch)
                    begin = now()
                    each[1], _ = program.train_step(state, batch)
                    whole.setdefault(number, []).append(now() - begin)
            turn += 1
    kernels: dict[str, dict[float, list[Figure]]] = {}
    products: dict[str, dict[tuple[int, ...], list[Figure]]] = {}
    for (op, layout, *_), took in samples.values():
        if op.kind == "gemm":
            products.setdefault(op.dtype + layout, {}).setdefault(op.shape, []).append(figure(took))
        elif size := op.flop if op.kind == "attention" else op.bytes:
            for key in (f"{op.name}/{op.dtype}", f"{op.kind}/{op.dtype}"):
                kernels.setdefault(key, {}).setdefault(float(size), []).append(figure(took))
    found = []
    for number, took in whole.items():
        places = [figure(each).s for (program, _), (_, each) in samples.items() if program == number]
        found.append(Step(figure(took).s, sum(places), len(places)))
    return Recorded(_means(kernels), _means(products), found)


def host_of(found: Sequence[Step], dispatch_s: float) -> float:
    """The seconds of the host for an operator: what steps take besides their operators, by the number of these; the median of the steps.

    dispatch_s: of an operator next to empty; it is part of each operator's own seconds, and counted with the host's here. The host takes
    more than in a step that computes nothing, as operators push its code and data out of the caches.
    """
    return max(statistics.median((step.s - step.ops_s) / step.ops for step in found) + dispatch_s, 1e-7)


def _means(found: dict[str, dict[Any, list[Figure]]]) -> dict[str, dict[Any, Figure]]:
    return {
        key: {size: Figure(statistics.fmean(f.s for f in each), statistics.median(f.spread for f in each)) for size, each in sizes.items()}
        for key, sizes in found.items()
    }


class Overhead(NamedTuple):
    """What the host does: seconds for an operator ("eager"), a call of a compiled graph, a kernel inside one, and for each step besides."""

    op_s: dict[str, float]
    step_s: dict[str, float]


def measure_overhead(seconds: float, *, compiled: bool, threads: int = 1) -> Overhead:
    """The Overhead of steps that compute next to nothing, uncompiled and (where asked) compiled, from two depths of each.

    A call of a compiled graph is what a layer more takes of two calls, less what is known of the operators around and of the kernels in it.
    """
    pairs = {way: [_Counted(depth, way == "compiled", threads) for depth in (1, DEEPER)] for way in ("eager", "compiled")[: 1 + compiled]}
    kernel_s = _kernel_s() if compiled else 0.0
    samples: dict[tuple[str, int], list[float]] = {}
    end, now = time.perf_counter() + seconds, clock(threads)
    with on_threads(threads):
        while len(samples) < 2 * len(pairs) or time.perf_counter() < end:
            for way, pair in pairs.items():
                for i, each in enumerate(pair):
                    begin = now()
                    each.step()
                    samples.setdefault((way, i), []).append(now() - begin)
    took = {way: [figure(samples[way, i]).s for i in (0, 1)] for way in pairs}
    shallow, deep = pairs["eager"]
    eager_s = max((took["eager"][1] - took["eager"][0]) / (deep.outside - shallow.outside), 1e-7)
    op_s, step_s = {"eager": eager_s}, {"eager": max(took["eager"][0] - shallow.outside * eager_s, 0.0)}
    if compiled:
        shallow, deep = pairs["compiled"]
        known = [each.outside * eager_s + each.inside * kernel_s for each in (shallow, deep)]
        calls = 2 * (DEEPER - 1)
        op_s["compiled"] = max((took["compiled"][1] - took["compiled"][0] - (known[1] - known[0])) / calls, 1e-7)
        op_s["kernel"] = kernel_s
        step_s["compiled"] = max(took["compiled"][0] - known[0] - 2 * op_s["compiled"], 0.0)
    return Overhead(op_s, step_s)


class _Counted:
    """A step with its state, and the number of its operators outside and inside of compiled graphs."""

    def __init__(self, depth: int, compiled: bool, threads: int):
        sizes = EMPTY._replace(n_layers=depth)
        self.program = program_of(sizes, "fp32", compiled)
        self.batch = batch_of(sizes, self.program.model.config.vocab_size)
        self.state = first_state(self.program)
        self.outside = self.inside = 0
        with on_threads(threads):
            self.step()
            self.step()
            with Watching(lambda: 0.0, self._told):
                self.step()

    def step(self) -> None:
        self.state, _ = self.program.train_step(self.state, self.batch)

    def _told(self, ran: Ran) -> None:
        # The fused kernels of a graph are no operators, and not seen: they are part of the graph's own time.
        self.inside += ran.inside
        self.outside += not ran.inside


def _kernel_s() -> float:
    """The seconds of a tiny product inside a compiled graph: of the graph's own Python, an allocation, and the call."""
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
        took.append(time_cases([case], 0.2, rounds=50)[(length,)].least)
    return max((took[1] - took[0]) / (lengths[1] - lengths[0]), 1e-7)
