"""Ring attention whose ranks have contiguous, mirrored (zigzag) or balanced blocks: does a step's time follow the work?
And steps over cp beside steps over dp.

    python benchmarks/context.py --out benchmarks/results/context-balance.json
    python benchmarks/context.py --steps --tokens 8192 --out benchmarks/results/context-steps.json

One attention, forward and backward, on 4 ranks with a thread each. `predicted` is the largest work of a rank over the
mean, from the pairs of queries and keys that the mask has. `cpu` is the largest of the ranks' CPU seconds over the
mean, which other processes do not change; `with_rest` what is predicted of it with what a rank does beside its pairs,
which is the same for all: the seconds of a pair come from the rows of one document and of short ones in balanced
blocks, the rest of a choice from its row of short ones. `wall` is the seconds of a step over those of balanced blocks,
beside what is predicted of it: for this the machine must be idle and have a core for every rank. Choices take turns;
figures are medians.

`--steps` trains llama-tiny on 4 ranks with a thread each, in the precision that a run takes here, remat full, stage 3:
as many rows of `--tokens` as there are ranks in a step, over dp a row on each rank, over cp by each form a part of
every row on each rank, one row at a time. The jobs take turns, a step each; `of_dp` is the median over the turns of
their speed beside dp. `tokens_s` is of all ranks, `peak_bytes` what live tensors take most on a
rank in a step, `cpu_s` the CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from spawned import answer_of_ranks
from turns import write_run

import fzero
from fzero.kernels.attention_pattern import FULL, pairs_by_query
from fzero.kernels.attention_ring import ring_attention
from fzero.sharding.context import FORMS, Pieces, balanced, blocks_of, contiguous, imbalance, in_blocks, zigzag

HEADS, GROUPS, DIM = 4, 2, 64
CHOICES = ("contiguous", "zigzag", "balanced")


def documents_of(tokens: int) -> dict[str, np.ndarray]:
    """The documents of a row of so many tokens, by the name of the distribution of their lengths."""
    normal = np.random.default_rng(0).normal(np.log(tokens / 16), 1.0, 100)
    lengths = {
        "one document": [tokens],
        "lognormal": np.exp(normal).astype(int) + 1,
        "one long, then short": [tokens // 2, *[tokens // 64] * 32],
        "equal short": [tokens // 64] * 64,
    }
    return {name: np.repeat(np.arange(len(each)), each)[:tokens] for name, each in lengths.items()}


def pairs_of(documents: np.ndarray) -> np.ndarray:
    """The pairs of each query."""
    return pairs_by_query(FULL, documents[None])[0]


def choices(documents: np.ndarray, ranks: int) -> dict[str, tuple[Pieces, float]]:
    """(blocks, predicted imbalance) of each choice."""
    work = pairs_of(documents)
    blocks = blocks_of(len(documents), ranks)
    pieces = (contiguous(ranks), zigzag(ranks), balanced(in_blocks(work, blocks), ranks))
    return {name: (one, imbalance(in_blocks(work, one.count), one)) for name, one in zip(CHOICES, pieces)}


def work(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: by distribution and choice the rows of all ranks' (CPU seconds, seconds), one for each repeat."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    mesh, tokens = fzero.make_mesh({"cp": order["ranks"]}, device="cpu"), order["tokens"]
    generator = torch.Generator().manual_seed(rank)
    shapes = [(1, tokens // order["ranks"], heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    found: dict[str, dict[str, list[Any]]] = {}
    for name, documents in documents_of(tokens).items():
        made = choices(documents, order["ranks"])
        rows = torch.from_numpy(documents)[None]
        found[name] = {choice: [] for choice in made}
        for repeat in range(order["repeats"] + 1):
            for choice, (pieces, _) in made.items():
                positions = torch.stack([pieces.positions(r, tokens) for r in range(order["ranks"])])
                dist.barrier()
                begin, cpu = time.perf_counter(), time.thread_time()
                ring_attention(*given, mesh["cp"], positions, documents=rows).sum().backward()
                mine = torch.tensor([time.thread_time() - cpu, time.perf_counter() - begin], dtype=torch.float64)
                table = [torch.empty_like(mine) for _ in range(order["ranks"])]
                dist.all_gather(table, mine)
                found[name][choice] += [torch.stack(table).tolist()] if repeat else []
    answer.send(found)
    mesh.close()


def job_of(how: str, ranks: int, tokens: int) -> tuple[Any, Any, Any]:
    """(job, its state, a batch of this rank) of llama-tiny over dp, or over cp by a form."""
    from fzero.planner.plan import config_for, device_for, resolve_for
    from fzero.run.setup import build
    from fzero.train.batch import local_batch

    settings = {"train.remat": "full", "train.compiled": False, "zero": 3}
    settings |= {"data.seq_len": tokens, "model.max_len": tokens, "train.batch": ranks, "train.micro_batch": 1}
    settings |= {"train.measure_every": 0, "train.memory_check": False, "optim.name": "adamw"}
    axis, _, form = how.partition(" ")
    mesh = fzero.make_mesh({axis: ranks}, device="cpu")
    config = config_for("llama-tiny", {**settings, "context": form or "auto"})
    config = resolve_for(replace(config, mesh={axis: ranks}), device_for("here"))
    job = build.build(config, mesh)
    rows = torch.randint(0, config.model.vocab_size, (ranks, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    return job, build.first_state(job), local_batch(batch, mesh, build.local_micro_batches(config, mesh))


def steps_of(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: of each job the seconds and CPU seconds of its steps, which take turns, and what live tensors take most
    in one more."""
    from fzero.run.measure.live_bytes import MemoryTrace, recorded

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    jobs = {how: job_of(how, order["ranks"], order["tokens"]) for how in order["jobs"]}
    seconds: dict[str, list[list[float]]] = {how: [] for how in jobs}
    found = {}
    for repeat in range(order["repeats"] + 1):
        for how, (job, state, batch) in jobs.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            jobs[how] = job, job.train_step(state, batch)[0], batch
            dist.barrier()
            seconds[how] += [[time.perf_counter() - begin, time.process_time() - cpu]] * bool(repeat)
    for how, (job, state, batch) in jobs.items():
        record = MemoryTrace(state, batch)
        with recorded(record, job.mesh.ledger):
            _, metrics = job.train_step(state, batch)
        mine = torch.tensor([float(record.peak), *(cpu for _, cpu in seconds[how])], dtype=torch.float64)
        table = [torch.empty_like(mine) for _ in range(order["ranks"])]
        dist.all_gather(table, mine)
        found[how] = {
            "seconds": [s for s, _ in seconds[how]],
            "cpu_s": torch.stack(table)[:, 1:].sum(0).tolist(),
            "peak_bytes": int(max(row[0] for row in table)),
            "loss": float(metrics.loss),
            "precision": job.config.precision.policy,
        }
    answer.send(found)
    for job, _, _ in jobs.values():
        job.mesh.close()


