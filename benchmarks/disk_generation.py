"""Generation with weights on a disk, four times as large as the memory free for it, beside what the disk allows.

    OMP_NUM_THREADS=1 python benchmarks/disk_generation.py --disk DIR --out benchmarks/results/disk-generation.json

A Llama of 0.5 billion parameters in bfloat16. Once its weights are on the disk, the process is limited (RLIMIT_DATA) to
what it has then and a quarter of the weights' bytes. The batch is the one that `fzero plan --ask generate` says hides
the disk, for the rates measured here; batch 1 is beside it. A step without rows is what the disk takes: `of_disk` is
its time over that of a decoding step, in turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from same_bits import machine

from fzero import generate, models, one_process, zero_plan
from fzero.checkpoint import stored_state
from fzero.core import pytree
from fzero.offload import Nvme
from fzero.planner.generation import Workload, plan_generation
from fzero.planner.plan import unmeasured_here
from fzero.run.setup.machine import gemm_rates

MODEL = models.LlamaConfig(4096, 64, 1024, 48, 16, 4, 2816)
PROMPT, NEW, PAGE, SHARE = 8, 8, 16, 4


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def decode_batch(rows: int) -> generate.StepBatch:
    """A token of each of `rows` sequences, behind a prompt."""
    return generate.StepBatch.of_rows([([7], PROMPT + 1, [i]) for i in range(rows)], [1] * rows, page_tokens=PAGE)


def seconds_of(step: Any, params: Any, pages: Any, rows: int) -> tuple[float, Any]:
    begin = time.perf_counter()
    _, pages = step(params, pages, decode_batch(rows))
    return time.perf_counter() - begin, pages


def planned_batch(link_s: float, weight_bytes: int) -> tuple[int, float]:
    """(the batch that hides the disk, the seconds that the plan has for the way of the weights)."""
    memory = torch.ones(1 << 26)
    begin = time.perf_counter()
    memory.sum()
    read = memory.nbytes / (time.perf_counter() - begin)
    device = replace(
        unmeasured_here(),
        flops={"bfloat16": gemm_rates([(torch.bfloat16, "default")])[0]},
        bandwidth_bytes_s=read,
        op_s={"eager": 5e-6},
        nvme={name: weight_bytes / link_s for name in ("read", "write", "both")},
    )
    settings = {"precision.policy": "bf16", "offload": "params=nvme"}
    plan = plan_generation(MODEL, gpu=device, settings=settings, workload=Workload(PROMPT, NEW, 512, PAGE))
    assert plan.hiding is not None
    return plan.hiding, plan.costs.link_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model = models.build(MODEL)
    plan = zero_plan(0, model, one_process())
    shapes = {name: tuple(leaf.shape) for name, leaf in pytree.named_leaves(plan.like).items()}
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        disk = Nvme(folder, slots=1)
        disk.need(3 * stored_state.largest_group_bytes(plan, 2))
        draw = lambda name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0.0, 0.02)  # noqa: E731
        params = stored_state.write_params(draw, plan, disk)
        size = sum(leaf.numel() * 2 for leaf in pytree.leaves(plan.like))
        step = generate.make_step(model, plan, dtype=torch.bfloat16)
        spec = generate.page_spec(model, plan, 1, page_tokens=PAGE, dtype=torch.bfloat16)
        passes, pages = [], spec.zeros()
        for _ in range(6):
            seconds, pages = seconds_of(step, params, pages, 0)
            passes.append(seconds)
        batch, planned_s = planned_batch(statistics.median(passes[1:]), size)
        base = data_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (base + size // SHARE, base + size // SHARE))
        pages = replace(spec, count=batch).zeros()
        times: dict[int, list[float]] = {0: [], 1: [], batch: []}
        for i in range(-1, args.rounds):
            for rows in times if i % 2 else reversed(times):
                seconds, pages = seconds_of(step, params, pages, rows)
                times[rows] += [seconds] if i >= 0 else []
    cells = []
    for rows in (1, batch):
        shares = [a / b for a, b in zip(times[0], times[rows])]
        share = {"median": statistics.median(shares), "min": min(shares), "max": max(shares)}
        rate = rows / statistics.median(times[rows])
        cells.append({"name": f"batch {rows}", "of_disk": share, "tokens_per_s": rate})
    out: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]).replace(str(args.disk), "DIR"),
        "date": datetime.now(UTC).isoformat(),
    }
    out |= {"machine": machine(), "weight_bytes": size, "limit_bytes": size // SHARE, "planned_link_s": planned_s}
    out |= {"disk_bytes_per_s": size / statistics.median(times[0]), "cells": cells}
    print(json.dumps(out, indent=1), file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
