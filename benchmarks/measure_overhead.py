"""What it costs a run to measure itself: steps with the records of a measured run and steps without them take turns, in
one process a rank.

    python benchmarks/measure_overhead.py [--ranks 1 2] [--pairs 40] [--set A.B=C] [--out FILE]

A pair is a step without and one with a clock on the ledger, squares by leaf, the row's times, and every
`train.measure_every` pairs the norms by layer and the times of all ranks; which comes first alternates. A ratio is that
of a pair's wall times on rank 0. On a machine with others the ratios scatter more than the cost is large, so the cost
is also counted directly: the seconds that the marks, the row and the gathers take by themselves, over the median step.
The records of memory and of the ledger, of one step an attempt, are not timed."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from turns import machine

from fzero.core.config_tables import parse_setting, set_nested
from fzero.run.config import config_table
from fzero.run.measure import metrics_rows
from fzero.run.measure.flops import token_flop
from fzero.run.measure.timer import Clock
from fzero.run.setup import build
from fzero.run.setup import machine as doctor
from fzero.sharding import make_mesh, one_process

RESULTS = Path(__file__).parent / "results" / "measure-overhead.json"
WARMUP = 4


def steps(rank: int, ranks: int, pairs: int, table: dict[str, Any], threads: int, port: int, out: Any) -> None:
    """Make the pairs of steps on one rank; rank 0 puts its figures into `out`."""
    torch.set_num_threads(threads)
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = make_mesh({"dp": ranks}, device="cpu") if ranks > 1 else one_process()
    run = config_table.from_table(table)
    run = doctor.resolve_here(replace(run, mesh={"dp": ranks} if ranks > 1 else {}))[0]
    measured = build.build(run, mesh)
    bare = build.build(replace(run, train=replace(run.train, measure_every=0)), mesh)
    meters = {
        True: metrics_rows.Meter(measured, token_flop(measured), 1e12),
        False: metrics_rows.Meter(bare, token_flop(bare), 1e12),
    }
    state, file = build.first_state(measured), open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    length, here = run.data.seq_len, run.train.batch // mesh.data_size
    batches = iter(lambda: (0, batch_of(here, length, run.model.vocab_size)), None)
    behind: dict[bool, list[float]] = {False: [], True: []}  # the seconds of the rows, behind their steps

    def step(number: int, record: bool) -> float:
        """The seconds of a step and its row."""
        nonlocal state
        made, meter = (measured if record else bare), meters[record]
        begin = time.perf_counter()
        batch = meter.fetch(batches)
        state, metrics = made.train_step(state, batch)
        ended = time.perf_counter()
        row = meter.row(meter.end_step(state, metrics, number))
        if record:
            row |= meter.times(meter.cut(number), number, "")
        file.write(json.dumps(row) + "\n")
        behind[record].append(time.perf_counter() - ended)
        return time.perf_counter() - begin

    meters[True].clock.pop_times()
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(WARMUP + pairs):
        order = (False, True) if pair % 2 else (True, False)
        for record in order:
            if mesh.size > 1:
                torch.distributed.barrier()
            if record:
                with mesh.ledger.watched(meters[True].clock):
                    meters[True].clock.pop_times()
                    taken = step(pair + 1, True)
            else:
                taken = step(pair + 1, False)
            if pair >= WARMUP:
                times[record].append(taken)
    with mesh.ledger.watched(meters[True].clock):
        meters[True].clock.pop_times()
        state, _ = measured.train_step(state, next(batches)[1])
        marks = len(meters[True].clock.log)
    if rank == 0:
        more = statistics.fmean(behind[True]) - statistics.fmean(behind[False])
        out.put(
            {
                "without_s": times[False],
                "with_s": times[True],
                "marks": marks,
                "behind_s": more,
                "config": config_table.to_table(run),
            }
        )
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def batch_of(count: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random tokens in one document."""
    tokens = torch.randint(0, vocab, (count, length + 1))
    documents = torch.zeros(count, length, dtype=torch.int64)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous(), "documents": documents}


def mark_s() -> float:
    """The seconds that a mark of the clock takes, with its part of `take`."""
    clock, count = Clock(), 20_000
    begin = time.perf_counter()
    for _ in range(count // 2):
        clock.enter("forward")
        clock.leave("forward")
    clock.pop_times()
    return (time.perf_counter() - begin) / count


def figures(ranks: int, threads: int, said: dict[str, Any], mark: float) -> dict[str, Any]:
    """The result of a number of ranks."""
    ratios = sorted(b / a for a, b in zip(said["without_s"], said["with_s"]))
    quarters = statistics.quantiles(ratios, n=4)
    step = statistics.median(said["without_s"])
    counted = said["marks"] * mark + said["behind_s"]
    return {
        "ranks": ranks,
        "threads": threads,
        "pairs": len(ratios),
        "step_s": {"without": step, "with": statistics.median(said["with_s"])},
        "ratio": {
            "median": statistics.median(ratios),
            "quartiles": [quarters[0], quarters[2]],
            "min": ratios[0],
            "max": ratios[-1],
        },
        "marks_a_step": said["marks"],
        "mark_s": mark,
        "row_and_gathers_s": said["behind_s"],
        "counted_share": counted / step,
        "config": said["config"],
    }


def main() -> None:
    """Run it for each number of ranks, print a line each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="a value of the config; without any, llama-tiny's own",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    table: dict[str, Any] = {"preset": "llama-tiny"}
    for setting in args.set:
        set_nested(table, *parse_setting(setting))
    cores, results, mark = doctor.cores(), [], mark_s()
    for ranks in args.ranks:
        threads = max(1, cores // ranks)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(steps, (ranks, args.pairs, table, threads, port, out), nprocs=ranks)
        found = figures(ranks, threads, out.get(), mark)
        results.append(found)
        x = found["ratio"]
        print(
            f"{ranks} ranks x {threads} threads: step {found['step_s']['without']:.4f} s, with records x "
            f"{x['median']:.4f} "
            f"[{x['quartiles'][0]:.4f}, {x['quartiles'][1]:.4f}], counted {100 * found['counted_share']:.3f}% "
            f"({found['marks_a_step']} marks of {1e6 * mark:.2f} us, row {1e3 * found['row_and_gathers_s']:.3f} ms)",
            file=sys.stderr,
        )
    text = json.dumps(
        {"command": sys.argv, "machine": machine(), "torch": torch.__version__, "results": results}, indent=1
    )
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
