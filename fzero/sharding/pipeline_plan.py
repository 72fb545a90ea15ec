"""A pipeline as an option of a plan: its schedule, and how a model's layers are cut into stages."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fzero.comm.axes import PP
from fzero.core.arguments import expect_fields
from fzero.core.config_tables import Count, at_least
from fzero.core.pytree import nearest
from fzero.core.text_parsing import read_text_file
from fzero.sharding import pipeline as schedules
from fzero.sharding.pipeline import (
    FAMILIES,
    Act,
    Schedule,
    Stages,
    feeds,
    needs,
    read_layout,
    schedule,
    with_updates,
)
from fzero.sharding.pipeline.table import simulate
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec

SCHEDULES = tuple(FAMILIES)
KINDS = ("F", "B", "I", "W")  # the acts that a run knows
STAGE = re.compile(r"(\d{1,6})[A-Z]\d", re.ASCII)  # of an act in a table


@dataclass(frozen=True)
class Pipeline:
    """How the layers of a model are shared among the ranks of pp, and in which order these compute.

    schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v" or "dualpipe-v" (see
        fzero.sharding.pipeline), or a table of one's own: a Schedule, its text (see
        fzero.sharding.pipeline.read_schedule), or the path of a file with one, which ends in .txt or has a separator. A
        table is kept as its text.
    chunks: the stages of a rank: any number for the interleaved ones, 2 for zb-v and dualpipe-v, else 1. A table has
        its own. 0: as the schedule has, or 1.
    layout: the number of layers of each stage, such as "8,9,9,6", or "auto": as even as they go, or as a table says.

    >>> Pipeline("interleaved", chunks=2)
    Pipeline(schedule='interleaved', chunks=2, layout='auto')
    >>> Pipeline("zb-v").chunks
    2
    >>> print(Pipeline("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1").name)
    table
    """

    schedule: str | Schedule = "1f1b"
    chunks: Annotated[Count, at_least(0)] = 0
    layout: str = "auto"

    def __post_init__(self) -> None:
        expect_fields(
            self,
            schedule='schedule is {}; write schedule="1f1b"',
            layout='layout is {}; write layout="auto", or the layers of each stage: "8,9,9,6"',
            chunks="chunks is {}; it must be a whole number of at least 0",
        )
        object.__setattr__(self, "schedule", text_of(self.schedule))
        object.__setattr__(self, "chunks", self.chunks or chunks_of(str(self.schedule)) or 1)
        if self.has_table:
            self._expect_table()
            return
        required = FAMILIES[str(self.schedule)].chunks
        if required not in (None, self.chunks):
            fits = " or ".join(name for name in SCHEDULES if FAMILIES[name].chunks in (None, self.chunks))
            raise ValueError(
                f"schedule {self.schedule} has {'one chunk' if required == 1 else f'{required} chunks'} a rank and "
                f"chunks is {self.chunks}; use chunks={required}, or schedule {fits}"
            )

    def with_followers(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of fields, with the chunks of a new schedule that has a number of its own where none is given."""
        follow = chunks_of(str(changes["schedule"])) if "schedule" in changes else 0
        return {"chunks": follow, **changes} if follow else dict(changes)

    @property
    def has_table(self) -> bool:
        """Whether the schedule is a table of one's own."""
        return self.schedule not in SCHEDULES

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.table().name if self.has_table else str(self.schedule)

    @property
    def split(self) -> bool:
        """Whether any backward pass is split into inputs and weights."""
        if self.has_table:
            return any(act.kind == "I" for row in self.table().rows for act in row)
        return FAMILIES[str(self.schedule)].split

    def table(self, layers: int = 0) -> Schedule:
        """The table, its stages cut from so many layers unless it says how (0: one layer each)."""
        assert isinstance(self.schedule, str)
        return read_table(self.schedule, layers)

    def _expect_table(self) -> None:
        table = self.table()
        for row in table.rows:
            for act in row:
                if act.kind not in KINDS:
                    raise ValueError(
                        f"schedule {table.name} has the act {act}; a run has the acts {', '.join(KINDS)} alone, and "
                        "gathers by itself: leave it out"
                    )
        if self.chunks > 1:
            raise ValueError(
                f"chunks is {self.chunks}, and schedule {table.name} is a table with its own stages; leave chunks out"
            )
        if self.layout != "auto" and says_layers(str(self.schedule)):
            raise ValueError(
                f"layout is {self.layout}, and schedule {table.name} is a table with a line of layers; give one of them"
            )


