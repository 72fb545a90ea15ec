"""Whether a schedule is one: every act once, on its rank, in an order that ends; and its time: when each act starts and
ends, how long ranks are idle, and how much is in flight.

And what is put into one: updates within a row, without a flush between them, and the gathers of a rank that shards its
parameters (ZeRO-3).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fzero.core.arguments import checked, expect_count
from fzero.sharding.pipeline.table import BACKWARD, KINDS, Act, Schedule, feeds, groups, needs, run, simulate

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
    per_update, ends, rows = s.parts // updates, run(s).end, [list(row) for row in s.rows]
    start = run(s).start
    for i in range(updates):
        ended = max(end for act, end in ends.items() if act.kind in BACKWARDS and act.micro_batch // per_update == i)
        for rank, row in enumerate(rows):
            earliest, due = bounds(row, i, per_update)
            if due < earliest:
                last, first = f"{i * per_update}-{(i + 1) * per_update - 1}", row[due]
                raise ValueError(
                    f"schedule {s.name} with {updates} updates of {per_update} micro-batches: rank {rank} comes to "
                    f"{first} before it has ended those of micro-batches {last}, and would hold more than two versions "
                    "of the parameters; give an update more micro-batches, or take 1f1b"
                )
            boundary = next((k for k, act in enumerate(row) if act.kind != "U" and start[act] >= ended), len(row))
            row.insert(min(max(earliest, boundary), due), Act("U", i, s.stages.chunks(rank)[0]))
    return s._replace(rows=tuple(map(tuple, rows)), pairs=_unbroken(s, rows))


def bounds(row: Sequence[Act], i: int, per_update: int) -> tuple[int, int]:
    """The first and last index of update i in a row: after its backwards, before the first forward of update i + 2."""
    earliest = max(k for k, act in enumerate(row) if act.kind in BACKWARDS and act.micro_batch // per_update == i) + 1
    due = (k for k, act in enumerate(row) if act.kind == "F" and act.micro_batch // per_update >= i + 2)
    return earliest, next(due, len(row))


def _unbroken(s: Schedule, rows: Sequence[Sequence[Act]]) -> tuple[tuple[Act, Act], ...]:
    """The pairs between whose acts nothing has come."""
    following = {pair for row in rows for pair in itertools.pairwise(row)}
    return tuple(pair for pair in s.pairs if pair in following)


# What comes in the order of micro-batches in every stage.
IN_ORDER = (("F",), "forwards"), (BACKWARD, "backwards"), (("B", "W"), "backwards by weights")
Faults = Iterator[tuple[int, str]]  # (rank, what is wrong there)


@checked()
def check(s: Schedule) -> None:
    """Raise ValueError with the first fault of a schedule, in one line with rank and act; a sound one returns None.

    Its stages have all layers in order, and at least one each. Every micro-batch goes through every stage once: F, and
    B or both I and W, on the stage's rank and on no other. In each stage forwards, backwards, and backwards by weights
    come in the order of micro-batches. It ends: no ranks wait for one another, whether its pairs run together or one
    after the other. What a rank sends to another one, forwards and backwards apart, is used there in the order of
    sending. G and D, if there are any, gather what is not there and drop what is, and all is dropped at the end. U, if
    there are any, come on every rank in one order, no backward pass of its micro-batches behind it and no forward pass
    of the update after the next before it.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=2)
    >>> check(s)
    >>> check(s._replace(rows=(s.rows[0], s.rows[1][1:])))
    Traceback (most recent call last):
    ValueError: schedule 1f1b: rank 1 has no 1F0, the forward of micro-batch 0 in stage 1
    """
    for _, fault in faults(s):
        raise ValueError(f"schedule {s.name}: {fault}")


def faults(s: Schedule) -> Faults:
    """The faults that `check` looks for; each kind only in what the kinds before have not found wrong."""
    for look in (_shape, _acts, _complete, _updates, _in_order, _pairs, _gathers, _deadlock, _channels):
        sound = True
        for fault in look(s):
            sound = False
            yield fault
        if not sound:
            return


def _shape(s: Schedule) -> Faults:
    ranks, p = s.stages.ranks, len(s.rows)
    if not ranks or s.parts < 1:
        yield 0, f"it has {len(ranks)} stages and {s.parts} micro-batches; both must be at least 1"
    elif len(s.stages.layers) != len(ranks):
        yield 0, f"layers are given for {len(s.stages.layers)} stages, and ranks for {len(ranks)}"
    elif [layer for layers in s.stages.layers for layer in layers] != list(range(sum(map(len, s.stages.layers)))):
        yield 0, "the layers of its stages are not 0, 1, 2, ... in order, each once"
    elif not all(s.stages.layers):
        yield 0, f"stage {s.stages.layers.index(())} has no layers"
    elif sorted(set(ranks)) != list(range(p)):
        yield 0, f"it has {p} rows, and its stages are on ranks {', '.join(map(str, sorted(set(ranks))))}"


def _acts(s: Schedule) -> Faults:
    """Acts that cannot be, are on another rank, or are there twice."""
    for rank, row in enumerate(s.rows):
        visited: set[Act] = set()
        for act in row:
            if act.kind not in KINDS:
                yield rank, f"rank {rank}: {act} is of kind {act.kind!r}; the kinds are {', '.join(KINDS)}"
            elif not 0 <= act.stage < len(s.stages.ranks):
                yield rank, f"rank {rank}: {act} is of stage {act.stage}; the stages are 0 to {len(s.stages.ranks) - 1}"
            elif not 0 <= act.micro_batch < (math.inf if act.kind in "GDU" else s.parts):
                yield rank, f"rank {rank}: {act} is of micro-batch {act.micro_batch}; they are 0 to {s.parts - 1}"
            elif s.stages.ranks[act.stage] != rank:
                yield rank, f"rank {rank} has {act}, and stage {act.stage} is on rank {s.stages.ranks[act.stage]}"
            elif act in visited:
                yield rank, f"rank {rank} has {act} twice"
            visited.add(act)


def _complete(s: Schedule) -> Faults:
    acts = {act for row in s.rows for act in row}
    for stage, rank in enumerate(s.stages.ranks):
        for micro_batch in range(s.parts):
            f, b, i, w = (Act(kind, micro_batch, stage) for kind in "FBIW")
            split = i in acts or w in acts
            if b in acts and split:
                yield rank, f"rank {rank} has {b} and {i if i in acts else w}; a backward is whole or split"
            for act in (f, i, w) if split and b not in acts else (f, b):
                if act not in acts:
                    label = KINDS[act.kind]
                    yield rank, f"rank {rank} has no {act}, the {label} of micro-batch {micro_batch} in stage {stage}"


def _updates(s: Schedule) -> Faults:
    count = sum(act.kind == "U" for act in s.rows[0])
    for rank, row in enumerate(s.rows):
        places = {i: act for i, act in enumerate(row) if act.kind == "U"}
        if [act.micro_batch for act in places.values()] != list(range(count)):
            updates_text = " ".join(map(str, places.values())) or "none"
            yield rank, f"rank {rank} has the updates {updates_text}; every rank has the same, from 0 on, in order"
        elif count and s.parts % count:
            yield rank, f"rank {rank} has {count} updates, which cannot share {s.parts} micro-batches evenly"
        else:
            for position, act in places.items():
                earliest, due = bounds(row, act.micro_batch, s.parts // count)
                if not earliest <= position <= due:
                    law = "an update follows the backwards of its micro-batches, and no forward of the next but one"
                    yield rank, f"rank {rank}: {act} is between {row[position - 1]} and what follows; {law}"


def _in_order(s: Schedule) -> Faults:
    needed = needs(s)
    for rank, row in enumerate(s.rows):
        position = {act: i for i, act in enumerate(row)}
        for act in row:
            for need in needed[act]:
                if position.get(need, -1) > position[act]:
                    yield rank, f"rank {rank}: {act} comes before {need}, whose result it needs"
        for kinds, label in IN_ORDER:
            last: dict[int, Act] = {}
            for act in row:
                if act.kind in kinds:
                    previous = last.get(act.stage, act)
                    if act.micro_batch < previous.micro_batch:
                        law = f"the {label} of a stage come in the order of micro-batches"
                        yield rank, f"rank {rank}: {previous} comes before {act}; {law}"
                    last[act.stage] = act


def _pairs(s: Schedule) -> Faults:
    following = {pair for row in s.rows for pair in itertools.pairwise(row)}
    for forward_act, backward_act in s.pairs:
        if (
            (forward_act, backward_act) not in following
            or (forward_act.kind, backward_act.kind) != ("F", "B")
            or forward_act.stage == backward_act.stage
        ):
            rank = s.stages.ranks[forward_act.stage]
            law = "a pair is an F and a B of another stage that follow each other in a row"
            yield rank, f"rank {rank}: {forward_act} and {backward_act} are no pair; {law}"


def _gathers(s: Schedule) -> Faults:
    for rank, row in enumerate(s.rows):
        resident: dict[int, Act] = {}
        for act in row:
            if act.kind == "G":
                if act.stage in resident:
                    yield rank, f"rank {rank}: {act} gathers parameters that are there since {resident[act.stage]}"
                resident[act.stage] = act
            elif act.kind == "D" and resident.pop(act.stage, None) is None:
                yield rank, f"rank {rank}: {act} drops parameters that are not there"
        for act in resident.values():
            yield rank, f"rank {rank} gathers parameters at {act} and never drops them"


def _deadlock(s: Schedule) -> Faults:
    for fused in (False, True) if s.pairs else (False,):
        stuck = run(s, fused).stuck
        if stuck:
            yield min(stuck), stuck_text(s, stuck) + " (if pairs run together)" * fused
            return


def _channels(s: Schedule) -> Faults:
    position = {act: i for row in s.rows for i, act in enumerate(row)}
    channels: defaultdict[tuple[int, int, bool], list[tuple[Act, Act]]] = defaultdict(list)
    for source, target in feeds(s).items():
        sender, receiver = s.stages.ranks[source.stage], s.stages.ranks[target.stage]
        if sender != receiver:
            channels[sender, receiver, source.kind == "F"].append((source, target))
    for (sender, receiver, _), messages in channels.items():
        for (first, first_target), (second, second_target) in itertools.pairwise(messages):
            if position[first_target] > position[second_target]:
                law = "messages are received in the order of sending"
                yield (
                    receiver,
                    f"rank {receiver}: {second_target} comes before {first_target}, and rank {sender} has {first} "
                    f"before {second}; {law}",
                )


def stuck_text(s: Schedule, stuck: Mapping[int, tuple[Act, Act]]) -> str:
    """Why a schedule does not end, from what each rank that stopped waits for: the circle of ranks."""
    rank, visited = min(stuck), list[int]()
    while rank not in visited and rank in stuck:
        visited.append(rank)
        rank = s.stages.ranks[stuck[rank][1].stage]
    circle = visited[visited.index(rank) :] if rank in visited else visited
    waits = [f"rank {member} waits at {stuck[member][0]} for {stuck[member][1]}" for member in circle]
    return "it deadlocks: " + ", ".join(waits)


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
