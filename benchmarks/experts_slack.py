"""Experts of two ranks: one compiled program with room to spare, beside three whose sizes are exact.

    python benchmarks/experts_slack.py --out benchmarks/results/experts-slack.json
    python benchmarks/experts_slack.py --smoke

One is fzero's form: router, exchange, experts, and exchange back are one program, whose rows have room for `--slack`
times an even load. Three is the other way: a program ends where the rows are in order; the host reads the counts, and
messages carry the rows; the next program has exactly these; a third one begins where their results are back. Both have
both passes, with the same operators, weights and tokens; their results must agree. Batches have other loads; what three
compiles for each is done before and counted beside. Forms take turns, one call each a round. Bytes: the live tensors
at the peak of a call above those before it, of each form in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from live_bytes import peak
from spawned import answer_of_ranks
from torch import Tensor
from turns import write_run

import fzero
from fzero import models
from fzero.core.vjp_pair import vjp_pair
from fzero.kernels import moe
from fzero.kernels.glu import swiglu
from fzero.models import experts as block
from fzero.sharding import ActivationSplit, Mesh
from fzero.sharding.experts import Experts, shares

RANKS, EXPERTS, CHOICES = 2, 8, 2
Call = Callable[[Tensor], list[Tensor]]  # tokens [n, D] -> their mixture, and the gradients of its inputs
AGREE = 1e-4  # of float32, over the largest


def leaves_of(mesh: Mesh, order: dict[str, Any]) -> list[Tensor]:
    """The router, and this rank's w_gate, w_up and w_down."""
    g, (d, f) = torch.Generator().manual_seed(0), (order["width"], order["units"])
    shapes = (d, EXPERTS), (EXPERTS, d, f), (EXPERTS, d, f), (EXPERTS, f, d)
    router, *whole = (torch.randn(*shape, generator=g) / shape[-2] ** 0.5 for shape in shapes)
    return [router, *(w.split(shares(EXPERTS, RANKS))[mesh["ep"].rank].clone() for w in whole)]


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, weights) of tokens."""
    ids, weights, _ = moe.route(x @ router, CHOICES)
    return ids, weights


def named(leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("w_gate", "w_up", "w_down"), leaves))


def one_program(mesh: Mesh, order: dict[str, Any]) -> Call:
    """The block as fzero compiles it."""
    split, leaves = ActivationSplit(experts=Experts("exchange", order["slack"])), leaves_of(mesh, order)
    ctx = models.Ctx(mesh=mesh, split=split)

    def f(x: Tensor, router: Tensor, *rest: Tensor) -> tuple[Tensor]:
        ids, weights = routed(x, router)
        return (block.mixture(named(rest), x[None], ids[None], weights[None], ctx, block.ExpertMixture(EXPERTS))[0],)

    pair = vjp_pair(f, 5, compiled=True)

    def call(x: Tensor) -> list[Tensor]:
        (out,), residuals = pair.forward([x, *leaves])
        return [out, *pair.backward(residuals, [out.detach()])]

    return call


def three_programs(mesh: Mesh, order: dict[str, Any]) -> Call:
    """The block in three programs, between which the host reads counts."""
    ctx, ep, leaves = models.Ctx(mesh=mesh), mesh["ep"], leaves_of(mesh, order)
    own, connection = shares(EXPERTS, RANKS), mesh["ep"].communicator
    assert connection is not None

    def begin(x: Tensor, router: Tensor) -> tuple[Tensor, ...]:
        ids, weights = routed(x, router)
        rows_in_order, place, ends = moe.group(ids, EXPERTS)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
        # A pair's results have gradients, and float64 numbers are exact.
        whole = (t.to(torch.float64) for t in (rows_in_order, place, sizes))
        return moe.permute(x, rows_in_order, place), weights, *whole

    def middle(rows: Tensor, *rest: Tensor) -> tuple[Tensor]:
        *weights, arrived = rest
        return (block.run_experts(named(tuple(weights)), rows, arrived, ctx, swiglu),)

    found = moe.group(torch.zeros(1, CHOICES, dtype=torch.int64), EXPERTS)
    dtypes = *(t.dtype for t in found[:2]), torch.int64
    first, second = vjp_pair(begin, 2, compiled=True), vjp_pair(middle, 4, compiled=True)
    third = vjp_pair(lambda *given: (moe.unpermute(*given),), 2, compiled=True)

    def exchange(x: Tensor, counts: Tensor) -> Tensor:
        """What arrives, in room for the fullest rank's."""
        here, missing = counts.sum(0), int(counts.sum(1).max()) - x.shape[0]
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x  # on the rank with fewer rows
        return connection.start_exchange_rows(x, counts, int(here.max())).wait()[: int(here[ep.rank])]

    def call(x: Tensor) -> list[Tensor]:
        (rows, weights, *whole), kept_first = first.forward([x, leaves[0]])
        sorts, place, sizes = (t.to(dtype) for t, dtype in zip(whole, dtypes, strict=True))
        table = connection.start_all_gather(sizes[None].contiguous()).wait()
        counts = torch.stack([part.sum(-1) for part in table.split(list(own), 1)], 1)
        arrived = table.split(list(own), 1)[ep.rank].contiguous()
        (y,), kept_second = second.forward([exchange(rows, counts), *leaves[1:], arrived])
        (out,), kept_third = third.forward([exchange(y, counts.t()), weights, sorts, place])
        del rows, y
        of_rows, of_weights = third.backward(kept_third, [out.detach()])
        of_rows, *of_leaves = second.backward(kept_second, [exchange(of_rows, counts)])
        none = [torch.zeros_like(t) for t in whole]
        cotangents = [exchange(of_rows, counts.t()), of_weights, *none]
        return [out, *first.backward(kept_first, cotangents), *of_leaves]

    return call


