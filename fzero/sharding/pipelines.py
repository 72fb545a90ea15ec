"""A pipeline as an option of a plan: its schedule, and how a model's layers are cut into stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fzero.core.arguments import expect_count, expect_kind
from fzero.core.pytree import nearest
from fzero.sharding.pipeline import FAMILIES, Stages, read_layout
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Spec

SCHEDULES = tuple(FAMILIES)


@dataclass(frozen=True)
class Pipeline:
    """How the layers of a model are shared among the ranks of pp, and in which order these compute.

    schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v" or "dualpipe-v" (see
    fzero.sharding.pipeline).
    chunks: the stages of a rank: any number for the interleaved ones, 2 for zb-v and dualpipe-v, else 1.
    layout: the number of layers of each stage, such as "8,9,9,6", or "auto": as even as they go.

    >>> Pipeline("interleaved", chunks=2)
    Pipeline(schedule='interleaved', chunks=2, layout='auto')
    """

    schedule: str = "1f1b"
    chunks: int = 1
    layout: str = "auto"

    def __post_init__(self) -> None:
        expect_kind("schedule", self.schedule, str, 'write schedule="1f1b"')
        expect_kind("layout", self.layout, str, 'write layout="auto", or the layers of each stage: "8,9,9,6"')
        expect_count("chunks", self.chunks)
        if self.schedule not in SCHEDULES:
            near, names = nearest(self.schedule, SCHEDULES), ", ".join(SCHEDULES)
            raise ValueError(f"schedule is {self.schedule!r}{near}; it must be one of {names}")
        wanted = FAMILIES[self.schedule].chunks
        if wanted not in (None, self.chunks):
            fits = " or ".join(name for name in SCHEDULES if FAMILIES[name].chunks in (None, self.chunks))
            raise ValueError(
                f"schedule {self.schedule} has {'one chunk' if wanted == 1 else f'{wanted} chunks'} a rank and chunks "
                f"is {self.chunks}; use chunks={wanted}, or schedule {fits}"
            )

    @property
    def placement(self) -> str:
        """How the stages are laid out on the ranks, see fzero.sharding.pipeline.place."""
        return FAMILIES[self.schedule].placement

    @property
    def split(self) -> bool:
        """Whether any backward pass is split into inputs and weights."""
        return FAMILIES[self.schedule].split


def stacks_of(model: Any, named: Mapping[str, Any]) -> dict[str, int]:
    """{stack of a layered model: its number of layers}, in the order of a forward pass."""
    blocks = list(model.block) if isinstance(model.block, Mapping) else ["blocks"]
    depths = {name.split("/")[0]: leaf.shape[0] for name, leaf in named.items() if is_stacked(name)}
    return {stack: depths[stack] for stack in blocks if stack in depths}


def stages_for(pipeline: Pipeline, model: Any, named: Mapping[str, Any], ranks: int) -> Stages:
    """The stages of a model on so many ranks of pp; raises ValueError for one without layers, or with too few."""
    if not hasattr(model, "block"):
        raise ValueError(f"pp={ranks} cuts a layered Model into stages, and this is a plain parameter tree; use dp")
    layers = sum(stacks_of(model, named).values())
    return read_layout(pipeline.layout, [1.0] * layers, ranks, pipeline.chunks, pipeline.placement)


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
        rows[stack] = tuple(tuple(row for row in one if 0 <= row < depth) for one in of_ranks)
        first += depth
    out = {}
    for name, spec in compute.items():
        stack = name.split("/")[0]
        out[name] = replace(spec, dims=(("pp",), *spec.dims[1:]), rows=rows[stack]) if is_stacked(name) else spec
    return out
