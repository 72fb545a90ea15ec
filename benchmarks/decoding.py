"""Generation beside transformers' `generate`: the same weights, prompts and number of tokens, in turns in one process.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py --out benchmarks/results/decoding.json

Each cell is a model, a dtype and a number of prompts of 512 tokens; a turn of a side generates 64 tokens for each,
greedily, prefill included. A ratio is of the same round: 1.5 means that fzero is 1.5 times as fast. In float32 the
texts of both sides must be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from turns import write_run

import fzero
from fzero import generate, models
from fzero.checkpoint.convert import huggingface

MODELS = {
    "1M": models.LlamaConfig(1024, 2048, 128, 4, 4, 4, 344),
    "88M": models.LlamaConfig(16384, 2048, 768, 9, 12, 12, 2048),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sides(name: str, dtype: str, rows: int, prompt: int, new: int) -> dict[str, Callable[[], list[list[int]]]]:
    """The functions that generate for the same prompts."""
    config = MODELS[name]
    model = models.build(config)
    params = models.init_params(model, fzero.random.key(0), DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save_hf(Path(folder, "model"), config, params)
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder, "model"), dtype=DTYPES[dtype]).eval()
    tokens = torch.randint(0, config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(1))
    sampling = generate.Sampling(0.0, max_tokens=new)
    prompts = [generate.Prompt(tuple(row), sampling, number=i) for i, row in enumerate(tokens.tolist())]
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(tokens)}

    def ours() -> list[list[int]]:
        out = generate.completions(model, params, prompts, options=generate.GenerateOptions(rows=rows))
        return [list(c.ids) for c in sorted(out, key=lambda c: c.number)]

    return {"transformers": lambda: theirs.generate(tokens, **settings)[:, prompt:].tolist(), "fzero": ours}


def cell(name: str, dtype: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """The ratio of a cell, and the tokens/s of both sides."""
    contenders = sides(name, dtype, rows, args.prompt, args.new)
    times: dict[str, list[float]] = {side: [] for side in contenders}
    texts: dict[str, list[list[int]]] = {}
    for i in range(-1, args.rounds):
        for side in list(contenders)[:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            texts[side] = contenders[side]()
            times[side] += [time.perf_counter() - begin] if i >= 0 else []
    if dtype == "fp32" and texts["fzero"] != texts["transformers"]:
        raise SystemExit(f"{name} {dtype} {rows}: the two sides differ in their texts")
    ratios = [a / b for a, b in zip(times["transformers"], times["fzero"])]
    rates = {f"{side}_tokens_per_s": rows * args.new / statistics.median(t) for side, t in times.items()}
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {"name": f"{name} {dtype} B={rows}", "ratio": spread, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    args, before = parser.parse_args(), os.getloadavg()
    torch.set_grad_enabled(False)
    cells = []
    for name in args.models:
        for dtype in args.dtypes:
            for rows in args.rows:
                cells.append(cell(name, dtype, rows, args))
                print(cells[-1], file=sys.stderr, flush=True)
    if args.out:
        write_run(args.out, before, cells=cells)


if __name__ == "__main__":
    main()
