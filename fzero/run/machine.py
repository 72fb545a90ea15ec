"""What the machine has, and what fzero makes of it: measured rates, memory, compiler, and the decisions that "auto" leaves to them."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import models
from fzero.core.compile import have_compiler
from fzero.kernels.registry import Kernels, describe, observe
from fzero.models import base
from fzero.run.build import settled
from fzero.run.build_optim import make_policy
from fzero.run.config import RunConfig
from fzero.run.config_table import from_table
from fzero.run.memory_check import gigabytes

GEMM = 1024  # side of the square products that are timed
MAX_ERROR = 1e-6  # of a float32 product, relative to its float64 value
OPTIONAL = {
    "tensorboard": "logging beside metrics.jsonl",
    "transformers": "a check of imports and exports (tests)",
    "triton": "CUDA kernels",
}


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(processes: int) -> str:
    """A line that says how many threads this process now uses, as one of so many on this host.

    torchrun sets OMP_NUM_THREADS to 1 where it is not set, so 1 says nothing; a larger number is somebody's wish, and kept.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, cores() // processes))
    return f"threads: {torch.get_num_threads()} a process; {processes} processes on the {cores()} cores of this host"


def available_bytes() -> int:
    """The memory that this process can still have, by the system and by its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    with_limit = (group / "memory.max", group / "memory.current")
    if all(path.is_file() for path in with_limit):
        limit, used = (path.read_text().strip() for path in with_limit)
        if limit != "max":
            limits.append(int(limit) - int(used))
    return min(limits)


def gemm_rate(dtype: torch.dtype) -> float:
    """The FLOP/s of square products in `dtype` on all threads (on one, where others keep the rest busy); see gemm_rates."""
    kinds = [(dtype, fp32_matmul())]
    return max(gemm_rates(kinds, torch.get_num_threads())[0], gemm_rates(kinds, 1)[0])


def gemm_rates(kinds: Sequence[tuple[torch.dtype, str]], threads: int = 1, seconds: float = 0.2) -> list[float]:
    """The FLOP/s of the fastest square product of each kind (dtype, way of float32), made in turn for `seconds` each.

    In turn and on one thread, so that a comparison does not depend on who else uses the machine: while another process has one of two
    cores, a product on two threads can take a hundred times as long. The side is 1024, or less where one product would take too long.
    """
    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    before = fp32_matmul()

    def time_of(kind: tuple[torch.dtype, str], side: int) -> float:
        a = torch.ones(side, side, dtype=kind[0])
        set_fp32_matmul(kind[1])
        start = time.perf_counter()
        a @ a
        return time.perf_counter() - start

    sides = []
    for kind in kinds:
        side = GEMM
        # The second of two: the first also prepares the kernel.
        while side > 64 and [time_of(kind, side // 8) for _ in range(2)][1] * 8**3 > seconds:
            side //= 2
        sides.append(side)
    best, begin = [float("inf")] * len(kinds), time.perf_counter()
    while time.perf_counter() - begin < seconds * len(kinds) or float("inf") in best:
        best = [min(least, time_of(kind, side)) for least, kind, side in zip(best, kinds, sides)]
    set_fp32_matmul(before)
    torch.set_num_threads(all_threads)
    return [2.0 * side**3 / least for side, least in zip(sides, best)]


def fp32_error() -> float:
    """The error of a float32 product as it is now made: the Frobenius norm of the difference from float64, relative."""
    side = torch.arange(GEMM, dtype=torch.float64)
    a = torch.sin(side[:, None] * 0.37 + side * 1.7).float()
    exact = a.double() @ a.double().T
    return float((a @ a.T - exact).norm() / exact.norm())


def onednn_switch() -> Any:
    """Where torch keeps the switch for float32 products by oneDNN; None where it has none."""
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    return switch if torch.backends.mkldnn.is_available() and hasattr(switch, "fp32_precision") else None


def fp32_matmul() -> str:
    """How the process makes float32 products now: default or onednn."""
    switch = onednn_switch()
    return "onednn" if switch is not None and switch.fp32_precision == "bf16" else "default"


def set_fp32_matmul(mode: str) -> None:
    """Have float32 products made the "default" way, or by oneDNN from bfloat16 parts ("onednn"). For the whole process.

    Raises ValueError where this torch has no such switch.
    """
    switch = onednn_switch()
    if mode == "onednn" and switch is None:
        raise ValueError(f"precision.fp32_matmul is 'onednn' and torch {torch.__version__} has no such switch here; use default")
    if switch is not None:
        switch.fp32_precision = "bf16" if mode == "onednn" else "none"


def choose_fp32_matmul(wanted: str) -> tuple[str, str]:
    """(the way float32 products are now made, a line that says why); `wanted` is auto, default or onednn.

    auto takes oneDNN's way where its error stays below 1e-6 and it is at least 5% faster.
    Raises ValueError where "onednn" is asked for and its error is larger, or it is not there.
    """
    set_fp32_matmul("default")
    if wanted == "default":
        return wanted, "fp32 products: torch's default, as asked"
    if wanted == "auto" and onednn_switch() is None:
        return "default", "fp32 products: torch's default (oneDNN's switch is not here)"
    set_fp32_matmul("onednn")
    error = fp32_error()
    plain, rate = gemm_rates([(torch.float32, "default"), (torch.float32, "onednn")])
    said = f"oneDNN's: error {error:.1e}, {rate / 1e9:.0f} GFLOP/s on one thread; default: {plain / 1e9:.0f}"
    if wanted == "onednn" and error >= MAX_ERROR:
        set_fp32_matmul("default")
        raise ValueError(f"precision.fp32_matmul is 'onednn' and its error here is {error:.1e}, above {MAX_ERROR:g}; use default")
    if wanted == "auto" and (error >= MAX_ERROR or rate < 1.05 * plain):
        set_fp32_matmul("default")
        return "default", f"fp32 products: torch's default ({said})"
    return "onednn", f"fp32 products: oneDNN's ({said})"


def settle(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(`config` with every "auto" decided for this machine, lines that say what was decided and why).

    Sets how the process makes float32 products. Raises ValueError where something asked for is not here.
    """
    policy, mode, lines = config.precision.policy, config.precision.fp32_matmul, []
    if policy == "auto":
        bf16, fp32 = gemm_rates([(torch.bfloat16, "default"), (torch.float32, "default")])
        policy = "bf16" if bf16 > fp32 else "fp32"
        lines.append(f"precision: {policy} (products on one thread: bf16 {bf16 / 1e9:.0f}, fp32 {fp32 / 1e9:.0f} GFLOP/s)")
    if mode == "auto" and policy != "fp32":
        mode = "default"  # hardly a product is float32 then
        set_fp32_matmul(mode)
    else:
        mode, line = choose_fp32_matmul(mode)
        lines.append(line)
    compiled = config.train.compiled
    if compiled != False:  # noqa: E712  ("auto" is neither)
        found = compiler() != ""
        if compiled is True and not found:
            raise ValueError("train.compiled is true and no C++ compiler (g++ or clang++) is on PATH; install one, or use auto or false")
        compiled = found
        lines += [] if found else ["blocks run uncompiled, slower and with the same numbers: no C++ compiler (g++ or clang++) is on PATH"]
    return settled(config, policy=policy, fp32_matmul=mode, compiled=compiled), lines


