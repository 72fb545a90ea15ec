"""All that fzero's kernels must show on a GPU, in one command and about fifteen minutes:

    python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json

Four parts, each in a process of its own with a limit. `kernels`: each operation at a few sizes, forward, and forward
with backward: achieved bandwidth or FLOP rate, its fraction of what the same device copies or multiplies, and
the ratio to the reference in eager PyTorch, the same under torch.compile, PyTorch's own form and Liger's, where they
are there. `steps`: training steps of GPT-2 124M and Llama 1B in bf16 beside an nn.Module under torch.compile, in turns:
tokens/s and MFU. `capture`: steps of GPT-2 124M issued and as one CUDA graph, in turns, at three batches. `tests`: the
laws of every kernel, on the device.

The file is written after every figure, and the same command goes on where it was: what has ended its process, or has
run past the limit, is reported and left out then. The exit code is 1 if something has failed. `--device cpu --tiny`
runs the same program on sizes that mean nothing, to find its mistakes where there is no GPU."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import shlex
import signal
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
LIMITS = {"kernels": 480.0, "steps": 300.0, "capture": 240.0, "tests": 480.0}  # seconds of each part, in this order
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=LIMITS, help="one part, in this process")
    parser.add_argument("--op", default="", help="only cases whose label contains this")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile of the references out: it takes half of the time"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to go on with")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny runs the program without one")
    return args


def run_tests(device: str) -> dict[str, Any]:
    """The kernels' tests on the device: {"passed": bool, "said": the end of what they print}."""
    files = [f"tests/test_{name}.py" for name in TESTS.split()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], cwd=ROOT, capture_output=True, text=True)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    print(said, flush=True)
    return {"passed": done.returncode == 0, "said": said}


class Record:
    """The file of results: what is found is there before the next figure is begun."""

    def __init__(self, path: Path, device: str) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.path = path
        self.found: dict[str, Any] = {
            "command": shlex.join(["python", *(w for w in sys.argv if w not in ("--only", *LIMITS))]),
            "machine": machine(),
        }
        self.found |= {"device": name, "torch": torch.__version__, "failed": {}, "under_way": ""}
        self.found |= {part: {} for part in ("best", *LIMITS)}
        if path.is_file():
            before = json.loads(path.read_text())
            for what in ("device", "torch"):
                if before[what] != self.found[what]:
                    raise SystemExit(
                        f"{path}: is of {before[what]}, and this is {self.found[what]}; give another --out"
                    )
            self.found = before
            if left := before["under_way"]:
                self.failed(left, "it ended the process, or ran past the limit of its part")

    def write(self) -> None:
        """Replace the file."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self.path)

    def failed(self, what: str, why: str) -> None:
        """Note a failure; what has failed is not tried again."""
        print(f"{what} FAILED: {why}", flush=True)
        self.found["failed"][what] = why
        self.found["under_way"] = ""
        self.write()

    def add(self, part: str, key: str, run: Callable[[], Any]) -> Any:
        """`run()` of a part, under `key`; what is there already, or None if it has failed."""
        what = f"{part}: {key}"
        if key in self.found[part] or what in self.found["failed"]:
            return self.found[part].get(key)
        self.found["under_way"] = what
        self.write()
        try:
            found = self.found[part][key] = run()
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            self.failed(what, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            return None
        finally:
            gc.collect()
            if self.found["device"] != "cpu":
                torch.cuda.empty_cache()
        self.found["under_way"] = ""
        self.write()
        return found


def run_part(part: str, record: Record, args: argparse.Namespace) -> None:
    """Measure what is missing of a part."""
    best = record.add("best", "of the device", lambda: limits(args.device, args.tiny)) or {"bytes": 1.0, "flops": 1.0}
    name = record.found["device"]
    rates = f"copies {best['bytes'] / 1e12:.3f} TB/s, bf16 products {best['flops'] / 1e12:.2f} TFLOP/s"
    print(f"{name}: {rates}", flush=True)
    if part == "kernels":
        for number, make in enumerate(cases(args.device, args.tiny)):
            words = f"{make.func.__name__}{make.args}" if isinstance(make, functools.partial) else make.__name__

            def one(make: Callable[[], Case] = make) -> dict[str, Any]:
                row = measure(make(), args.device, best, compiled=not args.no_compile and not args.tiny)
                say(row)
                return row

            if args.op in words:
                record.add("kernels", f"{number} {words}", one)
    if part == "steps":
        peak = {"measured": best["flops"]}
        peak |= {f"datasheet of {chip}": rate for chip, rate in DATASHEET.items() if chip in name}
        for model in ("gpt2-124m", "llama-1b"):
            record.add("steps", model, lambda model=model: train_steps(model, args.device, args.tiny, 20.0, peak))
    if part == "capture":
        for batch in (1, 4, 32):
            run = functools.partial(capture_steps, batch, args.device, args.tiny, 10.0)
            record.add("capture", f"batch {batch}", run)
    if part == "tests" and not args.tiny:
        found = record.add("tests", "laws", lambda: run_tests(args.device))
        if found and not found["passed"]:
            record.failed("tests: laws", found["said"])


def main() -> int:
    args = parse()
    if args.only:
        run_part(args.only, Record(args.out, args.device), args)
        return 0
    begin = time.perf_counter()
    for part, limit in LIMITS.items():
        run = subprocess.Popen([sys.executable, *sys.argv, "--only", part], start_new_session=True)
        try:
            run.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{part}: ran past its {limit:g} s; the same command goes on with it", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # and what it has started
    record = Record(args.out, args.device)
    record.write()
    failed = ", ".join(record.found["failed"]) or "nothing"
    print(f"{time.perf_counter() - begin:.0f} s; failed: {failed}; written to {args.out}")
    return int(bool(record.found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
