"""Predicted against measured step time on this machine, after `fzero bench`: twelve configurations, and the ranking of
eight meshes.

    fzero bench --disk FOLDER
    python benchmarks/plan_time.py --folder FOLDER --out benchmarks/results/plan-time.json
    python benchmarks/plan_time.py --cases llama-fp32,gpt2-bf16 --kinds

Each case is a RunConfig whose program runs its own steps on batches of the right shapes. Cases of as many ranks share
their processes and take turns, one step each a round, so that what else the machine does falls on all alike; the first
rounds are not counted. A step's time is that of its slowest rank, from a common start. The prediction reads the device
file and nothing of these steps."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import machine

import fzero
from fzero.planner.devices import Device, device
from fzero.planner.step_trace import trace_step
from fzero.planner.timing import Timing, predict
from fzero.run.config.config_table import from_table, to_json
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import build
from fzero.run.setup import machine as doctor

WARMUP = 3


class Case(NamedTuple):
    """A configuration by name, and the mesh that it runs on."""

    name: str
    mesh: dict[str, int]
    config: RunConfig

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())


def case(name: str, preset: str, mesh: dict[str, int] | None = None, **changes: Any) -> Case:
    """A case: AdamW, T = 256, four micro-batch rows; `changes` by section ("train_remat" is train.remat)."""
    table: dict[str, Any] = {
        "preset": preset,
        "optim": {"name": "adamw"},
        "data": {"seq_len": 256},
        "precision": {"policy": "fp32", "fp32_matmul": "default"},
        "train": {"batch": 4, "micro_batch": 4, "compiled": False},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("_")
        if isinstance(table.get(section), dict):
            table[section][leaf] = value
        else:
            table[key] = value
    return Case(name, mesh or {"dp": 1}, from_table(table))


def cases() -> list[Case]:
    """The twelve configurations."""
    bf16 = {"precision_policy": "bf16"}
    return [
        case("llama-fp32", "llama-tiny"),
        case("llama-fp32-4-parts", "llama-tiny", train_batch=16),
        case("llama-bf16-remat", "llama-tiny", train_remat="full", **bf16),
        case("llama-bf16-compiled", "llama-tiny", train_compiled=True, **bf16),
        case("gpt2-fp32-compiled", "gpt2-tiny", train_compiled=True),
        case("gpt2-bf16", "gpt2-tiny", **bf16),
        case("mixtral-fp32", "mixtral-tiny"),
        case("llama-small-bf16", "llama-small", data_seq_len=512, **bf16),
        case("llama-fp32-nvme", "llama-tiny", offload="params=nvme,opt=nvme"),
        case("llama-fp32-dp2-zero3", "llama-tiny", {"dp": 2}, zero=3, train_batch=8),
        case("gpt2-fp32-tp2", "gpt2-tiny", {"tp": 2}),
        case("llama-fp32-dp4-zero2", "llama-tiny", {"dp": 4}, zero=2, train_batch=16),
    ]


def meshes() -> list[Case]:
    """Eight meshes and stages of one problem: llama-tiny in fp32, 16 sequences a step in micro-batches of 2."""
    chosen = [
        ({"dp": 1}, 0),
        ({"dp": 2}, 0),
        ({"dp": 2}, 3),
        ({"tp": 2}, 0),
        ({"dp": 4}, 1),
        ({"dp": 4}, 3),
        ({"dp": 2, "tp": 2}, 3),
        ({"tp": 4}, 0),
    ]
    out = []
    for mesh, stage in chosen:
        said = "x".join(f"{axis}{size}" for axis, size in mesh.items())
        # llama-tiny has two groups of keys and values; four make it fit tp=4.
        out.append(
            case(
                f"{said}-zero{stage}",
                "llama-tiny",
                mesh,
                zero=stage,
                train_batch=16,
                train_micro_batch=2,
                model={"n_kv_heads": 4},
            )
        )
    return out


# ---- measured --------------------------------------------------------------------------------------------------------


class Steps:
    """A case's program on this rank, and its state."""

    def __init__(self, case: Case, folder: Path):
        self.mesh = fzero.make_mesh(case.mesh, device="cpu")
        self.mode = case.config.precision.fp32_matmul
        self.program = build.build(case.config, self.mesh, folder)
        self.state = build.first_state(self.program)
        config = case.config
        shape = (config.train.batch // self.mesh.data_size, config.data.seq_len)
        text = torch.randint(
            0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(self.mesh.data_rank)
        )
        documents = torch.zeros(shape, dtype=torch.int32)
        self.batch = {
            "tokens": text,
            "targets": text.roll(-1, 1),
            "documents": documents,
            "mask": torch.ones(shape, dtype=torch.bool),
        }

    def step(self) -> float:
        """The seconds of one step, from when all ranks are there."""
        doctor.set_fp32_matmul(self.mode)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        begin = time.perf_counter()
        self.state, metrics = self.program.train_step(self.state, self.batch)
        float(metrics.loss)
        return time.perf_counter() - begin


def work(names: list[str], repeats: int, folder: Path | None) -> None:
    """One rank: the steps of some cases in turn; rank 0 prints their seconds as JSON."""
    doctor.share_cores(int(os.environ.get("WORLD_SIZE", "1")))
    chosen = [c for name in names for c in (*cases(), *meshes()) if c.name == name]
    times: dict[str, list[float]] = {name: [] for name in names}
    # Ranks that share a store would have to share its folder; no case has more than one rank and a disk.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        running = [(c, Steps(c, Path(temporary) / c.name)) for c in chosen]
        for i in range(WARMUP + repeats):
            for c, steps in running:
                seconds = torch.tensor(steps.step())
                if torch.distributed.is_initialized():
                    torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
                times[c.name] += [float(seconds)] if i >= WARMUP else []
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(times))


