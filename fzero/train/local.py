"""Local steps: the members of a run, its replicas over rp, train apart and agree once in H steps.

    x_0: what all members have.  Each makes H steps on data of its own, to x_i.
    d = x_0 - mean over i of x_i;   x_0 becomes x_0 - outer optimizer's update for d, and each member begins there again

| method | outer optimizer |
|---|---|
| LocalSGD | sgd(1.0) |
| SlowMo | sgd(alpha, momentum=beta) |
| DiLoCo | sgd(0.7, momentum=0.9, nesterov=True) |

A member is a whole run on `mesh.member()`: its plan sums nothing over rp. What members send is d, once in H steps. The
optimizer of each member keeps its own state. With `fragments` the layers agree in turn, a part of them at a time
(Streaming DiLoCo), and with `overlap` what is sent has so many steps to arrive. With `after` (post-local) members train
apart only after so many steps of the run: after each of these x_0 and all x_i become the mean of the x_i, and the outer
optimizer, which begins behind them, makes no update.

Refs: Stich 2019, "Local SGD converges fast and communicates little", arXiv:1805.09767; Wang et al. 2020, "SlowMo",
arXiv:1910.00643, algorithm 1; Douillard et al. 2023, "DiLoCo", arXiv:2311.08105, algorithm 1; Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication", arXiv:2501.18512, section 2; Lin et al. 2020, "Don't use large
mini-batches, use local SGD", arXiv:1808.07217, section 3 (post-local).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, start_psum
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.optim import GradientTransformation, apply_updates
from fzero.sharding import Plan, Spec
from fzero.sharding.codec import KINDS, Coder
from fzero.sharding.coded_sums import sum_coded
from fzero.sharding.slices import is_stacked
from fzero.train.codes import coder_of
from fzero.train.state import TrainState
from fzero.train.step import Metrics
from fzero.train.update.in_memory import own, spread

OUTER = "outer"  # the name of what members agreed on last in `TrainState.extra`
Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class Local:
    """How members agree.

    every: H, the steps of a member between two times. codec: the kind of code in which d is sent, "int8", "int4" or
    "fp8_e4m3"; "": as it is. fragments: the parts, of every so many-th layer, that agree one after the other within H
    steps. overlap: the steps between sending d and using it. mix: the weight of what the member itself has when it
    begins again, 0 to 1; with an overlap its last steps would be lost with 0. after: the first steps of the run, after
    each of which members take their mean, all of it and without codes; a multiple of `every`.

    >>> local = Local(every=4, fragments=2)
    >>> [local.due(step) for step in range(1, 9)]
    [None, 0, None, 1, None, 0, None, 1]
    >>> [Local(every=4, fragments=2, after=4).due(step) for step in range(1, 9)]
    [None, None, None, None, None, 0, None, 1]
    """

    every: int = 20
    codec: str = ""
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0
    after: int = 0

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"local: every is {self.every!r}; it is the steps between two times, at least 1")
        if self.codec and self.codec not in KINDS:
            raise ValueError(f"local: codec is {self.codec!r}; it must be one of {', '.join(KINDS)}")
        if type(self.fragments) is not int or not 1 <= self.fragments <= self.every:
            raise ValueError(f"local: fragments is {self.fragments!r}; it must be in [1, every = {self.every}]")
        if type(self.overlap) is not int or not 0 <= self.overlap < self.every:
            raise ValueError(f"local: overlap is {self.overlap!r}; it must be in [0, every = {self.every})")
        if not 0.0 <= self.mix < 1.0:
            raise ValueError(f"local: mix is {self.mix!r}; it must be in [0, 1)")
        if type(self.after) is not int or self.after < 0 or self.after % self.every:
            raise ValueError(f"local: after is {self.after!r}; it must be 0 or a multiple of every = {self.every}")

    def together(self, step: int) -> bool:
        """Whether members take their mean after so many steps, and not yet train apart."""
        return step <= self.after

    def due(self, step: int) -> int | None:
        """The fragment whose d is sent after so many steps; None for none."""
        if self.together(step):
            return None
        for fragment in range(self.fragments):
            if step % self.every == (fragment + 1) * self.every // self.fragments % self.every:
                return fragment
        return None


class Outer(NamedTuple):
    """What the members agreed on last, of one fragment."""

    params: Tree  # {leaf: x_0}, in the layout and dtype of the update
    opt_state: Tree  # of the outer optimizer


def init_local(state: TrainState, plan: Plan, outer: GradientTransformation, local: Local) -> TrainState:
    """The state of a member with `extra["outer"]`: {number of a fragment: Outer}. All members give the same state.

    >>> import fzero
    >>> params, plan = {"w": torch.ones(2)}, fzero.zero_plan(0, {"w": torch.ones(2)}, fzero.one_process())
    >>> state = fzero.init_state(params, fzero.optim.adamw(), plan, seed=0)
    >>> init_local(state, plan, fzero.optim.sgd(0.7, 0.9), Local()).extra["outer"]["0"].params
    {'w': tensor([1., 1.])}
    """
    expect_local(plan, local)
    at = {}
    for i in range(local.fragments):
        x = {name: leaf.detach().clone() for name, leaf in fragment_of(plan, state, i, local).items()}
        at[str(i)] = Outer(x, outer.init(x))
    return state._replace(extra={**state.extra, OUTER: at})


def local_specs(specs: TrainState, plan: Plan, outer: GradientTransformation, local: Local) -> TrainState:
    """The specs of such a state from `state_specs` of the member's plan."""
    at = {}
    for i in range(local.fragments):
        of = {name: leaf.opt for name, leaf in plan.leaves.items() if leaf.trained and layers_of(name, plan, i, local)}
        of = {name: Spec(spec.dims, memory=spec.memory, rows=spec.rows, parts=spec.parts) for name, spec in of.items()}
        at[str(i)] = Outer(of, outer.spec(of))
    return specs._replace(extra={**specs.extra, OUTER: at})


