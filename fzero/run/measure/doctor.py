"""What `fzero doctor` prints: the features of this machine, and those of them that fzero would use."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import models
from fzero.core import digest, gpu, host_memory, packages
from fzero.core.host_memory import cores
from fzero.kernels.registry import Kernels, describe, observe
from fzero.models import base, forward
from fzero.run.config.config_table import from_table
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_check import gigabytes
from fzero.run.setup.build_optim import make_policy
from fzero.run.setup.machine import available_bytes, choose_fp32_matmul, compiler, peak_rate, resolve_here
from fzero.run.setup.process_settings import settings_restored


def forms(config: RunConfig) -> dict[str, set[str]]:
    """The form that each hot operation of a training step takes on the CPU, by tensors without data."""
    from fzero.core.torch_private import FakeTensorMode

    def leaf(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: Any = None) -> torch.Tensor:
        return torch.empty(shape, dtype=make_policy(config).param, requires_grad=True)

    model = models.build(config.model)
    with FakeTensorMode(allow_non_fake_inputs=True), observe() as used:
        tokens = torch.zeros(config.train.micro_batch, config.data.seq_len, dtype=torch.int64)
        policy = make_policy(config)
        ctx = base.Ctx(dtype=policy.compute, matmul=policy.matmul, kernels=Kernels.parse(config.train.kernels))
        forward.loss(model, model.init(leaf), {"tokens": tokens, "targets": tokens}, ctx)
    return used


def usable_device() -> tuple[torch.device, str]:
    """(the device that "auto" is here; the GPUs in words, or why none)."""
    try:
        device = gpu.use_device(gpu.resolve_device("auto"))
    except ValueError as error:
        return gpu.HOST, str(error)
    cards = [gpu.properties(torch.device("cuda", i)) for i in range(gpu.count_gpus())]
    names = "; ".join(f"{card.name}, {gigabytes(card.total_memory)}" for card in cards)
    return device, names or f"none{f' ({reason})' if (reason := gpu.complaint()) else ''}"


def describe_missing(name: str) -> str:
    """What a package is for that is not here, and what that costs."""
    use, cost = packages.OPTIONAL[name]
    if name == "crc32c":
        instead = {"C++": "by fzero's own loop", "google_crc32c": "by google_crc32c, with Python's lock held"}
        cost = instead.get(digest.provider(), "none can be computed: no run starts; pip install crc32c, or install g++")
    return f"not here: {use}{f'; {cost}' if cost else ''}"


@settings_restored()
def diagnose() -> str:
    """The page that `fzero doctor` prints."""
    machine_rows, plan = [], []
    machine_rows.append(("python", f"{platform.python_version()} ({sys.executable})"))
    machine_rows.append(("fzero, torch", f"{fzero.__version__}, {torch.__version__}"))
    machine_rows.append(
        (
            "machine",
            f"{platform.system()} {platform.machine()}, {cores()} cores, torch uses {torch.get_num_threads()} threads",
        )
    )
    machine_rows.append(("memory", f"{gigabytes(available_bytes())} available"))
    machine_rows.append(("disk", f"{gigabytes(shutil.disk_usage(Path.cwd()).free)} free in this folder"))
    machine_rows.append(("compiler", compiler() or "none (g++ or clang++)"))
    device, cards = usable_device()
    kind = device.type
    machine_rows.append(("GPU", cards))
    if kind == "cuda":
        machine_rows.append(("NUMA", host_memory.find_placement(device).line or "one node on this host"))
    rates = [
        f"{name} {peak_rate(dtype, 1, device) / 1e9:,.0f} GFLOP/s"
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]
    machine_rows.append(("products", ", ".join(rates)))
    availability = {name: packages.installed(name) for name in packages.OPTIONAL}
    machine_rows.append(("packages", ", ".join(name for name in availability if availability[name])))
    machine_rows += [(name, describe_missing(name)) for name in availability if not availability[name]]
    config, _ = resolve_here(replace(from_table({}), device=kind))
    plan.append(("device", gpu.describe_device(device)))
    plan.append(("precision", config.precision.policy))
    if kind == "cpu":
        plan.append(("fp32 products", choose_fp32_matmul("auto")[1].removeprefix("fp32 products: ")))
    plan.append(("blocks", "compiled" if config.train.compiled else "uncompiled: no compiler"))
    if kind == "cpu":  # which those of a GPU take is in the first lines of a run, and in its plan
        plan.append(("kernels", describe(forms(config))))
    width = max(len(name) for name, _ in machine_rows + plan)
    show = (
        [f"  {name:{width}}  {value}" for name, value in machine_rows],
        [f"  {name:{width}}  {value}" for name, value in plan],
    )
    return "\n".join(["this machine", *show[0], "", "fzero will use", *show[1]])
