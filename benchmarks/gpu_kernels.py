"""Times of one kernel case on a device beside the device's best, for gpu.py."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Case

from fzero.kernels.registry import observe


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
