"""Bytes of plans and the communication of one step, the same on every machine.

    python tests/goldens/make.py

writes plans.json anew. Both come from fake meshes: no process is started and nothing is computed. A change of
plans.json is a change of what fzero does; the commit that makes it says why.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import fzero
from fzero import models
from fzero.core import config_tables
from fzero.planner.step_trace import trace_step
from fzero.run import config_table

PLANS = Path(__file__).with_name("plans.json")
SIZES = {"vocab_size": 64, "max_len": 32, "d_model": 16, "n_layers": 2, "d_ff": 32}
HEADS = {"n_heads": 4}
# The options of gpt-oss, by which it is no other family than Mixtral.
GPT_OSS: dict[str, Any] = {"pattern": "window:8,full", "activation": "clamped"}
GPT_OSS |= {"rope_scaling": models.RopeScaling(4.0, 1.0, 8.0, 16, "yarn")}
GPT_OSS |= dict.fromkeys(("qkv_bias", "out_bias", "sinks", "expert_bias"), True)
MODELS = {
    "gpt2": models.GPT2Config(**SIZES, **HEADS, tied=True),
    "llama": models.LlamaConfig(**SIZES, **HEADS, n_kv_heads=2),
    "mixtral": models.MoEConfig(**SIZES, **HEADS, n_kv_heads=2, n_experts=4),
    "gpt-oss": models.MoEConfig(**SIZES, **HEADS, n_kv_heads=2, n_experts=4, **GPT_OSS),
    "mlp": models.MLPConfig(**SIZES),
}
# Bytes of an element: of parameters, of sums of gradients, of master weights and moments.
ITEMSIZES = {"fp32": (4, 4, 4), "bf16": (2, 4, 4), "fp16": (2, 4, 4)}
DP2, DP4, TP2, DP2TP2, RP2DP2 = {"dp": 2}, {"dp": 4}, {"tp": 2}, {"dp": 2, "tp": 2}, {"rp": 2, "dp": 2}
DP2EP2 = {"dp": 2, "ep": 2}
NVME = "params=nvme,opt=nvme"


class Case(NamedTuple):
    """A run to be planned. settings: what else its config says, by dotted names."""

    model: str
    stage: int
    mesh: dict[str, int]
    policy: str = "fp32"
    optimizer: str = "adamw"
    plan: dict[str, Any] = {}  # noqa: RUF012  (options of zero_plan, which a config has too)
    settings: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "one": Case("llama", 0, {}, "bf16"),
    "dp4 stage 0": Case("gpt2", 0, DP4),
    "dp4 stage 1": Case("llama", 1, DP4, "bf16"),
    "dp4 stage 2": Case("llama", 2, DP4, "fp16"),
    "dp4 stage 2 full": Case("gpt2", 2, DP4, plan={"reduce": "once"}),
    "dp4 stage 3": Case("llama", 3, DP4),
    "dp2 stage 1 8bit": Case("llama", 1, DP2, settings={"optim.states": "8bit"}),
    "dp2 stage 3 muon": Case("llama", 3, DP2, optimizer="muon"),
    "dp2 stage 3 lamb": Case("mlp", 3, DP2, optimizer="lamb"),
    "dp2 stage 3 whole": Case("gpt2", 3, DP2, "bf16", settings={"reshard": False}),
    "dp2 stage 3 remat": Case("llama", 3, DP2, "bf16", settings={"train.remat": "full"}),
    "dp2 stage 0 canonical": Case("llama", 0, DP2, plan={"reduce": "canonical"}),
    "dp2 stage 3 canonical": Case("llama", 3, DP2, plan={"reduce": "canonical"}),
    "dp2 stage 3 average": Case("llama", 3, DP2, "bf16", settings={"train.ema_decay": 0.9}),
    "tp2": Case("gpt2", 0, TP2),
    "tp2 sequence": Case("llama", 0, TP2, "bf16", plan={"sequence": True}),
    "dp2 tp2 stage 3 sequence": Case("llama", 3, DP2TP2, plan={"sequence": True}),
    "dp2 tp2 stage 1 mixtral": Case("mixtral", 1, DP2TP2, "bf16"),
    "dp2 tp2 stage 3 mixtral": Case("mixtral", 3, DP2TP2),
    "dp2 tp2 stage 3 gpt-oss": Case("gpt-oss", 3, DP2TP2, "bf16", plan={"sequence": True}),
    "dp2 ep2 stage 3 gpt-oss": Case("gpt-oss", 3, DP2EP2, "bf16", settings={"experts": "exchange:2"}),
    "rp2 dp2 stage 3": Case("llama", 3, RP2DP2, "bf16"),
    "dp2 stage 3 host": Case("llama", 3, DP2, "bf16", plan={"offload": "params=host,opt=host,grads=host"}),
    "dp2 stage 3 nvme": Case("llama", 3, DP2, "bf16", plan={"offload": NVME}),
}


def golden(case: Case) -> dict[str, Any]:
    """What a case's plan, and a step by it, amount to on rank 0."""
    return {"plan": plan_bytes(case), **step_bytes(case)}


