"""Transformations put together: one after the other (`chain`), or each on its own leaves (`by_label`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree, nearest
from fzero.optim.base import (
    NEEDS,
    UNITS,
    GradientTransformation,
    Pass,
    apply_in_place,
)
from fzero.optim.sharded_leaves import ShardedLeaves, bind
from fzero.sharding.rules import Rules, match_rules


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
        on=(lambda shards: chain(*(bind(tx, shards) for tx in txs))) if any(tx.on for tx in txs) else None,
    )


class SplitChain(NamedTuple):
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


def split_chain(tx: GradientTransformation) -> SplitChain:
    """The parts of `tx`: the leading members of a chain that only multiply by a factor, and the rest."""
    count = 0
    while count < len(tx.members) - 1 and tx.members[count].factor is not None:
        count += 1
    if not count:
        return SplitChain((), tx)
    rest = tx.members[count:]
    return SplitChain(tx.members[:count], rest[0] if len(rest) == 1 else chain(*rest))


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

    def on(shards: ShardedLeaves) -> GradientTransformation:
        return by_label({label: bind(tx, shards) for label, tx in transforms.items()}, rules)

    return GradientTransformation(
        init=lambda params: {label: transforms[label].init(part) for label, part in parts(params, partial=False).items()},
        update=lambda *step: run(lambda tx: tx.update, *step),
        spec=lambda specs: {label: transforms[label].spec(part) for label, part in parts(specs, partial=False).items()},
        needs=max((tx.needs for tx in transforms.values()), key=NEEDS.index),
        donate=lambda *step: run(lambda tx: tx.donate or tx.update, *step),
        apply=lambda *step: run(lambda tx: lambda g, s, p: apply_in_place(tx, g, s, p), *step),
        in_pass=(lambda *step: run(lambda tx: tx.in_pass, *step)) if all(tx.in_pass for tx in transforms.values()) else None,
        unit=max((tx.unit for tx in transforms.values()), key=UNITS.index),
        on=on if any(tx.on for tx in transforms.values()) else None,
    )
