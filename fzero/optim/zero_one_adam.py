"""0/1 Adam: 1-bit Adam without a warm-up, whose second moment moves ever more rarely, and then sums too.

Local steps: ranks move apart, each by its own momentum, and sum by signs how far they moved. With N ranks, v as it was
last, and g_r the term of rank r of the sum of gradients, in a step t

m_r <- b1 m_r + (1 - b1) N g_r;   u_r <- (1 - lr λ) u_r + ρ m_r;   p <- (1 - lr λ) p        ρ = lr / (1 - b1^t)

and its gradient was taken at p - u_r / (√v̂ + eps): where a rank is. In a step that sums, behind that

u = mean of u_r over the ranks, by signs;   m_r <- u / s;   p <- p - u / (√v̂ + eps);   u_r <- 0

where s is what ρ in place of ρ m_r makes of u_r. So `params` of a state are those that all ranks had after their last
sum; m_r and u_r are a rank's own. A run that ends between two sums makes one more, by `sync`.

Ref: Lu et al. 2022, arXiv:2202.06009, algorithm 1, whose x is p - u_r / √v̂ and whose λ is 0. As in `zero_one_adam` a
step uses the momentum that it has just moved.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.config_tables import AtLeastOne, at_least
from fzero.core.pytree import Tree
from fzero.optim.base import (
    Beta,
    GradientTransformation,
    LearningRate,
    NotNegative,
    Pass,
    RankSums,
    apply_in_place,
    lr_at,
)
from fzero.optim.combine import Mask, decay_predicate
from fzero.optim.leafwise import wide_dtype, without_partial
from fzero.optim.onebit import (
    Method,
    Numbers,
    OneBitState,
    Scale,
    SignCorrection,
    adam_direction,
    clip_factor,
    expect_no_transform,
    one_bit,
)
from fzero.optim.schedules import Intervals
from fzero.optim.sharded_leaves import ShardedLeaves, bind, on_shards

OWN, MOVED = "own", "moved"  # of `extra`: m_r and u_r, [layers or 1, ranks, *layer] where ranks share the sums
SINCE = "since"  # of `extra`: int64 0-dim, the steps since the last sum


class Rule(NamedTuple):
    """What the local steps of a method are made of."""

    numbers: Numbers
    method: Method
    intervals: Intervals

    def rate(self, count: Tensor) -> Tensor:
        """ρ of the step after `count` others, float64 0-dim."""
        return lr_at(self.numbers.lr, count) / self.numbers.correct(self.numbers.b1, (count + 1).to(torch.float64))

    def decay(self, count: Tensor, decays: bool) -> Tensor:
        """lr λ of that step for a leaf, float64 0-dim; 0 for one that does not decay."""
        return lr_at(self.numbers.lr, count) * (self.numbers.weight_decay if decays else 0.0)

    def step(self, count: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """u / (√v̂ + eps), and 0 where v is 0."""
        correct = self.numbers.correct(self.numbers.b2, self.method.v_steps(count).to(torch.float64))
        return torch.where(v > 0, u / ((v / correct.to(v.dtype)).sqrt() + self.numbers.eps), 0.0)


def with_local_steps(
    owner: str, numbers: Numbers, method: Method, mask: Mask, intervals: Intervals
) -> GradientTransformation:
    """The transformation of a method whose steps are local from `intervals.freeze` on, and by `one_bit` before."""
    rule = Rule(numbers, method, intervals)
    warmup_tx, decays = one_bit(owner, numbers, method, mask), decay_predicate(mask)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        signs, first = shards.signs, bind(warmup_tx, shards)

        def init(params: Tree) -> OneBitState:
            named = pytree.named_leaves(params)
            momenta, displacements = (
                {name: local_zeros(shards, name, p) for name, p in named.items()} for _ in range(2)
            )
            state = first.init(params)
            return state._replace(
                m={}, extra={OWN: momenta, MOVED: displacements, SINCE: torch.zeros_like(state.count)}
            )

        def spec(specs: Tree) -> OneBitState:
            named = {name: without_partial(leaf_spec) for name, leaf_spec in pytree.named_leaves(specs).items()}
            momenta = named if signs is None else {name: signs.specs[name].worker.spec for name in named}
            state = first.spec(specs)
            return state._replace(m={}, extra={OWN: momenta, MOVED: dict(momenta), SINCE: state.count})

        def update(grads: Tree, state: OneBitState, params: Tree) -> tuple[Tree, OneBitState]:
            return in_place(grads, pytree.map(lambda x: x.clone(), state), params, Pass(adds=False))

        @torch.no_grad()
        def in_place(grads: Tree, state: OneBitState, params: Tree, options: Pass) -> tuple[Tree, OneBitState]:
            expect_no_transform(owner)
            g, p = dict(pytree.named_leaves(grads)), pytree.named_leaves(params)
            if bool(state.count < intervals.freeze):
                if signs is not None:
                    g.update(signs.full_sums({name: g.pop(name) for name in sorted(signs.sum_leaves - signs.names)}))
                m = pytree.from_named(like_params(state.extra[OWN], p), params)
                full = pytree.from_named(g, params), state._replace(m=m), params
                updates, _ = apply_in_place(first, *full, Pass(adds=False))
            else:
                decayed = {name: decays(name, x) for name, x in p.items()}
                named = move(rule, shards, g, p, state, decayed)
                state.extra[SINCE].add_(1)
                if bool(intervals.sums(state.count)):
                    add_up(rule, shards, p, state, decayed, named, state.count)
                updates = pytree.from_named(named, params)
            return options.finish(params, updates), state._replace(count=state.count + 1)

        @torch.no_grad()
        def local(state: OneBitState, params: Tree) -> Tree | None:
            if bool(state.extra[SINCE] == 0):
                return None
            p, v = pytree.named_leaves(params), pytree.named_leaves(state.v)
            displacements = like_params(state.extra[MOVED], p)
            local_params = {name: x - rule.step(state.count, displacements[name], v[name]) for name, x in p.items()}
            return pytree.from_named(local_params, params)

        @torch.no_grad()
        def sync(state: OneBitState, params: Tree) -> tuple[Tree, OneBitState] | None:
            if bool(state.extra[SINCE] == 0):
                return None
            p = pytree.named_leaves(params)
            named = {name: torch.zeros_like(x, dtype=wide_dtype(x)) for name, x in p.items()}
            add_up(rule, shards, p, state, {name: decays(name, x) for name, x in p.items()}, named, state.count - 1)
            return pytree.from_named(named, params), state

        sums = RankSums(True, local, sync)
        return GradientTransformation(init, update, spec, unit="tree", in_place=in_place, sums=sums)

    return on_shards(make, needs="tree")


def local_zeros(shards: ShardedLeaves, name: str, p: Tensor) -> Tensor:
    """What a rank has of its own of a leaf, before the first step."""
    return (
        p.new_zeros(p.shape, dtype=wide_dtype(p)) if shards.signs is None else shards.signs.worker_zeros(name, p.device)
    )


def like_params(tensors: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank has of its own in the shapes of its parameters: views."""
    return {name: x.view(params[name].shape) for name, x in tensors.items()}


