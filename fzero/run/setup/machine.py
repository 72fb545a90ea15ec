"""This machine: cores, memory, rates of products, compiler; and the choice for each "auto" of a config."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fzero import kernels
from fzero.core import compile_cache, gpu, packages
from fzero.core.compile_cache import have_compiler
from fzero.core.device import CPU, Target, target_on
from fzero.core.host_memory import cores
from fzero.core.text_parsing import in_form, read_json
from fzero.kernels.registry import Kernels
from fzero.offload.disk_io import config_file
from fzero.run.config.run_config import RunConfig
from fzero.run.setup.build_optim import make_policy

Kind = tuple[torch.dtype, str]  # of products: their dtype, and "default" or "onednn"
_MEASURED: dict[Kind, float] = {}  # FLOP/s on one thread that this process has measured
BESIDE_GPU = 2  # cores of a process that its GPU's host computations leave alone
GEMM = 1024  # side of the square products that are timed
MAX_ERROR = 1e-6  # of a float32 product, relative to its float64 value


def share_cores(processes: int, device: torch.device = gpu.HOST) -> str:
    """Share this host's cores among its `processes`; returns a line that says how many threads each uses."""
    # torchrun sets OMP_NUM_THREADS to 1 if it is not set, so 1 means nothing; a larger number is kept, and so is one
    # that is set for a single process. Processes of a GPU leave 2 cores each to the threads that launch its work and
    # move data.
    setting = os.environ.get("OMP_NUM_THREADS")
    if setting is None or (setting == "1" and "LOCAL_RANK" in os.environ):
        torch.set_num_threads(max(1, cores() // processes - BESIDE_GPU * (device.type == "cuda")))
    return f"threads: {torch.get_num_threads()} a process; {processes} processes on {cores()} cores of this host"


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


def host_memory(config: RunConfig) -> int:
    """The bytes of this host's memory that the processes of a run may have."""
    # A virtual machine may grow as it is used, and say before that it has little.
    return int(config.host_memory_gb * 1e9) if config.host_memory_gb else available_bytes()


def product_rates(kinds: Sequence[Kind]) -> list[float]:
    """The FLOP/s of this process' products of each kind, as `fzero bench` measured them, or measured now."""
    # A process without a device file of this machine measures for 0.1 s a kind, on one thread, and counts it for all
    # its threads: "auto" cannot be decided without a figure (bf16 is many times faster than fp32 on one CPU, and many
    # times slower on another).
    rates = bench_rates()
    if not all(kind in rates for kind in kinds):
        missing = [kind for kind in kinds if kind not in _MEASURED]
        if missing:
            _MEASURED.update(zip(missing, gemm_rates(missing)))
        rates = {kind: rate * torch.get_num_threads() for kind, rate in _MEASURED.items()}
    return [rates[kind] for kind in kinds]


def bench_rates() -> dict[Kind, float]:
    """The best FLOP/s of products by kind, of the device file that `fzero bench` wrote on this machine."""
    path = device_file()
    if not path.is_file():
        return {}
    table = read_json(path)
    best: dict[Kind, float] = {}
    with in_form(str(path), "; run `fzero bench` again, or remove the file"):
        if table.get("kind") != "cpu" or table.get("machine", {}).get("processor") != processor():
            return {}
        for rates in table.get("rates", []):
            if rates["processes"] > 1:
                continue
            for name, products in rates["gemm"].items():
                dtype, _, way = name.partition("/")
                kind = getattr(torch, dtype), way or "default"
                flops = [2.0 * n * i * j * k / seconds for n, i, j, k, seconds in products]
                best[kind] = max(best.get(kind, 0.0), *flops, 0.0)
    return best


def device_file() -> Path:
    """The file of `fzero bench`'s measurements: device.json beside the user's config.toml."""
    return config_file().parent / "device.json"


def processor() -> str:
    """The name of the processor, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def peak_rate(dtype: torch.dtype, processes: int = 1, device: torch.device = gpu.HOST) -> float:
    """The FLOP/s of products in `dtype` of one of `processes` that share this host: the peak for MFU."""
    if device != gpu.HOST:
        return gpu.product_rate(dtype, device)
    (rate,) = product_rates([(dtype, fp32_matmul())])
    return rate / processes if (dtype, fp32_matmul()) in bench_rates() else rate


def gemm_rates(kinds: Sequence[Kind], seconds: float = 0.1) -> list[float]:
    """The FLOP/s of the fastest square product of each kind, for `seconds` in turn, on one thread."""
    # On one thread and by its own clock, so that a comparison does not depend on who else uses the machine: while
    # another process has one of two cores, a product on two threads can take a hundred times as long, and one that
    # waits for a core ten times. The side is 1024, or less where one product would take too long.
    all_threads, previous_mode = torch.get_num_threads(), fp32_matmul()
    torch.set_num_threads(1)

    def time_of(kind: Kind, side: int) -> float:
        a = torch.ones(side, side, dtype=kind[0])
        set_fp32_matmul(kind[1])
        start = time.thread_time()
        _ = a @ a
        return time.thread_time() - start

    sides = []
    for kind in kinds:
        side = GEMM
        # The second of two: the first also prepares the kernel.
        while side > 64 and [time_of(kind, side // 8) for _ in range(2)][1] * 8**3 > seconds:
            side //= 2
        sides.append(side)
    best, begin = [float("inf")] * len(kinds), time.perf_counter()
    while time.perf_counter() - begin < seconds * len(kinds) or float("inf") in best:
        best = [min(duration, time_of(kind, side)) for duration, kind, side in zip(best, kinds, sides)]
    set_fp32_matmul(previous_mode)
    torch.set_num_threads(all_threads)
    return [2.0 * side**3 / duration for side, duration in zip(sides, best)]


def fp32_error() -> float:
    """The relative error of a float32 product in the current mode, against float64, in the Frobenius norm."""
    side = torch.arange(GEMM, dtype=torch.float64)
    a = torch.sin(side[:, None] * 0.37 + side * 1.7).float()
    exact = a.double() @ a.double().T
    return float((a @ a.T - exact).norm() / exact.norm())


def onednn_switch() -> Any:
    """Where torch keeps the switch for float32 products by oneDNN; None if it has none."""
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    return switch if torch.backends.mkldnn.is_available() and hasattr(switch, "fp32_precision") else None


def fp32_matmul() -> str:
    """How the process makes float32 products now: default or onednn."""
    switch = onednn_switch()
    return "onednn" if switch is not None and switch.fp32_precision == "bf16" else "default"


def set_fp32_matmul(mode: str) -> None:
    """Make float32 products the "default" way, or by oneDNN from bfloat16 parts, for the whole process."""
    switch = onednn_switch()
    if mode == "onednn" and switch is None:
        raise ValueError(
            f"precision.fp32_matmul is 'onednn' and torch {torch.__version__} has no such switch here; use default"
        )
    if switch is not None:
        switch.fp32_precision = "bf16" if mode == "onednn" else "none"


def choose_fp32_matmul(mode: str) -> tuple[str, str]:
    """(the way float32 products are now made, a line that says why); `mode` is auto, default or onednn."""
    # auto takes oneDNN's way where its error stays below 1e-6 and it is at least 5% faster (see product_rates).
    set_fp32_matmul("default")
    if mode == "default":
        return mode, "fp32 products: torch's default, as asked"
    if mode == "auto" and onednn_switch() is None:
        return "default", "fp32 products: torch's default (oneDNN's switch is not here)"
    set_fp32_matmul("onednn")
    error = fp32_error()
    if mode == "onednn":
        if error >= MAX_ERROR:
            set_fp32_matmul("default")
            raise ValueError(
                f"precision.fp32_matmul is 'onednn' and its error here is {error:.1e}, above {MAX_ERROR:g}; use default"
            )
        return "onednn", f"fp32 products: oneDNN's, as asked (error {error:.1e})"
    plain, rate = product_rates([(torch.float32, "default"), (torch.float32, "onednn")])
    reason = f"oneDNN's: error {error:.1e}, {rate / 1e9:.0f} GFLOP/s; default: {plain / 1e9:.0f}"
    if error >= MAX_ERROR or rate < 1.05 * plain:
        set_fp32_matmul("default")
        return "default", f"fp32 products: torch's default ({reason})"
    return "onednn", f"fp32 products: oneDNN's ({reason})"


def resolve_auto(
    config: RunConfig,
    target: Target,
    *,
    flops: Mapping[str, float] | None = None,
    compiled: bool | None = None,
) -> RunConfig:
    """Decide every "auto" of `config` as a run on `target` does, without measuring."""
    cuda = target.kind == "cuda"
    policy, mode, blocks = config.precision.policy, config.precision.fp32_matmul, config.train.compiled
    if policy == "auto":
        faster = cuda or (flops is not None and flops.get("bfloat16", 0.0) > flops.get("float32", 0.0))
        policy = "bf16" if faster else "fp32"
    if blocks == "auto":
        blocks = (cuda if compiled is None else compiled) and not getattr(config.model, "layer_tokens", 0)
        blocks = blocks and not Kernels.parse(config.train.kernels).canonical
    precision = replace(config.precision, policy=policy, fp32_matmul="default" if mode == "auto" else mode)
    resolved = replace(config, device=target.kind, precision=precision, train=replace(config.train, compiled=blocks))
    if cuda:
        _expect_float8(resolved, target)
    return resolved


def _expect_float8(config: RunConfig, target: Target) -> None:
    """Raise ValueError if a config's float8 products would be emulated on a GPU, slower than bf16, unasked."""
    matmul = make_policy(config).matmul
    if not matmul or Kernels.parse(config.train.kernels)["float8_linear"] != "auto":
        return
    min_capability = kernels.least_capability(matmul.removeprefix("float8_"))
    if target.capability < min_capability:
        actual, needs = (".".join(map(str, version)) for version in (target.capability, min_capability))
        raise ValueError(
            f"precision.policy is {config.precision.policy!r}, whose products need compute capability {needs}, and "
            f"{target.name or 'the GPU'} has {actual}; use bf16, or --set train.kernels=auto,float8_linear=emulated "
            "for the same numbers, slower than bf16"
        )


def expect_packages(config: RunConfig) -> None:
    """Raise ValueError for a package that this run needs later on and that is not installed."""
    uses: dict[str, str | bool] = {
        "zstandard": config.train.compress.endswith("zstd") and f"train.compress = {config.train.compress}",
        "tensorstore": "=nvme" in config.offload and "states on a disk (nvme)",
    }
    for name, use in uses.items():
        if isinstance(use, str) and not packages.installed(name):
            raise ValueError(packages.explain(name, use))


def resolve_here(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(`config` with every "auto" decided for this machine, lines with the decisions and their reasons)."""
    expect_packages(config)
    if config.device == "cuda":
        return resolve_gpu(config, gpu.local_device("cuda"))
    flops, lines = None, []
    if config.precision.policy == "auto":
        ways = [
            (torch.bfloat16, "default"),
            (torch.float32, "default"),
            *[(torch.float32, "onednn")] * (onednn_switch() is not None),
        ]
        bf16, fp32, *_ = product_rates(ways)
        flops = {"bfloat16": bf16, "float32": fp32}
    has_compiler = compiler() != ""
    if config.train.compiled is True and not has_compiler:
        raise ValueError(
            "train.compiled is true and no C++ compiler (g++ or clang++) is on PATH; install one, or use auto or false"
        )
    resolved = resolve_auto(config, CPU, flops=flops, compiled=has_compiler)
    policy, mode = resolved.precision.policy, config.precision.fp32_matmul
    if flops:
        lines.append(f"precision: {policy} (products: bf16 {bf16 / 1e9:.0f}, fp32 {fp32 / 1e9:.0f} GFLOP/s)")
    if mode == "auto" and policy != "fp32":
        set_fp32_matmul("default")  # hardly a product is float32 then
    else:
        mode, line = choose_fp32_matmul(mode)
        resolved = replace(resolved, precision=replace(resolved.precision, fp32_matmul=mode))
        lines.append(line)
    if config.train.compiled == "auto" and not has_compiler:
        lines.append(
            "blocks run uncompiled, slower and with the same numbers: no C++ compiler (g++ or clang++) is on PATH"
        )
    return resolved, lines


def resolve_gpu(config: RunConfig, device: torch.device) -> tuple[RunConfig, list[str]]:
    """`resolve_here` for a GPU: nothing is measured there, its compute capability decides."""
    target, lines = target_on(device), []
    # Ampere is the first with bf16 products; AMD's GPUs count otherwise, and all that PyTorch serves have them.
    wide = target.capability >= (8, 0) or torch.version.hip is not None
    blocks = compiler() != "" and importlib.util.find_spec("triton") is not None
    if config.precision.fp32_matmul == "onednn":
        raise ValueError("precision.fp32_matmul is 'onednn', which is of CPUs, and the run is on a GPU; use default")
    if config.train.compiled is True and not blocks:
        raise ValueError(
            "train.compiled is true, and blocks for a GPU need Triton and a C++ compiler (g++ or clang++) on PATH; "
            "install them, or use auto or false"
        )
    resolved = resolve_auto(config, target, compiled=blocks)
    if config.precision.policy == "auto":
        if not wide:
            resolved = replace(resolved, precision=replace(resolved.precision, policy="fp32"))
        version = ".".join(map(str, target.capability))
        lines.append(
            f"precision: {resolved.precision.policy} (compute capability {version}; bf16 products from 8.0 on)"
        )
    if config.train.compiled == "auto" and not blocks:
        lines.append("blocks run uncompiled, slower and with the same numbers: Triton or a C++ compiler is not here")
    return resolved, lines


def compiler() -> str:
    """The C++ compiler that compiled blocks would use, "" for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caller reports it in one line
        available = have_compiler()
    return compile_cache.compiler() if available else ""
