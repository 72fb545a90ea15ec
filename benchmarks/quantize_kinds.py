"""Block quantisation of every kind on a CPU: "auto" beside the reference and beside the fastest kind of its dtype.

    python benchmarks/quantize_kinds.py --out benchmarks/results/quantize-kinds.json

One thread, a matrix [768, 2048] in blocks of 64. `of_best` is a call's time over that of the fastest kind,
`of_reference` over that of the definition in torch's operators; kinds take turns, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from turns import write_run

from fzero.kernels.quantize import dequantize, quantize
from fzero.kernels.quantize_codes import KINDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, TURNS = 64, 9


def seconds_of(dtype: torch.dtype) -> dict[tuple[str, str, str], float]:
    """{(operation, kind, form): the least seconds of a call}."""
    x = torch.randn(768, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes = {kind: quantize(x, kind, BLOCK) for kind in KINDS}
    least: dict[tuple[str, str, str], float] = {}
    for _ in range(TURNS):
        for kind, q in codes.items():
            for form in ("auto", "reference"):
                runs = {
                    "quantize": lambda kind=kind, form=form: quantize(x, kind, BLOCK, impl=form),
                    "dequantize": lambda kind=kind, form=form, q=q: dequantize(q, kind, BLOCK, dtype, impl=form),
                }
                for name, run in runs.items():
                    start = time.perf_counter()
                    run()
                    took = time.perf_counter() - start
                    least[name, kind, form] = min(least.get((name, kind, form), took), took)
    return least


def rows_of(dtype: torch.dtype) -> list[dict[str, Any]]:
    """A row for each operation and kind."""
    least, rows = seconds_of(dtype), []
    for name in ("quantize", "dequantize"):
        best = min(least[name, kind, "auto"] for kind in KINDS)
        for kind in KINDS:
            took = least[name, kind, "auto"]
            row = {"operation": name, "dtype": str(dtype).removeprefix("torch."), "kind": kind}
            ratios = {"of_best": took / best, "of_reference": took / least[name, kind, "reference"]}
            rows.append(row | {key: round(ratio, 3) for key, ratio in ratios.items()})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    torch.set_num_threads(1)
    rows = [row for dtype in DTYPES for row in rows_of(dtype)]
    for row in rows:
        print(*(f"{value:<12}" for value in row.values()))
    if args.out:
        write_run(args.out, before, rows=rows)


if __name__ == "__main__":
    main()
