"""Which tokens of a sequence each rank of cp has: those of some of its equal blocks, as many on each rank.

Which blocks of a sequence each rank of cp has, so that all ranks have as much attention to compute.

A block's work is the number of pairs of a query of it and a key that the query sees. Under a causal mask a late block
has more than an early one; with several documents in a row, how much depends on where they lie.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core.pytree import nearest
from fzero.sharding.spec import runs_of


class Pieces(NamedTuple):
    """The blocks of a sequence by rank of cp: the numbers of each rank's, ascending. A rank's tokens are those of its
    blocks, in this order.

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
        """Raise ValueError for a sequence of so many tokens that the blocks do not divide, or of which a rank's tokens
        cannot be cut into `parts` among the ranks of tp."""
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
        """Where the token at each position is among those of all ranks, one rank's after the other's: int64 [tokens].

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
    """Two blocks a rank, one from the front and its mirror from the back: under a causal mask all ranks then have as
    many pairs of queries and keys.

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
        docs/context.md), or "auto": by what each sends and holds (context_cost.py).
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
    inner: int = 0

    def __post_init__(self) -> None:
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
    """As many blocks for each rank, of the work given, so that the largest sum is small: the block with the most work
    first, each to the rank with the least so far that has room.

    Deterministic: of equal blocks the first goes first, of equal ranks too. Raises ValueError if the ranks do not
    divide the blocks.

    >>> balanced([1, 3, 5, 7], 2).blocks
    ((0, 3), (1, 2))

    Ref: Graham 1969, "Bounds on multiprocessing timing anomalies", section 5 (longest processing time first).
    """
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
    """The number of blocks of a sequence of so many tokens that leaves each of the ranks as many as can be, up to
    `max_blocks`. With 16 blocks a rank the largest work is within 1% of the mean.

    >>> blocks_of(96, 4), blocks_of(4, 4)
    (48, 4)
    """
    local_tokens = tokens // ranks
    return ranks * max(count for count in range(1, min(max_blocks, local_tokens) + 1) if local_tokens % count == 0)
