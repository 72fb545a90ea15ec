"""How the layers of a model are cut into stages, and which rank has which; and a schedule as text that a person can
write, and back.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Sequence

from fzero.core.arguments import checked, expect_count
from fzero.sharding.pipeline.check import faults
from fzero.sharding.pipeline.table import KINDS, Act, Schedule, Stages

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


ACT = re.compile(r"(\d{1,6})([A-Z])(\d{1,6})", re.ASCII)
OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")  # as torch writes a pair
LAYERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
RANK = re.compile(r"rank\s+(\d{1,6})\s*:(.*)", re.ASCII)


@checked()
def write_schedule(s: Schedule) -> str:
    """The text of a schedule that `check` finds no fault with; `read_schedule` reads it.

    >>> from fzero.sharding import pipeline
    >>> print(write_schedule(pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=2)), end="")
    name 1f1b
    micro-batches 2
    layers 0-1 2-3
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    layers = " ".join("-".join(map(str, sorted({min(span), max(span)}))) for span in s.stages.layers)
    lines = [f"name {s.name}", f"micro-batches {s.parts}", f"layers {layers}"]
    paired = dict(s.pairs)
    for rank, row in enumerate(s.rows):
        acts = "".join(f"{act}{'&' if act in paired else ' '}" for act in row).rstrip()
        lines.append(f"rank {rank}: {acts}".rstrip())
    return "\n".join(lines) + "\n"


@checked()
def read_schedule(text: str, costs: Sequence[float] = ()) -> Schedule:
    """The schedule of a text, checked.

    Each line is the row of a rank, in order, with or without `rank N:` before it. An act is stage, kind and
    micro-batch: 1F3 is the forward of micro-batch 3 in stage 1 (kinds: F, B, or I and later W; G, D and U). Acts are
    separated by spaces or commas, and empty fields count for nothing, so that the tables which
    torch.distributed.pipelining writes can be read. `0F4&3B1` is a pair. The lines `name`, `micro-batches` and `layers`
    (of each stage: 0-7 8-15) may be left out, and # begins a comment.

    costs: the times of the model's layers, which are cut by them if the text has no line `layers`; see `layout`.

    Raises ValueError with line, rank and act for what cannot be read, and for what `check` finds.

    >>> s = read_schedule("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1", costs=[1.0] * 4)
    >>> s.parts, s.stages.layers
    (2, ((0, 1), (2, 3)))
    """
    headers: dict[str, str] = {}
    line_numbers: list[int] = []  # the line of each row
    rows: list[tuple[Act, ...]] = []
    pairs: list[tuple[Act, Act]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip(" \t\ufeff")
        key, _, value = line.partition(" ")
        if key in ("name", "micro-batches", "layers"):
            if key in headers:
                raise ValueError(f"line {number}: there is a line {key!r} before this one")
            headers[key] = value.strip()
            if key == "micro-batches" and not re.fullmatch(r"[1-9]\d{0,5}", headers[key], re.ASCII):
                raise ValueError(f"line {number}: {value.strip()!r} is no number of micro-batches")
            if key == "layers":
                layers = tuple(_read_layers(word, number) for word in value.split())
        elif line:
            row, paired = _read_row(line, number, len(rows))
            line_numbers, rows, pairs = [*line_numbers, number], [*rows, row], [*pairs, *paired]
    ranks = _ranks(rows, line_numbers)
    stages = Stages(layers, ranks) if "layers" in headers else split_layers(costs, ranks)
    parts = int(headers.get("micro-batches", 0)) or 1 + max(act.micro_batch for row in rows for act in row)
    s = Schedule(headers.get("name") or "table", stages, parts, tuple(rows), tuple(pairs))
    for rank, fault in faults(s):
        raise ValueError(f"line {line_numbers[rank]}: {fault}")
    return s


def _read_row(line: str, number: int, rank: int) -> tuple[tuple[Act, ...], list[tuple[Act, Act]]]:
    """The acts of a line, and its pairs."""
    headed = RANK.fullmatch(line)
    if headed and int(headed[1]) != rank:
        raise ValueError(f"line {number}: the row of rank {headed[1]} where that of rank {rank} is due")
    row: list[Act] = []
    first: list[int] = []
    acts = OVERLAP.sub(r"\1&\2", headed[2] if headed else line)
    for field in acts.replace(",", " ").split():
        words = field.split("&")
        first += range(len(row), len(row) + len(words) - 1)
        for word in words:
            act_match = ACT.fullmatch(word)
            if not act_match or act_match[2] not in KINDS:
                raise ValueError(
                    f"line {number}: rank {rank}: {word!r} is no act; write stage, kind ({', '.join(KINDS)}) and "
                    "micro-batch, such as 1F3"
                )
            row.append(Act(act_match[2], int(act_match[3]), int(act_match[1])))
    return tuple(row), [(row[i], row[i + 1]) for i in first]


def _ranks(rows: Sequence[Sequence[Act]], line_numbers: Sequence[int]) -> tuple[int, ...]:
    """By stage the rank that has it."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for act in row:
            if owner.setdefault(act.stage, rank) != rank:
                raise ValueError(
                    f"line {line_numbers[rank]}: rank {rank} has {act}, and stage {act.stage} is on rank "
                    f"{owner[act.stage]} (line {line_numbers[owner[act.stage]]})"
                )
        if not row:
            raise ValueError(f"line {line_numbers[rank]}: rank {rank} has no acts")
    if not owner:
        raise ValueError("the text has no rows; write a line of acts such as 0F0 0B0 for each rank")
    for stage in range(max(owner)):
        if stage not in owner:
            raise ValueError(f"there are acts of stage {max(owner)} and none of stage {stage}")
    return tuple(owner[stage] for stage in range(len(owner)))


def _read_layers(word: str, number: int) -> tuple[int, ...]:
    """The numbers of `4-7`, or of `8`."""
    ends = LAYERS.fullmatch(word)
    if not ends:
        raise ValueError(f"line {number}: {word!r} are no layers; write the first and last of a stage, such as 0-7")
    return tuple(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
