"""What passes between the stages of a planned pipeline: the shapes that ranks of pp tell each other in a first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.comm.rank_tables import TreeLayout
from fzero.core import pytree
from fzero.core.device import FakeDevice
from fzero.models import base
from fzero.run.config.run_config import LocalSteps, RunConfig
from fzero.run.setup import build as run_build
from fzero.sharding import Plan, fake_mesh
from fzero.train.batch import split_batch
from fzero.train.execution import Execution
from fzero.train.loss import context_of
from fzero.train.stage_exchange import signature_of
from fzero.train.stage_sharing import SegmentActivations, segments_of, stages_of
from fzero.train.streamed_model import StreamedModel


def stage_shapes(
    config: RunConfig, plan: Plan, model: base.Model, batch: Mapping[str, Tensor], parts: int, mode: FakeDevice
) -> dict[Any, Any]:
    """What a step of `plan`, with pp, knows after its first one, from a layer of each stack on fake tensors."""
    t = replace(config.train, batch=config.train.micro_batch, update="end", updates=1, delay_after=0, compiled=False)
    config = replace(config, local=LocalSteps())
    alone = replace(
        config, zero=0, codec="", offload="", mesh={}, train=t, resident=0, partition_activations=False
    )  # parameters whole over dp, ep
    sizes = {axis.name: 1 if axis.name in ("pp", "dp", "rp", "ep") else axis.size for axis in plan.mesh.axes}
    job = run_build.build(alone, fake_mesh(sizes), model=model, layers=1)
    execution = Execution(kernels=config.train.kernels, prefetch=0)
    streamed = StreamedModel(
        job.model, segments_of(job.model, job.plan, 1), job.plan, context_of(job.plan, execution), execution
    )
    params = pytree.map(
        lambda x: torch.empty(x.shape, dtype=x.dtype, device=mode.device), run_build.like_of(job).params
    )
    micro_batch = split_batch(batch, parts)[1][0]
    ctx, ahead, x = (
        streamed.context(micro_batch, {}, 0),
        streamed.fetcher(params, mode.device),
        SegmentActivations([], pytree.flatten(())[1]),
    )
    behind: dict[str, tuple[Any, Any]] = {}  # by part: the shapes and the tree of what it gives
    loss = None
    for segment in streamed.parts:
        x = streamed.primal((segment,), x, micro_batch, ctx, ahead)
        if segment.kind == "head":
            loss = x
        else:
            behind[segment.name] = [(tuple(leaf.shape), leaf.dtype) for leaf in x.leaves], x.treedef
    assert plan.stages is not None  # a plan with pp
    assert loss is not None  # the head is the last part
    shapes: dict[Any, Any] = {"loss": TreeLayout.from_tree(loss)}
    for rank in range(plan.stages.size):
        for stage, segments in stages_of(segments_of(job.model, plan), plan, rank).items():
            if segments[-1].kind != "head":
                shapes[stage, signature_of(micro_batch)] = behind[segments[-1].name]
    return shapes
