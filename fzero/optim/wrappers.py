"""Transformations around an optimizer: clipping by the norm of the whole tree or element by element, an average of the
weights, a learning-rate factor in the state, accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.config_tables import AtLeastOne
from fzero.core.pytree import Tree
from fzero.optim.base import (
    AverageState,
    GradientTransformation,
    NotNegative,
    NumberIn,
    Pass,
    RankSums,
    apply_in_place,
    apply_updates,
    expect_optimizer,
    name_tree,
    overwrite,
    stateless,
)
from fzero.optim.combine import SplitChain, split_chain
from fzero.optim.leafwise import without_partial
from fzero.optim.sharded_leaves import ShardedLeaves, around, bind, on_shards
from fzero.sharding.spec import Spec


@checked()
def clip_by_global_norm(max_norm: Annotated[float | Tensor, NumberIn()]) -> GradientTransformation:
    """Scale all updates by min(1, max_norm / ||updates||).

    Every element counts once, also that of a leaf which several ranks hold.
    A norm that is NaN or inf makes every update NaN or 0 (inf becomes NaN), so a bad step cannot pass for a good one.
    Differs from torch.nn.utils.clip_grad_norm_: no 1e-6 in the denominator.
    Communicates: one psum per axis that shards any leaf, of one number per set of axes.
    Raises ValueError for a max_norm that is not a finite number > 0.

    >>> tx = clip_by_global_norm(1.0)
    >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({}), {})[0]["w"]
    tensor([0.6000, 0.8000])

    Ref: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.
    """
    expect_nonzero("clip_by_global_norm: max_norm", max_norm)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            ratio = clip_ratio(shards.norm(grads), max_norm)
            return pytree.map_named(lambda name, g: (g * shards.vary(name, ratio)).to(g.dtype), grads), ()

        def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
            ratio = clip_ratio(shards.norm(grads), max_norm)
            return options.finish(params, overwrite(lambda name, g: g.mul_(ratio), name_tree(grads), grads)), ()

        def factor(grads: Tree, so_far: Tensor | None, norm: Tensor | None = None) -> Tensor:
            size = shards.norm(grads) if norm is None else norm
            ratio = clip_ratio(size if so_far is None else size * so_far.to(size.dtype), max_norm)
            return ratio if so_far is None else ratio * so_far.to(ratio.dtype)

        empty = lambda tree: ()  # noqa: E731
        return GradientTransformation(empty, update, empty, unit="tree", in_place=in_place, factor=factor)

    return on_shards(make, needs="tree")


def clip_ratio(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """min(1, max_norm / norm), without a division by a zero norm."""
    # A number is written on the device: a copy from the host would wait for it.
    if isinstance(max_norm, Tensor):
        bound = max_norm.to(norm)
    else:
        bound = torch.full((), max_norm, dtype=norm.dtype, device=norm.device)
    return bound / torch.maximum(norm, bound).clamp(min=torch.finfo(norm.dtype).tiny)


def expect_nonzero(label: str, bound: float | Tensor) -> None:
    """Raise ValueError for a bound of 0; the value of a tensor may not be known yet."""
    if not isinstance(bound, Tensor) and bound == 0:
        raise ValueError(
            f"{label} is {bound}, which makes every update 0; give a number above 0, or leave the clipping out"
        )


@checked()
def clip_by_value(max_value: NotNegative) -> GradientTransformation:
    """Limit each element of the updates to [-max_value, max_value]; NaN stays NaN.

    Raises ValueError for a max_value that is not a finite number > 0.

    >>> tx = clip_by_value(1.0)
    >>> tx.update({"w": torch.tensor([3.0, -0.5])}, tx.init({}), {})[0]["w"]
    tensor([ 1.0000, -0.5000])
    """
    expect_nonzero("clip_by_value: max_value", max_value)
    return stateless(
        lambda grads, params: pytree.map(lambda g: g.clamp(-max_value, max_value), grads),
        lambda grads, params: overwrite(lambda name, g: g.clamp_(-max_value, max_value), name_tree(grads), grads),
    )


@checked(tx=expect_optimizer)
def with_average(
    tx: GradientTransformation, decay: Annotated[float | Tensor, NumberIn(high=1.0)]
) -> GradientTransformation:
    """The optimizer `tx`, which also keeps an average of the weights: average = decay * average + (1 - decay) * params.

    Put it around the whole optimizer; `state.opt_state.average` is the average, in float32 if the policy has master
    weights. It begins at the first params, not at zero, so it needs no bias correction. Skipped steps leave it. In a
    dtype narrower than float32, changes below half a unit in the last place are lost when decay is near 1.
    Raises ValueError for a decay outside [0, 1). Ref: Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation
    by Averaging".

    >>> tx, params = with_average(sgd(1.0), 0.5), {"w": torch.tensor([1.0])}
    >>> updates, state = tx.update({"w": torch.tensor([2.0])}, tx.init(params), params)
    >>> state.average  # half way from 1 to 1 - 2
    {'w': tensor([0.])}
    """

    def mix(average: Tensor, param: Tensor) -> Tensor:
        return (average + (param.to(average.dtype) - average) * (1 - decay)).to(average.dtype)

    def update(grads: Tree, state: AverageState, params: Tree) -> tuple[Tree, AverageState]:
        updates, inner = tx.update(grads, state.inner, params)
        return updates, AverageState(inner, pytree.map(mix, state.average, apply_updates(params, updates)))

    @torch.no_grad()
    def in_place(grads: Tree, state: AverageState, params: Tree, options: Pass) -> tuple[Tree, AverageState]:
        if not options.adds:
            return update(grads, state, params)
        params, inner = apply_in_place(tx, grads, state.inner, params, options)

        def move(average: Tensor, param: Tensor) -> Tensor:
            new = mix(average, param)
            return average.copy_(new if options.skip is None else torch.where(options.skip, average, new))

        return params, AverageState(inner, pytree.map(move, state.average, params))

    @torch.no_grad()
    def sync(state: AverageState, params: Tree) -> tuple[Tree, AverageState] | None:
        assert tx.sums.sync is not None  # else this one has no `sync` either
        result = tx.sums.sync(state.inner, params)
        if result is None:
            return None

        def move(average: Tensor, update: Tensor) -> Tensor:  # the last step's params are these
            return average.add_(update.to(average.dtype) * (1 - decay))

        return result[0], AverageState(result[1], pytree.map(move, state.average, result[0]))

    def split() -> SplitChain:
        inner = split_chain(tx)
        return SplitChain(
            inner.heads,
            with_average(inner.body, decay),
            lambda state: AverageState(inner.state(state.inner), state.average),
            lambda state, body: AverageState(inner.merge(state.inner, body.inner), body.average),
        )

    sums = tx.sums
    if (inner := sums.local) is not None:
        sums = sums._replace(local=lambda state, params: inner(state.inner, params), sync=sync)
    made = GradientTransformation(
        init=lambda params: AverageState(tx.init(params), pytree.map(lambda p: p.detach().clone(), params)),
        update=update,
        spec=lambda specs: AverageState(tx.spec(specs), specs),
        in_place=in_place,
        one_pass=tx.one_pass,
        split=split,
        sums=sums,
    )
    return around([tx], lambda inner: with_average(inner, decay), made)


class LrScaleState(NamedTuple):
    """The state of `with_lr_scale`.

    >>> with_lr_scale(lambda scale: sgd(scale * 0.1)).init({"w": torch.ones(2)}).lr_scale
    tensor(1., dtype=torch.float64)
    """

    lr_scale: Tensor  # float64 0-dim: of the next step; whoever makes it sets it
    inner: Tree  # the optimizer's own state


@checked()
def with_lr_scale(make: Callable[[Tensor], GradientTransformation]) -> GradientTransformation:
    """The optimizer `make(scale)`, where scale is `state.lr_scale`: a number of each step beside its schedule, such as
    the root of the size of its batch.

    make: from a float64 0-dim tensor to an optimizer, whose state has the same layout for all of them.

    >>> tx = with_lr_scale(lambda scale: sgd(lambda count: 0.5 * scale))
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = tx.init(params)._replace(lr_scale=torch.tensor(2.0, dtype=torch.float64))
    >>> tx.update({"w": torch.tensor([3.0])}, state, params)[0]
    {'w': tensor([-3.])}
    """
    like = make(torch.ones((), dtype=torch.float64))  # what does not depend on the number
    expect_optimizer(like, "what make(scale) returns")

    def init(params: Tree) -> LrScaleState:
        leaves = pytree.leaves(params)
        scale = torch.ones((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        return LrScaleState(scale, like.init(params))

    def spec(specs: Tree) -> LrScaleState:
        scale: Any = Spec()  # in the tensor's place
        return LrScaleState(scale, like.spec(specs))

    def update(grads: Tree, state: LrScaleState, params: Tree) -> tuple[Tree, LrScaleState]:
        updates, inner = make(state.lr_scale).update(grads, state.inner, params)
        return updates, state._replace(inner=inner)

    def in_place(grads: Tree, state: LrScaleState, params: Tree, options: Pass) -> tuple[Tree, LrScaleState]:
        params, inner = apply_in_place(make(state.lr_scale), grads, state.inner, params, options)
        return params, state._replace(inner=inner)

    def split() -> SplitChain:
        inner = split_chain(like)
        return SplitChain(
            inner.heads,
            with_lr_scale(lambda scale: split_chain(make(scale)).body),
            lambda state: state._replace(inner=inner.state(state.inner)),
            lambda state, body: LrScaleState(body.lr_scale, inner.merge(state.inner, body.inner)),
        )

    def with_shards(shards: ShardedLeaves) -> GradientTransformation:
        return with_lr_scale(lambda scale: bind(make(scale), shards))

    return GradientTransformation(
        init=init,
        update=update,
        spec=spec,
        needs=like.needs,
        unit=like.unit,
        in_place=in_place,
        one_pass=like.one_pass,
        split=split,
        sums=RankSums(like.sums.makes),
        with_shards=with_shards if like.with_shards is not None else None,
    )


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    >>> accumulate(sgd(0.1), every=4).init({"w": torch.zeros(2)}).sum
    {'w': tensor([0., 0.])}
    """

    count: torch.Tensor  # int64 0-dim: gradients in the sum, 0 .. every - 1
    sum: Tree  # of the gradients since the last step, like the params
    inner: Tree  # state of the inner transformation


