"""All that fzero's kernels must show on a GPU, in one command and about ten minutes:

    python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json

Three parts. `tests`: the laws of every kernel, on the device. `kernels`: each operation at a few sizes, forward, and
forward with backward: achieved bandwidth or FLOP rate, its fraction of what the same device copies or multiplies, and
the ratio to the reference in eager PyTorch, the same under torch.compile, PyTorch's own form and Liger's, where they
are there. `steps`: training steps of GPT-2 124M and Llama 1B in bf16 beside an nn.Module under torch.compile, in turns:
tokens/s and MFU. A part that fails is reported, and the rest goes on; the exit code is 1 then. `--device cpu --tiny`
runs the same program on sizes that mean nothing, to find its mistakes where there is no GPU."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, cases
from peers import problem, torch_module
from peers.gpt2_module import GPT2
from turns import machine

import fzero
from fzero import models, optim
from fzero.core import precision
from fzero.kernels.registry import observe

ROOT = Path(__file__).parent.parent
TESTS = (
    "glu norm rope dropout_add quantize flash cross_entropy_kernels optim_kernels optim_lowbit newton_schulz "
    "moe_kernels float8"
)
PARTS = ("tests", "kernels", "steps")
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, NVIDIA's data sheets


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], device: str, budget: float = 0.3) -> float:
    """The median time of a call, of those that fit into `budget` seconds; the second-level cache is cold in each, as in
    a step."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=25, rep=int(1000 * budget), return_mode="median") / 1e3
    run()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def limits(device: str, tiny: bool) -> dict[str, float]:
    """What this device does at best: bytes/s of a copy (read and written), FLOP/s of a bf16 product."""
    n, side = (1 << 16, 64) if tiny else (1 << 30, 8192)
    x = torch.empty(n, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return {
        "bytes": 2 * n / seconds(lambda: y.copy_(x), device),
        "flops": 2.0 * side**3 / seconds(lambda: a @ a, device),
    }


def liger(case: Case) -> Callable[..., Any] | None:
    """Liger's form of an operation, where that library is there and has it."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),
        "swiglu": LigerSiLUMulFunction.apply,
    }.get(case.op.name)


def both_passes(run: Callable[..., Any], case: Case) -> Callable[[], Any]:
    """A call of forward and backward pass on the case's tensors."""
    leaves = [t.detach().requires_grad_(i < case.wanted) for i, t in enumerate(case.tensors)]

    def call() -> Any:
        outs = run(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.autograd.grad(outs, leaves[: case.wanted], [torch.ones_like(o) for o in outs])

    return call


def measure(case: Case, device: str, best: dict[str, float], compiled: bool) -> dict[str, Any]:
    """Every contender's times on a case, and what ours achieves of the device's best."""
    with observe() as used:
        case.run("auto", *case.tensors)
    contenders: dict[str, Callable[..., Any]] = {
        "fzero": lambda *t: case.run("auto", *t),
        "eager": lambda *t: case.run("reference", *t),
    }
    if compiled and case.wanted:
        contenders["compile"] = torch.compile(lambda *t: case.run("reference", *t))
    contenders |= case.peers | ({"liger": theirs} if (theirs := liger(case)) else {})
    row: dict[str, Any] = {"case": case.label, "form": sorted(used[case.op.name]), "bound": case.bound, "failed": {}}
    for kind, least in (("forward", case.forward), ("both", case.both)):
        if not least:
            continue
        times = {}
        for name, run in contenders.items():
            try:
                call = forward_pass(run, *case.tensors) if kind == "forward" else both_passes(run, case)
                times[name] = seconds(call, device)
            except Exception as error:  # a peer that runs out of memory, or has no such form, is a result too
                if name == "fzero":
                    raise
                row["failed"][f"{kind} {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rate = least / times["fzero"]
        row[kind] = {
            "ms": {name: 1e3 * t for name, t in times.items()},
            "rate": rate,
            "of_best": rate / best[case.bound],
            "faster_than": {name: t / times["fzero"] for name, t in times.items() if name != "fzero"},
        }
    return row


def forward_pass(run: Callable[..., Any], *tensors: Any) -> Callable[[], Any]:
    """A call without gradients: a forward pass alone."""

    def call() -> Any:
        with torch.no_grad():
            return run(*tensors)

    return call


def say(row: dict[str, Any]) -> None:
    """One line for each pass of a case."""
    unit, scale = ("TB/s", 1e12) if row["bound"] == "bytes" else ("TFLOP/s", 1e12)
    for kind in ("forward", "both"):
        if kind in row:
            r = row[kind]
            than = ", ".join(f"{name} {ratio:.2f}" for name, ratio in r["faster_than"].items())
            print(
                f"  {row['case']:28} {kind:8} {r['rate'] / scale:8.2f} {unit:8} {r['of_best']:6.1%} of best; "
                f"faster than: {than}",
                flush=True,
            )
    for what, why in row["failed"].items():
        print(f"  {row['case']:28} {what} failed: {why}", flush=True)


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--op", default="", help="only cases whose label contains this")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile of the references out: it takes half of the time"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds; what does not fit is left out and named")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny runs the program without one")
    return args


def run_tests(device: str) -> dict[str, Any]:
    """The kernels' tests on the device: {"passed": bool, "said": the end of what they print}."""
    files = [f"tests/test_{name}.py" for name in TESTS.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    print(said, flush=True)
    return {"passed": done.returncode == 0, "said": said}


def main() -> int:
    args = parse()
    begin, failures = time.perf_counter(), []
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "device": name,
        "torch": torch.__version__,
    }
    result |= {"kernels": [], "steps": [], "left_out": []}
    wanted = (args.only,) if args.only else PARTS

    def guarded(what: str, run: Callable[[], Any]) -> Any:
        if time.perf_counter() - begin > args.budget:
            result["left_out"].append(what)
            return None
        try:
            return run()
        except Exception:
            failures.append(what)
            print(f"{what} FAILED\n{traceback.format_exc()}", flush=True)
        finally:
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()

    best = guarded("limits", lambda: limits(args.device, args.tiny)) or {"bytes": 1.0, "flops": 1.0}
    result["best"] = best
    print(
        f"{name}: copies {best['bytes'] / 1e12:.3f} TB/s, bf16 products {best['flops'] / 1e12:.2f} TFLOP/s", flush=True
    )
    if "kernels" in wanted:
        for make in cases(args.device, args.tiny):
            label = f"{make.func.__name__}{make.args}" if hasattr(make, "func") else make.__name__

            def one(make: Any = make) -> None:
                case = make()
                if args.op in case.label:
                    row = measure(case, args.device, best, compiled=not args.no_compile and not args.tiny)
                    result["kernels"].append(row)
                    say(row)

            guarded(label, one)
    if "steps" in wanted:
        peak = {"measured": best["flops"]} | {
            f"datasheet of {chip}": rate for chip, rate in DATASHEET.items() if chip in name
        }
        for model in ("gpt2-124m", "llama-1b"):
            row = guarded(model, lambda model=model: train_steps(model, args.device, args.tiny, 20.0, peak))
            result["steps"] += [row] if row else []
    if "tests" in wanted and not args.tiny:
        result["tests"] = guarded("tests", lambda: run_tests(args.device))
        failures += [] if result["tests"] and result["tests"]["passed"] else ["tests"]
    result |= {"failed": failures, "seconds": time.perf_counter() - begin}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['seconds']:.0f} s; failed: {', '.join(failures) or 'nothing'}; left out: "
        f"{', '.join(result['left_out']) or 'nothing'}"
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