def measure_steps(ranks: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row for dp and for each form over cp."""
    jobs = ["dp", *(f"cp {form}" for form in FORMS)]
    found = answer_of_ranks(steps_of, {"ranks": ranks, "tokens": tokens, "repeats": repeats, "jobs": jobs})
    rows = [
        {"mesh": how, "tokens_s": ranks * tokens / statistics.median(one["seconds"])} | one
        for how, one in found.items()
    ]
    for row in rows:
        row["of_dp"] = statistics.median(a / b for a, b in zip(rows[0]["seconds"], row["seconds"], strict=True))
    return rows


def table_of_steps(rows: list[dict[str, Any]]) -> list[str]:
    """The figures of steps as text."""
    lines = [f"{'mesh':18}{'tokens/s':>10}{'of dp':>8}{'CPU s':>8}{'peak MB':>9}{'of dp':>8}{'loss':>10}"]
    for row in rows:
        lines.append(
            f"{row['mesh']:18}{row['tokens_s']:>10,.0f}{row['of_dp']:>8.2f}"
            f"{statistics.median(row['cpu_s']):>8.2f}{row['peak_bytes'] / 1e6:>9.1f}"
            f"{row['peak_bytes'] / rows[0]['peak_bytes']:>8.2f}{row['loss']:>10.5f}"
        )
    return [*lines, f"precision: {rows[0]['precision']}"]


def measure(ranks: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each distribution and choice."""
    found = answer_of_ranks(work, {"ranks": ranks, "tokens": tokens, "repeats": repeats})
    rows = [row for name in found for row in figures(name, found[name], choices(documents_of(tokens)[name], ranks))]
    return with_rest(rows, {name: int(pairs_of(each).sum()) / ranks for name, each in documents_of(tokens).items()})


def with_rest(rows: list[dict[str, Any]], pairs: dict[str, float]) -> list[dict[str, Any]]:
    """The rows with the imbalance that is predicted with what a rank does beside its pairs. pairs: by the documents
    those of a rank, the mean."""
    mean = {(row["documents"], row["blocks"]): statistics.fmean(row["cpu_s"]) for row in rows}
    ends = ("one document", "equal short")
    many, few = (mean[name, "balanced"] for name in ends)
    a_pair = (many - few) / (pairs[ends[0]] - pairs[ends[1]])
    for row in rows:
        rest = mean[ends[1], row["blocks"]] - a_pair * pairs[ends[1]]
        own = a_pair * pairs[row["documents"]]
        row["with_rest"] = (rest + row["predicted"] * own) / (rest + own)
    return rows


def figures(name: str, found: dict[str, list[Any]], made: dict[str, tuple[Pieces, float]]) -> list[dict[str, Any]]:
    """The rows of a distribution."""
    out = []
    for choice, repeats in found.items():
        by_rank = [statistics.median(repeat[rank][0] for repeat in repeats) for rank in range(len(repeats[0]))]
        seconds = [max(wall for _, wall in repeat) for repeat in repeats]
        row = {"documents": name, "blocks": choice, "predicted": made[choice][1], "cpu_s": by_rank, "step_s": seconds}
        out.append(row | {"cpu": max(by_rank) / statistics.fmean(by_rank), "median_s": statistics.median(seconds)})
    base = next(row for row in out if row["blocks"] == "balanced")
    for row in out:
        row["wall"] = row["median_s"] / base["median_s"]
        row["predicted_wall"] = row["predicted"] / base["predicted"]
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The figures as text."""
    heads = ("predicted", "with rest", "cpu", "cpu s", "wall", "predicted")
    lines = [f"{'documents':22}{'blocks':12}" + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        lines.append(
            f"{row['documents']:22}{row['blocks']:12}{row['predicted']:>10.3f}{row['with_rest']:>10.3f}"
            f"{row['cpu']:>10.3f}{max(row['cpu_s']):>10.3f}{row['wall']:>10.3f}{row['predicted_wall']:>10.3f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="whole steps over cp beside dp")
    parser.add_argument("--out", type=Path)
    given, before = parser.parse_args(), os.getloadavg()
    rows = (measure_steps if given.steps else measure)(given.ranks, given.tokens, given.repeats)
    print("\n".join((table_of_steps if given.steps else table)(rows)))
    if given.out:
        write_run(given.out, before, tokens=given.tokens, rows=rows)


if __name__ == "__main__":
    main()
