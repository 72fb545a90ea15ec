"""Pipelines on four ranks: the bubble of each schedule beside `play`, and steps beside torch.distributed.pipelining.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline-4.json

Bubble: layers sleep instead of computing (`bubble.py`), so the ranks need no cores; the step as measured, by what
`fzero.sharding.pipeline.play` says of it with the time of a layer's sleep and of a message, both measured in the run.

Steps: for each schedule that both have, ours eager, torch's and ours compiled have the same weights, batches, stages,
micro-batches and AdamW; one step each a round. Losses must agree. CPU seconds are of all ranks: on fewer cores than
ranks they are what a step costs, and other load changes them less than its time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

import bubble
from peers import problem
from peers.torch_pipelining import SCHEDULES as THEIRS
from turns import Group, columns, free_port, machine, sitting

from fzero.sharding.pipeline_plan import SCHEDULES

RANKS, DTYPE = 4, "fp32"


def start(name: str, mode: str, order: dict[str, Any]) -> Group:
    """The contender's processes, a rank each."""
    env = {
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else every rank keeps a pool of compiling processes
    }
    return Group(name, [order | {"mode": mode, "rank": rank} for rank in range(RANKS)], env=env)


def compare(schedule: str, args: argparse.Namespace) -> dict[str, Any]:
    """One sitting; ValueError where the losses differ."""
    config = problem.CONFIGS[args.config]
    rows = {"batch": args.rows * args.parts, "parts": args.parts, "ranks": RANKS, "cores": args.cores, "threads": 1}
    order = {"config": dataclasses.asdict(config), "dtype": DTYPE, "warmup": args.warmup, "seed": args.seed, **rows}
    title, before = f"{args.config} {DTYPE}, {RANKS} ranks, {schedule}", os.getloadavg()
    contenders = [f"fzero-pp={schedule}", f"pipelining={schedule}", f"fzero-pp={schedule}+compile"]
    contenders += [f"deepspeed-pp={schedule}"] * (args.deepspeed and schedule == "1f1b")
    results, _ = sitting(
        contenders,
        lambda name, mode: start(name, mode, order),
        title=title,
        dtype=DTYPE,
        warmup=args.warmup,
        repeats=args.repeats,
        tokens=rows["batch"] * config.max_len,
        together=True,
    )
    for row in results:
        row["cpu_by_ours"] = median(a / b for a, b in zip(row["cpu_s"], results[0]["cpu_s"]))
    return {
        "title": title,
        **order,
        "repeats": args.repeats,
        "baseline": contenders[0],
        "load_average": {"before": before, "after": os.getloadavg()},
        "results": results,
    }


def table(run: dict[str, Any]) -> str:
    """The sitting as text."""
    lines = [f"{run['title']}: {run['parts']} micro-batches, {run['repeats']} rounds; ratios are to {run['baseline']}"]
    head, *rows = columns(run["results"])
    lines.append(f"{head}{'CPU s':>9}{'ratio':>8}")
    for line, row in zip(rows, run["results"]):
        lines.append(f"{line}{median(row['cpu_s']):9.3f}{row['cpu_by_ours']:8.3f}")
    losses = [row["losses"] for row in run["results"]]
    apart = max((max(step) - min(step)) / min(step) for step in zip(*losses))
    return "\n".join([*lines, f"losses of the first steps are apart by at most {apart:.1e}"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="comma list; 1f1b/4: of 4 delayed updates")
    parser.add_argument("--sections", default="bubble,steps", help="comma list of bubble, steps")
    parser.add_argument("--deepspeed", action="store_true", help="its PipelineModule too, beside 1f1b")
    parser.add_argument("--config", default="middle", choices=problem.CONFIGS, help="the model of the steps")
    parser.add_argument("--parts", type=int, default=8, help="micro-batches of an update, a multiple of 4")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--layer-ms", type=float, default=30.0, help="the sleep of a layer in each of its three passes")
    parser.add_argument("--cores", type=int, default=2, help="cores that all ranks share in the steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of one step each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write, after every part")
    args = parser.parse_args()
    args.schedules, args.sections = args.schedules.split(","), args.sections.split(",")
    for what, given, allowed in (
        ("schedules", args.schedules, SCHEDULES),
        ("sections", args.sections, ("bubble", "steps")),
    ):
        for one in given:
            if what == "schedules" and re.fullmatch(r"[^/]+/[1-9]\d{0,2}", one):
                one = one.partition("/")[0]
            if one not in allowed:
                parser.error(f"--{what}: {one!r} is not one of {', '.join(allowed)}")
    if args.parts < RANKS or args.parts % RANKS:
        parser.error(f"--parts {args.parts}: must be a multiple of {RANKS}")
    for name, least in (("rows", 1), ("cores", 1), ("warmup", 2), ("repeats", 1), ("layer_ms", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    return args


def main() -> None:
    args = parse()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/pipeline.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "runs": [],
    }

    def keep() -> None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    if "bubble" in args.sections:
        repeats = min(args.repeats, 5)  # sleeping varies little
        report["bubble"] = bubble.bubbles(args.schedules, RANKS, args.parts, args.layer_ms / 1e3, repeats)
        print("\n".join(bubble.table(report["bubble"])) + "\n", flush=True)
        keep()
    for schedule in args.schedules if "steps" in args.sections else ():
        if schedule in THEIRS:
            report["runs"].append(compare(schedule, args))
            print(table(report["runs"][-1]) + "\n", flush=True)
            keep()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"pipeline.py: {error}")
