"""Training steps on a device beside an nn.Module, and as a CUDA graph beside issued ones, for gpu.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from peers import problem, torch_module
from peers.gpt2_module import GPT2

import fzero
from fzero import models, optim
from fzero.core import precision
from fzero.kernels.registry import observe


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def flop_per_token(config: Any, params: int) -> tuple[float, float]:
    """(full, causal) model FLOPs of training on one token: 6 N + 12 L T D, and 6 N + 6 L T D; N as multiplied with."""
    attention = 6.0 * config.n_layers * config.max_len * config.d_model
    return 6.0 * params + 2 * attention, 6.0 * params + attention


def as_problem(c: models.LlamaConfig) -> problem.Config:
    """The sizes as the peers take them."""
    return problem.Config(
        c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.n_kv_heads, c.d_ff, c.max_len, c.norm_eps, c.rope_theta
    )


def train_steps(name: str, device: str, tiny: bool, budget: float, peak: dict[str, float]) -> dict[str, Any]:
    """fzero's bf16 step of a model beside an nn.Module under torch.compile and autocast: one step each in turn,
    medians."""
    sizes = {
        "gpt2-124m": (models.GPT2Config(50257, 1024, 768, 12, 12, 3072), 32),
        "llama-1b": (models.LlamaConfig(128256, 2048, 2048, 16, 32, 8, 8192), 8),
    }
    config, batch = sizes[name]
    if tiny:
        small = {"vocab_size": 100, "max_len": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}
        config, batch = type(config)(**small, **({} if name.startswith("gpt2") else {"n_kv_heads": 1})), 2
    model, mesh = models.build(config), fzero.one_process()
    plan, tx = fzero.zero_plan(0, model, mesh, policy=precision.bf16()), optim.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    state = fzero.init_state(model, tx, plan, seed=0, device=device)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=not tiny))
    rows = torch.randint(config.vocab_size, (batch, config.max_len + 1), device=device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    module = (GPT2(config) if name.startswith("gpt2") else torch_module.Llama(as_problem(config))).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
    forward = module if tiny else torch.compile(module)

    def ours() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, {"tokens": tokens, "targets": targets})
        return metrics.loss

    def theirs() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    contenders = {"fzero": ours, "nn.Module": theirs}
    row: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "length": config.max_len,
        "params": models.num_params(model),
        "contenders": {},
    }
    times: dict[str, list[float]] = {}
    with observe() as used:
        for label, run in contenders.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            losses = [float(run()) for _ in range(3)]
            memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
            row["contenders"][label] = {"losses": losses, "max_memory_allocated_with_both_states": memory}
            times[label] = []
    row["kernels"] = {op: sorted(forms) for op, forms in used.items()}
    begin = time.perf_counter()
    while min(map(len, times.values())) < 9 or time.perf_counter() - begin < budget:
        for label, run in contenders.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            times[label].append(time.perf_counter() - start)
        if tiny:
            break
    looked_up = 0 if getattr(config, "tied", False) else config.vocab_size * config.d_model
    full, causal = flop_per_token(config, row["params"] - looked_up)
    for label, taken in times.items():
        rate = batch * config.max_len / statistics.median(taken)
        row["contenders"][label] |= {
            "tokens_per_s": rate,
            "ms": {
                "median": 1e3 * statistics.median(taken),
                "min": 1e3 * min(taken),
                "max": 1e3 * max(taken),
                "count": len(taken),
            },
            "mfu": {
                f"{kind}, {of}": rate * flop / p
                for kind, flop in (("full", full), ("causal", causal))
                for of, p in peak.items()
            },
        }
        print(f"  {name:10} {label:10} {rate:12,.0f} tokens/s  MFU {row['contenders'][label]['mfu']}", flush=True)
    return row


def capture_steps(batch: int, device: str, tiny: bool, budget: float) -> dict[str, Any]:
    """Steps of GPT-2 124M that the host issues beside steps by one CUDA graph, one each in turn: milliseconds, what
    `auto` decided, the memory with the graph, and whether the losses have the same bits."""
    config = models.GPT2Config(50257, 1024, 768, 12, 12, 3072)
    config = models.GPT2Config(100, 16, 32, 2, 2, 64) if tiny else config
    model, tx = models.build(config), optim.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=precision.bf16())
    rows = torch.randint(config.vocab_size, (batch, config.max_len + 1), device=device)
    given = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    row: dict[str, Any] = {"model": "gpt2-124m", "batch": batch, "ms": {}}
    steps, states, losses = {}, {}, {}
    for how in ("off", "auto"):
        execution = fzero.Execution(compiled=not tiny, capture=how)
        steps[how] = fzero.make_train_step(model, tx, plan, execution=execution)
        states[how] = fzero.init_state(model, tx, plan, seed=0, device=device)
        losses[how], row["ms"][how] = [], []

    def one(how: str) -> None:
        states[how], metrics = steps[how](states[how], given)
        losses[how].append(metrics.loss)

    for how in steps:
        for _ in range(6):  # measured, decided, recorded
            one(how)
        row[f"reserved_bytes, {how}"] = torch.cuda.memory_reserved() if device == "cuda" else 0
    begin = time.perf_counter()
    while len(row["ms"]["auto"]) < 9 or time.perf_counter() - begin < budget:
        for how in steps:
            synchronize(device)
            start = time.perf_counter()
            one(how)
            synchronize(device)
            row["ms"][how].append(1e3 * (time.perf_counter() - start))
        if tiny:
            break
    row |= {"decided": steps["auto"].news, "same_losses": [*map(float, losses["off"])] == [*map(float, losses["auto"])]}
    row["ms"] = {
        how: {"median": statistics.median(ms), "min": min(ms), "max": max(ms)} for how, ms in row["ms"].items()
    }
    print(f"  batch {batch:3} {row['ms']}; {row['decided']}; same losses: {row['same_losses']}", flush=True)
    return row
