"""What canonical sums cost: steps with reduce="canonical" and reduce="fast" in turns, on the same ranks, at every
stage.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/canonical.py --out
    benchmarks/results/canonical-2.json python benchmarks/canonical.py --out benchmarks/results/canonical-1.json

Ratios are between steps of the same round, canonical over fast: 1.05 is 5% slower. Bytes are what a rank sends in a
step."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from peers import problem

import fzero
from fzero import models, optim
from fzero.core import precision


def contender(model: models.Model, mesh: fzero.Mesh, stage: int, reduce: str, policy: str, parts: int, compiled: bool):
    """A function that makes one step and gives (seconds, bytes sent)."""
    plan = fzero.zero_plan(stage, model, mesh, reduce=reduce, policy=precision.POLICIES[policy]())
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(1e-3),
    )
    state = fzero.init_state(model, tx, plan, seed=0)
    train_step = fzero.make_train_step(
        model, tx, plan, micro_batches=parts, execution=fzero.Execution(compiled=compiled)
    )

    def step(batch) -> tuple[float, int]:
        nonlocal state
        mesh.ledger.clear()
        begin = time.perf_counter()
        state, metrics = train_step(state, batch)
        float(metrics.loss)
        return time.perf_counter() - begin, mesh.ledger.total().bytes

    return step


def compare(mesh: fzero.Mesh, args: argparse.Namespace, stage: int, parts: int) -> dict:
    """The ratio of times, canonical over fast, and the bytes of both."""
    c = problem.CONFIGS[args.config]
    sizes = {
        n: getattr(c, n) for n in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_len")
    }
    model = models.build(models.LlamaConfig(**sizes))
    steps = {r: contender(model, mesh, stage, r, args.dtype, parts, args.compiled) for r in ("fast", "canonical")}
    text = torch.randint(
        0, c.vocab_size, (args.batch, c.max_len + 1), generator=torch.Generator().manual_seed(mesh.data_rank)
    )
    batch = fzero.local_batch({"tokens": text[:, :-1], "targets": text[:, 1:]}, mesh, parts)
    times: dict[str, list[float]] = {name: [] for name in steps}
    sent = {}
    for i in range(args.warmup + args.repeats):
        for name, step in steps.items():
            seconds, sent[name] = step(batch)
            times[name] += [seconds] if i >= args.warmup else []
    ratios = [b / a for a, b in zip(times["fast"], times["canonical"])]
    return {
        "stage": stage,
        "micro_batches": parts,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "fast_median_s": statistics.median(times["fast"]),
        "bytes": sent,
    }


def main() -> None:
    """Compare and print a table; rank 0 writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="small-v256", choices=problem.CONFIGS)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--parts", default="1,4", help="comma list of micro-batches a rank")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    mesh = fzero.make_mesh({"dp": world}, device="cpu")
    rows = []
    for stage in map(int, args.stages.split(",")):
        for parts in map(int, args.parts.split(",")):
            row = compare(mesh, args, stage, parts)
            rows.append(row)
            if mesh.rank == 0:
                r = row["ratio"]
                said = (
                    f"{r['median']:.3f} [{r['min']:.3f}, {r['max']:.3f}] x the "
                    f"time of fast ({row['fast_median_s']:.3f} "
                    "s)"
                )
                print(
                    f"dp={world} stage {stage}, {parts} micro-batches a rank: {said}; bytes {row['bytes']}", flush=True
                )
    if args.out and mesh.rank == 0:
        here = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "command": shlex.join(["python", *sys.argv]),
            "ranks": world,
        }
        options = {n: getattr(args, n) for n in ("config", "dtype", "batch", "repeats", "compiled")}
        args.out.write_text(json.dumps({**here, **options, "rows": rows}, indent=2) + "\n")
    mesh.close()


if __name__ == "__main__":
    main()
