"""0/1 Adam's local steps: ranks move apart, each by its own momentum, and sum by signs how far they moved.

With N ranks, v as it was last, and g_r the term of rank r of the sum of gradients, in a step t

m_r <- b1 m_r + (1 - b1) N g_r;   u_r <- (1 - lr λ) u_r + ρ m_r;   p <- (1 - lr λ) p        ρ = lr / (1 - b1^t)

and its gradient was taken at p - u_r / (√v̂ + eps): where a rank is. In a step that sums, behind that

u = mean of u_r over the ranks, by signs;   m_r <- u / s;   p <- p - u / (√v̂ + eps);   u_r <- 0

where s is what ρ in place of ρ m_r makes of u_r: without decay the sum of the ρ since the last sum. So `params` of a
state are those that all ranks had after their last sum, the same on all of them, and m_r and u_r are a rank's own. A
run that ends between two sums makes one more, by `meet`.

Ref: Lu et al. 2022, arXiv:2202.06009, algorithm 1, whose x is p - u_r / √v̂ and whose λ is 0. As in `zero_one_adam` a
step uses the momentum that it has just moved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import expect_count
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, lr_at
from fzero.optim.leafwise import without_partial
from fzero.optim.masks import Mask, decay_predicate
from fzero.optim.onebit import Method, Numbers, OneBitState, clip_factor, expect_no_transform, one_bit, wide
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves

OWN, MOVED = "own", "moved"  # of `extra`: m_r and u_r, [layers or 1, ranks, *layer] where ranks share the sums
SINCE = "since"  # of `extra`: int64 0-dim, the steps since the last sum


class Intervals(NamedTuple):
    """Which steps sum, from step `freeze` on: each `every`-th; with `double` each first, then each second, fourth, ...
    up to `every`, twice as many after so many steps.

    >>> intervals = Intervals(freeze=2, every=4, double=4)
    >>> [count for count in range(2, 18) if intervals.sums(torch.tensor(count))]
    [2, 3, 4, 5, 7, 9, 13, 17]
    """

    freeze: int
    every: int
    double: int = 0

    def check(self, owner: str) -> Intervals:
        """The same, if they go together."""
        expect_count(f"{owner}: sum_every", self.every)
        expect_count(f"{owner}: sum_double", self.double, least=0)
        if self.double and (self.double % self.every or self.every & (self.every - 1)):
            raise ValueError(
                f"{owner}: sum_double is {self.double} and sum_every {self.every}; the latter must be a power of two, "
                "and divide the former"
            )
        return self

    def sums(self, count: Tensor) -> Tensor:
        """Whether the step after `count` others sums."""
        step = count - self.freeze
        if not self.double:
            return (step + 1) % self.every == 0
        length = (2 ** (step // self.double).clamp(0, 30)).clamp(max=self.every)
        return (step % self.double + 1) % length == 0

    def made(self, steps: int) -> int:
        """The sums from step `freeze` up to the end of a run of so many steps.

        >>> Intervals(freeze=2, every=4, double=4).made(18)
        8
        """
        left, found, length = max(0, steps - self.freeze), 0, 1 if self.double else self.every
        while length < self.every and left > self.double:
            found, left, length = found + self.double // length, left - self.double, 2 * length
        return found + left // length


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
        correct = self.numbers.correct(self.numbers.b2, self.method.moved(count).to(torch.float64))
        return torch.where(v > 0, u / ((v / correct.to(v.dtype)).sqrt() + self.numbers.eps), 0.0)


def with_local_steps(
    owner: str, numbers: Numbers, method: Method, mask: Mask, intervals: Intervals
) -> GradientTransformation:
    """The transformation of a method whose steps are local from `intervals.freeze` on, and by `one_bit` before."""
    rule = Rule(numbers, method, intervals)
    before, decays = one_bit(owner, numbers, method, mask), decay_predicate(mask)

    def on(shards: ShardedLeaves) -> GradientTransformation:
        signs = shards.signs
        assert before.on is not None  # as `one_bit` has it
        first = before if shards is WHOLE else before.on(shards)

        def init(params: Tree) -> OneBitState:
            named = pytree.named_leaves(params)
            own, moved = ({name: own_zeros(shards, name, p) for name, p in named.items()} for _ in range(2))
            state = first.init(params)
            return state._replace(m={}, extra={OWN: own, MOVED: moved, SINCE: torch.zeros_like(state.count)})

        def spec(specs: Tree) -> OneBitState:
            named = {name: without_partial(one) for name, one in pytree.named_leaves(specs).items()}
            own = named if signs is None else {name: signs.specs[name].worker.spec for name in named}
            state = first.spec(specs)
            return state._replace(m={}, extra={OWN: own, MOVED: dict(own), SINCE: state.count})

        def update(grads: Tree, state: OneBitState, params: Tree) -> tuple[Tree, OneBitState]:
            return donate(grads, pytree.map(lambda x: x.clone(), state), params)

        @torch.no_grad()
        def donate(grads: Tree, state: OneBitState, params: Tree) -> tuple[Tree, OneBitState]:
            expect_no_transform(owner)
            g, p = dict(pytree.named_leaves(grads)), pytree.named_leaves(params)
            if bool(state.count < intervals.freeze):
                if signs is not None:
                    g.update(signs.in_full({name: g.pop(name) for name in sorted(signs.owed - signs.names)}))
                m = pytree.from_named(like_params(state.extra[OWN], p), params)
                assert first.donate is not None  # as `one_bit` has it
                updates, _ = first.donate(pytree.from_named(g, params), state._replace(m=m), params)
            else:
                decayed = {name: decays(name, x) for name, x in p.items()}
                named = move(rule, shards, g, p, state, decayed)
                state.extra[SINCE].add_(1)
                if bool(intervals.sums(state.count)):
                    add_up(rule, shards, p, state, decayed, named, state.count)
                updates = pytree.from_named(named, params)
            return updates, state._replace(count=state.count + 1)

        @torch.no_grad()
        def local(state: OneBitState, params: Tree) -> Tree | None:
            if bool(state.extra[SINCE] == 0):
                return None
            p, v = pytree.named_leaves(params), pytree.named_leaves(state.v)
            moved = like_params(state.extra[MOVED], p)
            at = {name: x - rule.step(state.count, moved[name], v[name]) for name, x in p.items()}
            return pytree.from_named(at, params)

        @torch.no_grad()
        def meet(state: OneBitState, params: Tree) -> tuple[Tree, OneBitState] | None:
            if bool(state.extra[SINCE] == 0):
                return None
            p = pytree.named_leaves(params)
            named = {name: torch.zeros_like(x, dtype=wide(x)) for name, x in p.items()}
            add_up(rule, shards, p, state, {name: decays(name, x) for name, x in p.items()}, named, state.count - 1)
            return pytree.from_named(named, params), state

        needs = "tree" if shards is WHOLE else "elementwise"
        made = GradientTransformation(init, update, spec, needs, donate, unit="tree", sums=True)
        return made._replace(local=local, meet=meet, on=on)

    return on(WHOLE)


def own_zeros(shards: ShardedLeaves, name: str, p: Tensor) -> Tensor:
    """What a rank has of its own of a leaf, before the first step."""
    return p.new_zeros(p.shape, dtype=wide(p)) if shards.signs is None else shards.signs.own_zeros(name, p.device)


def like_params(own: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank has of its own in the shapes of its parameters: views."""
    return {name: x.view(params[name].shape) for name, x in own.items()}


