"""An optimizer is a value: a pair of pure functions, the layout of its state, and one form that reuses buffers.

`chain` and `by_label` put such values together; `apply_updates` and `apply_in_place` end a step. The leaves of a state
have names before and after a transformation was put around it, by which units of them are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.config_tables import FLOAT32_LARGEST
from fzero.core.pytree import Tree
from fzero.sharding.slices import is_stacked, shard_dim

MemberLeaves = dict[tuple[str, str | None], str]  # {(kind, parameter or None): name of the leaf}


def groups_of(names: Iterable[str], params: Collection[str]) -> dict[str, MemberLeaves]:
    """{prefix: the leaves of one member of an optimizer} of the names of its state.

    >>> groups_of(["1/count", "1/m/w"], ["w"])
    {'1/': {('count', None): '1/count', ('m', 'w'): '1/m/w'}}
    """
    groups: dict[str, MemberLeaves] = {}
    names = list(names)
    owner = pytree.owners([f"/{name}" for name in names], params)
    for name in names:
        param = owner[f"/{name}"]
        path = name if param is None else name[: len(name) - len(param)].rstrip("/")
        prefix, _, kind = path.rpartition("/")
        groups.setdefault(f"{prefix}/" if prefix else "", {})[kind, param] = name
    return groups


def same_leaves(old_names: Iterable[str], new_names: Iterable[str], params: Collection[str]) -> dict[str, str]:
    """{leaf of the state `new_names`: the leaf of `old_names` with its values}; what is new is left out.

    >>> same_leaves(["count", "m/w"], ["inner/1/count", "inner/1/m/w", "average/w"], ["w"])
    {'inner/1/count': 'count', 'inner/1/m/w': 'm/w'}
    """
    old, new = groups_of(old_names, params), groups_of(new_names, params)
    pairs = {prefix: prefix for prefix in new if prefix in old and new[prefix].keys() == old[prefix].keys()}
    for prefix, group in new.items():
        if prefix in pairs:
            continue
        twins = [p for p in new if new[p].keys() == group.keys() and p not in pairs]
        fitting = [p for p in old if old[p].keys() == group.keys() and p not in pairs.values()]
        if fitting and len(twins) != len(fitting):
            raise ValueError(
                f"the optimizer's state has {len(fitting)} members with the leaves of {fitting[0] or 'the first'} and "
                f"the new one's {len(twins)}; change one of them at a time"
            )
        pairs |= zip(twins, fitting)
    for prefix, group in new.items():
        free = [p for p in old if p not in pairs.values()]
        moments = lambda p, g=group: sum(key[1] is not None for key in old[p].keys() & g.keys())  # noqa: E731
        best = max(free, key=moments, default="")
        if prefix not in pairs and free and moments(best):
            pairs[prefix] = best
    return {
        name: old[pairs[prefix]][key]
        for prefix, group in new.items()
        if prefix in pairs
        for key, name in group.items()
        if key in old[pairs[prefix]]
    }


def columns_of(state: Tree, params: list[str]) -> tuple[dict[str, Any], dict[str, str | None]]:
    """({name: leaf of an optimizer's state}, {name: its parameter, None for a leaf of none})."""
    columns = pytree.named_leaves(state)
    # Names of the state's leaves have no path prefix if the state is itself a parameter tree.
    owner = pytree.owners([f"/{name}" for name in columns], params)
    return columns, {name.removeprefix("/"): param for name, param in owner.items()}


def is_layered(name: str, shape: Sequence[int], column: Sequence[int]) -> bool:
    """Whether a leaf of a state has layers as its parameter has."""
    return is_stacked(name) and len(shape) > 0 and tuple(column[:1]) == tuple(shape[:1])


def smallest_unit(name: str, shape: Sequence[int], columns: Iterable[Sequence[int]], unit: str) -> str:
    """The smallest part of a parameter that is updated apart from the rest: "row", "layer" or "leaf"."""
    # Where a column has no layers (a number for a whole stack), all of them are updated at once; where one has other
    # rows (a number for each layer, or each row, which lie otherwise in pages), all rows of a layer.
    lead, columns = shard_dim(name), [tuple(column) for column in columns]
    if lead and not all(is_layered(name, shape, column) for column in columns):
        return "leaf"
    return "row" if unit == "row" and all(column[lead:] == tuple(shape[lead:]) for column in columns) else "layer"


@torch.no_grad()
def select_state(names: Tree, owner: Mapping[str, str | None], parameters: Container[str | None]) -> Tree:
    """The part of a state that some parameters have: their columns and what is of no parameter."""
    trees = {column.removesuffix(param).removesuffix("/") for column, param in owner.items() if param is not None}
    return pytree.prune(names, lambda column: owner[column] is None or owner[column] in parameters, trees)


def add_in_units(
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree] | None:
    """(params, state) after `update`, in their buffers, one layer at a time; None where leaves cannot be told apart."""
    leaves, g_of = pytree.named_leaves(params), pytree.named_leaves(grads)
    columns, owner = columns_of(state, list(leaves))
    shared = [name for name, param in owner.items() if param is None]
    if not leaves:
        return None  # what is of no parameter moves all the same
    if any(columns[name].dim() for name in shared) or (shared and not all(p.dim() for p in leaves.values())):
        return None
    names = pytree.map_named(lambda name, _: name, params), pytree.map_named(lambda name, _: name, state)
    parts = {}
    for leaf in leaves:
        like = pytree.prune(names[0], lambda name, leaf=leaf: name == leaf)
        state_names = select_state(names[1], owner, (leaf,))
        if pytree.leaves(like) != [leaf] or any(owner[name] not in (None, leaf) for name in pytree.leaves(state_names)):
            return None  # a tuple of leaves, of which none can be left out
        parts[leaf] = like, state_names
    new_shared: dict[str, Tensor] = {}
    for leaf, (like, state_names) in parts.items():
        leaf_columns = [columns[name] for name in pytree.leaves(state_names) if owner[name] is not None]
        p, layers = leaves[leaf], 0
        if (
            is_stacked(leaf)
            and p.dim()
            and smallest_unit(leaf, p.shape, [x.shape for x in leaf_columns], "layer") == "layer"
        ):
            layers = p.shape[0]
        for layer in range(layers) if layers else [None]:

            def cut(x: Tensor, layer: int | None = layer) -> Tensor:
                return x if layer is None else x[layer : layer + 1]

            def unit_column(name: str, cut: Callable[[Tensor], Tensor] = cut) -> Tensor:
                return columns[name] if owner[name] is None else cut(columns[name])

            unit_inputs = pytree.from_named({leaf: cut(g_of[leaf])}, like), pytree.map(unit_column, state_names)
            updates, new = update(*unit_inputs, pytree.from_named({leaf: cut(p)}, like))
            cut(p).add_(pytree.leaves(updates)[0])
            for name, value in zip(pytree.leaves(state_names), pytree.leaves(new)):
                if owner[name] is None:
                    new_shared[name] = value
                else:
                    unit_column(name).copy_(value)
    return params, pytree.map_named(lambda name, x: new_shared.get(name, x), state)


Schedule = Callable[[Tensor | int], Tensor]


class NumberIn(NamedTuple):
    """The rule of a number in [low, high); a scalar tensor passes, and so does a schedule."""

    low: float = 0.0
    high: float = FLOAT32_LARGEST

    def check(self, label: str, value: Any) -> None:
        """Raise ValueError naming the argument and its value unless it may have it."""
        if isinstance(value, Tensor):
            if value.dim():
                raise ValueError(f"{label} has shape {list(value.shape)}; it must be a number, or a scalar")
        elif value is not None and not callable(value) and not self.low <= value < self.high:
            raise ValueError(f"{label} is {value!r}; it must be a number in [{self.low:g}, {self.high:g})")


LearningRate = Annotated[float | Tensor | Schedule, NumberIn()]
NotNegative = Annotated[float, NumberIn()]
Beta = Annotated[float, NumberIn(high=1.0)]  # of a mean over steps

# What a transformation must see whole, weakest first: nothing, a row (last dim), a leaf (but for its stacked leading
# dim), every leaf.
NEEDS = ("elementwise", "row", "matrix", "tree")
UNITS = ("row", "layer", "tree")


class Pass(NamedTuple):
    """How `in_place` makes an update, and what it does beside it in the same pass over memory.

    A transformation with `one_pass` takes factor, skip, copies and norm; all of them take the others.

    >>> tx, params = adamw(0.1), {"w": torch.tensor([1.0])}
    >>> more = Pass(skip=torch.tensor(True))  # such as: a gradient was not finite
    >>> params, state = tx.in_place({"w": torch.tensor([2.0])}, tx.init(params), params, more)
    >>> params["w"], state.count
    (tensor([1.]), tensor(0))
    """

    factor: Tensor | None = None  # 0-dim, of every gradient
    skip: Tensor | None = None  # bool 0-dim: if true nothing changes; the host does not wait for it
    copies: Mapping[str, Tensor] | None = None  # by leaf name: is given the updated param in its own dtype
    norm: Tensor | None = None  # of all gradients, if known
    slices: Mapping[str, ShardSlice] | None = None  # by leaf name: where these tensors lie in this rank's shard
    host: bool = False  # whether "auto" may choose the form for states on the host
    # What the passes of one update share: a transformation leaves there what it makes of the count alone.
    shared: dict[Any, Any] | None = None
    adds: bool = True  # to the params; else the updates are returned in their place, in the buffers of the gradients

    @property
    def fuses(self) -> bool:
        """Whether it asks for what takes `one_pass`."""
        return self.host or any(x is not None for x in (self.factor, self.skip, self.copies))

    def finish(self, params: Tree, updates: Tree) -> Tree:
        """What an `in_place` returns in place of params that are not changed yet."""
        return pytree.map(lambda p, u: p.add_(u), params, updates) if self.adds else updates


PLAIN = Pass()


class ShardSlice(NamedTuple):
    """A part of a shard."""

    shape: tuple[int, ...]  # of the shard
    start: tuple[int, ...]  # of the part, in each dim


class RankSums(NamedTuple):
    """The sums over data ranks that an optimizer makes itself."""

    makes: bool = False  # whether it makes them, as a plan with codec "grads=1bit" leaves them to it
    # Of one whose ranks move apart between two sums, `local(state, params) -> params`: where this rank's next gradient
    # is taken; None in place of params where they are. `params` of a state are the same on all ranks.
    local: Callable[[Tree, Tree], Tree | None] | None = None
    # Of such a one, `sync(state, params) -> (updates, state)`: what ranks moved since their last sum is summed, in the
    # state's buffers; None in place of both where they are together.
    sync: Callable[[Tree, Tree], tuple[Tree, Tree] | None] | None = None


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turn gradients into updates, the layout of their state, and a faster form of them.

    Gradients, state and parameters are trees of tensors; a state is `()` if there is none.
    init: `init(params) -> state`.
    update: `update(grads, state, params) -> (updates, state)` is pure; updates are added to params, so they carry the
        sign. It composes with torch.func (vmap over states, params or learning rates; grad through it).
    spec: `spec(param_specs) -> state_specs` has the structure of `init(params)`; each Spec names every dim of its leaf,
        or none (replicated).
    needs: what it must see whole: "elementwise" (nothing), "row" (the last dim), "matrix" (a leaf, but for the leading
        dim that counts layers) or "tree" (every leaf).
    unit: the smallest part of a leaf that may be updated apart from the rest, with the same bits: a "row" of a layer, a
        "layer", or the whole "tree"; an offloaded state is updated by such units.
    in_place: `in_place(grads, state, params, Pass) -> (params, state)` is `update` and the addition as a Pass says; it
        may overwrite all three trees.
    one_pass: whether `in_place` also scales, skips and copies as a Pass says.
    factor: if it only rescales: `factor(grads, so_far, norm) -> number` is the scale of raw gradients,
        including the accumulated `so_far` (None: 1). `norm`, if given, is theirs, and `grads` is not read.
    split: `split() -> SplitChain`, for one that has leading rescalings: a chain, or what is around one.
    sums: the sums over data ranks that it makes itself (a RankSums).
    with_shards: `with_shards(shards) -> GradientTransformation` is the same transformation on leaves that are cut as
        `shards` says (a ShardedLeaves); None if it is elementwise. A train step binds its optimizer to its plan this
        way, and `bind` does it by hand.

    Only the first three are needed to write one. Where its state has the names of the parameters (as a tree of moments
    made by `pytree.map`), `update` is then called with one leaf, or a layer of it, at a time, and its result added in
    place; an offloaded state is streamed through it. Those of its leaves that belong to a stack may have the layers as
    their first dim; if one has not (a number for all of the stack), the stack is updated as a whole.

    >>> half = GradientTransformation(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: ({name: -0.5 * g for name, g in grads.items()}, state),
    ...     spec=lambda specs: (),
    ... )
    >>> apply_in_place(half, {"w": torch.tensor([4.0])}, (), {"w": torch.tensor([5.0])})
    ({'w': tensor([3.])}, ())
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    spec: Callable[[Tree], Tree]
    needs: str = "elementwise"
    unit: str = "layer"
    in_place: Callable[[Tree, Tree, Tree, Pass], tuple[Tree, Tree]] | None = None
    one_pass: bool = False
    factor: Callable[..., Tensor] | None = None
    split: Callable[[], Any] | None = None
    sums: RankSums = RankSums()
    with_shards: Callable[[Any], GradientTransformation] | None = None


def expect_optimizer(tx: Any, name: str = "the optimizer") -> None:
    """Raise TypeError for what is no GradientTransformation, with what to write instead."""
    if isinstance(tx, GradientTransformation):
        return
    if isinstance(tx, torch.optim.Optimizer):
        kind, write = f"a torch optimizer ({type(tx).__name__})", "optim.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)"
    elif hasattr(tx, "init") and hasattr(tx, "update"):
        kind, write = f"a {type(tx).__name__}", "optim.GradientTransformation(tx.init, tx.update, spec)"
    elif callable(tx):
        kind, write = "a function", f"optim.{getattr(tx, '__name__', 'adamw')}(1e-3), its result"
    else:
        kind, write = f"a {type(tx).__name__}", "one of fzero.optim, such as optim.adamw(1e-3)"
    raise TypeError(f"{name} is {kind}; write {write}")


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return `params + updates`, each leaf in its param's dtype (the sum is rounded once).

    Raises ValueError if the two trees differ in structure.

    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([-0.25, 0.5])})
    {'w': tensor([0.7500, 2.5000])}
    """
    return pytree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


@torch.no_grad()
def apply_in_place(
    tx: GradientTransformation, grads: Tree, state: Tree, params: Tree, options: Pass = PLAIN
) -> tuple[Tree, Tree]:
    """Return `(params, state)` after one step of `tx`, overwriting the buffers of all three trees.

    It calls `tx.in_place` if there is one, else `tx.update`, one leaf or layer at a time where `tx.unit` and the names
    in its state allow it.

    >>> tx, params = sgd(0.5), {"w": torch.tensor([1.0, 2.0])}
    >>> new, state = apply_in_place(tx, {"w": torch.ones(2)}, tx.init(params), params)
    >>> new["w"], new["w"] is params["w"]
    (tensor([0.5000, 1.5000]), True)
    """
    if tx.in_place is not None:
        return tx.in_place(grads, state, params, options)
    if options.adds and "tree" not in (tx.unit, tx.needs):
        # A state may begin with one tensor for two leaves, or with the parameters themselves.
        done = add_in_units(tx.update, grads, distinct((params, state))[1], params)
        if done is not None:
            return done
    updates, state = tx.update(grads, state, params)
    return options.finish(params, updates), state


@torch.no_grad()
def overwrite(change: Callable[..., Tensor], names: Tree, grads: Tree, *trees: Tree) -> Tree:
    """A tree of `change(name, g, *leaves of trees)`, where `change` may write into `g`."""
    return pytree.map(change, names, distinct(grads), *trees)


def distinct(grads: Tree) -> Tree:
    """The gradients, each in memory of its own: those that share it are copied."""
    # A gradient may be one element expanded, or the very buffer of another leaf's gradient (autograd gives the terms of
    # a sum one tensor): such a leaf is copied, before anything is written.
    buffers: set[tuple[int, int | torch.SymInt]] = set()

    def unshare(g: Any) -> Any:
        if not isinstance(g, Tensor):
            return g
        buffer = (g.untyped_storage()._cdata, g.storage_offset())
        shared = buffer in buffers or any(stride == 0 and size > 1 for stride, size in zip(g.stride(), g.shape))
        buffers.add(buffer)
        return g.clone(memory_format=torch.contiguous_format) if shared else g

    return pytree.map(unshare, grads)


def stateless(
    update: Callable, donate: Callable, check: Callable = lambda params: None, unit: str = "row"
) -> GradientTransformation:
    """The transformation of `update(grads, params)`; `donate` is the same in the buffers of the gradients."""

    def init(params: Tree) -> tuple:
        check(params)
        return ()

    def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        return options.finish(params, donate(grads, params)), ()

    return GradientTransformation(
        init=init,
        update=lambda grads, state, params: (update(grads, params), ()),
        spec=lambda specs: (),
        unit=unit,
        in_place=in_place,
    )


def name_tree(tree: Tree) -> Tree:
    """The tree whose leaves are the names of the leaves of `tree`."""
    return pytree.map_named(lambda name, leaf: name, tree)


def lr_at(lr: float | Tensor | Schedule, count: Tensor) -> Tensor:
    """The learning rate, float64 0-dim, of the step before which `count` steps were made (0 for the first)."""
    if callable(lr):
        value: Any = lr(count)
        if isinstance(value, (int, float)):  # a schedule of one's own
            return torch.full((), value, dtype=torch.float64, device=count.device)
        if not isinstance(value, Tensor) or value.dim():
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"the schedule of the learning rate returned {got}; return a number, or a scalar tensor")
        return value.to(count.device, torch.float64)
    if isinstance(lr, Tensor):
        return lr.to(count.device, torch.float64)
    return torch.full((), lr, dtype=torch.float64, device=count.device)


LR_SCALE = "lr_scale"  # the name of the factor in a state
AVERAGE = "opt_state/average/"  # the names of averaged weights in a state begin so


class AverageState(NamedTuple):
    """The state of `with_average`.

    >>> from fzero import optim
    >>> state = optim.with_average(optim.sgd(0.1), 0.9).init({"w": torch.ones(2)})
    >>> state.inner.count, state.average["w"]
    (tensor(0), tensor([1., 1.]))
    """

    inner: Tree  # the optimizer's own state
    average: Tree  # in the structure, layout and dtypes of the params that the optimizer updates


RATIOS = (0.01, 10.0)  # the smallest and the largest ratio of norms
