"""How the layers of a model are cut into stages, and which rank has which."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from fzero.core.arguments import checked, expect_count
from fzero.sharding.pipeline.table import Stages

PLACEMENTS = {"loop": "stage s on rank s mod p", "v": "down the ranks and up again"}


@checked()
def stage_ranks(p: int, v: int = 1, placement: str = "loop") -> tuple[int, ...]:
    """By stage its rank, for p ranks with v stages each.

    placement: "loop", stage s on rank s mod p; "v", down the ranks and up again, so that first and last stage are on
    one rank.

    >>> stage_ranks(3, 2), stage_ranks(3, 2, "v")
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"no placement {placement!r} of stages; it must be {' or '.join(PLACEMENTS)}")
    turns = [reversed(range(p)) if placement == "v" and turn % 2 else range(p) for turn in range(v)]
    return tuple(rank for turn in turns for rank in turn)


@checked()
def layout(
    costs: Sequence[float], p: int, v: int = 1, placement: str = "loop", embed: float = 0.0, head: float = 0.0
) -> Stages:
    """Cut layers into p v stages so that the longest stage is as short as can be.

    Of all such cuts it is the one with the fewest layers on early ranks, which have the most micro-batches in flight:
    the sum over ranks r of (p - r) times the layers of r is the smallest.

    costs: the time of each layer, in any unit. placement: see `place`. embed, head: what the first and the last stage
    compute beside their layers. Every stage has at least one layer.

    Raises ValueError if there are more stages than layers.

    >>> [len(layers) for layers in layout([1.0] * 32, p=4, head=2.5).layers]
    [8, 9, 9, 6]
    """
    _expect_fit(len(costs), p, v)
    return split_layers(costs, stage_ranks(p, v, placement), embed, head)


@checked()
def split_layers(costs: Sequence[float], ranks: Sequence[int], embed: float = 0.0, head: float = 0.0) -> Stages:
    """Cut layers into a stage for each of `ranks` (by stage its rank), as `layout` says.

    >>> split_layers([1.0, 1.0, 2.0], (0, 1)).layers
    ((0, 1), (2,))
    """
    n, p = len(costs), max(ranks) + 1
    if len(ranks) > n:
        raise ValueError(f"there are {len(ranks)} stages, and the model has {n} layers; a stage has at least one")
    _check_costs(costs, embed, head)
    full_costs = [cost + embed * (i == 0) + head * (i == n - 1) for i, cost in enumerate(costs)]
    upto = [0.0, *itertools.accumulate(full_costs)]
    spans = sorted({upto[i] - upto[j] for i in range(n + 1) for j in range(i)})
    max_span = spans[bisect.bisect_left(spans, True, key=lambda span: _fits(upto, span, len(ranks)))]
    # best[i]: of all cuts of the first i layers into the stages so far, (weighted layers, number of layers by stage)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank in ranks:
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (weight, counts) in best.items():
            for end in range(begin + 1, n + 1):
                if upto[end] - upto[begin] > max_span:
                    break
                candidate = weight + (p - rank) * (end - begin), (*counts, end - begin)
                longer[end] = min(candidate, longer.get(end, candidate))
        best = longer
    return _cut(best[n][1], tuple(ranks))


def _fits(upto: Sequence[float], max_span: float, stages: int) -> bool:
    """Whether layers with these cumulated costs fit into so many stages of at most `max_span` each."""
    begin, used = 0, 0
    for end in range(1, len(upto)):
        if upto[end] - upto[begin] > max_span:
            begin, used = end - 1, used + 1
            if upto[end] - upto[begin] > max_span:
                return False
    return used + 1 <= stages


@checked()
def read_layout(text: str, costs: Sequence[float], p: int, v: int = 1, placement: str = "loop") -> Stages:
    """The stages of a text: "auto", or the number of layers of each stage, such as "8,9,9,6". See `layout`.

    >>> read_layout("3,1", [1.0] * 4, p=2).layers
    ((0, 1, 2), (3,))
    """
    if text == "auto":
        return layout(costs, p, v, placement)
    _expect_fit(len(costs), p, v)
    ranks, words = stage_ranks(p, v, placement), [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word)):
            raise ValueError(f"layout {text!r}: {word!r} is no number of layers; write auto, or such as 8,9,9,6")
    counts = [int(word) for word in words]
    if len(counts) != len(ranks) or sum(counts) != len(costs):
        raise ValueError(
            f"layout {text} has {sum(counts)} layers in {len(counts)} stages; the model has {len(costs)}, and pp={p} "
            f"with {v} chunk{'s' * (v > 1)} a rank has {len(ranks)} stages"
        )
    return _cut(counts, ranks)


def _cut(counts: Sequence[int], ranks: tuple[int, ...]) -> Stages:
    ends = list(itertools.accumulate(counts))
    return Stages(tuple(tuple(range(end - n, end)) for n, end in zip(counts, ends)), ranks)


def _expect_fit(layers: int, p: int, v: int) -> None:
    expect_count("the number of ranks of pp", p)
    expect_count("the number of chunks of a rank", v)
    if p * v > layers:
        raise ValueError(
            f"pp={p} with {v} chunk{'s' * (v > 1)} a rank has {p * v} stages, and the model has {layers} layers; a "
            "stage has at least one"
        )


def _check_costs(costs: Sequence[float], embed: float, head: float) -> None:
    named = [
        *((f"of layer {i}", cost) for i, cost in enumerate(costs)),
        ("of the embedding", embed),
        ("of the head", head),
    ]
    for label, cost in named:
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"layout: the cost {label} is {cost!r}; it must be a number of at least 0")
