"""A step of a Mixtral on the CPU: fzero's beside transformers' own (eager, compiled) and a plain loop over experts.

    python benchmarks/moe.py --out benchmarks/results/moe.json
    python benchmarks/moe.py --config tiny --smoke

All contenders have the same weights, batches and AdamW, in one process, and take turns, one step each a round; no
speed is printed unless their losses agree. "loop" is fzero's step uncompiled, whose experts are a Python loop over the
experts that have tokens. Memory: the live bytes of tensors at the peak of a step, of each contender by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from live_bytes import peak
from turns import LOSS_TOLERANCE, write_run

import fzero
from fzero import models, optim
from fzero.checkpoint.convert.huggingface import load_hf
from fzero.kernels import moe
from fzero.kernels.glu import swiglu

SIZES = {
    "tiny": {"hidden_size": 192, "num_hidden_layers": 4, "intermediate_size": 384, "num_local_experts": 4},
    "small": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 768, "num_local_experts": 8},
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
RATE = 1e-3
Step = Callable[[torch.Tensor], float]


def plain_loop(p: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: Any) -> torch.Tensor:
    """The experts one by one, each on the tokens that chose it."""
    tokens, flat, shares = (
        x.reshape(-1, x.shape[-1]),
        ids.reshape(-1, ids.shape[-1]),
        weights.reshape(-1, ids.shape[-1]),
    )
    out = torch.zeros_like(tokens)
    for e in range(p["w_gate"].shape[0]):
        rows, choice = torch.where(flat == e)
        if len(rows):
            own = tokens[rows]
            y = swiglu(own @ p["w_gate"][e], own @ p["w_up"][e]) @ p["w_down"][e]
            out = out.index_add(0, rows, y * shares[rows, choice, None].to(y.dtype))
    return out.reshape(x.shape)


def ours(folder: Path, *, compiled: bool) -> Step:
    """fzero's step."""
    config, params = load_hf(folder)
    model, tx = models.build(config), optim.adamw(RATE, weight_decay=0.01)
    plan = fzero.zero_plan(0, model, fzero.one_process())
    state = [fzero.init_state(params, tx, plan, seed=0)]
    make = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=compiled))

    def step(ids: torch.Tensor) -> float:
        state[0], metrics = make(state[0], {"tokens": ids[:, :-1], "targets": ids[:, 1:]})
        return float(metrics.loss)

    return step


def loop(folder: Path) -> Step:
    """fzero's step with a loop over experts. Plain autograd runs it: the numbers of rows are known step by step."""
    config, params = load_hf(folder)
    model = models.build(config)
    leaves = fzero.pytree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    tx = torch.optim.AdamW(fzero.pytree.leaves(leaves), RATE, weight_decay=0.01)

    def step(ids: torch.Tensor) -> float:
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        with mock.patch.object(moe, "dropless", plain_loop):
            x = model.embed(leaves, batch, ctx := models.Ctx())
            for i in range(config.n_layers):
                layer = fzero.pytree.map(lambda leaf, i=i: leaf[i], leaves["blocks"])
                x = model.block(layer, x, ctx._replace(layer=torch.tensor(i)))
            out = model.head(leaves, x, batch, ctx)
        mean = out.total / out.num_tokens
        tx.zero_grad()
        mean.backward()
        tx.step()
        return float(mean.detach())

    return step


def theirs(folder: Path, *, compiled: bool) -> Step:
    """transformers' step, by torch's AdamW."""
    model = hf.MixtralForCausalLM.from_pretrained(folder).train()
    tx = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    forward = torch.compile(model) if compiled else model

    def step(ids: torch.Tensor) -> float:
        logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        tx.zero_grad()
        loss.backward()
        tx.step()
        return float(loss.detach())

    return step


CONTENDERS: dict[str, Callable[[Path], Step]] = {
    "fzero": lambda folder: ours(folder, compiled=True),
    "fzero eager": lambda folder: ours(folder, compiled=False),
    "loop": loop,
    "transformers": lambda folder: theirs(folder, compiled=False),
    "transformers compiled": lambda folder: theirs(folder, compiled=True),
}


def memory(contender: str, folder: str, batch: torch.Tensor, cores: int) -> dict[str, int]:
    """The live bytes of a contender's third step, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_of, (contender, folder, batch, cores))


def peak_of(contender: str, folder: str, batch: torch.Tensor, cores: int) -> dict[str, int]:
    """`memory` in this process."""
    torch.set_num_threads(cores)

    def setup() -> Callable[[], Any]:
        step = CONTENDERS[contender](Path(folder))
        step(batch)
        step(batch)
        return lambda: step(batch)

    return peak(setup)


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The steps of all contenders; raises ValueError where their losses differ."""
    sizes = {**SIZES[name], **HEADS, "vocab_size": 256, "max_position_embeddings": args.seq_len}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(args.seed)
    draw = torch.Generator().manual_seed(args.seed)
    batches = [torch.randint(0, 256, (args.batch, args.seq_len + 1), generator=draw) for _ in range(2 + args.repeats)]
    with tempfile.TemporaryDirectory() as place:
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **none, router_aux_loss_coef=0.0))
        model.save_pretrained(place)
        peaks = {contender: memory(contender, place, batches[0], args.cores) for contender in CONTENDERS}
        steps = {contender: make(Path(place)) for contender, make in CONTENDERS.items()}
    warm = {contender: [step(batch) for batch in batches[:2]] for contender, step in steps.items()}
    for losses in zip(*warm.values()):
        if max(losses) - min(losses) > LOSS_TOLERANCE["fp32"] * min(losses):
            raise ValueError(f"{name}: losses differ: {dict(zip(warm, losses))}")
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    for batch in batches[2:]:
        for contender, step in steps.items():
            begin = time.perf_counter()
            step(batch)
            times[contender].append(time.perf_counter() - begin)
    base = times["fzero"]
    results = {
        contender: {
            "step_s": found,
            "median_s": statistics.median(found),
            "fzero_is_x_faster": statistics.median(a / b for a, b in zip(found, base)),
            **peaks[contender],
        }
        for contender, found in times.items()
    }
    return {"config": name, "sizes": sizes, "batch": args.batch, "threads": args.cores, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="tiny,small", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--cores", type=int, default=2, help="threads")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of one step each")
    parser.add_argument("--smoke", action="store_true", help="1 round: whether everything runs, not how fast it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.repeats = 1 if args.smoke else args.repeats
    torch.set_num_threads(args.cores)
    runs, before = [], os.getloadavg()
    for name in args.config.split(","):
        if name not in SIZES:
            parser.error(f"--config {name}: must be of {', '.join(SIZES)}")
        runs.append(compare(name, args))
        print(f"mixtral {name}, {args.batch} x {args.seq_len} tokens, {args.cores} threads, float32")
        for contender, row in runs[-1]["results"].items():
            most = row["peak_bytes"] / 1e6
            print(f"{contender:24}{row['median_s']:9.4f} s{row['fzero_is_x_faster']:8.2f} x{most:9.1f} MB")
    if args.out:
        write_run(args.out, before, torch=torch.__version__, transformers=hf.__version__, runs=runs)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"moe.py: {error}")
