"""The gradients of a step: micro-batch by micro-batch, part by part, from the parameters at rest to the optimizer's
shards.

A layered model is embedding, layers, head. Each part is fetched (with the next ones on their way), run and dropped; in
the backward pass the same in reverse, and each part's gradients leave to be summed as soon as they are
ready. This is torch.func.grad of `models.base.loss`, which defines it and serves under transforms; written out, to
control memory and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.core.stack import LayerLoop, part_pair, static_signature
from fzero.models import base
from fzero.offload import Nvme
from fzero.offload.activation_stack import DiskActivations, HostActivations
from fzero.sharding import Plan
from fzero.sharding.prefetch import Group, ParamFetcher, Prefetcher
from fzero.sharding.reduce import GradientReducer
from fzero.sharding.slices import STACKED

PREFIX = STACKED.rstrip("/")


class Parts(NamedTuple):
    """The parts of a layered model by the names of their leaves, frozen ones first."""

    embed: tuple[str, ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    frozen: frozenset[str]
    depth: int
    plan: Plan

    def trained(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The trained ones among `names`."""
        return tuple(name for name in names if name not in self.frozen)


def parts_of(model: base.Model, plan: Plan) -> Parts:
    """The parts of a model; raises ValueError for a leaf outside embed, blocks and head, or a shared leaf that is not
    there."""
    names = pytree.names(plan.like)
    for name in model.shared:
        if name not in names:
            raise ValueError(
                f"the model says that its head uses {name!r}, which is no leaf of it{pytree.nearest(name, names)}"
            )
    for name in names:
        if name.split("/")[0] not in ("embed", PREFIX, "head"):
            raise ValueError(
                f"{name}: a layered model's leaves are under embed/, blocks/ and head/; move it, or train a "
                "plain loss function"
            )

    def ordered(chosen: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(chosen, key=lambda name: name not in plan.frozen))

    embed, blocks, head = ([n for n in names if n.split("/")[0] == part] for part in ("embed", PREFIX, "head"))
    depth = pytree.named_leaves(plan.like)[blocks[0]].shape[0]
    return Parts(ordered(embed), ordered(blocks), ordered([*head, *model.shared]), plan.frozen, depth, plan)


