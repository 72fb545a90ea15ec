"""From the update of one leaf to a whole GradientTransformation.

An optimizer states its equation once, for one leaf, out of place. The pure `update` and the forms that reuse buffers
follow: they walk over pieces of a leaf (flat stretches or layers), so that temporaries have the size of a piece.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import expect_floating, expect_regex
from fzero.core.device import kind_of
from fzero.core.pytree import Tree
from fzero.kernels.optim_leaf import PIECE as _PIECE
from fzero.kernels.optim_leaf import PIECE_ELSEWHERE as _PIECE_ELSEWHERE
from fzero.optim.base import GradientTransformation, Pass, distinct
from fzero.sharding.spec import Spec


class Slot(NamedTuple):
    """One tree of the state: its value and Spec for a param."""

    init: Callable[[str, Tensor], Tensor]  # (name, param) -> its initial value
    spec: Callable[[str, Spec], Spec]  # (name, spec of the param) -> its spec


class LeafRow(NamedTuple):
    """The tensors of one leaf."""

    name: str
    g: Tensor
    slots: tuple[Tensor, ...]
    p: Tensor


# (g, slots, p, scalars, info of the whole leaf) -> (update, new slots), tensors all in one floating dtype
Step = Callable[[Tensor, tuple[Tensor, ...], Tensor, tuple[Tensor, ...], Any], tuple[Tensor, tuple[Tensor, ...]]]


def moment(state_dtype: torch.dtype | None) -> Slot:
    """A slot of zeros in the param's shape, in `state_dtype` (None: the param's); raises ValueError for integers."""
    expect_floating("state_dtype", state_dtype)

    def zeros(name: str, p: Tensor) -> Tensor:
        # Of a tensor without data torch.zeros_like imports sympy, half a second before the first line of a plan.
        return p.new_zeros(p.shape, dtype=state_dtype) if p.is_meta else torch.zeros_like(p, dtype=state_dtype)

    return Slot(zeros, lambda name, spec: without_partial(spec))


def without_partial(spec: Spec) -> Spec:
    """The spec with no sum owed: state is made of gradients that are summed already."""
    return replace(spec, partial=frozenset())


def layer_dims(owner: str, stacked: str | None, name: str, dims: int) -> int:
    """How many leading dims of leaf `name` count layers: 1 if `stacked` is in it."""
    if stacked is None or re.search(stacked, name) is None:
        return 0
    if dims == 0:
        raise ValueError(
            f"{owner}: {name} has no dim to count layers, yet stacked={stacked!r} matches it; change `stacked`"
        )
    return 1


def flat_pieces(name: str, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Views of equal stretches of tensors of one shape: small pieces whatever the strides."""
    first = tensors[0]
    max_elements = _PIECE.get(kind_of(first), _PIECE_ELSEWHERE)
    if first.numel() <= max_elements:
        yield tensors
    elif all(t.is_contiguous() for t in tensors):
        yield from zip(*(t.view(-1).split(max_elements) for t in tensors))
    elif first.shape[0] == 1:
        yield from flat_pieces(name, [t[0] for t in tensors])
    else:
        for chunk in zip(*(t.split(max(1, max_elements * first.shape[0] // first.numel())) for t in tensors)):
            yield from flat_pieces(name, chunk)


def layer_pieces(
    stacked: str | None, parts: Callable[[str, Sequence[int]], int]
) -> Callable[[str, Sequence[Tensor]], Iterable[Sequence[Tensor]]]:
    """A function that cuts a leaf whose name `stacked` matches into views of one layer; others stay whole."""
    # parts: (name, dims) -> into how many parts they are cut, 1 if the leaf is whole. Of a leaf whose layers are in n
    # parts, n layers at a time, which take no more memory than one: so few collectives, and a layer for each of n
    # ranks.
    expect_regex("stacked", stacked)

    def pieces(name: str, tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
        dims = tensors[0].dim()
        if not layer_dims("layers", stacked, name, dims):
            return [tensors]
        layers = parts(name, range(1, dims))
        return zip(*(t.split(layers) for t in tensors))

    return pieces


def rows_of(grads: Tree, columns: Sequence[Tree], params: Tree) -> list[LeafRow]:
    """The leaves of the trees side by side; raises ValueError for unlike trees."""
    g = pytree.leaves(pytree.from_named(pytree.named_leaves(grads), params))
    slots = [pytree.leaves(pytree.from_named(pytree.named_leaves(c), params)) for c in columns]
    named = pytree.named_leaves(params)
    return [LeafRow(n, g[i], tuple(s[i] for s in slots), p) for i, (n, p) in enumerate(named.items())]


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest of the dtypes, at least float32."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def run_step(step: Step, g: Tensor, slots: Sequence[Tensor], p: Tensor, scalars: Sequence[Tensor], info: Any) -> tuple:
    """`step` in at least float32; new slots are rounded once, to their dtype."""
    dtype = wide_dtype(g, *slots, p)
    u, new = step(
        g.to(dtype), tuple(s.to(dtype) for s in slots), p.to(dtype), tuple(x.to(dtype) for x in scalars), info
    )
    return u, tuple(n.to(s.dtype) for n, s in zip(new, slots))


def leafwise(
    state_type: type,
    slots: Sequence[Slot],
    scalars: Callable[[Tensor], tuple[Tensor, ...]],
    step: Step,
    *,
    info: Callable[[str, Tensor], Any] = lambda name, p: None,
    pieces: Callable[[str, Sequence[Tensor]], Iterable[Sequence[Tensor]]] = flat_pieces,
    check: Callable[[Tree], None] = lambda params: None,
    vary: Callable[[str, Tensor], Tensor] = lambda name, x: x,
) -> GradientTransformation:
    """The transformation that does `step` on every leaf; its state is `state_type(count, a tree per slot, ...)`."""
    # scalars: (count of steps made before) -> float64 0-dim tensors that `step` is given, cast to the leaf's computing
    # dtype. info: (name, param) -> what `step` must know of the whole leaf, as it may see pieces. pieces: how a leaf
    # may be cut without changing what `step` computes. check: raises ValueError in `init`. vary: of ShardedLeaves, for
    # scalars: they are the same on all ranks, and each uses them with its shards.
    spare = ((),) * (len(state_type._fields) - 1 - len(slots))

    def init(params: Tree) -> Tree:
        check(params)
        leaves = pytree.leaves(params)
        count = torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
        for name, p in pytree.named_leaves(params).items():
            info(name, p)
        return state_type(count, *(pytree.map_named(slot.init, params) for slot in slots), *spare)

    def spec(specs: Tree) -> Tree:
        return state_type(Spec(), *(pytree.map_named(slot.spec, specs) for slot in slots), *spare)

    def update_on(vary: Any, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        rows, step_scalars = rows_of(grads, state[1 : 1 + len(slots)], params), scalars(state.count)
        done = [
            run_step(step, r.g, r.slots, r.p, [vary(r.name, x) for x in step_scalars], info(r.name, r.p)) for r in rows
        ]
        treedef = pytree.flatten(params)[1]
        columns = (pytree.unflatten([new[i] for _, new in done], treedef) for i in range(len(slots)))
        return pytree.unflatten([u for u, _ in done], treedef), state_type(state.count + 1, *columns, *spare)

    @torch.no_grad()
    def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        columns, step_scalars = state[1 : 1 + len(slots)], scalars(state.count)
        # A gradient that is read once, piece by piece, may share its memory with another one.
        rows = rows_of(grads if options.adds else distinct(grads), columns, params)
        leaves = []
        for name, g, leaf_slots, p in rows:
            out, details = p, info(name, p)
            if not options.adds:
                dtype = wide_dtype(g, *leaf_slots, p)
                out = g if g.dtype == dtype else torch.empty_like(g, dtype=dtype)
            leaves.append(out)
            for target, g_piece, p_piece, *old in pieces(name, (out, g, p, *leaf_slots)):
                u, new = run_step(step, g_piece, old, p_piece, step_scalars, details)
                target.add_(u) if options.adds else target.copy_(u)
                for slot, value in zip(old, new):
                    slot.copy_(value)
        leaf_tree = params if options.adds else pytree.unflatten(leaves, pytree.flatten(params)[1])
        return leaf_tree, state_type(state.count + 1, *columns, *spare)

    unit = "row" if pieces is flat_pieces else "layer"
    transformation = GradientTransformation(init, partial(update_on, vary), spec, unit=unit, in_place=in_place)
    return transformation._replace(
        with_shards=lambda shards: transformation._replace(update=partial(update_on, shards.vary))
    )
