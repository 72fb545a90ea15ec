"""The exponential moving average of the weights, as a transformation around an optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, Pass, apply_in_place, apply_updates, check_number, expect_optimizer
from fzero.optim.combine import SplitChain, split_chain
from fzero.optim.sharded_leaves import ShardedLeaves, bind

AVERAGE = "opt_state/average/"  # the names of averaged weights in a state begin so


class AverageState(NamedTuple):
    """The state of `with_average`.

    >>> state = with_average(sgd(0.1), 0.9).init({"w": torch.ones(2)})
    >>> state.inner.count, state.average["w"]
    (tensor(0), tensor([1., 1.]))
    """

    inner: Tree  # the optimizer's own state
    average: Tree  # in the structure, layout and dtypes of the params that the optimizer updates


@checked("tx")
def with_average(tx: GradientTransformation, decay: float | Tensor) -> GradientTransformation:
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
    expect_optimizer(tx)
    check_number("with_average", high=1.0, decay=decay)

    def mix(average: Tensor, param: Tensor) -> Tensor:
        return (average + (param.to(average.dtype) - average) * (1 - decay)).to(average.dtype)

    def update(grads: Tree, state: AverageState, params: Tree) -> tuple[Tree, AverageState]:
        updates, inner = tx.update(grads, state.inner, params)
        return updates, AverageState(inner, pytree.map(mix, state.average, apply_updates(params, updates)))

    @torch.no_grad()
    def apply(grads: Tree, state: AverageState, params: Tree) -> tuple[Tree, AverageState]:
        params, inner = apply_in_place(tx, grads, state.inner, params)
        return params, AverageState(inner, pytree.map(lambda a, p: a.copy_(mix(a, p)), state.average, params))

    @torch.no_grad()
    def in_pass(grads: Tree, state: AverageState, params: Tree, options: Pass) -> tuple[Tree, AverageState]:
        assert tx.in_pass is not None  # else this one has no `in_pass` either
        params, inner = tx.in_pass(grads, state.inner, params, options)

        def move(average: Tensor, param: Tensor) -> Tensor:
            new = mix(average, param)
            return average.copy_(new if options.skip is None else torch.where(options.skip, average, new))

        return params, AverageState(inner, pytree.map(move, state.average, params))

    @torch.no_grad()
    def sync(state: AverageState, params: Tree) -> tuple[Tree, AverageState] | None:
        result = tx.sync(state.inner, params) if tx.sync is not None else None
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

    def with_shards(shards: ShardedLeaves) -> GradientTransformation:
        return with_average(bind(tx, shards), decay)

    return GradientTransformation(
        init=lambda params: AverageState(tx.init(params), pytree.map(lambda p: p.detach().clone(), params)),
        update=update,
        spec=lambda specs: AverageState(tx.spec(specs), specs),
        needs=tx.needs,
        apply=apply,
        in_pass=in_pass if tx.in_pass is not None else None,
        unit=tx.unit,
        sums=tx.sums,
        local=None if (inner := tx.local) is None else lambda state, params: inner(state.inner, params),
        sync=None if tx.sync is None else sync,
        with_shards=with_shards if tx.with_shards is not None else None,
        split=split,
    )
