"""From the update of one leaf to a whole GradientTransformation.

An optimizer states its equation once, for one leaf, out of place. The pure `update` and the forms that reuse buffers
follow: they walk over pieces of a leaf (flat stretches or layers), so that temporaries have the size of a piece.

The storage of an optimizer's moments, and the transformation that updates many leaves with one kernel.

A moment is in a float dtype, rounded to nearest; in bfloat16, rounded stochastically; or in 8 bits: codes with a scale
for each block of a row. Small leaves and vectors stay in float32 beside 8 bits: few, and some are delicate.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.arguments import expect_floating, expect_regex
from fzero.core.config_tables import Allowed, one_of, power_of_two
from fzero.core.device import kind_of
from fzero.core.pytree import Tree
from fzero.core.torch_private import disable_current_modes
from fzero.kernels import optim_lowbit
from fzero.kernels.optim_leaf import PIECE as _PIECE
from fzero.kernels.optim_leaf import PIECE_ELSEWHERE as _PIECE_ELSEWHERE
from fzero.kernels.optim_leaf import OptimLeaf, StepRates, step_leaf
from fzero.kernels.registry import Op
from fzero.optim.base import GradientTransformation, Pass, ShardSlice, apply_in_place, distinct
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves
from fzero.sharding.slices import largest_block, shard_dim
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