def move(
    rule: Rule,
    shards: ShardedLeaves,
    g: dict[str, Tensor],
    params: dict[str, Tensor],
    state: OneBitState,
    decays: dict[str, bool],
) -> dict[str, Tensor]:
    """Overwrite m_r and u_r as in each local step, and return the updates of p, by its decay; `g` is emptied."""
    numbers, count = rule.numbers, state.count
    if bool(count == rule.intervals.freeze):  # errors were of m, and are of u from now on
        for error in (*state.worker.values(), *state.server.values()):
            error.mul_(rule.rate(count - 1).to(error.dtype))
    own, moved = (like_params(state.extra[key], params) for key in (OWN, MOVED))
    for name, m in own.items():
        ranks = 1 if shards.signs is None else shards.signs.ranks(name)
        m.mul_(numbers.b1).add_(g.pop(name).to(m.dtype), alpha=(1 - numbers.b1) * ranks)
    by, updates = clip_factor(shards, own, numbers.clip), {}
    for name, m in own.items():
        if by is not None:
            m.mul_(by.to(m.dtype))
        decay = rule.decay(count, decays[name]).to(m.dtype)
        moved[name].mul_(1 - decay).add_(m * rule.rate(count).to(m.dtype))
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
    """Sum how far the ranks moved up to the step after `last` others, and add it to the updates; m_r and the errors
    follow, and u_r is 0 again."""
    own, moved = (like_params(state.extra[key], params) for key in (OWN, MOVED))
    v, made = pytree.named_leaves(state.v), int(state.extra[SINCE])
    means = mean_of(shards, rule.numbers.scale, moved, v, state)
    for name, u in means.items():
        span = torch.zeros_like(rule.rate(state.count))
        for back in reversed(range(made)):
            count = last - back
            span = span * (1 - rule.decay(count, decays[name])) + rule.rate(count)
        own[name].copy_(u / span.to(u.dtype))
        updates[name].sub_(rule.step(last, u, v[name]))
        moved[name].zero_()
    state.extra[SINCE].zero_()


def mean_of(
    shards: ShardedLeaves, scale: str, moved: dict[str, Tensor], v: dict[str, Tensor], state: OneBitState
) -> dict[str, Tensor]:
    """The means of u_r over the ranks: by signs, but for elements that never had a gradient, or in full."""
    signs = shards.signs
    if signs is None:
        return {name: u.clone() for name, u in moved.items()}
    terms = {name: u / signs.ranks(name) for name, u in moved.items()}
    found = {name: (v[name] != 0).to(signs.dtype) for name in sorted(signs.names)}
    signs.by_signs(found, terms.pop, state.worker, state.server, scale)
    return found | signs.in_full(terms)