def expect_local(plan: Plan, local: Local) -> None:
    """Raise ValueError for a plan whose members cannot agree in this way."""
    if plan.sizes["rp"] > 1:
        raise ValueError(
            f"local steps: the plan sums gradients over rp={plan.sizes['rp']}; make it, its state and its step with "
            "mesh.member(), the mesh of one member"
        )
    if plan.codec is not None and plan.codec.feedback:
        raise ValueError(
            f"local steps: codec {plan.codec} keeps errors that are of one member, and members agree on all of a "
            "state; leave loco or 1bit out"
        )
    if plan.stages is not None and local.fragments > 1:
        raise ValueError(
            f"local steps: fragments is {local.fragments}, of the layers of a rank, and pp={plan.sizes['pp']} gives "
            "each rank other ones; use fragments=1"
        )
    for name, leaf in plan.leaves.items():
        if leaf.opt.memory == "nvme" or leaf.params.memory == "nvme":
            raise ValueError(f"local steps: {name} rests on a disk; members agree on what is in memory: use host")


def layers_of(name: str, plan: Plan, fragment: int, local: Local) -> slice | None:
    """The layers of a leaf that belong to a fragment, `slice(None)` for a leaf that is not stacked; None if none do.

    Layer l of a stack belongs to fragment l mod P, and of the other leaves one after the other to each.
    """
    if is_stacked(name):
        layers = slice(fragment, None, local.fragments)
        return layers if local.fragments == 1 or fragment < plan.leaves[name].shape[0] else None
    others = [other for other in plan.leaves if not is_stacked(other)]
    return slice(None) if others.index(name) % local.fragments == fragment else None


def fragment_of(plan: Plan, state: TrainState, fragment: int, local: Local) -> dict[str, Tensor]:
    """The part of the parameters that this rank updates of a fragment, from the master weights if there are any:
    views."""
    held = pytree.named_leaves(state.master if plan.policy.has_master else own(plan, state.params))
    at = {name: layers_of(name, plan, fragment, local) for name in held}
    return {name: leaf[at[name]] for name, leaf in held.items() if at[name] is not None}


