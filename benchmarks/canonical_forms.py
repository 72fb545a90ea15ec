"""What kernels=canonical costs beside kernels=auto, in turns: products, attention, steps of training and of decoding.

    OMP_NUM_THREADS=1 python benchmarks/canonical_forms.py --out benchmarks/results/canonical-forms.json

Ratios are canonical over auto in time: 1.25 is a quarter slower. Equal is the share of tokens whose loss alone has the
bits of its loss in the batch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import generate, models, optim, random
from fzero.core import precision
from fzero.kernels import attention, linear

NAMES = ("auto", "canonical")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {
    "1M": models.LlamaConfig(512, 512, d_model=128, n_layers=4, n_heads=4, n_kv_heads=4, d_ff=344),
    "88M": models.LlamaConfig(8192, 512, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_ff=2048),
}


def times_of(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Milliseconds of each by name, and the ratio, from calls in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name] += [1e3 * (time.perf_counter() - begin)] if i else []
    ratios = [b / a for a, b in zip(*times.values())]
    return {name: statistics.median(t) for name, t in times.items()} | {"ratio": statistics.median(ratios)}


def product_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """The products of a layer and of a head."""
    for (name, dtype), k, m in ((d, k, m) for d in DTYPES.items() for k in (256, 768) for m in (1, 8, 64, 512)):
        x, w = torch.randn(m, k).to(dtype), torch.randn(k, 4 * k).to(dtype)
        head = w.T.contiguous()
        calls = {"auto": lambda x=x, w=w: x @ w, "canonical": lambda x=x, w=w: linear.linear_product(x, w)}
        yield {"name": f"product {m} x {k} x {4 * k}", "dtype": name} | times_of(calls, 4 * repeats)
        calls = {"auto": lambda x=x, w=head: x @ w.T, "canonical": lambda x=x, w=head: linear.logits_product(x, w)}
        yield {"name": f"head {m} x {k} x {4 * k}", "dtype": name} | times_of(calls, 4 * repeats)


def attention_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """Attention of a sequence."""
    for name, dtype in DTYPES.items():
        q, k, v = (torch.randn(1, 1024, heads, 64).to(dtype) for heads in (12, 4, 4))
        calls = {impl: lambda impl=impl, q=q, k=k, v=v: attention.attention(q, k, v, impl=impl) for impl in NAMES}
        yield {"name": "attention 1024, 12 heads on 4, 64", "dtype": name} | times_of(calls, repeats)


def step_rows(size: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A training step, and decoding of 1 and 8 requests behind 256 tokens."""
    model = models.build(SIZES[size])
    for name, policy in (("fp32", precision.fp32()), ("bf16", precision.bf16())):
        plan, tx = fzero.zero_plan(0, model, fzero.one_process(), policy=policy), optim.adamw(1e-3)
        params = models.init_params(model, random.key(0))
        text = torch.randint(0, SIZES[size].vocab_size, (2, 257), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        calls = {}
        for impl in NAMES:
            train = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(kernels=impl))
            states = [fzero.init_state(model, tx, plan, seed=0)]

            def call_train(train: Any = train, states: Any = states, batch: Any = batch) -> None:
                states[0], metrics = train(states[0], batch)
                float(metrics.loss)

            calls[impl] = call_train
        yield {"name": f"{size}: training step, 512 tokens", "dtype": name} | times_of(calls, repeats)
        for requests in (1, 8):
            calls = {}
            for impl in NAMES:
                step = generate.make_step(model, plan, kernels=impl)
                pages = [generate.page_spec(model, plan, count=17 * requests, page_tokens=16).zeros()]
                rows = [([7], 256, list(range(17 * r, 17 * r + 17))) for r in range(requests)]
                decode = generate.StepBatch.of_rows(rows, [1] * requests, page_tokens=16)

                def call_decode(step: Any = step, pages: Any = pages, decode: Any = decode, p: Any = params) -> None:
                    pages[0] = step(p, pages[0], decode)[1]

                calls[impl] = call_decode
            case = f"{size}: a step of decoding {requests} behind 256 tokens"
            yield {"name": case, "dtype": name} | times_of(calls, 2 * repeats)


def equal_rows(size: str) -> Iterator[dict[str, Any]]:
    """The share of tokens whose loss alone is that of the batch, bit by bit."""
    model = models.build(SIZES[size])
    params = models.init_params(model, random.key(0))
    tokens = torch.randint(0, SIZES[size].vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    for (name, dtype), impl in ((d, impl) for d in DTYPES.items() for impl in NAMES):
        ctx = models.Ctx(dtype=dtype, kernels=fzero.Execution(kernels=impl).kernels)

        def log_probs(rows: Tensor, ctx: models.Ctx = ctx) -> Tensor:
            with torch.no_grad():
                return models.logits(model, params, {"tokens": rows}, ctx).to(torch.float32)

        whole = log_probs(tokens)
        parts = [log_probs(tokens[i, None, :n])[0, -1] == whole[i, n - 1] for i in range(4) for n in (1, 2, 9, 33, 64)]
        yield {
            "name": f"{size}: logits equal alone",
            "dtype": name,
            "kernels": impl,
            "share": float(torch.cat(parts).float().mean()),
        }


def main() -> None:
    """Measure and print rows; write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    parts = [product_rows(args.repeats), attention_rows(args.repeats)]
    parts += [part for size in SIZES for part in (step_rows(size, args.repeats), equal_rows(size))]
    for part in parts:
        for row in part:
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    found = {
        "command": shlex.join(["python", "benchmarks/canonical_forms.py", *sys.argv[1:]]),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "torch": torch.__version__,
        "load": os.getloadavg()[0],  # of other processes too
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