def measure(chosen: list[Case], repeats: int, folder: Path | None = None) -> dict[str, list[float]]:
    """The seconds of each case's steps; cases of as many ranks share their processes."""
    found: dict[str, list[float]] = {}
    for ranks in sorted({c.ranks for c in chosen}):
        names = [c.name for c in chosen if c.ranks == ranks]
        command = [sys.executable, str(Path(__file__).resolve()), "--work", ",".join(names), "--repeats", str(repeats)]
        command += ["--folder", str(folder)] if folder is not None else []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        env.pop("OMP_NUM_THREADS", None)
        processes = []
        for rank in range(ranks):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    command, env=own, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True
                )
            )
        out, _ = processes[0].communicate()
        if any([process.wait() for process in processes]):
            raise ValueError(f"{', '.join(names)}: a rank failed; its error is above")
        found |= json.loads(out.splitlines()[-1])
        print(f"measured {', '.join(names)}", file=sys.stderr, flush=True)
    return found


# ---- predicted -------------------------------------------------------------------------------------------------------


def predicted(c: Case, on: Device) -> Timing:
    """The Timing of a case by the planner."""
    return predict(trace_step(c.config, c.mesh), replace(on, ranks_on_node=c.ranks))


def row(c: Case, timing: Timing, times: list[float]) -> dict[str, Any]:
    """What is written of a case."""
    median = statistics.median(times)
    return {
        "case": c.name,
        "mesh": c.mesh,
        "measured_s": {"median": median, "min": min(times), "max": max(times), "all": times},
        "predicted_s": timing.step_s,
        "error": timing.step_s / median - 1.0,
        "predicted": {**timing._asdict(), "layers": {}},
        "config": json.loads(to_json(c.config)),
    }


def kendall_tau(a: list[float], b: list[float]) -> float:
    """Kendall's tau-a of two lists: pairs in the same order less pairs in the other, over all pairs."""
    signs = [(x > y) - (x < y) for x, y in itertools.combinations(a, 2)]
    others = [(x > y) - (x < y) for x, y in itertools.combinations(b, 2)]
    return sum(s * t for s, t in zip(signs, others)) / len(signs)


def told(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [f"{'case':28}{'measured ms':>12}{'min':>9}{'max':>9}{'predicted':>11}{'error':>8}  binds"]
    for r in rows:
        m = r["measured_s"]
        figures = f"{1e3 * m['median']:12.1f}{1e3 * m['min']:9.1f}{1e3 * m['max']:9.1f}{1e3 * r['predicted_s']:11.1f}"
        lines.append(f"{r['case']:28}{figures}{r['error']:+8.1%}  {r['predicted']['binds']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="here", help="the device file that predicts")
    parser.add_argument("--cases", help="comma list; all twelve and the eight meshes without it")
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds, at least 9 for a result")
    parser.add_argument("--kinds", action="store_true", help="also the predicted seconds by kind of operator")
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk of `fzero bench --disk`, for what is offloaded; a temporary folder without it",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = [c.name for c in (*cases(), *meshes())]
    for name in (args.cases or "").split(","):
        if name and name not in known:
            parser.error(f"--cases: {name!r} is not one of {', '.join(known)}")
    return args


def main() -> None:
    args = parse()
    if args.work:
        work(args.work.split(","), args.repeats, args.folder)
        return
    wanted = args.cases.split(",") if args.cases else None
    chosen, ranked = ([c for c in group if wanted is None or c.name in wanted] for group in (cases(), meshes()))
    on = device(args.device)
    timings = {
        c.name: predicted(c, on) for c in (*chosen, *ranked)
    }  # first: nothing of what is measured is known to it
    load = os.getloadavg()
    times = measure([*chosen, *ranked], args.repeats, args.folder)
    load = load, os.getloadavg()
    groups = [[row(c, timings[c.name], times[c.name]) for c in group] for group in (chosen, ranked)]
    result: dict[str, Any] = {}
    for title, rows in zip(("configurations", "meshes"), groups):
        if not rows:
            continue
        errors = [abs(r["error"]) for r in rows]
        print(f"{title}\n{told(rows)}")
        result[title] = {
            "rows": rows,
            "median_absolute_error": statistics.median(errors),
            "largest_absolute_error": max(errors),
        }
        said = f"|error|: median {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        if title == "meshes" and len(rows) > 1:
            tau = kendall_tau([r["measured_s"]["median"] for r in rows], [r["predicted_s"] for r in rows])
            result[title]["kendall_tau"] = tau
            said += f"; Kendall's tau of the ranking {tau:.2f} (no ties)"
        print(said + "\n")
        if args.kinds:
            for r in rows:
                p = r["predicted"]
                print(
                    r["case"],
                    *(f"{k} {1e3 * s:.2f}" for k, s in sorted(p["kinds"].items(), key=lambda pair: -pair[1])),
                    "ms",
                )
                print(
                    "   ",
                    *(
                        f"{name} { ({k: round(1e3 * s, 2) for k, s in p[name].items()}) }"
                        for name in ("phases", "bound", "exposed", "waiting")
                    ),
                )
    if args.out:
        head = {
            "command": shlex.join(
                # Where somebody keeps things is not part of the result.
                ["python", "benchmarks/plan_time.py", *("FOLDER" if "/" in word else word for word in sys.argv[1:])]
            ),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {"torch": torch.__version__, "python": platform.python_version(), "fzero": fzero.__version__},
            "device": {"name": on.name, "machine": on.machine},
            "load_average": {"before": load[0], "after": load[1]},
            "repeats": args.repeats,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**head, **result}, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except ValueError as error:
            sys.exit(f"plan_time.py: {error}")
