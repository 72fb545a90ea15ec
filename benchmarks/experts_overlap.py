"""Experts of two ranks whose exchanges take a set time: computing beside them, and one after the other.

    python benchmarks/experts_overlap.py --out benchmarks/results/experts-overlap.json
    python benchmarks/experts_overlap.py --smoke

A rank's link passes so many bytes a second, one message after another, without a core: a thread sleeps for as long, and
sends then. Sleeping: both passes of one mixture whose experts and shared expert sleep, by rows; so the
gain is that of a machine with cores to spare. Products: steps of a DeepSeek and of a Mixtral, eager and compiled, by
links as fast as makes an exchange last a set share of the step without links. Forms take turns, one call each a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bubble import sleep
from spawned import answer_of_ranks
from torch import Tensor
from turns import write_run

import fzero
from fzero import models, optim
from fzero.comm.messages import AxisMessages
from fzero.core.gpu_copies import Future
from fzero.models import experts as block
from fzero.sharding import ActivationSplit, Mesh
from fzero.sharding.experts import Experts

RANKS = 2
# Each is (whether the shared expert is computed beside the exchange, parts of the tokens).
FORMS = {"after": (False, 1), "beside": (True, 1), "after, 2 parts": (False, 2), "beside, 2 parts": (True, 2)}
TOKENS, WIDTH, CHOICES, EXPERTS = 512, 64, 2, 8  # of a rank, where experts sleep
SIZES = {"vocab_size": 256, "max_len": 256, "d_model": 256, "n_heads": 4, "n_layers": 2, "n_experts": 8, "top_k": 2}
MODELS = {
    "deepseek": models.DeepSeekConfig(
        **SIZES, n_dense=1, q_rank=0, kv_rank=64, nope_dim=32, rope_dim=32, value_dim=64, d_ff=512, n_groups=2,
        top_groups=2, d_expert=256, n_shared=2, init_std=0.02,
    ),
    "mixtral": models.MoEConfig(**SIZES, n_kv_heads=4, d_ff=256),
}  # fmt: skip


class Link:
    """What a rank sends others by: `bytes_s` bytes a second, one message after another; 0: at once."""

    def __init__(self) -> None:
        self.bytes_s, self.waited, self.thread = 0.0, 0.0, ThreadPoolExecutor(1)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """A context in which exchanges of rows go over this link."""
        real = AxisMessages.exchange

        def exchange(messages: AxisMessages, call: Any, sends: Mapping[int, Tensor], *rest: Any, **more: Any) -> Any:
            if call.collective != "exchange_rows" or not self.bytes_s:
                return real(messages, call, sends, *rest, **more)
            seconds = sum(t.numel() * t.element_size() for t in sends.values()) / self.bytes_s

            def send() -> Any:
                time.sleep(seconds)
                return real(messages, call, sends, *rest, **more)

            sent = self.thread.submit(send)

            def arrive() -> Any:
                begin = time.perf_counter()
                value = sent.result().wait()
                self.waited += time.perf_counter() - begin
                return value

            return Future(arrive)

        with mock.patch.object(AxisMessages, "exchange", exchange):
            yield


@contextlib.contextmanager
def in_turn(beside: bool) -> Iterator[None]:
    """A context in which what may be computed beside an exchange is computed after the mixture, unless `beside`."""
    real = block.mixture

    def mixture(*args: Any) -> Tensor:
        *args, more = args
        return block.add_overlap(real(*args), more)

    with mock.patch.object(sys.modules["fzero.models.deepseek"], "mixture", real if beside else mixture):
        yield


# ---- sleeping --------------------------------------------------------------------------------------------------------


class Slept(torch.autograd.Function):
    """x, whose forward pass takes so many seconds, and whose backward pass twice as many."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seconds: float) -> Tensor:
        return sleep(x, seconds)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sleep(grad, 2 * ctx.seconds), None


