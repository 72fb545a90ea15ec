"""A step of generation on fake tensors: the most bytes that it has beside its weights and pages, and its operators.

The step is that of `generate.make_step`, with the kernels of the device planned for. Where a kernel's definition reads
where rows begin, it gets the numbers of the planned batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.device import HOST, FakeDevice, Target
from fzero.core.pytree import Tree
from fzero.generate import PageSpec, StepBatch, make_step
from fzero.models import Model
from fzero.offload import DiskTensor, LeafFiles
from fzero.offload.nvme import buffer_need
from fzero.planner.fake_disk import PlannedNvme
from fzero.planner.generation_costs import Rows
from fzero.planner.step_trace import LOOKS
from fzero.run.measure.live_bytes import LiveBytes
from fzero.sharding import Plan
from fzero.sharding.slices import shard_dim

ALIKE = 4  # equal rows that are traced one by one; the others' tokens stand behind the last row, as padding does


class TracedStep(NamedTuple):
    """What a step takes beside its weights, its pages and its batch."""

    bytes: int  # activations, logits, and weights on their way, at the peak
    ops: int  # operators that a host starts one by one
    total_bytes: int  # of all tensors that it makes, which a record of it keeps


class StepRecord(LiveBytes):
    """A count of live bytes and operators that answers what a step reads of its batch."""

    def __init__(self, *trees: Any, batch: StepBatch, values: Sequence[list], device: Any, pool: Any) -> None:
        self.values = {x.untyped_storage()._cdata: numbers for x, numbers in zip(batch, values)}
        self.pool, self.ops, self.total = pool, 0, 0
        super().__init__(*trees, batch, device=device)
        self.peak, self.total = self.live, 0

    def born(self, x: Tensor, key: int, size: int, on_device: bool) -> None:
        """Add up what is made."""
        self.total += size * on_device

    def lent(self, storage: Any) -> bool:
        """Whether a storage is a piece of the pool of buffers."""
        return self.pool is not None and self.pool.holds(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is LOOKS:
            return self.values[args[0].untyped_storage()._cdata][int(args[0].storage_offset())]
        self.ops += not (func.is_view or self.inside)
        return super().__torch_dispatch__(func, types, args, kwargs)


def fake_params(plan: Plan, mode: FakeDevice, nvme: PlannedNvme | None) -> Tree:
    """A rank's weights at rest, as fake tensors of `mode`, or on a disk without files."""
    shapes, leaves = plan.local_shapes["params"], plan.leaves
    on_disk = {name for name, leaf in leaves.items() if leaf.params.memory.on_disk}
    files = {name: LeafFiles(tuple(shapes[name]), leaves[name].dtype, shard_dim(name) == 1) for name in on_disk}
    store: Any = nvme.open(files, plan.mesh) if nvme is not None else None  # a PlannedStore

    def leaf(name: str, like: Tensor) -> Any:
        if name in on_disk:
            return DiskTensor(store, name)
        device = HOST if leaves[name].params.memory.on_host else mode.device
        return torch.empty(shapes[name], dtype=leaves[name].dtype, device=device)

    return pytree.map_named(leaf, plan.like)


def batch_of(step: Sequence[Rows], page_tokens: int) -> tuple[StepBatch, int, int]:
    """(a batch with some of the rows, the tokens and the wanted logits of all of them)."""
    rows = [
        ([0] * r.tokens, r.context - r.tokens, range(-(-r.context // page_tokens)))
        for r in step
        for _ in range(min(ALIKE, int(r.count)))
    ]
    batch = StepBatch.of_rows(rows, [1] * len(rows), page_tokens=page_tokens)
    return batch, sum(r.tokens * int(r.count) for r in step), sum(int(r.count) for r in step)


def trace_rows(model: Model, plan: Plan, spec: PageSpec, target: Target, step: Sequence[Rows]) -> TracedStep:
    """The TracedStep of these rows on a rank, the logits of the last token of each row wanted."""
    real, tokens, logits = batch_of(step, spec.page_tokens)
    values, run = [x.flatten().tolist() for x in real], make_step(model, plan)
    sizes = {"tokens": tokens, "positions": tokens, "slots": tokens, "logit_rows": logits}
    shapes = [(sizes.get(name, len(x)), *x.shape[1:]) for name, x in zip(StepBatch._fields, real)]
    nvme = PlannedNvme() if "nvme" in plan.offloads else None
    if nvme is not None:
        nvme.need(buffer_need(plan, prefetch=1))
    with torch.no_grad(), FakeDevice(target) as mode:
        params, pages = fake_params(plan, mode, nvme), spec.zeros(mode.device)
        batch = StepBatch(*(torch.empty(shape, dtype=x.dtype, device=mode.device) for x, shape in zip(real, shapes)))
        device = None if target.kind == "cpu" else mode.device
        pool = nvme.buffers if nvme is not None else None
        with StepRecord(params, pages.layers, batch=batch, values=values, device=device, pool=pool) as record:
            start = record.live
            run(params, pages, batch)
    buffers = pool.size if pool is not None and target.kind == "cpu" else 0
    return TracedStep(record.peak - start + buffers, record.ops, record.total)
