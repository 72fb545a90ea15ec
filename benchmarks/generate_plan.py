"""Steps of generation as `fzero plan --ask generate` predicts them, beside those of this machine: their time, and the
peak of their memory.

    python benchmarks/generate_plan.py --out benchmarks/results/generate-plan.json

One thread, by its own clock: others use the machine too. The rates of the roofline (products by dtype, reading of
memory, small operators) are measured in turns with the steps, and the least time of each counts. A decode step has a
token of each of B requests behind 512 others; a prefill step 512 tokens of one. `measured_by_predicted` is the time of
a step over that of the plan, `peak_error` the difference of the peaks of tensors over the measured one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import write_run

from fzero import generate, init_state, models, one_process, optim, zero_plan
from fzero.planner.generation_costs import Rows, StepCosts
from fzero.planner.generation_trace import trace_rows
from fzero.planner.plan import unmeasured_here
from fzero.run.measure.live_bytes import LiveBytes
from fzero.run.setup.machine import gemm_rates

CONFIGS = {
    "1M": models.LlamaConfig(2048, 1024, 128, 4, 4, 2, 352),
    "88M": models.LlamaConfig(32000, 1024, 512, 12, 8, 4, 1408),
}
BATCHES, PROMPT, PAGE = (1, 8, 32), 512, 16
READ = 512 << 20  # bytes, beyond every cache
WARM, TURNS = 16, 9  # steps until the programs of layers are made, and those that are timed
SMALL = 2000  # small operators in a row


class Cell(NamedTuple):
    """A step of a model."""

    name: str
    model: models.Model
    plan: Any
    params: Any
    rows: tuple[Rows, ...]

    def run(self) -> tuple[Callable[[], float], int]:
        """(a function that gives the seconds of one step, the most bytes of a step beside weights and pages)."""
        rows, first = [], 0
        for r in self.rows:
            for _ in range(int(r.count)):
                used = generate.pages_for(r.context, PAGE)
                rows.append(([7] * r.tokens, r.context - r.tokens, range(first, first + used)))
                first += used
        pages = generate.page_spec(self.model, self.plan, first, page_tokens=PAGE).zeros()
        batch = generate.StepBatch.of_rows(rows, [1] * len(rows), page_tokens=PAGE)
        step = generate.make_step(self.model, self.plan)

        def timed() -> float:
            nonlocal pages
            begin = time.thread_time()
            _, pages = step(self.params, pages, batch)
            return time.thread_time() - begin

        with LiveBytes((self.params, pages.layers, batch)) as record:
            record.peak = start = record.live
            timed()
        for _ in range(WARM):
            timed()
        return timed, record.peak - start


def least(samples: list[float], run: Callable[[], float], count: int = 1) -> None:
    """Add the seconds of some calls."""
    samples += [run() for _ in range(count)]


def seconds_of(work: Callable[[], Any]) -> Callable[[], float]:
    """The function that gives the seconds of one call."""

    def timed() -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    return timed


def small_operators() -> None:
    """SMALL operators whose numbers take no time."""
    x = torch.ones(8)
    for _ in range(SMALL):
        x = x * 1.0


def compare(cell: Cell, dtype: torch.dtype) -> dict[str, Any]:
    """The row of a cell: predicted beside measured."""
    step, peak = cell.run()
    memory = torch.ones(READ // 4)
    times: dict[str, list[float]] = {"step": [], "read": [], "small": []}
    for _ in range(TURNS):
        least(times["step"], step, 2)
        least(times["read"], seconds_of(memory.sum))
        least(times["small"], seconds_of(small_operators))
    best = {name: min(samples) for name, samples in times.items()}
    device = replace(
        unmeasured_here(),
        flops={str(dtype).removeprefix("torch."): gemm_rates([(dtype, "default")])[0]},
        bandwidth_bytes_s=READ / best["read"],
        op_s={"eager": best["small"] / SMALL},
    )
    spec = generate.page_spec(cell.model, cell.plan, 1, page_tokens=PAGE)
    traced = trace_rows(cell.model, cell.plan, spec, device.target, cell.rows)
    predicted = StepCosts(cell.model, cell.plan, spec, device, (traced.ops, 0.0)).time(cell.rows)
    tokens = sum(r.tokens * r.count for r in cell.rows)
    return {
        "name": cell.name,
        "measured_s": best["step"],
        "predicted_s": predicted.seconds,
        "measured_by_predicted": best["step"] / predicted.seconds,
        "tokens_per_s": tokens / best["step"],
        "predicted_tokens_per_s": tokens / predicted.seconds,
        "binds": predicted.binds,
        "bounds_s": {"memory": predicted.memory_s, "compute": predicted.compute_s, "host": predicted.host_s},
        "operators": traced.ops,
        "read_gb_s": device.bandwidth_bytes_s / 1e9,
        "product_gflop_s": max(device.flops.values()) / 1e9,
        "operator_us": 1e6 * device.op_s["eager"],
        "peak_bytes": peak,
        "predicted_peak_bytes": traced.bytes,
        "peak_error": abs(traced.bytes - peak) / peak,
    }


def cells(names: list[str], kinds: list[str]) -> list[tuple[Cell, torch.dtype]]:
    """The cells of the models, by precision or kind of codes."""
    out = []
    for name in names:
        for kind in kinds:
            model = models.build(CONFIGS[name])
            policy = kind if kind in ("fp32", "bf16") else "bf16"
            model = model if kind == policy else models.quantized(model, kind)
            plan = zero_plan(0, model, one_process(), policy=policy)
            params = init_state(model, optim.sgd(0.1), plan, seed=0).params
            steps = {f"decode B={n}": (Rows(1, PROMPT + 1, n),) for n in BATCHES} | {"prefill": (Rows(PROMPT, PROMPT),)}
            dtype = torch.float32 if policy == "fp32" else torch.bfloat16
            out += [(Cell(f"{name} {kind} {what}", model, plan, params, rows), dtype) for what, rows in steps.items()]
    return out


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,88M")
    parser.add_argument("--kinds", default="fp32,bf16,int8", help="precisions, and kinds of codes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    torch.set_num_threads(1)
    rows = []
    for cell, dtype in cells(args.models.split(","), args.kinds.split(",")):
        rows.append(row := compare(cell, dtype))
        print(
            f"{row['name']:<22} {1e3 * row['measured_s']:8.2f} ms, predicted {1e3 * row['predicted_s']:8.2f} "
            f"({row['binds']}): {row['measured_by_predicted']:.2f}; peak {row['peak_bytes']:,} B, error "
            f"{100 * row['peak_error']:.2f}%",
            flush=True,
        )
    if args.out:
        write_run(args.out, before, rows=rows)


if __name__ == "__main__":
    main()