def sleeping_call(mesh: Mesh, form: str, order: dict[str, Any]) -> Callable[[], None]:
    """Both passes of a mixture with an even load, by a form."""
    beside, parts = FORMS[form]
    ctx = models.Ctx(mesh=mesh, split=ActivationSplit(experts=Experts("exchange", 2.0, parts)))
    x = torch.randn(1, TOKENS, WIDTH)
    ids = (torch.arange(TOKENS)[:, None] + torch.tensor([0, EXPERTS // 2]))[None] % EXPERTS
    weights, how = torch.rand(1, TOKENS, CHOICES), block.ExpertMixture(EXPERTS)
    shared = lambda x: Slept.apply(x, order["shared_s"])  # noqa: E731

    def run(x: Tensor, weights: Tensor) -> Tensor:
        if beside:
            return block.mixture({}, x, ids, weights, ctx, how, lambda: shared(x))
        return block.mixture({}, x, ids, weights, ctx, how) + shared(x)

    def call() -> None:
        _, pull = torch.func.vjp(run, x, weights)[:2]
        pull(x)

    return call


@contextlib.contextmanager
def sleeping(order: dict[str, Any]) -> Iterator[None]:
    """A context in which a rank's experts sleep: experts_s for the rows of an even load."""
    even = TOKENS * CHOICES

    def feed_forward(p: Any, rows: Tensor, ends: Tensor, ctx: Any, gate: Any) -> Tensor:
        return Slept.apply(rows, order["experts_s"] * int(ends[-1]) / even)

    with mock.patch.object(block, "feed_forward_prefix", feed_forward):
        yield


# ---- products --------------------------------------------------------------------------------------------------------


def step_of(mesh: Mesh, name: str, form: str, compiled: bool) -> Callable[[], None]:
    """A step of a model by a form."""
    model, tx, (beside, parts) = models.build(MODELS[name]), optim.adamw(1e-3), FORMS[form]
    plan = fzero.zero_plan(0, model, mesh).with_experts(Experts("exchange", 2.0, parts))
    train_step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=compiled))
    state = fzero.init_state(model, tx, plan, seed=0)
    tokens = torch.randint(0, 256, (2 * RANKS, 256), generator=torch.Generator().manual_seed(0))
    batch = fzero.local_batch({"tokens": tokens, "targets": tokens}, mesh)

    def step() -> None:
        nonlocal state
        with in_turn(beside):
            state, metrics = train_step(state, batch)
        float(metrics.loss)

    return step


# ---- the ranks -------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], None]) -> float:
    """Seconds of a call on the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def rounds(calls: dict[str, Callable[[], None]], link: Link, repeats: int) -> dict[str, Any]:
    """{form: seconds of its calls, what it slept for the link, medians}; the first round warms up."""
    took: dict[str, list[float]] = {form: [] for form in calls}
    waited: dict[str, list[float]] = {form: [] for form in calls}
    for i in range(repeats + 1):
        for form, call in calls.items():
            link.waited = 0.0
            seconds = timed(call)
            if i:
                took[form].append(seconds)
                waited[form].append(link.waited)
    base = next(iter(took.values()))
    return {
        form: {
            "seconds": found,
            "median_s": statistics.median(found),
            "spread": (max(found) - min(found)) / statistics.median(found),
            "waited_s": statistics.median(waited[form]),
            "by_first": statistics.median(a / b for a, b in zip(found, base)),
        }
        for form, found in took.items()
    }


def work(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: sends the runs of `order`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh, link, runs = fzero.make_mesh({"ep": RANKS}, device="cpu"), Link(), []
    with link.slow():
        for exchange_s in order["exchanges_s"]:
            link.bytes_s = TOKENS * CHOICES * WIDTH * 4 / RANKS / exchange_s  # of an even load
            with sleeping(order):
                found = rounds({form: sleeping_call(mesh, form, order) for form in FORMS}, link, order["repeats"])
            times = {"exchange_s": exchange_s, **{name: order[name] for name in ("experts_s", "shared_s")}}
            runs.append({"what": "sleeping", **times, "forms": found})
        for name, compiled in order["steps"]:
            forms = [form for form in FORMS if name == "deepseek" or not form.startswith("beside")]
            steps = {form: step_of(mesh, name, form, compiled) for form in forms}
            link.bytes_s = 0.0
            free = rounds({forms[0]: steps[forms[0]]}, link, order["repeats"])[forms[0]]["median_s"]
            layers = 1 if name == "deepseek" else SIZES["n_layers"]
            sent = 4 * layers * 2 * 256 * SIZES["top_k"] * SIZES["d_model"] * 4 / RANKS  # of a step, if evenly chosen
            link.bytes_s = torch.tensor(sent / (order["share"] * free))
            dist.broadcast(link.bytes_s, 0)
            link.bytes_s = float(link.bytes_s)
            found = rounds(steps, link, order["repeats"])
            about = {"model": name, "compiled": compiled, "step_without_links_s": free, "bytes_s": link.bytes_s}
            runs.append({"what": "products", **about, "forms": found})
    answer.send(runs)
    mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds of one call each")
    parser.add_argument("--exchanges", default="0.01,0.02,0.04", help="seconds of each exchange, where experts sleep")
    parser.add_argument("--experts", type=float, default=0.04, help="seconds of the experts' forward pass")
    parser.add_argument("--shared", type=float, default=0.02, help="seconds of the shared expert's")
    parser.add_argument("--share", type=float, default=0.4, help="seconds of exchanges in a step, by those without")
    parser.add_argument("--steps", type=int, default=4, help="of the four kinds of steps that compute")
    parser.add_argument("--smoke", action="store_true", help="1 round of the first of each: whether everything runs")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    steps = [(name, compiled) for name in MODELS for compiled in (False, True)]
    order = {
        "ranks": RANKS,
        "repeats": 1 if args.smoke else args.repeats,
        "exchanges_s": [float(text) for text in args.exchanges.split(",")][: 1 if args.smoke else None],
        "experts_s": args.experts,
        "shared_s": args.shared,
        "share": args.share,
        "steps": steps[: args.steps],
    }
    before = os.getloadavg()
    runs = answer_of_ranks(work, order)
    for run in runs:
        print(", ".join(f"{key} {value}" for key, value in run.items() if key != "forms"))
        for form, row in run["forms"].items():
            print(
                f"  {form:18}{row['median_s'] * 1e3:9.1f} ms{row['by_first']:8.3f} x, spread {row['spread']:.2f}, "
                f"waited {row['waited_s'] * 1e3:.1f} ms"
            )
    if args.out:
        write_run(args.out, before, torch=torch.__version__, runs=runs)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"experts_overlap.py: {error}")
