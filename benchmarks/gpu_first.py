"""What is learnt first on a GPU, for gpu.py: the machine, whether fzero starts, and small steps beside the CPU's."""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import socket
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from gpu_place import ROOT, Cases, Where, allocated, forget_peak, fzero, must, peak_since, said_by, spread, synchronize

import fzero as fz
from fzero import models, optim
from fzero.core import numa, precision
from fzero.offload.disk_io import file_system, mount_point
from fzero.run import machine
from fzero.train.spike import Skip

TOOLS = ("nsys", "ncu", "compute-sanitizer", "numactl", "g++")
PACKAGES = ("triton", "flash_attn_interface", "flash_attn", "liger_kernel", "jax", "optax", "crc32c", "zstandard")
ASKED = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
)


# ---- machine, import ----


def machine_cases(where: Where) -> Cases:
    """Driver, versions, locked memory, disks, NUMA nodes, and the tools that are here."""
    yield "versions", functools.partial(versions, where.device)
    yield "nvidia-smi", lambda: said_by(["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"])
    yield "topology", lambda: said_by(["nvidia-smi", "topo", "-m"])
    yield "host", functools.partial(host, where)


def versions(device: str) -> dict[str, Any]:
    """Of Python, PyTorch and what it brings, and of packages that matter on a GPU ("": not here)."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        found |= {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()),
            "capability": list(torch.cuda.get_device_capability()),
            "properties": str(torch.cuda.get_device_properties(0)),
        }
    for name in PACKAGES:
        here = importlib.util.find_spec(name) is not None
        found[name] = getattr(importlib.import_module(name), "__version__", "here") if here else ""
    return found


def host(where: Where) -> dict[str, Any]:
    """The host's cores, memory, disk and tools."""
    device = torch.device(where.device, 0) if where.device == "cuda" else torch.device("cpu")
    disk, mount = os.statvfs(where.folder), mount_point(where.folder)
    return {
        "cores": machine.cores(),
        "nodes": {node: len(cores) for node, cores in numa.nodes_of().items()},
        "binding": numa.find_place(device).line,
        "available_bytes": machine.available_bytes(),
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "disk": {"mount": mount, "kind": file_system(mount), "free_bytes": disk.f_bavail * disk.f_frsize},
        "tools": {name: said_by(["which", name])["said"] for name in TOOLS},
    }


def import_cases(where: Where) -> Cases:
    """Whether fzero starts on the versions that are here, and how long that takes."""
    program = "import time; t = time.perf_counter(); import fzero, fzero.checkpoint; print(time.perf_counter() - t)"
    yield "import", lambda: must(said_by([sys.executable, "-c", program]))
    yield "doctor", lambda: must(said_by(fzero("doctor")))


# ---- small steps ----

SIZES = {"vocab_size": 1024, "max_len": 256, "d_model": 256, "n_layers": 3, "n_heads": 4, "d_ff": 512}
TINY = {"vocab_size": 64, "max_len": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}
HOST = "params=host,grads=host,opt=host"
DISK = "params=nvme,grads=nvme,opt=nvme"
# What differs from a bf16 step of a Llama with clipping and AdamW.
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"policy": "fp32"},
    "fp16": {"policy": "fp16"},
    "float8": {"policy": "bf16_float8"},
    "remat": {"remat": "full"},
    "micro-batches": {"micro_batches": 4},
    "dropout": {"dropout": 0.1},
    "average": {"ema": 0.99},
    "captured": {"capture": "auto"},
    "acts=host": {"offload": "acts=host", "remat": "full"},
    "params=host": {"offload": "params=host"},
    "grads=host": {"offload": "grads=host", "micro_batches": 4},
    "opt=host": {"offload": "opt=host"},
    "all=host": {"offload": HOST},
    "all=host, speculate": {"offload": HOST, "update": "speculate"},
    "all=host, backward": {"offload": HOST, "update": "backward", "clip": False},
    "all=nvme": {"offload": f"{DISK},acts=nvme", "remat": "full"},
}
# Of the losses' relative difference from the CPU's: other orders of sums, and products of other units.
ALLOWED = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "bf16_float8": 5e-2}