def chunks_of(schedule: str) -> int:
    """The chunks of a rank that a schedule has; 0 if it takes any number."""
    return FAMILIES[schedule].chunks or 0 if schedule in SCHEDULES else 1


def text_of(schedule: str | Schedule) -> str:
    """The name of a known schedule, or the text of a table; raises ValueError."""
    if isinstance(schedule, Schedule):
        schedules.check(schedule)
        return schedules.write_schedule(schedule)
    if schedule in SCHEDULES or "\n" in schedule.strip():
        return schedule
    if schedule.endswith(".txt") or os.sep in schedule:
        text = read_text_file(schedule)
        try:
            read_table(text, 0)
        except ValueError as error:
            raise ValueError(f"{schedule}: {error}") from None
        return text
    raise ValueError(
        f"schedule is {schedule!r}{nearest(schedule, SCHEDULES)}; it must be one of {', '.join(SCHEDULES)}, or the "
        "path of a table that ends in .txt"
    )


def says_layers(text: str) -> bool:
    """Whether the text of a table has a line of layers."""
    return any(line.split()[:1] == ["layers"] for line in text.splitlines())


@functools.lru_cache(maxsize=64)
def read_table(text: str, layers: int) -> Schedule:
    """The table of a text, with stages cut from so many layers."""
    if not layers and not says_layers(text):
        acts = " ".join(line.partition("#")[0] for line in text.splitlines())
        layers = 1 + max((int(stage) for stage in STAGE.findall(acts)), default=0)
    return schedules.read_schedule(text, [1.0] * layers)


def schedule_for(pipeline: Pipeline, stages: Stages, parts: int) -> Schedule:
    """The schedule of so many micro-batches over these stages; raises ValueError if it does not take so many."""
    if pipeline.has_table:
        table = pipeline.table()
        if parts > table.parts:
            raise ValueError(parts_differ(table, parts))
    else:
        name = str(pipeline.schedule)
        table = schedule(name, stages, max(parts, FAMILIES[name].min_parts(stages.size)))
        if table.parts == parts:
            return table
    rows = tuple(tuple(act for act in row if act.micro_batch < parts) for row in table.rows)
    return Schedule(table.name, stages, parts, rows)


def expect_parts(pipeline: Pipeline, stages: Stages, parts: int) -> None:
    """Raise ValueError if a schedule does not take so many micro-batches."""
    if not pipeline.has_table:
        schedule(str(pipeline.schedule), stages, parts)
    elif (table := pipeline.table()).parts != parts:
        raise ValueError(parts_differ(table, parts))


def parts_differ(table: Schedule, parts: int) -> str:
    """What a step of so many micro-batches is told that a table does not take."""
    return (
        f"schedule {table.name} is a table of {table.parts} micro-batches and a step has {parts} on each rank; change "
        "one of them"
    )


@functools.lru_cache(maxsize=64)
def build_schedule(pipeline: Pipeline, stages: Stages, parts: int, updates: int) -> tuple[Schedule, int]:
    """A schedule, and its `min_capacity`."""
    schedule = schedule_for(pipeline, stages, parts)
    schedule = with_updates(schedule, updates) if updates else schedule
    return schedule, min_capacity(schedule)


def min_capacity(s: Schedule) -> int:
    """The least number of messages on their way in a channel, of at least 2, with which a schedule ends."""
    required, positions = needs(s), {act: i for row in s.rows for i, act in enumerate(row)}
    channels: dict[tuple[int, int, bool], list[tuple[Act, Act]]] = {}
    for source, target in feeds(s).items():
        ends = s.stages.ranks[source.stage], s.stages.ranks[target.stage]
        if ends[0] != ends[1]:
            channels.setdefault((*ends, source.kind == "F"), []).append((source, target))
    rows, capacity = [[(act,) for act in row] for row in s.rows], 2
    # A rank that has sent `capacity` messages waits until the oldest is taken. A schedule may not survive that wait, so
    # it is played with it, for twice as many until it ends.
    while True:
        dependencies = dict(required)
        for messages in channels.values():
            ordered = sorted(messages, key=lambda pair: positions[pair[0]])
            for (source, _), (_, target) in zip(ordered[capacity + 1 :], ordered):
                dependencies[source] = (*dependencies[source], target)
        if not simulate(rows, dependencies, lambda group: 1.0, lambda source, target: 0.0).stuck:
            return capacity
        capacity *= 2