def compiler() -> str:
    """The C++ compiler that compiled blocks would use, "" for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said by the caller, in one line
        found = have_compiler()
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), "") if found else ""


def forms(config: RunConfig) -> dict[str, set[str]]:
    """The form that each hot operation of a training step takes on the CPU: found on tensors without data, nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def leaf(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.empty(shape, dtype=make_policy(config).param, requires_grad=True)

    model = models.build(config.model)
    with FakeTensorMode(allow_non_fake_inputs=True), observe() as used:
        tokens = torch.zeros(config.train.micro_batch, config.data.seq_len, dtype=torch.int64)
        policy = make_policy(config)
        ctx = base.Ctx(dtype=policy.compute, matmul=policy.matmul, kernels=Kernels.parse(config.train.kernels))
        base.loss(model, model.init(leaf), {"tokens": tokens, "targets": tokens}, ctx)
    return used


def diagnose() -> str:
    """The page that `fzero doctor` prints."""
    found, plan = [], []
    found.append(("python", f"{platform.python_version()} ({sys.executable})"))
    found.append(("fzero, torch", f"{fzero.__version__}, {torch.__version__}"))
    found.append(("machine", f"{platform.system()} {platform.machine()}, {cores()} cores, torch uses {torch.get_num_threads()} threads"))
    found.append(("memory", f"{gigabytes(available_bytes())} available"))
    found.append(("disk", f"{gigabytes(shutil.disk_usage(Path.cwd()).free)} free in this folder"))
    found.append(("compiler", compiler() or "none (g++ or clang++)"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found.append(("GPU", gpu))
    rates = [f"{name} {gemm_rate(dtype) / 1e9:.0f} GFLOP/s" for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))]
    found.append(("products", ", ".join(rates)))
    for name, use in OPTIONAL.items():
        found.append((name, ("here" if importlib.util.find_spec(name) else "not here") + f": {use}"))
    config, _ = settle(from_table({}))
    plan.append(("device", "the CPU" + ("" if gpu == "none" else ": fzero pretrain does not use the GPU in this version")))
    plan.append(("precision", config.precision.policy))
    plan.append(("fp32 products", choose_fp32_matmul("auto")[1].removeprefix("fp32 products: ")))
    plan.append(("blocks", "compiled" if config.train.compiled else "uncompiled: no compiler"))
    plan.append(("kernels", describe(forms(config))))
    width = max(len(name) for name, _ in found + plan)
    show = [f"  {name:{width}}  {value}" for name, value in found], [f"  {name:{width}}  {value}" for name, value in plan]
    return "\n".join(["this machine", *show[0], "", "fzero will use", *show[1]])
