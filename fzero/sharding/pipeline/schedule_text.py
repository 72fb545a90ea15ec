"""A schedule as text that a person can write, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fzero.core.arguments import checked
from fzero.sharding.pipeline.check import faults
from fzero.sharding.pipeline.stages import split_layers
from fzero.sharding.pipeline.table import KINDS, Act, Schedule, Stages

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