FORMS = {"one": one_program, "three": three_programs}


def batches_of(mesh: Mesh, order: dict[str, Any]) -> list[Tensor]:
    """Tokens of this rank, whose experts are chosen unevenly and otherwise each time."""
    g = torch.Generator().manual_seed(1)
    size = order["tokens"], order["width"]
    drawn = [torch.randn(RANKS, *size, generator=g) + order["alike"] * torch.randn(size[1], generator=g) for _ in
             range(order["batches"])]  # fmt: skip
    return [x[mesh["ep"].rank] for x in drawn]


def set_up(rank: int, order: dict[str, Any], port: int) -> Mesh:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)
    return fzero.make_mesh({"ep": RANKS}, device="cpu")


def bytes_of(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: sends the most bytes that a call needs above those before it, of the first batch and any rank."""
    mesh = set_up(rank, order, port)
    held: list[list[Tensor]] = []

    def setup() -> Callable[[], None]:
        call, x = FORMS[order["form"]](mesh, order), batches_of(mesh, order)[0]
        call(x)
        return lambda: held.append(call(x))

    found = peak(setup)
    most = torch.tensor(found["peak_bytes"] - found["before_bytes"])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    answer.send(int(most))
    mesh.close()


def work(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: sends the seconds of each form, and of its first calls, which compile."""
    mesh = set_up(rank, order, port)
    calls, batches = {form: make(mesh, order) for form, make in FORMS.items()}, batches_of(mesh, order)
    first: dict[str, list[float]] = {form: [] for form in FORMS}
    took: dict[str, list[float]] = {form: [] for form in FORMS}
    for x in batches:
        results = []
        for form, call in calls.items():
            begin = time.perf_counter()
            results.append(call(x))
            first[form].append(time.perf_counter() - begin)
        for a, b in zip(*results, strict=True):
            if float((a - b).abs().max()) > AGREE * float(a.abs().max()):
                raise ValueError("the forms differ")
    for i in range(order["repeats"]):
        for form, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call(batches[i % len(batches)])
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            took[form].append(float(seconds))
    answer.send({"first_s": first, "seconds": took})
    mesh.close()


def figures(order: dict[str, Any]) -> dict[str, Any]:
    """{form: its figures}."""
    found, out = answer_of_ranks(work, order), {}
    for form in FORMS:
        took = found["seconds"][form]
        most = answer_of_ranks(bytes_of, order | {"form": form})
        out[form] = {
            "seconds": took,
            "median_s": statistics.median(took),
            "spread": (max(took) - min(took)) / statistics.median(took),
            "by_one": statistics.median(a / b for a, b in zip(took, found["seconds"]["one"])),
            "first_s": found["first_s"][form],
            "bytes": most,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--units", type=int, default=512, help="of an expert")
    parser.add_argument("--slack", type=float, default=2.0)
    parser.add_argument("--alike", type=float, default=0.3, help="how alike the tokens of a batch are: uneven loads")
    parser.add_argument("--batches", type=int, default=2, help="of other loads")
    parser.add_argument("--repeats", type=int, default=21, help="rounds of one call each")
    parser.add_argument("--smoke", action="store_true", help="1 round, small: whether everything runs")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    order = {key: value for key, value in vars(args).items() if key not in ("smoke", "out")} | {"ranks": RANKS}
    if args.smoke:
        order |= {"tokens": 16, "width": 8, "units": 8, "batches": 1, "repeats": 1}
    before, found = os.getloadavg(), figures(order)
    for form, row in found.items():
        print(
            f"{form:6}{row['median_s'] * 1e3:9.1f} ms{row['by_one']:7.3f} x, spread {row['spread']:.2f}, "
            f"{row['bytes'] / 1e6:.1f} MB, first calls {', '.join(f'{seconds:.1f}' for seconds in row['first_s'])} s"
        )
    if args.out:
        write_run(args.out, before, torch=torch.__version__, **order, forms=found)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"experts_slack.py: {error}")