@checked(tx=expect_optimizer, every="accumulate: every is {}; it must be an int >= 1")
def accumulate(
    tx: GradientTransformation, every: AtLeastOne, *, dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Return the transformation that gives `tx` the mean of each `every` gradients; the updates between are zero.

    dtype: of the sum of gradients; None: the param's.
    `tx` sees one step per `every` gradients, so its schedules count those.
    The pure form runs `tx` at each gradient and selects, so that it works under vmap; in place it runs only when
    its turn comes.
    Raises ValueError when every is not an int >= 1.

    >>> tx, params = accumulate(sgd(1.0), every=2), {"w": torch.zeros(1)}
    >>> state = tx.init(params)
    >>> for g in (1.0, 3.0):
    ...     updates, state = tx.update({"w": torch.tensor([g])}, state, params)
    ...     print(updates["w"].item())
    0.0
    -2.0
    """

    def init(params: Tree) -> AccumulateState:
        zeros = pytree.map(lambda p: torch.zeros_like(p, dtype=dtype), params)
        leaves = pytree.leaves(params)
        count = torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
        return AccumulateState(count, zeros, tx.init(params))

    def update(grads: Tree, state: AccumulateState, params: Tree) -> tuple[Tree, AccumulateState]:
        total = pytree.map(lambda s, g: (s + g).to(s.dtype), state.sum, grads)
        done = state.count + 1 == every
        updates, inner = tx.update(pytree.map(lambda s: s / every, total), state.inner, params)
        return (
            pytree.map(lambda u: torch.where(done, u, torch.zeros_like(u)), updates),
            AccumulateState(
                (state.count + 1) % every,
                pytree.map(lambda s: torch.where(done, torch.zeros_like(s), s), total),
                pytree.map(lambda new, old: torch.where(done, new, old), inner, state.inner),
            ),
        )

    def spec(specs: Tree) -> AccumulateState:
        count: Any = Spec()  # in the tensor's place
        return AccumulateState(count, pytree.map(without_partial, specs), tx.spec(specs))

    @torch.no_grad()
    def in_place(grads: Tree, state: AccumulateState, params: Tree, options: Pass) -> tuple[Tree, AccumulateState]:
        if not options.adds:
            return update(grads, state, params)
        total = pytree.map(lambda s, g: s.add_(g), state.sum, grads)
        number = known_count(state.count) + 1
        if number < every:
            return params, AccumulateState(marked(state.count + 1, number), total, state.inner)
        mean = pytree.map(lambda s: s.div_(every), total)
        params, inner = apply_in_place(tx, mean, state.inner, params, options)
        zeros = pytree.map(lambda s: s.zero_(), total)
        return params, AccumulateState(marked(torch.zeros_like(state.count), 0), zeros, inner)

    made = GradientTransformation(init, update, spec, in_place=in_place)
    return around([tx], lambda inner: accumulate(inner, every, dtype=dtype), made)


MARK = "fzero_count"  # the attribute of a count that `in_place` made


def marked(count: torch.Tensor, value: int) -> torch.Tensor:
    """The count, with its value as it is now beside it for the host."""
    if not count.is_inference():  # of such a tensor PyTorch does not tell whether it was written over since
        setattr(count, MARK, (id(count), count._version, value))
    return count


def known_count(count: torch.Tensor) -> int:
    """The value of a count, without a wait where `in_place` has marked it."""
    tensor, version, value = getattr(count, MARK, (0, 0, 0))
    return value if tensor == id(count) and version == count._version else int(count)
