"""What a curriculum, or another change of what a step trains on, does for a small run: steps and processor time to the
validation loss that a plain run ends with.

    python benchmarks/curricula.py --out benchmarks/results/curricula.json
    python benchmarks/curricula.py --ways layer_drop --out benchmarks/results/curricula-layers.json
    python benchmarks/curricula.py --corpus lines --every 30 --out benchmarks/results/curricula-lines.json

A Llama of some 50,000 parameters learns the modules at the top of Python's standard library, byte by byte, plainly and
by each way of docs/data.md, with each of some seeds, which draw its parameters and its order. Every run has the same
steps. A figure is the first step after which an evaluation has the loss that the plain run of that seed ends with, and
the processor time of the train steps until then, as a part of that of the plain run's steps.

Rates that follow the batch are for documents of many lengths: here the modules' lines, each a document in a row of its
own (`data.packing = "buckets"`). A scale is also another rate in the mean, so all of these are run with each of RATES;
the plain one is that without a scale, with the rate that ends best.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import write_run

from fzero import data
from fzero.run.config.config_table import from_table
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import count_samples, stage_of_step
from fzero.run.runner import evaluate
from fzero.run.setup import corpus
from fzero.run.setup.build import build, first_state
from fzero.sharding import one_process

SEQ_LEN, BATCH, RATE = 64, 16, 1e-2
RATES = (1e-3, 3e-3, RATE)  # of the runs whose rate follows the batch
ORDER = {"curriculum_schedule": "root:2", "curriculum_start": 0.1}
SIZES = {"vocab_size": 256, "d_model": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "d_ff": 96, "max_len": SEQ_LEN}
Own = dict[str, dict[str, Any]]  # the values of a config that are a way's own, by section


class Run(NamedTuple):
    """What a run gave after each so many steps."""

    losses: list[float]  # of the validation split
    cpu_s: list[float]  # processor time of the train steps so far


def ways_of_modules(steps: int) -> dict[str, Own]:
    """{name: its own values} of the runs on modules, the plain one first."""
    half, tokens = steps // 2, steps * BATCH * SEQ_LEN
    order = {**ORDER, "curriculum_steps": half}
    return {
        "plain": {},
        **{name: {"data": {"curriculum": name, **order}} for name in ("length", "rarity", "loss")},
        "seq_len_warmup": {"data": {"seq_len_warmup": f"16:16:{tokens // 8}"}},
        "random_ltd": {"train": {"random_ltd_ramp": f"32:8:{tokens // 6}"}},
        # After a quarter of the run θ has gone nine tenths of its way from 1 to 0.5.
        "layer_drop": {"train": {"layer_drop_theta": 0.5, "layer_drop_gamma": 4 * math.log(10) / steps}},
    }


def ways_of_lines() -> dict[str, Own]:
    """{name: its own values} of the runs on lines, those without a scale first."""
    scales = {"buckets": {}, **{scale: {"lr_scaling": scale} for scale in ("linear", "sqrt")}}
    return {
        f"{name}@{rate:g}": {"data": {"packing": "buckets"}, "optim": {"lr": rate, **own}}
        for name, own in scales.items()
        for rate in RATES
    }


def config_of(folder: Path, steps: int, seed: int, own: Own) -> RunConfig:
    """The config of a run."""
    schedule = {"warmup_steps": steps // 20}
    return from_table(
        {
            "preset": "",
            "model": {"family": "llama", **SIZES},
            "data": {"path": str(folder), "seq_len": SEQ_LEN, **own.get("data", {})},
            "optim": {"lr": RATE, "schedule": schedule, **own.get("optim", {})},
            "precision": {"policy": "fp32", "fp32_matmul": "default"},
            "train": {
                "steps": steps,
                "batch": BATCH,
                "micro_batch": BATCH,
                "seed": seed,
                "compiled": False,
                "measure_every": 0,
                **own.get("train", {}),
            },
        }
    )


def trained(config: RunConfig, folder: Path, every: int) -> tuple[Run, Any]:
    """(what a run gave, evaluated after each `every` steps, its last state)."""
    mesh, state, stage, found, used = one_process(), None, None, Run([], []), 0.0
    job: Any = None
    for step in range(config.train.steps):
        if (now := stage_of_step(config, step)) != stage:
            stage, job = now, build(now.config, mesh)
            batch_at, validation = corpus.open_data(now.config, folder, mesh)
        state = first_state(job) if state is None else state
        batch, begun = batch_at(count_samples(config, step)), time.process_time()
        state, _ = job.train_step(state, batch)
        used += time.process_time() - begun
        if (step + 1) % every == 0:
            sums = [job.eval_step(state.params, batch) for batch in validation()]
            found.losses.append(float(sum(s.total for s in sums) / sum(s.num_tokens for s in sums)))
            found.cpu_s.append(used)
    return found, state


def rounded(values: list[float]) -> list[float]:
    """The values with four digits after the point."""
    return [round(value, 4) for value in values]


def compare(ways: dict[str, Own], plain: Sequence[str], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of all ways on a corpus, beside that of `plain` whose runs end best in the mean."""
    seeds = range(args.seeds)
    runs: dict[str, list[Run]] = {}
    for name, own in ways.items():
        runs[name] = [trained(config_of(folder, args.steps, seed, own), folder, args.every)[0] for seed in seeds]
        print(f"{name:24} ends with {rounded([run.losses[-1] for run in runs[name]])}", flush=True)
    best = min(plain, key=lambda name: statistics.mean(run.losses[-1] for run in runs[name]))
    out: dict[str, Any] = {}
    for name, found in runs.items():
        reached = [first_below(its.losses[-1], run.losses) for its, run in zip(runs[best], found, strict=True)]
        shares = [
            None if at is None else round(run.cpu_s[at] / its.cpu_s[-1], 3)
            for at, run, its in zip(reached, found, runs[best], strict=True)
        ]
        out[name] = {
            "last": rounded([run.losses[-1] for run in found]),
            "steps_to_plain": [None if at is None else (at + 1) * args.every for at in reached],
            "cpu_of_plain": shares,
            "cpu_s": rounded([run.cpu_s[-1] for run in found]),
            "losses": [rounded(run.losses) for run in found],
        }
    return {"plain": best, "targets": rounded([run.losses[-1] for run in runs[best]]), "ways": out}


