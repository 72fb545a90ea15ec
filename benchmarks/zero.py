"""fzero's ZeRO stages beside torch's DDP and FSDP2, DeepSpeed's ZeRO and JAX's FSDP, data-parallel over gloo ranks, in
one sitting.

    python benchmarks/zero.py --ranks 2,4 --dtype fp32,bf16 --peer-python deepspeed=PYTHON --out
    benchmarks/results/zero.json python benchmarks/zero.py --config tiny --batch 8 --ranks 2 --smoke --contenders
    fzero-3,fsdp2

A contender is a group of one process a rank, kept alive; the groups take turns, one step each a round, and wait in a
read between turns. A step is timed from the first rank's start to the last rank's end, and ratios are between steps of
the same round. Every peer is a sitting (all ranks of all contenders at once would not fit a small machine): ours at its
stage, the peer at its defaults, and again with our switches (`fsdp2+compile+reshard-root`). No speed is printed unless
the losses of the warm-up steps agree. Memory is a rank's: live tensor bytes at the peak of a step (the largest rank's;
XLA's plan for a device of JAX), and beside it the resident-set high-water mark of the timed processes (the one process
of JAX's devices)."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from peers import problem
from turns import LOSS_TOLERANCE, Group, columns, free_port, machine, sitting

PEERS = {
    "ddp": 0,
    "deepspeed-1": 1,
    "deepspeed-2": 2,
    "fsdp2": 3,
    "deepspeed-3": 3,
    "jax-fsdp": 3,
}  # and the stage of ours beside it
# The switches that make a peer do what ours does, besides onednn; and those that only matter for bf16.
EQUAL = {"ddp": "+compile+bucket-view", "fsdp2": "+compile+reshard-root", "deepspeed": "+compile+small-buckets"}
EQUAL_BF16 = {"ddp": "", "fsdp2": "+fp32-reduce", "deepspeed": "+fp32-reduce"}
NOTES = {
    "fzero": (
        "the block compiled once; bf16: bf16 parameters and gradients, fp32 master weights and states, reduced in fp32"
    ),
    "module": "torch's own module through fzero.from_module, its blocks compiled once; bf16 as fzero",
    "ddp": "bf16 is autocast over fp32 parameters; gradients are reduced in fp32",
    "fsdp2": (
        "bf16: shards and states are fp32, gathered and computed in bf16, reduced in bf16 or with +fp32-reduce in fp32"
    ),
    "deepspeed": "bf16: its bf16 mode (fp32 master weights and states), reduced in bf16 or with +fp32-reduce in fp32",
    "jax": (
        "one process, its devices share the threads; bf16: fp32 parameters cast in the step; live MB is XLA's "
        "plan for a device"
    ),
}


def kind(contender: str) -> str:
    """The library: `deepspeed` of `deepspeed-3+compile`."""
    return contender.split("+")[0].split("-")[0]


def contenders_of(peer: str, dtype: str, onednn: bool) -> list[str]:
    """Ours at the peer's stage, the peer at its defaults, and the peer with our switches where that is another
    program."""
    library, switch = kind(peer), "+onednn" if onednn and dtype == "fp32" else ""
    equal = [] if library == "jax" else [peer + EQUAL[library] + (EQUAL_BF16[library] if dtype == "bf16" else switch)]
    return [f"fzero-{PEERS[peer]}{switch}", peer, *equal]


def start(name: str, mode: str, order: dict[str, Any], pythons: dict[str, str]) -> Group:
    """The contender's processes: a rank each, or one for all of JAX's devices; the environment is torchrun's."""
    ranks = order["ranks"]
    world = 1 if kind(name) == "jax" else ranks
    env = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}",
        "JAX_PLATFORMS": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else every rank keeps a pool of compiling processes
    }
    orders = [order | {"mode": mode, "rank": rank, "ranks": world} for rank in range(world)]
    return Group(name, orders, python=pythons.get(kind(name), sys.executable), env=env)


def compare(
    config_name: str, dtype: str, ranks: int, contenders: list[str], counted: dict[str, dict], args: argparse.Namespace
) -> dict[str, Any]:
    """One sitting; ValueError where the losses differ. `counted` is `turns.sitting`'s."""
    config = problem.CONFIGS[config_name]
    order = {
        "config": dataclasses.asdict(config),
        "dtype": dtype,
        "batch": args.batch,
        "threads": 1,
        "cores": args.cores,
        "ranks": ranks,
        "warmup": args.warmup,
        "seed": args.seed,
    }
    title = f"{config_name} {dtype}, {ranks} ranks, {contenders[0]}"
    load_before = os.getloadavg()
    results, skipped = sitting(
        contenders,
        lambda name, mode: start(name, mode, order, args.peer_python),
        title=title,
        dtype=dtype,
        warmup=args.warmup,
        repeats=args.repeats,
        tokens=args.batch * config.max_len,
        skippable=contenders if args.skip_absent else (),
        counted=counted,
    )
    return {
        "title": title,
        "config_name": config_name,
        **order,
        "tokens_per_step": args.batch * config.max_len,
        "repeats": args.repeats,
        "baseline": results[0]["contender"],
        "skipped": skipped,
        "notes": {name: NOTES[name] for name in dict.fromkeys(kind(r["contender"]) for r in results) if name in NOTES},
        "loss_tolerance": LOSS_TOLERANCE[dtype],
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "results": results,
    }


