"""200 requests of other lengths: fzero's steps beside transformers' continuous batching and its batches of 32.

    OMP_NUM_THREADS=1 python benchmarks/batching.py --out benchmarks/results/batching.json

Prompts have 16 to 256 tokens and texts 8 to 128, greedy; all are there at the start, and 32 run at a time. A static
batch is padded on the left and runs until its longest text has ended; only tokens that were asked for count. The three
take turns in one process; a ratio is of the same round. transformers' manager is started, and warmed up, before.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoding import DTYPES, MODELS
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from turns import write_run

import fzero
from fzero import generate, models
from fzero.checkpoint.convert import huggingface

ROWS, PAGE = 32, 16


class Request(NamedTuple):
    """The ids of a prompt, and how many tokens follow."""

    ids: tuple[int, ...]
    new: int


def requests_of(count: int, vocab: int) -> list[Request]:
    """The requests, the same ones each time."""
    draw = random.Random(7)
    return [
        Request(tuple(draw.randrange(vocab) for _ in range(draw.randint(16, 256))), draw.randint(8, 128))
        for _ in range(count)
    ]


Texts = list[list[int]]


def by_fzero(model: Any, params: Any, requests: list[Request]) -> Texts:
    prompts = [generate.Prompt(r.ids, generate.Sampling(0.0, max_tokens=r.new), i) for i, r in enumerate(requests)]
    out = generate.completions(model, params, prompts, options=generate.GenerateOptions(rows=ROWS))
    return [list(c.ids) for c in sorted(out, key=lambda c: c.number)]


def by_static_batches(theirs: Any, requests: list[Request]) -> Texts:
    texts: Texts = []
    for start in range(0, len(requests), ROWS):
        batch = requests[start : start + ROWS]
        longest, new = max(len(r.ids) for r in batch), max(r.new for r in batch)
        tokens = torch.tensor([[0] * (longest - len(r.ids)) + list(r.ids) for r in batch])
        mask = torch.tensor([[0] * (longest - len(r.ids)) + [1] * len(r.ids) for r in batch])
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        out = theirs.generate(tokens, attention_mask=mask, **settings)[:, longest:].tolist()
        texts += [row[: r.new] for row, r in zip(out, batch)]
    return texts


def by_manager(manager: Any, requests: list[Request]) -> Texts:
    names = [manager.add_request(list(r.ids), max_new_tokens=r.new) for r in requests]
    results: dict[str, list[int]] = {}
    while len(results) < len(names):
        result = manager.get_result(timeout=600)
        if result is not None and result.is_finished():
            results[result.request_id] = list(result.generated_tokens)
    return [results[name] for name in names]


def cell(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """The ratios of a model, and the tokens/s of each side."""
    config, requests = MODELS[name], requests_of(args.requests, MODELS[name].vocab_size)
    model = models.build(config)
    params = models.init_params(model, fzero.random.key(0), DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save_hf(Path(folder, "model"), config, params)
        load = {"dtype": DTYPES[dtype], "attn_implementation": "sdpa"}
        static, continuous = (AutoModelForCausalLM.from_pretrained(Path(folder, "model"), **load) for _ in range(2))
    limits = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=ROWS * 24 + 1, max_batch_tokens=512, max_requests_per_batch=ROWS
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
    manager = continuous.eval().init_continuous_batching(greedy, limits)
    manager.start()
    contenders: dict[str, Callable[[], Texts]] = {
        "transformers static": lambda: by_static_batches(static.eval(), requests),
        "transformers continuous": lambda: by_manager(manager, requests),
        "fzero": lambda: by_fzero(model, params, requests),
    }
    times: dict[str, list[float]] = {side: [] for side in contenders}
    texts: dict[str, Texts] = {}
    for i in range(-1, args.rounds):
        for side in list(contenders)[:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            texts[side] = contenders[side]()
            times[side] += [time.perf_counter() - begin] if i >= 0 else []
    manager.stop(block=True)
    assert all([len(text) for text in side] == [r.new for r in requests] for side in texts.values())
    alone = [by_fzero(model, params, [r])[0] for r in requests[:: max(1, args.requests // 20)]]
    together = texts["fzero"][:: max(1, args.requests // 20)]
    tokens = sum(r.new for r in requests)
    row: dict[str, Any] = {"name": f"{name} {dtype}", "tokens": tokens}
    row["alone_as_together"] = statistics.fmean(a == b for a, b in zip(alone, together))
    for side, seconds in times.items():
        row[f"{side.replace(' ', '_')}_tokens_per_s"] = tokens / statistics.median(seconds)
        ratios = [a / b for a, b in zip(seconds, times["fzero"])]
        row[f"over_{side.split()[-1]}"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        row[f"texts_as_{side.split()[-1]}"] = statistics.fmean(a == b for a, b in zip(texts[side], texts["fzero"]))
    return {key: value for key, value in row.items() if key not in ("over_fzero", "texts_as_fzero")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["1M"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--out", type=Path)
    args, before = parser.parse_args(), os.getloadavg()
    torch.set_grad_enabled(False)
    cells = []
    for name in args.models:
        for dtype in args.dtypes:
            cells.append(cell(name, dtype, args))
            print(cells[-1], file=sys.stderr, flush=True)
    if args.out:
        write_run(args.out, before, cells=cells)


if __name__ == "__main__":
    main()
