"""Guesses beside plain decoding, on code: tokens/s without, from the text so far (prompt lookup), and by a draft model.

    python benchmarks/speculation.py --weights weights --out benchmarks/results/speculation.json

A model and a draft are trained on the bytes of Python's standard library, a tenth of whose files is held out; their
weights are kept in a folder, so that a second call does not train. A prompt is the beginning of a file that was held
out. Sides take turns in one process; a ratio is of the same round: 1.5 means 1.5 times as fast as without guesses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from turns import write_run

import fzero
from fzero import generate, models, optim
from fzero.core import pytree

SIZES = {  # vocab_size, max_len, d_model, n_layers, n_heads, n_kv_heads, d_ff
    "model": models.LlamaConfig(256, 1024, 384, 8, 6, 6, 1024),
    "draft": models.LlamaConfig(256, 1024, 128, 1, 2, 2, 352),
}


def code() -> tuple[list[bytes], list[bytes]]:
    """The files to learn from, and those held out: each tenth in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [path.read_bytes() for path in paths]
    return [file for i, file in enumerate(files) if i % 10], files[::10]


def trained(name: str, args: argparse.Namespace) -> tuple[models.Model, Any]:
    """A model and its parameters, float32, read or trained."""
    model, path = models.build(SIZES[name]), args.weights / f"{name}-{args.steps}.pt"
    params = models.init_params(model, fzero.random.key(0))
    if not path.exists():
        text = torch.frombuffer(bytearray(b"\0".join(code()[0])), dtype=torch.uint8)
        plan = fzero.zero_plan(0, model, fzero.one_process())
        schedule = optim.warmup_cosine(3e-3 if name == "draft" else 1e-3, args.steps // 20 + 1, args.steps)
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule))
        state, step = fzero.init_state(params, tx, plan, seed=0), fzero.make_train_step(model, tx, plan)
        draw = torch.Generator().manual_seed(0)
        for i in range(args.steps):
            starts = torch.randint(0, len(text) - 257, (args.batch,), generator=draw).tolist()
            rows = torch.stack([text[start : start + 257] for start in starts]).long()
            state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
            if i % 50 == 0 or i == args.steps - 1:
                print(f"{name}: step {i}, loss {float(metrics.loss):.3f}", file=sys.stderr, flush=True)
        args.weights.mkdir(parents=True, exist_ok=True)
        torch.save(pytree.named_leaves(state.params), path)
    return model, pytree.from_named(torch.load(path), params)


def sides_of(
    model: models.Model, params: Any, draft: generate.Draft, case: tuple[float, int], args: Any
) -> list[dict[str, Any]]:
    """Rates, ratios and shares of right guesses of each side, at a temperature and a number of rows."""
    temperature, rows = case
    sampling = generate.Sampling(temperature, max_tokens=args.new)
    texts = [file for file in code()[1] if len(file) >= args.prompt][:rows]
    prompts = [generate.Prompt(tuple(text[: args.prompt]), sampling, number=i) for i, text in enumerate(texts)]
    sides = {"plain": {}, "lookup": {"guesses": args.guesses}, "draft": {"guesses": args.draft_guesses, "draft": draft}}
    times: dict[str, list[float]] = {side: [] for side in sides}
    found: dict[str, dict[int, Any]] = {}
    guesses, steps = dict[str, tuple[int, int]](), dict[str, int]()
    for i in range(-1, args.rounds):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            count, begin = [0], time.perf_counter()
            options = generate.GenerateOptions(rows=rows, **sides[side])
            calls = {"options": options, "on_step": lambda tokens, pages, count=count: count.append(tokens)}
            out = generate.completions(model, params, prompts, **calls)
            found[side] = {c.number: c.ids for c in out}
            times[side] += [time.perf_counter() - begin] if i >= 0 else []
            guesses[side], steps[side] = out.guesses, len(count) - 1
    new, rows_of_sides = len(prompts) * args.new, []
    for side, seconds in times.items():
        ratios, (verified, right) = [a / b for a, b in zip(times["plain"], seconds)], guesses[side]
        row = {
            "name": f"{side} at temperature {temperature:g}, B={len(prompts)}",
            "tokens_per_s": new / statistics.median(seconds),
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "right": right / verified if verified else None,
            "tokens_per_step_and_row": args.new / steps[side],
            # In float32 a row's last bits depend on how many rows a product has.
            "texts_as_plain": sum(found[side][n] == ids for n, ids in found["plain"].items()) / len(prompts),
        }
        rows_of_sides.append(row)
    return rows_of_sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--draft-guesses", type=int, default=2)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--out", type=Path)
    args, before = parser.parse_args(), os.getloadavg()
    (model, params), small = trained("model", args), trained("draft", args)
    torch.set_grad_enabled(False)
    cells = []
    for temperature in args.temperatures:
        for rows in args.rows:
            cells += sides_of(model, params, generate.Draft(*small), (temperature, rows), args)
            print(json.dumps(cells[-3:]), file=sys.stderr, flush=True)
    if args.out:
        write_run(args.out, before, cells=cells)


if __name__ == "__main__":
    main()
