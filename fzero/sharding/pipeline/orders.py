"""The order in which one rank works, by family of schedules: kinds of acts and chunks, micro-batches being counted up.

p ranks, m micro-batches, v chunks a rank, r the rank. In every family the forwards of a chunk come in the order of
micro-batches, and so do its backwards and its backwards by weights: an order names only kind and chunk, and the k-th
forward of a chunk is that of micro-batch k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

Step = tuple[str, int]  # (kind of an act, chunk); kind "F&": a forward, paired with the backward that follows it


class Family(NamedTuple):
    """How a schedule orders a rank, and what it asks for.

    order: (p, m, v, r) -> the steps of rank r; those of micro-batches from m on are left out.
    chunks: the stages of a rank, None for any number; placement: "loop" or "v" (see `place`).
    least: the fewest micro-batches for p ranks. groups: whether they must come in equal groups (`group_size`).
    split: whether any backward is split into inputs and weights.
    ref: where it was published.
    """

    order: Callable[[int, int, int, int], Iterator[Step]]
    ref: str
    chunks: int | None = 1
    placement: str = "loop"
    least: Callable[[int], int] = lambda p: 1
    groups: bool = False
    split: bool = False


def group_size(p: int, m: int) -> int:
    """The micro-batches that an interleaved schedule sends through one chunk before the next: equal groups, of at
    least p if there are so many. 0 if m has no such groups.

    >>> [group_size(4, m) for m in (3, 4, 6, 8, 10, 11)]
    [3, 4, 6, 4, 5, 0]
    """
    rounds = max(1, m // p)
    return m // rounds if m % rounds == 0 else 0


def looped(p: int, m: int, v: int, warm: int, lag: int | None = None) -> Iterator[Step]:
    """`warm` forwards, then a backward and a forward in turn, then the backwards that are left.

    Forwards go through chunks 0 to v-1 in groups of `group_size` micro-batches, backwards through v-1 to 0. With a
    `lag` each backward is split, and its part by weights follows that many further backwards by inputs.
    """
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
    """The forwards before the first backward: all groups of the chunks before the last, and `pace` for each rank after
    this one."""
    return pace * (p - r - 1) + (v - 1) * group_size(p, m) + 1


def zb_v(p: int, m: int, v: int, r: int) -> Iterator[Step]:
    """Stages go down the ranks and up again, so that the last rank turns around at once: the first chunk fills the
    pipeline, and from the first backward on every gap is filled with a backward by weights."""
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
    owed = [n - backward[0], n - backward[1]]  # backwards of each chunk that are left, and weights of those
    for _ in range(r):
        yield "I", 0
        yield "I", 1
    for _ in range(p - r):
        yield "I", 0
        yield "W", 0
    yield from (("W", 1) for _ in range(owed[1]))
    yield from (("W", 0) for _ in range(owed[0] - (p - r)))


def dualpipe_v(p: int, m: int, v: int, r: int) -> Iterator[Step]:
    """The eight steps of DualPipe's README, with stages down the ranks and up again: forwards of one chunk beside
    backwards of the other in the middle, whole backwards but where a gap is to be filled."""
    owed: deque[int] = deque()  # chunks of the backwards by weights that are left, oldest first

    def inputs(chunk: int) -> Step:
        owed.append(chunk)
        return "I", chunk

    def weights() -> Iterator[Step]:
        if owed:
            yield "W", owed.popleft()

    after = p - r - 1
    yield from [("F", 0)] * (2 * after)
    yield from [("F", 0), ("F", 1)] * (r + 1)
    for _ in range(after):
        yield inputs(1)
        yield from weights()
        yield "F", 1
    for k in range(m - 2 * p + r + 1):
        # On the last rank the first pair's two chunks follow each other: apart, the second starts earlier.
        yield ("F" if k == 0 and after == 0 else "F&"), 0
        yield "B", 1
        yield from [("F&", 1), ("B", 0)]
    yield from [("B", 1), ("F&", 1), ("B", 0)] * after
    split = False
    for k in range(r + 1):
        for chunk in (1, 0):
            split = split or (k == (r + 1) // 2 and (r % 2 == 1 or chunk == 0))
            yield inputs(chunk) if split else ("B", chunk)
    for _ in range(after):
        yield from weights()
        yield inputs(0) if split else ("B", 0)
    for _ in range(len(owed)):
        yield from weights()


FAMILIES = {
    "gpipe": Family(lambda p, m, v, r: looped(p, m, v, m), "Huang et al. 2019, arXiv:1811.06965"),
    "1f1b": Family(lambda p, m, v, r: looped(p, m, v, p - r), "Narayanan et al. 2021, arXiv:2006.09503"),
    "interleaved": Family(
        lambda p, m, v, r: looped(p, m, v, interleaved_warm(p, m, v, r, 2)),
        "Narayanan et al. 2021, arXiv:2104.04473",
        chunks=None,
        groups=True,
    ),
    "zb-h1": Family(lambda p, m, v, r: looped(p, m, v, p - r, r), "Qi et al. 2024, arXiv:2401.10241", split=True),
    "zb-h2": Family(
        lambda p, m, v, r: looped(p, m, v, 2 * (p - r) - 1, 2 * r), "Qi et al. 2024, arXiv:2401.10241", split=True
    ),
    "interleaved-zb": Family(
        lambda p, m, v, r: looped(p, m, v, interleaved_warm(p, m, v, r, 1), r),
        "Qi et al. 2024, arXiv:2401.10241, with the chunks of arXiv:2104.04473",
        chunks=None,
        groups=True,
        split=True,
    ),
    "zb-v": Family(zb_v, "Qi et al. 2024, arXiv:2405.15362", chunks=2, placement="v", split=True),
    "dualpipe-v": Family(
        dualpipe_v, "DeepSeek-AI 2024, arXiv:2412.19437", chunks=2, placement="v", least=lambda p: 2 * p, split=True
    ),
}
