"""Whether a change made `fzero pretrain` slower: a commit and this working tree, in turns.

    python benchmarks/same_speed.py 91b3968 --out benchmarks/results/same-speed.json

Two runs, of one process and of two ranks at stage 3. Of each round it takes the median time of a step after the first
two, and the time from the start of the process to its first row of metrics. The sides take turns, the first one
changing from round to round; a ratio is today's over the commit's in the same round. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from same_bits import TODAY, checked_out, git, machine
from same_bits_cases import flags_in

STEPS, SKIPPED = 11, 2
FLAGS = ("--model", "llama-tiny", "--batch", "8", "--micro-batch", "4", "--seq-len", "128", "--prompt", "")
FLAGS += ("--steps", str(STEPS), "--peak-tflops", "1", "--set", "train.log_every=1", "--set", "train.eval_every=0")
FLAGS += ("--set", "train.compiled=false")
RUNS = {"one process": (1, ()), "two ranks, stage 3": (2, ("--zero", "3"))}
MEASURED = ("step_s", "first_step_s")


def run_once(tree: Path, ranks: int, flags: tuple[str, ...], text: Path) -> dict[str, float]:
    """The seconds of a step, and to the first row, of one run with the fzero of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "run", "metrics.jsonl")
        launcher = [sys.executable, "-m"]
        if ranks > 1:
            launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        given = flags_in(str(tree), [*FLAGS, *flags])
        command = [*launcher, "fzero", "pretrain", *given, "--data", str(text), "--out", str(rows.parent)]
        env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks))}
        begin, first = time.perf_counter(), None
        with open(Path(folder, "log"), "wb+") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
            while process.poll() is None:
                if first is None and rows.exists() and rows.stat().st_size:
                    first = time.perf_counter() - begin
                time.sleep(0.005)
            log.seek(0)
            if process.returncode or first is None:
                raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read().decode()[-2000:]}")
        steps = [json.loads(line)["step_s"] for line in rows.read_text().splitlines()]
        return {"step_s": statistics.median(steps[SKIPPED:]), "first_step_s": first}


def compare(base: Path, rounds: int, text: Path) -> dict[str, dict[str, object]]:
    """{run and what was measured: medians of both sides, and the ratios of the rounds}."""
    found = {f"{run}, {what}": {"base": [], "today": []} for run in RUNS for what in MEASURED}
    for i in range(-1, rounds):  # the first round compiles and fills caches
        sides = [("base", base), ("today", TODAY)]
        for side, tree in sides if i % 2 else sides[::-1]:
            for run, (ranks, flags) in RUNS.items():
                for what, value in run_once(tree, ranks, flags, text).items():
                    found[f"{run}, {what}"][side] += [value] * (i >= 0)
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    out: dict[str, dict[str, object]] = {}
    for name, sides in found.items():
        ratios = [b / a for a, b in zip(sides["base"], sides["today"])]
        medians = {side: statistics.median(values) for side, values in sides.items()}
        out[name] = {**medians, "ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with checked_out(args.base) as tree, tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text.txt")
        text.write_text("the quick brown fox jumps over the lazy dog. " * 20000)
        rows = compare(tree, args.rounds, text)
    for name, row in rows.items():
        print(
            f"{name:34} {row['base']:7.3f} s -> {row['today']:7.3f} s, "
            f"ratio {row['ratio']:.3f} [{row['min']:.3f}, {row['max']:.3f}]"
        )
    if args.out:
        commits = {"base": git("rev-parse", "--short", args.base), "today": git("rev-parse", "--short", "HEAD")}
        about = {"command": " ".join(sys.argv), "commits": commits, "rounds": args.rounds, "machine": machine()}
        about |= {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
        args.out.write_text(json.dumps({**about, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
