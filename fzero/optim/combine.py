"""Transformations put together: one after the other (`chain`), or each on its own leaves (`by_label`); and rules over
the names of leaves: weight-decay masks and per-layer learning rates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.pytree import Tree, nearest
from fzero.optim.base import (
    GradientTransformation,
    NotNegative,
    Pass,
    apply_in_place,
    expect_optimizer,
    name_tree,
    overwrite,
    stateless,
)
from fzero.optim.sharded_leaves import ShardedLeaves, around, on_shards
from fzero.sharding.slices import shard_dim
from fzero.sharding.spec import Rules, match_rules

# What is no weight matrix though it may have two dims: the last word of a step of its path says what it is.
NO_MATRIX = re.compile(
    r"(layer|rms|batch|group|instance|input|pre|post|attn|q|k|v|qk)?norms?|ln|bn|gn"
    r"|bias|biases|scales?|gains?|gamma|beta|pos|position|positions|positional|pe|wpe|cls"
)
# Words that say how it is kept, and not what it is; so do numbers and single letters.
HOW = re.compile(
    r"\d+|[a-z]|emb(s|ed|eds|edding|eddings)?|enc|encodings?|tables?|tokens?|weights?|kernels?|params?|vectors?|values?"
    r"|ih|hh|hr|reverse"
)
# A layer of a list `blocks`, of which each has leaves of its own. `blocks/0/weight` is a stack: of `from_module`, whose
# layers are nn.Sequential, the number that of a module in them.
NUMBERED = re.compile(r"blocks(_\w+)?/\d+/(?!(\d+/)*(weight|bias)$)")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
Mask = str | Callable[[str, Tensor], bool] | None  # regex found in the name; predicate(name, leaf); None: every leaf


def decay_matrices(name: str, leaf: Tensor) -> bool:
    """Return whether a leaf is a weight matrix or an embedding of tokens; give it as `mask` to decay only those.

    It is one if it has two dims or more, in any tree. The layers that a leaf under `blocks/` is stacked of are no dim:
    a bias [L, D] there has one. With a number below it, as in `blocks/0/mlp/w`, the leaf is of one layer and all dims
    count, but for `blocks/0/weight`, which `from_module` stacks of layers that are nn.Sequential.

    By their names norms, biases, scales and positions are none, whatever their dims: those of whose last step (or the
    one above `weight`, `w`, `kernel`, `0`, ...) norm, ln, bias, scale, gain, gamma, beta, pos, position, wpe or cls is
    the last whole word, but for such as embedding, token and table: `attn_norm`, `position_embeddings` and
    `LayerNorm_0`, but not `normalizer`, `bias_net` and `norm/linear`. So is a last step b or b_*.

    >>> decay_matrices("encoder/dense/kernel", torch.zeros(4, 8)), decay_matrices("encoder/dense/bias", torch.zeros(8))
    (True, False)
    >>> decay_matrices("blocks/attn/w_q", torch.zeros(2, 4, 4)), decay_matrices("blocks/norm", torch.zeros(2, 4))
    (True, False)
    >>> decay_matrices("blocks/0/w_q", torch.zeros(4, 4)), decay_matrices("blocks/0/norm", torch.zeros(4))
    (True, False)
    >>> decay_matrices("wpe.weight", torch.zeros(16, 4)), decay_matrices("position_mlp/w", torch.zeros(16, 4))
    (False, True)
    """
    layers = 0 if NUMBERED.match(name) else shard_dim(name)
    return leaf.dim() - layers >= 2 and not _is_no_matrix(name)


def _is_no_matrix(name: str) -> bool:
    """Whether a leaf's path says that it is a norm, bias, scale or positions."""
    steps = re.split(r"[/.]", name)
    if re.match(r"b(_|$)", steps[-1]):
        return True
    for step in reversed(steps):
        words = [word.lower() for word in WORD.findall(step)]
        while words and HOW.fullmatch(words[-1]):
            words.pop()
        if words:  # else the step above says what it is
            return NO_MATRIX.fullmatch(words[-1]) is not None
    return False


def decay_predicate(mask: Mask) -> Callable[[str, Tensor], bool]:
    """The predicate (name, leaf) that a mask means."""
    if mask is None:
        return lambda name, leaf: True
    if isinstance(mask, str):
        return lambda name, leaf: re.search(mask, name) is not None
    return mask