def first_below(target: float, losses: list[float]) -> int | None:
    """The number of the first evaluation that has this loss; None if none has."""
    return next((i for i, loss in enumerate(losses) if loss <= target), None)


def prepare_modules(place: Path, steps: int, ways: Container[str]) -> Path:
    """A corpus of modules in the folder `place`, with the analyses that these ways read."""
    folder = place / "modules"
    data.prepare(modules(), folder, val_fraction=0.05)
    for metric in ("length", "rarity"):
        if metric in ways:
            data.analyze(folder, metric, seq_len=SEQ_LEN)
    if "loss" in ways:
        # The reference is a plain run of another seed.
        config = config_of(folder, steps, 1000, {})
        _, state = trained(config, folder, steps)
        measure = evaluate.row_loss_of(build(config, one_process()).model, state.params, torch.device("cpu"))
        data.analyze(folder, "loss", seq_len=SEQ_LEN, measure=measure, origin="a plain run", rows_at_once=64)
    return folder


def prepare_lines(place: Path) -> Path:
    """A corpus of the modules' lines, without empty ones, in the folder `place`."""
    source, folder = place / "lines.jsonl", place / "lines"
    with source.open("w", encoding="utf-8") as file:
        for path in modules():
            text = path.read_text(encoding="utf-8", errors="replace")
            file.writelines(json.dumps({"text": line}) + "\n" for line in text.splitlines() if line.strip())
    data.prepare(source, folder, val_fraction=0.05)
    return folder


def modules() -> list[Path]:
    """The modules at the top of Python's standard library."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", choices=("modules", "lines"), default="modules")
    parser.add_argument("--ways", default="", help="some of them, such as plain,layer_drop; by default all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, steps = os.getloadavg(), args.steps
    ways = ways_of_lines() if args.corpus == "lines" else ways_of_modules(steps)
    plain = [name for name in ways if name.startswith(("plain", "buckets"))]
    if args.ways:
        names = [*plain, *args.ways.split(",")]
        if other := set(names) - set(ways):
            parser.error(f"--ways {args.ways}: has {other.pop()}; the ways are {', '.join(ways)}")
        ways = {name: ways[name] for name in names}
    with tempfile.TemporaryDirectory() as home:
        place = Path(home)
        folder = prepare_lines(place) if args.corpus == "lines" else prepare_modules(place, steps, ways)
        found = compare(ways, plain, folder, args)
    if args.out:
        own = {"corpus": args.corpus, "seeds": args.seeds, "steps": steps, "tokens_a_step": BATCH * SEQ_LEN}
        write_run(args.out, before, torch=torch.__version__, **own, **found)
    for name, way in found["ways"].items():
        print(f"{name:24} {statistics.mean(way['last']):.4f} {way['steps_to_plain']} {way['cpu_of_plain']}")


if __name__ == "__main__":
    main()
