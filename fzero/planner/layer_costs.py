"""The seconds of each layer, of the embedding and of the head, and the layout of a pipeline by them.

One micro-batch goes through all layers on fake tensors, on a rank that has the whole model but for its tp, cp and ep:
what a rank of pp computes does not depend on which other layers it has. Messages of dp and pp are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fzero.planner.devices import Device
from fzero.planner.pipeline_report import layout_text
from fzero.planner.plan_report import has_rates
from fzero.planner.step_trace import FakeStep, Transfer, run_step
from fzero.planner.timing import play_of
from fzero.run.build import build
from fzero.run.config import LocalSteps, RunConfig
from fzero.sharding import fake_mesh
from fzero.sharding.pipeline import FAMILIES, split_layers, stage_ranks
from fzero.sharding.pipeline_plan import Pipeline

COST = "cost"  # --layout cost


class Costs(NamedTuple):
    """Seconds of a micro-batch's forward and backward pass."""

    layers: tuple[float, ...]  # of all stacks, in the order of a forward pass; a join counts to the layer behind it
    embed: float
    head: float


def with_layout(config: RunConfig, sizes: Mapping[str, int], device: Device) -> RunConfig:
    """`config` with the numbers of layers by cost in place of "cost"; another one as it is.

    Raises ValueError for a mesh without pp, a table of one's own, and a device whose rates are not known.
    """
    pipeline = config.pipeline
    if pipeline.layout != COST:
        return config
    p = sizes.get("pp", 1)
    if p == 1:
        raise ValueError(f"layout is {COST}, and the mesh has no pp; leave it out, or use a mesh with pp=2 (--mesh)")
    if pipeline.has_table:
        raise ValueError(f"layout is {COST}, and schedule {pipeline.name} is a table; give it a line of layers")
    if not has_rates(device):
        raise ValueError(
            f"layout is {COST}, and the rates of {device.name} are unknown; run fzero bench first, or give the numbers "
            "of layers that fzero plan --layout cost --gpu NAME shows"
        )
    even = replace(config, pipeline=replace(pipeline, layout="auto"))
    build(even, fake_mesh(sizes))  # what a run refuses is refused before anything is traced
    costs = layer_costs(even, sizes, device)
    ranks = stage_ranks(p, pipeline.chunks, FAMILIES[str(pipeline.schedule)].placement)
    cut = split_layers(costs.layers, ranks, costs.embed, costs.head)
    return replace(config, pipeline=replace(pipeline, layout=layout_text(cut)))


def layer_costs(config: RunConfig, sizes: Mapping[str, int], device: Device) -> Costs:
    """The Costs of a model's parts on a device, shared by the ranks of tp, cp and ep of a mesh of these sizes."""
    model_axes = {axis: size for axis, size in sizes.items() if axis not in ("pp", "dp", "rp")}
    micro, data = config.train.micro_batch, fake_mesh(model_axes).data_size
    t = replace(config.train, batch=micro * data, update="end", updates=1, delay_after=0, measure_every=0)
    config = replace(config, local=LocalSteps())
    alone = replace(
        config,
        zero=0,
        codec="",
        offload="",
        mesh=model_axes,
        train=t,
        resident=0,
        pipeline=Pipeline(),
        partition_activations=False,
    )
    return costs_of(run_step(alone, model_axes, 0, device.target), model_axes, device)


def costs_of(step: FakeStep, sizes: Mapping[str, int], device: Device) -> Costs:
    """The Costs of a recorded step of one micro-batch."""
    sim = play_of(step.job.config, sizes, device)
    events = [e for stay in step.stays for e in stay.events]
    sim.waited = {e.number for e in events if isinstance(e, Transfer) and e.event == "wait"}
    spent: dict[tuple[str, int], float] = {}  # by part and layer, in the order of the forward pass; -1: no layer
    for stay in step.stays:
        begin, visit = sim.clock["device"], stay.visit
        sim.run(stay.events, 0, len(stay.events), [])
        if visit.phase in ("forward", "backward"):
            key = visit.segment, -1 if visit.layer is None else visit.layer
            spent[key] = spent.get(key, 0.0) + sim.clock["device"] - begin
    layers: list[float] = []
    ends, join_s = {"embed": 0.0, "head": 0.0}, 0.0
    for (segment, layer), seconds in spent.items():
        if layer >= 0:
            layers.append(seconds + join_s)
            join_s = 0.0
        elif segment in ends:
            ends[segment] = seconds
        else:
            join_s += seconds
    return Costs(tuple(layers), ends["embed"], ends["head"])
