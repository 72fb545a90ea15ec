"""A schedule by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fzero.core.arguments import checked, expect_count
from fzero.core.foreign import nearest
from fzero.sharding.pipeline.orders import FAMILIES, Family, Step, group_size
from fzero.sharding.pipeline.stages import place
from fzero.sharding.pipeline.table import Act, Schedule, Stages


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
        did = {"F&": "F", "B": "IW"}.get(kind, kind)  # B is both
        part = counts[did[0], chunk]
        counts.update((one, chunk) for one in did)
        if part < parts:
            row.append(Act(kind[0], part, chunks[chunk]))
    return tuple(row), [(row[i], row[i + 1]) for i in first]


def _check_placement(name: str, family: Family, stages: Stages, v: int) -> None:
    p = stages.size
    if family.chunks not in (None, v):
        what = "one stage" if family.chunks == 1 else f"{family.chunks} stages"
        fits = ", ".join(other for other, one in FAMILIES.items() if one.chunks in (None, v))
        instead = f"; for these take {fits}" if p * v == len(stages.ranks) else ""
        raise ValueError(
            f"schedule {name} has {what} a rank; {len(stages.ranks)} stages on {p} ranks are {len(stages.ranks) / p:g}"
            f"{instead}"
        )
    wanted = place(p, v, family.placement)
    if stages.ranks != wanted:
        raise ValueError(
            f"schedule {name} has stages on ranks {_shown(wanted)}; these are on {_shown(stages.ranks)}: make them "
            f"with layout(costs, {p}, {v}, {family.placement!r})"
        )


def _shown(ranks: tuple[int, ...]) -> str:
    return " ".join(str(rank) for rank in ranks)


def _check_parts(name: str, family: Family, p: int, v: int, m: int) -> None:
    least = family.least(p)
    if m < least:
        raise ValueError(
            f"schedule {name} on {p} ranks needs at least {least} micro-batches, and there "
            f"{'is' if m == 1 else 'are'} {m}; take at least {least}, or another schedule"
        )
    if family.groups and v > 1 and not group_size(p, m):
        below = next(n for n in range(m - 1, 0, -1) if group_size(p, n))
        above = next(n for n in range(m + 1, 2 * m + p) if group_size(p, n))
        raise ValueError(
            f"schedule {name} on {p} ranks takes micro-batches in equal groups of {p} or somewhat more, and {m} has "
            f"none; {below} or {above} would do"
        )
