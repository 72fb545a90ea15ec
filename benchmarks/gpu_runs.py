"""Whole models on a GPU for gpu.py: what they reach, what `fzero plan` had said of them, the largest one, and runs."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_place import (
    Cases,
    Where,
    allocated,
    forget_peak,
    fzero,
    must,
    peak_since,
    said_by,
    seconds_of,
    spread,
)

import fzero as fz
from fzero.core import gpu
from fzero.planner.devices import Device, device
from fzero.run import machine
from fzero.run.build import Job, build, first_state, num_params
from fzero.run.config import RunConfig
from fzero.run.config_table import from_table
from fzero.run.measure.flops import mfu, token_flop
from fzero.run.memory_check import check_memory, host_bytes, needs_on_device

HOST = "params=host,grads=host,opt=host"
SMALL = {"n_layers": 2, "d_model": 32, "d_ff": 64, "vocab_size": 100, "max_len": 64}


def table_of(
    preset: str, batch: int, length: int, *, micro: int = 0, optim: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """The table of a config in bf16 with causal attention over whole sequences, as libraries' forms have it."""
    train = {"batch": batch, "micro_batch": micro or batch, "measure_every": 0}
    train |= {key: more.pop(key) for key in ("remat", "update", "capture") if key in more}
    return {
        "preset": preset,
        "data": {"seq_len": length, "within_documents": False},
        "train": train,
        "optim": optim or {},
        "precision": {"policy": more.pop("policy", "bf16")},
        **more,
    }


# The first of each that has room is taken.
MODELS: dict[str, list[dict[str, Any]]] = {
    "gpt2-1.5b": [
        table_of("gpt2-1.5b", 16, 1024),
        table_of("gpt2-1.5b", 16, 1024, remat="full"),
        table_of("gpt2-1.5b", 16, 1024, remat="full", micro=4),
    ],
    "llama-8b, remat": [
        table_of("llama-8b", 2, 8192, remat="full"),
        table_of("llama-8b", 2, 8192, remat="full", micro=1, optim={"states": "bf16"}),
        table_of("llama-8b", 2, 8192, remat="full", micro=1, optim={"states": "8bit"}),
        table_of("llama-8b", 8, 8192, remat="full", micro=1, optim={"states": "8bit"}, offload="grads=host"),
        table_of("llama-8b", 16, 8192, remat="full", micro=1, offload="opt=host"),
        table_of("llama-8b", 16, 8192, remat="full", micro=1, offload="opt=host", optim={"states": "8bit"}),
    ],
    "llama-8b, all states on the host": [
        table_of("llama-8b", 4, 8192, remat="full", micro=1, offload=HOST, update="speculate"),
        table_of("llama-8b", 4, 8192, remat="full", micro=1, offload=HOST),
        table_of("llama-8b", 4, 8192, remat="full", micro=1, offload=HOST, optim={"states": "8bit"}),
    ],
}
PLANNED: dict[str, dict[str, Any]] = {
    "124M": table_of("gpt2-124m", 32, 1024),
    "124M, remat": table_of("gpt2-124m", 64, 1024, remat="full"),
    "355M": table_of("gpt2-355m", 16, 1024),
    "1B": table_of("llama-1b", 4, 4096),
    "1B, remat": table_of("llama-1b", 8, 4096, remat="full"),
    "1B, float8": table_of("llama-1b", 4, 4096, policy="bf16_float8"),
    "1B, 8-bit states": table_of("llama-1b", 4, 4096, optim={"states": "8bit"}),
    "1B, acts=host": table_of("llama-1b", 8, 4096, remat="full", offload="acts=host"),
    "1B, opt=host": table_of("llama-1b", 16, 4096, micro=4, offload="opt=host"),
    "1B, all on the host, speculating": table_of("llama-1b", 16, 4096, micro=4, offload=HOST, update="speculate"),
}


