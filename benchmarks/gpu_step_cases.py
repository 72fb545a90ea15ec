"""Steps of a small Llama on a device by every policy, offload and update, beside the CPU's losses.

    python benchmarks/gpu_step_cases.py [--only WORD]

Of each case: the losses of five steps on the device and on the CPU (in memory, by the reference forms), milliseconds
until a step is issued and until it is done, PyTorch's own list of what made the host wait, by line, and the memory that
tensors held and that the allocator kept. The exit code is 1 if losses part, if a step whose state is on the device
waits, or if a case fails. Under TORCH_CUDA_SANITIZER=1 PyTorch also looks for races between streams."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import models, optim
from fzero.core import gpu, precision
from fzero.kernels.registry import describe, observe

HOST = "params=host,grads=host,opt=host"
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"policy": "fp32"},
    "fp16": {"policy": "fp16"},
    "float8": {"policy": "bf16_float8"},
    "reference forms": {"kernels": "reference"},
    "compiled": {"compiled": True},
    "captured": {"capture": "auto"},
    "average": {"ema": True},
    "remat": {"remat": "full"},
    "acts=host": {"offload": "acts=host", "remat": "full"},
    "params=host": {"offload": "params=host"},
    "grads=host": {"offload": "grads=host"},
    "opt=host": {"offload": "opt=host"},
    "all host": {"offload": f"{HOST},acts=host", "remat": "full"},
    "opt=host backward": {"offload": "opt=host", "update": "backward"},
    "opt=host speculate": {"offload": "opt=host", "update": "speculate"},
    "nvme": {"offload": "params=nvme,grads=nvme,opt=nvme"},
}
# Relative differences of losses from those of the CPU: roundings, in another order.
NEAR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2, "bf16_float8": 5e-2}
OF_ITSELF = ("fp16",)  # where a step on the device waits: whether the loss scale is at its floor


def sizes_of(tiny: bool) -> tuple[models.LlamaConfig, int]:
    """(the model, rows of a batch)."""
    if tiny:
        return models.LlamaConfig(
            vocab_size=64, max_len=16, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=32
        ), 4
    return models.LlamaConfig(
        vocab_size=256, max_len=256, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=512
    ), 8


class Found(dict):
    """What a case gave: "losses", "waits", "issued_ms", "taken_ms", "allocated", "reserved", "kernels"."""


def steps(device: torch.device, case: dict[str, Any], tiny: bool, number: int = 5) -> Found:
    """Make some steps of a case; the last one is measured."""
    config, rows = sizes_of(tiny)
    model, offload, update = models.build(config), case.get("offload", ""), case.get("update", "end")
    policy = precision.POLICIES[case.get("policy", "bf16")]()
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy, offload=offload)
    clip = [] if update == "backward" else [optim.clip_by_global_norm(1.0)]
    tx = optim.chain(*clip, optim.adamw(3e-3, 0.9, 0.95, weight_decay=0.1, impl=case.get("kernels", "auto")))
    tx = optim.with_average(tx, 0.9) if case.get("ema") else tx
    execution = fzero.Execution(
        **{name: case[name] for name in ("remat", "kernels", "compiled", "capture") if name in case}
    )
    with tempfile.TemporaryDirectory() as folder:
        nvme = fzero.Nvme(Path(folder), buffer_bytes=64 << 20) if "nvme" in offload else None
        state = fzero.init_state(model, tx, plan, seed=0, device=device, nvme=nvme)
        skip = fzero.Skip(nonfinite=update != "backward")
        options = {"micro_batches": 2, "execution": execution, "nvme": nvme, "update": update, "skip": skip}
        step = fzero.make_train_step(model, tx, plan, **options)
        tokens = torch.randint(0, config.vocab_size, (rows, config.max_len), generator=torch.Generator().manual_seed(1))
        batch = {"tokens": tokens.to(device), "targets": tokens.roll(-1, 1).to(device)}
        losses, found = [], Found()
        for i in range(number):
            if i < number - 1:
                state, metrics = step(state, batch)
            else:
                state, metrics = measured(step, state, batch, device, found)
            losses.append(metrics.loss)
        found["losses"] = [float(x) for x in losses]
        if nvme is not None:
            nvme.close()
    return found


def measured(step: Any, state: Any, batch: Any, device: torch.device, found: Found) -> tuple[Any, Any]:
    """A step, with what it took in `found`."""
    gpu.synchronize(device)
    gpu.reset_peak(device)
    on_gpu = device.type == "cuda"
    with warnings.catch_warnings(record=True) as said, observe() as used:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        begin = time.perf_counter()
        result = step(state, batch)
        issued = time.perf_counter() - begin
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        gpu.synchronize(device)
        taken = time.perf_counter() - begin
    places = [f"{w.filename.rpartition('/fzero/')[2]}:{w.lineno}" for w in said if "synchroniz" in str(w.message)]
    found |= {"waits": dict(Counter(places)), "issued_ms": 1e3 * issued, "taken_ms": 1e3 * taken}
    now = gpu.memory_of(device) if on_gpu else None
    found |= {"allocated": now.peak if now else 0, "reserved": now.reserved if now else 0, "kernels": describe(used)}
    return result


def faults(name: str, found: Found, expected: list[float]) -> list[str]:
    """What is wrong with a case."""
    case = CASES[name]
    near = NEAR[case.get("policy", "bf16")]
    wrong = []
    if not all(abs(a - b) <= near * abs(b) for a, b in zip(found["losses"], expected)):
        wrong.append(f"losses part from the CPU's by more than {near:g}")
    in_memory = case.get("offload", "acts=host") == "acts=host"
    if in_memory and name not in OF_ITSELF and found["waits"]:
        wrong.append("the host waits in a step")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    args = parser.parse_args(arguments)
    device, failed = gpu.use_device(args.device), []
    expected: dict[tuple[Any, ...], list[float]] = {}
    for name, case in CASES.items():
        if args.only not in name or (args.tiny and case.get("compiled")):
            continue
        plain = {n: value for n, value in case.items() if n == "policy"} | {"kernels": "reference"}
        plain["update"] = "backward" if case.get("update") == "backward" else "end"  # it has no clipping
        try:
            key = tuple(plain.items())
            if key not in expected:
                offload = {"offload": "opt=host"} if plain["update"] == "backward" else {}
                expected[key] = steps(gpu.HOST, {**plain, **offload}, args.tiny)["losses"]
            found = steps(device, case, args.tiny)
            wrong = faults(name, found, expected[key])
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            found, wrong = Found(), [f"{type(error).__name__}: {error}".splitlines()[0]]
        failed += [name] * bool(wrong)
        print(f"{name}: {'; '.join(wrong).upper() or 'right'}", *(f"  {k}: {v}" for k, v in found.items()), sep="\n")
        print(f"  on the CPU: {expected.get(tuple(plain.items()))}", flush=True)
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
