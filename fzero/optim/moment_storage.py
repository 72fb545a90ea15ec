"""The storage of an optimizer's moments, and the transformation that updates many leaves with one kernel.

A moment is in a float dtype, rounded to nearest; in bfloat16, rounded stochastically; or in 8 bits: codes with a scale
for each block of a row. Small leaves and vectors stay in float32 beside 8 bits: few, and some are delicate.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.config_tables import Allowed, one_of, power_of_two
from fzero.core.pytree import Tree
from fzero.core.torch_private import disable_current_modes
from fzero.kernels import optim_lowbit
from fzero.kernels.optim_leaf import OptimLeaf, StepRates, step_leaf
from fzero.kernels.registry import Op
from fzero.optim.base import GradientTransformation, Pass, ShardSlice, apply_in_place
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import Slot, leafwise, moment, rows_of, without_partial
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves
from fzero.sharding.slices import largest_block, shard_dim

SMALL = 4096  # elements of a whole leaf below which it is not kept in 8 bits (Dettmers et al. 2022, section 2.1)
Rounding = Annotated[str, one_of(("nearest", "stochastic"), "nearest or stochastic")]
Bits = Annotated[int | None, Allowed(lambda bits: bits == 8, "8, or None for states in state_dtype")]
Block = Annotated[int, power_of_two(16, 4096)]


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
    if rounding == "stochastic" and dtype != torch.bfloat16:
        raise ValueError(
            f"{owner}: rounding is 'stochastic' and state_dtype is {dtype}; it is for torch.bfloat16 states"
        )
    if bits == 8 and dtype is not None:
        raise ValueError(f"{owner}: state_bits is 8 and state_dtype is {dtype}; give one of them")
    return Storage(dtype, bits, block, rounding, seed)


@functools.lru_cache(maxsize=4096)
def _key(seed: int, name: str) -> tuple[int, int]:
    with disable_current_modes():  # a number, also if all tensors are fake
        low, high = prng.fold_in(prng.fold_in(prng.key(seed), "rounding"), name).tolist()
    return low, high


def _coded(encoding: Storage, name: str, p: Tensor) -> bool:
    """Whether the moments of this leaf are in 8 bits."""
    full_shape = encoding.shards.shape(name, tuple(p.shape))
    return torch.Size(full_shape).numel() >= SMALL and p.dim() > shard_dim(name) + 1


def check_leaves(owner: str, encoding: Storage, names: Callable[[Tree], None], params: Tree) -> None:
    """Raise ValueError if `names` does, or blocks of 8-bit moments straddle shards."""
    names(params)
    if encoding.bits is None:
        return
    coded = {name: p for name, p in pytree.named_leaves(params).items() if _coded(encoding, name, p)}
    cut = {n: p.shape[-1] for n, p in coded.items() if encoding.shards.shape(n, tuple(p.shape))[-1] != p.shape[-1]}
    wrong = [name for name, size in cut.items() if size % encoding.block]
    if wrong:
        fits = largest_block(cut.values(), 4096)
        raise ValueError(
            f"{owner}: rows of {wrong[0]} are cut into parts of {cut[wrong[0]]} elements, which blocks of "
            f"{encoding.block} do not divide; use {f'block={fits}, or ' if fits else ''}state_bits=None "
            "(optim.states=bf16 of a run)"
        )


def _slots(encoding: Storage, moments: int) -> list[Slot]:
    if encoding.bits is None:
        return [moment(encoding.dtype)] * moments

    def codes(name: str, p: Tensor) -> Tensor:
        wide = torch.promote_types(p.dtype, torch.float32)
        return torch.zeros_like(p, dtype=torch.uint8 if _coded(encoding, name, p) else wide)

    def scales(name: str, p: Tensor) -> Tensor:
        blocks = optim_lowbit.blocks_of(p.shape[-1], encoding.block) if _coded(encoding, name, p) else 0
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
    encoding: Storage,
    weight_decay: float,
    mask: Mask,
    impl: str,
    **numbers: Any,
) -> GradientTransformation:
    """The transformation of `step` on each leaf; `in_place` calls `op` once for all leaves of the same dtypes."""
    if impl not in ("auto", "reference"):
        op.form(impl)
    decays, exact = decay_predicate(mask), encoding.bits is None and encoding.rounding == "nearest"
    state_type, stochastic = state_types[encoding.bits is not None], encoding.rounding == "stochastic"
    pending_count: Any = None  # `leaves` puts the count there
    fixed = StepRates((), pending_count, block=encoding.block, **numbers)

    def info(name: str, p: Tensor) -> float:
        return weight_decay if decays(name, p) else 0.0

    def leaves(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[list[list[OptimLeaf]], StepRates]:
        """The leaves, each as the boxes of it that this rank has, and the rates."""
        leaf_boxes, copies = [], options.copies or {}
        for row in rows_of(grads, state[1:], params):
            leaf = OptimLeaf(row.p, row.g, row.slots, info(row.name, row.p), copy=copies.get(row.name))
            leaf_boxes.append(_leaf_boxes(encoding, row.name, leaf, options.slices) if stochastic else [leaf])
        shared = {} if options.shared is None else options.shared
        if scalars not in shared:
            shared[scalars] = scalars(state.count)
        return leaf_boxes, fixed._replace(scalars=shared[scalars], count=state.count)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        leaf_boxes, rates = leaves(grads, state, params, Pass())
        done = [_joined([step_leaf(step, box, rates) for box in boxes]) for boxes in leaf_boxes]
        treedef = pytree.flatten(params)[1]
        columns = (pytree.unflatten([new[i] for _, new in done], treedef) for i in range(len(state) - 1))
        return pytree.unflatten([u for u, _ in done], treedef), state_type(state.count + 1, *columns)

    @torch.no_grad()
    def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        if not options.adds:
            return apply_in_place(pure, grads, state, params, options) if exact else update(grads, state, params)
        leaf_boxes, rates = leaves(grads, state, params, options)
        rates = rates._replace(factor=options.factor, skip=options.skip)
        for group in alike([box for boxes in leaf_boxes for box in boxes]):
            on_host = options.host and impl == "auto" and not op.form("cpp").supports(group, rates)
            op(group, rates, impl="cpp" if on_host else impl)
        increment = 1 if options.skip is None else 1 - options.skip.to(state.count.device, torch.int64)
        return params, state_type(state.count + increment, *state[1:])

    def with_shards(shards: ShardedLeaves) -> GradientTransformation:
        on_shards = encoding._replace(shards=shards)
        arguments = {"weight_decay": weight_decay, "mask": mask, "impl": impl, **numbers}
        return with_kernel(owner, op, step, state_types, moments, scalars, encoding=on_shards, **arguments)

    pure = leafwise(
        state_type,
        _slots(encoding, moments),
        scalars,
        lambda g, slots, p, scalars, decay: step(g, slots, p, scalars, decay, fixed),
        info=info,
        check=partial(check_leaves, owner, encoding, check_mask(owner, mask)),
        vary=encoding.shards.vary,
    )
    unit = "row" if encoding.bits is None else "layer"  # the scales of rows fill no whole pages of a disk
    needs = "elementwise" if exact or encoding.shards is not WHOLE else "matrix"
    tx = pure._replace(needs=needs, unit=unit, in_place=in_place, one_pass=True, with_shards=with_shards)
    return tx if exact else tx._replace(update=update)


def _leaf_boxes(
    encoding: Storage, name: str, leaf: OptimLeaf, slices: Mapping[str, ShardSlice] | None
) -> list[OptimLeaf]:
    """A leaf, or the piece `slices` of it, in boxes whose elements have their indices in the whole leaf."""
    shape = tuple(leaf.p.shape)
    shard, offset = slices[name] if slices else (shape, (0,) * len(shape))
    windows, full_shape = encoding.shards.windows(name, shard)
    if len(windows) < 2:
        start = windows[0].start if windows else offset
        return [leaf._replace(position=_position(encoding, name, shape, start, offset, full_shape))]
    boxes = []
    for window in windows:
        first, end = max(window.offset, offset[0]), min(window.offset + window.size[0], offset[0] + shape[0])
        if first < end:
            box = _narrow_rows(leaf, first - offset[0], end - first)
            inside = (first - window.offset, *offset[1:])
            boxes.append(
                box._replace(position=_position(encoding, name, tuple(box.p.shape), window.start, inside, full_shape))
            )
    return boxes


def _position(
    encoding: Storage, name: str, shape: tuple[int, ...], start: Sequence[int], offset: Sequence[int], full_shape: Any
) -> optim_lowbit.LeafPosition:
    return optim_lowbit.make_position(
        _key(encoding.seed, name), shape, tuple(map(operator.add, start, offset)), full_shape
    )


def _narrow_rows(leaf: OptimLeaf, first: int, rows: int) -> OptimLeaf:
    """The views of some rows of a leaf's tensors."""
    state = tuple(x.narrow(0, first, rows) for x in leaf.state)
    copy = None if leaf.copy is None else leaf.copy.narrow(0, first, rows)
    return leaf._replace(p=leaf.p.narrow(0, first, rows), g=leaf.g.narrow(0, first, rows), state=state, copy=copy)


def _joined(boxes: Sequence[tuple[Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(update, new state) of a leaf from those of its boxes."""
    if len(boxes) == 1:
        return boxes[0]
    return torch.cat([u for u, _ in boxes]), tuple(torch.cat(parts) for parts in zip(*(new for _, new in boxes)))


def alike(leaves: Sequence[OptimLeaf]) -> list[list[OptimLeaf]]:
    """The leaves in groups of the same dtypes, device and way of rounding."""
    groups: dict[tuple, list[OptimLeaf]] = {}
    for leaf in leaves:
        kinds = (leaf.p.device, leaf.position is None, *(x.dtype for x in (leaf.p, leaf.g, *leaf.state)))
        groups.setdefault(kinds, []).append(leaf)
    return list(groups.values())