def check_mask(owner: str, mask: Mask) -> Callable[[Tree], None]:
    """A check of params that raises ValueError when a regex mask is found in no leaf's name."""

    def check(params: Tree) -> None:
        names = pytree.names(params)
        if isinstance(mask, str) and names and not any(re.search(mask, n) for n in names):
            raise ValueError(
                f"{owner}: mask {mask!r} matches no leaf{nearest(mask, names)}; use mask=None to decay every leaf"
            )

    if isinstance(mask, str):
        expect_regex(f"{owner}: mask", mask)
    return check


@checked()
def add_decayed_weights(weight_decay: NotNegative, mask: Mask = None) -> GradientTransformation:
    """Add weight_decay * params to the updates of the leaves that `mask` selects (L2 before an optimizer).

    mask: a regex over names, a predicate (name, leaf), None for all leaves.
    Raises ValueError for a negative weight_decay and, in `init`, for a regex mask that matches no leaf.

    >>> tx, params = add_decayed_weights(0.1, mask="^w"), {"w": torch.tensor([2.0]), "b": torch.tensor([2.0])}
    >>> tx.update({"w": torch.ones(1), "b": torch.ones(1)}, tx.init(params), params)[0]
    {'w': tensor([1.2000]), 'b': tensor([1.])}
    """
    decays = decay_predicate(mask)

    def update(grads: Tree, params: Tree) -> Tree:
        add = lambda n, p, g: torch.add(g, p, alpha=weight_decay).to(g.dtype) if decays(n, p) else g  # noqa: E731
        return pytree.map_named(add, params, grads)

    def donate(grads: Tree, params: Tree) -> Tree:
        add = lambda n, g, p: g.add_(p, alpha=weight_decay) if decays(n, p) else g  # noqa: E731
        return overwrite(add, name_tree(params), grads, params)

    return stateless(update, donate, check_mask("add_decayed_weights", mask))


@checked()
def scale_by_rules(rules: Rules[float | Sequence[float]]) -> GradientTransformation:
    """Multiply each update by the factor of the first rule `(regex, factor)` found in its name: layer-wise rates.

    A factor is a number, or a sequence of L numbers for the L layers of a leaf stacked along its leading dim. Put it
    last in a chain.
    Raises ValueError for a leaf that no rule matches, a rule that is the first match of no leaf, and a sequence of
    another length than the leaf's leading dim.

    >>> tx = scale_by_rules(((r"^embed/", 0.1), (r"^blocks/", [0.8**3, 0.8**2, 0.8, 1.0]), (".*", 1.0)))
    """

    def make(shards: ShardedLeaves) -> GradientTransformation:
        def factors(params: Tree) -> dict[str, Tensor | float]:
            named, leaf_factors = pytree.named_leaves(params), {}
            for name, factor in match_rules(rules, list(named), subject="scale_by_rules").items():
                p = named[name]
                if isinstance(factor, (int, float)):
                    leaf_factors[name] = factor
                    continue
                shape = shards.shape(name, tuple(p.shape))
                if not shape or len(factor) != shape[0]:
                    raise ValueError(
                        f"scale_by_rules: {name} has shape {shape} and is given {len(factor)} factors; "
                        "give one per layer of its leading dim"
                    )
                values = torch.as_tensor(factor, dtype=torch.float64).to(p.device)
                leaf_factors[name] = shards.local(name, values.reshape(-1, *[1] * (p.dim() - 1)), (0,))
            return leaf_factors

        def cast(factor: Tensor | float, g: Tensor) -> Tensor | float:
            # At least float32, so that bfloat16 updates are rounded once, after the product.
            return factor.to(torch.promote_types(g.dtype, torch.float32)) if isinstance(factor, Tensor) else factor

        def update(grads: Tree, params: Tree) -> Tree:
            leaf_factors = factors(params)
            return pytree.map_named(lambda n, p, g: (g * cast(leaf_factors[n], g)).to(g.dtype), params, grads)

        def donate(grads: Tree, params: Tree) -> Tree:
            leaf_factors = factors(params)
            return overwrite(lambda n, g: g.mul_(cast(leaf_factors[n], g)), name_tree(params), grads)

        return stateless(update, donate, factors, unit="tree")

    return on_shards(make)


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
    if not transforms:
        raise ValueError("by_label: there is no transformation; give one a label, such as {'adamw': adamw()}")
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
