"""The dtypes, the schedule and the optimizer of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero import optim
from fzero.core.precision import POLICIES, Policy, fp16
from fzero.kernels.registry import AUTO, Kernels
from fzero.optim import GradientTransformation, Schedule, decay_matrices
from fzero.run.config.run_config import Optim, RunConfig
from fzero.run.config.unused_keys import first_local
from fzero.sharding.slices import STACKED

BLOCK_MATRICES = rf"{STACKED}(.*/)?w_"  # updated by muon; AdamW updates the router and all leaves outside the blocks


def make_policy(config: RunConfig) -> Policy:
    """The policy of dtypes of a config."""
    name = config.precision.policy
    return fp16(config.precision.loss_scale) if name == "fp16" else POLICIES[name]()


def make_schedule(config: Optim, peak: float, steps: int, rates: Sequence[tuple[int, int]] = ((0, 1),)) -> Schedule:
    """The learning rate of a run with this peak, as a function of the steps made before."""
    s = config.schedule
    if s.tokens:
        token_schedule = replace(s, tokens=0, warmup_tokens=0, decay_tokens=0)
        token_schedule = replace(token_schedule, warmup_steps=s.warmup_tokens, decay_steps=s.decay_tokens)
        return optim.by_tokens(make_schedule(replace(config, schedule=token_schedule), peak, s.tokens), rates)
    body_steps, end = steps - s.warmup_steps, peak * s.end
    if s.name == "one_cycle":
        return optim.one_cycle(peak, steps, s.rise)
    if s.name == "wsd":
        return optim.wsd(peak, steps, s.warmup_steps, s.decay_steps, end=end, decay=s.decay)
    warm = {"rise": s.warmup}  # of DeepSpeed's schedules
    if s.name == "warmup_lr":
        return optim.warmup_lr(peak, max(1, s.warmup_steps), start=peak * s.start, **warm)
    if s.name == "warmup_decay_lr":
        return optim.warmup_decay_lr(peak, max(1, s.warmup_steps), steps, start=peak * s.start, **warm)
    if s.name == "cycle_lr":
        return optim.cycle_lr(
            peak * s.start, peak, s.warmup_steps, s.decay_steps, decay_rate=s.decay_rate, decay_steps=s.decay_every
        )
    if s.name == "warmup_cosine_lr":
        return optim.warmup_cosine_lr(peak, max(1, s.warmup_steps), steps, start=s.start, end=s.end, **warm)
    body = {
        "constant": lambda: optim.constant(peak),
        "linear": lambda: optim.linear(peak, end, body_steps),
        "cosine": lambda: optim.cosine(peak, body_steps, end),
        "polynomial": lambda: optim.polynomial(peak, end, body_steps, s.power),
        "exponential": lambda: optim.exponential(peak, s.end, body_steps),
        "inverse_sqrt": lambda: optim.inverse_sqrt(peak, max(1, s.warmup_steps)),
    }[s.name]()
    return optim.warmup(body, s.warmup_steps)


STATES: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16": {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
    "8bit": {"state_bits": 8},
}


def make_optimizer(
    config: Optim,
    steps: int,
    rates: Sequence[tuple[int, int]] = ((0, 1),),
    *,
    kernels: Kernels = AUTO,
    seed: int = 0,
    updates: int = 1,
    scale: Tensor | None = None,
) -> GradientTransformation:
    """The optimizer of a config: clipping, then the named one with its schedule."""

    def rate(peak: float) -> Schedule:
        plain = make_schedule(config, peak, steps, rates)
        of_step = plain if scale is None else lambda count, factor=scale: plain(count) * factor
        return of_step if updates == 1 else lambda count: of_step(count // updates)

    lr, betas, s = rate(config.lr), (config.beta1, config.beta2), config.schedule
    cycled = betas
    if s.low_beta1 is not None and s.high_beta1 is not None:
        momentum = optim.cycle_momentum(s.low_beta1, s.high_beta1, s.warmup_steps, s.decay_steps)
        cycled = (momentum if updates == 1 else lambda count: momentum(count // updates), config.beta2)
    bias: dict[str, Any] = {"correction": config.correction}
    min_ratio, max_ratio = optim.RATIOS if config.name == "onebit_lamb" else (0.0, math.inf)
    ratios: dict[str, Any] = {
        "ratios": (min_ratio if config.min_ratio is None else config.min_ratio, config.max_ratio or max_ratio)
    }
    decay: dict[str, Any] = {
        "weight_decay": config.weight_decay,
        "mask": decay_matrices if config.decay == "matrices" else None,
    }
    adam_impl: dict[str, Any] = {"impl": kernels["adamw"]}
    states = {**STATES[config.states], "seed": seed}

    signs: dict[str, Any] = {**decay, "clip": config.clip}  # of those that clip what they send themselves
    # The ratios that 1-bit LAMB keeps from its warm-up must have settled.
    warm = config.freeze_steps or max(1, steps // (2 if config.name == "onebit_lamb" else 5))
    last = first_local(config, steps) if config.sum_every > 1 else config.freeze_steps or None
    sums = {"sum_every": config.sum_every, "sum_double": config.sum_double}

    def block_matrices() -> GradientTransformation:
        # In blocks every weight matrix decays, so muon itself needs no mask.
        muon = optim.muon(
            lr,
            config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            adjust=config.adjust,
            impl=kernels["newton_schulz"],
        )
        adamw = optim.adamw(rate(config.lr_rest), *betas, config.eps, **decay, **adam_impl)
        return optim.by_label({"muon": muon, "adamw": adamw}, ((BLOCK_MATRICES, "muon"), (".*", "adamw")))

    tx = {
        "adamw": lambda: optim.adamw(lr, *cycled, config.eps, **decay, **states, **bias, **adam_impl),
        "adam": lambda: optim.adam(lr, *cycled, config.eps, **decay, **states, **bias, **adam_impl),
        "lamb": lambda: optim.lamb(lr, *betas, config.eps, **decay, **bias, **ratios),
        "lion": lambda: optim.lion(lr, *betas, **decay, **states, impl=kernels["lion"]),
        "onebit_adam": lambda: optim.onebit_adam(lr, *betas, config.eps, freeze=warm, **signs, **bias),
        "onebit_lamb": lambda: optim.onebit_lamb(lr, *betas, config.eps, freeze=warm, **signs, **bias, **ratios),
        "zero_one_adam": lambda: optim.zero_one_adam(lr, *betas, config.eps, freeze=last, **sums, **signs, **bias),
        "sgd": lambda: optim.sgd(lr, config.momentum, nesterov=config.nesterov, **decay),
        "adafactor": lambda: optim.adafactor(lr, **decay),
        "muon": block_matrices,
    }[config.name]()
    return optim.chain(optim.clip_by_global_norm(config.clip), tx) if config.clip and not tx.sums.makes else tx
