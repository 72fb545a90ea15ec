"""The gradients of a step: micro-batch by micro-batch, part by part, from the parameters at rest to the optimizer's
shards.

A layered model is its embedding, one stack of layers or several, and its head. Each part is fetched (with the next ones
on their way), run and dropped; in the backward pass the same in reverse, and each part's gradients leave to be summed
as soon as they are ready. This is torch.func.grad of `models.base.loss`, which defines it and serves under transforms;
written out, to control memory and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.core.stack import LayerLoop, in_turn, part_pair, static_signature
from fzero.core.vjp_pair import VjpPair
from fzero.kernels.float8_gather import narrow_weight, widen_weight
from fzero.models import base
from fzero.models.batch import check_batch
from fzero.offload import Nvme
from fzero.offload.activation_stack import DiskActivations, HostActivations
from fzero.sharding import Plan
from fzero.sharding.prefetch import Coding, Group, ParamFetcher, Prefetcher
from fzero.sharding.reduce import GradientReducer


class Part(NamedTuple):
    """A part of a layered model: a stack of layers, or a function that a pass calls once."""

    kind: str  # "embed", "join", "block" or "head"
    name: str
    functions: tuple[Callable[..., Any], ...]  # of a stack, those that its layers take in turn; else one
    leaves: tuple[str, ...]  # full names, frozen ones first
    depth: int = 0  # the layers of a stack; 0 for a function that is called once
    first: int = 0  # the number of its first layer among those of all stacks

    @property
    def groups(self) -> list[Group]:
        """The leaves that are fetched together: each layer, or all of its leaves."""
        return [Group(self.name, self.leaves, i if self.depth else None) for i in range(self.depth or 1)]


def parts_of(model: base.Model, plan: Plan, layers: int = 0) -> tuple[Part, ...]:
    """The parts of a model, in the order of a forward pass. layers: only the first ones of the deepest stack; 0: all.

    Raises ValueError for a leaf outside of them, a stack without leaves, and a shared leaf that is not there."""
    leaves = pytree.named_leaves(plan.like)
    for name in model.shared:
        if name not in leaves:
            raise ValueError(
                f"the model says that its head uses {name!r}, which is no leaf of it{pytree.nearest(name, leaves)}"
            )
    names: dict[str, list[str]] = {}
    for name in leaves:
        names.setdefault(name.split("/")[0], []).append(name)

    def own(name: str, *shared: str) -> tuple[str, ...]:
        return tuple(sorted([*names.pop(name, ()), *shared], key=lambda leaf: leaf not in plan.frozen))

    parts, first = [Part("embed", "embed", (model.embed,), own("embed"))], 0
    for stack in base.stacks_of(model):
        if stack.join is not None:
            parts.append(Part("join", stack.join_name, (stack.join,), own(stack.join_name, *model.shared)))
        if stack.name not in names:
            raise ValueError(f"the model has a stack {stack.name!r} and no leaf under {stack.name}/")
        depth = leaves[names[stack.name][0]].shape[0]
        parts.append(Part("block", stack.name, in_turn(stack.block), own(stack.name), depth, first))
        first += depth
    parts.append(Part("head", "head", (model.head,), own("head", *model.shared)))
    if names:
        places = ", ".join(f"{part.name}/" for part in parts[:-1])
        raise ValueError(
            f"{next(iter(names.values()))[0]}: this layered model's leaves are under {places} and head/; move it, or "
            "train a plain loss function"
        )
    deepest = max(part.depth for part in parts)
    return tuple(part._replace(depth=layers) if layers and part.depth == deepest else part for part in parts)


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


class StreamedModel(NamedTuple):
    """The loss of a layered model, and its gradient, over parameters at rest. `ahead`: parts fetched before they are
    needed. `reshard`: see Execution."""

    model: base.Model
    parts: tuple[Part, ...]
    plan: Plan
    ctx: base.Ctx
    remat: Remat
    ahead: int
    reshard: bool = True
    nvme: Nvme | None = None

    def pairs_of(
        self, part: Part, x_def: Any, ctx: base.Ctx, batch: base.Batch
    ) -> tuple[tuple[VjpPair, ...], list[Any], list[Tensor]]:
        """(pairs, structure of the result, inputs that are not differentiated) of a part's functions; blocks alone are
        compiled."""
        block = part.kind == "block"
        leaves, extra_def = pytree.flatten(ctx if block else (ctx, batch))
        short = tuple(name.removeprefix(f"{part.name}/") for name in part.leaves) if block else part.leaves
        compiled, budget = (self.ctx.compiled, self.remat.budget) if block else (False, 1.0)
        structure = (short, x_def, extra_def, static_signature(leaves))
        frozen = len(part.leaves) - len(self.trained(part))
        made = [part_pair(part.kind, f, structure, compiled, budget, frozen) for f in part.functions]
        return tuple(pair for pair, _ in made), made[0][1], [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def trained(self, part: Part) -> tuple[str, ...]:
        """The leaves of a part that are trained."""
        return tuple(name for name in part.leaves if name not in self.plan.frozen)

    def forward(self, params: Tree, batch: base.Batch) -> base.Loss:
        """The loss of a batch without dropout, and without anything kept."""
        device = pytree.leaves(batch)[0].device
        ctx, ahead = self.context(batch, {}, 0), self.fetcher(params, device)
        ahead.expect([group for part in self.parts for group in part.groups], "forward")
        zero = torch.full((), 0, device=device)
        x, x_def = [], pytree.flatten(())[1]
        with torch.no_grad():
            for part in self.parts:
                pairs, out_def, extra = self.pairs_of(part, x_def, ctx, batch)
                if part.depth:
                    run = LayerLoop(pairs, part.depth, 0, first=part.first)
                    x = run.primal(take_layer(ahead, part), x, extra)
                else:
                    x = pairs[0].primal([*ahead.take(part.groups[0]), *x, zero, *extra])
                    x_def = out_def[0]
        return pytree.unflatten(x, x_def)

    def backward(
        self,
        params: Tree,
        batch: base.Batch,
        ctx: base.Ctx,
        seed: Tensor,
        reducer: GradientReducer,
        last: bool,
        ready: Callable[[base.Loss], None] | None = None,
    ) -> base.Loss:
        """The loss of a micro-batch; the gradient of total * seed goes to `reducer`; `last`: it is the final one.

        ctx: the batch's, from `context`.
        ready: is called with the loss between the forward and the backward pass.
        """
        device = pytree.leaves(batch)[0].device
        ahead, ledger, zero = self.fetcher(params, device), self.plan.mesh.ledger, torch.full((), 0, device=device)
        ahead.expect([group for part in self.parts for group in part.groups], "forward")
        pile = self.pile(device)  # one for all stacks: what is kept last is needed first
        passed: list[Passed] = []
        x, x_def = [], pytree.flatten(())[1]
        with torch.no_grad(), ledger.phase("forward"):
            for part in self.parts[:-1]:
                pairs, out_def, extra = self.pairs_of(part, x_def, ctx, batch)
                one = Passed(part, pairs, extra, len(x))
                drop = ahead.fetcher.dropped(part.groups[0], self.reshard)
                if part.depth:
                    at = partial(ledger.at, part.name)
                    run = LayerLoop(pairs, part.depth, self.remat.every, drop, **pile, at=at, first=part.first)
                    x = run.forward(take_layer(ahead, part), x, extra)
                    passed.append(one._replace(run=run))
                else:
                    x, kept = pairs[0].forward([*ahead.take(part.groups[0]), *x, zero, *extra], drop * len(part.leaves))
                    x_def = out_def[0]
                    passed.append(one._replace(kept=kept))
            ahead.expect([group for one in reversed(passed) for group in one.order()], "backward")
            head, m = self.parts[-1], len(x)
            (pair,), out_def, extra = self.pairs_of(head, x_def, ctx, batch)
            out, kept = pair.forward([*ahead.take(head.groups[0]), *x, zero, *extra])
            loss = pytree.unflatten(out, out_def[0])
            del x
        if ready is not None:
            ready(loss)
        with torch.no_grad(), ledger.phase("backward"):
            ledger.at(head.name, None)
            grads = pair.backward(kept, [seed.to(loss.total.dtype), *out[1:]])
            x_grads = grads[len(grads) - m :]
            del grads[len(grads) - m :]
            reducer.put(head.groups[0], self.trained(head), grads, last=last, again=used_before(self.parts, head))
            for one in reversed(passed):
                x_grads = self.run_backward(one, x_grads, ahead, reducer, last)
        return loss

    def run_backward(
        self, one: Passed, x_grads: list[Tensor], ahead: Prefetcher, reducer: GradientReducer, last: bool
    ) -> list[Tensor]:
        """The gradients of the leaves of x that a part took; those of its parameters go to `reducer`."""
        part, groups, trained = one.part, one.part.groups, self.trained(one.part)
        if one.run is not None:

            def put(i: int, layer_grads: list[Tensor]) -> None:
                reducer.put(groups[i], trained, layer_grads, last=last)

            return one.run.backward(take_layer(ahead, part), put, x_grads, one.extra)
        fetched = ahead.take(groups[0]) if one.kept.needs else ()
        self.plan.mesh.ledger.at(part.name, None)
        grads = one.pairs[0].backward(one.kept, x_grads, fetched)
        del fetched
        x_grads.clear()
        x_grads = grads[len(grads) - one.inputs :]
        del grads[len(grads) - one.inputs :]
        reducer.put(groups[0], trained, grads, last=last, again=used_before(self.parts, part))
        return x_grads

    def context(self, batch: base.Batch, key: dict[str, Any], first: int) -> base.Ctx:
        """The ctx of a batch whose rows begin with row `first` of the step's; checks the batch.

        key: the step's `layer_keys`. Without one `first` is 0, so that training and evaluation share a compiled block.
        """
        check_batch(self.model.config, batch, base.sequence_parts(self.ctx))
        row = torch.full((), first, device=pytree.leaves(batch)[0].device) if key else 0
        return base.prepare(self.model, batch, self.ctx._replace(first=row, **key))

    def fetcher(self, params: Tree, device: torch.device) -> Prefetcher:
        """The fetches of one pass over the model."""
        coding = Coding(*(partial(op, impl=self.ctx.kernels[op.name]) for op in (narrow_weight, widen_weight)))
        return Prefetcher(ParamFetcher(params, self.plan, device, coding), self.ahead)

    def pile(self, device: torch.device) -> dict[str, Any]:
        """{"kept": the storage of activations kept by the remat policy}, {} for the device."""
        if self.plan.acts == "nvme":
            assert self.nvme is not None  # given with a plan whose activations rest on a disk
            return {"kept": DiskActivations(self.nvme.scratch)}
        return {"kept": HostActivations(device)} if self.plan.acts == "host" and device != HOST else {}


def take_layer(ahead: Prefetcher, part: Part) -> Callable[[int], Sequence[Tensor]]:
    """The function from the number of a layer of a stack to its parameters."""
    groups = part.groups
    return lambda i: ahead.take(groups[i])


def used_before(parts: Sequence[Part], part: Part) -> frozenset[str]:
    """The leaves of a part that one before it uses too: their gradients come more than once in a micro-batch."""
    before = parts[: parts.index(part)]
    return frozenset(part.leaves) & frozenset(name for other in before for name in other.leaves)
