"""What training keeps of its speed beside busy processes, by how its threads wait for work.

    python benchmarks/shared_cores.py --out benchmarks/results/shared-cores.json

A process for each way of waiting makes the steps of `fzero pretrain` (its default model, a thread a core). They take
turns, some steps each: alone, beside one process that never sleeps, and beside four; who has no turn sleeps in a read.
`spinning` is OpenMP's default: a thread without work tries again for milliseconds before it sleeps. `fzero` is what
the command does (fzero/run/setup/process_settings.py). NAME=VALUE is that variable alone. Figures are medians
over rounds; `kept` divides by the tokens/s of `spinning` alone in the same round. Use an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from turns import machine

from fzero.run.config.config_table import recipe
from fzero.run.setup import machine as here
from fzero.run.setup.build import build, first_state
from fzero.run.setup.process_settings import WAIT_VARIABLES, sleep_while_shared

BESIDE = (0, 1, 4)
WARMUP = 3
SETTLE = 3  # steps alone before those that are timed: threads that slept spin again only after 2 s of quiet


def steps_on_request() -> None:
    """A line on stdin asks for so many steps of the default run; the reply is their tokens/s."""
    here.share_cores(1)
    config, _ = here.resolve_here(recipe("llama-tiny"))
    job = build(config)
    state = first_state(job)
    rows = torch.randint(0, 256, (config.train.batch, config.data.seq_len), generator=torch.Generator().manual_seed(0))
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            state, metrics = job.train_step(state, {"tokens": rows, "targets": rows})
            float(metrics.loss)
        print(int(line) * rows.numel() / (time.perf_counter() - begin), flush=True)


def start(way: str) -> subprocess.Popen[str]:
    """A process that makes steps on request and waits in this way, after its first steps."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (*WAIT_VARIABLES, "OMP_NUM_THREADS")
    }
    if "=" in way:
        name, _, value = way.partition("=")
        environment[name] = value
    command = [sys.executable, __file__, "--worker", way]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    rate(process, WARMUP)
    return process


def rate(process: subprocess.Popen[str], steps: int) -> float:
    """The tokens/s of some steps of the process, which are made now."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a worker ended with code {process.wait()}; its error is above")
    return float(line)


@contextlib.contextmanager
def beside(number: int) -> Iterator[None]:
    """A context in which so many other processes compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(ways: list[str], rounds: int, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """{way: {number of busy processes: median tokens/s and what is kept of `spinning` alone}}."""
    workers = {way: start(way) for way in ways}
    rates: dict[tuple[str, int], list[float]] = {(way, busy): [] for way in ways for busy in BESIDE}
    for i in range(rounds):
        for busy in BESIDE:
            with beside(busy):
                for way in ways[:: 1 if i % 2 else -1]:
                    if not busy:
                        rate(workers[way], SETTLE)
                    rates[way, busy].append(rate(workers[way], steps))
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    alone = rates["spinning", 0]
    return {
        way: {
            str(busy): {
                "tokens_per_s": statistics.median(rates[way, busy]),
                "kept": statistics.median(a / b for a, b in zip(rates[way, busy], alone)),
            }
            for busy in BESIDE
        }
        for way in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="spinning,fzero", help="comma list; the first is `spinning`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.worker:
        with sleep_while_shared() if args.worker == "fzero" else contextlib.nullcontext():
            steps_on_request()
        return
    load = os.getloadavg()
    table = measure(args.ways.split(","), args.rounds, args.steps)
    print(f"{'tokens/s (kept)':28}" + "".join(f"{f'beside {busy}':>18}" for busy in BESIDE))
    for way, row in table.items():
        cells = "".join(f"{x['tokens_per_s']:>11,.0f} ({x['kept']:4.0%})" for x in row.values())
        print(f"{way:28}{cells}")
    if args.out:
        about = {"command": shlex.join(["python", "benchmarks/shared_cores.py", *sys.argv[1:]]), "machine": machine()}
        about |= {"load_average_before": load, "rounds": args.rounds, "steps": args.steps}
        args.out.write_text(json.dumps({**about, "beside": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
