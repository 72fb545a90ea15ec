"""What each form of attention over cp sends and holds, and which of them "auto" takes.

Of a layer, for each token of a sequence, with H query and G key/value heads of K elements on a rank of tp, c ranks of
cp and u of a group:

    form          sent forward                                held
    gather        (c-1)/c 2 G K                               2 H K / c + 2 G K
    ulysses       (c-1)/c (2 H + 2 G') K / c                  (2 H + 2 G') K / c
    ring          (c-1)/c 2 G K                               2 H K / c + 4 G K / c
    hierarchical  ((c/u-1) 2 G + (u-1)/u (2 H + 2 G)) K / c   as the ring

G' are the key/value heads as far as ulysses repeats them. Backward passes send as much again; the gradients of keys and
values that go around a ring come on top, 2 G K in float32 or wider. Held are a rank's queries and results, and the keys
and values that it has at a time: all of the sequence, its heads' of the sequence, or those of two hops.

The rule of "auto": of the forms that serve, those count that hold at most twice what the leanest does, as memory is
what cp is for; of these the one that sends the fewest bytes in both passes, and of equals the one that holds less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.comm.axes import CP, TP
from fzero.sharding.context import BALANCED, FORMS, Context

MAX_RESIDENT_RATIO = 2.0  # of what the leanest form holds


def largest_inner(ranks: int, kv_heads: int) -> int:
    """The number of ranks of a group that exchange heads: the largest that divides both cp and the key/value heads.

    >>> largest_inner(8, 2), largest_inner(4, 3)
    (2, 1)
    """
    return math.gcd(ranks, kv_heads)


class AttentionCost(NamedTuple):
    """The bytes of a layer's attention on a rank of cp, for each token of a sequence."""

    sent: float  # forward and backward
    resident: float

    def __str__(self) -> str:
        return f"sends {self.sent:,.0f} and holds {self.resident:,.0f}"