def stacks_of(model: Any, named: Mapping[str, Any]) -> dict[str, int]:
    """{stack of a layered model: its number of layers}, in the order of a forward pass."""
    blocks = list(model.block) if isinstance(model.block, Mapping) else ["blocks"]
    depths = {name.split("/")[0]: leaf.shape[0] for name, leaf in named.items() if is_stacked(name)}
    return {stack: depths[stack] for stack in blocks if stack in depths}


def stages_for(pipeline: Pipeline, model: Any, named: Mapping[str, Any], ranks: int) -> Stages:
    """The stages of a model on so many ranks of pp; raises ValueError."""
    if not hasattr(model, "block"):
        raise ValueError(f"pp={ranks} cuts a layered Model into stages, and this is a plain parameter tree; use dp")
    layers = sum(stacks_of(model, named).values())
    if pipeline.has_table:
        return stages_of_table(pipeline, layers, ranks)
    placement = FAMILIES[str(pipeline.schedule)].placement
    return read_layout(pipeline.layout, [1.0] * layers, ranks, pipeline.chunks, placement)


def stages_of_table(pipeline: Pipeline, layers: int, ranks: int) -> Stages:
    """The stages of a table; raises ValueError if it is for other numbers of ranks or layers."""
    table = pipeline.table()
    if len(table.rows) != ranks:
        raise ValueError(f"schedule {table.name} is a table of {len(table.rows)} ranks and the mesh has pp={ranks}")
    if pipeline.layout != "auto":
        cut = read_layout(pipeline.layout, [1.0] * layers, len(table.stages.ranks))  # which counts layers and stages
        return Stages(cut.layers, table.stages.ranks)
    stages = pipeline.table(layers).stages
    if (depth := sum(map(len, stages.layers))) != layers:
        raise ValueError(f"schedule {table.name} is a table of {depth} layers and the model has {layers}")
    return stages


def outside_users(
    model: Any, named: Mapping[str, Any], stages: Stages | None
) -> dict[str, tuple[tuple[int, str], ...]]:
    """By leaf outside the layers the parts of the model that use it; {} without stages."""
    if stages is None:
        return {}
    stage_of, first = {"embed": 0, "head": len(stages.layers) - 1}, 0
    joins = {f"join{stack.removeprefix('blocks')}" for stack in getattr(model, "join", {})}
    for stack, depth in stacks_of(model, named).items():
        segment = f"join{stack.removeprefix('blocks')}"
        if segment in joins:
            stage_of[segment] = next(i for i, layers in enumerate(stages.layers) if first in layers)
        first += depth
    shared, out = getattr(model, "shared", ()), {}
    for name in named:
        if not is_stacked(name):
            parts = {name.split("/")[0]} | ({"head", *joins} if name in shared else set())
            out[name] = tuple(sorted((stage_of[segment], segment) for segment in parts & set(stage_of)))
    return out


def with_layers(
    compute: dict[str, Spec], named: Mapping[str, Any], model: Any, stages: Stages | None
) -> dict[str, Spec]:
    """The specs with the layers of each stack shared among the ranks of pp, if there are stages."""
    if stages is None:
        return compute
    first, rows = 0, {}
    for stack, depth in stacks_of(model, named).items():
        of_ranks = [
            sorted(layer - first for stage in stages.chunks(rank) for layer in stages.layers[stage])
            for rank in range(stages.size)
        ]
        rows[stack] = tuple(tuple(row for row in rank_layers if 0 <= row < depth) for rank_layers in of_ranks)
        first += depth
    out = {}
    for name, spec in compute.items():
        stack = name.split("/")[0]
        out[name] = replace(spec, dims=((PP,), *spec.dims[1:]), rows=rows[stack]) if is_stacked(name) else spec
    return out