class StreamedModel(NamedTuple):
    """The loss of a layered model, and its gradient, over parameters at rest. `ahead`: parts fetched before they are
    needed."""

    model: base.Model
    parts: Parts
    plan: Plan
    ctx: base.Ctx
    remat: Remat
    ahead: int
    nvme: Nvme | None = None

    def program(
        self, kind: str, f: Any, names: tuple[str, ...], x_def: Any, extra: Any
    ) -> tuple[Any, list[Any], list[Tensor]]:
        """(pair, structure of its result, the tensors of `extra`) of a function of the model; blocks alone are
        compiled."""
        leaves, extra_def = pytree.flatten(extra)
        block = kind == "block"
        short = tuple(name.removeprefix(STACKED) for name in names) if block else names
        compiled, budget = (self.ctx.compiled, self.remat.budget) if block else (False, 1.0)
        skip = sum(name in self.plan.frozen for name in names)
        pair, out_def = part_pair(kind, f, (short, x_def, extra_def, static_signature(leaves)), compiled, budget, skip)
        return pair, out_def, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(self, params: Tree, batch: base.Batch, key: Any, first: Any) -> base.Loss:
        """The loss of a batch, without anything kept."""
        device = pytree.leaves(batch)[0].device
        parts, ctx, ahead = self.parts, self.context(batch, key, first), self.fetcher(params, device)
        embed, head = Group("embed", parts.embed), Group("head", parts.head)
        layers = [Group(PREFIX, parts.blocks, i) for i in range(parts.depth)]
        ahead.expect([embed, *layers, head], "forward")
        none, zero = pytree.flatten(())[1], torch.full((), 0, device=device)
        with torch.no_grad():
            pair, out_def, extra = self.program("embed", self.model.embed, parts.embed, none, (ctx, batch))
            x = pair.primal([*ahead.take(embed), zero, *extra])
            x_def = out_def[0]
            pair, _, extra = self.program("block", self.model.block, parts.blocks, x_def, ctx)
            x = LayerLoop(pair, parts.depth, 0).primal(lambda i: ahead.take(layers[i]), x, extra)
            pair, out_def, extra = self.program("head", self.model.head, parts.head, x_def, (ctx, batch))
            return pytree.unflatten(pair.primal([*ahead.take(head), *x, zero, *extra]), out_def[0])

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
        parts, ahead = self.parts, self.fetcher(params, device)
        embed, head = Group("embed", parts.embed), Group("head", parts.head)
        layers = [Group(PREFIX, parts.blocks, i) for i in range(parts.depth)]
        drops = {part.name: ahead.fetcher.dropped(part, self.plan.reshard) for part in (embed, layers[0])}
        again = frozenset(parts.embed) & frozenset(parts.head)
        ahead.expect([embed, *layers, head], "forward")
        none, zero = pytree.flatten(())[1], torch.full((), 0, device=device)
        with torch.no_grad(), self.plan.mesh.ledger.phase("forward"):
            embed_pair, out_def, embed_extra = self.program("embed", self.model.embed, parts.embed, none, (ctx, batch))
            x, embed_kept = embed_pair.forward(
                [*ahead.take(embed), zero, *embed_extra], drops["embed"] * len(parts.embed)
            )
            x_def = out_def[0]
            pair, _, extra = self.program("block", self.model.block, parts.blocks, x_def, ctx)
            at = self.plan.mesh.ledger.at
            run = LayerLoop(
                pair, parts.depth, self.remat.every, drops[PREFIX], **self.pile(device), at=lambda i: at(PREFIX, i)
            )
            x = run.forward(lambda i: ahead.take(layers[i]), x, extra)
            ahead.expect([layers[i] for i in run.order()] + [embed] * bool(embed_kept.needs), "backward")
            head_pair, out_def, head_extra = self.program("head", self.model.head, parts.head, x_def, (ctx, batch))
            m = len(x)
            out, kept = head_pair.forward([*ahead.take(head), *x, zero, *head_extra])
            loss = pytree.unflatten(out, out_def[0])
            del x
        if ready is not None:
            ready(loss)
        with torch.no_grad(), self.plan.mesh.ledger.phase("backward"):
            at("head", None)
            grads = head_pair.backward(kept, [seed.to(loss.total.dtype), *out[1:]])
            x_grads = grads[len(grads) - m :]
            del grads[len(grads) - m :]
            reducer.put(head, parts.trained(parts.head), grads, last=last, again=again)

            def put(i: int, layer_grads: list[Tensor]) -> None:
                reducer.put(layers[i], parts.trained(parts.blocks), layer_grads, last=last)

            x_grads = run.backward(lambda i: ahead.take(layers[i]), put, x_grads, extra)
            fetched = ahead.take(embed) if embed_kept.needs else ()
            at("embed", None)
            grads = embed_pair.backward(embed_kept, x_grads, fetched)
            del fetched, x_grads
            reducer.put(embed, parts.trained(parts.embed), grads, last=last)
        return loss

    def context(self, batch: base.Batch, key: Any, first: Any) -> base.Ctx:
        """The ctx of a batch; checks the batch.

        `first` is for dropout alone: without a key it is 0, so that training and evaluation share a compiled block.
        """
        base.check_batch(self.model, batch, self.ctx)
        first = first if pytree.leaves(key) else 0
        return self.ctx._replace(documents=batch.get("documents", ()), key=key, first=first)

    def fetcher(self, params: Tree, device: torch.device) -> Prefetcher:
        """The fetches of one pass over the model."""
        return Prefetcher(ParamFetcher(params, self.plan, device), self.ahead)

    def pile(self, device: torch.device) -> dict[str, Any]:
        """{"kept": the storage of activations kept by the remat policy}, {} for the device."""
        if self.plan.acts == "nvme":
            assert self.nvme is not None  # given with a plan whose activations rest on a disk
            return {"kept": DiskActivations(self.nvme.scratch)}
        return {"kept": HostActivations(device)} if self.plan.acts == "host" and device != HOST else {}
