"""fzero's checkpoints beside the disk's own rate, torch.distributed.checkpoint and safetensors, on one disk, in one
sitting.

    python benchmarks/checkpoints.py --out benchmarks/results/checkpoint-disk.json
    python benchmarks/checkpoints.py --size-gb 0.2 --rounds 1 --only disk,save

One state, a Llama's parameters, master weights and moments as stacked leaves, is saved and restored by every contender.
They take turns, one operation each a round, in an order that rotates; ratios are between figures of the same round,
since a shared disk drifts. GB is 1e9. A save counts until it is durable. Before each operation what was written is
synced, the files are evicted and mincore must find them gone; bytes read are the kernel's count. What is restored is
compared with the state in the first round. The bar for the time that a save blocks is a copy of the state into memory
that was there before."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import STATES, disk, llama, nbytes, ours, peers, settled, there
from nvme import bounds, rotated, spread, workplace
from turns import machine

import fzero
from fzero import models
from fzero.core import pytree

SECTIONS = ("disk", "save", "load", "slices", "training")
NOTES = {
    "raw": (
        "O_DIRECT from Python, huge-page buffers, the best of 1, 2, 4 threads and 4, 8, 16 MiB; fdatasync; new: "
        "posix_fallocate first"
    ),
    "fio": (
        "libaio, O_DIRECT, 4 MiB, depth 8, huge-page buffers; the reference is whichever of raw and fio has the "
        "higher median"
    ),
    "memcpy": "copy_ leaf by leaf into memory that was there before, all threads, just before each save",
    "fzero": (
        "Writer with memory for the whole state, steady; new: into new files; recycled: over those of a "
        "checkpoint that has gone"
    ),
    "dcp": (
        "async_save, a stager kept from save to save, not pinned, files synced, the best thread_count of 1, 2, "
        "4; load in place"
    ),
    "safetensors": "save_file and fsync; load_file, of which one byte a page is used",
    "slices": (
        "what a rank of dp 4 (stage 3), or of dp 2 x tp 2, reads of the checkpoint that one process wrote; "
        "another rank each round"
    ),
    "training": (
        "matrix products on the main thread beside the save: lost_s is the time blocked and what the products "
        "were slower by"
    ),
}
# What is hoped for: title, (op, figure, op, figure), how the first stands to the second.
GOALS = {
    "blocked / memcpy, recycled <= 1.2": ("save recycled", "blocked_s", "save recycled", "memcpy_s"),
    "blocked / memcpy, new <= 1.2": ("save new", "blocked_s", "save new", "memcpy_s"),
    "blocked / memcpy, DCP": ("dcp save", "blocked_s", "dcp save", "memcpy_s"),
    "save new of overwrite >= 0.6": ("write", "s", "save new", "s"),
    "save new of raw new": ("write new", "s", "save new", "s"),
    "save recycled of overwrite >= 0.9": ("write", "s", "save recycled", "s"),
    "of overwrite once unblocked, recycled": ("write", "s", "save recycled", "after_s"),
    "of overwrite once unblocked, new": ("write", "s", "save new", "after_s"),
    "load in place of read >= 0.9": ("read", "s", "load out", "s"),
    "load of read >= 0.9": ("read", "s", "load new", "s"),
    "times DCP, save new >= 2.5": ("dcp save", "s", "save new", "s"),
    "times DCP, save recycled >= 2.5": ("dcp save", "s", "save recycled", "s"),
    "times DCP, blocked": ("dcp save", "blocked_s", "save recycled", "blocked_s"),
    "times DCP, load in place >= 4": ("dcp load", "s", "load out", "s"),
    "times DCP, slice of dp 4": ("dcp slice dp4", "s", "slice dp4", "s"),
    "times safetensors, save new": ("safetensors save", "s", "save new", "s"),
    "times safetensors, load": ("safetensors load", "s", "load new", "s"),
    "times DCP, lost by training": ("dcp training", "lost_s", "training recycled", "lost_s"),
}


def sitting(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every operation once a round, on one state."""
    model, at = llama(args.size_gb, dtype)
    like, _ = at(fzero.one_process())
    state, spare = there(like, fill=True), there(like)
    total, settings, rows = nbytes(state), {}, {}
    with workplace(args.folder) as folder, contextlib.ExitStack() as stack:
        for name in ("fzero", "peers", "disk"):
            (folder / name).mkdir()
        print(
            f"{dtype}: {total / 1e9:.2f} GB, {len(pytree.leaves(state))} leaves; warming up",
            file=sys.stderr,
            flush=True,
        )
        ops = disk(folder / "disk", total, settings) if "disk" in args.only else {}
        ops |= stack.enter_context(ours(folder / "fzero", state, spare, at, args.only))
        if not args.alone:
            ops |= stack.enter_context(peers(folder / "peers", state, spare, at, args.only, settings))
        loads = []
        for i in range(args.rounds):
            loads.append(os.getloadavg()[0])
            for name in rotated(list(ops), i * len(ops) // args.rounds):
                settled(folder)
                row = {"bytes": total} | ops[name](i)
                rows.setdefault(name, []).append(row)
                print(
                    f"{dtype} {i}: {name:20}{row['s']:8.3f} s {row['bytes'] / 1e9 / row['s']:7.2f} GB/s",
                    file=sys.stderr,
                    flush=True,
                )
    run = {"state": dtype, "bytes": total, "leaves": len(pytree.leaves(state)), "parameters": models.num_params(model)}
    run |= {"largest_leaf_bytes": max(leaf.nbytes for leaf in pytree.leaves(state)), "threads": torch.get_num_threads()}
    return run | {"rounds": args.rounds, "settings": settings, "load_average": loads} | figures(rows) | {"rows": rows}


def figures(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and ranges of rates, and of the ratios within a round that are in GOALS."""
    results = {}
    for name, found in rows.items():
        results[name] = {
            key: spread([row[key] for row in found])
            for key in ("s", "cpu_s", "blocked_s", "memcpy_s", "after_s", "of_idle", "lost_s")
            if key in found[0]
        }
        results[name]["gb_per_s"] = spread([row["bytes"] / 1e9 / row["s"] for row in found])
        if "slice" in name or "load" in name:
            results[name]["read_per_byte_needed"] = spread([row["read_bytes"] / row["bytes"] for row in found])
    rows, engines = dict(rows), {}
    for kind in ("read", "write", "write new"):
        choices = [f"{kind} ({engine})" for engine in ("raw", "fio") if f"{kind} ({engine})" in rows]
        if choices:
            engines[kind] = max(choices, key=lambda name: results[name]["gb_per_s"]["median"])
            rows[kind] = rows[engines[kind]]

    def cost(name: str, key: str) -> list[float]:
        return [row[key] / row["bytes"] for row in rows[name]]

    ratios = {}
    for title, (a, key, b, other) in GOALS.items():
        if a in rows and b in rows:
            ratios[title] = spread([p / q for p, q in zip(cost(a, key), cost(b, other))])
    return {"references": engines, "results": results, "ratios": ratios}


def table(run: dict[str, Any]) -> str:
    """What was measured, one line an operation, and one a ratio."""
    lines = [
        f"{run['state']}: {run['bytes'] / 1e9:.2f} GB, {run['leaves']} leaves, {run['rounds']} rounds, load "
        f"{max(run['load_average']):.1f}"
    ]
    lines.append(
        f"{'':22}{'GB/s [min, max]':>22}{'s':>8}{'CPU s':>8}{'blocked s':>22}"
        f"{'read/needed':>13}{'lost s':>8}{'of idle':>9}"
    )
    for name, x in run["results"].items():
        cells = (
            f"{x[key]['median']:{n}.{d}f}" if key in x else " " * n
            for key, n, d in (("read_per_byte_needed", 13, 2), ("lost_s", 8, 2), ("of_idle", 9, 2))
        )
        blocked = (
            f"{x['blocked_s']['median']:.3f} [{x['blocked_s']['min']:.3f}, {x['blocked_s']['max']:.3f}]"
            if "blocked_s" in x
            else ""
        )
        lines.append(
            f"{name:22}{bounds(x['gb_per_s']):>22}{x['s']['median']:8.3f}{x['cpu_s']['median']:8.2f}{blocked:>22}{''.join(cells)}"
        )
    return "\n".join([*lines, *(f"{title:40}{bounds(x):>22}" for title, x in run["ratios"].items())])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--size-gb",
        type=float,
        default=2.0,
        help="of the state; the process takes six times as much memory, and nine times on the disk",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", default="fp32,bf16", help=f"comma list of {', '.join(STATES)}")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"comma list of {', '.join(SECTIONS)}")
    parser.add_argument("--alone", action="store_true", help="without DCP and safetensors")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch's operations")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="where the files are made, on the disk in question (default: here)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write, after every state")
    args = parser.parse_args()
    for flag, allowed in (("states", STATES), ("only", SECTIONS)):
        chosen = getattr(args, flag).split(",")
        if unknown := [part for part in chosen if part not in allowed]:
            parser.error(f"--{flag}: {unknown[0]!r} is not one of {', '.join(allowed)}")
        setattr(args, flag, chosen)
    if args.rounds < 1 or args.size_gb < 0.05 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1, and --size-gb at least 0.05")
    return args


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("checkpoints.py: ended by SIGTERM")
    )  # the files are removed all the same
    args = parse()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.set_num_threads(args.threads)
    given = [
        "FOLDER" if before == "--folder" else Path(part).name if part.startswith("/") else part
        for before, part in zip(["", *sys.argv[1:]], sys.argv[1:])
    ]
    result = {
        "command": shlex.join(["python", "benchmarks/checkpoints.py", *given]),
        "machine": machine(),
        "notes": NOTES,
    }
    result["versions"] = {name: version(name) for name in ("torch", "safetensors", "numpy", "crc32c")}
    runs: list[dict[str, Any]] = []
    for dtype in args.states:
        begin = time.perf_counter()
        runs.append(sitting(dtype, args))
        print(table(runs[-1]) + f"\n{time.perf_counter() - begin:.0f} s in all\n", flush=True)
        if args.out:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result | {"date": now, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"checkpoints.py: {error}")
