"""Training steps on a device beside an nn.Module, and as a CUDA graph beside issued ones, for gpu.py."""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_place import Cases, Where, allocated, forget_peak, peak_since, seconds_of, spread, synchronize
from peers import problem, torch_module
from peers.gpt2_module import GPT2

import fzero
from fzero import models, optim
from fzero.core import precision
from fzero.kernels.registry import observe


def flop_per_token(config: Any, params: int) -> tuple[float, float]:
    """(full, causal) model FLOPs of training on one token: 6 N + 12 L T D, and 6 N + 6 L T D; N as multiplied with."""
    attention = 6.0 * config.n_layers * config.max_len * config.d_model
    return 6.0 * params + 2 * attention, 6.0 * params + attention


def as_problem(c: models.LlamaConfig) -> problem.Config:
    """The sizes as the peers take them."""
    return problem.Config(
        c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.n_kv_heads, c.d_ff, c.max_len, c.norm_eps, c.rope_theta
    )


def step_cases(where: Where) -> Cases:
    """GPT-2 124M and a Llama of 1B beside the alternatives."""
    for name in ("gpt2-124m", "llama-1b"):
        yield name, functools.partial(train_steps, name, where)


def capture_cases(where: Where) -> Cases:
    """GPT-2 124M issued and captured, at three batches."""
    for batch in (1, 4, 32):
        yield f"batch {batch}", functools.partial(capture_steps, batch, where.device, where.tiny, 10.0)


def in_jax(config: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Callable[[], float] | str:
    """The same step in JAX with optax, in memory beside PyTorch's; or why there is none."""
    if not all(importlib.util.find_spec(name) for name in ("jax", "optax")):
        return "jax or optax is not here"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from peers import gpt2_jax

    if tokens.is_cuda and jax.default_backend() != "gpu":
        return "jax is here without its CUDA plugin (pip install 'jax[cuda12]')"
    return gpt2_jax.make(config, tokens.cpu().numpy(), targets.cpu().numpy())


def train_steps(name: str, where: Where) -> dict[str, Any]:
    """fzero's bf16 step of a model beside an nn.Module under torch.compile and autocast, and GPT-2 beside JAX with
    optax: one step each in turn, medians; and what each needs of memory, its own state included.

    On a GPU fzero's step takes its turn with PyTorch's attention too, the one that the nn.Module has.
    """
    device, tiny = where.device, where.tiny
    sizes = {
        "gpt2-124m": (models.GPT2Config(50257, 1024, 768, 12, 12, 3072), 32),
        "llama-1b": (models.LlamaConfig(128256, 4096, 2048, 16, 32, 8, 8192), 4),
    }
    config, batch = sizes[name]
    if tiny:
        small = {"vocab_size": 100, "max_len": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}
        config, batch = type(config)(**small, **({} if name.startswith("gpt2") else {"n_kv_heads": 1})), 2
    model, mesh = models.build(config), fzero.one_process()
    plan, tx = fzero.zero_plan(0, model, mesh, policy=precision.bf16()), optim.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    rows = torch.randint(config.vocab_size, (batch, config.max_len + 1), device=device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def of_fzero(kernels: str) -> Callable[[], torch.Tensor]:
        step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=not tiny, kernels=kernels))
        if not held:
            held.append(fzero.init_state(model, tx, plan, seed=0, device=device))

        def ours() -> torch.Tensor:
            held[0], metrics = step(held[0], {"tokens": tokens, "targets": targets})
            return metrics.loss

        return ours

    def of_module() -> Callable[[], torch.Tensor]:
        module = (GPT2(config) if name.startswith("gpt2") else torch_module.Llama(as_problem(config))).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
        forward = module if tiny else torch.compile(module)

        def theirs() -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16):
                loss = forward(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return theirs

    held: list[Any] = []  # fzero's state, which both of its contenders update
    start = allocated(device)
    makers: dict[str, Callable[[], Any]] = {"fzero": functools.partial(of_fzero, "auto")}
    if device == "cuda":
        makers["fzero, flash"] = functools.partial(of_fzero, "auto,attention=flash")
    makers["nn.Module"] = of_module
    if name.startswith("gpt2"):
        makers["jax"] = functools.partial(in_jax, config, tokens, targets)
    row: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "length": config.max_len,
        "params": models.num_params(model),
        "contenders": {},
        "left out": {},
    }
    contenders, times = {}, {}
    with observe() as used:
        for label, make in makers.items():
            before = allocated(device) if label == "nn.Module" else start  # beside fzero's state
            forget_peak(device)
            run = make()
            if isinstance(run, str):
                row["left out"][label] = run
                continue
            losses = [float(run()) for _ in range(3)]
            memory = {} if label == "jax" else {"peak_bytes": peak_since(device, before)}
            row["contenders"][label], contenders[label], times[label] = {"losses": losses} | memory, run, []
            if label == "nn.Module":
                row["contenders"][label]["state_bytes"] = allocated(device) - before
    row["kernels"] = {op: sorted(forms) for op, forms in used.items()}
    begin = time.perf_counter()
    while min(map(len, times.values())) < 9 or time.perf_counter() - begin < 20.0:
        for label, run in contenders.items():
            times[label] += seconds_of(run, device, 1)
        if tiny:
            break
    looked_up = 0 if getattr(config, "tied", False) else config.vocab_size * config.d_model
    full, causal = flop_per_token(config, row["params"] - looked_up)
    for label, taken in times.items():
        rate = batch * config.max_len / statistics.median(taken)
        row["contenders"][label] |= {
            "tokens_per_s": rate,
            "ms": spread(taken),
            "mfu": {
                f"{kind}, {of}": rate * flop / p
                for kind, flop in (("full", full), ("causal", causal))
                for of, p in where.peak.items()
            },
        }
        print(f"  {name:10} {label:12} {rate:12,.0f} tokens/s  MFU {row['contenders'][label]['mfu']}", flush=True)
    for label in [label for label in times if label.startswith("fzero")]:
        ratios = [theirs / ours for ours, theirs in zip(times[label], times["nn.Module"])]
        row["contenders"][label]["faster than nn.Module"] = statistics.median(ratios)
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
