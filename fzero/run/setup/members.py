"""Local steps of a run: its members, the replicas over rp, train apart and agree once in H steps.

See train/local_steps.py. A member's plan is that of `mesh.member()`; batches, evaluations, checkpoints and rows of
metrics are of all members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import optim
from fzero.comm.collectives import psum
from fzero.comm.ledger import sent_elements
from fzero.optim import GradientTransformation
from fzero.run.config.run_config import LocalSteps
from fzero.run.config.unused_keys import OUTER
from fzero.sharding import Mesh, Plan
from fzero.sharding.codec import Local
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
