"""What bounds each part of a training step on H200s, by `fzero plan`, for four sizes.

    python benchmarks/roofline.py --out benchmarks/results/roofline.json
    python benchmarks/roofline.py --precision bf16_float8 --out benchmarks/results/roofline-float8.json

Nothing is measured: a plan needs no GPU. Where steps were measured, the figures of benchmarks/ten.py stand beside."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import fzero
from fzero.planner import plan_report
from fzero.planner.plan_text import duration, percent, quantity

# name -> (preset, mesh, settings)
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "124M on 1": ("gpt2-124m", {"dp": 1}, {"train.batch": 512, "train.micro_batch": 32}),
    "1B on 1": ("llama-1b", {"dp": 1}, {"data.seq_len": 4096, "train.batch": 64, "train.micro_batch": 4}),
    "8B on 8": (
        "llama-8b",
        {"dp": 8},
        {"data.seq_len": 8192, "train.batch": 64, "train.micro_batch": 1, "zero": 3, "train.remat": "selective:0.5"},
    ),
    "70B on 64": (
        "llama-70b",
        {"dp": 64},
        {"data.seq_len": 8192, "train.batch": 128, "train.micro_batch": 1, "zero": 3, "train.remat": "full"},
    ),
}
LEAST = 0.008  # fraction of each step; a part below it everywhere is left out of the table


def measure(name: str, precision: str) -> dict[str, Any]:
    """The plan of a case in numbers."""
    preset, mesh, settings = CASES[name]
    fixed = {"train.compiled": True, "precision.policy": precision}
    report = fzero.plan(preset, mesh, gpu="h200", settings={**settings, **fixed})
    assert report.step_s is not None and report.tokens_per_s is not None
    return {
        "step_s": report.step_s,
        "least_s": plan_report.least_step(report),
        "tokens_per_s": report.tokens_per_s / report.ranks,
        "mfu_causal": report.mfu_causal,
        "parts": [part._asdict() for part in plan_report.roofline(report)],
    }


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The table: a row for each part, a column for each case; in a cell its part of the step, and of its limit."""
    shares = {case: {p["name"]: p for p in row["parts"]} for case, row in found.items()}
    names = dict.fromkeys(p["name"] for row in found.values() for p in row["parts"])
    largest = {n: max(s[n]["seconds"] / found[c]["step_s"] for c, s in shares.items() if n in s) for n in names}
    lines = ["| part | " + " | ".join(found) + " | bound by |", "|---|" + "---:|" * len(found) + "---|"]
    for name in sorted((n for n in names if largest[n] >= LEAST), key=lambda n: -largest[n]):
        cells, bounds = [], {}
        for case, row in found.items():
            part = shares[case].get(name)
            if part is None:
                cells.append("")
                continue
            bounds[part["bound"]] = None
            limit = max(part["peak"], part["bandwidth"])
            cells.append(percent(part["seconds"] / row["step_s"]) + (f" at {percent(limit)}" if limit else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {', '.join(b for b in bounds if b)} |")
    for what, show in {
        "step": lambda row: duration(row["step_s"]),
        "at the limits": lambda row: percent(row["least_s"] / row["step_s"]),
        "tokens/s a GPU": lambda row: quantity(row["tokens_per_s"]),
        "MFU, causal": lambda row: percent(row["mfu_causal"]),
    }.items():
        lines.append(f"| **{what}** | " + " | ".join(show(row) for row in found.values()) + " | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; its table goes beside it as .md")
    parser.add_argument("--precision", default="bf16", help="the policy of the products (default: bf16)")
    args = parser.parse_args()
    found = {name: measure(name, args.precision) for name in CASES}
    table = {"command": shlex.join(["python", *sys.argv]), "device": "h200, data sheet", "cases": found}
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(found) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    main()
