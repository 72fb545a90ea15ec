"""Clipping of gradients: by the norm of the whole tree, or element by element."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.optim.base import (
    GradientTransformation,
    NotNegative,
    NumberIn,
    Pass,
    name_tree,
    overwrite,
    stateless,
)
from fzero.optim.sharded_leaves import ShardedLeaves, on_shards


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
