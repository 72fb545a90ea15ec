"""Local steps: the members of a run, its replicas over rp, train apart and agree once in H steps.

    x_0: what all members have.  Each makes H steps on data of its own, to x_i.
    d = x_0 - mean over i of x_i;   x_0 becomes x_0 - outer optimizer's update for d, and each member begins there again

| method | outer optimizer |
|---|---|
| LocalSGD | sgd(1.0) |
| SlowMo | sgd(alpha, momentum=beta) |
| DiLoCo | sgd(0.7, momentum=0.9, nesterov=True) |

A member is a whole run on `mesh.member()`, with an optimizer state of its own; it sends d, once in H steps. With
`after` (post-local) x_0 and all x_i become the mean of the x_i after each of the first steps, and the outer optimizer
begins behind them.

Refs: Stich 2019, "Local SGD converges fast and communicates little", arXiv:1805.09767; Wang et al. 2020, "SlowMo",
arXiv:1910.00643, algorithm 1; Douillard et al. 2023, "DiLoCo", arXiv:2311.08105, algorithm 1; Lin et al. 2020, "Don't
use large mini-batches, use local SGD", arXiv:1808.07217, section 3 (post-local).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import start_psum
from fzero.comm.communicator import Axis
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.optim import GradientTransformation, apply_updates
from fzero.sharding import Plan
from fzero.sharding.codec import Coder, Local, sum_coded
from fzero.train.codes import coder_of
from fzero.train.state import Metrics, TrainState
from fzero.train.update.in_memory import spread, updated_params

# The names of what members agreed on last in `TrainState.extra`, and in checkpoints.
OUTER, WHOLE = "outer", "0"
Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class Outer(NamedTuple):
    """What the members agreed on last."""

    params: Tree  # {leaf: x_0}, in the layout and dtype of the update
    opt_state: Tree  # of the outer optimizer


def init_local(state: TrainState, plan: Plan, outer: GradientTransformation) -> TrainState:
    """The state of a member with `extra["outer"]`: {"0": Outer}. All members give the same state.

    >>> import fzero
    >>> params, plan = {"w": torch.ones(2)}, fzero.zero_plan(0, {"w": torch.ones(2)}, fzero.one_process())
    >>> state = fzero.init_state(params, fzero.optim.adamw(), plan, seed=0)
    >>> init_local(state, plan, fzero.optim.sgd(0.7, 0.9)).extra["outer"]["0"].params
    {'w': tensor([1., 1.])}
    """
    expect_local(plan)
    x = pytree.map(lambda leaf: leaf.detach().clone(), updated(plan, state))
    return with_agreed(state, Outer(x, outer.init(x)))


def local_specs(specs: TrainState, plan: Plan, outer: GradientTransformation) -> TrainState:
    """The specs of such a state from `state_specs` of the member's plan."""
    leaf_specs = {name: replace(leaf.opt, partial=frozenset()) for name, leaf in plan.trained_leaves.items()}
    return with_agreed(specs, Outer(leaf_specs, outer.spec(leaf_specs)))


def agreed(state: TrainState) -> Outer:
    """What the members agreed on last, of a state."""
    return state.extra[OUTER][WHOLE]


def with_agreed(state: TrainState, outer: Outer) -> TrainState:
    """A state with what the members agreed on last."""
    return state._replace(extra={**state.extra, OUTER: {WHOLE: outer}})


def expect_local(plan: Plan) -> None:
    """Raise ValueError for a plan whose members cannot agree in this way."""
    if plan.mesh.rp.size > 1:
        raise ValueError(
            f"local steps: the plan sums gradients over rp={plan.mesh.rp.size}; make it, its state and its step with "
            "mesh.member(), the mesh of one member"
        )
    if plan.codec is not None and plan.codec.feedback:
        raise ValueError(
            f"local steps: codec {plan.codec} keeps errors that are of one member, and members agree on all of a "
            "state; leave loco or 1bit out"
        )
    for name, leaf in plan.leaves.items():
        if leaf.opt.memory.on_disk or leaf.params.memory.on_disk:
            raise ValueError(f"local steps: {name} rests on a disk; members agree on what is in memory: use host")


def updated(plan: Plan, state: TrainState) -> dict[str, Tensor]:
    """The parameters that this rank updates, from the master weights if there are any: views."""
    return pytree.named_leaves(updated_params(plan, state))


