"""Rules over the names of leaves: weight-decay masks and per-layer learning rates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.pytree import Tree, nearest
from fzero.optim.base import GradientTransformation, NotNegative, name_tree, overwrite, stateless
from fzero.optim.sharded_leaves import ShardedLeaves, on_shards
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
