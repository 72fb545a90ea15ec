"""Generation with keys and values in codes: how far logits and log-probs are from those without, and a step's time.

    python benchmarks/cache_codes.py --out benchmarks/results/cache-codes.json

A small Llama learns the bytes of this project's pages; texts of 512 bytes that it has not seen then go through pages in
float32 and in codes, in chunks of 64, so that most keys are read from pages. `logits` is the mean over positions of
|difference| / |logits|, `log_probs` the mean and largest |difference| of the text's own bytes, in nats. A decoding step
has a token of each of B requests behind 512 others, one thread, least of its turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import write_run

import fzero
from fzero import generate, models, one_process, optim, random, zero_plan
from fzero.generate import CACHES

ROOT = Path(__file__).parents[1]
LENGTH, CHUNK, BATCHES, TURNS = 512, 64, (1, 8, 32), 9
SMALL = models.LlamaConfig(256, 1024, 128, 4, 4, 2, 352)
LARGE = models.LlamaConfig(32000, 1024, 512, 12, 8, 4, 1408)


def learned(steps: int) -> tuple[models.Model, Any, Tensor, float]:
    """(the model, its parameters, texts [8, 513] that it has not seen, its loss)."""
    content = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    seen, unseen = data[: -8 * (LENGTH + 1)], data[-8 * (LENGTH + 1) :].view(8, -1)
    model = models.build(SMALL)
    plan, tx = zero_plan(0, model, one_process()), optim.adamw(2e-3)
    step, state = fzero.make_train_step(model, tx, plan), fzero.init_state(model, tx, plan, seed=0)
    loss = 0.0
    for number in range(steps):
        starts = torch.randint(len(seen) - 129, (16,), generator=torch.Generator().manual_seed(number)).tolist()
        rows = torch.stack([seen[start : start + 129] for start in starts])
        state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
        loss = float(metrics.loss)
    return model, state.params, unseen, loss


def pages_of(model: models.Model, cache: str, count: int, dtype: torch.dtype) -> generate.Pages:
    """Empty pages."""
    plan = zero_plan(0, model, one_process())
    return generate.page_spec(model, plan, count, dtype=CACHES[cache] or dtype).zeros()


def logits_of(model: models.Model, params: Any, text: Tensor, cache: str) -> Tensor:
    """The logits [T, V] of a text, chunk by chunk."""
    step, pages = (
        generate.make_step(model, zero_plan(0, model, one_process())),
        pages_of(model, cache, 32, torch.float32),
    )
    parts = []
    for first in range(0, LENGTH, CHUNK):
        row = text[first : first + CHUNK].tolist(), first, range(32)
        logits, pages = step(params, pages, generate.StepBatch.of_rows([row], [CHUNK], page_tokens=16))
        parts.append(logits)
    return torch.cat(parts)


def errors(steps: int) -> list[dict[str, Any]]:
    """How far each kind is from float32."""
    model, params, texts, loss = learned(steps)
    exact = torch.stack([logits_of(model, params, text, "auto") for text in texts])
    rows = []
    for cache in CACHES.keys() - {"auto"}:
        coded = torch.stack([logits_of(model, params, text, cache) for text in texts])
        change, log_probs = coded - exact, [x.log_softmax(-1).gather(-1, texts[:, 1:, None]) for x in (coded, exact)]
        apart = (log_probs[0] - log_probs[1]).abs()
        relative = float((change.norm(dim=-1) / exact.norm(dim=-1)).mean())
        facts = {"logits": relative, "log_probs": float(apart.mean()), "largest": float(apart.max())}
        rows.append({"name": f"error of {cache}", "loss": loss, "bytes": len(texts) * LENGTH} | facts)
    return rows


def times(config: models.LlamaConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A decoding step in each kind, by turns."""
    model = models.build(config)
    params, plan = models.init_params(model, random.key(0), dtype), zero_plan(0, model, one_process())
    rows = []
    for batch in BATCHES:
        tokens = [([7], LENGTH, range(33 * r, 33 * r + 33)) for r in range(batch)]
        decode = generate.StepBatch.of_rows(tokens, [1] * batch, page_tokens=16)
        step = generate.make_step(model, plan, dtype=dtype)
        pages = {cache: pages_of(model, cache, 33 * batch, dtype) for cache in CACHES}
        least = dict.fromkeys(CACHES, float("inf"))

        def call(cache: str, pages: Any = pages, step: Callable[..., Any] = step, decode: Any = decode) -> float:
            begin = time.thread_time()
            pages[cache] = step(params, pages[cache], decode)[1]
            return time.thread_time() - begin

        for turn in range(TURNS + 16):  # first until the programs of layers are made
            for cache in CACHES:
                seconds = call(cache)
                least[cache] = min(least[cache], seconds) if turn >= 16 else least[cache]
        name = f"decoding of {batch}, {sum(x.numel() for x in fzero.pytree.leaves(params)) / 1e6:.0f}M"
        rows.append({"name": name, "dtype": str(dtype)[6:]} | {cache: 1e3 * s for cache, s in least.items()})
    return rows


def main() -> None:
    """Measure and print rows; write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options, before = parser.parse_args(), os.getloadavg()
    torch.set_num_threads(1)
    rows = errors(options.steps)
    for config in (SMALL, LARGE):
        for dtype in (torch.float32, torch.bfloat16):
            rows += times(config, dtype)
    for row in rows:
        print({name: round(x, 5) if isinstance(x, float) else x for name, x in row.items()})
    if options.out:
        write_run(options.out, before, rows=rows)


if __name__ == "__main__":
    main()
