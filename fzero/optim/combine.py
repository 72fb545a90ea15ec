"""Transformations put together: one after the other (`chain`), or each on its own leaves (`by_label`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree, nearest
from fzero.optim.base import GradientTransformation, Pass, apply_in_place, expect_optimizer
from fzero.optim.sharded_leaves import around
from fzero.sharding.spec import Rules, match_rules


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """The transformation that feeds each one's updates to the next; its state is the tuple of theirs.

    Its `needs` is the strongest of its parts. It has `one_pass` if the last has it and at most one other precedes it,
    which only multiplies by a factor.
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

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        check(state)
        new = []
        for tx, tx_state in zip(txs, state):
            grads, tx_state = tx.update(grads, tx_state, params)
            new.append(tx_state)
        return grads, tuple(new)

    def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        check(state)
        leading, new = options._replace(adds=False), list(state[:-1])
        if options.fuses:
            for tx in txs[:-1]:
                assert tx.factor is not None  # see `one_pass`
                options = options._replace(factor=tx.factor(grads, options.factor, options.norm))
        else:
            for i, tx in enumerate(txs[:-1]):
                grads, new[i] = apply_in_place(tx, grads, state[i], params, leading)
        params, last = apply_in_place(txs[-1], grads, state[-1], params, options)
        return params, (*new, last)

    heads = 0
    while heads < len(txs) - 1 and txs[heads].factor is not None:
        heads += 1

    def split() -> SplitChain:
        if len(txs) == heads + 1:
            return SplitChain(txs[:heads], txs[heads], lambda s: s[heads], lambda s, body: (*s[:heads], body))
        return SplitChain(txs[:heads], chain(*txs[heads:]), lambda s: s[heads:], lambda s, body: (*s[:heads], *body))

    one_pass = txs[-1].one_pass and heads == len(txs) - 1 <= 1
    made = GradientTransformation(
        init=lambda params: tuple(tx.init(params) for tx in txs),
        update=update,
        spec=lambda specs: tuple(tx.spec(specs) for tx in txs),
        in_place=in_place,
        one_pass=one_pass,
        split=split if heads else None,
    )
    return around(txs, chain, made)


class SplitChain(NamedTuple):
    """A chain split into leading rescalings (clipping), which need the global norm, and a body for single leaves."""

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
    """The parts of `tx`: leading members that multiply by a factor, and the rest."""
    return SplitChain((), tx) if tx.split is None else tx.split()


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
        """step: (transformation, grads, state, params, *options) -> what it gives."""
        grad_parts, param_parts, out, new = split_leaves(grads), split_leaves(params), {}, {}
        for label, tx in transforms.items():
            out[label], new[label] = step(tx, grad_parts[label], state[label], param_parts[label], *options)
        return merge(out, params), new

    made = GradientTransformation(
        init=lambda params: {
            label: transforms[label].init(subtree) for label, subtree in split_leaves(params, partial=False).items()
        },
        update=lambda *step: run(lambda tx, *tx_step: tx.update(*tx_step), *step),
        spec=lambda specs: {
            label: transforms[label].spec(subtree) for label, subtree in split_leaves(specs, partial=False).items()
        },
        in_place=lambda *step: run(apply_in_place, *step),
        one_pass=all(tx.one_pass for tx in transforms.values()),
    )
    return around([*transforms.values()], lambda *txs: by_label(dict(zip(transforms, txs)), rules), made)
