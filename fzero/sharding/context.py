"""Which tokens of a sequence each rank of cp has: those of some of its equal blocks, as many on each rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
        return [block for own in self.blocks for block in own] == list(range(self.count))

    def expect_divisible(self, tokens: int, parts: int = 1) -> None:
        """Raise ValueError for a sequence of so many tokens that the blocks do not divide, or of which a rank's tokens
        cannot be cut into `parts` among the ranks of tp."""
        unit = math.lcm(self.count, len(self.blocks) * parts)
        if tokens % unit:
            below, above = tokens // unit * unit, -(-tokens // unit) * unit
            over = f"cp={len(self.blocks)}" + (f" and tp={parts}" if parts > 1 else "")
            raise ValueError(
                f"context parallelism: the sequences have {tokens} tokens, which cannot be cut into {self.count} "
                f"blocks for {over}; use {f'{below} or {above}' if below else above}"
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
# The forms of attention over cp, see models/attend.py, and the pieces that "auto" gives them: where each rank has whole
# sequences of some heads all have as much work.
FORMS = {"gather": "zigzag", "ulysses": "contiguous", "ring": "balanced", "hierarchical": "balanced"}
BALANCED = "balanced"  # pieces that are chosen by a batch's documents, see sharding/balance.py


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

    >>> Context("gather", pieces="contiguous").over(2)
    Pieces(blocks=((0,), (1,)))
    """

    form: str = "auto"
    pieces: str = "auto"
    over_tp: bool = False
    inner: int = 0

    def __post_init__(self) -> None:
        pieces = (*PIECES, BALANCED, "auto")
        for what, value, known in (("form", self.form, (*FORMS, "auto")), ("pieces", self.pieces, pieces)):
            if value not in known:
                raise ValueError(f"context: {what} is {value!r}{nearest(value, known)}; use one of {', '.join(known)}")
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

    def over(self, ranks: int) -> Pieces | None:
        """The pieces of so many ranks of cp, None for balanced ones, which each batch chooses; raises KeyError for
        "auto", which a plan decides.
        """
        return None if self.pieces == BALANCED else PIECES[self.pieces](ranks)

    def expect_divisible(self, ranks: int, tokens: int, parts: int = 1) -> None:
        """Raise ValueError for sequences of so many tokens that cannot be split over cp, or further over tp."""
        (self.over(ranks) or contiguous(ranks)).expect_divisible(tokens, parts)
