"""What a schedule is: the acts of each rank in their order, over the stages of a model."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fzero.core.arguments import checked
from fzero.sharding.pipeline.simulate import Simulated, simulate
from fzero.sharding.pipeline.timeline import draw_bars

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward by inputs",
    "W": "backward by weights",
    "G": "gather of the stage's parameters",
    "D": "drop of the gathered parameters",
    "U": "update of the parameters",
}
BACKWARD = ("B", "I")  # what sends a gradient to the stage before
UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "G": 0.0, "D": 0.0, "U": 0.0}  # ticks of a drawing


class Act(NamedTuple):
    """One entry of a rank's row: what is done with which micro-batch in which stage.

    Its text has the stage first, as in torch.distributed.pipelining.

    kind: F forward, B backward; or in place of B first I, the gradient by inputs, which the stage before waits for, and
    later W, the gradient by weights. G and D: the stage's parameters are gathered, and dropped (`with_gathers`). U: all
    ranks meet, and update the parameters of all their stages (`with_updates`).
    part: the micro-batch; of G and D which gather of the stage it is, counted from 0; of U which update.

    >>> print(Act("F", part=3, stage=1))
    1F3
    """

    kind: str
    part: int
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.part}"


class Stages(NamedTuple):
    """A model cut into stages: by stage its layers (global numbers, in order), and the rank of pp that has it.

    The first stage has the embedding, the last one the head.

    >>> stages = Stages(((0, 1), (2, 3), (4, 5), (6,)), ranks=(0, 1, 1, 0))
    >>> stages.size, stages.chunks(0)
    (2, (0, 3))
    """

    layers: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order: its chunk number k is the k-th of them."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


class Schedule(NamedTuple):
    """Which rank does what in which order, in one step of `parts` micro-batches; `print` draws it.

    The drawing plays it with one tick for F, I and W, two for B, and messages that take no time.

    rows: by rank of pp its acts. pairs: an F and a B that follow each other in a row, and that an executor may run
    together, so that each one's messages are under way while the other computes (DualPipe).

    >>> from fzero.sharding import pipeline
    >>> print(pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=3))
    1f1b: 2 ranks, 2 stages, 3 micro-batches
           0  1  2  3  4  5  6  7  8  9  10 11
    rank 0 F0 F1       B0─── F2 B1───    B2───
    rank 1    F0 B0─── F1 B1─── F2 B2───
    """

    name: str
    stages: Stages
    parts: int
    rows: tuple[tuple[Act, ...], ...]
    pairs: tuple[tuple[Act, Act], ...] = ()

    def __str__(self) -> str:
        return draw(self)


@checked()
def needs(s: Schedule) -> dict[Act, tuple[Act, ...]]:
    """By act, the acts that must have ended before it can start; U waits for what is before it on every rank.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=1)
    >>> [str(act) for act in needs(s)[Act("B", 0, 0)]]
    ['0F0', '1B0']
    """
    there, last = {act for row in s.rows for act in row}, len(s.stages.ranks) - 1
    found: dict[Act, tuple[Act, ...]] = {}
    before: dict[int, list[Act]] = {}  # by update, the act before it in each row
    for row in s.rows:
        for one, act in itertools.pairwise(row):
            if act.kind == "U":
                before.setdefault(act.part, []).append(one)
    for act in there:
        kind, part, stage = act
        if kind == "F":
            found[act] = (Act("F", part, stage - 1),) if stage > 0 else ()
        elif kind in BACKWARD:
            split = Act("I", part, stage + 1)
            after = split if split in there else Act("B", part, stage + 1)
            found[act] = (Act("F", part, stage), after) if stage < last else (Act("F", part, stage),)
        elif kind == "U":
            found[act] = tuple(before.get(part, ()))
        else:
            found[act] = (Act("I", part, stage),) if kind == "W" else ()
    return found


@checked()
def feeds(s: Schedule) -> dict[Act, Act]:
    """By act, the act of a neighbouring stage that waits for its result: activations, or a gradient going back.

    Rank by rank, in the order of the rows. It is a message where the two stages are on different ranks; the messages
    from one rank to another, forwards and backwards apart, arrive in the order in which they are wanted (see `check`).

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=1)
    >>> [f"{a} -> {b}" for a, b in feeds(s).items()]
    ['0F0 -> 1F0', '1B0 -> 0B0']
    """
    wanted = {act: acts for act, acts in needs(s).items() if act.kind != "U"}
    target = {need: act for act, acts in wanted.items() for need in acts if need.stage != act.stage}
    return {act: target[act] for row in s.rows for act in row if act in target}


def draw(s: Schedule) -> str:
    """The picture that `print(schedule)` shows. An act that can never start, and those after it, are left out and
    named below."""
    played = run(s)
    short = len(s.stages.ranks) == s.stages.size  # one stage a rank: its number says nothing
    rows = [
        [
            (played.start[act], played.end[act], str(act)[len(str(act.stage)) * short :])
            for act in row
            if act in played.end
        ]
        for row in s.rows
    ]
    picture = draw_bars([f"rank {rank}" for rank in range(len(rows))], rows)
    stuck = [f"rank {rank} waits at {act} for {need}" for rank, (act, need) in sorted(played.stuck.items())]
    counts = ((len(s.rows), "rank"), (len(s.stages.ranks), "stage"), (s.parts, "micro-batch"))
    said = ", ".join(f"{n} {what}{'' if n == 1 else 'es' if what.endswith('h') else 's'}" for n, what in counts)
    return "\n".join([f"{s.name}: {said}", picture, *stuck])


def run(s: Schedule, together: bool = False) -> Simulated[Act]:
    """The acts of a schedule in the ticks of a drawing."""
    return simulate(groups(s, together), needs(s), lambda group: UNIT[group[0].kind], lambda source, target: 0.0)


def groups(s: Schedule, together: bool) -> list[list[tuple[Act, ...]]]:
    """By rank what starts and ends at the same time: single acts, and the pairs if they run `together`."""
    other = dict(s.pairs) if together else {}
    second = set(other.values())
    return [[(act, other[act]) if act in other else (act,) for act in row if act not in second] for row in s.rows]
