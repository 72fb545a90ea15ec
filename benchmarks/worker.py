"""One contender, or one rank of it, in its own process, driven by `single.py`, `zero.py` or `pipeline.py` over stdin
and stdout.

A process each, because the switches, thread pools, compile caches and the memory high-water mark belong to a process.
The first line in is the order (JSON); then, in mode "time", each further line is a batch number and is answered by one
JSON line. In mode "both" memory is counted too, in a step for the line "live".
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from peers import problem

MODULES = {
    "fzero": "fzero_step",
    "eager": "torch_module",
    "compile": "torch_module",
    "module": "fzero_module",
    "module-STAGE": "fzero_module",
    "jax": "jax_step",
    "fzero-STAGE": "fzero_zero",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "deepspeed-STAGE": "deepspeed_zero",
    "jax-fsdp": "jax_fsdp",
}
PIPELINES = {  # before =SCHEDULE
    "fzero-pp": "fzero_pipeline",
    "pipelining": "torch_pipelining",
    "deepspeed-pp": "deepspeed_pipeline",
}
JAX = ("jax", "jax-fsdp")


def rss_peak_bytes() -> int | None:
    """The resident-set high-water mark of this process since the last `reset_rss_peak`; None off Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return None
    (line,) = [x for x in lines if x.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def reset_rss_peak() -> bool:
    """Whether the mark could be set back to the present size (Linux only), so that compiling does not count."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def use_onednn() -> dict[str, float]:
    """{"onednn_relative_error"} after sending fp32 GEMMs through oneDNN; ValueError where they would not stay fp32."""
    import torch

    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(1024, 1024, generator=g), torch.randn(1024, 1024, generator=g)
    exact = a.double() @ b.double()
    error = ((a @ b - exact).norm() / exact.norm()).item()
    if error > 1e-6:
        raise ValueError(
            f"the switch onednn is not fp32 on this CPU: relative error {error:.1e}, allowed 1e-6; leave it out"
        )
    return {"onednn_relative_error": error}


def peer(name: str) -> ModuleType:
    """The module of the contender; ImportError where its library is absent."""
    if name.partition("=")[0] in PIPELINES:
        return importlib.import_module(f"peers.{PIPELINES[name.partition('=')[0]]}")
    base, _, stage = name.rpartition("-")
    key = f"{base}-STAGE" if stage.isdecimal() else name
    if key not in MODULES:
        raise ValueError(f"no contender {name!r}; there are {', '.join(MODULES)}")
    return importlib.import_module(f"peers.{MODULES[key]}")


def maker(name: str, parts: int) -> Callable:
    """`make` of the contender, bound to what its name says besides the library, and to a pipeline's micro-batches."""
    make = peer(name).make
    if "=" in name:
        return functools.partial(make, schedule=name.partition("=")[2], parts=parts)
    _, _, stage = name.rpartition("-")
    if stage.isdecimal():
        return functools.partial(make, stage=int(stage))
    if name in ("eager", "compile"):
        return functools.partial(make, compiled=name == "compile")
    return make


def prepare(order: dict) -> dict:
    """Facts about this process, once its threads and switches are set."""
    if order["name"] in JAX:
        import jax
        import optax

        return {"versions": {"jax": jax.__version__, "optax": optax.__version__}}
    import torch

    torch.set_num_threads(order["threads"])
    facts = use_onednn() if "onednn" in order["switches"] else {}
    versions = {"torch": torch.__version__}
    if order["name"].startswith("deepspeed"):
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    return {"versions": versions} | facts


def profiled(make_step: Callable, batch_at: Callable, order: dict) -> str:
    """Two tables of one step after warm-up: operators grouped by kind, and the operators by their own time."""
    if order["name"] in JAX:
        raise ValueError("--profile reads torch's profiler, which does not see JAX; use another contender")
    import torch
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True  # else Inductor's kernels have no names in the profile
    step = make_step()
    for i in range(order["warmup"]):
        step(batch_at(i))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(batch_at(order["warmup"]))
    averages = profile.key_averages()
    kinds = {
        "matmul": ("mm", "linear", "matmul", "baddbmm"),
        "attention": ("scaled_dot_product", "flash_attention"),
        "optimizer": ("adam", "Optimizer"),
        "compiled kernels": ("cpp_fused", "graph_", "CompiledFxGraph", "Torch-Compiled", "CompiledFunction", "kernel_"),
        "loss": ("softmax", "nll_loss", "cross_entropy"),
        "copies and casts": ("copy_", "clone", "contiguous", "_to_copy", "aten::cat", "zero_", "fill_"),
    }
    grouped = dict.fromkeys([*kinds, "everything else"], 0.0)
    for row in averages:
        found = [kind for kind, words in kinds.items() if any(word in row.key for word in words)]
        # attention and the optimizer have "mm" in some names: the more special kind wins
        kind = next(
            (k for k in ("attention", "optimizer", "compiled kernels") if k in found), (found or ["everything else"])[0]
        )
        grouped[kind] += row.self_cpu_time_total
    total = sum(grouped.values())
    lines = [
        f"{kind:18} {us / 1e3:10.1f} ms {us / total:6.1%}" for kind, us in sorted(grouped.items(), key=lambda x: -x[1])
    ]
    return (
        "\n".join(lines)
        + "\n\n"
        + averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    )


def live(make_step: Callable, batch_at: Callable, order: dict) -> dict:
    """Peak bytes of one step after warm-up, with the method by which they were counted."""
    if order["name"] in JAX:
        config = problem.Config(**order["config"])
        weights = problem.weights(config, order["seed"])
        planned = peer(order["name"]).planned_bytes(weights, config, order["dtype"], batch_at(0))
        return {"peak_bytes": planned, "method": "XLA memory_analysis"}
    import live_bytes

    def setup() -> Callable[[], None]:
        step = make_step()
        for i in range(order["warmup"]):
            step(batch_at(i))
        batch = batch_at(order["warmup"])
        return lambda: step(batch)

    return live_bytes.peak(setup) | {"method": "torch allocator"}


def counted(step: Callable[[], object]) -> dict:
    """Peak bytes of a step in a process that has counted from its first tensor on, with the method."""
    import live_bytes

    return live_bytes.peak(lambda: step) | {"method": "torch allocator"}


def timed(make_step: Callable, batch_at: Callable, order: dict, reply: Callable[[dict], None], facts: dict) -> None:
    """Warm up, reply with the losses, then a step a line until stdin ends; for the line "live" the peak bytes of a
    step."""
    if order["mode"] == "both":
        import live_bytes  # and torch, which JAX's contenders do without

        live_bytes.count_in_all_threads()
    start = time.perf_counter()
    step = make_step()
    losses = [step(batch_at(i)) for i in range(order["warmup"])]
    setup_s = time.perf_counter() - start
    reply(facts | {"losses": losses, "setup_s": setup_s, "rss_without_setup": reset_rss_peak()})
    for line in sys.stdin:
        if json.loads(line) == "live":
            reply(counted(functools.partial(step, batch_at(order["warmup"]))))
            continue
        batch = batch_at(int(line))
        begin, cpu = time.perf_counter(), time.process_time()  # one clock for all processes of the machine
        loss = step(batch)
        end = time.perf_counter()
        cpu = time.process_time() - cpu
        reply({"begin_s": begin, "end_s": end, "cpu_s": cpu, "loss": loss, "rss_peak_bytes": rss_peak_bytes()})


def serve(order: dict, reply: Callable[[dict], None]) -> None:
    """Do what the order says; ValueError where its contender cannot."""
    if hasattr(os, "sched_setaffinity"):  # before any import: XLA sizes its thread pool by it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["cores"]])
    try:
        make = maker(order["name"], order.get("parts", 1))
    except ImportError as error:
        reply({"absent": str(error)})
        return
    facts = prepare(order)
    config = problem.Config(**order["config"])

    def batch_at(step: int) -> dict:
        batch = problem.batch_at(config, order["batch"], order["seed"], step)
        if "parts" in order:  # the ranks of a pipeline have the same rows
            return batch
        return problem.rows_of_rank(batch, order["rank"], order["ranks"])

    def make_step() -> Callable:
        return make(problem.weights(config, order["seed"]), config, order["dtype"], frozenset(order["switches"]))

    if order["mode"] in ("time", "both"):
        timed(make_step, batch_at, order, reply, facts)
    elif order["mode"] == "live":
        reply(live(make_step, batch_at, order))
    elif order["mode"] == "profile":
        reply({"table": profiled(make_step, batch_at, order)})


def main() -> None:
    order = json.loads(sys.stdin.readline())
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr

    def reply(value: dict) -> None:
        replies.write(json.dumps(value) + "\n")

    try:
        serve(order, reply)
    except ValueError as error:
        reply({"error": str(error)})


if __name__ == "__main__":
    main()