class Heads(NamedTuple):
    """The heads of a model's attention on a rank of tp, and the elements of a key."""

    queries: int
    keys: int
    size: int

    def sent(self, form: str, ranks: int, inner: int = 0) -> float:
        """The elements that a rank of cp sends in a layer's forward pass by a form, for each token of a sequence.

        inner: of the form hierarchical; 0: `largest_inner`.

        >>> heads = Heads(queries=8, keys=2, size=64)
        >>> [heads.sent(form, 4) for form in ("gather", "ulysses", "ring", "hierarchical")]
        [192.0, 288.0, 192.0, 224.0]
        """
        peer_share = (ranks - 1) / ranks
        if form == "hierarchical":
            inner = inner or largest_inner(ranks, self.keys)
            exchanged = (inner - 1) / inner * (2 * self.queries + 2 * self.keys)
            return ((ranks // inner - 1) * 2 * self.keys + exchanged) / ranks * self.size
        if form == "ulysses":
            return peer_share * (2 * self.queries + 2 * math.lcm(self.keys, ranks)) / ranks * self.size
        return peer_share * 2 * self.keys * self.size

    def resident(self, form: str, ranks: int) -> float:
        """The elements that a rank of cp holds for attention by a form: see the top of the file.

        >>> [Heads(queries=8, keys=2, size=64).resident(form, 4) for form in ("gather", "ulysses", "ring")]
        [512.0, 384.0, 384.0]
        """
        return 2 * self.queries / ranks * self.size + self.resident_keys(form, ranks)

    def resident_keys(self, form: str, ranks: int) -> float:
        """The elements of keys and values alone that a rank of cp holds for attention by a form."""
        keys = {"gather": self.keys * ranks, "ulysses": math.lcm(self.keys, ranks)}.get(form, 2 * self.keys)
        return 2 * keys / ranks * self.size

    def residuals(self, form: str, ranks: int) -> float:
        """The elements that a rank of cp keeps of each token of a sequence for the backward pass of attention, beyond
        its queries, keys, values and their result.

        Where heads or keys are exchanged, what a rank attends to is kept as it came, and the result twice: as attention
        gave it, and as the product after it reads it.

        >>> [Heads(queries=8, keys=2, size=64).residuals(form, 4) for form in ("gather", "ulysses", "ring")]
        [320.0, 192.0, 128.0]
        """
        keys = {"gather": self.keys * ranks, "ulysses": math.lcm(self.keys, ranks)}.get(form, self.keys)
        return (2 * (keys - self.keys) + self.queries) / ranks * self.size

    def cost(self, form: str, ranks: int, inner: int = 0, itemsize: int = 2) -> AttentionCost:
        """The Cost of a form, of activations of `itemsize` bytes.

        >>> print(Heads(queries=32, keys=8, size=128).cost("gather", 8))
        sends 7,168 and holds 6,144
        """
        sent = 2 * self.sent(form, ranks, inner) * itemsize
        if form in ("ring", "hierarchical"):  # the gradients, c / u hops of 2 G K / c each
            inner = (inner or largest_inner(ranks, self.keys)) if form == "hierarchical" else 1
            sent += 2 * self.keys * self.size / inner * max(4, itemsize)
        return AttentionCost(sent, self.resident(form, ranks) * itemsize)

    def costs(self, context: Context, ranks: int, itemsize: int = 2) -> dict[str, AttentionCost]:
        """The Cost of each form that serves these heads and a context's pieces, by its text: "hierarchical/2" where
        that is neither of its parts."""
        out = {}
        for form in FORMS:
            inner = (context.inner or largest_inner(ranks, self.keys)) if form == "hierarchical" else 0
            serves = form != "ulysses" or (self.queries % ranks == 0 and context.pieces != BALANCED)
            if serves and (form != "hierarchical" or 1 < inner < ranks or context.form == form):
                out[f"{form}/{inner}" if inner else form] = self.cost(form, ranks, inner, itemsize)
        return out

    def choose(self, context: Context, ranks: int, itemsize: int = 2) -> str:
        """The form that "auto" takes, in the text of `costs`: see the top of the file.

        >>> wide = Heads(queries=32, keys=8, size=128)
        >>> [wide.choose(Context(), cp) for cp in (2, 4, 8, 64)]
        ['gather', 'gather', 'ulysses', 'hierarchical/8']
        """
        costs = self.costs(context, ranks, itemsize)
        leanest = min(cost.resident for cost in costs.values())
        return min(
            (form for form in costs if costs[form].resident <= MAX_RESIDENT_RATIO * leanest), key=costs.__getitem__
        )


def heads_of(model: Any, tp: int) -> Heads | None:
    """The heads of a model; None for one without attention, and for a plain parameter tree."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "n_heads"):
        return None
    keys = getattr(config, "n_kv_heads", config.n_heads)
    size = getattr(config, "key_dim", 0) or config.d_model // config.n_heads
    return Heads(config.n_heads // tp, max(1, keys // tp), size)


def context_for(sequence: bool | Context, model: Any, sizes: Mapping[str, int], itemsize: int = 2) -> Context:
    """The Context of a plan for a model on a mesh of these sizes, with nothing "auto" if that has cp; True: over tp.

    itemsize: bytes of an element of activations. Raises ValueError for a model whose sequences cp cannot split, and for
    one whose heads a form cannot.
    """
    context, cp, tp = sequence if isinstance(sequence, Context) else Context(over_tp=sequence), sizes[CP], sizes[TP]
    if context.over_tp and getattr(model, "foreign", False):
        raise ValueError("sequence parallelism: a model made from a module has none; leave sequence=True out")
    if cp == 1:
        return context
    if not getattr(model, "splits", False):
        raise ValueError(
            f"cp={cp}: cp splits the sequences of gpt2, llama, mixtral without capacity_factor, deepseek and mlp, "
            "under a loss of sums over tokens; this is another model, or a plain function; use dp"
        )
    heads = heads_of(model, tp)
    if heads is not None:
        expect_fit(context, heads, cp, tp)
    if context.form == "auto":
        form, _, inner = (heads.choose(context, cp, itemsize) if heads else "gather").partition("/")
        context = replace(context, form=form, inner=int(inner or 0))
    pieces = FORMS[context.form] if context.pieces == "auto" else context.pieces
    return replace(context, pieces=pieces)


def expect_fit(context: Context, heads: Heads, cp: int, tp: int) -> None:
    """Raise ValueError for a form that cannot split these heads over cp."""
    if context.form == "ulysses" and heads.queries % cp:
        fits = ", ".join(str(n) for n in range(1, heads.queries + 1) if heads.queries % n == 0)
        rank_text = f" of a rank of tp={tp}" if tp > 1 else ""
        raise ValueError(
            f"context ulysses: cp={cp} does not divide the {heads.queries} heads{rank_text}; use cp in {{{fits}}}, "
            "or the form gather"
        )
    if context.inner and (cp % context.inner or heads.keys % context.inner):
        common = math.gcd(cp, heads.keys)
        fits = [f"hierarchical/{n}" for n in range(2, common + 1) if common % n == 0] or ["ring"]
        raise ValueError(
            f"context hierarchical/{context.inner}: groups of {context.inner} must divide cp={cp} and the {heads.keys} "
            f"key/value heads of a rank; use {' or '.join(fits)}"
        )
