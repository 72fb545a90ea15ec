"""The planner beside published figures: ZeRO's memory table, and runs of torchtitan and llm.c on A100 and H100.

    python benchmarks/plan_published.py --out benchmarks/results/plan-published.json
    python benchmarks/plan_published.py --pipelines --out benchmarks/results/plan-published-pipelines.json
    python benchmarks/plan_published.py --experts --out benchmarks/results/plan-published-experts.json
    python benchmarks/plan_published.py --rows gpt2-124m

A row is fzero's own step of the published model, mesh, lengths and recomputation, planned for the listed device, and
what was published of another program doing the same. One device file serves all rows of a device, and nothing is fitted
to a row: the error is what one makes who plans with a data sheet. The programs differ too; `differs` says how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from published_runs import LEFT_OUT, Run, experts, pipelines, runs

import fzero
from fzero import optim
from fzero.core import precision, pytree
from fzero.planner.devices import Device, device
from fzero.planner.plan import plan
from fzero.planner.plan_report import PlanReport
from fzero.sharding import fake_mesh
from fzero.sharding.slices import local_numel
from fzero.train.state import meta_state

GIB = 2**30

# ---- ZeRO's table ----------------------------------------------------------------------------------------------------

# GB of a device by parameters and data ranks, at stages 1, 2 and 3 (P_os, P_os+g, P_os+g+p); stage 0 is the row of one
# rank. Rajbhandari et al. 2020, table 1. Its figures of 128B and 1T, and some of 7.5B, are cut and not rounded.
ZERO_TABLE: dict[float, dict[int, tuple[str, str, str]]] = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


def zero_bytes(model: Any, stage: int, ranks: int) -> int:
    """The bytes of a rank's model states: parameters and gradients in bf16, AdamW with float32 master weights; from the
    plan's own specs.

    model: a Model, or a number of parameters, which are then one leaf (made up to a multiple of 1024, so that all ranks
    have equal shards)."""
    if isinstance(model, float):
        model = {"w": torch.empty(1024, -(-int(model) // 1024), device="meta")}
    made = fzero.zero_plan(stage, model, fake_mesh({"dp": ranks}), policy=precision.bf16())
    state = meta_state(made, optim.adamw(1e-3))
    held = sum(
        x.numel() * x.element_size() for x in pytree.leaves((state.params, state.master, state.opt_state)) if x.dim()
    )
    return held + sum(
        local_numel(leaf.shape, leaf.grads, made.sizes) * leaf.dtype.itemsize for leaf in made.leaves.values()
    )


def agrees(said: str, bytes_: int) -> bool:
    """Whether a figure of the paper, in GB, is the bytes rounded or cut to its digits."""
    unit = 10.0 ** -len(said.partition(".")[2])
    return abs(bytes_ / 1e9 - float(said)) < unit


def zero_rows() -> list[dict[str, Any]]:
    """Each figure of the table, and the planner's."""
    rows = []
    for psi, by_ranks in ZERO_TABLE.items():
        for ranks, figures in by_ranks.items():
            for stage, said in zip((1, 2, 3), figures):
                size = zero_bytes(psi, stage, ranks)
                row = {
                    "parameters": psi,
                    "ranks": ranks,
                    "zero": stage,
                    "published_gb": said,
                    "predicted_gb": size / 1e9,
                }
                rows.append({**row, "agrees": agrees(said, size)})
    return rows


# ---- runs ------------------------------------------------------------------------------------------------------------


def planned(run: Run) -> PlanReport:
    """The plan of a run."""
    settings = {
        "zero": run.zero,
        "train.batch": run.batch,
        "train.micro_batch": run.micro_batch,
        "train.remat": run.remat,
        "train.compiled": run.compiled,
        "data.seq_len": run.seq_len,
        "data.within_documents": False,
        "precision.policy": "bf16",
        "optim.name": "adamw",
        **run.settings,
    }
    return plan(run.model, run.mesh, gpu=device_of(run), settings=settings)


def device_of(run: Run) -> Device:
    """The listed device of a run, with its network between nodes if that is known."""
    listed = device(run.gpu)
    if run.network_bytes_s is None:
        return listed
    return device(run.gpu, links=(*listed.links[:-1], listed.links[-1]._replace(bytes_s=run.network_bytes_s)))


def run_row(run: Run) -> dict[str, Any]:
    """A run's figures, published and predicted, and the errors."""
    found = planned(run)
    rate = found.tokens_per_s / found.ranks
    predicted = {
        "tokens_per_s": rate,
        "memory_gib": found.peak_bytes_per_rank / GIB,
        "allocated_gib": (found.peak_bytes_per_rank + found.allocator_bytes) / GIB,
        "step_s": found.step_s,
        "mfu": found.mfu,
        "mfu_causal": found.mfu_causal,
        "hfu": found.hfu,
        "time": found.time,
        "exact": found.exact,
    }
    errors = {"tokens_per_s": rate / run.tokens_per_s - 1.0}
    if run.memory_gib is not None:
        errors["memory_gib"] = predicted["memory_gib"] / run.memory_gib - 1.0
    model = run.model if isinstance(run.model, str) else run.name.rpartition("-")[0]
    return {
        **run._asdict(),
        "model": model,
        "predicted": predicted,
        "errors": errors,
        "device": {"name": found.device.name, "measured": found.device.measured},
    }


