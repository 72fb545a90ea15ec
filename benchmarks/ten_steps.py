"""Small steps on a device beside the CPU's, for ten.py; and those that copy under PyTorch's search for races."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
from ten_rows import NEEDS_GPU, Rows, Where, forget, memory, waits_of

import fzero as fz
from fzero import models, optim
from fzero.core import precision
from fzero.train.capture import pop_news

SIZES = {"vocab_size": 1024, "max_len": 256, "d_model": 256, "n_layers": 3, "n_heads": 4, "d_ff": 512}
TINY = {"vocab_size": 64, "max_len": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}
HOST = "params=host,grads=host,opt=host"
NVME = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
# What differs from an uncompiled bf16 step of a Llama with clipping and AdamW.
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"policy": "fp32"},
    "compiled": {"compiled": True},
    "captured": {"capture": "auto", "steps": 9},
    "float8": {"policy": "bf16_float8"},
    "acts=host": {"offload": "acts=host", "remat": "full"},
    "all=host": {"offload": f"{HOST},acts=host", "remat": "full"},
    "all=nvme": {"offload": NVME, "remat": "full"},
}
# Of the losses' relative difference from the CPU's: other orders of sums, and products of other units.
ALLOWED = {"fp32": 1e-3, "bf16": 2e-2, "bf16_float8": 5e-2}


def rows(where: Where) -> Rows:
    """Each case beside the same one on the CPU."""
    for name in STEPS:
        yield name, functools.partial(small_step, name, where)


def small_step(name: str, where: Where) -> dict[str, Any]:
    """A case's losses on the device and on the CPU, the lines at which it waits for the device, and bytes. Raises
    RuntimeError where the losses differ."""
    options = STEPS[name]
    theirs, _ = losses_of(options, "cpu", where)
    forget(where.device)
    ours, row = losses_of(options, where.device, where)
    if where.cuda and "capture" in options and not row["graphs"]:
        raise RuntimeError(f"no graph: {row}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    row |= {"losses": ours, "losses on the CPU": theirs, "worst difference": worst}
    if not worst <= ALLOWED[options.get("policy", "bf16")]:
        raise RuntimeError(f"losses {ours} differ from the CPU's {theirs} by {worst:.1e}; {row}")
    return row


def losses_of(options: dict[str, Any], device: str, where: Where) -> tuple[list[float], dict[str, Any]]:
    """(the losses of some steps of a case, what else there is to say of them on this device)."""
    sizes, on_gpu, offload = TINY if where.tiny else SIZES, device == "cuda", options.get("offload", "")
    model = models.build(models.LlamaConfig(**sizes, n_kv_heads=sizes["n_heads"]))
    policy = precision.POLICIES[options.get("policy", "bf16")]()
    plan = fz.zero_plan(0, model, fz.one_process(), policy=policy, offload=offload)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, weight_decay=0.1))
    # The CPU's side of a comparison is the plain form; on the way to nothing but the CPU, a case is what it says.
    compared = device == "cpu" and where.cuda
    execution = fz.Execution(
        remat=options.get("remat", "none"),
        compiled=options.get("compiled", False) and not compared,
        kernels="reference" if compared else "auto",
        capture=options.get("capture", "off"),
    )
    with tempfile.TemporaryDirectory(dir=where.folder) as folder:
        nvme = fz.Nvme(folder) if "nvme" in offload else None
        state = fz.init_state(model, tx, plan, seed=0, device=device, nvme=nvme)
        step: Any = fz.make_train_step(model, tx, plan, nvme=nvme, execution=execution)
        shape = (8, sizes["max_len"] + 1)
        tokens = torch.randint(sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(1)).to(device)
        batch, losses = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}, []
        for i in range(options.get("steps", 3)):
            if i == 5 and on_gpu and not getattr(step, "refused", ""):
                step.captures = True  # whatever was decided: it must be right
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        row = memory(device) | {"news": pop_news(step), "graphs": len(getattr(step, "recorded", ()))}
        holder = [state]

        def once_more() -> None:
            holder[0], _ = step(holder[0], batch)

        row["waits"] = waits_of(once_more, device)
        out = [float(x) for x in losses]
        if nvme is not None:
            nvme.close()
    return out, row


def sanitizer_rows(where: Where) -> Rows:
    """Steps that copy, under TORCH_CUDA_SANITIZER=1, which knows nothing of what happens inside compiled blocks."""
    for name in ("acts=host", "all=host"):
        yield name, functools.partial(races, name, where)


def races(name: str, where: Where) -> dict[str, Any]:
    """What the sanitizer found in some steps: the two operators of each race, and the line of fzero."""
    if where.cuda and os.environ.get("TORCH_CUDA_SANITIZER") != "1":
        raise RuntimeError("set TORCH_CUDA_SANITIZER=1 before Python starts, as ten.py does")
    try:
        losses, _ = losses_of(STEPS[name], where.device, where)
    except Exception as error:
        found = getattr(error, "errors", None)
        if found is None:
            raise
        raise RuntimeError(f"{len(found)} races; {described(found[0])}") from error
    return {"races": 0, "losses": losses} if where.cuda else {"losses": losses} | NEEDS_GPU


def described(race: Any) -> str:
    """A race in one line."""
    text = []
    for access in (race.current_access, race.previous_access):
        lines = [
            f"{f.filename.rpartition('/fzero/')[2]}:{f.lineno}" for f in access.stack_trace if "/fzero/" in f.filename
        ]
        text.append(f"{access.type} by stream {access.stream} in {access.operator.partition('(')[0]} at {lines[-1:]}")
    return "; before it ".join(text)
