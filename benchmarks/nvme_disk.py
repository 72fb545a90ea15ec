"""The section `disk` of `nvme.py`: the same bytes by every engine, in turns."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from nvme_contenders import DEFAULT, bounds, contenders, rotated, spread
from peers.disk_engines import PIECE, PLANES

OPS = ("read", "write", "mixed", "stream", "bound")
BOUND = 1.5  # computation of the op "bound", in fio's mixed times


def expect_carried(folder: Path, name: str) -> None:
    """Raise ValueError unless a contender's stream has carried its source to its target."""
    pairs = [(folder / "a.bin", folder / "b.bin")]
    if name == "tensorstore":
        chunks = [path.relative_to(folder / "tensorstore-a") for path in folder.glob("tensorstore-a/c/*/*/*")]
        pairs = [(folder / "tensorstore-a" / path, folder / "tensorstore-b" / path) for path in chunks]
    elif name.startswith("fzero"):
        pairs = [
            (path, Path(str(path).replace("/c/0/", "/c/1/"))) for path in (folder / name).glob("arrays/*/c/0/*/*/*")
        ]
    for a, b in pairs:
        with open(a, "rb") as x, open(b, "rb") as y:
            while piece := x.read(PIECE):
                if piece != y.read(PIECE):
                    raise ValueError(
                        f"{name}: its stream has not carried {a.relative_to(folder)} to {b.relative_to(folder)}"
                    )
    if not pairs:
        raise ValueError(f"{name}: has left no files to compare")


def disk_section(args: argparse.Namespace) -> dict[str, Any]:
    """Every engine, every operation, in turns; ValueError where a stream does not carry the bytes over."""
    names = args.contenders or list(DEFAULT["disk"])
    order = {"section": "disk", "blocks": args.blocks, "plane_bytes": args.plane_mb << 20, "threads": args.threads}
    total = args.blocks * PLANES * order["plane_bytes"]
    asked = {op: (total * (op != "write"), total * (op != "read")) for op in OPS}  # bytes read and written
    rows: dict[str, dict[str, list]] = {op: {name: [] for name in names} for op in OPS}
    with contenders(names, order, args) as started:
        anchor, others = started["fio"], [name for name in names if name != "fio"]
        for name in others:
            started[name].run("write")
            started[name].run("stream")
            expect_carried(Path(anchor.order["folder"]), name)
        for i in range(args.repeats):
            for op in OPS:
                fio_op = op if op in ("read", "write") else "mixed"
                around = [anchor.run(fio_op)]
                compute_s = BOUND * around[0]["s"] if op == "bound" else 0.0
                found = {
                    name: started[name].run("stream" if op == "bound" else op, compute_s / args.blocks)
                    for name in rotated(others, i)
                }
                around.append(anchor.run(fio_op))
                base_s = statistics.fmean(row["s"] for row in around)
                for name, row in [*found.items(), *(("fio", row) for row in around)]:
                    if row["read_bytes"] < 0.99 * asked[op][0] or row["write_bytes"] < 0.99 * asked[op][1]:
                        raise ValueError(
                            f"{name}, {op}: of {asked[op]} bytes to read and write the disk saw too few, a "
                            f"cache flatters: {row}"
                        )
                    rows[op][name].append(row | {"fio_s": base_s} | ({"compute_s": compute_s} if op == "bound" else {}))
        versions = {name: contender.versions for name, contender in started.items()}
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for op in OPS:
        moved = sum(asked[op])
        for name, found in rows[op].items():
            over = (
                [row["s"] / row["compute_s"] for row in found]
                if op == "bound"
                else [row["fio_s"] / row["s"] for row in found]
            )
            results[name][op] = {
                "gb_per_s": spread([moved / row["s"] / 1e9 for row in found]),
                "of_computation" if op == "bound" else "of_fio": spread(over),
                "cpu_s_per_gb": spread([row["cpu_s"] / moved * 1e9 for row in found]),
                "s": [row["s"] for row in found],
            }
    return order | {"bytes": total, "repeats": args.repeats, "versions": versions, "results": results}


def disk_table(run: dict[str, Any]) -> str:
    """Two tables: of fio's rate in the same round, and CPU seconds per GB."""
    width = 2 + max(map(len, run["results"]))
    lines = [
        (
            f"disk: {run['bytes'] / 1e9:.2f} GB, blocks of {PLANES} x {run['plane_bytes'] >> 20} MiB, {run['repeats']} "
            "rounds"
        ),
        "of fio's rate around it (stream: of its mixed rate; bound: time over the computation's), median [min, max]",
        f"{'':{width}}" + "".join(f"{op:>22}" for op in OPS),
    ]
    for name, found in run["results"].items():
        lines.append(
            f"{name:{width}}" + "".join(f"{bounds(x.get('of_fio') or x['of_computation']):>22}" for x in found.values())
        )
    lines += ["GB/s | CPU seconds per GB, medians"]
    for name, found in run["results"].items():
        texts = [f"{x['gb_per_s']['median']:.2f} | {x['cpu_s_per_gb']['median']:.4f}" for x in found.values()]
        lines.append(f"{name:{width}}" + "".join(f"{text:>22}" for text in texts))
    return "\n".join(lines)