# ---- told ------------------------------------------------------------------------------------------------------------


def zero_markdown(rows: list[dict[str, Any]]) -> str:
    """ZeRO's table, each figure as published and as planned."""
    lines = ["| parameters | ranks | stage 1 | stage 2 | stage 3 |", "|---:|---:|---:|---:|---:|"]
    for i in range(0, len(rows), 3):
        three = rows[i : i + 3]
        cells = [f"{r['predicted_gb']:.2f} ({r['published_gb']})" for r in three]
        lines.append(f"| {three[0]['parameters'] / 1e9:g}B | {three[0]['ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The runs as a table: published, predicted and error, of tokens/s of a GPU and of memory; and the errors' size."""
    lines = [
        "| run | source | tokens/s a GPU, published | predicted | error | GiB, published | predicted | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        p, e, known = r["predicted"], r["errors"], r["memory_gib"] is not None
        memory = [
            f"{r['memory_gib']:.1f}" if known else "",
            f"{p['memory_gib']:.1f}",
            f"{e['memory_gib']:+.0%}" if known else "",
        ]
        mesh = " ".join(f"{axis}={size}" for axis, size in r["mesh"].items())
        order = f", {r['settings'].get('pipeline.schedule', '1f1b')}" if "pp" in r["mesh"] else ""
        what = f"{r['model']}, {mesh}{order}, stage {r['zero']}, {r['gpu']}, remat {r['remat']}"
        what += ", compiled" * r["compiled"] + ", float8" * ("float8" in r["settings"].get("precision.policy", ""))
        cells = [
            what,
            r["source"],
            f"{r['tokens_per_s']:,.0f}",
            f"{p['tokens_per_s']:,.0f}",
            f"{e['tokens_per_s']:+.0%}",
            *memory,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(rows)} runs: {summary(rows)}"])


def summary(rows: list[dict[str, Any]]) -> str:
    """The median and the largest error of the rows' tokens per second."""
    sizes = [abs(row["errors"]["tokens_per_s"]) for row in rows]
    return f"median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}"


def main() -> None:
    """Plan the rows, print the tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ", ".join(run.name for run in (*runs(), *pipelines(), *experts()))
    parser.add_argument("--rows", help=f"comma list of {every}; all without it")
    parser.add_argument("--pipelines", action="store_true", help="the runs with pp, and none else")
    parser.add_argument("--experts", action="store_true", help="the runs with ep, and none else")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file to write; with --rows its other rows stay; its tables go beside it as .md",
    )
    args = parser.parse_args()
    known = pipelines() if args.pipelines else experts() if args.experts else runs()
    wanted = args.rows.split(",") if args.rows else [run.name for run in known]
    before = json.loads(args.out.read_text()) if args.rows and args.out and args.out.exists() else {"runs": []}
    kept = {row["name"]: row for row in before["runs"]}
    if unknown := set(wanted) - {run.name for run in known}:
        parser.error(f"--rows: {', '.join(unknown)} is none of {', '.join(run.name for run in known)}")
    table, rows = [] if args.pipelines or args.experts else zero_rows(), []
    for run in known:
        if run.name not in wanted and run.name in kept:
            rows.append(kept[run.name])
        if run.name in wanted:
            rows.append(run_row(run))
            e = {name: f"{error:+.1%}" for name, error in rows[-1]["errors"].items()}
            print(
                f"{run.name}: {rows[-1]['predicted']['tokens_per_s']:,.0f} tokens/s a GPU; errors {e}",
                file=sys.stderr,
                flush=True,
            )
    told = [[row for row in rows if row["older"] is older] for older in (False, True)]
    text = "\n\n".join([*([zero_markdown(table)] if table else []), *(markdown(group) for group in told if group)])
    print(text)
    if table:
        print(f"\nZeRO's table: {sum(r['agrees'] for r in table)} of {len(table)} figures agree")
    if args.out:
        head = {
            "command": shlex.join(["python", "benchmarks/plan_published.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"fzero": fzero.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        if kept:  # a command, with its date and versions, of the rows that are not in `later`
            later = [*before.get("later", []), {**head, "rows": wanted}]
            head = {name: before[name] for name in head} | {"later": later}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({**head, "zero_table": table, "runs": rows, "left_out": LEFT_OUT}, indent=1) + "\n"
        )
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"plan_published.py: {error}")
