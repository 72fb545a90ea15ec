"""The gradients of a step: micro-batch by micro-batch, part by part, from the parameters at rest to the shards.

Each part of a layered model (embedding, stacks, head) is fetched with the next ones on their way, run and dropped; in
reverse in the backward pass, where each part's gradients leave to be summed at once. This is torch.func.grad of
`models.forward.loss`, written out to control memory and messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import offload
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.core.stack import LayerLoop, segment_pair, static_signature
from fzero.core.vjp_pair import VjpPair
from fzero.models import base, forward
from fzero.offload import Nvme
from fzero.sharding import Plan
from fzero.sharding.gradient_sums import GradientReducer
from fzero.sharding.prefetch import LeafGroup, NodeShards, ParamFetcher, PartitionedActivations, Prefetcher, Resident
from fzero.train.codes import params_coding
from fzero.train.execution import Execution
from fzero.train.stage_exchange import Segment, SegmentActivations, StackHook, stages_of


class SegmentPass(NamedTuple):
    """A part before the head whose forward pass is done, with what its backward pass needs."""

    segment: Segment
    pairs: tuple[VjpPair, ...]
    extra: list[Tensor]  # the pairs' inputs that are not differentiated
    inputs: int  # the number of leaves of x that it took
    run: LayerLoop | None = None  # of a stack
    residuals: Any = None  # of a function that is called once: its residuals

    def order(self) -> list[LeafGroup]:
        """The groups that its backward pass fetches, in their order."""
        if self.run is None:
            return self.segment.groups if self.residuals.needs else []
        groups = self.segment.groups
        return [groups[i] for i in self.run.order()]


class ForwardResult(NamedTuple):
    """A micro-batch between its forward and its backward pass over the parts of a stage."""

    passed: list[SegmentPass]  # emptied by the backward pass
    x: SegmentActivations
    batch: base.Batch
    ctx: base.Ctx
    ahead: Prefetcher | Resident

    def order(self) -> list[LeafGroup]:
        """The groups that the backward pass fetches, in their order."""
        return [group for segment_pass in reversed(self.passed) for group in segment_pass.order()]


class HeadResult(NamedTuple):
    """A micro-batch between the forward and the backward pass of the head."""

    loss: base.Loss
    pair: VjpPair
    residuals: Any
    other_results: list[Tensor]  # the results beside the loss's total
    inputs: int  # the number of leaves of x that it took


class StreamedModel(NamedTuple):
    """The passes of a layered model over parameters as a step uses them, a stage at a time."""

    model: base.Model
    parts: tuple[Segment, ...]  # of the whole model
    plan: Plan
    ctx: base.Ctx
    execution: Execution
    nvme: Nvme | None = None
    shape_cache: dict[Any, Any] = {}  # noqa: RUF012  (see StageExchange.shapes; given where pp is used)

    @property
    def remat(self) -> Remat:
        """What is computed again in the backward pass."""
        assert isinstance(self.execution.remat, Remat)  # Execution parses a text
        return self.execution.remat

    @property
    def local_segments(self) -> tuple[Segment, ...]:
        """The parts of this rank's stages, in the order of a forward pass."""
        return tuple(segment for stage in stages_of(self.parts, self.plan).values() for segment in stage)

    @property
    def split(self) -> bool:
        """Whether the schedule has backward passes by inputs and by weights."""
        return self.plan.stages is not None and self.plan.pipeline is not None and self.plan.pipeline.split

    def pairs_of(
        self, segment: Segment, x_def: Any, ctx: base.Ctx, batch: base.Batch
    ) -> tuple[tuple[VjpPair, ...], list[Any], list[Tensor]]:
        """(pairs, structure of the result, other inputs) of a part's functions; blocks alone are compiled."""
        block, dropped = segment.kind == "block", ctx.draws.dropped
        ctx = ctx._replace(draws=ctx.draws._replace(dropped=()))
        leaves, extra_def = pytree.flatten(ctx if block else (ctx, batch))
        short = tuple(name.removeprefix(f"{segment.name}/") for name in segment.leaves) if block else segment.leaves
        compiled, budget = (self.ctx.compiled, self.remat.budget) if block else (False, 1.0)
        structure = (short, x_def, extra_def, static_signature(leaves))
        frozen, split = len(segment.leaves) - len(self.trained(segment)), block and self.split
        built = [segment_pair(segment.kind, f, structure, compiled, budget, frozen, split) for f in segment.functions]
        pairs = tuple(pair for pair, _ in built)
        if block and dropped:
            identity = segment_pair(segment.kind, passed_over, structure, False, 1.0, frozen, split)[0]
            numbered = enumerate(itertools.islice(itertools.cycle(pairs), segment.depth), segment.first)
            pairs = tuple(identity if number in dropped else pair for number, pair in numbered)
        return pairs, built[0][1], [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def trained(self, segment: Segment) -> tuple[str, ...]:
        """The leaves of a part that are trained."""
        return tuple(name for name in segment.leaves if name not in self.plan.frozen)

    def prepare(self, segment: Segment, x: SegmentActivations, batch: base.Batch, ctx: base.Ctx, params: Tree) -> None:
        """Make the programs of a stack for activations that look like `x`, before these are there."""
        device = pytree.leaves(batch)[0].device
        fetcher, number = ParamFetcher(params, self.plan, device), torch.full((), segment.first, device=device)
        pairs, _, extra = self.pairs_of(segment, x.treedef, ctx, batch)
        for pair, group in zip(pairs, segment.groups):
            pair.prepare([*fetcher.like(group), *x.leaves, number, *extra])

    def primal(
        self,
        parts: Sequence[Segment],
        x: SegmentActivations,
        batch: base.Batch,
        ctx: base.Ctx,
        ahead: Prefetcher,
        on_stack: StackHook = lambda part, x: None,
    ) -> Any:
        """The activations after some parts, or the loss after a head; nothing is kept. on_stack: see `forward`."""
        ahead.expect([group for segment in parts for group in segment.groups], "forward")
        batch = forward.localize_batch(self.model, batch, ctx)
        zero = torch.full((), 0, device=pytree.leaves(batch)[0].device)
        leaves, x_def = x
        with torch.no_grad():
            for segment in parts:
                pairs, out_def, extra = self.pairs_of(segment, x_def, ctx, batch)
                if segment.depth:
                    on_stack(segment, SegmentActivations(leaves, x_def))
                    run = LayerLoop(pairs, segment.depth, 0, first=segment.first)
                    leaves = run.primal(layer_fetcher(ahead, segment), leaves, extra)
                else:
                    leaves = pairs[0].primal([*ahead.fetch(segment.groups[0]), *leaves, zero, *extra])
                    x_def = out_def[0]
        if not parts or parts[-1].kind != "head":
            return SegmentActivations(leaves, x_def)
        return forward.flag_invalid(pytree.unflatten(leaves, x_def), batch)

    def forward(
        self,
        parts: Sequence[Segment],
        x: SegmentActivations,
        batch: base.Batch,
        ctx: base.Ctx,
        ahead: Prefetcher | Resident,
        early: Sequence[LeafGroup] = (),
        on_stack: StackHook = lambda part, x: None,
    ) -> ForwardResult:
        """The forward pass of a micro-batch over a stage's parts but the head, and what its backward needs."""
        batch = forward.localize_batch(self.model, batch, ctx)
        device, ledger = pytree.leaves(batch)[0].device, self.plan.mesh.ledger
        zero = torch.full((), 0, device=device)
        ahead.expect([*(group for segment in parts for group in segment.groups), *early], "forward")
        storage = self.residual_storage(device)  # one for all stacks: what is kept last is needed first
        passed: list[SegmentPass] = []
        leaves, x_def = x
        del x
        with torch.no_grad():
            for segment in parts:
                pairs, out_def, extra = self.pairs_of(segment, x_def, ctx, batch)
                segment_pass = SegmentPass(segment, pairs, extra, len(leaves))
                drop = ahead.dropped(segment.groups[0], self.execution.reshard)
                if segment.depth:
                    on_stack(segment, SegmentActivations(leaves, x_def))
                    on_layer = partial(ledger.reach, segment.name)
                    run = LayerLoop(
                        pairs, segment.depth, self.remat.every, drop, **storage, on_layer=on_layer, first=segment.first
                    )
                    leaves = run.forward(layer_fetcher(ahead, segment), leaves, extra)
                    passed.append(segment_pass._replace(run=run))
                else:
                    inputs = [*ahead.fetch(segment.groups[0]), *leaves, zero, *extra]
                    leaves, residuals = pairs[0].forward(inputs, drop * len(segment.leaves))
                    del inputs
                    x_def = out_def[0]
                    passed.append(segment_pass._replace(residuals=residuals))
        return ForwardResult(passed, SegmentActivations(leaves, x_def), batch, ctx, ahead)

    def head_forward(self, head: Segment, result: ForwardResult) -> HeadResult:
        """The loss of a micro-batch, and what the backward pass of its head needs; x's leaves leave `result`."""
        # A head runs just before its backward pass: its residuals are gradients, if its cross entropy is fused, and so
        # only one of the micro-batches under way has them.
        ahead, zero = result.ahead, torch.full((), 0, device=pytree.leaves(result.batch)[0].device)
        with torch.no_grad():
            ahead.expect(result.order(), "backward")
            leaves, x_def = result.x
            (pair,), out_def, extra = self.pairs_of(head, x_def, result.ctx, result.batch)
            out, residuals = pair.forward([*ahead.fetch(head.groups[0]), *leaves, zero, *extra])
            loss = forward.flag_invalid(pytree.unflatten(out, out_def[0]), result.batch)
            headed = HeadResult(loss, pair, residuals, out[1:], len(leaves))
            leaves.clear()
        return headed

    def head_backward(
        self, head: Segment, headed: HeadResult, seed: Tensor, reducer: GradientReducer, last: bool
    ) -> list[Tensor]:
        """The gradients of total * seed for the leaves of x that a head took; its parameters' go to `reducer`."""
        with torch.no_grad():
            self.plan.mesh.ledger.reach(head.name, None)
            grads = headed.pair.backward(headed.residuals, [seed.to(headed.loss.total.dtype), *headed.other_results])
            return self.reduce_params(head, grads, headed.inputs, reducer, last)

    def reduce_params(
        self, segment: Segment, grads: list[Tensor], inputs: int, reducer: GradientReducer, last: bool
    ) -> list[Tensor]:
        """Give the gradients of a part's parameters to `reducer`, and return the others, those of its `inputs`."""
        x_grads = grads[len(grads) - inputs :]
        del grads[len(grads) - inputs :]
        shared_leaves = earlier_leaves(self.local_segments, segment)
        reducer.reduce_group(segment.groups[0], self.trained(segment), grads, last=last, shared_leaves=shared_leaves)
        return x_grads

    def backward(
        self,
        result: ForwardResult,
        x_grads: list[Tensor],
        reducer: GradientReducer,
        last: bool,
        weight_passes: list[SegmentPass] | None = None,
    ) -> list[Tensor]:
        """The gradients of the leaves of x that a stage took; weight_passes: stacks whose weights come later."""
        # Only stacks are split: the other parts are a small share of the time, and what they would keep is large (a
        # head whose cross entropy is fused, its whole gradient).
        with torch.no_grad():
            while result.passed:
                segment, pairs, extra, inputs, run, residuals = result.passed.pop()
                if run is None:
                    fetched = result.ahead.fetch(segment.groups[0]) if residuals.needs else ()
                    self.plan.mesh.ledger.reach(segment.name, None)
                    grads = pairs[0].backward(residuals, x_grads, fetched)
                    del fetched, residuals
                    x_grads.clear()
                    x_grads = self.reduce_params(segment, grads, inputs, reducer, last)
                elif weight_passes is not None:
                    x_grads = run.backward_inputs(layer_fetcher(result.ahead, segment), x_grads, extra)
                    weight_passes.append(SegmentPass(segment, pairs, [], inputs, run))
                else:
                    fetch, put_layer = layer_fetcher(result.ahead, segment), self.putter(segment, reducer, last)
                    # Given away: nobody holds them while the layers' own are made.
                    x_grads = run.backward(fetch, put_layer, [x_grads.pop(0) for _ in x_grads[:]], extra)
        return x_grads

    def backward_weights(self, weight_passes: list[SegmentPass], reducer: GradientReducer, last: bool) -> None:
        """Give the gradients of stacks' parameters to `reducer`, in the order of a whole backward pass."""
        with torch.no_grad():
            for segment_pass in weight_passes:
                assert segment_pass.run is not None  # only stacks are owed
                segment_pass.run.backward_weights(self.putter(segment_pass.segment, reducer, last))

    def putter(self, segment: Segment, reducer: GradientReducer, last: bool) -> Callable[[int, list[Tensor]], None]:
        """The function that gives a layer's gradients to `reducer`."""
        groups, trained = segment.groups, self.trained(segment)
        return lambda i, grads: reducer.reduce_group(groups[i], trained, grads, last=last)

    def context(self, batch: base.Batch, draws: dict[str, Any], first: int) -> base.Ctx:
        """The ctx of a batch whose rows begin with row `first` of the step's; checks the batch."""
        # Without draws `first` is 0, so that training and evaluation share a compiled block.
        forward.check(self.model, batch, self.ctx)
        row = torch.full((), first, device=pytree.leaves(batch)[0].device) if draws else 0
        return forward.prepare(self.model, batch, base.with_draws(self.ctx, draws, row))

    def fetcher(
        self, params: Tree, device: torch.device, node_shards: NodeShards | None = None, exact: bool = False
    ) -> Prefetcher:
        """The fetches of one pass over the model; exact: no parameter is rounded on its way."""
        coding = params_coding(None if exact else self.plan.codec, self.ctx.kernels)
        return Prefetcher(ParamFetcher(params, self.plan, device, coding, node_shards), self.execution.prefetch)

    def resident_stage(
        self, parts: Sequence[Segment], params: Tree, device: torch.device, *, forward: bool
    ) -> Resident:
        """The parameters of a stage, to stay whole for several passes."""
        groups = [group for segment in parts for group in segment.groups]
        phase = "forward" if forward else "backward"
        return Resident(self.fetcher(params, device), groups if forward else groups[::-1], phase)

    def residual_storage(self, device: torch.device) -> dict[str, Any]:
        """{"saved": the storage of activations kept by the remat policy}, {} for a list on the device."""
        storage: Any = None
        if self.plan.acts.on_disk:
            assert self.nvme is not None  # given with a plan whose activations rest on a disk
            storage = offload.DiskActivations(self.nvme.scratch)
        elif self.plan.acts.on_host and device != HOST:
            storage = offload.HostActivations(device)
        if self.execution.partition_activations:
            storage = PartitionedActivations(self.plan.mesh.tp, [] if storage is None else storage)
        return {} if storage is None else {"saved": storage}


def passed_over(params: Tree, x: Any, ctx: base.Ctx) -> Any:
    """The block of a layer that is dropped."""
    return x


def layer_fetcher(ahead: Prefetcher | Resident, segment: Segment) -> Callable[[int], Sequence[Tensor]]:
    """The function from the number of a layer of a stack to its parameters."""
    groups = segment.groups
    return lambda i: ahead.fetch(groups[i])


def earlier_leaves(parts: Sequence[Segment], segment: Segment) -> frozenset[str]:
    """The leaves of a part that one before it uses too."""
    earlier = itertools.takewhile(lambda candidate: candidate.name != segment.name, parts)  # no stack shares leaves
    return frozenset(segment.leaves) & frozenset(name for candidate in earlier for name in candidate.leaves)
