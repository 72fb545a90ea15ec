"""The dtypes, the schedule and the optimizer of a config, and the members of a run: replicas over rp that train apart
and agree once in H steps.

See train/local_steps.py. A member's plan is that of `mesh.member()`; batches, evaluations, checkpoints and rows of
metrics are of all members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import optim
from fzero.comm.collectives import psum
from fzero.comm.ledger import sent_elements
from fzero.core.precision import POLICIES, Policy, fp16
from fzero.kernels.registry import AUTO, Kernels
from fzero.optim import GradientTransformation, Schedule, decay_matrices
from fzero.run.config.run_config import LocalSteps, Optim, RunConfig
from fzero.run.config.unused_keys import OUTER, first_local
from fzero.sharding import Mesh, Plan
from fzero.sharding.codec import Local
from fzero.sharding.slices import STACKED
from fzero.train.local_steps import (
    average_members,
    init_local,
    local_specs,
    make_local_step,
    restart_member,
    synchronize,
)
from fzero.train.state import Metrics, TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class Members(NamedTuple):
    """How the members of a run agree."""

    local: Local
    outer: GradientTransformation
    mesh: Mesh  # of all members

    def first_state(self, state: TrainState, plan: Plan) -> TrainState:
        """The state of a member before its first step."""
        return init_local(state, plan, self.outer)

    def specs(self, specs: TrainState, plan: Plan) -> TrainState:
        """The specs of such a state."""
        return local_specs(specs, plan, self.outer)

    def step(self, step: Step, plan: Plan) -> MemberStep:
        """The step of a member, from that of its plan."""
        return MemberStep(step, plan, self)

    def agree(self, state: TrainState, plan: Plan) -> TrainState:
        """The state once all members agree on all of it, to be saved."""
        return synchronize(plan, self.mesh.rp, state, self.local)

    def average(self, state: TrainState, plan: Plan) -> TrainState:
        """The state after members took their mean."""
        return average_members(plan, state, self.mesh.rp)

    def restart(self, state: TrainState, plan: Plan) -> TrainState:
        """The state after the outer optimizer's update."""
        return restart_member(plan, self.outer, self.mesh.rp, state, self.local.codec)

    def text(self, plan: Plan) -> str:
        """What members send, in words."""
        local, ranks = self.local, self.mesh.rp.size
        itemsize = (plan.policy.state if plan.policy.has_master else plan.policy.param).itemsize
        size = sum(leaf.numel(leaf.opt) for leaf in plan.trained_leaves.values()) * itemsize
        coded = f" without the codes {local.codec}" if local.codec else ""
        sent = f"{sent_elements('psum', size, ranks):,} bytes over rp"
        first = f"; in each of the first {local.after} steps they take their mean, {sent}" if local.after else ""
        return (
            f"local steps: {ranks} members over rp agree once in {local.every} steps; a rank sends {sent} in "
            f"these{coded}, and a few numbers a step{first}"
        )


class MemberStep:
    """A member's train step `(state, batch) -> (state, Metrics)`, with the metrics of all members."""

    def __init__(self, step: Step, plan: Plan, members: Members) -> None:
        self.members = members
        self.inner_step = step  # without the other members, as plans trace it
        self.local = make_local_step(step, plan, members.outer, members.mesh.rp, members.local)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = self.local(state, batch)
        return state, join(metrics, self.members.mesh)


@torch.no_grad()
def join(metrics: Metrics, mesh: Mesh) -> Metrics:
    """The metrics of a step of all members: the mean loss over their tokens, the root mean square of the norms of their
    gradients, and whether any was skipped; the same on all ranks.

    Communicates: a psum of a few numbers over rp.
    """
    device, local_tokens = metrics.loss.device, metrics.num_tokens.to(torch.float64)
    spike = metrics.spike if isinstance(metrics.spike, Tensor) else torch.zeros((), dtype=torch.bool, device=device)
    weighed = [
        metrics.loss.to(torch.float64) * local_tokens,
        *(x.to(torch.float64) * local_tokens for x in metrics.extra.values()),
    ]
    flags, norm = [metrics.skipped, spike], metrics.grad_norm.to(torch.float64).square()
    row = torch.stack([local_tokens, norm, *(flag.to(torch.float64) for flag in flags), *weighed])
    with mesh.ledger.phase("metrics"):
        total = psum(row, mesh.rp, leaf="members")
    tokens, norms, skipped, spiked, loss, *extra = total.unbind(0)
    divisor = torch.where(tokens == 0, 1, tokens)
    return metrics._replace(
        loss=(loss / divisor).to(metrics.loss.dtype),
        num_tokens=tokens.to(metrics.num_tokens.dtype),
        grad_norm=(norms / mesh.rp.size).sqrt().to(metrics.grad_norm.dtype),
        skipped=skipped > 0,
        spike=spiked > 0 if isinstance(metrics.spike, Tensor) else (),
        extra={name: (value / divisor).to(metrics.extra[name].dtype) for name, value in zip(metrics.extra, extra)},
    )


def members_of(config: LocalSteps, mesh: Mesh) -> Members:
    """How the members of a run with a method agree."""
    lr, momentum = OUTER[config.method]
    lr = lr if config.lr is None else config.lr
    momentum = momentum if config.momentum is None else config.momentum
    outer = optim.sgd(lr, momentum, nesterov=config.method == "diloco" and momentum > 0)
    local = Local(config.every, config.codec, config.after)
    return Members(local, outer, mesh)


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