def config_of(table: dict[str, Any], where: Where) -> RunConfig:
    """The config with every "auto" decided on this machine; at tiny sizes that of a small model of its family."""
    if where.tiny:
        heads = {"n_heads": 2} | ({} if table["preset"].startswith("gpt2") else {"n_kv_heads": 1})
        small = {"data": {**table["data"], "seq_len": 32}, "model": {**SMALL, **heads}}
        precision = {"policy": "bf16", "fp32_matmul": "default"}
        table = table | small | {"precision": precision, "train": {**table["train"], "compiled": False}}
    config = from_table(table)
    return machine.resolve_here(replace(config, device=where.device))[0]


def job_of(table: dict[str, Any], where: Where) -> Job:
    """The job of a table on this device. Raises ValueError if it has no room."""
    job = build(config_of(table, where), folder=where.folder, device=gpu.device_here(where.device))
    host = machine.available_bytes()
    check_memory(job, host if where.device == "cpu" else gpu.free_bytes(job.device), host)
    return job


def batch_of(job: Job) -> dict[str, torch.Tensor]:
    """A batch as a run's: random tokens, all of them counted."""
    shape = (job.config.train.batch, job.config.data.seq_len + 1)
    rows = torch.randint(job.config.model.vocab_size, shape, device=job.device)
    mask = torch.ones(shape[0], shape[1] - 1, dtype=torch.bool, device=job.device)
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous(), "mask": mask}


def measured(job: Job, where: Where, times: int = 5) -> dict[str, Any]:
    """Some steps of a job: tokens/s, MFU in both conventions, bytes at most on the device, and seconds a step."""
    before = allocated(where.device)
    forget_peak(where.device)
    state, batch = first_state(job), batch_of(job)
    metrics: Any = None

    def one() -> None:
        nonlocal state, metrics
        state, metrics = job.train_step(state, batch)

    losses = []
    for _ in range(3):  # compiled, pinned, and the last two alike
        one()
        losses.append(float(metrics.loss))
    forget_peak(where.device)
    seconds = seconds_of(one, where.device, 2 if where.tiny else times)
    rate, flop = batch["tokens"].numel() / statistics.median(seconds), token_flop(job)
    return {
        "parameters": num_params(job),
        "tokens": batch["tokens"].numel(),
        "losses": losses,
        "step_s": statistics.median(seconds),
        "ms": spread(seconds),
        "tokens_per_s": rate,
        "mfu": {of: mfu(flop.model, rate, p) for of, p in where.peak.items()},
        "mfu_causal": {of: mfu(flop.model_causal, rate, p) for of, p in where.peak.items()},
        "peak_bytes": peak_since(where.device, before),
        "host_bytes": host_bytes(job),
        "speculated, put right": [int(x) for x in (metrics.speculated, metrics.put_right) if not isinstance(x, tuple)],
    }


def device_for(where: Where) -> Device | None:
    """What `fzero bench` wrote in this sitting; else the listed device of this GPU's name; None for neither."""
    file = where.folder / "device.json"
    if file.is_file():
        return device(file)
    name = torch.cuda.get_device_name().lower() if where.device == "cuda" else ""
    found = next((one for one in ("gh200", "h200", "h100", "b200", "a100") if one in name), None)
    return None if found is None else device(found)


def beside_plan(job: Job, row: dict[str, Any], where: Where) -> dict[str, Any]:
    """What `fzero plan` says of a measured job, and how far off it was; {} without a device to plan for."""
    target = device_for(where)
    if target is None:
        return {}
    report = fz.plan(job.config, gpu=target)
    found: dict[str, Any] = {"device": target.name, "step_s": report.step_s, "peak_bytes": report.peak_bytes_per_rank}
    if report.step_s:
        found["time off"] = row["step_s"] / report.step_s - 1
    if row["peak_bytes"]:
        found["peak off"] = row["peak_bytes"] / report.peak_bytes_per_rank - 1
    return found


def row_of(table: dict[str, Any], where: Where) -> dict[str, Any]:
    """A table's job measured, and its plan."""
    job = job_of(table, where)
    row = measured(job, where)
    gc.collect()
    row |= {"table": table, "plan": beside_plan(job, row, where)}
    off = ", ".join(f"{what} {row['plan'][what]:+.1%}" for what in ("time off", "peak off") if what in row["plan"])
    print(
        f"  {job.config.preset:12} {row['tokens_per_s']:12,.0f} tokens/s  {row['ms']['median']:9,.1f} ms  "
        f"{row['peak_bytes'] / 1e9:6.1f} GB  causal MFU {row['mfu_causal']}; plan: {off or 'none'}",
        flush=True,
    )
    return row


