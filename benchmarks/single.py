"""fzero's training step beside other single-process implementations of the same step, in one sitting.

    python benchmarks/single.py --config small-v256,small-v32000 --dtype fp32,bf16 --out benchmarks/results/single.json
    python benchmarks/single.py --config small-v256 --dtype fp32 --profile fzero+onednn

The contenders (`peers/`) get the same weights, batches and optimizer settings, each in its own process; no speed is
printed unless their losses agree. They take turns, one step each a round; ratios are between steps of the same round.
Peers appear at their defaults and again with our switches (`eager+onednn`). Memory comes from further processes, one a
contender: live tensor bytes at the peak of a step (`live_bytes.py`; XLA's own plan for JAX), and beside it the timed
process's resident-set high-water mark.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import problem

HERE = Path(__file__).resolve().parent
CONTENDERS = {
    "fp32": ("fzero+onednn", "eager", "compile", "jax", "eager+onednn", "compile+onednn"),
    "bf16": ("fzero", "eager", "compile", "jax", "eager+all-bf16", "compile+all-bf16"),
}
# Largest relative difference between two contenders' losses, at every warm-up step: the first shows that they are one
# model, the later ones the same gradients and AdamW. bf16 programs round at different places, hence the wider figure.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
SKIPPABLE = ("jax",)  # not needed by fzero, so often absent; another absence is an error


class Worker:
    """A contender's process: `ask` sends a line and waits for the reply; ValueError where the process refuses."""

    def __init__(self, contender: str, order: dict[str, Any]):
        name, *switches = contender.split("+")
        self.contender = contender
        threads = str(order["threads"])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "6"},
        )
        self.first = self.ask({"name": name, "switches": switches} | order)

    def ask(self, value: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.contender}: its process ended with code {self.process.wait()}; its error is above")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"{self.contender}: {answer['error']}")
        if "absent" in answer and self.contender not in SKIPPABLE:
            raise ValueError(f"{self.contender}: {answer['absent']}; install it, or leave it out of --contenders")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def disagreement(losses: dict[str, list[float]], dtype: str) -> str:
    """What is wrong with the warm-up losses, or "" where they agree within LOSS_TOLERANCE."""
    for i, at_step in enumerate(zip(*losses.values())):
        low, high = min(at_step), max(at_step)
        if not all(map(math.isfinite, at_step)) or high - low > LOSS_TOLERANCE[dtype] * low:
            table = "\n".join(f"  {name:20} {loss:.8f}" for name, loss in zip(losses, at_step))
            allowed = f"allowed {LOSS_TOLERANCE[dtype]:.0e} ({dtype})"
            return f"losses of step {i + 1} differ by {(high - low) / low:.1e}, {allowed}:\n{table}"
    return ""


def summary(name: str, ours: list[float], rows: list[dict], tokens: int) -> dict[str, Any]:
    """Figures of one contender; `ours_is_x_faster` are quotients of steps of the same round."""
    times = [row["step_s"] for row in rows]
    ratios = [theirs / our for theirs, our in zip(times, ours)]
    median = statistics.median(times)
    return {
        "contender": name,
        "step_s": times,
        "min_s": min(times),
        "median_s": median,
        "spread": (max(times) - min(times)) / median,
        "tokens_per_s_best": tokens / min(times),
        "tokens_per_s_median": tokens / median,
        "ours_is_x_faster": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "rss_peak_bytes": rows[-1]["rss_peak_bytes"],
    }


