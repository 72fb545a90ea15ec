"""Plans of Llama 8B on GPUs: bytes and predicted seconds of a step.

    python tests/goldens/make_gpu.py

writes gpu.json anew; it takes minutes. A change of gpu.json is a change of what a step on a GPU does, or of how it is
predicted; the commit that makes it says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import plan
from fzero.planner import devices

GPU = Path(__file__).with_name("gpu.json")
HOST = "params=host,grads=host,opt=host"


class Case(NamedTuple):
    """A plan: the GPU, the mesh, and what its config says beside SETTINGS."""

    gpu: str
    mesh: dict[str, int]
    settings: dict[str, Any]


# Blocks are not compiled, as what Inductor fuses is another matter (tests/test_plan_fused.py), and another version's.
SETTINGS = {"train.micro_batch": 1, "train.compiled": False, "data.seq_len": 4096}
DISK = {"read": 6e9, "write": 4e9, "both": 7e9}  # bytes/s; the file of a GPU says nothing of its host's disk
# With 32 layers, plans of offloaded states take minutes: two of 8B's width.
TWO = {"model.n_layers": 2}
CASES = {
    "h200": Case("h200", {}, {}),
    "h200 remat": Case("h200", {}, {"train.remat": "full"}),
    "h200 opt=host, 2 layers": Case("h200", {}, {**TWO, "offload": "opt=host"}),
    "h200 all host, 2 layers": Case("h200", {}, {**TWO, "offload": f"{HOST},acts=host", "train.remat": "full"}),
    "h200 nvme, 2 layers": Case("h200", {}, {**TWO, "offload": "params=nvme,opt=nvme"}),
    "8 h200 stage 3": Case("h200", {"dp": 8}, {"zero": 3}),
    "64 h200 stage 3": Case("h200", {"dp": 64}, {"zero": 3}),
    "8 h200 fp8": Case("h200", {"dp": 8}, {"zero": 3, "precision.policy": "bf16_float8"}),
    "8 h200 fp8 gather": Case("h200", {"dp": 8}, {"zero": 3, "precision.policy": "bf16_float8_gather"}),
    "8 h200 tp": Case("h200", {"tp": 8}, {"sequence": True}),
    "8 a100 stage 3": Case("a100", {"dp": 8}, {"zero": 3}),
}
EXACT = ("state_bytes", "state_elsewhere", "comm_bytes_per_axis", "traffic", "flop_per_step")  # with any PyTorch
# Temporaries of PyTorch's own functions count in these.
VERSIONED = ("peak_bytes_per_rank", "host_peak_bytes", "step_s")


def golden(case: Case) -> dict[str, Any]:
    """What a case's plan says."""
    batch = 2 * case.mesh.get("dp", 1)
    gpu = devices.device(case.gpu, nvme=DISK)
    report = plan("llama-8b", case.mesh, gpu=gpu, settings={**SETTINGS, "train.batch": batch, **case.settings})
    found = {name: getattr(report, name) for name in (*EXACT, *VERSIONED)}
    return json.loads(json.dumps({**found, "step_s": float(f"{report.step_s:.9g}")}))


def write() -> None:
    """Write gpu.json: a line for each case."""
    lines = [f" {json.dumps(name)}: {json.dumps(golden(case))}" for name, case in CASES.items()]
    version = ".".join(torch.__version__.split(".")[:2])
    GPU.write_text(f'{{\n "torch": "{version}",\n' + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(write())
