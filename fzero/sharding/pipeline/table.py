"""What a schedule is: the acts of each rank in their order, when each starts and ends, and a drawing of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from fzero.core.arguments import checked

A = TypeVar("A", bound=Hashable)


class SimulatedTimes(NamedTuple, Generic[A]):
    """The times of the acts that ran, and by row the first that is stuck."""

    start: dict[A, float]
    end: dict[A, float]
    stuck: dict[int, tuple[A, A]]  # empty if every act ran


def simulate(
    rows: Sequence[Sequence[tuple[A, ...]]],
    needs: Mapping[A, Sequence[A]],
    time: Callable[[tuple[A, ...]], float],
    delay: Callable[[A, A], float],
) -> SimulatedTimes[A]:
    """Run each row in its order, an act as soon as its row is free and the acts that it needs have ended."""
    start: dict[A, float] = {}
    end: dict[A, float] = {}
    waiting: dict[A, list[int]] = {}
    stuck: dict[int, tuple[A, A]] = {}
    free, cursor, ready = [0.0] * len(rows), [0] * len(rows), list(range(len(rows)))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        while cursor[row] < len(rows[row]):
            group = rows[row][cursor[row]]
            dependencies = [(act, need) for act in group for need in needs[act] if need not in group]
            missing = next((pair for pair in dependencies if pair[1] not in end), None)
            if missing is not None:
                waiting.setdefault(missing[1], []).append(row)
                stuck[row] = missing
                break
            begin = max((free[row], *(end[need] + delay(need, act) for act, need in dependencies)))
            free[row] = begin + time(group)
            cursor[row] += 1
            for act in group:
                start[act], end[act] = begin, free[row]
                ready += waiting.pop(act, ())
    return SimulatedTimes(start, end, stuck)


Bar = tuple[float, float, str]  # start, end, label
WIDTH = 120  # most characters of a line


def draw_bars(names: Sequence[str], rows: Sequence[Sequence[Bar]], tick: float = 1.0, width: int = WIDTH) -> str:
    """The rows of bars under a ruler of ticks, cut to `width`; times are rounded to ticks.

    >>> print(draw_bars(["a", "b"], [[(0, 2, "x"), (3, 4, "y")], [(1, 2, "z")]]))
      0 1 2 3
    a x──   y
    b   z
    """
    placed = [[(round(start / tick), round(end / tick), label) for start, end, label in row] for row in rows]
    ticks = max((end for row in placed for _, end, _ in row), default=0)
    cell = max((len(label) for row in placed for _, _, label in row), default=1) + 1
    margin = max((len(name) for name in names), default=0) + 1
    count = -(-ticks // max(1, (width - margin) // cell)) or 1
    fit = max(1, -(-ticks // count))  # ticks of a band: all are about equally long
    lines = [_line(row, ticks, cell) for row in placed]
    step = -(-(len(str(ticks)) + 1) // cell)  # a number of the ruler at least so many ticks after the one before
    ruler = "".join(f"{'' if i % step else i:<{cell}}" for i in range(ticks))
    bands = []
    for first in range(0, max(ticks, 1), fit):
        cut = slice(first * cell, (first + fit) * cell)
        band = [("", ruler), *zip(names, lines)]
        bands.append("\n".join(f"{name:<{margin}}{line[cut]}".rstrip() for name, line in band))
    return "\n\n".join(bands)


def _line(row: Sequence[tuple[int, int, str]], ticks: int, cell: int) -> str:
    line = [" "] * (ticks * cell)
    for start, end, label in row:
        if end > start:
            bar = label if end == start + 1 else f"{label:─<{(end - start) * cell - 1}}"
            line[start * cell : end * cell] = f"{bar:<{(end - start) * cell}}"
    return "".join(line)


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
    micro_batch: the micro-batch; of G and D which gather of the stage it is, counted from 0; of U which update.

    >>> print(Act("F", micro_batch=3, stage=1))
    1F3
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


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

    @property
    def layout(self) -> str:
        """The number of layers of each stage, such as "8,9,9,6"."""
        return ",".join(str(len(layers)) for layers in self.layers)

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
    acts, last = {act for row in s.rows for act in row}, len(s.stages.ranks) - 1
    needed: dict[Act, tuple[Act, ...]] = {}
    previous_acts: dict[int, list[Act]] = {}  # by update, the act before it in each row
    for row in s.rows:
        for previous, act in itertools.pairwise(row):
            if act.kind == "U":
                previous_acts.setdefault(act.micro_batch, []).append(previous)
    for act in acts:
        kind, micro_batch, stage = act
        if kind == "F":
            needed[act] = (Act("F", micro_batch, stage - 1),) if stage > 0 else ()
        elif kind in BACKWARD:
            split = Act("I", micro_batch, stage + 1)
            successor = split if split in acts else Act("B", micro_batch, stage + 1)
            needed[act] = (Act("F", micro_batch, stage), successor) if stage < last else (Act("F", micro_batch, stage),)
        elif kind == "U":
            needed[act] = tuple(previous_acts.get(micro_batch, ()))
        else:
            needed[act] = (Act("I", micro_batch, stage),) if kind == "W" else ()
    return needed


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
    needed = {act: acts for act, acts in needs(s).items() if act.kind != "U"}
    target = {need: act for act, acts in needed.items() for need in acts if need.stage != act.stage}
    return {act: target[act] for row in s.rows for act in row if act in target}


def draw(s: Schedule) -> str:
    """The picture that `print(schedule)` shows; acts that can never start are named below it."""
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
    counts_text = ", ".join(f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('h') else 's'}" for n, noun in counts)
    return "\n".join([f"{s.name}: {counts_text}", picture, *stuck])


def run(s: Schedule, fused: bool = False) -> SimulatedTimes[Act]:
    """The acts of a schedule in the ticks of a drawing."""
    return simulate(groups(s, fused), needs(s), lambda group: UNIT[group[0].kind], lambda source, target: 0.0)


def groups(s: Schedule, fused: bool) -> list[list[tuple[Act, ...]]]:
    """By rank what starts and ends together: acts, or pairs if `fused`."""
    partner = dict(s.pairs) if fused else {}
    second = set(partner.values())
    return [[(act, partner[act]) if act in partner else (act,) for act in row if act not in second] for row in s.rows]
