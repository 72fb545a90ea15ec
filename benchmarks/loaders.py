"""Rows a second of `fzero`'s stream of batches beside MosaicML streaming's and litdata's loaders, on the same tokens.

    python benchmarks/loaders.py --peers PEERS/bin/python --out benchmarks/results/loaders.json

PEERS is an environment with mosaicml-streaming, litdata and torch. The tokens are the bytes of random words, in the
format of each system, rows of T + 1; every system gives shuffled batches [B, T + 1] or two of [B, T] from files on
this machine, without and with worker processes of its own (fzero has none: a thread of a run reads ahead). A turn is a
process of its own, whose first batch is not counted; the systems take turns, and the figure is the median.

`waiting` is the part of a tiny run's steps in which it waited for data, by its metrics: `fzero pretrain` of llama-tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from remote_data import write_corpus
from turns import write_run

HERE = Path(__file__).resolve().parent
SYSTEMS = {"fzero": (0,), "streaming": (0, 2), "litdata": (0, 2)}  # and the workers of their turns


def read(corpus: str, batch: str, steps: str, length: str) -> None:
    """A turn of fzero's own."""
    import torch

    from fzero import data

    torch.set_num_threads(1)
    stream = data.TokenStream(data.open_tokens(corpus), int(length), int(batch))
    stream.batch_at(0)
    begun = time.perf_counter()
    total = sum(int(stream.batch_at(1 + i)["tokens"][:, 0].sum()) for i in range(int(steps)))
    print("rows_per_s", int(steps) * int(batch) / (time.perf_counter() - begun), "sum", total)


def turn(name: str, workers: int, args: argparse.Namespace, folder: Path) -> float:
    """Rows a second of one process."""
    if name == "fzero":
        given = [str(folder / "corpus"), str(args.batch), str(args.steps), str(args.seq_len)]
        command = [sys.executable, str(Path(__file__).resolve()), "read", *given]
    else:
        command = [args.peers, str(HERE / "peers" / "loaders.py"), name, "read", str(folder)]
        command += [str(args.batch), str(args.steps), str(workers)]
    env = os.environ | {"PYTHONPATH": str(HERE.parent) if name == "fzero" else "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    said = re.search(r"^rows_per_s ([\d.]+)", ended.stdout, re.M)
    if ended.returncode or said is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    print(f"{name}, {workers} workers: {float(said[1]):,.0f} rows/s", flush=True)
    return float(said[1])


def waiting(folder: Path) -> dict[str, float]:
    """Of the steps of a tiny run after its first ten: the median step, and of the part that waited for data."""
    command = [
        sys.executable,
        "-m",
        "fzero",
        "pretrain",
        "--model",
        "llama-tiny",
        "--steps",
        "60",
        "--out",
        str(folder / "run"),
    ]
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("step", 0) > 10 and "data_s" in row]
    parts = [row["data_s"] / row["step_s"] for row in rows]
    return {"step_s": statistics.median(row["step_s"] for row in rows), "of_step": statistics.median(parts)}


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        read(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="The python of an environment with the other systems.")
    for name, value in (("mb", 64), ("seq-len", 1024), ("batch", 16), ("steps", 1000), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, rows = os.getloadavg(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = write_corpus(folder, args.mb) / "train.bin"
        np.fromfile(tokens, np.uint8).astype(np.uint16).tofile(folder / "tokens.bin")  # theirs are of any vocabulary
        for name in [name for name in SYSTEMS if name != "fzero"]:
            given = [str(folder), str(folder / "tokens.bin"), str(args.seq_len)]
            command = [args.peers, str(HERE / "peers" / "loaders.py"), name, "write", *given]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, list[float]] = {}
        for _ in range(args.turns):
            for name, each in SYSTEMS.items():
                for workers in each:
                    found.setdefault(f"{name}, {workers} workers", []).append(turn(name, workers, args, folder))
        for name, each in found.items():
            rows[name] = {"rows_per_s": statistics.median(each), "from_to": [min(each), max(each)]}
        waited = waiting(folder)
    print(json.dumps(rows | {"waiting": waited}, indent=1))
    if args.out:
        write_run(args.out, before, seq_len=args.seq_len, batch=args.batch, systems=rows, waiting=waited)


if __name__ == "__main__":
    main()
