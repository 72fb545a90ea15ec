"""How long a small preset's own run takes here, and which of its recorded lengths ends within about three minutes."""

from __future__ import annotations

from dataclasses import replace

import torch

from fzero.run.config.config_table import SMALL_RUNS, recipe
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.flops import token_flop
from fzero.run.setup.build import Job
from fzero.run.setup.machine import peak_rate

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