def make_local_step(step: Step, plan: Plan, outer: GradientTransformation, members: Axis, local: Local) -> Step:
    """The function `(state, batch) -> (state, Metrics)` of a member's step, after which members agree where it is due.

    step, plan: of the member, by make_train_step on `mesh.member()`, with donate=True. outer: an elementwise
    transformation, such as optim.sgd(0.7, momentum=0.9, nesterov=True). members: `mesh["rp"]`. The state is one of
    `init_local`; metrics are of the member.
    Communicates over rp: d once in H steps, 2 (R-1)/R of what this rank updates; in codes half, an eighth of it. In
    each of the first `after` steps d without codes.
    Raises ValueError for a plan on a mesh with rp, and for a disk.

    >>> import fzero
    >>> params, mesh, tx = {"w": torch.ones(2)}, fzero.one_process(), fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, mesh.member())
    >>> inner = fzero.make_train_step(lambda p, batch: (p["w"] * batch["x"]).sum(), tx, plan)
    >>> local, outer = Local(every=2), fzero.optim.sgd(1.0)
    >>> state = init_local(fzero.init_state(params, tx, plan, seed=0), plan, outer)
    >>> train_step = make_local_step(inner, plan, outer, mesh["rp"], local)
    >>> state, metrics = train_step(state, {"x": torch.ones(1, 2)})
    >>> state.params["w"], state.extra["outer"]["0"].params["w"]
    (tensor([0.9000, 0.9000]), tensor([1., 1.]))
    """
    expect_local(plan)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch)
        done = int(state.step)
        if local.takes_mean(done):
            state = average_members(plan, state, members)
        elif local.due(done):
            state = restart_member(plan, outer, members, state, local.codec)
        return state, metrics

    return train_step


def difference(plan: Plan, state: TrainState, members: Axis, codec: str) -> dict[str, Tensor]:
    """{leaf: d}, the mean of x_0 - x_i over the members."""
    x = agreed(state).params
    gone = {name: (x[name] - leaf.to(x[name].dtype)) / members.size for name, leaf in updated(plan, state).items()}
    if members.size == 1:
        return gone
    with plan.mesh.ledger.phase("outer"):
        if not codec:
            sums = {name: start_psum(leaf.contiguous(), members, leaf=name) for name, leaf in gone.items()}
            return {name: pending.wait() for name, pending in sums.items()}
        coder = coder_of(codec, 128, Kernels())
        jobs = {name: coded(name, leaf, members, coder, plan) for name, leaf in gone.items()}
        for _ in range(2):  # its rounds
            for job in jobs.values():
                next(job)
        return {name: ended(job).to(gone[name].dtype).view(gone[name].shape) for name, job in jobs.items()}


def coded(name: str, leaf: Tensor, members: Axis, coder: Coder, plan: Plan) -> Iterator[Any]:
    """The sum of one leaf in codes, see `sum_coded`."""
    (total,) = yield from sum_coded("psum", [name], [leaf], members, coder, leaf.dtype, plan.mesh.ledger)
    return total


def ended(job: Iterator[Any]) -> Tensor:
    """The result of a job that has begun."""
    while True:
        try:
            next(job)
        except StopIteration as done:
            return done.value


@torch.no_grad()
def restart_member(
    plan: Plan, outer: GradientTransformation, members: Axis, state: TrainState, codec: str
) -> TrainState:
    """The state after the outer optimizer's update, in its buffers: there the member begins again."""
    d, x_0 = difference(plan, state, members, codec), agreed(state)
    updates, opt_state = outer.update(d, x_0.opt_state, x_0.params)
    x = apply_updates(x_0.params, updates)
    write_fragments(plan, state, x)
    return with_agreed(state, Outer(x, opt_state))


def write_fragments(plan: Plan, state: TrainState, x: dict[str, Tensor]) -> None:
    """Write {leaf: x} into the buffers of the state."""
    if plan.policy.has_master:
        for name, leaf in pytree.named_leaves(state.master).items():
            leaf.copy_(x[name])
    with plan.mesh.ledger.phase("outer"):
        spread(plan, pytree.from_named(x, plan.trained(plan.like)), state.params)


def write_mean(plan: Plan, state: TrainState, members: Axis, codec: str) -> dict[str, Tensor]:
    """Write the mean of the members' parameters into the state; return it."""
    d = difference(plan, state, members, codec)
    mean = {name: x - d[name] for name, x in agreed(state).params.items()}
    write_fragments(plan, state, mean)
    return mean


@torch.no_grad()
def average_members(plan: Plan, state: TrainState, members: Axis) -> TrainState:
    """A member's state after one of the first `after` steps: parameters and x_0 are the members' mean."""
    # The states of the outer optimizer, and of the member's own, stay as they are.
    return with_agreed(state, Outer(write_mean(plan, state, members, ""), agreed(state).opt_state))


@torch.no_grad()
def synchronize(plan: Plan, members: Axis, state: TrainState, local: Local) -> Any:
    """The state with the mean of the members' parameters and optimizer states: the same on all members, so that it can
    be saved, and a run goes on from it with the same bits on as many members, or on others.

    The outer optimizer makes no update: between two times members have the mean x_0 - d, and x_0 stays, so that its
    next update is of H steps. Another one would apply the momentum twice. Communicates over rp: d, but after a step
    that ended so, and the floating-point leaves of opt_state.
    """
    done = int(state.step)
    if not local.takes_mean(done) and not local.due(done):
        write_mean(plan, state, members, local.codec)

    def mean(name: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or members.size == 1:
            return leaf
        with plan.mesh.ledger.phase("outer"):
            return leaf.copy_(start_psum((leaf / members.size).contiguous(), members, leaf=name).wait())

    return state._replace(opt_state=pytree.map_named(mean, state.opt_state))
