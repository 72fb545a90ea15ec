"""What the scheduler of generation costs a step, in milliseconds of Python, by what runs and what waits.

    python benchmarks/scheduler.py --out benchmarks/results/scheduler.json

No model: each step's tokens are drawn at random. `step_ms` is the median over steps in which every row draws,
`chunk_ms` over those with chunks of prompts. Processor time: what runs beside it does not count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from turns import write_run

from fzero.generate.requests import Arrivals, Request, StepLimits
from fzero.generate.scheduler import empty_state, schedule

CASES: dict[str, dict[str, int]] = {
    "32 sequences of 1,000 tokens": {"rows": 32},
    "200 sequences of 1,000 tokens": {},
    "200 sequences of 8,000 tokens": {"length": 8000},
    "200 samples of a prompt": {"prompts": 1},
    "4 guesses a row": {"guesses": 4},
    "1,000,000 pages": {"pages": 1_000_000},
    "10,000 that wait": {"waiting": 10_000},
}


def measure(
    rows: int = 200, length: int = 1000, pages: int = 0, prompts: int = 0, guesses: int = 0, waiting: int = 0
) -> dict[str, float]:
    """The figures of a case."""
    rng, steps = random.Random(0), 100
    limits = StepLimits(4096, rows, pages or rows * (length // 16 + 40), 16)
    texts = [tuple(rng.randrange(32_000) for _ in range(length)) for _ in range(prompts or rows)]
    texts += [tuple(rng.randrange(32_000) for _ in range(50)) for _ in range(waiting)]
    requests = [Request(i, texts[i % len(texts)], 600, b"model") for i in range(rows + waiting)]
    state, arrivals = empty_state(limits), Arrivals(tuple(requests))
    times: dict[bool, list[float]] = {True: [], False: []}
    while len(times[False]) < steps:
        begin = time.thread_time()
        state, batch = schedule(state, arrivals, limits)
        times[any(row.prefill for row in batch.rows)].append(time.thread_time() - begin)
        drawing = [row for row in batch.rows if row.draws]
        draws = {row.number: (*(() if row.prefill else row.ids[1:]), rng.randrange(32_000)) for row in drawing}
        following = {n: tuple(rng.choices(range(32_000), k=guesses)) for n in draws} if guesses else {}
        arrivals = Arrivals(draws=draws, guesses=following)
    figures = {"step_ms": statistics.median(times[False]), "chunk_ms": statistics.median(times[True])}
    return {name: round(1e3 * value, 3) for name, value in figures.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, rows = os.getloadavg(), list[dict[str, Any]]()
    gc.freeze()  # what torch has loaded
    for name, case in CASES.items():
        rows.append({"name": name, **measure(**case)})
        print(rows[-1])
    if args.out:
        write_run(args.out, before, rows=rows)


if __name__ == "__main__":
    main()
