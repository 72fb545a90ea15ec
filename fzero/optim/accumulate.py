"""Gradient accumulation as a transformation around another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, apply_in_place, expect_optimizer
from fzero.optim.leafwise import without_partial
from fzero.optim.sharded_leaves import bind
from fzero.sharding.spec import Spec


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    >>> accumulate(sgd(0.1), every=4).init({"w": torch.zeros(2)}).sum
    {'w': tensor([0., 0.])}
    """

    count: torch.Tensor  # int64 0-dim: gradients in the sum, 0 .. every - 1
    sum: Tree  # of the gradients since the last step, like the params
    inner: Tree  # state of the inner transformation


@checked("tx every")
def accumulate(tx: GradientTransformation, every: int, *, dtype: torch.dtype | None = None) -> GradientTransformation:
    """Return the transformation that gives `tx` the mean of each `every` gradients; the updates between are zero.

    dtype: of the sum of gradients; None: the param's.
    `tx` sees one step per `every` gradients, so its schedules count those.
    The pure form runs `tx` at each gradient and selects, so that it works under vmap; `apply` runs it only when its
    turn comes.
    Raises ValueError when every is not an int >= 1.

    >>> tx, params = accumulate(sgd(1.0), every=2), {"w": torch.zeros(1)}
    >>> state = tx.init(params)
    >>> for g in (1.0, 3.0):
    ...     updates, state = tx.update({"w": torch.tensor([g])}, state, params)
    ...     print(updates["w"].item())
    0.0
    -2.0
    """
    expect_optimizer(tx)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"accumulate: every is {every!r}; it must be an int >= 1")

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
    def apply(grads: Tree, state: AccumulateState, params: Tree) -> tuple[Tree, AccumulateState]:
        total = pytree.map(lambda s, g: s.add_(g), state.sum, grads)
        number = known_count(state.count) + 1
        if number < every:
            return params, AccumulateState(marked(state.count + 1, number), total, state.inner)
        mean = pytree.map(lambda s: s.div_(every), total)
        params, inner = apply_in_place(tx, mean, state.inner, params)
        zeros = pytree.map(lambda s: s.zero_(), total)
        return params, AccumulateState(marked(torch.zeros_like(state.count), 0), zeros, inner)

    return GradientTransformation(
        init=init,
        update=update,
        spec=spec,
        needs=tx.needs,
        apply=apply,
        unit=tx.unit,
        with_shards=None if tx.with_shards is None else lambda shards: accumulate(bind(tx, shards), every, dtype=dtype),
    )


MARK = "fzero_count"  # the attribute of a count that `apply` made


def marked(count: torch.Tensor, value: int) -> torch.Tensor:
    """The count, with its value beside it for the host: of this tensor as it is now, not of a copy."""
    if not count.is_inference():  # of such a tensor PyTorch does not tell whether it was written over since
        setattr(count, MARK, (id(count), count._version, value))
    return count


def known_count(count: torch.Tensor) -> int:
    """The value of a count; only for one that `apply` has not marked, as after a restart, the host waits for a GPU."""
    tensor, version, value = getattr(count, MARK, (0, 0, 0))
    return value if tensor == id(count) and version == count._version else int(count)
