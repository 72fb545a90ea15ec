"""Which blocks of a sequence each rank of cp has, so that all ranks have as much attention to compute.

A block's work is the number of pairs of a query of it and a key that the query sees.

And what each form of attention over cp sends and holds, per token of a layer, with H query and G key/value heads of K
elements on a rank of tp, c ranks of cp and u of a group:

    form          sent forward                                held
    gather        (c-1)/c 2 G K                               2 H K / c + 2 G K
    ulysses       (c-1)/c (2 H + 2 G') K / c                  (2 H + 2 G') K / c
    ring          (c-1)/c 2 G K                               2 H K / c + 4 G K / c
    hierarchical  ((c/u-1) 2 G + (u-1)/u (2 H + 2 G)) K / c   as the ring

G' are the key/value heads as ulysses repeats them. Backward passes send as much again; a ring sends the gradients of
keys and values too, 2 G K in float32 or wider.

"auto" takes, of the forms that hold at most twice what the leanest does, the one that sends the fewest bytes in both
passes, and of equals the one that holds less.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.comm.axes import CP, TP
from fzero.core.arguments import expect_fields
from fzero.core.config_tables import at_least
from fzero.core.pytree import nearest
from fzero.sharding.experts import Experts
from fzero.sharding.spec import runs_of


class Pieces(NamedTuple):
    """The numbers, ascending, of each cp rank's blocks of a sequence; its tokens are in this order.

    >>> pieces = Pieces(((0, 3), (1, 2)))
    >>> pieces.ranges(0, tokens=8), pieces.ranges(1, tokens=8)
    ([(0, 2), (6, 2)], [(2, 4)])
    """

    blocks: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of blocks of a sequence."""
        return sum(map(len, self.blocks))

    @property
    def contiguous(self) -> bool:
        """Whether the ranks' tokens, one rank's after the other's, are the sequence."""
        return [block for rank_blocks in self.blocks for block in rank_blocks] == list(range(self.count))

    def expect_divisible(self, tokens: int, parts: int = 1) -> None:
        """Raise ValueError for a length that the blocks, or `parts` of a rank's tokens, do not divide."""
        unit = math.lcm(self.count, len(self.blocks) * parts)
        if tokens % unit:
            lower, upper = tokens // unit * unit, -(-tokens // unit) * unit
            axes_text = f"cp={len(self.blocks)}" + (f" and tp={parts}" if parts > 1 else "")
            raise ValueError(
                f"context parallelism: the sequences have {tokens} tokens, which cannot be cut into {self.count} "
                f"blocks for {axes_text}; use {f'{lower} or {upper}' if lower else upper}"
            )

    def ranges(self, rank: int, tokens: int) -> list[tuple[int, int]]:
        """(first position, number) of each run of a rank's tokens, of sequences of `tokens`; ascending."""
        size = tokens // self.count
        return [(first * size, number * size) for first, number in runs_of(self.blocks[rank])]

    def positions(self, rank: int, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of a rank's tokens, int64 [tokens / ranks], of sequences of `tokens`."""
        runs = [torch.arange(first, first + number, device=device) for first, number in self.ranges(rank, tokens)]
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def order(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Where each token is among those of all ranks, in rank order: int64 [tokens].

        >>> Pieces(((0, 3), (1, 2))).order(4)
        tensor([0, 2, 3, 1])
        """
        gathered = torch.cat([self.positions(rank, tokens, device) for rank in range(len(self.blocks))])
        return torch.argsort(gathered)


def contiguous(ranks: int) -> Pieces:
    """One block a rank, in the order of the ranks.

    >>> contiguous(2).blocks
    ((0,), (1,))
    """
    return Pieces(tuple((rank,) for rank in range(ranks)))


def zigzag(ranks: int) -> Pieces:
    """Two blocks a rank, one from the front and its mirror from the back: equal work under a causal mask.

    >>> zigzag(2).blocks
    ((0, 3), (1, 2))

    Ref: Llama Team 2024, "The Llama 3 herd of models", arXiv:2407.21783, section 3.3.2.
    """
    return Pieces(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


PIECES: dict[str, Callable[[int], Pieces]] = {"contiguous": contiguous, "zigzag": zigzag}
# The forms of attention over cp, see models/cp_attention.py, and the pieces that "auto" gives them: where each rank has
# whole sequences of some heads all have as much work.
FORMS = {"gather": "zigzag", "ulysses": "contiguous", "ring": "balanced", "hierarchical": "balanced"}
BALANCED = "balanced"  # pieces that are chosen by a batch's documents, see sharding/context.py


@dataclass(frozen=True)
class Context:
    """How activations are split along the sequence: over cp, and over tp.

    form: how a rank's queries meet the keys of the other ranks: "gather", "ulysses", "ring", "hierarchical" (see
        docs/context.md), or "auto": by what each sends and holds (see the top of the file).
    pieces: which tokens a rank has: "contiguous" (one block each), "zigzag" (two, so that all ranks have as much work
        under a causal mask), "balanced" (up to 16, so that they have under a batch's documents too), or "auto": as
        suits the form.
    over_tp: whether a rank's tokens are split over tp too, outside the tensor-parallel products.
    inner: of the form "hierarchical", the ranks of a group that exchange heads; 0: as many as divide the key heads.

    >>> Context("gather", pieces="contiguous").pieces_for(2)
    Pieces(blocks=((0,), (1,)))
    """

    form: str = "auto"
    pieces: str = "auto"
    over_tp: bool = False
    inner: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        expect_fields(self, "context")
        pieces = (*PIECES, BALANCED, "auto")
        for field, value, choices in (("form", self.form, (*FORMS, "auto")), ("pieces", self.pieces, pieces)):
            if value not in choices:
                raise ValueError(
                    f"context: {field} is {value!r}{nearest(value, choices)}; use one of {', '.join(choices)}"
                )
        if self.inner and self.form != "hierarchical":
            raise ValueError(
                f"context: inner is {self.inner} and the form is {self.form}; only hierarchical has groups: write "
                f"hierarchical/{self.inner}, or {self.form} alone"
            )
        if (self.form, self.pieces) == ("ulysses", BALANCED):
            raise ValueError("context: in the form ulysses all ranks have as much work; use contiguous pieces")

    @classmethod
    def parse(cls, text: str, over_tp: bool = False) -> Context:
        """The Context of a form, with `/inner` of its groups, and `:pieces`; raises ValueError for others.

        >>> str(Context.parse("hierarchical/2:zigzag")), str(Context.parse("ulysses"))
        ('hierarchical/2:zigzag', 'ulysses')
        """
        form, _, pieces = text.partition(":")
        form, slash, inner = form.partition("/")
        if slash and not (inner.isdecimal() and int(inner)):
            raise ValueError(
                f"context: {text!r} has /{inner}; write the ranks of a group that exchange heads, such as "
                "hierarchical/2"
            )
        return cls(form, pieces or "auto", over_tp, int(inner or 0))

    def __str__(self) -> str:
        """The text that `parse` reads, without what is "auto"."""
        inner, pieces = f"/{self.inner}" * bool(self.inner), f":{self.pieces}" * (self.pieces != "auto")
        return f"{self.form}{inner}{pieces}"

    def describe(self, plan: Any) -> str:
        """The form of attention over cp in a plan, and what each form sends and holds."""
        cp, heads = plan.mesh.cp.size, plan.heads
        text = f"context: {replace(self, pieces='auto')} of {self.pieces} pieces over cp={cp}"
        if heads is None:
            return f"{text}: the model has no attention"
        costs = heads.costs(self, cp, plan.policy.compute.itemsize)
        forms = "; ".join(f"{form} {cost}" for form, cost in costs.items())
        return (
            f"{text}; bytes of a rank in attention of a layer, forward and backward, for each token of a sequence: "
            f"{forms}"
        )

    def pieces_for(self, ranks: int) -> Pieces | None:
        """The pieces of so many ranks of cp, None for balanced ones, which each batch chooses; raises KeyError for
        "auto", which a plan decides.
        """
        return None if self.pieces == BALANCED else PIECES[self.pieces](ranks)

    def expect_divisible(self, ranks: int, tokens: int, parts: int = 1) -> None:
        """Raise ValueError for sequences of so many tokens that cannot be split over cp, or further over tp."""
        (self.pieces_for(ranks) or contiguous(ranks)).expect_divisible(tokens, parts)


MOST_BLOCKS = 16  # of a rank


def balanced(work: Sequence[int], ranks: int) -> Pieces:
    """As many blocks for each rank, so that the largest sum of work is small; deterministic.

    >>> balanced([1, 3, 5, 7], 2).blocks
    ((0, 3), (1, 2))

    Ref: Graham 1969, "Bounds on multiprocessing timing anomalies", section 5 (longest processing time first).
    """
    # The block with the most work first, each to the rank with the least so far that has room; of equal blocks the
    # first goes first, of equal ranks too.
    if len(work) % ranks or not work:
        raise ValueError(f"balanced: there are {len(work)} blocks, which cp={ranks} does not divide")
    capacity, rank_blocks = len(work) // ranks, [list[int]() for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for block in sorted(range(len(work)), key=lambda block: -work[block]):
        load, rank = heapq.heappop(loads)
        rank_blocks[rank].append(block)
        if len(rank_blocks[rank]) < capacity:
            heapq.heappush(loads, (load + work[block], rank))
    return Pieces(tuple(tuple(sorted(blocks)) for blocks in rank_blocks))


def imbalance(work: Sequence[int], pieces: Pieces) -> float:
    """The largest work of a rank, over the mean: the time of a step over that of one whose ranks have equal work.

    >>> imbalance([1, 3, 5, 7], balanced([1, 3, 5, 7], 2)), imbalance([1, 3], Pieces(((0,), (1,))))
    (1.0, 1.5)
    """
    loads = [sum(work[block] for block in rank_blocks) for rank_blocks in pieces.blocks]
    return max(loads) * len(loads) / sum(loads)


def in_blocks(by_position: np.ndarray, blocks: int) -> list[int]:
    """The work of each of `blocks` equal blocks, from that of each position, int64 [T].

    >>> in_blocks(np.array([1, 2, 3, 4]), 2)
    [3, 7]
    """
    return by_position.reshape(blocks, -1).sum(1).tolist()


def blocks_of(tokens: int, ranks: int, max_blocks: int = MOST_BLOCKS) -> int:
    """The number of blocks of a sequence, at most `max_blocks`, that leaves each rank as many as can be.

    >>> blocks_of(96, 4), blocks_of(4, 4)
    (48, 4)
    """
    # With 16 blocks a rank the largest work is within 1% of the mean.
    local_tokens = tokens // ranks
    return ranks * max(count for count in range(1, min(max_blocks, local_tokens) + 1) if local_tokens % count == 0)


MAX_RESIDENT_RATIO = 2.0  # of what the leanest form holds


def largest_inner(ranks: int, kv_heads: int) -> int:
    """The largest number of ranks that divides cp and the key/value heads.

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
        """The elements that a rank of cp sends in a layer's forward pass by a form, per token of a sequence.

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
        """The elements that a rank of cp holds for attention by a form.

        >>> [Heads(queries=8, keys=2, size=64).resident(form, 4) for form in ("gather", "ulysses", "ring")]
        [512.0, 384.0, 384.0]
        """
        return 2 * self.queries / ranks * self.size + self.resident_keys(form, ranks)

    def resident_keys(self, form: str, ranks: int) -> float:
        """The elements of keys and values alone that a rank of cp holds for attention by a form."""
        keys = {"gather": self.keys * ranks, "ulysses": math.lcm(self.keys, ranks)}.get(form, 2 * self.keys)
        return 2 * keys / ranks * self.size

    def residuals(self, form: str, ranks: int) -> float:
        """The elements per token that a rank of cp keeps for the backward pass of attention, beyond its own tensors.

        >>> [Heads(queries=8, keys=2, size=64).residuals(form, 4) for form in ("gather", "ulysses", "ring")]
        [320.0, 192.0, 128.0]
        """
        keys = {"gather": self.keys * ranks, "ulysses": math.lcm(self.keys, ranks)}.get(form, self.keys)
        return (2 * (keys - self.keys) + self.queries) / ranks * self.size

    def cost(self, form: str, ranks: int, inner: int = 0, itemsize: int = 2) -> AttentionCost:
        """The AttentionCost of a form, of activations of `itemsize` bytes.

        >>> print(Heads(queries=32, keys=8, size=128).cost("gather", 8))
        sends 7,168 and holds 6,144
        """
        sent = 2 * self.sent(form, ranks, inner) * itemsize
        if form in ("ring", "hierarchical"):  # the gradients, c / u hops of 2 G K / c each
            inner = (inner or largest_inner(ranks, self.keys)) if form == "hierarchical" else 1
            sent += 2 * self.keys * self.size / inner * max(4, itemsize)
        return AttentionCost(sent, self.resident(form, ranks) * itemsize)

    def costs(self, context: Context, ranks: int, itemsize: int = 2) -> dict[str, AttentionCost]:
        """The AttentionCost of each form that serves these heads and a context's pieces, by its text."""
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
    """The Context of a plan on a mesh of these sizes, with nothing "auto" if that has cp; True: over tp."""
    context, cp, tp = sequence if isinstance(sequence, Context) else Context(over_tp=sequence), sizes[CP], sizes[TP]
    traits = getattr(model, "traits", None)  # of a Model
    if context.over_tp and getattr(traits, "foreign", False):
        raise ValueError("sequence parallelism: a model made from a module has none; leave sequence=True out")
    if cp == 1:
        return context
    if not getattr(traits, "splits", False):
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


class ActivationSplit(NamedTuple):
    """How activations, attention and experts are split over ranks.

    >>> ActivationSplit().context  # the default: whole sequences on each rank of cp
    ()
    """

    sequence: bool = False  # under tp: activations outside the tensor-parallel regions are split along T too
    context: Context | tuple[()] = ()  # how attention works over cp; () without
    experts: Experts | tuple[()] = ()  # how tokens come to experts over ep; () without
