"""The planner beside published figures: ZeRO's memory table, and runs of torchtitan and llm.c on A100 and H100.

    python benchmarks/plan_published.py --out benchmarks/results/plan-published.json
    python benchmarks/plan_published.py --rows gpt2-124m

A row is fzero's own step of the published model, mesh, lengths and recomputation, planned for the listed device, and what was published of
another program doing the same. One device file serves all rows of a device, and nothing is fitted to a row: the error is what one makes who
plans with a data sheet. The programs differ too; `differs` says how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero import optim
from fzero.core import precision, pytree
from fzero.planner.plan import PlanReport, plan
from fzero.sharding import fake_mesh
from fzero.sharding.slices import local_numel
from fzero.train.state import meta_state

GIB = 2**30

# ---- ZeRO's table ----------------------------------------------------------------------------------------------------

# GB of a device by parameters and data ranks, at stages 1, 2 and 3 (P_os, P_os+g, P_os+g+p); stage 0 is the row of one rank.
# Rajbhandari et al. 2020, table 1. Its figures of 128B and 1T, and some of 7.5B, are cut and not rounded.
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
    """The bytes of a rank's model states: parameters and gradients in bf16, AdamW with float32 master weights; from the plan's own specs.

    model: a Model, or a number of parameters, which are then one leaf (made up to a multiple of 1024, so that all ranks have equal shards).
    """
    if isinstance(model, float):
        model = {"w": torch.empty(1024, -(-int(model) // 1024), device="meta")}
    made = fzero.zero_plan(stage, model, fake_mesh({"dp": ranks}), policy=precision.bf16())
    state = meta_state(made, optim.adamw(1e-3))
    held = sum(x.numel() * x.element_size() for x in pytree.leaves((state.params, state.master, state.opt_state)) if x.dim())
    return held + sum(local_numel(leaf.shape, leaf.grads, made.sizes) * leaf.dtype.itemsize for leaf in made.leaves.values())


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
                row = {"parameters": psi, "ranks": ranks, "zero": stage, "published_gb": said, "predicted_gb": size / 1e9}
                rows.append({**row, "agrees": agrees(said, size)})
    return rows


# ---- runs ------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A published run: what it was, and its figures by GPU."""

    name: str
    source: str
    gpu: str
    model: str
    mesh: dict[str, int]
    zero: int
    batch: int  # sequences of all ranks
    micro_batch: int
    seq_len: int
    remat: str
    compiled: bool
    tokens_per_s: float  # of a GPU
    memory_gib: float | None = None
    differs: str = ""


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table"
TITAN_A100 = "torchtitan, docs/performance.md (May 2024)"
LLM_C = "llm.c on 8 H100"
H100_OF_TITAN = "its H100 run at 500 W with HBM2e of 2.4 TB/s and 96 GB; it keeps whole float32 logits, and its figure is memory reserved"
A100_OF_TITAN = "between its nodes RDMA of a speed that is not said; whether compiled is not said"


