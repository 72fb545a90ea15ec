"""Transformations put together: one after the other (`chain`), or each on its own leaves (`by_label`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree, nearest
from fzero.optim.base import (
    NEEDS,
    UNITS,
    GradientTransformation,
    Pass,
    apply_in_place,
    expect_optimizer,
)
from fzero.optim.sharded_leaves import ShardedLeaves, bind
from fzero.sharding.spec import Rules, match_rules


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """The transformation that feeds each one's updates to the next; its state is the tuple of theirs.

    Its `needs` is the strongest of its parts. Its `apply` donates through all but the last and applies the last. It has
    an `in_pass` if the last has one and at most one other precedes it, which only multiplies by a factor.
    Raises ValueError without a transformation, and in a step when the state is of another chain.

    >>> tx = chain(clip_by_global_norm(1.0), adamw(3e-4))
    """
    takes = "chain: takes one GradientTransformation or more, as in chain(clip, adamw)"
    if not txs:
        raise ValueError(f"{takes}; got none")
    for number, tx in enumerate(txs):
        try:
            expect_optimizer(tx, f"argument {number}")
        except TypeError as error:
            raise ValueError(f"{takes}; {error}") from None

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

    def in_pass(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        check(state)
        last_tx = txs[-1].in_pass
        assert last_tx is not None  # see `one_pass`
        if len(txs) == 2:
            assert txs[0].factor is not None
            options = options._replace(factor=txs[0].factor(grads, options.factor, options.norm))
        params, last = last_tx(grads, state[-1], params, options)
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
        with_shards=(lambda shards: chain(*(bind(tx, shards) for tx in txs)))
        if any(tx.with_shards for tx in txs)
        else None,
    )


class SplitChain(NamedTuple):
    """A chain split into leading rescalings (such as clipping), which need the global norm, and a body that can update
    leaves separately."""

    heads: tuple[GradientTransformation, ...]
    body: GradientTransformation
    state: Callable[[Tree], Tree] = lambda state: state  # the body's part of a state
    merge: Callable[[Tree, Tree], Tree] = lambda state, body: body  # (state, the body's) -> the state with it

    def factor(self, so_far: Tensor, norm: Tensor) -> Tensor:
        """The factor of the body's gradients, if `norm` is the norm of all gradients and `so_far` their factor."""
        for head in self.heads:
            assert head.factor is not None  # what makes it a head
            so_far = head.factor(None, so_far, norm)
        return so_far


def split_chain(tx: GradientTransformation) -> SplitChain:
    """The parts of `tx`: the leading members of a chain that only multiply by a factor, and the rest."""
    if tx.split is not None:
        return tx.split()
    n = 0
    while n < len(tx.members) - 1 and tx.members[n].factor is not None:
        n += 1
    if not n:
        return SplitChain((), tx)
    if len(tx.members) == n + 1:
        return SplitChain(tx.members[:n], tx.members[n], lambda s: s[n], lambda s, body: (*s[:n], body))
    return SplitChain(tx.members[:n], chain(*tx.members[n:]), lambda s: s[n:], lambda s, body: (*s[:n], *body))


@checked("transforms")
def by_label(transforms: Mapping[str, GradientTransformation], rules: Rules[str]) -> GradientTransformation:
    """The transformation that gives each leaf to the one labelled by the first rule `(regex, label)` found in its name.

    A transformation sees its leaves as a flat dict {leaf name: leaf}; the state is {label: its state}.
    Raises ValueError for a label without a transformation, a transformation without a rule or without a leaf, a leaf
    that no rule matches and a rule that is the first match of no leaf.

    >>> tx = by_label({"muon": muon(0.02), "adamw": adamw(3e-4)}, ((r"^blocks/.*/w_", "muon"), (".*", "adamw")))
    """
    transforms = dict(transforms)
    for label, tx in transforms.items():
        expect_optimizer(tx, f"by_label: transformation {label!r}")
    for pattern, label in rules:
        if label not in transforms:
            raise ValueError(
                f"by_label: rule {pattern!r} gives label {label!r}, which has no "
                f"transformation{nearest(label, transforms)}; the labels are {', '.join(transforms)}"
            )
    for label in transforms:
        if label not in [rule_label for _, rule_label in rules]:
            raise ValueError(
                f"by_label: transformation {label!r} has no leaf: no rule gives its label; add a rule or remove it"
            )

    def split_leaves(tree: Tree, partial: bool = True) -> dict[str, dict[str, Any]]:
        named = pytree.named_leaves(tree)
        labels = match_rules(rules, list(named), subject="by_label", partial=partial)
        split: dict[str, dict[str, Any]] = {label: {} for label in transforms}
        for name, leaf in named.items():
            split[labels[name]][name] = leaf
        return split

    def merge(split: dict[str, dict[str, Any]], like: Tree) -> Tree:
        return pytree.from_named({name: leaf for subtree in split.values() for name, leaf in subtree.items()}, like)

    def run(step: Callable, grads: Tree, state: Tree, params: Tree, *options: Pass) -> tuple[Tree, Tree]:
        grad_parts, param_parts, out, new = split_leaves(grads), split_leaves(params), {}, {}
        for label, tx in transforms.items():
            out[label], new[label] = step(tx)(grad_parts[label], state[label], param_parts[label], *options)
        return merge(out, params), new

    def with_shards(shards: ShardedLeaves) -> GradientTransformation:
        return by_label({label: bind(tx, shards) for label, tx in transforms.items()}, rules)

    return GradientTransformation(
        init=lambda params: {
            label: transforms[label].init(subtree) for label, subtree in split_leaves(params, partial=False).items()
        },
        update=lambda *step: run(lambda tx: tx.update, *step),
        spec=lambda specs: {
            label: transforms[label].spec(subtree) for label, subtree in split_leaves(specs, partial=False).items()
        },
        needs=max((tx.needs for tx in transforms.values()), key=NEEDS.index),
        donate=lambda *step: run(lambda tx: tx.donate or tx.update, *step),
        apply=lambda *step: run(lambda tx: lambda g, s, p: apply_in_place(tx, g, s, p), *step),
        in_pass=(lambda *step: run(lambda tx: tx.in_pass, *step))
        if all(tx.in_pass for tx in transforms.values())
        else None,
        unit=max((tx.unit for tx in transforms.values()), key=UNITS.index),
        with_shards=with_shards if any(tx.with_shards for tx in transforms.values()) else None,
    )
