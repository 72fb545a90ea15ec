"""A draw of each row beside transformers': its processors of logits, softmax and multinomial, in turns.

    python benchmarks/draws.py --out benchmarks/results/draws.json

Logits fall with the logarithm of the rank, as those of a language model do. Ours gives log-probabilities of the whole
distribution and of the one drawn from as well. Times are of the processor, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fzero.core import prng, prng_rows
from fzero.generate import DrawRow, Sampling, draw, draw_rows

KINDS = {
    "likeliest": Sampling(0.0),
    "temperature": Sampling(0.8),
    "top_k": Sampling(0.8, 50),
    "top_p": Sampling(0.8, top_p=0.9),
    "min_p": Sampling(0.8, min_p=0.05),
    "repetition": Sampling(0.0, repetition=1.2),
}


def logits_of(rows: int, columns: int) -> Tensor:
    """float32 [rows, columns]."""
    order = torch.stack(
        [prng.permutation(key, columns, torch.arange(columns)) for key in prng.split(prng.key(0), rows)]
    )
    return -1.3 * torch.log1p(order.float()) + prng.normal(prng.key(1), (rows, columns))


def of_transformers(sampling: Sampling, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The loop of `generate` behind the model."""
    s, processors = sampling, transformers.LogitsProcessorList()
    if s.repetition != 1.0:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(s.repetition))
    if s.temperature not in (0.0, 1.0):
        processors.append(transformers.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        processors.append(transformers.TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0:
        processors.append(transformers.TopPLogitsWarper(s.top_p))
    if s.min_p:
        processors.append(transformers.MinPLogitsWarper(s.min_p))

    def call(logits: Tensor) -> Tensor:
        scores = processors(ids, logits.to(copy=True, dtype=torch.float32))
        if s.temperature == 0.0:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]

    return call


def of_fzero(sampling: Sampling, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """A draw, with the tensors of its rows."""
    prompts = ids.numpy()

    def call(logits: Tensor) -> Tensor:
        rows = [DrawRow(sampling, 500 + i, i, 0, prompt, ()) for i, prompt in enumerate(prompts)]
        return draw(logits, draw_rows(rows)).tokens

    return call


def measure(kind: str, rows: int, columns: int, repeats: int) -> dict[str, Any]:
    """The times of both, ms of a call, and their ratio: theirs over ours, median of the rounds."""
    logits, ids = logits_of(rows, columns), torch.arange(500).repeat(rows, 1)
    calls = {"fzero": of_fzero(KINDS[kind], ids), "transformers": of_transformers(KINDS[kind], ids)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            begin = time.thread_time()
            call(logits)
            times[name] += [1e3 * (time.thread_time() - begin)] if number >= 2 else []
    ratios = [theirs / ours for ours, theirs in zip(times["fzero"], times["transformers"])]
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    name = f"{kind}, {rows} rows of {columns}"
    return {"name": name, **medians, "faster": statistics.median(ratios)}


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prng_rows.fold_rows(prng.split(prng.key(0), 1), torch.zeros(1, dtype=torch.int64))
    for _ in range(1100):  # from then on the noise is computed in C++
        prng_rows.fold_rows(prng.split(prng.key(0), 1), torch.zeros(1, dtype=torch.int64))
    results = []
    for columns in (512, 32000, 128256):
        for rows in (1, 8, 32):
            for kind in KINDS:
                results.append(measure(kind, rows, columns, args.repeats if columns < 10**5 else 7))
                r = results[-1]
                times = f"{r['fzero_ms']:8.3f} {r['transformers_ms']:8.3f} {r['faster']:6.2f}"
                print(f"{columns:7} {rows:3} {kind:12} {times}", flush=True)
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        head = {"machine": platform.machine(), "date": datetime.date.today().isoformat(), **versions, "threads": 1}
        command = " ".join(["python", *sys.argv])
        args.out.write_text(json.dumps({**head, "command": command, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
