"""The gradients of a step: micro-batch by micro-batch, part by part, from the parameters at rest to the optimizer's shards.

A layered model is embedding, layers, head. Each part is fetched (with the next ones on their way), run and dropped; in the backward pass
the same in reverse, and each part's gradients leave for where they are summed as soon as they are there. This is torch.func.grad of
`models.base.loss`, which defines it and serves under transforms; written out, so that memory and messages are where we say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.pytree import Tree
from fzero.core.stack import Run, part_pair, statics
from fzero.models import base
from fzero.offload import Space
from fzero.offload.activation_stack import DiskPile, HostPile
from fzero.sharding import Mesh, Plan
from fzero.sharding.plan import STACKED, shard_dim
from fzero.sharding.prefetch import Ahead, Gather, Part
from fzero.sharding.reduce import Reducer

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
        """The names of `names` that get a gradient."""
        return tuple(name for name in names if name not in self.frozen)


def parts_of(model: base.Model, plan: Plan) -> Parts:
    """The parts of a model; raises ValueError for a leaf outside embed, blocks and head, or a shared leaf that is not there."""
    names = pytree.names(plan.like)
    for name in model.shared:
        if name not in names:
            raise ValueError(f"the model says that its head uses {name!r}, which is no leaf of it{pytree.nearest(name, names)}")
    for name in names:
        if name.split("/")[0] not in ("embed", PREFIX, "head"):
            raise ValueError(
                f"{name}: a layered model's leaves are under embed/, blocks/ and head/; move it, or train a plain loss function"
            )

    def ordered(chosen: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(chosen, key=lambda name: name not in plan.frozen))

    embed, blocks, head = ([n for n in names if n.split("/")[0] == part] for part in ("embed", PREFIX, "head"))
    depth = pytree.named_leaves(plan.like)[blocks[0]].shape[0]
    return Parts(ordered(embed), ordered(blocks), ordered([*head, *model.shared]), plan.frozen, depth, plan)


class Streamed(NamedTuple):
    """The loss of a layered model, and its gradient, over parameters at rest. `ahead`: parts fetched before they are needed."""

    model: base.Model
    parts: Parts
    plan: Plan
    mesh: Mesh
    ctx: base.Ctx
    remat: Remat
    ahead: int
    space: Space | None = None

    def program(self, kind: str, f: Any, names: tuple[str, ...], x_def: Any, extra: Any) -> tuple[Any, list[Any], list[Tensor]]:
        """(pair, structure of its result, the tensors of `extra`) of a function of the model; blocks alone are compiled."""
        leaves, extra_def = pytree.flatten(extra)
        block = kind == "block"
        short = tuple(name.removeprefix(STACKED) for name in names) if block else names
        compiled, budget = (self.ctx.compiled, self.remat.budget) if block else (False, 1.0)
        skip = sum(name in self.plan.frozen for name in names)
        pair, out_def = part_pair(kind, f, short, x_def, extra_def, statics(leaves), compiled, budget, skip)
        return pair, out_def, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(self, params: Tree, batch: base.Batch, key: Any, first: Any) -> base.Loss:
        """The loss of a batch, without anything kept."""
        device = pytree.leaves(batch)[0].device
        parts, ctx, ahead = self.parts, self.context(batch, key, first), self.fetcher(params, device)
        embed, head = Part("embed", parts.embed), Part("head", parts.head)
        layers = [Part(PREFIX, parts.blocks, i) for i in range(parts.depth)]
        ahead.expect([embed, *layers, head], "forward")
        none, zero = pytree.flatten(())[1], torch.tensor(0).to(device)
        with torch.no_grad():
            pair, out_def, extra = self.program("embed", self.model.embed, parts.embed, none, (ctx, batch))
            x = pair.primal([*ahead.take(embed), zero, *extra])
            x_def = out_def[0]
            pair, _, extra = self.program("block", self.model.block, parts.blocks, x_def, ctx)
            x = Run(pair, parts.depth, 0).primal(lambda i: ahead.take(layers[i]), x, extra)
            pair, out_def, extra = self.program("head", self.model.head, parts.head, x_def, (ctx, batch))
            return pytree.unflatten(pair.primal([*ahead.take(head), *x, zero, *extra]), out_def[0])

    def backward(
        self,
        params: Tree,
        batch: base.Batch,
        key: Any,
        first: Any,
        seed: Tensor,
        reducer: Reducer,
        last: bool,
        ready: Callable[[base.Loss], None] | None = None,
    ) -> base.Loss:
        """The loss of a micro-batch; the gradient of total * seed goes to `reducer`, for which it may be the `last` one.

        ready: is called with the loss between the forward and the backward pass.
        """
        device = pytree.leaves(batch)[0].device
        parts, ctx, ahead = self.parts, self.context(batch, key, first), self.fetcher(params, device)
        embed, head = Part("embed", parts.embed), Part("head", parts.head)
        layers = [Part(PREFIX, parts.blocks, i) for i in range(parts.depth)]
        drops = {part.name: ahead.gather.dropped(part, self.plan.reshard) for part in (embed, layers[0])}
        again = frozenset(parts.embed) & frozenset(parts.head)
        ahead.expect([embed, *layers, head], "forward")
        none, zero = pytree.flatten(())[1], torch.tensor(0).to(device)
        with torch.no_grad(), self.mesh.ledger.phase("forward"):
            embed_pair, out_def, embed_extra = self.program("embed", self.model.embed, parts.embed, none, (ctx, batch))
            x, embed_kept = embed_pair.forward([*ahead.take(embed), zero, *embed_extra], drops["embed"] * len(parts.embed))
            x_def = out_def[0]
            pair, _, extra = self.program("block", self.model.block, parts.blocks, x_def, ctx)
            at = self.mesh.ledger.at
            run = Run(pair, parts.depth, self.remat.every, drops[PREFIX], **self.pile(device), at=lambda i: at(PREFIX, i))
            x = run.forward(lambda i: ahead.take(layers[i]), x, extra)
            ahead.expect([layers[i] for i in run.order()] + [embed] * bool(embed_kept.needs), "backward")
            head_pair, out_def, head_extra = self.program("head", self.model.head, parts.head, x_def, (ctx, batch))
            m = len(x)
            out, kept = head_pair.forward([*ahead.take(head), *x, zero, *head_extra])
            loss = pytree.unflatten(out, out_def[0])
            del x
        if ready is not None:
            ready(loss)
        with torch.no_grad(), self.mesh.ledger.phase("backward"):
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
        """The ctx of a batch; checks the batch."""
        base.check_batch(self.model, batch, self.ctx)
        return self.ctx._replace(documents=batch.get("documents", ()), key=key, first=first)

    def fetcher(self, params: Tree, device: torch.device) -> Ahead:
        """The fetches of one pass over the model."""
        return Ahead(Gather(params, self.plan, self.mesh, device), self.ahead)

    def pile(self, device: torch.device) -> dict[str, Any]:
        """{"kept": where what the remat policy keeps waits for the backward pass}, {} where that is on the device."""
        if self.plan.acts == "nvme":
            return {"kept": DiskPile(self.space.scratch)}
        return {"kept": HostPile(device)} if self.plan.acts == "host" and device != HOST else {}


def put_whole(reducer: Reducer, grads: Tree, last: bool) -> None:
    """Hand the gradients of whole leaves to `reducer`, a stacked leaf layer by layer."""
    for name, leaf in pytree.named_leaves(grads).items():
        for i, grad in enumerate(leaf) if shard_dim(name) else [(None, leaf)]:
            reducer.put(Part("all", (name,), i), (name,), [grad], last=last)


def whole_params(params: Tree, plan: Plan, mesh: Mesh, device: torch.device) -> Tree:
    """The parameters gathered over dp, all at once: for a plain loss function."""
    gather = Gather(params, plan, mesh, device)

    def whole(name: str, leaf: Any) -> Tensor:
        if name not in gather.sharded and name not in gather.away:
            return leaf
        layers = range(leaf.shape[0]) if shard_dim(name) else [None]
        out = [gather.start(Part("all", (name,), i), "forward")()[0] for i in layers]
        return torch.stack(out) if shard_dim(name) else out[0]

    return pytree.map_named(whole, params)


def sum_losses(losses: Sequence[base.Loss], mesh: Mesh) -> base.Loss:
    """The sums of micro-batch losses over those of all data ranks, the same bits on every mesh.

    They are added in the order of their global numbers (see Reducer), by a balanced binary tree, in float64.
    Communicates: an all_gather of a few float64 over each of dp and rp.
    """
    treedef, dtypes = pytree.flatten(losses[0])[1], [leaf.dtype for leaf in pytree.leaves(losses[0])]
    table = torch.stack([torch.stack([leaf.to(torch.float64) for leaf in pytree.leaves(loss)]) for loss in losses])[None]
    with mesh.ledger.phase("metrics"):
        for name in ("dp", "rp"):
            table = all_gather(table, mesh[name], 0, leaf="loss")
    sums = _tree_sum(table.transpose(0, 1).flatten(0, 1))
    return pytree.unflatten([x.to(dtype) for x, dtype in zip(sums, dtypes)], treedef)


def _tree_sum(rows: Tensor) -> Tensor:
    """The sum over the first dim by a balanced binary tree, neighbours first; differentiable."""
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]


Objective = Callable[..., base.Loss]  # (params, batch, key, first) -> Loss


def functional(loss: Objective, params: Tree, plan: Plan, parts: list[Any], firsts: list[Any], key: Any, seed: Tensor) -> tuple[Tree, Any]:
    """(gradient in the layout at rest, losses of the parts) by torch.func.grad: what may itself be transformed."""
    trained = plan.trained(params)

    def objective(leaves: Tree, part: Any, first: Any) -> tuple[Tensor, base.Loss]:
        out = loss(plan.whole(leaves, params), part, key, first)
        return out.total * seed, out

    gradient = torch.func.grad(objective, has_aux=True)
    total, losses = None, []
    for part, first in zip(parts, firsts):
        grads, out = gradient(trained, part, first)
        total = grads if total is None else pytree.map(torch.add, total, grads)
        losses.append(out)
    return total, losses
