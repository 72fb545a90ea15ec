"""An optimizer is a value: a pair of pure functions, the layout of its state, and an optional form that reuses buffers.

`chain` and `by_label` put such values together; `apply_updates` and `apply_in_place` end a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree

Schedule = Callable[[Tensor | int], Tensor]

# What a transformation must see whole, weakest first: nothing, a row (last dim), a leaf (but for its stacked leading
# dim), every leaf.
NEEDS = ("elementwise", "row", "matrix", "tree")
UNITS = ("row", "layer", "tree")


class Pass(NamedTuple):
    """What one pass over memory can do beside an update; each may be None."""

    factor: Tensor | None = None  # 0-dim, of every gradient
    skip: Tensor | None = None  # bool 0-dim: nothing changes where it is set, and the host does not wait for it
    copies: Mapping[str, Tensor] | None = None  # by leaf name: is given the updated param in its own dtype
    norm: Tensor | None = None  # of all gradients, where it is known
    at: Mapping[str, Piece] | None = None  # by leaf name: where these tensors lie in this rank's shard
    host: bool = False  # by the form that is made for states on the host, where "auto" chooses and it serves


class Piece(NamedTuple):
    """A part of a shard."""

    shape: tuple[int, ...]  # of the shard
    start: tuple[int, ...]  # of the part, in each dim


class GradientTransformation(NamedTuple):
    """Functions over trees of gradients, state and parameters; a state is a tree of tensors, `()` where there is none.

    `init(params) -> state`.
    `update(grads, state, params) -> (updates, state)` is pure; updates are added to params, so they carry the sign. It
    composes with torch.func (vmap over states, params or learning rates; grad through it).
    `spec(param_specs) -> state_specs` has the structure of `init(params)`; each Spec names every dim of its leaf, or
    none (replicated).
    `needs` is what it must see whole: "elementwise" (nothing), "row" (the last dim), "matrix" (a leaf, but for the
    leading dim that counts layers) or "tree" (every leaf).
    `donate` means `update` but may overwrite the buffers of grads and state.
    `apply(grads, state, params) -> (params, state)` means `update` and add, and may overwrite all three.
    `in_pass(grads, state, params, Pass) -> (params, state)` is `apply` with a Pass.
    `factor(grads, so_far, norm) -> number` is that by which `update` multiplies every one of `grads * so_far` (None: 1), times so_far;
    where their `norm` (of grads) is given, grads are not looked at.
    `members` are those of a chain.
    `unit` is the least of a leaf that may be updated apart from the rest, with the same bits: a "row" of a layer, a "layer", or the whole
    "tree"; an offloaded state is updated by such units.
    `on(shards) -> GradientTransformation` is the same transformation on leaves that are cut as `shards` says (a ShardedLeaves);
    None where it never looks beyond an element. A train step binds its optimizer to its plan so, and `bind` does by hand.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    spec: Callable[[Tree], Tree]
    needs: str = "elementwise"
    donate: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]] | None = None
    apply: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]] | None = None
    in_pass: Callable[[Tree, Tree, Tree, Pass], tuple[Tree, Tree]] | None = None
    factor: Callable[..., Tensor] | None = None
    members: tuple[GradientTransformation, ...] = ()
    unit: str = "layer"
    on: Callable[[Any], GradientTransformation] | None = None


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, each leaf in its param's dtype (the sum is rounded once)."""
    return pytree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


@torch.no_grad()
def apply_in_place(tx: GradientTransformation, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """`(params, state)` after one step of `tx`, overwriting the buffers of all three trees.

    It is `tx.apply` where there is one, else `tx.donate` or `tx.update` and an addition in place.
    """
    if tx.apply is not None:
        return tx.apply(grads, state, params)
    updates, state = (tx.donate or tx.update)(grads, state, params)
    return pytree.map(lambda p, u: p.add_(u), params, updates), state


@torch.no_grad()
def overwrite(change: Callable[..., Tensor], names: Tree, grads: Tree, *rest: Tree) -> Tree:
    """A tree of `change(name, g, *leaves of rest)`, where `change` may write into `g`, as no two share memory (see `distinct`)."""
    return pytree.map(change, names, distinct(grads), *rest)


def distinct(grads: Tree) -> Tree:
    """The gradients, each in memory of its own.

    A gradient may be one element expanded, or the very buffer of another leaf's gradient (autograd gives the terms of a sum one tensor):
    such a leaf is copied, before anything is written. What is no tensor stays as it is.
    """
    seen: set[tuple[int, int]] = set()

    def own(g: Any) -> Any:
        if not isinstance(g, Tensor):
            return g
        buffer = (g.untyped_storage()._cdata, g.storage_offset())
        shared = buffer in seen or any(stride == 0 and size > 1 for stride, size in zip(g.stride(), g.shape))
        seen.add(buffer)
        return g.clone(memory_format=torch.contiguous_format) if shared else g

    return pytree.map(own, grads)


def name_tree(tree: Tree) -> Tree:
    """The tree whose leaves are the names of the leaves of `tree`."""
    return pytree.map_named(lambda name, leaf: name, tree)


def lr_at(lr: float | Tensor | Schedule, count: Tensor) -> Tensor:
    """The learning rate, float64 0-dim, of the step before which `count` steps were made (0 for the first)."""
    if callable(lr):
        return lr(count)
    if isinstance(lr, Tensor):
        return lr.to(count.device, torch.float64)
    return torch.full((), lr, dtype=torch.float64, device=count.device)


def check_number(owner: str, low: float = 0.0, high: float = float("inf"), **values: Any) -> None:
    """Raise ValueError naming owner, argument and value unless each number is in [low, high); tensors pass."""
    for name, value in values.items():
        if isinstance(value, Tensor) or callable(value):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
            allowed = f"a number in [{low:g}, {high:g})"
            raise ValueError(f"{owner}: {name} is {value!r}; it must be {allowed}")
