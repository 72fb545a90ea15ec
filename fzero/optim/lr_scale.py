"""A factor of the learning rate that is in the state, as a transformation around an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, Pass, apply_in_place, expect_optimizer
from fzero.optim.combine import SplitChain, split_chain
from fzero.optim.sharded_leaves import ShardedLeaves, bind
from fzero.sharding.spec import Spec

LR_SCALE = "lr_scale"  # the name of the factor in a state


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

    @torch.no_grad()
    def apply(grads: Tree, state: LrScaleState, params: Tree) -> tuple[Tree, LrScaleState]:
        params, inner = apply_in_place(make(state.lr_scale), grads, state.inner, params)
        return params, state._replace(inner=inner)

    def in_pass(grads: Tree, state: LrScaleState, params: Tree, options: Pass) -> tuple[Tree, LrScaleState]:
        scaled = make(state.lr_scale).in_pass
        assert scaled is not None  # as `like` has one
        params, inner = scaled(grads, state.inner, params, options)
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
        apply=apply,
        in_pass=in_pass if like.in_pass is not None else None,
        unit=like.unit,
        sums=like.sums,
        with_shards=with_shards if like.with_shards is not None else None,
        split=split,
    )
