"""The storage of an optimizer's moments, and the transformation that updates many leaves with one kernel.

A moment is kept in a float dtype, rounded to nearest; in bfloat16, rounded stochastically; or in 8 bits: codes with a
scale for each block of a row. Small leaves and vectors stay in float32 if the others have 8 bits: they are few, and
some are delicate."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.pytree import Tree
from fzero.core.torch_private import disable_current_modes
from fzero.kernels import optim_lowbit
from fzero.kernels.optim_leaf import Leaf, Rates, step_leaf
from fzero.kernels.registry import Op
from fzero.optim.base import GradientTransformation, Pass, Piece
from fzero.optim.leafwise import Slot, leafwise, moment, rows_of, without_partial
from fzero.optim.masks import Mask, check_mask, decay_predicate
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves
from fzero.sharding.slices import largest_block, shard_dim

SMALL = 4096  # elements of a whole leaf below which it is not kept in 8 bits (Dettmers et al. 2022, section 2.1)
ROUNDING = ("nearest", "stochastic")


class Storage(NamedTuple):
    """The dtype or codes of moments."""

    dtype: torch.dtype | None = None  # None: the param's
    bits: int | None = None  # 8, or None for dtype
    block: int = 256
    rounding: str = "nearest"
    seed: int = 0
    shards: ShardedLeaves = WHOLE


def storage(owner: str, dtype: torch.dtype | None, bits: int | None, block: int, rounding: str, seed: int) -> Storage:
    """The Storage of an optimizer's arguments; raises ValueError for options that do not go together."""
    if rounding not in ROUNDING:
        raise ValueError(f"{owner}: rounding is {rounding!r}; it must be {' or '.join(ROUNDING)}")
    if rounding == "stochastic" and dtype != torch.bfloat16:
        raise ValueError(
            f"{owner}: rounding is 'stochastic' and state_dtype is {dtype}; it is for torch.bfloat16 states"
        )
    if bits not in (None, 8):
        raise ValueError(f"{owner}: state_bits is {bits!r}; it must be 8, or None for states in state_dtype")
    if bits == 8 and dtype is not None:
        raise ValueError(f"{owner}: state_bits is 8 and state_dtype is {dtype}; give one of them")
    if not 16 <= block <= 4096 or block & (block - 1):
        raise ValueError(f"{owner}: block is {block!r}; it must be a power of two from 16 to 4096")
    return Storage(dtype, bits, block, rounding, seed)


@functools.lru_cache(maxsize=4096)
def _key(seed: int, name: str) -> tuple[int, int]:
    with disable_current_modes():  # a number, also if all tensors are fake
        low, high = prng.fold_in(prng.fold_in(prng.key(seed), "rounding"), name).tolist()
    return low, high


def _coded(kept: Storage, name: str, p: Tensor) -> bool:
    """Whether the moments of this leaf are in 8 bits."""
    whole = kept.shards.shape(name, tuple(p.shape))
    return torch.Size(whole).numel() >= SMALL and p.dim() > shard_dim(name) + 1


def check_leaves(owner: str, kept: Storage, names: Callable[[Tree], None], params: Tree) -> None:
    """Raise ValueError if `names` does, or if blocks of 8-bit moments would straddle shards of any of the leaves."""
    names(params)
    if kept.bits is None:
        return
    coded = {name: p for name, p in pytree.named_leaves(params).items() if _coded(kept, name, p)}
    cut = {n: p.shape[-1] for n, p in coded.items() if kept.shards.shape(n, tuple(p.shape))[-1] != p.shape[-1]}
    wrong = [name for name, size in cut.items() if size % kept.block]
    if wrong:
        fits = largest_block(cut.values(), 4096)
        raise ValueError(
            f"{owner}: rows of {wrong[0]} are cut into parts of {cut[wrong[0]]} elements, which blocks of {kept.block} "
            f"do not divide; use {f'block={fits}, or ' if fits else ''}state_bits=None (optim.states=bf16 of a run)"
        )


def _slots(kept: Storage, moments: int) -> list[Slot]:
    if kept.bits is None:
        return [moment(kept.dtype)] * moments

    def codes(name: str, p: Tensor) -> Tensor:
        wide = torch.promote_types(p.dtype, torch.float32)
        return torch.zeros_like(p, dtype=torch.uint8 if _coded(kept, name, p) else wide)

    def scales(name: str, p: Tensor) -> Tensor:
        blocks = optim_lowbit.blocks_of(p.shape[-1], kept.block) if _coded(kept, name, p) else 0
        return p.new_zeros((*p.shape[:-1], blocks), dtype=torch.float32)

    spec = lambda name, spec: without_partial(spec)  # noqa: E731
    return [Slot(codes, spec)] * moments + [Slot(scales, spec)] * moments


