"""How long a small preset's own run takes here, and which of its recorded lengths ends within about three minutes."""

from __future__ import annotations

from dataclasses import replace

from fzero.run.build import Job
from fzero.run.config import RunConfig
from fzero.run.machine import peak_rate
from fzero.run.measure.flops import token_flop
from fzero.run.recipes import SMALL_RUNS, recipe

PARTS = (1.0, 0.5, 0.25)  # of a preset's steps; README has the losses of each
LONGEST_S = 165.0  # of training, besides starting and compiling
REACHED = 0.35  # of the measured rate of products, by a whole run with its evaluations


def fitting_steps(job: Job) -> int:
    """The steps of the longest of PARTS that ends within LONGEST_S here, or of the shortest; the config's own steps if
    its preset is not small."""
    config = job.config
    if config.preset not in SMALL_RUNS:
        return config.train.steps
    rate = REACHED * job.mesh.size * peak_rate(job.policy.compute, job.mesh.size, job.device)
    step_s = config.train.batch * config.data.seq_len * token_flop(job).model / rate
    lengths = [max(1, int(part * config.train.steps)) for part in PARTS]
    return next((steps for steps in lengths if steps * step_s <= LONGEST_S), lengths[-1])


def shortened(config: RunConfig, steps: int) -> RunConfig:
    """A config for so many steps, with the warmup of its recipe."""
    schedule = recipe(config.preset, config.model, steps=steps).optim.schedule
    optim = replace(config.optim, schedule=replace(config.optim.schedule, warmup_steps=schedule.warmup_steps))
    return replace(config, train=replace(config.train, steps=steps), optim=optim)
