"""The gradients of a step: micro-batch by micro-batch, part by part, from the parameters at rest to the optimizer's
shards.

A layered model is its embedding, one stack of layers or several, and its head. Each part is fetched (with the next ones
on their way), run and dropped; in the backward pass the same in reverse, and each part's gradients leave to be summed
as soon as they are ready. This is torch.func.grad of `models.forward.loss`, which defines it and serves under
transforms; written out, to control memory and messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.core.stack import LayerLoop, part_pair, static_signature
from fzero.core.vjp_pair import VjpPair
from fzero.models import base, forward
from fzero.offload import Nvme
from fzero.offload.activation_stack import DiskActivations, HostActivations
from fzero.sharding import Plan
from fzero.sharding.partitioned_activations import PartitionedActivations
from fzero.sharding.prefetch import Group, Kept, ParamFetcher, Prefetcher, Resident
from fzero.sharding.reduce import GradientReducer
from fzero.train.codes import params_coding
from fzero.train.parts import Part, stages_of


class Passed(NamedTuple):
    """A part before the head whose forward pass is done, with what its backward pass needs."""

    part: Part
    pairs: tuple[VjpPair, ...]
    extra: list[Tensor]  # the pairs' inputs that are not differentiated
    inputs: int  # the number of leaves of x that it took
    run: LayerLoop | None = None  # of a stack
    kept: Any = None  # of a function that is called once: its residuals

    def order(self) -> list[Group]:
        """The groups that its backward pass fetches, in their order."""
        if self.run is None:
            return self.part.groups if self.kept.needs else []
        groups = self.part.groups
        return [groups[i] for i in self.run.order()]


class Activations(NamedTuple):
    """The activations between two parts: their leaves, and the structure of their tree."""

    leaves: list[Tensor]
    treedef: Any


Told = Callable[[Part, Activations], None]


class Held(NamedTuple):
    """A micro-batch between its forward and its backward pass over the parts of a stage."""

    passed: list[Passed]  # emptied by the backward pass
    x: Activations
    batch: base.Batch
    ctx: base.Ctx
    ahead: Prefetcher | Resident

    def order(self) -> list[Group]:
        """The groups that the backward pass fetches, in their order."""
        return [group for one in reversed(self.passed) for group in one.order()]


class Headed(NamedTuple):
    """A micro-batch between the forward and the backward pass of the head."""

    loss: base.Loss
    pair: VjpPair
    kept: Any
    rest: list[Tensor]  # the results beside the loss's total
    inputs: int  # the number of leaves of x that it took


class StreamedModel(NamedTuple):
    """The passes of a layered model over parameters as a step uses them, a stage at a time. `ahead`: parts fetched
    before they are needed. `reshard`, `resident`: see Execution. train/row.py calls them in the order of a schedule."""

    model: base.Model
    parts: tuple[Part, ...]  # of the whole model
    plan: Plan
    ctx: base.Ctx
    remat: Remat
    ahead: int
    reshard: bool = True
    nvme: Nvme | None = None
    known: dict[Any, Any] = {}  # noqa: RUF012  (of shapes between stages, see between.Between; given where pp is used)
    resident: int = 0
    partition: bool = False  # the kept inputs of layers over tp

    @property
    def here(self) -> tuple[Part, ...]:
        """The parts of this rank's stages, in the order of a forward pass."""
        return tuple(part for stage in stages_of(self.parts, self.plan).values() for part in stage)

    @property
    def split(self) -> bool:
        """Whether the schedule has backward passes by inputs and by weights."""
        return self.plan.stages is not None and self.plan.pipeline is not None and self.plan.pipeline.split

    def pairs_of(
        self, part: Part, x_def: Any, ctx: base.Ctx, batch: base.Batch
    ) -> tuple[tuple[VjpPair, ...], list[Any], list[Tensor]]:
        """(pairs, structure of the result, inputs that are not differentiated) of a part's functions; blocks alone are
        compiled, and split. With layers that are dropped there is a pair for each layer."""
        block, gone, ctx = part.kind == "block", ctx.dropped, ctx._replace(dropped=())
        leaves, extra_def = pytree.flatten(ctx if block else (ctx, batch))
        short = tuple(name.removeprefix(f"{part.name}/") for name in part.leaves) if block else part.leaves
        compiled, budget = (self.ctx.compiled, self.remat.budget) if block else (False, 1.0)
        structure = (short, x_def, extra_def, static_signature(leaves))
        frozen, split = len(part.leaves) - len(self.trained(part)), block and self.split
        made = [part_pair(part.kind, f, structure, compiled, budget, frozen, split) for f in part.functions]
        pairs = tuple(pair for pair, _ in made)
        if block and gone:
            still = part_pair(part.kind, passed_over, structure, False, 1.0, frozen, split)[0]
            numbered = enumerate(itertools.islice(itertools.cycle(pairs), part.depth), part.first)
            pairs = tuple(still if number in gone else pair for number, pair in numbered)
        return pairs, made[0][1], [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def trained(self, part: Part) -> tuple[str, ...]:
        """The leaves of a part that are trained."""
        return tuple(name for name in part.leaves if name not in self.plan.frozen)

    def prepare(self, part: Part, x: Activations, batch: base.Batch, ctx: base.Ctx, params: Tree) -> None:
        """Make the programs of a stack for activations that look like `x`, before these are there."""
        device = pytree.leaves(batch)[0].device
        fetcher, number = ParamFetcher(params, self.plan, device), torch.full((), part.first, device=device)
        pairs, _, extra = self.pairs_of(part, x.treedef, ctx, batch)
        for pair, group in zip(pairs, part.groups):
            pair.prepare([*fetcher.like(group), *x.leaves, number, *extra])

    def primal(
        self,
        parts: Sequence[Part],
        x: Activations,
        batch: base.Batch,
        ctx: base.Ctx,
        ahead: Prefetcher,
        told: Told = lambda part, x: None,
    ) -> Any:
        """The activations after some parts, or the loss after a head; nothing is kept. told: see `forward`."""
        ahead.expect([group for part in parts for group in part.groups], "forward")
        batch = forward.own_part(self.model, batch, ctx)
        zero = torch.full((), 0, device=pytree.leaves(batch)[0].device)
        leaves, x_def = x
        with torch.no_grad():
            for part in parts:
                pairs, out_def, extra = self.pairs_of(part, x_def, ctx, batch)
                if part.depth:
                    told(part, Activations(leaves, x_def))
                    run = LayerLoop(pairs, part.depth, 0, first=part.first)
                    leaves = run.primal(take_layer(ahead, part), leaves, extra)
                else:
                    leaves = pairs[0].primal([*ahead.take(part.groups[0]), *leaves, zero, *extra])
                    x_def = out_def[0]
        if not parts or parts[-1].kind != "head":
            return Activations(leaves, x_def)
        return forward.judged(pytree.unflatten(leaves, x_def), batch)

    def forward(
        self,
        parts: Sequence[Part],
        x: Activations,
        batch: base.Batch,
        ctx: base.Ctx,
        ahead: Prefetcher | Resident,
        early: Sequence[Group] = (),
        told: Told = lambda part, x: None,
    ) -> Held:
        """The forward pass of a micro-batch over the parts of a stage but its head, and what its backward pass needs.

        ctx: the batch's, from `context`. early: the head's leaves, if they are used at once. told: is called with each
        stack before it runs, and the activations that it takes; those that it gives look like them.
        """
        batch = forward.own_part(self.model, batch, ctx)
        device, ledger = pytree.leaves(batch)[0].device, self.plan.mesh.ledger
        zero = torch.full((), 0, device=device)
        ahead.expect([*(group for part in parts for group in part.groups), *early], "forward")
        pile = self.pile(device)  # one for all stacks: what is kept last is needed first
        passed: list[Passed] = []
        leaves, x_def = x
        del x
        with torch.no_grad():
            for part in parts:
                pairs, out_def, extra = self.pairs_of(part, x_def, ctx, batch)
                one = Passed(part, pairs, extra, len(leaves))
                drop = ahead.dropped(part.groups[0], self.reshard)
                if part.depth:
                    told(part, Activations(leaves, x_def))
                    at = partial(ledger.at, part.name)
                    run = LayerLoop(pairs, part.depth, self.remat.every, drop, **pile, at=at, first=part.first)
                    leaves = run.forward(take_layer(ahead, part), leaves, extra)
                    passed.append(one._replace(run=run))
                else:
                    inputs = [*ahead.take(part.groups[0]), *leaves, zero, *extra]
                    leaves, kept = pairs[0].forward(inputs, drop * len(part.leaves))
                    del inputs
                    x_def = out_def[0]
                    passed.append(one._replace(kept=kept))
        return Held(passed, Activations(leaves, x_def), batch, ctx, ahead)

    def head_forward(self, head: Part, held: Held) -> Headed:
        """The loss of a micro-batch, and what the backward pass of its head needs; the leaves of x leave `held`.

        A head runs just before its backward pass: its residuals are gradients, if its cross entropy is fused, and so
        only one of the micro-batches under way has them.
        """
        ahead, zero = held.ahead, torch.full((), 0, device=pytree.leaves(held.batch)[0].device)
        with torch.no_grad():
            ahead.expect(held.order(), "backward")
            leaves, x_def = held.x
            (pair,), out_def, extra = self.pairs_of(head, x_def, held.ctx, held.batch)
            out, kept = pair.forward([*ahead.take(head.groups[0]), *leaves, zero, *extra])
            loss = forward.judged(pytree.unflatten(out, out_def[0]), held.batch)
            headed = Headed(loss, pair, kept, out[1:], len(leaves))
            leaves.clear()
        return headed

    def head_backward(
        self, head: Part, headed: Headed, seed: Tensor, reducer: GradientReducer, last: bool
    ) -> list[Tensor]:
        """The gradients of total * seed for the leaves of x that a head took; those of its parameters go to `reducer`.

        last: the micro-batch is the final one."""
        with torch.no_grad():
            self.plan.mesh.ledger.at(head.name, None)
            grads = headed.pair.backward(headed.kept, [seed.to(headed.loss.total.dtype), *headed.rest])
            x_grads = grads[len(grads) - headed.inputs :]
            del grads[len(grads) - headed.inputs :]
            reducer.put(head.groups[0], self.trained(head), grads, last=last, again=used_before(self.here, head))
        return x_grads

    def backward(
        self,
        held: Held,
        x_grads: list[Tensor],
        reducer: GradientReducer,
        last: bool,
        owed: list[Passed] | None = None,
    ) -> list[Tensor]:
        """The gradients of the leaves of x that a stage took, from those of the ones that it gave; those of its
        parameters go to `reducer`.

        owed: is given the stacks, of which the gradients by weights are left for `backward_weights`; None: nothing is
        left. Only stacks are split: the other parts are a small share of the time, and what they would keep is large (a
        head whose cross entropy is fused, its whole gradient). They come in the order of micro-batches here too.
        """
        with torch.no_grad():
            while held.passed:
                one = held.passed.pop()
                if owed is not None and one.run is not None:
                    x_grads = one.run.backward_inputs(take_layer(held.ahead, one.part), x_grads, one.extra)
                    owed.append(one._replace(extra=[]))
                else:
                    x_grads = self.run_backward(one, x_grads, held.ahead, reducer, last)
        return x_grads

    def backward_weights(self, owed: list[Passed], reducer: GradientReducer, last: bool) -> None:
        """Give the gradients of stacks' parameters to `reducer`, in the order of a whole backward pass."""
        with torch.no_grad():
            for one in owed:
                assert one.run is not None  # only stacks are owed
                one.run.backward_weights(self.putter(one.part, reducer, last))

    def putter(self, part: Part, reducer: GradientReducer, last: bool) -> Callable[[int, list[Tensor]], None]:
        """The function that gives a layer's gradients to `reducer`."""
        groups, trained = part.groups, self.trained(part)
        return lambda i, grads: reducer.put(groups[i], trained, grads, last=last)

    def run_backward(
        self, one: Passed, x_grads: list[Tensor], ahead: Prefetcher | Resident, reducer: GradientReducer, last: bool
    ) -> list[Tensor]:
        """The gradients of the leaves of x that a part took; those of its parameters go to `reducer`."""
        part = one.part
        if one.run is not None:
            put = self.putter(part, reducer, last)
            # Given away: nobody holds them while the layers' own are made.
            return one.run.backward(take_layer(ahead, part), put, [x_grads.pop(0) for _ in x_grads[:]], one.extra)
        (group,) = part.groups
        fetched = ahead.take(group) if one.kept.needs else ()
        self.plan.mesh.ledger.at(part.name, None)
        grads = one.pairs[0].backward(one.kept, x_grads, fetched)
        del fetched
        x_grads.clear()
        x_grads = grads[len(grads) - one.inputs :]
        del grads[len(grads) - one.inputs :]
        reducer.put(group, self.trained(part), grads, last=last, again=used_before(self.here, part))
        return x_grads

    def context(self, batch: base.Batch, drawn: dict[str, Any], first: int) -> base.Ctx:
        """The ctx of a batch whose rows begin with row `first` of the step's; checks the batch.

        drawn: the step's `layer_draws`. Without any `first` is 0, so that training and evaluation share a compiled
        block.
        """
        forward.check(self.model, batch, self.ctx)
        row = torch.full((), first, device=pytree.leaves(batch)[0].device) if drawn else 0
        return forward.prepare(self.model, batch, self.ctx._replace(first=row, **drawn))

    def fetcher(self, params: Tree, device: torch.device, kept: Kept | None = None, exact: bool = False) -> Prefetcher:
        """The fetches of one pass over the model. kept: see ParamFetcher. exact: no parameter is rounded on its way."""
        coding = params_coding(self.plan, self.ctx.kernels, exact)
        return Prefetcher(ParamFetcher(params, self.plan, device, coding, kept), self.ahead)

    def resident_stage(self, parts: Sequence[Part], params: Tree, device: torch.device, *, forward: bool) -> Resident:
        """The parameters of a stage, to stay whole for several passes, of which the first one is forward or not."""
        groups = [group for part in parts for group in part.groups]
        phase = "forward" if forward else "backward"
        return Resident(self.fetcher(params, device), groups if forward else groups[::-1], phase)

    def pile(self, device: torch.device) -> dict[str, Any]:
        """{"kept": the storage of activations kept by the remat policy}, {} for a list on the device."""
        kept: Any = None
        if self.plan.acts == "nvme":
            assert self.nvme is not None  # given with a plan whose activations rest on a disk
            kept = DiskActivations(self.nvme.scratch)
        elif self.plan.acts == "host" and device != HOST:
            kept = HostActivations(device)
        if self.partition:
            kept = PartitionedActivations(self.plan.mesh["tp"], [] if kept is None else kept)
        return {} if kept is None else {"kept": kept}


def passed_over(params: Tree, x: Any, ctx: base.Ctx) -> Any:
    """The block of a layer that is dropped."""
    return x


def take_layer(ahead: Prefetcher | Resident, part: Part) -> Callable[[int], Sequence[Tensor]]:
    """The function from the number of a layer of a stack to its parameters."""
    groups = part.groups
    return lambda i: ahead.take(groups[i])


def used_before(parts: Sequence[Part], part: Part) -> frozenset[str]:
    """The leaves of a part that one before it uses too: their gradients come more than once in a micro-batch."""
    before = itertools.takewhile(lambda other: other.name != part.name, parts)  # no stack shares leaves
    return frozenset(part.leaves) & frozenset(name for other in before for name in other.leaves)
