"""Plans on an H100 whose bytes are the same with every PyTorch, blocks compiled.

    python tests/goldens/make_h100.py

writes h100.json anew. A change of h100.json is a change of what a step on a GPU does; the commit that makes it says
why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fzero import plan
from fzero.planner import devices

H100 = Path(__file__).with_name("h100.json")
DISK = {"read": 6e9, "write": 4e9, "both": 7e9}  # bytes/s
HOST = "params=host,grads=host,opt=host"


class Case(NamedTuple):
    """A plan of few layers: the model, the mesh, and what its config says beside SETTINGS."""

    model: str
    mesh: dict[str, int]
    settings: dict[str, Any]


SETTINGS = {"model.n_layers": 2, "train.micro_batch": 1, "data.seq_len": 4096}
LONG = {"data.seq_len": 32768, "model.max_len": 32768, "train.remat": "full"}
CASES = {
    "gpt2-124m": Case("gpt2-124m", {}, {"train.micro_batch": 8, "data.seq_len": 1024}),
    "llama-8b": Case("llama-8b", {}, {}),
    "llama-8b, loss in chunks": Case("llama-8b", {}, LONG),
    "llama-8b, 8 bits, half kept": Case("llama-8b", {}, {"optim.states": "8bit", "train.remat": "selective:0.5"}),
    "llama-8b, stage 3": Case("llama-8b", {"dp": 8}, {"zero": 3}),
    "llama-8b, stage 1, tp": Case("llama-8b", {"dp": 2, "tp": 2}, {"zero": 1, "sequence": True}),
    "llama-8b, pp": Case("llama-8b", {"pp": 2}, {"model.n_layers": 4}),
    "llama-8b, all host": Case("llama-8b", {}, {"offload": f"{HOST},acts=host", "train.remat": "full"}),
    "llama-8b, nvme": Case("llama-8b", {}, {"offload": "params=nvme,opt=nvme"}),
    "llama-8b, float8": Case("llama-8b", {"dp": 2}, {"zero": 3, "precision.policy": "bf16_float8"}),
    "llama-8b, float8 rowwise": Case("llama-8b", {}, {"precision.policy": "bf16_float8_rowwise"}),
    "mixtral-8x7b, stage 3": Case("mixtral-8x7b", {"dp": 8}, {"zero": 3, "data.seq_len": 2048}),
}
BYTES = ("state_bytes", "state_elsewhere", "comm_bytes_per_axis", "traffic", "flop_per_step")
BYTES += ("peak_bytes_per_rank", "host_peak_bytes")


def golden(case: Case) -> dict[str, Any]:
    """What a case's plan says: bytes and FLOPs, and seconds."""
    settings = SETTINGS | case.settings
    batch = {"train.batch": 2 * settings["train.micro_batch"] * case.mesh.get("dp", 1)}
    report = plan(case.model, case.mesh, gpu=devices.device("h100", nvme=DISK), settings={**settings, **batch})
    found = {name: getattr(report, name) for name in BYTES}
    return json.loads(json.dumps({**found, "step_s": float(f"{report.step_s:.9g}")}))


def write() -> None:
    """Write h100.json: a line for each case."""
    lines = [f" {json.dumps(name)}: {json.dumps(golden(case))}" for name, case in CASES.items()]
    H100.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(write())
