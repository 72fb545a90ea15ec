"""FLOPs of a model by the papers' formulas, and what part of a processor's peak they are.

Model FLOPs are what training on a token needs, whatever is recomputed; MFU is their share of the peak. Hardware FLOPs
are those of the operators as they ran (`core.graph_passes` counts them); HFU is their share. A multiply-add counts as
two. Attention has two conventions: "full" counts every pair of positions, "causal" half.

Ref: Chowdhery et al. 2022, "PaLM", appendix B (MFU); Korthikanti et al. 2022, "Reducing activation recomputation in
large transformer models", section 5 and appendix A (hardware FLOPs).

Attempts of a run: a line of attempts.jsonl for each start of its loop, with the facts that its figures depend on.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.core import gpu
from fzero.core.autodiff import Remat
from fzero.core.config_tables import Table
from fzero.core.files import append_line
from fzero.core.text_parsing import json_text
from fzero.models.base import OF_EXPERTS, leaf_shapes
from fzero.models.configs import head_of, without_adapters
from fzero.run.config.config_table import SMALL_RUNS, recipe, to_table
from fzero.run.config.placement import CORPUS, WHOLE
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import machine as doctor
from fzero.run.setup import run_folder
from fzero.run.setup.build import Attempt, Job, local_micro_batches, num_params
from fzero.run.setup.machine import peak_rate
from fzero.sharding.slices import is_stacked


class TokenFlop(NamedTuple):
    """FLOPs of training on one token, of model and hardware, in both conventions."""

    model: float  # 6 N + 12 L T D
    model_causal: float  # 6 N + 6 L T D
    hardware: float
    hardware_causal: float
    experts: float = 0.0  # the part of a layer's forward pass, causal, that a token's experts have


def token_flop(job: Job) -> TokenFlop:
    """Count the FLOPs of training on one token by formulas: 6 N + 12 L T D (causal: 6 L T D), and
    recomputation.

    N: parameters that are multiplied with (the head also if it is tied to the embedding, rows that are looked up
    not; of a token's experts, the top_k). D: the dims of all heads of a layer. T: seq_len.
    Of a frozen leaf 4 N count: its outputs and the gradient of its inputs.
    Hardware: of the model, and what the remat policy and tiled MLPs compute again: 2 N and 4 L T D (causal: 2 L T D) of
    the layers where remat is full or every:K, 2 N of the MLPs where they are tiled. What a partitioner chooses to
    recompute (selective:F), what kernels make again inside, and the optimizer's products are not in it; `fzero plan`
    counts operator by operator.

    Ref: Chowdhery et al. 2022, "PaLM", appendix B, which counts full; causal as in Dao 2023, "FlashAttention-2",
    section 4.1; hardware: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    c: Any = without_adapters(job.model.config)
    t, tied = job.config.train, getattr(job.model.config, "tied", False) and head_of(job.model.config) is None
    active = layers = mlps = experts = 0.0
    trained = job.plan.trained_leaves
    for name, shape in leaf_shapes(job.model).items():
        numel = math.prod(shape)
        looked_up = name == "embed/positions" or (name == "embed/tokens" and not tied)
        looked_up |= job.model.traits.foreign and name.startswith("embed/") and name not in job.model.shared
        share = c.top_k / c.n_experts if OF_EXPERTS.search(name) else 1.0
        needed = 1.0 if name in trained else 2 / 3  # a frozen weight has no gradient of its own: 4 N
        active += 0.0 if looked_up else needed * share * numel
        layers += share * numel if is_stacked(name) else 0.0
        experts += share * numel if OF_EXPERTS.search(name) else 0.0
        mlps += numel if is_stacked(name) and "/mlp/" in name else 0.0
    heads = getattr(c, "n_heads", 0)
    # Of a head's key and value, if they differ: each is multiplied with once.
    key = getattr(c, "key_dim", c.d_model // heads) if heads else 0
    width = heads * (key + getattr(c, "value_dim", key)) / 2
    attention = float(c.n_layers * job.config.data.seq_len * width)  # L T D
    model, causal = 6.0 * active + 12.0 * attention, 6.0 * active + 6.0 * attention
    chunks = 0 < getattr(c, "layer_tokens", 0) < job.config.data.seq_len  # whose products are made again, not attention
    full_remat, tiles = Remat.parse(t.remat).every > 0, 2.0 * mlps * uses_tiles(c) + 2.0 * layers * chunks
    full_again, causal_again = ((2.0 * layers + pairs * attention) * full_remat + tiles for pairs in (4.0, 2.0))
    return TokenFlop(model, causal, model + full_again, causal + causal_again, experts / max(1.0, layers + attention))


def uses_tiles(config: Any) -> bool:
    """Whether a model's MLP is computed in tiles or chunks of tokens."""
    return getattr(config, "mlp_tiles", 1) > 1 or getattr(config, "mlp_tokens", 0) > 0


def mfu(model_flop_per_token: float, tokens_per_s: float, peak_flop_per_s: float) -> float:
    """The model FLOPs utilization of all processors together: observed tokens/s over those at peak.

    >>> round(mfu(6 * 7e9, 2_000.0, 312e12), 3)
    0.269
    """
    return model_flop_per_token * tokens_per_s / peak_flop_per_s


def hfu(hardware_flop: float, step_s: float, peak_flop_per_s: float) -> float:
    """The hardware FLOPs utilization of one processor: its FLOP/s in a step over its peak."""
    return hardware_flop / step_s / peak_flop_per_s


FRACTIONS = (1.0, 0.5, 0.25)  # of a preset's steps; README has the losses of each
LONGEST_S = 165.0  # of training, besides starting and compiling
# All that is no product takes as long as this share of a step's FLOPs at the rate of float32 products, evaluations too:
# 0.25 without them on a Xeon with AMX (288 ms a step, 64 of them its products in bfloat16) and on an EPYC with AVX2.
OVERHEAD = 0.35


def fitting_steps(job: Job) -> int:
    """The steps of the longest of PARTS that ends within LONGEST_S here, or of the shortest."""
    config = job.config
    if config.preset not in SMALL_RUNS:
        return config.train.steps
    size, flop = job.mesh.size, config.train.batch * config.data.seq_len * token_flop(job).model
    products, plain = (peak_rate(dtype, size, job.device) for dtype in (job.policy.compute, torch.float32))
    step_s = flop * (1.0 / products + OVERHEAD / plain) / size
    lengths = [max(1, int(fraction * config.train.steps)) for fraction in FRACTIONS]
    return next((steps for steps in lengths if steps * step_s <= LONGEST_S), lengths[-1])


def shortened(config: RunConfig, steps: int) -> RunConfig:
    """A config for this number of steps, with the warmup of its recipe."""
    schedule = recipe(config.preset, config.model, steps=steps).optim.schedule
    optim = replace(config.optim, schedule=replace(config.optim.schedule, warmup_steps=schedule.warmup_steps))
    return replace(config, train=replace(config.train, steps=steps), optim=optim)


PLAN = "plan.json"


def begin_attempt(attempt: Attempt, first: int, flop: TokenFlop) -> int:
    """Write the line of an attempt that continues after step `first`; returns its number, from 1 on."""
    job, folder, _, coordinator, options, run_config = attempt
    config, t = job.config, job.config.train
    trained_on = run_folder.read_environment(folder)
    number = len(run_folder.read_attempts(folder)) + 1
    commit, dirty = commit_of(Path(__file__).parent)
    line = {
        "attempt": number,
        "first_step": first,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "config_sha256": hashlib.sha256((folder / run_folder.CONFIG).read_bytes()).hexdigest(),
        "commit": commit,
        "dirty": dirty,
        "processes": coordinator.size,
        "mesh": {axis.name: axis.size for axis in job.mesh.axes},
        "zero": config.zero,
        "offload": config.offload,
        "update": t.update,
        "micro_batches": local_micro_batches(config, job.mesh),
        "device": gpu.describe_device(job.device),
        "threads": torch.get_num_threads(),
        "compiled": bool(t.compiled),
        "precision": config.precision.policy,
        "fp32_matmul": doctor.fp32_matmul(),
        "num_params": num_params(job),
        "tokens_per_step": t.batch * config.data.seq_len,
        "flop_per_token": flop.model,
        "flop_per_token_causal": flop.model_causal,
        "hardware_flop_per_token": flop.hardware,
        "hardware_flop_per_token_causal": flop.hardware_causal,
        "peak_flops": options.peak_flops,
        "peak_measured": options.peak_measured,
        "versions": {"fzero": fzero.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(),
        "environment": {key: trained_on[key] for key in CORPUS if key in trained_on},
        "config": to_table(config),  # a resumed run may have another mesh, stage and offload than config.json
    }
    if run_config != config:
        line[WHOLE] = to_table(run_config)
    path = folder / run_folder.ATTEMPTS
    append_line(path, json_text(line, str(path)))
    return number


def commit_of(folder: Path) -> tuple[str, bool]:
    """(the commit of the checkout that `folder` is in, whether files were changed since); ("", False) without."""
    if not (folder.parent / ".git").exists():  # installed, perhaps below somebody else's checkout
        return "", False

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "", False


def machine() -> Table:
    """The facts of this machine that figures depend on; its name as a hash."""
    return {
        "cpu": doctor.processor(),
        "cores": doctor.cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
    }