def runs() -> list[Run]:
    """The published runs that fzero can plan."""
    titan8 = {
        "gpu": "h100",
        "model": "llama-8b",
        "zero": 3,
        "micro_batch": 2,
        "seq_len": 8192,
        "remat": "selective:0.5",
        "differs": H100_OF_TITAN,
    }
    a100 = {"gpu": "a100", "mesh": {"dp": 64}, "zero": 3, "source": TITAN_A100, "compiled": True, "differs": A100_OF_TITAN}
    llm_c = {"gpu": "h100", "mesh": {"dp": 8}, "zero": 1, "seq_len": 1024, "remat": "none", "source": LLM_C, "compiled": True}
    fused = "C and CUDA without Python; cuDNN's attention"
    return [
        Run("gpt2-124m", model="gpt2-124m", batch=512, micro_batch=64, tokens_per_s=468e3, differs=fused, **llm_c),
        Run("gpt2-1.5b", model="gpt2-1.5b", batch=1024, micro_batch=16, tokens_per_s=48.5e3, differs=fused, **llm_c),
        Run("llama-8b-8", f"{TITAN} 1", mesh={"dp": 8}, batch=16, compiled=False, tokens_per_s=5762, memory_gib=82.4, **titan8),
        Run("llama-8b-8-compiled", f"{TITAN} 1", mesh={"dp": 8}, batch=16, compiled=True, tokens_per_s=6667, memory_gib=77.0, **titan8),
        Run("llama-8b-128", f"{TITAN} 3", mesh={"dp": 128}, batch=256, compiled=False, tokens_per_s=5605, memory_gib=67.0, **titan8),
        Run(
            "llama-8b-128-compiled", f"{TITAN} 3", mesh={"dp": 128}, batch=256, compiled=True, tokens_per_s=6514, memory_gib=62.0, **titan8
        ),
        Run("llama-8b-a100", model="llama-8b", batch=64, micro_batch=1, seq_len=8192, remat="selective:0.5", tokens_per_s=2973, **a100),
        Run("llama-70b-a100", model="llama-70b", batch=64, micro_batch=1, seq_len=8192, remat="full", tokens_per_s=331, **a100),
        Run("llama2-13b-a100", model="llama2-13b", batch=128, micro_batch=2, seq_len=4096, remat="none", tokens_per_s=2162, **a100),
        Run(
            "llama2-13b-a100-selective",
            model="llama2-13b",
            batch=128,
            micro_batch=2,
            seq_len=4096,
            remat="selective:0.5",
            tokens_per_s=1904,
            **a100,
        ),
        Run("llama2-70b-a100", model="llama2-70b", batch=128, micro_batch=2, seq_len=4096, remat="full", tokens_per_s=353, **a100),
    ]


LEFT_OUT = {
    "torchtitan tables 4 to 6 (70B, 405B)": "float8 products with asynchronous tensor parallelism, pipelines and context parallelism",
    "MaxText 7B, DeepSpeed ZeRO-2 on H200": "published as a utilization, without batch, mesh or recomputation",
}


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
    }
    return plan(run.model, run.mesh, gpu=run.gpu, settings=settings)


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
    return {
        **run._asdict(),
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
    """The runs as a table: published, predicted and error, of tokens/s of a GPU and of memory."""
    lines = [
        "| run | source | tokens/s a GPU, published | predicted | error | GiB, published | predicted | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        p, e, known = r["predicted"], r["errors"], r["memory_gib"] is not None
        memory = [f"{r['memory_gib']:.1f}" if known else "", f"{p['memory_gib']:.1f}", f"{e['memory_gib']:+.0%}" if known else ""]
        mesh = " ".join(f"{axis}={size}" for axis, size in r["mesh"].items())
        what = f"{r['model']}, {mesh}, stage {r['zero']}, {r['gpu']}, remat {r['remat']}{', compiled' * r['compiled']}"
        cells = [what, r["source"], f"{r['tokens_per_s']:,.0f}", f"{p['tokens_per_s']:,.0f}", f"{e['tokens_per_s']:+.0%}", *memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Plan the rows, print the tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help=f"comma list of {', '.join(run.name for run in runs())}; all without it")
    parser.add_argument("--out", type=Path, help="JSON file to write; its tables go beside it as .md")
    args = parser.parse_args()
    wanted = args.rows.split(",") if args.rows else [run.name for run in runs()]
    if unknown := set(wanted) - {run.name for run in runs()}:
        parser.error(f"--rows: {', '.join(unknown)} is none of {', '.join(run.name for run in runs())}")
    table, rows = zero_rows(), []
    for run in runs():
        if run.name in wanted:
            rows.append(run_row(run))
            e = {name: f"{error:+.1%}" for name, error in rows[-1]["errors"].items()}
            print(f"{run.name}: {rows[-1]['predicted']['tokens_per_s']:,.0f} tokens/s a GPU; errors {e}", file=sys.stderr, flush=True)
    text = f"{zero_markdown(table)}\n\n{markdown(rows)}"
    print(text)
    print(f"\nZeRO's table: {sum(r['agrees'] for r in table)} of {len(table)} figures agree")
    if args.out:
        head = {
            "command": shlex.join(["python", "benchmarks/plan_published.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"fzero": fzero.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**head, "zero_table": table, "runs": rows, "left_out": LEFT_OUT}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"plan_published.py: {error}")