def compare(config_name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """One comparison: warm up, check the losses, take turns, count memory; ValueError where the losses differ."""
    config = problem.CONFIGS[config_name]
    order = {
        "config": dataclasses.asdict(config),
        "dtype": dtype,
        "batch": args.batch,
        "threads": args.threads,
        "warmup": args.warmup,
        "seed": args.seed,
    }
    contenders = args.contenders.split(",") if args.contenders else CONTENDERS[dtype]
    workers: dict[str, Worker] = {}
    skipped, steps = {}, {}
    load_before = os.getloadavg()
    try:
        for name in contenders:
            print(f"{config_name} {dtype}: warming up {name}", file=sys.stderr)
            worker = Worker(name, order | {"mode": "time"})
            workers[name] = worker
            if "absent" in worker.first:
                skipped[name] = worker.first["absent"]
                workers.pop(name).close()
        losses = {name: w.first["losses"] for name, w in workers.items()}
        if problem_found := disagreement(losses, dtype):
            raise ValueError(f"{config_name}: {problem_found}")
        steps = {name: [] for name in workers}
        for i in range(args.repeats):
            for name, worker in workers.items():
                steps[name].append(worker.ask(args.warmup + i))
    finally:
        for worker in workers.values():
            worker.close()
    first = next(iter(steps))
    ours = [row["step_s"] for row in steps[first]]
    tokens = args.batch * config.max_len
    results = [summary(name, ours, rows, tokens) | workers[name].first for name, rows in steps.items()]
    for row in results:
        print(f"{config_name} {dtype}: memory of {row['contender']}", file=sys.stderr)
        counter = Worker(row["contender"], order | {"mode": "live"})
        row["live"] = counter.first
        counter.close()
    return {
        "config_name": config_name,
        **order,
        "tokens_per_step": tokens,
        "repeats": args.repeats,
        "baseline": first,
        "skipped": skipped,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "results": results,
    }


def table(run: dict[str, Any]) -> str:
    """The comparison as text: one line a contender, the first one being the measure of the ratios."""
    length = run["config"]["max_len"]
    lines = [
        f"{run['config_name']} {run['dtype']}, {run['batch']} x {length} tokens, {run['threads']} threads, "
        f"{run['repeats']} rounds; ratios are to {run['baseline']} (above 1: it is faster, or needs less)",
        f"{'contender':18}{'min s':>9}{'median s':>10}{'spread':>8}{'tok/s':>9}  {'speed ratio [min, max]':24}"
        f"{'live MB':>9}{'ratio':>7}{'RSS MB':>9}",
    ]
    base = run["results"][0]["live"]["peak_bytes"]
    for r in run["results"]:
        x = r["ours_is_x_faster"]
        ratio = f"{x['median']:.3f} [{x['min']:.3f}, {x['max']:.3f}]"
        live = r["live"]["peak_bytes"]
        rss = f"{r['rss_peak_bytes'] / 1e6:9.1f}" if r["rss_peak_bytes"] else f"{'-':>9}"
        lines.append(
            f"{r['contender']:18}{r['min_s']:9.4f}{r['median_s']:10.4f}{r['spread']:8.1%}{r['tokens_per_s_median']:9.0f}"
            f"  {ratio:24}{live / 1e6:9.1f}{live / base:7.2f}{rss}"
        )
    lines += [f"{name:18}skipped: {why}" for name, why in run["skipped"].items()]
    if any(r["contender"] == "jax" for r in run["results"]):
        lines.append("live MB of jax: XLA's plan of the compiled step; of the others: counted by torch's allocator")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures depend on besides the programs: CPU, cores, Python, operating system, commit."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        found = {k.strip(): v.strip() for k, v in found.items()}
        model = f"{found.get('model name', model)} (family {found.get('cpu family')}, model {found.get('model')})"
    described = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": described.stdout.strip() or "unknown",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="small-v256", help=f"comma list of {', '.join(problem.CONFIGS)}")
    parser.add_argument("--dtype", default="fp32", help="comma list of fp32, bf16")
    parser.add_argument("--contenders", help="comma list; the first is what ratios refer to (default: by dtype)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of one step each, at least 9")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", metavar="CONTENDER", help="only print where this contender's step spends its time")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    for name, value, allowed in (("config", args.config, problem.CONFIGS), ("dtype", args.dtype, CONTENDERS)):
        for part in value.split(","):
            if part not in allowed:
                parser.error(f"--{name}: {part!r} is not one of {', '.join(allowed)}")
    for name, least in (("batch", 1), ("threads", 1), ("warmup", 2), ("repeats", 9)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    return args


def main() -> None:
    args = parse()
    pairs = [(c, d) for c in args.config.split(",") for d in args.dtype.split(",")]
    runs = []
    for config_name, dtype in pairs:
        if args.profile:
            fixed = {"config": dataclasses.asdict(problem.CONFIGS[config_name]), "dtype": dtype, "mode": "profile"}
            given = {name: getattr(args, name) for name in ("batch", "threads", "warmup", "seed")}
            worker = Worker(args.profile, fixed | given)
            print(f"{config_name} {dtype} {args.profile}\n{worker.first['table']}")
            worker.close()
        else:
            runs.append(compare(config_name, dtype, args))
            print(table(runs[-1]) + "\n", flush=True)
    if args.out and runs:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        command = shlex.join(["python", "benchmarks/single.py", *sys.argv[1:]])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"command": command, "date": now, "machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"single.py: {error}")
