"""An optimizer is a value: a pair of pure functions, the layout of its state, and an optional form that reuses buffers.

`chain` and `by_label` put such values together; `apply_updates` and `apply_in_place` end a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree, nearest
from fzero.sharding.rules import Rules, match_rules

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


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """The transformation that feeds each one's updates to the next; its state is the tuple of theirs.

    Its `needs` is the strongest of its parts. Its `apply` donates through all but the last and applies the last. It has an
    `in_pass` where the last has one, and the others, of which there is one at most, only multiply by a factor.
    Raises ValueError without a transformation, and in a step when the state is of another chain.

    >>> tx = chain(clip_by_global_norm(1.0), adamw(3e-4))
    """
    if not txs or not all(isinstance(tx, GradientTransformation) for tx in txs):
        raise ValueError(f"chain: takes one GradientTransformation or more, as in chain(clip, adamw); got {txs!r}")

    def check(state: Tree) -> None:
        if not isinstance(state, (tuple, list)) or len(state) != len(txs):
            raise ValueError(f"chain: the state is not a tuple of {len(txs)} states; take it from this chain's init")

    def run(step: Callable, txs: tuple, grads: Tree, states: Tree, params: Tree) -> tuple[Tree, list]:
        new = []
        for tx, state in zip(txs, states):
            grads, state = step(tx)(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        check(state)
        updates, new = run(lambda tx: tx.update, txs, grads, state, params)
        return updates, tuple(new)

    def donate(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        check(state)
        updates, new = run(lambda tx: tx.donate or tx.update, txs, grads, state, params)
        return updates, tuple(new)

    @torch.no_grad()
    def apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        check(state)
        updates, new = run(lambda tx: tx.donate or tx.update, txs[:-1], grads, state[:-1], params)
        params, last = apply_in_place(txs[-1], updates, state[-1], params)
        return params, (*new, last)

    def in_pass(grads: Tree, state: Tree, params: Tree, more: Pass) -> tuple[Tree, Tree]:
        check(state)
        if len(txs) == 2:
            more = more._replace(factor=txs[0].factor(grads, more.factor, more.norm))
        params, last = txs[-1].in_pass(grads, state[-1], params, more)
        return params, (*state[:-1], last)

    one_pass = txs[-1].in_pass is not None and len(txs) <= 2 and all(tx.factor is not None for tx in txs[:-1])
    return GradientTransformation(
        init=lambda params: tuple(tx.init(params) for tx in txs),
        update=update,
        spec=lambda specs: tuple(tx.spec(specs) for tx in txs),
        needs=max((tx.needs for tx in txs), key=NEEDS.index),
        donate=donate,
        apply=apply,
        in_pass=in_pass if one_pass else None,
        members=txs,
        unit=max((tx.unit for tx in txs), key=UNITS.index),
    )


class Parted(NamedTuple):
    """A transformation as factors of all gradients, which need their norm, and a body that may be run on some leaves at a time."""

    heads: tuple[GradientTransformation, ...]
    body: GradientTransformation

    def factor(self, so_far: Tensor, norm: Tensor) -> Tensor:
        """That by which the body's gradients are multiplied, where `norm` is that of the gradients."""
        for head in self.heads:
            so_far = head.factor(None, so_far, norm)
        return so_far

    def state(self, state: Tree) -> Tree:
        """The body's part of a state."""
        return self._body_of(state) if self.heads else state

    def _body_of(self, state: Tree) -> Tree:
        rest = state[len(self.heads) :]
        return rest if len(rest) > 1 else rest[0]

    def whole(self, state: Tree, body: Tree) -> Tree:
        """The state with that of the body in its place."""
        if not self.heads:
            return body
        return (*state[: len(self.heads)], *(body if len(state) - len(self.heads) > 1 else (body,)))


def parted(tx: GradientTransformation) -> Parted:
    """The parts of `tx`: the leading members of a chain that only multiply by a factor, and the rest."""
    count = 0
    while count < len(tx.members) - 1 and tx.members[count].factor is not None:
        count += 1
    if not count:
        return Parted((), tx)
    rest = tx.members[count:]
    return Parted(tx.members[:count], rest[0] if len(rest) == 1 else chain(*rest))


def by_label(transforms: Mapping[str, GradientTransformation], rules: Rules[str]) -> GradientTransformation:
    """The transformation that gives each leaf to the one labelled by the first rule `(regex, label)` found in its name.

    A transformation sees its leaves as a flat dict {leaf name: leaf}; the state is {label: its state}.
    Raises ValueError for a label without a transformation, a transformation without a rule or without a leaf, a leaf
    that no rule matches and a rule that is the first match of no leaf.

    >>> tx = by_label({"muon": muon(0.02), "adamw": adamw(3e-4)}, ((r"^blocks/.*/w_", "muon"), (".*", "adamw")))
    """
    transforms = dict(transforms)
    for pattern, label in rules:
        if label not in transforms:
            raise ValueError(
                f"by_label: rule {pattern!r} gives label {label!r}, which has no "
                f"transformation{nearest(label, transforms)}; the labels are {', '.join(transforms)}"
            )
    for label in transforms:
        if label not in [given for _, given in rules]:
            raise ValueError(f"by_label: transformation {label!r} has no leaf: no rule gives its label; add a rule or remove it")

    def parts(tree: Tree, partial: bool = True) -> dict[str, dict[str, Any]]:
        named = pytree.named_leaves(tree)
        labels = match_rules(rules, list(named), what="by_label", partial=partial)
        split: dict[str, dict[str, Any]] = {label: {} for label in transforms}
        for name, leaf in named.items():
            split[labels[name]][name] = leaf
        return split

    def whole(split: dict[str, dict[str, Any]], like: Tree) -> Tree:
        return pytree.from_named({name: leaf for part in split.values() for name, leaf in part.items()}, like)

    def run(step: Callable, grads: Tree, state: Tree, params: Tree, *more: Pass) -> tuple[Tree, Tree]:
        grad_parts, param_parts, out, new = parts(grads), parts(params), {}, {}
        for label, tx in transforms.items():
            out[label], new[label] = step(tx)(grad_parts[label], state[label], param_parts[label], *more)
        return whole(out, params), new

    return GradientTransformation(
        init=lambda params: {label: transforms[label].init(part) for label, part in parts(params, partial=False).items()},
        update=lambda *step: run(lambda tx: tx.update, *step),
        spec=lambda specs: {label: transforms[label].spec(part) for label, part in parts(specs, partial=False).items()},
        needs=max((tx.needs for tx in transforms.values()), key=NEEDS.index),
        donate=lambda *step: run(lambda tx: tx.donate or tx.update, *step),
        apply=lambda *step: run(lambda tx: lambda g, s, p: apply_in_place(tx, g, s, p), *step),
        in_pass=(lambda *step: run(lambda tx: tx.in_pass, *step)) if all(tx.in_pass for tx in transforms.values()) else None,
        unit=max((tx.unit for tx in transforms.values()), key=UNITS.index),
    )
