"""A stack of layers over the ranks of pp as a function that composes with torch.func; training runs train/row.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.comm.collectives import ppermute
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.stack import Block
from fzero.sharding import Plan


def stack_over_pp(
    apply: Callable[..., Any],
    name: str,
    blocks: Sequence[Block],
    layers: Tree,
    x: Any,
    ctx: Any,
    first: int,
    plan: Plan,
) -> tuple[Any, int]:
    """A stack of layers over the ranks of pp: (x after it, the number of the layer behind it).

    apply: (blocks, layers, x, number of the first layer) -> x, for the layers that a rank holds. ctx: what it depends
    on beside. first: the number of the stack's first layer.

    Stage by stage x goes on to the next stage's rank, which applies its layers. What the other ranks hold meanwhile is
    nobody's, and they send it around too: all ranks run the same collectives over pp, also in the backward pass and
    under transforms, if what they hold depends on the same tensors.

    Communicates: x for each stage that begins in this stack, from each rank of pp; in the backward pass as much.
    """
    assert plan.stages is not None
    axis = plan.mesh["pp"]
    leaves = [leaf for leaf_name, leaf in plan.leaves.items() if leaf_name.startswith(f"{name}/")]
    rows, end = leaves[0].params.rows[axis.rank], first + leaves[0].shape[0]
    for stage, numbers in enumerate(plan.stages.layers):
        low, high = max(first, numbers[0]), min(end, numbers[-1] + 1)
        if low >= high:
            continue
        step = plan.stages.ranks[stage] - plan.stages.ranks[stage - 1] if stage and low == numbers[0] else 0
        if step:
            turn = [(rank, (rank + step) % axis.size) for rank in range(axis.size)]
            x = pytree.map(lambda leaf, turn=turn: ppermute(leaf, axis, turn, leaf="x"), x)
        if plan.stages.ranks[stage] == axis.rank:
            at, by = rows.index(low - first), (low - first) % len(blocks)
            own = pytree.map(lambda leaf, at=at, n=high - low: leaf[at : at + n], layers)
            x = apply((*blocks[by:], *blocks[:by]), own, x, low)
        else:
            x = depend_on(x, [*pytree.leaves(layers), *pytree.leaves(ctx)])
    return x, end


def depend_on(x: Any, others: Sequence[Any]) -> Any:
    """x, to the bit, as a function also of those of `others` that are tensors: it has their batches under vmap, a
    gradient and a tangent of 0 by each of them, and so has its own gradient."""
    tensors = [leaf for leaf in (*pytree.leaves(x), *others) if isinstance(leaf, Tensor)]

    def one(leaf: Tensor) -> Tensor:
        empty = [other.flatten()[:0].to(leaf.dtype).sum() for other in tensors]
        return leaf * (1 + sum(empty[1:], empty[0]))

    return pytree.map(one, x)