def table(run: dict[str, Any]) -> str:
    """The sitting as text: one line a contender, the first one being the measure of the ratios."""
    losses = [r["losses"] for r in run["results"]]
    apart = [(max(at_step) - min(at_step)) / min(at_step) for at_step in zip(*losses)]
    lines = [
        f"{run['title']}: {run['batch']} x {run['config']['max_len']} tokens a step, {run['threads']} thread a rank "
        f"on {run['cores']} cores, {run['repeats']} rounds; ratios are to {run['baseline']} (above 1: it is faster, or "
        "needs less)",
        *columns(run["results"]),
        f"losses of the warm-up steps: {', '.join(f'{x:.6f}' for x in losses[0])}; apart by "
        f"{', '.join(f'{x:.1e}' for x in apart)}",
    ]
    lines += [f"{name}: skipped: {why}" for name, why in run["skipped"].items()]
    return "\n".join(lines + [f"{name}: {note}" for name, note in run["notes"].items()])


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="small-v256", help=f"comma list of {', '.join(problem.CONFIGS)}")
    parser.add_argument("--dtype", default="fp32", help="comma list of fp32, bf16")
    parser.add_argument("--ranks", default="2", type=numbers, help="comma list of group sizes")
    parser.add_argument(
        "--stages", default="0,1,2,3", type=numbers, help="comma list of ZeRO stages; a sitting for each peer of them"
    )
    parser.add_argument("--contenders", help="comma list for one sitting instead; the first is what ratios refer to")
    parser.add_argument("--skip-absent", action="store_true", help="leave out a peer whose library is not installed")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="the Python with that peer's libraries",
    )
    parser.add_argument(
        "--onednn", action="store_true", help="fp32: ours, and the peers with our switches, with the switch onednn"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--cores", type=int, default=2, help="cores that all ranks share")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of one step each, at least 9")
    parser.add_argument("--smoke", action="store_true", help="2 rounds: whether everything runs, not how fast it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write, after every sitting")
    args = parser.parse_args()
    for name, value, allowed in (("config", args.config, problem.CONFIGS), ("dtype", args.dtype, LOSS_TOLERANCE)):
        for part in value.split(","):
            if part not in allowed:
                parser.error(f"--{name}: {part!r} is not one of {', '.join(allowed)}")
    for stage in args.stages:
        if stage not in PEERS.values():
            parser.error(f"--stages: {stage} is not one of 0, 1, 2, 3")
    for ranks in args.ranks:
        if ranks < 2 or args.batch % ranks:
            parser.error(f"--ranks {ranks}: must be at least 2 and divide --batch {args.batch}")
    for name, least in (("cores", 1), ("warmup", 2), ("repeats", 9)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    for given in args.peer_python:
        if given.partition("=")[0] not in NOTES:
            parser.error(f"--peer-python {given!r}: must be PEER=PYTHON with a peer of {', '.join(NOTES)}")
    args.peer_python = dict(given.split("=", 1) for given in args.peer_python)
    if args.smoke:
        args.repeats = 2
    return args


def write_runs(out: Path, command: str, runs: list[dict]) -> None:
    """Write the results of some runs, with the command, the time and the machine."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"command": command, "date": now, "machine": machine(), "runs": runs}
    out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    args = parse()
    given = sys.argv[1:]
    for peer, python in args.peer_python.items():  # where somebody keeps an environment is not part of the result
        given = [part.replace(f"{peer}={python}", f"{peer}=PYTHON") for part in given]
    command = shlex.join(["python", "benchmarks/zero.py", *given])
    runs = []
    for config_name, dtype, ranks in itertools.product(args.config.split(","), args.dtype.split(","), args.ranks):
        sittings = [contenders_of(peer, dtype, args.onednn) for peer, stage in PEERS.items() if stage in args.stages]
        counted: dict[str, dict] = {}
        for contenders in [args.contenders.split(",")] if args.contenders else sittings:
            runs.append(compare(config_name, dtype, ranks, contenders, counted, args))
            print(table(runs[-1]) + "\n", flush=True)
            if args.out:
                write_runs(args.out, command, runs)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"zero.py: {error}")