def plan_bytes(case: Case) -> dict[str, dict[str, int]]:
    """{which tree: {"embed", "blocks" or "head", with the memory it rests in: bytes on a rank}} of a ZeRO plan."""
    mesh = fzero.fake_mesh(case.mesh)
    plan = fzero.zero_plan(case.stage, models.build(MODELS[case.model]), mesh, **case.plan)
    out: dict[str, dict[str, int]] = {}
    for tree, itemsize in zip(("params", "grads", "opt"), ITEMSIZES[case.policy]):
        specs = fzero.pytree.named_leaves(getattr(plan, tree))
        for name, leaf in fzero.pytree.named_leaves(plan.like).items():
            spec = specs[name]
            group = f"{name.split('/')[0]} @{spec.memory}"
            parts = math.prod(case.mesh.get(axis, 1) for axes in spec.dims for axis in axes)
            sums = out.setdefault(tree, {})
            sums[group] = sums.get(group, 0) + leaf.numel() // parts * itemsize
    return out


def step_bytes(case: Case) -> dict[str, Any]:
    """Of one step, as the planner runs it on fake tensors: bytes at rest, and what a rank sends in each phase."""
    data = math.prod(case.mesh.get(axis, 1) for axis in ("dp", "rp", "ep"))
    family = "mixtral" if case.model == "gpt-oss" else case.model
    table: config_tables.Table = {
        "preset": "",
        "model": {"family": family, **asdict(MODELS[case.model])},
        "data": {"seq_len": 16},
        "optim": {"name": case.optimizer},
        "precision": {"policy": case.policy, "fp32_matmul": "default"},
        "train": {"batch": 4 * data, "micro_batch": 2, "compiled": False},
        "zero": case.stage,
        **case.plan,
    }
    for name, value in case.settings.items():
        config_tables.set_nested(table, name, value)
    trace = trace_step(config_table.from_table(table), case.mesh)
    sent: dict[str, list[int]] = {}
    for row in trace.ledger:
        sums = sent.setdefault(f"{row.collective} {row.axis} {row.phase}", [0, 0, 0])
        for i, more in enumerate((row.calls, row.elements, row.bytes)):
            sums[i] += more
    return {"rest": trace.state, "elsewhere": trace.state_elsewhere, "calls, elements, bytes": sent}


def text_of(goldens: dict[str, Any]) -> str:
    """The JSON of plans.json: a line for each innermost table."""
    lines = []
    for name, parts in goldens.items():
        inner = [f"  {json.dumps(part)}: {json.dumps(value)}" for part, value in parts.items()]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(PLANS.write_text(text_of({name: golden(case) for name, case in CASES.items()})) == 0)