def model_cases(where: Where) -> Cases:
    """GPT-2 1.5B; Llama-3 8B at 8,192 tokens with recomputation, and with all states on the host."""

    def first(tables: list[dict[str, Any]]) -> dict[str, Any]:
        why = []
        for table in tables:
            try:
                return row_of(table, where) | {"no room": why}
            except ValueError as error:  # of the check before a run
                why.append(str(error))
        raise RuntimeError(f"none has room: {why[-1]}")

    for name, tables in MODELS.items():
        yield name, functools.partial(first, tables)


def plan_cases(where: Where) -> Cases:
    """Ten configurations, each beside its plan."""
    for name, table in PLANNED.items():
        yield name, functools.partial(row_of, table, where)


def largest_cases(where: Where) -> Cases:
    """The largest Llama that trains with its state and activations in the host's memory, by the check before a run; if
    that ends the process, smaller ones."""
    for part in (1.0,) if where.tiny else (0.95, 0.8, 0.6):
        yield f"{part:g} of the memory", functools.partial(largest, part, where)


def deep(layers: int, where: Where) -> dict[str, Any]:
    """The table of a Llama of the 8B's width (8B: 32 layers)."""
    more = {"offload": f"{HOST},acts=host", "remat": "full", "optim": {"states": "8bit"}}
    table = table_of("llama-8b", 4, 2048, **more)
    return table if where.tiny else table | {"model": {"n_layers": layers}}


def largest(part: float, where: Where) -> dict[str, Any]:
    """A Llama that is as deep as `part` of the free memory holds, measured for some steps."""
    device, host = gpu.device_here(where.device), int(part * machine.available_bytes())
    there = host if where.device == "cpu" else int(part * gpu.free_bytes(device))

    def fits(layers: int) -> bool:
        job = build(config_of(deep(layers, where), where), device=device)
        on_host, on_device = host_bytes(job), sum(needs_on_device(job).values())
        return on_device <= there and on_host <= host

    layers = last(fits, 1, 2 if where.tiny else 320)
    job = build(config_of(deep(layers, where), where), device=device)
    row = measured(job, where, times=2) | {"layers": layers}
    print(f"  {row['parameters'] / 1e9:.1f}B parameters, {row['tokens_per_s']:,.0f} tokens/s", flush=True)
    return row


def last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] for which the monotone `holds` is true; `low` where it is nowhere."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# ---- by the command line ----


def bench_cases(where: Where) -> Cases:
    """`fzero bench`, whose file the plans of this sitting are made with."""
    words = ["--quick", "--only", "memory"] if where.tiny else []
    command = fzero("bench", "--device", where.device, "--out", str(where.folder / "device.json"), *words)
    yield "device.json", lambda: must(said_by(command))


def run_cases(where: Where) -> Cases:
    """Runs of `fzero pretrain` with their reports: GPT-2 124M, and a Llama of 1B at 4,096 tokens."""
    sizes = {
        "gpt2-124m": ["--batch", "256", "--micro-batch", "32", "--seq-len", "1024", "--steps", "300"],
        "llama-1b": ["--batch", "16", "--micro-batch", "4", "--seq-len", "4096", "--steps", "60"],
    }
    tiny = ["--batch", "2", "--micro-batch", "2", "--seq-len", "16", "--steps", "2", "--set", "train.compiled=false"]
    for model, words in sizes.items():
        name = "mlp-tiny" if where.tiny else model
        yield model, functools.partial(run_and_report, name, tiny if where.tiny else words, where, where.folder / model)


def run_and_report(model: str, words: list[str], where: Where, folder: Path) -> dict[str, Any]:
    """A run's last lines; the report is written beside it."""
    options = ["--device", where.device, "--out", str(folder), "--prompt", ""]
    found = must(said_by(fzero("pretrain", "--model", model, *words, *options)))
    must(said_by(fzero("report", str(folder))))
    return found
