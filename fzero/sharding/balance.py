"""Which blocks of a sequence each rank of cp has, so that all ranks have as much attention to compute.

A block's work is the number of pairs of a query of it and a key that the query sees. Under a causal mask a late block
has more than an early one; with several documents in a row, how much depends on where they lie.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from fzero.sharding.context import Pieces

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
    room, own = len(work) // ranks, [list[int]() for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for block in sorted(range(len(work)), key=lambda block: -work[block]):
        load, rank = heapq.heappop(loads)
        own[rank].append(block)
        if len(own[rank]) < room:
            heapq.heappush(loads, (load + work[block], rank))
    return Pieces(tuple(tuple(sorted(blocks)) for blocks in own))


def imbalance(work: Sequence[int], pieces: Pieces) -> float:
    """The largest work of a rank, over the mean: the time of a step over that of one whose ranks have equal work.

    >>> imbalance([1, 3, 5, 7], balanced([1, 3, 5, 7], 2)), imbalance([1, 3], Pieces(((0,), (1,))))
    (1.0, 1.5)
    """
    loads = [sum(work[block] for block in own) for own in pieces.blocks]
    return max(loads) * len(loads) / sum(loads)


def in_blocks(by_position: np.ndarray, blocks: int) -> list[int]:
    """The work of each of `blocks` equal blocks, from that of each position, int64 [T].

    >>> in_blocks(np.array([1, 2, 3, 4]), 2)
    [3, 7]
    """
    return by_position.reshape(blocks, -1).sum(1).tolist()


def blocks_of(tokens: int, ranks: int, most: int = MOST_BLOCKS) -> int:
    """The number of blocks of a sequence of so many tokens that leaves each of the ranks as many as can be, up to
    `most`. With 16 blocks a rank the largest work is within 1% of the mean.

    >>> blocks_of(96, 4), blocks_of(4, 4)
    (48, 4)
    """
    own = tokens // ranks
    return ranks * max(count for count in range(1, min(most, own) + 1) if own % count == 0)