def move(
    rule: Rule,
    shards: ShardedLeaves,
    g: dict[str, Tensor],
    params: dict[str, Tensor],
    state: OneBitState,
    decays: dict[str, bool],
) -> dict[str, Tensor]:
    """Overwrite m_r and u_r by a local step; the updates of p by its decay."""
    numbers, count = rule.numbers, state.count
    if bool(count == rule.intervals.freeze):  # errors were of m, and are of u from now on
        for error in (*state.worker.values(), *state.server.values()):
            error.mul_(rule.rate(count - 1).to(error.dtype))
    momenta, displacements = (like_params(state.extra[key], params) for key in (OWN, MOVED))
    for name, m in momenta.items():
        ranks = 1 if shards.signs is None else shards.signs.ranks(name)
        m.mul_(numbers.b1).add_(g.pop(name).to(m.dtype), alpha=(1 - numbers.b1) * ranks)
    clip_ratio, updates = clip_factor(shards, momenta, numbers.clip), {}
    for name, m in momenta.items():
        if clip_ratio is not None:
            m.mul_(clip_ratio.to(m.dtype))
        decay = rule.decay(count, decays[name]).to(m.dtype)
        displacements[name].mul_(1 - decay).add_(m * rule.rate(count).to(m.dtype))
        updates[name] = params[name].to(m.dtype) * -decay
    return updates


