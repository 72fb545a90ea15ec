"""Several updates of the parameters within one row: no flush between them, and two versions of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fzero.core.arguments import checked, expect_count
from fzero.sharding.pipeline.table import Act, Schedule, run

BACKWARDS = ("B", "I", "W")


@checked()
def with_updates(s: Schedule, updates: int) -> Schedule:
    """The schedule with `updates` delayed updates of the parameters, each of as many micro-batches: the acts U.

    The micro-batches of update i are computed with the parameters before update i - 1, so each rank goes on with those
    of update i + 1 before update i is made, and no rank waits for the pipeline to empty. Before the first forward of
    update i + 2 it must have been made: so a rank holds two versions of the parameters, and no more. The ranks meet at
    U, as the norm of a gradient is that of all of them: it is put where each of them is, in ticks of a drawing, when
    the last backward of its micro-batches ends on the last rank.

    Raises ValueError if the micro-batches are not a multiple of the updates, and for a schedule that goes further ahead
    than two versions allow.

    Ref: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", arXiv:2006.09503, section 3.1
    (PipeDream-2BW).

    >>> from fzero.sharding import pipeline
    >>> s = with_updates(pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=4), 2)
    >>> print(" ".join(map(str, s.rows[0])))
    0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0B3 0U1
    """
    expect_count("the number of updates", updates)
    if s.parts % updates:
        raise ValueError(f"{updates} updates cannot share {s.parts} micro-batches evenly; change one of them")
    each, ends, rows = s.parts // updates, run(s).end, [list(row) for row in s.rows]
    start = run(s).start
    for i in range(updates):
        ended = max(end for act, end in ends.items() if act.kind in BACKWARDS and act.part // each == i)
        for rank, row in enumerate(rows):
            own, due = bounds(row, i, each)
            if due < own:
                last, first = f"{i * each}-{(i + 1) * each - 1}", row[due]
                raise ValueError(
                    f"schedule {s.name} with {updates} updates of {each} micro-batches: rank {rank} comes to {first} "
                    f"before it has ended those of micro-batches {last}, and would hold more than two versions of the "
                    "parameters; give an update more micro-batches, or take 1f1b"
                )
            late = next((k for k, act in enumerate(row) if act.kind != "U" and start[act] >= ended), len(row))
            row.insert(min(max(own, late), due), Act("U", i, s.stages.chunks(rank)[0]))
    return s._replace(rows=tuple(map(tuple, rows)), pairs=_unbroken(s, rows))


def bounds(row: Sequence[Act], i: int, each: int) -> tuple[int, int]:
    """The first and the last place of update i in a row: behind the backwards of its micro-batches, and before the
    first forward of update i + 2."""
    own = max(k for k, act in enumerate(row) if act.kind in BACKWARDS and act.part // each == i) + 1
    due = (k for k, act in enumerate(row) if act.kind == "F" and act.part // each >= i + 2)
    return own, next(due, len(row))


def _unbroken(s: Schedule, rows: Sequence[Sequence[Act]]) -> tuple[tuple[Act, Act], ...]:
    """The pairs between whose acts nothing has come."""
    following = {pair for row in rows for pair in itertools.pairwise(row)}
    return tuple(pair for pair in s.pairs if pair in following)
