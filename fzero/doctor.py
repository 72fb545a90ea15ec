"""What the machine has, and what fzero makes of it: measured rates, memory, compiler, and the decisions that "auto" leaves to them."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
import warnings
from pathlib import Path

import torch

import fzero
from fzero.compile import have_compiler
from fzero.config import RunConfig
from fzero.program import gigabytes, settled

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


def gemm_rate(dtype: torch.dtype, seconds: float = 0.2) -> float:
    """The FLOP/s of the fastest of the square products made in `seconds`, of side 1024, or less where one would take too long."""

    def time_of(side: int) -> float:
        a = torch.ones(side, side, dtype=dtype)
        before = time.perf_counter()
        a @ a
        return time.perf_counter() - before

    side = GEMM
    while side > 64 and time_of(side // 8) * 8**3 > seconds:
        side //= 2
    start, best = time.perf_counter(), time_of(side)
    while time.perf_counter() - start < seconds:
        best = min(best, time_of(side))
    return 2.0 * side**3 / best


def fp32_error() -> float:
    """The error of a float32 product as it is now made: the Frobenius norm of the difference from float64, relative."""
    side = torch.arange(GEMM, dtype=torch.float64)
    a = torch.sin(side[:, None] * 0.37 + side * 1.7).float()
    exact = a.double() @ a.double().T
    return float((a @ a.T - exact).norm() / exact.norm())


def set_fp32_matmul(mode: str) -> None:
    """Have float32 products made the "default" way, or by oneDNN from bfloat16 parts ("onednn"). For the whole process.

    Raises ValueError where this torch has no such switch.
    """
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if mode == "onednn" and not (torch.backends.mkldnn.is_available() and hasattr(switch, "fp32_precision")):
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
    plain = gemm_rate(torch.float32)
    try:
        set_fp32_matmul("onednn")
    except ValueError as error:
        if wanted == "onednn":
            raise
        return "default", f"fp32 products: torch's default ({error})"
    error, rate = fp32_error(), gemm_rate(torch.float32)
    said = f"oneDNN's: error {error:.1e}, {rate / 1e9:.0f} GFLOP/s; default: {plain / 1e9:.0f} GFLOP/s"
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
        set_fp32_matmul("default")
        bf16, fp32 = gemm_rate(torch.bfloat16), gemm_rate(torch.float32)
        policy = "bf16" if bf16 > fp32 else "fp32"
        lines.append(f"precision: {policy} (products here: bf16 {bf16 / 1e9:.0f}, fp32 {fp32 / 1e9:.0f} GFLOP/s)")
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
    rates = {name: gemm_rate(dtype) / 1e9 for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    found.append(("products", ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items())))
    for name, use in OPTIONAL.items():
        found.append((name, ("here" if importlib.util.find_spec(name) else "not here") + f": {use}"))
    config, _ = settle(RunConfig())
    plan.append(("device", "the CPU" + ("" if gpu == "none" else ": fzero pretrain does not use the GPU in this version")))
    plan.append(("precision", config.precision.policy))
    plan.append(("fp32 products", choose_fp32_matmul("auto")[1].removeprefix("fp32 products: ")))
    plan.append(("blocks", "compiled" if config.train.compiled else "uncompiled: no compiler"))
    width = max(len(name) for name, _ in found + plan)
    show = [f"  {name:{width}}  {value}" for name, value in found], [f"  {name:{width}}  {value}" for name, value in plan]
    return "\n".join(["this machine", *show[0], "", "fzero will use", *show[1]])