def step_cases(where: Where) -> Cases:
    """Small steps on the device beside the same ones on the CPU."""
    for name in STEPS:
        yield name, functools.partial(small_step, name, where)


def sanitizer_cases(where: Where) -> Cases:
    """The steps that copy, under PyTorch's own search for races between streams; it raises where it finds one."""
    if where.device == "cuda" and os.environ.get("TORCH_CUDA_SANITIZER") != "1":
        raise RuntimeError("set TORCH_CUDA_SANITIZER=1 before Python starts, as gpu.py does without --only")
    for name in ("plain", *(name for name in STEPS if "=" in name)):
        yield name, functools.partial(small_step, name, where, timed=False)


def trained(options: dict[str, Any], device: str, tiny: bool, folder: str) -> Any:
    """(the step, its first state, its batch, the disk or None) of a case on a device."""
    sizes, dropout = TINY if tiny else SIZES, options.get("dropout", 0.0)
    config = (
        models.GPT2Config(**sizes, dropout=dropout)
        if dropout
        else models.LlamaConfig(**sizes, n_kv_heads=sizes["n_heads"])
    )
    model, offload = models.build(config), options.get("offload", "")
    policy = precision.POLICIES[options.get("policy", "bf16")]()
    plan = fz.zero_plan(0, model, fz.one_process(), policy=policy, offload=offload)
    tx = optim.adamw(1e-3, weight_decay=0.1)
    tx = optim.chain(optim.clip_by_global_norm(1.0), tx) if options.get("clip", True) else tx
    tx = optim.with_average(tx, options["ema"]) if "ema" in options else tx
    nvme = fz.Nvme(folder) if "nvme" in offload else None
    state = fz.init_state(model, tx, plan, seed=0, device=device, nvme=nvme)
    update, on_gpu = options.get("update", "end"), device == "cuda"
    execution = fz.Execution(
        remat=options.get("remat", "none"),
        compiled=on_gpu and not tiny,
        kernels="auto" if on_gpu else "reference",
        capture=options.get("capture", "off"),
    )
    step = fz.make_train_step(
        model,
        tx,
        plan,
        micro_batches=options.get("micro_batches", 1),
        update=update,
        nvme=nvme,
        skip=Skip(nonfinite=update != "backward"),
        execution=execution,
    )
    tokens = torch.randint(sizes["vocab_size"], (8, sizes["max_len"] + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return step, state, {name: x.to(device) for name, x in batch.items()}, nvme


def small_step(name: str, where: Where, timed: bool = True) -> dict[str, Any]:
    """A case's losses on the device and on the CPU; milliseconds to issue a step and until it is done; PyTorch's own
    list of waits in one; bytes allocated at most and reserved. Raises RuntimeError where the losses differ."""
    options, steps, row = STEPS[name], 3, {}
    losses: dict[str, list[float]] = {}
    for device in dict.fromkeys(("cpu", where.device)):
        with tempfile.TemporaryDirectory(dir=where.folder) as folder:
            before = allocated(where.device)
            forget_peak(where.device)
            step, state, batch, nvme = trained(options, device, where.tiny, folder)
            out = []
            for _ in range(steps):
                state, metrics = step(state, batch)
                out.append(metrics.loss)
            losses[device] = [float(x) for x in out]
            if device == where.device and timed:
                row = {"peak_bytes": peak_since(device, before)}
                issued, taken = [], []
                for _ in range(3 if where.tiny else 10):
                    synchronize(device)
                    begin = time.perf_counter()
                    state, metrics = step(state, batch)
                    issued.append(time.perf_counter() - begin)
                    synchronize(device)
                    taken.append(time.perf_counter() - begin)
                row |= {"issued_ms": spread(issued), "taken_ms": spread(taken)}
                row["waits"] = waits_of(lambda step=step, state=state, batch=batch: step(state, batch), device)
                if device == "cuda":
                    row["reserved_bytes"] = torch.cuda.memory_reserved()
            if nvme is not None:
                nvme.close()
            del step, state, batch, metrics
    ours, theirs = losses[where.device], losses["cpu"]
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    row |= {"losses": ours, "losses on the CPU": theirs, "largest relative difference": worst}
    if not worst <= ALLOWED[options.get("policy", "bf16")]:
        raise RuntimeError(f"losses {ours} differ from the CPU's {theirs} by {worst:.1e}")
    if timed:
        issued, taken = (row[f"{what}_ms"]["median"] for what in ("issued", "taken"))
        print(f"  {name:20} issued {issued:8.2f} ms, taken {taken:8.2f} ms, waits {row['waits']}", flush=True)
    return row


def waits_of(run: Any, device: str) -> dict[str, int]:
    """Where a call waits for the GPU, by PyTorch's own count: {"file:line": times}; {} on a CPU."""
    if device != "cuda":
        run()
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found: dict[str, int] = {}
    for one in said:
        if "synchroniz" in str(one.message):
            place = f"{os.path.relpath(one.filename, ROOT)}:{one.lineno}"
            found[place] = found.get(place, 0) + 1
    return found


# ---- ranks that share one GPU ----


def rank_cases(where: Where) -> Cases:
    """Ranks that share one GPU, over gloo, beside one process."""
    for size in (2,) if where.tiny else (2, 4):
        yield f"{size} ranks", functools.partial(ranks_of_one_gpu, "dp", size, where)
    yield "2 stages", functools.partial(ranks_of_one_gpu, "pp", 2, where)


KINDS: dict[str, dict[str, dict[str, Any]]] = {  # of plans, by the axis of the ranks
    "dp": {"stage 0": {"stage": 0}, "stage 3": {"stage": 3}},
    "pp": {
        "1f1b": {"stage": 0},
        "interleaved": {"stage": 3, "pipeline": fz.Pipeline("interleaved", chunks=2)},
        "in the host's memory": {"stage": 3, "offload": f"{HOST},acts=host"},
    },
}


def losses_of(mesh: Any, device: str, tiny: bool, stage: int, **options: Any) -> list[float]:
    """The losses of some float32 steps by a plan with these options, of this rank's rows of one batch."""
    sizes = {**(TINY if tiny else SIZES), "n_layers": 4}
    model = models.build(models.LlamaConfig(**sizes, n_kv_heads=sizes["n_heads"]))
    plan = fz.zero_plan(stage, model, mesh, policy=precision.fp32(), **options)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    state, out = fz.init_state(model, tx, plan, seed=0, device=device), []
    execution = fz.Execution(compiled=False, remat="full" if options.get("offload") else "none")
    step = fz.make_train_step(model, tx, plan, micro_batches=4 // mesh.data_size, execution=execution)
    tokens = torch.randint(sizes["vocab_size"], (4, sizes["max_len"] + 1), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(mesh.data_size)[mesh.data_rank].to(device)
    for _ in range(3):
        state, metrics = step(state, {"tokens": own[:, :-1].contiguous(), "targets": own[:, 1:].contiguous()})
        out.append(metrics.loss)
    return [float(x) for x in out]


def one_rank(rank: int, axis: str, size: int, port: int, device: str, tiny: bool, results: Any) -> None:
    """A rank of an axis: puts its losses by kind of plan on the queue."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.update(address | {"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = fz.make_mesh({axis: size}, device="cpu", timeout_s=120.0)  # gloo, also for tensors of the GPU
    results.put((rank, {kind: losses_of(mesh, device, tiny, **options) for kind, options in KINDS[axis].items()}))
    mesh.close()


def ranks_of_one_gpu(axis: str, size: int, where: Where) -> dict[str, Any]:
    """Losses of ranks that share a GPU, of whose tensors gloo sends copies, beside those of one process."""
    alone = losses_of(fz.one_process(), where.device, where.tiny, stage=0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    given = (axis, size, port, where.device, where.tiny, results)
    torch.multiprocessing.spawn(one_rank, given, nprocs=size)
    found = dict(results.get() for _ in range(size))
    worst = max(
        abs(a - b) / b for by_kind in found.values() for losses in by_kind.values() for a, b in zip(losses, alone)
    )
    if not worst <= 1e-4:
        raise RuntimeError(f"losses of {axis}={size} {found} differ from those of one {alone} by {worst:.1e}")
    print(f"  {axis}={size} on one GPU: losses as of one process within {worst:.1e}", flush=True)
    return {"losses of one process": alone, "losses of rank 0": found[0], "largest relative difference": worst}
