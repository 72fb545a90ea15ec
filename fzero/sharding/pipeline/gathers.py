"""When a rank that shards its parameters (ZeRO-3) has a stage's parameters whole, so that it gathers them seldom."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from fzero.core.arguments import checked, expect_count
from fzero.sharding.pipeline.table import Act, Schedule

USES = ("F", "B", "I")  # W needs activations and gradients, and no parameters


@checked()
def with_gathers(s: Schedule, capacity: int) -> Schedule:
    """The schedule with gathers and drops of parameters: G before an act of the stage, D after one, counted by stage.

    Between G and D the parameters of a stage are whole. An act outside of them streams its layers: it gathers each one
    before its use and drops it after. At most `capacity` stages of a rank are whole at a time. What stays is chosen by
    Belady's rule, which knows the row to come: what is wanted again the latest goes, or is streamed, so that no other
    choice gathers less. With room for all stages of a rank each is gathered once; with 0 all acts stream. A pair
    between whose acts a G or D falls is a pair no longer.

    Ref: Belady 1966, IBM Systems Journal 5(2), with the choice not to keep what was fetched.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("interleaved", pipeline.layout([1.0] * 8, 4, 2), parts=16)
    >>> [count_gathers(with_gathers(s, room))[0] for room in (0, 1, 2)]
    [64, 17, 2]
    """
    expect_count("room", capacity, minimum=0)
    rows = tuple(gather_row(row, capacity) for row in s.rows)
    following = {pair for row in rows for pair in itertools.pairwise(row)}
    return s._replace(rows=rows, pairs=tuple(pair for pair in s.pairs if pair in following))


@checked()
def count_gathers(s: Schedule) -> tuple[int, ...]:
    """By rank, how often the parameters of a stage are gathered in a step: by a G, or by an act that streams them.

    >>> from fzero.sharding import pipeline
    >>> count_gathers(pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=8))
    (16, 16)
    """
    return tuple(_count(row) for row in s.rows)


def _count(row: Sequence[Act]) -> int:
    resident, count = set[int](), 0
    for act in row:
        if act.kind in "GD":
            resident ^= {act.stage}
        count += act.kind == "G" or (act.kind in USES and act.stage not in resident)
    return count


def gather_row(row: Sequence[Act], capacity: int) -> tuple[Act, ...]:
    """A rank's row with its gathers and drops, in place of those that it may have; see `with_gathers`."""
    row = [act for act in row if act.kind not in "GD"]
    uses = [i for i, act in enumerate(row) if act.kind in USES]
    next_use: dict[int, float] = {}  # by use, the next one of the same stage
    upcoming: dict[int, float] = {}
    for i in reversed(uses):
        next_use[i] = upcoming.get(row[i].stage, float("inf"))
        upcoming[row[i].stage] = i
    resident: dict[int, tuple[int, int]] = {}  # by stage, its first and latest use since it was gathered
    spans: list[tuple[int, int]] = []
    for i in uses:
        stage = row[i].stage
        if stage in resident:
            resident[stage] = resident[stage][0], i
        else:
            resident[stage] = i, i
            if len(resident) > capacity:
                spans.append(resident.pop(max(resident, key=lambda candidate: next_use[resident[candidate][1]])))
    spans += resident.values()
    spans = [(first, last) for first, last in spans if first < last]  # the others stream
    first, last = ({span[end] for span in spans} for end in (0, 1))
    acts: list[Act] = []
    count: Counter[int] = Counter()
    for i, act in enumerate(row):
        stage = act.stage
        if i in first:
            acts.append(Act("G", count[stage], stage))
        acts.append(act)
        if i in last:
            acts.append(Act("D", count[stage], stage))
            count[stage] += 1
    return tuple(acts)