class Sent(NamedTuple):
    """A fragment's d on its way."""

    fragment: int
    step: int  # after which it is used
    finish: Callable[[], dict[str, Tensor]]


def make_local_step(
    step: Step, plan: Plan, outer: GradientTransformation, members: Axis, local: Local = Local()
) -> Step:
    """The function `(state, batch) -> (state, Metrics)` of a member's step, after which a fragment agrees where one is
    due.

    step, plan: of the member, by make_train_step on `mesh.member()`, with donate=True. outer: an elementwise
    transformation, such as optim.sgd(0.7, momentum=0.9, nesterov=True). members: `mesh["rp"]`. The state is one of
    `init_local`; metrics are of the member. `flying` of the function is what is under way, `finish(state)` uses it.
    Communicates over rp: d once in H steps, 2 (R-1)/R of what this rank updates; in codes half, an eighth of it. In
    each of the first `after` steps d without codes.
    Raises ValueError for a plan on a mesh with rp, and for a disk.

    >>> import fzero
    >>> params, mesh, tx = {"w": torch.ones(2)}, fzero.one_process(), fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, mesh.member())
    >>> inner = fzero.make_train_step(lambda p, batch: (p["w"] * batch["x"]).sum(), tx, plan)
    >>> local, outer = Local(every=2), fzero.optim.sgd(1.0)
    >>> state = init_local(fzero.init_state(params, tx, plan, seed=0), plan, outer, local)
    >>> train_step = make_local_step(inner, plan, outer, mesh["rp"], local)
    >>> state, metrics = train_step(state, {"x": torch.ones(1, 2)})
    >>> state.params["w"], state.extra["outer"]["0"].params["w"]
    (tensor([0.9000, 0.9000]), tensor([1., 1.]))
    """
    expect_local(plan, local)
    coder = coder_of(local.codec, 128, Kernels()) if local.codec else None
    flying: list[Sent] = []

    def use(state: TrainState, until: int) -> TrainState:
        while flying and flying[0].step <= until:
            sent = flying.pop(0)
            state = begin_again(plan, outer, local, state, sent.fragment, sent.finish())
        return state

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch)
        done = int(state.step)
        if local.together(done):
            return meet(plan, state, members, local), metrics
        if (fragment := local.due(done)) is not None:
            with torch.no_grad(), plan.mesh.ledger.phase("outer"):
                finish = send(plan, state, fragment, members, local, coder)
            flying.append(Sent(fragment, done + local.overlap, finish))
        return use(state, done), metrics

    def finish(state: TrainState) -> TrainState:
        return use(state, flying[-1].step) if flying else state

    train_step.finish, train_step.flying = finish, flying
    return train_step


def send(
    plan: Plan, state: TrainState, fragment: int, members: Axis, local: Local, coder: Coder | None
) -> Callable[[], dict[str, Tensor]]:
    """Start to sum a fragment's x_0 - x_i over the members; the result waits, and gives {leaf: d}, the mean."""
    x, agreed = fragment_of(plan, state, fragment, local), state.extra[OUTER][str(fragment)].params
    gone = {name: (agreed[name] - leaf.to(agreed[name].dtype)) / members.size for name, leaf in x.items()}
    if members.size == 1:
        return lambda: gone
    if coder is None:
        flying = {name: start_psum(leaf.contiguous(), members, leaf=name) for name, leaf in gone.items()}
        return lambda: {name: pending.wait() for name, pending in flying.items()}
    jobs = {name: coded(name, leaf, members, coder, plan) for name, leaf in gone.items()}
    for job in jobs.values():
        next(job)  # its first round is under way

    def finish() -> dict[str, Tensor]:
        for job in jobs.values():
            next(job)  # its second one, of all leaves before one is waited for
        return {name: ended(job).to(gone[name].dtype).view(gone[name].shape) for name, job in jobs.items()}

    return finish


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
def begin_again(
    plan: Plan, outer: GradientTransformation, local: Local, state: TrainState, fragment: int, d: dict[str, Tensor]
) -> TrainState:
    """The state after the outer optimizer's update of a fragment, in its buffers: there the member begins again."""
    agreed: Outer = state.extra[OUTER][str(fragment)]
    updates, opt_state = outer.update(d, agreed.opt_state, agreed.params)
    x = apply_updates(agreed.params, updates)
    theirs = fragment_of(plan, state, fragment, local) if local.mix else {}
    mixed = {name: x[name].lerp(its.to(x[name].dtype), local.mix) for name, its in theirs.items()}
    put(plan, local, state, {fragment: x | mixed})
    return state._replace(extra={**state.extra, OUTER: {**state.extra[OUTER], str(fragment): Outer(x, opt_state)}})


