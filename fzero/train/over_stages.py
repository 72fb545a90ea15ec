"""What the stages of a pipeline share: the leaves outside the layers, the losses, and which stages use what.

At rest such a leaf is sharded over pp too. It is gathered once before the row of a step, to the ranks whose stages use
it; the sums of its gradients, of one stage or several (a tied embedding), are added and scattered back once behind it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.collectives import Axis, start_all_gather
from fzero.comm.communicator import Communicator
from fzero.core import pytree
from fzero.core.future import Future
from fzero.core.gpu_copies import copy_in
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding.plan import Plan
from fzero.sharding.slices import is_stacked, local_shape
from fzero.train.loss import Layout, packed

Users = dict[str, list[tuple[str, int]]]  # by leaf (stream of gradients, rank of pp), in the order of their sum


def link_of(axis: Axis) -> Communicator:
    """The communicator of an axis of several ranks."""
    assert axis.communicator is not None
    return axis.communicator


@torch.no_grad()
def gather_over_pp(params: Tree, plan: Plan, users: Users, device: torch.device) -> Tree:
    """The parameters as this rank's stages use them: a leaf that pp shards at rest is whole over pp on the ranks that
    use it, on `device`, and as at rest on the others.

    Communicates: for each of those leaves its shards, to the ranks that use it; below stage 3 an all_gather over dp and
    cp.
    """
    if plan.stages is None:
        return params
    axis, leaves = plan.mesh["pp"], pytree.named_leaves(params)

    def start(name: str, leaf: Any) -> Future[Tensor | None] | None:
        if is_stacked(name) or plan.leaves[name].params.dims == plan.leaves[name].use.dims:
            return None
        readers = sorted({rank for _, rank in users[name]})
        return link_of(axis).start_gather_to(brought(leaf, device), readers, name)

    def whole(name: str, started: Future[Tensor | None] | None) -> Any:
        found = started.wait() if started is not None else None
        if found is None:
            return leaves[name]
        if "dp" in plan.leaves[name].params.axes and "dp" not in plan.leaves[name].use.axes:
            found = start_all_gather(found, plan.link(name), leaf=name).wait()
        return found

    with plan.mesh.ledger.phase("gather"):
        started = {name: start(name, leaf) for name, leaf in leaves.items()}  # all, before the first is waited for
        return pytree.from_named({name: whole(name, coming) for name, coming in started.items()}, params)


def brought(leaf: Any, device: torch.device) -> Tensor:
    """A leaf outside the layers on `device`, from where it rests: there, in the host's memory, or on a disk."""
    if not isinstance(leaf, Tensor):
        return leaf.read().copy_to(device).wait()
    return leaf if leaf.device == device else copy_in(leaf, device).use()


def scatter_over_pp(
    sums: dict[tuple[str, str], Any], plan: Plan, users: Users, device: torch.device
) -> dict[str, Tensor]:
    """This rank's parts of the sums of gradients of the leaves outside the layers, which leave `sums`, and tensors
    [0, ...] for the stacks of which it has no layer.

    Communicates: for each leaf its sum, from each rank that uses it, to all of them in parts.
    """
    link, accumulate = link_of(plan.mesh["pp"]), plan.policy.accumulate

    def start(name: str, stream: str, source: int, shape: tuple[int, ...]) -> Future[Tensor]:
        value = sums.pop((stream, name)).to(accumulate) if source == link.rank else None
        piece = torch.empty(shape, dtype=accumulate, device=device)
        return link.start_scatter_from(value, source, piece, name, cut="pp" in plan.leaves[name].opt.axes)

    out, started = {}, {}
    with plan.mesh.ledger.phase("reduce"):
        for name, leaf in plan.leaves.items():
            shape = local_shape(leaf.shape, leaf.opt, plan.mesh)
            if leaf.trained and is_stacked(name):
                out |= {} if shape[0] else {name: torch.zeros(shape, dtype=accumulate, device=device)}
            elif leaf.trained:  # all are on their way before the first is waited for
                started[name] = [start(name, stream, source, shape) for stream, source in users[name]]
        for name, coming in started.items():
            out[name] = coming[0].wait()
            for piece in coming[1:]:
                out[name].add_(piece.wait())
    return out


def share_losses(
    losses: Sequence[base.Loss], parts: int, plan: Plan, known: dict[Any, Any], device: torch.device
) -> list[base.Loss]:
    """The losses of a step's micro-batches on every rank of pp, from those that the rank of the last stage has.

    known: keeps the structure of a loss, which is told once.
    Communicates: a few float64 for each micro-batch, from that rank to all others.
    """
    assert plan.stages is not None
    axis, source = plan.mesh["pp"], plan.stages.ranks[-1]
    with plan.mesh.ledger.phase("metrics"):
        if "loss" not in known:
            treedef, *rest = Layout.of(losses[0]) if losses else (pytree.flatten(())[1], (), ())
            told = pytree.unflatten(range(treedef.num_leaves), treedef), *rest
            tree, *rest = tell(told, source, axis, device)
            known["loss"] = Layout(pytree.flatten(tree)[1], *rest)
        layout: Layout = known["loss"]
        rows = torch.empty(parts, layout.size, dtype=torch.float64, device=device)
        here = packed(losses)[0] if losses else None
        rows = link_of(axis).start_scatter_from(here, source, rows, "loss", cut=False).wait()
    return [layout.unpack(row) for row in rows]


def tell(value: Any, source: int, axis: Axis, device: torch.device) -> Any:
    """The value that rank `source` of an axis gives, on all of its ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    sizes = start_all_gather(torch.tensor([data.numel()], device=device), axis, leaf="told").wait()
    room = torch.empty(int(sizes[source]), dtype=torch.uint8, device=device)
    found = (
        link_of(axis).start_scatter_from(data if axis.rank == source else None, source, room, "told", cut=False).wait()
    )
    return pickle.loads(found.cpu().numpy())
