"""The order in which one rank works, by family of schedules: kinds of acts and chunks, micro-batches being counted up.

p ranks, m micro-batches, v chunks a rank, r the rank. In every family the forwards of a chunk come in the order of
micro-batches, and so do its backwards and its backwards by weights: an order names only kind and chunk, and the k-th
forward of a chunk is that of micro-batch k.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fzero.core.arguments import checked, expect_count
from fzero.core.text_parsing import nearest
from fzero.sharding.pipeline.stages import stage_ranks
from fzero.sharding.pipeline.table import Act, Schedule, Stages

Step = tuple[str, int]  # (kind of an act, chunk); kind "F&": a forward, paired with the backward that follows it


class ScheduleFamily(NamedTuple):
    """How a schedule orders a rank, and what it asks for."""

    # (p, m, v, r) -> the steps of rank r; those of micro-batches from m on are left out
    order: Callable[[int, int, int, int], Iterator[Step]]
    ref: str  # where it was published
    chunks: int | None = 1  # the stages of a rank, None for any number
    placement: str = "loop"  # or "v", see `place`
    # the fewest micro-batches for p ranks
    min_parts: Callable[[int], int] = lambda p: 1  # the fewest micro-batches for p ranks
    # whether micro-batches must come in equal groups (`group_size`)
    groups: bool = False  # whether micro-batches must come in equal groups (`group_size`)
    # whether any backward is split into inputs and weights
    split: bool = False  # whether any backward is split into inputs and weights


def group_size(p: int, m: int) -> int:
    """The micro-batches that an interleaved schedule sends through one chunk before the next; 0 if no groups fit.

    >>> [group_size(4, m) for m in (3, 4, 6, 8, 10, 11)]
    [3, 4, 6, 4, 5, 0]
    """
    rounds = max(1, m // p)
    return m // rounds if m % rounds == 0 else 0


def looped(p: int, m: int, v: int, warm: int, lag: int | None = None) -> Iterator[Step]:
    """`warm` forwards, then a backward and a forward in turn, then the other backwards; `lag`: split backwards."""
    size = group_size(p, m) if v > 1 else m
    forwards = [chunk for _ in range(0, m, size) for chunk in range(v) for _ in range(size)]
    backwards = [v - 1 - chunk for chunk in forwards]
    yield from (("F", chunk) for chunk in forwards[:warm])
    for k, chunk in enumerate(backwards):
        yield ("B" if lag is None else "I"), chunk
        if lag is not None and k >= lag:
            yield "W", backwards[k - lag]
        yield from (("F", chunk) for chunk in forwards[warm + k : warm + k + 1])
    if lag is not None:
        yield from (("W", chunk) for chunk in backwards[max(0, len(backwards) - lag) :])


def interleaved_warm(p: int, m: int, v: int, r: int, pace: int) -> int:
    """The forwards before the first backward: all groups of the chunks before the last, and `pace` per later rank."""
    return pace * (p - r - 1) + (v - 1) * group_size(p, m) + 1


def zb_v(p: int, m: int, v: int, r: int) -> Iterator[Step]:
    """Stages go down the ranks and up again; every gap after the first backward has a backward by weights."""
    n = max(m, 2 * p - 1)  # with fewer the order is that of so many, less those that are not there
    forward, backward = [0, 0], [0, 0]

    def step(kind: str, chunk: int) -> Step:
        forward[chunk] += kind == "F"
        backward[chunk] += kind == "I"
        return kind, chunk

    for _ in range(2 * (p - r) - 1):
        yield step("F", 0)
    for _ in range(r):
        yield step("F", 1)
        yield step("F", 0)
    for _ in range(p - r):
        yield from (step(kind, 1) for kind in "FIW")
    while forward[1] < max(forward[0], n):
        if forward[0] < n:
            yield step("F", 0)
        yield from (step(kind, 0) for kind in "IW")
        yield from (step(kind, 1) for kind in "FIW")
    remaining = [n - backward[0], n - backward[1]]  # backwards of each chunk that are left, and weights of those
    for _ in range(r):
        yield "I", 0
        yield "I", 1
    for _ in range(p - r):
        yield "I", 0
        yield "W", 0
    yield from (("W", 1) for _ in range(remaining[1]))
    yield from (("W", 0) for _ in range(remaining[0] - (p - r)))


def dualpipe_v(p: int, m: int, v: int, r: int) -> Iterator[Step]:
    """The eight steps of DualPipe's README, with stages down the ranks and up again."""
    pending_weights: deque[int] = deque()  # chunks of the backwards by weights that are left, oldest first

    def inputs(chunk: int) -> Step:
        pending_weights.append(chunk)
        return "I", chunk

    def weights() -> Iterator[Step]:
        if pending_weights:
            yield "W", pending_weights.popleft()

    later_ranks = p - r - 1
    yield from [("F", 0)] * (2 * later_ranks)
    yield from [("F", 0), ("F", 1)] * (r + 1)
    for _ in range(later_ranks):
        yield inputs(1)
        yield from weights()
        yield "F", 1
    for k in range(m - 2 * p + r + 1):
        # On the last rank the first pair's two chunks follow each other: apart, the second starts earlier.
        yield ("F" if k == 0 and later_ranks == 0 else "F&"), 0
        yield "B", 1
        yield from [("F&", 1), ("B", 0)]
    yield from [("B", 1), ("F&", 1), ("B", 0)] * later_ranks
    split = False
    for k in range(r + 1):
        for chunk in (1, 0):
            split = split or (k == (r + 1) // 2 and (r % 2 == 1 or chunk == 0))
            yield inputs(chunk) if split else ("B", chunk)
    for _ in range(later_ranks):
        yield from weights()
        yield inputs(0) if split else ("B", 0)
    for _ in range(len(pending_weights)):
        yield from weights()


FAMILIES = {
    "gpipe": ScheduleFamily(lambda p, m, v, r: looped(p, m, v, m), "Huang et al. 2019, arXiv:1811.06965"),
    "1f1b": ScheduleFamily(lambda p, m, v, r: looped(p, m, v, p - r), "Narayanan et al. 2021, arXiv:2006.09503"),
    "interleaved": ScheduleFamily(
        lambda p, m, v, r: looped(p, m, v, interleaved_warm(p, m, v, r, 2)),
        "Narayanan et al. 2021, arXiv:2104.04473",
        chunks=None,
        groups=True,
    ),
    "zb-h1": ScheduleFamily(
        lambda p, m, v, r: looped(p, m, v, p - r, r), "Qi et al. 2024, arXiv:2401.10241", split=True
    ),
    "zb-h2": ScheduleFamily(
        lambda p, m, v, r: looped(p, m, v, 2 * (p - r) - 1, 2 * r), "Qi et al. 2024, arXiv:2401.10241", split=True
    ),
    "interleaved-zb": ScheduleFamily(
        lambda p, m, v, r: looped(p, m, v, interleaved_warm(p, m, v, r, 1), r),
        "Qi et al. 2024, arXiv:2401.10241, with the chunks of arXiv:2104.04473",
        chunks=None,
        groups=True,
        split=True,
    ),
    "zb-v": ScheduleFamily(zb_v, "Qi et al. 2024, arXiv:2405.15362", chunks=2, placement="v", split=True),
    "dualpipe-v": ScheduleFamily(
        dualpipe_v, "DeepSeek-AI 2024, arXiv:2412.19437", chunks=2, placement="v", min_parts=lambda p: 2 * p, split=True
    ),
}


@checked()
def schedule(name: str, stages: Stages, parts: int) -> Schedule:
    """The schedule of this name for `parts` micro-batches over these stages.

    For p ranks with v chunks (stages) each, m micro-batches, and a chunk's times F, I, W, and B = I + W, with messages
    that take no time:

        name            v, placement  idle time of a step                               most chunks in flight
        gpipe           1             (p-1)(F+B)                                        m
        1f1b            1             (p-1)(F+B)                                        min(m, p-r) on rank r
        interleaved     any           (p-1)(F+B) for m >= p                             2(p-r-1) + (v-1)g + 1
        zb-h1           1             (p-1) max(F, I, F+I-W) for m >= p                 min(m, p)
        zb-h2           1             (p-1) max(F, I-F, F+I-2W) for m >= 2p-1           min(m, 2p-1)
        interleaved-zb  any           as zb-h1                                          p + (v-1)g
        zb-v            2, "v"        (p-1) max(F, I) + (p-2) max(0, F-I,               2p
                                      W - max(F, I)), about, for m >= 2p-1
        dualpipe-v      2, "v"        (p-1)F where F = I = W;                           2p+1
                                      (p-1)(F&B+B-3W) with pairs together

    The interleaved ones take m in equal groups of g = m / max(1, m // p) micro-batches, which is p where p divides m;
    dualpipe-v takes m >= 2p. No order is idle for less than (p-1)F: so long the last rank
    waits for its first micro-batch. The formula of zb-v is exact where no two of F, I, W differ by more than a factor
    of 2; for everything else there is `play`.

    name: one of `FAMILIES`, which says where each was published.

    Raises ValueError for another name, for stages that are not placed as the schedule needs them, and for micro-batches
    that are too few for it or not in equal groups, with the numbers that would do.

    >>> from fzero.sharding import pipeline
    >>> s = pipeline.schedule("gpipe", pipeline.layout([1.0] * 4, 2), parts=2)
    >>> [" ".join(str(act) for act in row) for row in s.rows]
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    if name not in FAMILIES:
        raise ValueError(f"no schedule {name!r}; the schedules are {', '.join(FAMILIES)}{nearest(name, FAMILIES)}")
    expect_count("the number of micro-batches", parts)
    family, p = FAMILIES[name], stages.size
    v = len(stages.ranks) // p
    _check_placement(name, family, stages, v)
    _check_parts(name, family, p, v, parts)
    rows, pairs = [], []
    for rank in range(p):
        row, paired = _count_up(family.order(p, parts, v, rank), stages.chunks(rank), parts)
        rows.append(row)
        pairs += paired
    return Schedule(name, stages, parts, tuple(rows), tuple(pairs))


def _count_up(
    order: Iterable[Step], chunks: tuple[int, ...], parts: int
) -> tuple[tuple[Act, ...], list[tuple[Act, Act]]]:
    """The acts of a rank, micro-batches counted up by chunk and kind, and those that form pairs."""
    counts: Counter[tuple[str, int]] = Counter()
    row: list[Act] = []
    first: list[int] = []  # where the pairs begin
    for kind, chunk in order:
        if kind == "F&":
            first.append(len(row))
        kinds = {"F&": "F", "B": "IW"}.get(kind, kind)  # B is both
        micro_batch = counts[kinds[0], chunk]
        counts.update((letter, chunk) for letter in kinds)
        if micro_batch < parts:
            row.append(Act(kind[0], micro_batch, chunks[chunk]))
    return tuple(row), [(row[i], row[i + 1]) for i in first]


def _check_placement(name: str, family: ScheduleFamily, stages: Stages, v: int) -> None:
    p = stages.size
    if family.chunks not in (None, v):
        stages_text = "one stage" if family.chunks == 1 else f"{family.chunks} stages"
        fits = ", ".join(candidate for candidate, entry in FAMILIES.items() if entry.chunks in (None, v))
        instead = f"; for these take {fits}" if p * v == len(stages.ranks) else ""
        raise ValueError(
            f"schedule {name} has {stages_text} a rank; {len(stages.ranks)} stages on {p} ranks are "
            f"{len(stages.ranks) / p:g}{instead}"
        )
    expected = stage_ranks(p, v, family.placement)
    if stages.ranks != expected:
        raise ValueError(
            f"schedule {name} has stages on ranks {_ranks_text(expected)}; these are on {_ranks_text(stages.ranks)}: "
            f"make them with layout(costs, {p}, {v}, {family.placement!r})"
        )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return " ".join(str(rank) for rank in ranks)


def _check_parts(name: str, family: ScheduleFamily, p: int, v: int, m: int) -> None:
    min_parts = family.min_parts(p)
    if m < min_parts:
        raise ValueError(
            f"schedule {name} on {p} ranks needs at least {min_parts} micro-batches, and there "
            f"{'is' if m == 1 else 'are'} {m}; take at least {min_parts}, or another schedule"
        )
    if family.groups and v > 1 and not group_size(p, m):
        lower = next(n for n in range(m - 1, 0, -1) if group_size(p, n))
        upper = next(n for n in range(m + 1, 2 * m + p) if group_size(p, n))
        raise ValueError(
            f"schedule {name} on {p} ranks takes micro-batches in equal groups of {p} or somewhat more, and {m} has "
            f"none; {lower} or {upper} would do"
        )