def with_kernel(
    owner: str,
    op: Op,
    step: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    state_types: tuple[type, type],
    moments: int,
    scalars: Callable[[Tensor], tuple[Tensor, ...]],
    *,
    kept: Storage,
    weight_decay: float,
    mask: Mask,
    impl: str,
    **numbers: Any,
) -> GradientTransformation:
    """The transformation of `step` on each leaf; its `apply` is one call of `op` for all leaves of the same dtypes.

    state_types: of (count, a tree per moment), and of (count, a tree of codes per moment, a tree of scales per moment).
    numbers: the rest of Rates.
    """
    if impl not in ("auto", "reference"):
        op.form(impl)
    decays, exact = decay_predicate(mask), kept.bits is None and kept.rounding == "nearest"
    state_type = state_types[0] if kept.bits is None else state_types[1]
    later: Any = None  # `leaves` puts the count there
    fixed = Rates((), later, block=kept.block, **numbers)

    def info(name: str, p: Tensor) -> float:
        return weight_decay if decays(name, p) else 0.0

    def leaves(grads: Tree, state: Tree, params: Tree, more: Pass) -> tuple[list[list[Leaf]], Rates]:
        """The leaves, each as the boxes of it that this rank has, and the rates."""
        found, copies = [], more.copies or {}
        for row in rows_of(grads, state[1:], params):
            leaf = Leaf(row.p, row.g, row.slots, info(row.name, row.p), copy=copies.get(row.name))
            found.append(_placed(kept, row.name, leaf, more.at) if kept.rounding == "stochastic" else [leaf])
        shared = {} if more.shared is None else more.shared
        if scalars not in shared:
            shared[scalars] = scalars(state.count)
        return found, fixed._replace(scalars=shared[scalars], count=state.count)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        found, rates = leaves(grads, state, params, Pass())
        done = [_joined([step_leaf(step, box, rates) for box in boxes]) for boxes in found]
        treedef = pytree.flatten(params)[1]
        columns = (pytree.unflatten([new[i] for _, new in done], treedef) for i in range(len(state) - 1))
        return pytree.unflatten([u for u, _ in done], treedef), state_type(state.count + 1, *columns)

    @torch.no_grad()
    def in_pass(grads: Tree, state: Tree, params: Tree, more: Pass) -> tuple[Tree, Tree]:
        found, rates = leaves(grads, state, params, more)
        rates = rates._replace(factor=more.factor, skip=more.skip)
        for group in alike([box for boxes in found for box in boxes]):
            on_host = more.host and impl == "auto" and not op.form("cpp").supports(group, rates)
            op(group, rates, impl="cpp" if on_host else impl)
        made = 1 if more.skip is None else 1 - more.skip.to(state.count.device, torch.int64)
        return params, state_type(state.count + made, *state[1:])

    def apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return in_pass(grads, state, params, Pass())

    def on(shards: ShardedLeaves) -> GradientTransformation:
        given = {"weight_decay": weight_decay, "mask": mask, "impl": impl, **numbers}
        return with_kernel(owner, op, step, state_types, moments, scalars, kept=kept._replace(shards=shards), **given)

    pure = leafwise(
        state_type,
        _slots(kept, moments),
        scalars,
        lambda g, slots, p, scalars, decay: step(g, slots, p, scalars, decay, fixed),
        info=info,
        needs="elementwise" if exact or kept.shards is not WHOLE else "matrix",
        check=partial(check_leaves, owner, kept, check_mask(owner, mask)),
        vary=kept.shards.vary,
    )
    # The scales of rows fill no whole pages of a disk.
    pure = pure._replace(apply=apply, in_pass=in_pass, unit="row" if kept.bits is None else "layer", on=on)
    return pure if exact else pure._replace(update=update, donate=None)


def _placed(kept: Storage, name: str, leaf: Leaf, at: Mapping[str, Piece] | None) -> list[Leaf]:
    """A leaf, or the piece `at` of it, in boxes whose elements have their places in the whole leaf: one, but where the
    layers of a rank do not follow one another."""
    shape = tuple(leaf.p.shape)
    shard, offset = at[name] if at else (shape, (0,) * len(shape))
    windows, whole = kept.shards.windows(name, shard)
    if len(windows) < 2:
        start = windows[0].start if windows else offset
        return [leaf._replace(place=_place(kept, name, shape, start, offset, whole))]
    found = []
    for window in windows:
        first, end = max(window.at, offset[0]), min(window.at + window.size[0], offset[0] + shape[0])
        if first < end:
            box = _narrow_rows(leaf, first - offset[0], end - first)
            inside = (first - window.at, *offset[1:])
            found.append(box._replace(place=_place(kept, name, tuple(box.p.shape), window.start, inside, whole)))
    return found


def _place(
    kept: Storage, name: str, shape: tuple[int, ...], start: Sequence[int], offset: Sequence[int], whole: Any
) -> optim_lowbit.Place:
    return optim_lowbit.make_place(_key(kept.seed, name), shape, tuple(map(operator.add, start, offset)), whole)


def _narrow_rows(leaf: Leaf, first: int, rows: int) -> Leaf:
    """The views of some rows of a leaf's tensors."""
    state = tuple(x.narrow(0, first, rows) for x in leaf.state)
    copy = None if leaf.copy is None else leaf.copy.narrow(0, first, rows)
    return leaf._replace(p=leaf.p.narrow(0, first, rows), g=leaf.g.narrow(0, first, rows), state=state, copy=copy)


def _joined(boxes: Sequence[tuple[Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(update, new state) of a leaf from those of its boxes."""
    if len(boxes) == 1:
        return boxes[0]
    return torch.cat([u for u, _ in boxes]), tuple(torch.cat(parts) for parts in zip(*(new for _, new in boxes)))


def alike(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """The leaves in groups of the same dtypes, device and way of rounding."""
    groups: dict[tuple, list[Leaf]] = {}
    for leaf in leaves:
        kinds = (leaf.p.device, leaf.place is None, *(x.dtype for x in (leaf.p, leaf.g, *leaf.state)))
        groups.setdefault(kinds, []).append(leaf)
    return list(groups.values())
