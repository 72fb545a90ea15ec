"""The section `steps` of `nvme.py`: one model whose optimizer states are on the disk, trained by the contenders in
turns."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
from nvme_contenders import bounds, contenders, rotated, spread
from peers import problem
from turns import disagreement

# Largest relative difference of two losses after an update. In AdamW's first updates an element whose gradient is near
# its eps moves by what rounding makes of it, and of a few tokens' gradients there are many: torch's own modules under
# DeepSpeed are 2e-5 off in fp32.
LATER = {"fp32": 1e-4, "bf16": 5e-3, "bf16-states": 2e-2}


def expect_equal_losses(losses: dict[str, list[float]], dtype: str) -> None:
    """Raise ValueError where the first losses differ by more than rounding, or the later ones by more than LATER."""
    if wrong := disagreement(
        {name: found[:1] for name, found in losses.items()}, "fp32" if dtype == "fp32" else "bf16"
    ):
        raise ValueError(f"steps, {dtype}: {wrong}")
    for i, at_step in enumerate(zip(*losses.values())):
        apart = (max(at_step) - min(at_step)) / min(at_step)
        if not apart <= LATER[dtype]:
            raise ValueError(
                f"steps, {dtype}: losses of step {i + 1} differ by {apart:.1e}, allowed {LATER[dtype]:.0e}: {losses}"
            )


def steps_section(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Whole training steps in turns, and fio's mixed rate of the same round; ValueError where the losses differ."""
    names = args.step_contenders
    config = problem.Config(
        256, d_model=1024, n_layers=args.layers, n_heads=16, n_kv_heads=8, d_ff=2816, max_len=args.tokens
    )
    parameters = sum(int(np.prod(shape)) for shape in problem.shapes(config).values())
    order = {"section": "steps", "config": dataclasses.asdict(config), "dtype": dtype, "offload": args.offload}
    order |= {
        "batch": 1,
        "threads": args.threads,
        "seed": 0,
        "blocks": 8,
        "plane_bytes": 16 << 20,
        "buffer_bytes": args.buffer_mb << 20,
    }
    rows: dict[str, list] = {name: [] for name in names}
    trained = [name for name in names if name != "fio"]
    with contenders(names, order, args) as started:
        losses = {name: [started[name].run("step", i)["loss"] for i in range(args.warmup)] for name in trained}
        expect_equal_losses(losses, dtype)
        for i in range(args.repeats):
            for name in rotated(names, i):
                rows[name].append(
                    started[name].run("mixed") if name == "fio" else started[name].run("step", args.warmup + i)
                )
        versions = {name: contender.versions for name, contender in started.items()}
    results, base = {}, rows[trained[0]]
    for name in trained:
        found = rows[name]
        moved = [row["optimizer_read_bytes"] + row["optimizer_write_bytes"] for row in found]
        results[name] = {key: spread([row[key] for row in found]) for key in ("s", "optimizer_s", "cpu_s")} | {
            "losses": losses[name],
            "read_gb": spread([row["read_bytes"] / 1e9 for row in found]),
            "written_gb": spread([row["write_bytes"] / 1e9 for row in found]),
            "optimizer_gb_per_s": spread([n / 1e9 / row["optimizer_s"] for n, row in zip(moved, found)]),
            "slower_than_first": spread([row["s"] / first["s"] for row, first in zip(found, base)]),
            "optimizer_slower_than_first": spread(
                [row["optimizer_s"] / first["optimizer_s"] for row, first in zip(found, base)]
            ),
            "rows": found,
        }
        if "fio" in rows:
            rates = [(row["read_bytes"] + row["write_bytes"]) / row["s"] for row in rows["fio"]]
            results[name]["optimizer_of_fio_mixed"] = spread(
                [n / row["optimizer_s"] / rate for n, row, rate in zip(moved, found, rates)]
            )
    return order | {
        "parameters": parameters,
        "warmup": args.warmup,
        "repeats": args.repeats,
        "loss_tolerance": LATER[dtype],
        "versions": versions,
        "results": results,
    }


def steps_table(run: dict[str, Any]) -> str:
    """One line a contender, the first being what the ratios refer to."""
    width = 2 + max(map(len, run["results"]))
    lines = [
        f"steps: {run['parameters'] / 1e6:.0f}M parameters, {run['dtype']}, 1 x {run['config']['max_len']} tokens, "
        f"{run['threads']} threads, {run['repeats']} rounds; ratios are to {next(iter(run['results']))}, of the same "
        "round",
        f"{'':{width}}{'step s':>8}{'slower [min, max]':>22}{'optimizer s':>13}{'slower [min, max]':>22}"
        f"{'GB read':>9}{'written':>9}{'CPU s':>8}{'of fio mixed':>22}",
    ]
    for name, x in run["results"].items():
        lines.append(
            f"{name:{width}}{x['s']['median']:8.3f}{bounds(x['slower_than_first']):>22}{x['optimizer_s']['median']:13.3f}{bounds(x['optimizer_slower_than_first']):>22}"
            f"{x['read_gb']['median']:9.2f}{x['written_gb']['median']:9.2f}{x['cpu_s']['median']:8.2f}{bounds(x.get('optimizer_of_fio_mixed')):>22}"
        )
    return "\n".join(lines)
