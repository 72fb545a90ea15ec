"""A schedule in time: when each act starts and ends, how long ranks are idle, and how much is in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fzero.core.arguments import checked
from fzero.sharding.pipeline.check import stuck_text
from fzero.sharding.pipeline.table import Act, Schedule, groups, needs, simulate

Cost = Mapping[str, float | Sequence[float]]
Wire = float | Sequence[float]
PAIR = "F&B"


class Played(NamedTuple):
    """What `play` found. Times in the unit of the costs, from the start of the step.

    start, end: by rank, of the acts of its row. idle: by rank, the time of the step in which it does nothing. peak: by
    rank, the most chunks in flight, each a micro-batch in a stage whose forward has begun and whose backward, with that
    by weights, has not ended.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("gpipe", pipeline.layout([1.0] * 4, 2), parts=1)
    >>> pipeline.play(s, {"F": 1.0, "B": 2.0})
    Played(start=((0.0, 4.0), (1.0, 2.0)), end=((1.0, 6.0), (2.0, 4.0)), idle=(3.0, 3.0), peak=(1, 1))
    >>> pipeline.play(s, {"F": 1.0, "B": 2.0}).step
    6.0
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    idle: tuple[float, ...]
    peak: tuple[int, ...]

    @property
    def step(self) -> float:
        """The time of the step: when the last act ends."""
        return max((end for row in self.end for end in row), default=0.0)


@checked()
def play(s: Schedule, cost: Cost | Callable[[Act], float], wire: Wire = 0.0) -> Played:
    """Play a schedule with given times: every rank runs its row in order, and starts an act as soon as what it needs is
    there. Messages are under way while ranks compute.

    cost: by kind of act its time, one for all stages or a sequence by stage. B may be left out where I and W are given,
    and is their sum; G, D and U take no time unless they are given. With a time for "F&B" the pairs of a schedule that
    has some run together and take that long (by the stage of F); without, one after the other. Or a function of an act.
    wire: the time of a message between stages s and s + 1 that are on different ranks, one for all or by s.

    Raises ValueError if a time is missing, or if the schedule deadlocks.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 4), parts=8)
    >>> played = play(s, {"F": 1.0, "B": 2.0})
    >>> played.step, played.idle[0], played.peak
    (33.0, 9.0, (4, 3, 2, 1))
    >>> round(play(s, {"F": 1.0, "B": 2.0}, wire=0.1).step, 1)
    34.6
    """
    costs = {} if callable(cost) else _times(s, cost)
    wires = _spread("the time of messages", wire, len(s.stages.ranks) - 1)
    ranks, rows = s.stages.ranks, groups(s, fused=PAIR in costs)

    def time(group: tuple[Act, ...]) -> float:
        if callable(cost):
            return cost(group[0])
        return costs[PAIR if len(group) == 2 else group[0].kind][group[0].stage]

    def delay(source: Act, target: Act) -> float:
        return 0.0 if ranks[source.stage] == ranks[target.stage] else wires[min(source.stage, target.stage)]

    timeline = simulate(rows, needs(s), time, delay)
    if timeline.stuck:
        raise ValueError(f"schedule {s.name}: {stuck_text(s, timeline.stuck)}")
    start, end = (tuple(tuple(times[act] for act in row) for row in s.rows) for times in (timeline.start, timeline.end))
    step = max(timeline.end.values(), default=0.0)
    busy = [sum(time(group) for group in row) for row in rows]
    return Played(start, end, tuple(step - busy_time for busy_time in busy), tuple(peak(row) for row in s.rows))


def peak(row: Sequence[Act]) -> int:
    """The most chunks in flight in a row: forwards begun less backwards ended."""
    in_flight = max_in_flight = 0
    for act in row:
        in_flight += act.kind == "F"
        max_in_flight = max(max_in_flight, in_flight)
        in_flight -= act.kind in ("B", "W")
    return max_in_flight


def _times(s: Schedule, cost: Cost) -> dict[str, Sequence[float]]:
    """{kind: time by stage} of the kinds that the schedule has."""
    stages = len(s.stages.ranks)
    times = {kind: _spread(f"the time of {kind}", value, stages) for kind, value in cost.items()}
    if "B" not in times and "I" in times and "W" in times:
        times["B"] = [inputs_time + weights_time for inputs_time, weights_time in zip(times["I"], times["W"])]
    for kind in ("G", "D", "U"):
        times.setdefault(kind, [0.0] * stages)
    for kind in sorted({act.kind for row in s.rows for act in row}):
        if kind not in times:
            raise ValueError(
                f"play: no time for {kind}; schedule {s.name} needs those of "
                f"{', '.join(sorted({act.kind for row in s.rows for act in row} - set('GDU')))}"
            )
    return times


def _spread(label: str, value: float | Sequence[float], count: int) -> Sequence[float]:
    """A number for each, where one is given for all."""
    if isinstance(value, int | float):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"play: {label} is given by {len(value)} numbers; give one for all, or {count}")
    return value
