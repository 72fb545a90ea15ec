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
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from peers import problem
from turns import Group, columns, machine, sitting

CONTENDERS = {
    "fp32": ("fzero+onednn", "eager", "compile", "jax", "eager+onednn", "compile+onednn"),
    "bf16": ("fzero", "eager", "compile", "jax", "eager+all-bf16", "compile+all-bf16"),
}
SKIPPABLE = ("jax",)  # not needed by fzero, so often absent; another absence is an error


def compare(config_name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """One comparison: warm up, check the losses, take turns, count memory; ValueError where the losses differ."""
    config = problem.CONFIGS[config_name]
    order = {
        "config": dataclasses.asdict(config),
        "dtype": dtype,
        "batch": args.batch,
        "threads": args.threads,
        "cores": args.threads,
        "rank": 0,
        "ranks": 1,
        "warmup": args.warmup,
        "seed": args.seed,
    }
    load_before = os.getloadavg()
    results, skipped = sitting(
        args.contenders.split(",") if args.contenders else CONTENDERS[dtype],
        lambda name, mode: Group(name, [order | {"mode": mode}]),
        title=f"{config_name} {dtype}",
        dtype=dtype,
        warmup=args.warmup,
        repeats=args.repeats,
        tokens=args.batch * config.max_len,
        skippable=SKIPPABLE,
    )
    return {
        "config_name": config_name,
        **order,
        "tokens_per_step": args.batch * config.max_len,
        "repeats": args.repeats,
        "baseline": results[0]["contender"],
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
        *columns(run["results"]),
    ]
    lines += [f"{name:18}skipped: {why}" for name, why in run["skipped"].items()]
    if any(r["contender"] == "jax" for r in run["results"]):
        lines.append("live MB of jax: XLA's plan of the compiled step; of the others: counted by torch's allocator")
    return "\n".join(lines)


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
            worker = Group(args.profile, [fixed | given | {"cores": args.threads, "rank": 0, "ranks": 1}])
            print(f"{config_name} {dtype} {args.profile}\n{worker.first[0]['table']}")
            worker.close()
        else:
            runs.append(compare(config_name, dtype, args))
            print(table(runs[-1]) + "\n", flush=True)
    if args.out and runs:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        command = shlex.join(["python", "benchmarks/single.py", *sys.argv[1:]])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"command": command, "date": now, "machine": machine(), "runs": runs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"single.py: {error}")