def add_up(
    rule: Rule,
    shards: ShardedLeaves,
    params: dict[str, Tensor],
    state: OneBitState,
    decays: dict[str, bool],
    updates: dict[str, Tensor],
    last: Tensor,
) -> None:
    """Sum how far the ranks moved up to the step after `last` others, and add it to the updates; u_r is 0 again."""
    momenta, displacements = (like_params(state.extra[key], params) for key in (OWN, MOVED))
    v, step_count = pytree.named_leaves(state.v), int(state.extra[SINCE])
    means = mean_of(shards, rule.numbers.scale, displacements, v, state)
    for name, u in means.items():
        span = torch.zeros_like(rule.rate(state.count))
        for age in reversed(range(step_count)):
            count = last - age
            span = span * (1 - rule.decay(count, decays[name])) + rule.rate(count)
        momenta[name].copy_(u / span.to(u.dtype))
        updates[name].sub_(rule.step(last, u, v[name]))
        displacements[name].zero_()
    state.extra[SINCE].zero_()


def mean_of(
    shards: ShardedLeaves, scale: str, displacements: dict[str, Tensor], v: dict[str, Tensor], state: OneBitState
) -> dict[str, Tensor]:
    """The means of u_r over the ranks: by signs, or in full."""
    signs = shards.signs
    if signs is None:
        return {name: u.clone() for name, u in displacements.items()}
    terms = {name: u / signs.ranks(name) for name, u in displacements.items()}
    means = {name: (v[name] != 0).to(signs.dtype) for name in sorted(signs.names)}
    signs.by_signs(means, terms.pop, state.worker, state.server, scale)
    return means | signs.full_sums(terms)


FAR = 1 << 48  # steps that no run makes


@checked(**OPTIMIZER)
def zero_one_adam(
    lr: LearningRate = 1e-3,
    b1: Beta = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-8,
    *,
    kappa: AtLeastOne = 16,
    freeze: Annotated[int | None, at_least(1)] = None,
    sum_every: int = 1,
    sum_double: int = 0,
    weight_decay: NotNegative = 0.01,
    mask: Mask = None,
    clip: NotNegative = 0.0,
    scale: Scale = "mean",
    correction: SignCorrection = "moments",
) -> GradientTransformation:
    """Return 0/1 Adam: v moves in steps k_0 = 0, k_{j+1} = k_j + 2^⌊j/κ⌋, by sums in full.

    In those steps m and v are as in `adamw`; in the others v stays, and m is summed by signs, as in `onebit_adam`,
    whose state, plan ("grads=1bit") and arguments it has. The steps between such sums double after each κ of them.
    kappa: κ. freeze: v does not move from this step on; None: it goes on. Errors are those of m, where the paper's are
    those of the rate times m: the same for a constant rate.

    sum_every: from step `freeze` on ranks sum once in so many steps, and move apart in between, each by its own
    momentum (see fzero/optim/zero_one_adam.py), with a plan of codec "grads=1bit,local". sum_double: so many steps sum
    each time, as many each second time, then each fourth, up to `sum_every`; 0: each `sum_every`-th from the first one
    on (the paper doubles where its rate has halved, up to 16). Errors are then those of the rate times m, and `clip` is
    of each rank's own momentum. `params` of a state are those after the last sum.
    Communicates: a psum of gradients in the steps k_j; in the others an all_to_all and an all_gather of bits, and in
    local steps nothing.
    Raises ValueError for numbers out of range, and for `sum_every` without `freeze`.

    >>> full_sums(16, None)[:20].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22]

    Ref: Lu et al. 2022, "Maximizing communication efficiency for large-scale training via 0/1 Adam", arXiv:2202.06009,
    algorithm 1, and its policy of when v moves; there m is summed in full, and no step is local while v moves, as by
    DeepSpeed.
    """
    if sum_every != 1 and freeze is None:
        raise ValueError(
            f"zero_one_adam: sum_every is {sum_every}, which is of the steps after v has moved last, and freeze is "
            "None; give freeze, the first of them"
        )
    steps = full_sums(kappa, freeze)
    method = Method(
        lambda count: torch.isin(count, steps.to(count.device)),
        lambda count: (steps.to(count.device) <= count).sum(),
        adam_direction(eps),
    )
    numbers = Numbers(lr, b1, b2, eps, weight_decay, clip, scale, correction)
    intervals = Intervals(freeze or FAR, sum_every, sum_double).check("zero_one_adam")
    if sum_every == 1:
        return one_bit("zero_one_adam", numbers, method, mask)
    return with_local_steps("zero_one_adam", numbers, method, mask, intervals)


def full_sums(kappa: int, freeze: int | None) -> Tensor:
    """The steps of 0/1 Adam whose sums are made in full, int64, from 0 on."""
    sum_steps, step = [], 0
    while step < (FAR if freeze is None else freeze):
        sum_steps.append(step)
        step += 1 << ((len(sum_steps) - 1) // kappa)
    return torch.tensor(sum_steps, dtype=torch.int64)