def put(plan: Plan, local: Local, state: TrainState, fragments: dict[int, dict[str, Tensor]]) -> None:
    """Write {number of a fragment: {leaf: x}} into the buffers of the state."""
    target = pytree.named_leaves(state.master if plan.policy.has_master else own(plan, state.params))
    if not plan.policy.has_master:
        changed = {name for x in fragments.values() for name in x}
        target = {name: leaf.clone() if name in changed else leaf for name, leaf in target.items()}
    for fragment, x in fragments.items():
        for name, value in x.items():
            target[name][layers_of(name, plan, fragment, local)] = value
    with plan.mesh.ledger.phase("outer"):
        spread(plan, pytree.from_named(target, plan.trained(plan.like)), state.params)


def put_mean(
    plan: Plan, state: TrainState, members: Axis, local: Local, coder: Coder | None, fragments: list[int]
) -> dict[int, dict[str, Tensor]]:
    """Write the mean of the members' parameters, x_0 - d of each of the fragments, into the buffers of the state, and
    return it."""
    with plan.mesh.ledger.phase("outer"):
        sent = {i: send(plan, state, i, members, local, coder) for i in fragments}
        gone = {i: finish() for i, finish in sent.items()}
    agreed = {i: state.extra[OUTER][str(i)].params for i in fragments}
    means = {i: {name: x - gone[i][name] for name, x in agreed[i].items()} for i in fragments}
    put(plan, local, state, means)
    return means


@torch.no_grad()
def meet(plan: Plan, state: TrainState, members: Axis, local: Local) -> TrainState:
    """The state of a member after one of the first `after` steps: in its buffers and in x_0 the mean of the members'
    parameters. The states of the outer optimizer, and of the member's own, stay as they are."""
    means, agreed = put_mean(plan, state, members, local, None, list(range(local.fragments))), state.extra[OUTER]
    at = {str(i): Outer(x, agreed[str(i)].opt_state) for i, x in means.items()}
    return state._replace(extra={**state.extra, OUTER: at})


@torch.no_grad()
def agree(step: Step, plan: Plan, members: Axis, state: TrainState, local: Local) -> Any:
    """The state with the mean of the members' parameters and optimizer states: the same on all members, so that it can
    be saved, and a run goes on from it with the same bits on as many members, or on others.

    The outer optimizer makes no update but of what is on its way: between two times a fragment's mean is x_0 - d, and
    x_0 stays, so that its next update is of H steps. Another one would apply the momentum twice. step: of
    `make_local_step`. Communicates over rp: d of every fragment, but of one that agreed after the last step, and the
    floating-point leaves of opt_state.
    """
    state = step.finish(state)
    coder = coder_of(local.codec, 128, Kernels()) if local.codec else None
    done, whole = int(state.step), not local.overlap and not local.mix
    if not local.together(done):  # else all did after this very step, as one fragment may have
        apart = [i for i in range(local.fragments) if not whole or local.due(done) != i]
        put_mean(plan, state, members, local, coder, apart)

    def mean(name: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or members.size == 1:
            return leaf
        with plan.mesh.ledger.phase("outer"):
            return leaf.copy_(start_psum((leaf / members.size).contiguous(), members, leaf=name).wait())

    return state._replace(opt_state=pytree.map_named(mean, state.opt_state))
