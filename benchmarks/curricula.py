"""What a curriculum does for a small run: steps to the validation loss that a plain run ends with.

    python benchmarks/curricula.py --out benchmarks/results/curricula.json

A Llama of some 50,000 parameters learns the modules at the top of Python's standard library, byte by byte, plainly and
by each way of docs/data.md, with each of some seeds, which draw its parameters and its order. Every run has the same
steps and rate. A figure is the first step after which an evaluation has the loss that the plain run of that seed ends
with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from turns import write_run

from fzero import data
from fzero.run import corpus, row_losses
from fzero.run.build import build, first_state
from fzero.run.config import RunConfig
from fzero.run.config_table import from_table
from fzero.run.stages import samples_before, stage_at
from fzero.sharding import one_process

SEQ_LEN, BATCH, EVERY = 64, 16, 10
ORDER = {"curriculum_schedule": "root:2", "curriculum_start": 0.1}
SIZES = {"vocab_size": 256, "d_model": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "d_ff": 96, "max_len": SEQ_LEN}


def variants(steps: int) -> dict[str, dict[str, Any]]:
    """{name: the values of the config that are its own}."""
    half, tokens = steps // 2, steps * BATCH * SEQ_LEN
    order = {**ORDER, "curriculum_steps": half}
    return {
        "plain": {},
        **{name: {"data": {"curriculum": name, **order}} for name in ("length", "rarity", "loss")},
        "seq_len_warmup": {"data": {"seq_len_warmup": f"16:16:{tokens // 8}"}},
        "random_ltd": {"train": {"random_ltd_ramp": f"32:8:{tokens // 6}"}},
    }


def config_of(folder: Path, steps: int, seed: int, own: dict[str, Any]) -> RunConfig:
    """The config of a run."""
    schedule = {"warmup_steps": steps // 20}
    return from_table(
        {
            "preset": "",
            "model": {"family": "llama", **SIZES},
            "data": {"path": str(folder), "seq_len": SEQ_LEN, **own.get("data", {})},
            "optim": {"lr": 1e-2, "schedule": schedule},
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


def losses_of(config: RunConfig, folder: Path) -> tuple[list[float], Any]:
    """(the validation loss after each EVERY steps, the last state) of a run."""
    mesh, state, stage, found = one_process(), None, None, list[float]()
    job: Any = None
    for step in range(config.train.steps):
        if (now := stage_at(config, step)) != stage:
            stage, job = now, build(now.config, mesh)
            batch_at, validation = corpus.open_data(now.config, folder, mesh)
        state = first_state(job) if state is None else state
        state, _ = job.train_step(state, batch_at(samples_before(config, step)))
        if (step + 1) % EVERY == 0:
            sums = [job.eval_step(state.params, batch) for batch in validation()]
            found.append(float(sum(s.total for s in sums) / sum(s.num_tokens for s in sums)))
    return found, state


def rounded(values: list[float]) -> list[float]:
    """The values with four digits after the point."""
    return [round(value, 4) for value in values]


def compare(steps: int, seeds: int, folder: Path) -> dict[str, Any]:
    """The figures of all ways."""
    out: dict[str, Any] = {}
    runs: dict[str, list[list[float]]] = {}
    for name, own in variants(steps).items():
        runs[name] = [losses_of(config_of(folder, steps, seed, own), folder)[0] for seed in range(seeds)]
        print(f"{name:16} ends with {rounded([run[-1] for run in runs[name]])}", flush=True)
    targets = [run[-1] for run in runs["plain"]]
    for name, found in runs.items():
        reached = [first_below(target, run) for target, run in zip(targets, found, strict=True)]
        out[name] = {
            "last": rounded([run[-1] for run in found]),
            "steps_to_plain": reached,
            "losses": list(map(rounded, found)),
        }
    return {"targets": rounded(targets), "steps": steps, "tokens_a_step": BATCH * SEQ_LEN, "ways": out}


def first_below(target: float, losses: list[float]) -> int | None:
    """The first step after which a run has this loss; None if it never has."""
    return next(((i + 1) * EVERY for i, loss in enumerate(losses) if loss <= target), None)


def prepare(place: Path, steps: int) -> Path:
    """A corpus with its analyses, in the new folder `place`."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    folder = place / "corpus"
    data.prepare(sources, folder, val_fraction=0.05)
    for metric in ("length", "rarity"):
        data.analyze(folder, metric, seq_len=SEQ_LEN)
    # The reference is a plain run of another seed.
    config = config_of(folder, steps, 1000, {})
    _, state = losses_of(config, folder)
    measure = row_losses.row_loss_of(build(config, one_process()).model, state.params, torch.device("cpu"))
    data.analyze(folder, "loss", seq_len=SEQ_LEN, measure=measure, by="a plain run", rows_at_once=64)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as place:
        found = compare(args.steps, args.seeds, prepare(Path(place), args.steps))
    if args.out:
        write_run(args.out, before, torch=torch.__version__, seeds=args.seeds, **found)
    for name, way in found["ways"].items():
        print(f"{name:16} {statistics.mean(way['last']):.4f} {way['steps_to_plain']}")


if __name__ == "__main__":
    main()
