"""What waits in the schedules of pipelines: each is played once, over few micro-batches."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fzero.sharding.pipeline import FAMILIES, place, play, schedule
from fzero.sharding.pipeline.table import Stages

ROW = 4  # micro-batches for each rank of pp in the rows that `row_facts` plays


class RowFacts(NamedTuple):
    """What waits in a schedule of ROW micro-batches for each rank, which more of them do not change but as said."""

    idle: float  # of a step, with messages that take no time, in units of a rank's forward pass of a micro-batch
    wires: float  # the messages that the longest rank waits for
    wires_each: float  # more of them for each micro-batch more
    in_flight: int  # the most chunks in flight on a rank


@functools.lru_cache(maxsize=256)
def row_facts(name: str, p: int, v: int, again: bool) -> RowFacts:
    """The RowFacts of a schedule; again: backward passes compute the forward pass again.

    A backward pass takes twice as long as a forward pass, half of it for the gradients by weights.

    >>> row_facts("1f1b", 4, 1, False)
    RowFacts(idle=9.0, wires=28.0, wires_each=2.0, in_flight=4)
    """
    ranks = place(p, v, FAMILIES[name].placement)
    stages = Stages(tuple((i,) for i in range(p * v)), ranks)
    times = {"F": 1.0 / v, "I": (1.0 + again) / v, "W": 1.0 / v}
    wire = 0.1 / v
    found = []
    for parts in (ROW * p // 2, ROW * p):
        s = schedule(name, stages, parts)
        still, slow = (play(s, times, one) for one in (0.0, wire))
        found.append(((slow.step - still.step) / wire, min(still.idle), max(still.peak)))
    (less, _, _), (more, idle, most) = found
    return RowFacts(round(idle, 9), round(more, 6), round((more - less) / (ROW * p / 2), 6), most)
