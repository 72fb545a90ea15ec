"""Whether a schedule is one: every act once, where it belongs, in an order that ends."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from fzero.core.arguments import checked
from fzero.sharding.pipeline.table import BACKWARD, KINDS, Act, Schedule, feeds, needs, run
from fzero.sharding.pipeline.updates import bounds

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
    """The faults that `check` looks for, those of one kind after those of another; each kind is looked for only in what
    the kinds before have not found wrong."""
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
        seen: set[Act] = set()
        for act in row:
            if act.kind not in KINDS:
                yield rank, f"rank {rank}: {act} is of kind {act.kind!r}; the kinds are {', '.join(KINDS)}"
            elif not 0 <= act.stage < len(s.stages.ranks):
                yield rank, f"rank {rank}: {act} is of stage {act.stage}; the stages are 0 to {len(s.stages.ranks) - 1}"
            elif not 0 <= act.part < (math.inf if act.kind in "GDU" else s.parts):
                yield rank, f"rank {rank}: {act} is of micro-batch {act.part}; they are 0 to {s.parts - 1}"
            elif s.stages.ranks[act.stage] != rank:
                yield rank, f"rank {rank} has {act}, and stage {act.stage} is on rank {s.stages.ranks[act.stage]}"
            elif act in seen:
                yield rank, f"rank {rank} has {act} twice"
            seen.add(act)


def _complete(s: Schedule) -> Faults:
    there = {act for row in s.rows for act in row}
    for stage, rank in enumerate(s.stages.ranks):
        for part in range(s.parts):
            f, b, i, w = (Act(kind, part, stage) for kind in "FBIW")
            split = i in there or w in there
            if b in there and split:
                yield rank, f"rank {rank} has {b} and {i if i in there else w}; a backward is whole or split"
            for act in (f, i, w) if split and b not in there else (f, b):
                if act not in there:
                    what = KINDS[act.kind]
                    yield rank, f"rank {rank} has no {act}, the {what} of micro-batch {part} in stage {stage}"


def _updates(s: Schedule) -> Faults:
    count = sum(act.kind == "U" for act in s.rows[0])
    for rank, row in enumerate(s.rows):
        places = {i: act for i, act in enumerate(row) if act.kind == "U"}
        if [act.part for act in places.values()] != list(range(count)):
            had = " ".join(map(str, places.values())) or "none"
            yield rank, f"rank {rank} has the updates {had}; every rank has the same, from 0 on, in order"
        elif count and s.parts % count:
            yield rank, f"rank {rank} has {count} updates, which cannot share {s.parts} micro-batches evenly"
        else:
            for place, act in places.items():
                own, due = bounds(row, act.part, s.parts // count)
                if not own <= place <= due:
                    law = "an update follows the backwards of its micro-batches, and no forward of the next but one"
                    yield rank, f"rank {rank}: {act} is between {row[place - 1]} and what follows; {law}"


def _in_order(s: Schedule) -> Faults:
    wanted = needs(s)
    for rank, row in enumerate(s.rows):
        place = {act: i for i, act in enumerate(row)}
        for act in row:
            for need in wanted[act]:
                if place.get(need, -1) > place[act]:
                    yield rank, f"rank {rank}: {act} comes before {need}, whose result it needs"
        for kinds, what in IN_ORDER:
            last: dict[int, Act] = {}
            for act in row:
                if act.kind in kinds:
                    before = last.get(act.stage, act)
                    if act.part < before.part:
                        law = f"the {what} of a stage come in the order of micro-batches"
                        yield rank, f"rank {rank}: {before} comes before {act}; {law}"
                    last[act.stage] = act


def _pairs(s: Schedule) -> Faults:
    following = {pair for row in s.rows for pair in itertools.pairwise(row)}
    for one, other in s.pairs:
        if (one, other) not in following or (one.kind, other.kind) != ("F", "B") or one.stage == other.stage:
            rank = s.stages.ranks[one.stage]
            law = "a pair is an F and a B of another stage that follow each other in a row"
            yield rank, f"rank {rank}: {one} and {other} are no pair; {law}"


def _gathers(s: Schedule) -> Faults:
    for rank, row in enumerate(s.rows):
        held: dict[int, Act] = {}
        for act in row:
            if act.kind == "G":
                if act.stage in held:
                    yield rank, f"rank {rank}: {act} gathers parameters that are there since {held[act.stage]}"
                held[act.stage] = act
            elif act.kind == "D" and held.pop(act.stage, None) is None:
                yield rank, f"rank {rank}: {act} drops parameters that are not there"
        for act in held.values():
            yield rank, f"rank {rank} gathers parameters at {act} and never drops them"


def _deadlock(s: Schedule) -> Faults:
    for together in (False, True) if s.pairs else (False,):
        stuck = run(s, together).stuck
        if stuck:
            yield min(stuck), stuck_text(s, stuck) + " (if pairs run together)" * together
            return


def _channels(s: Schedule) -> Faults:
    place = {act: i for row in s.rows for i, act in enumerate(row)}
    channels: defaultdict[tuple[int, int, bool], list[tuple[Act, Act]]] = defaultdict(list)
    for source, target in feeds(s).items():
        sender, receiver = s.stages.ranks[source.stage], s.stages.ranks[target.stage]
        if sender != receiver:
            channels[sender, receiver, source.kind == "F"].append((source, target))
    for (sender, receiver, _), messages in channels.items():
        for (first, late), (second, early) in itertools.pairwise(messages):
            if place[late] > place[early]:
                law = "messages are received in the order of sending"
                yield (
                    receiver,
                    f"rank {receiver}: {early} comes before {late}, and rank {sender} has {first} before "
                    + (f"{second}; {law}"),
                )


def stuck_text(s: Schedule, stuck: Mapping[int, tuple[Act, Act]]) -> str:
    """Why a schedule does not end, from what each rank that stopped waits for: the circle of ranks."""
    rank, seen = min(stuck), list[int]()
    while rank not in seen and rank in stuck:
        seen.append(rank)
        rank = s.stages.ranks[stuck[rank][1].stage]
    circle = seen[seen.index(rank) :] if rank in seen else seen
    waits = [f"rank {one} waits at {stuck[one][0]} for {stuck[one][1]}" for one in circle]
    return "it deadlocks: " + ", ".join(waits)
