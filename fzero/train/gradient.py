"""The loss of a micro-batch and its gradient, for a Model and for a plain function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Remat, dense, needs_grad, transforms
from fzero.core.device import fake_device_of
from fzero.core.gpu_copies import free_sources
from fzero.core.pytree import Tree
from fzero.core.tree_sum import TreeSum
from fzero.models import base
from fzero.models.layers import block_keys
from fzero.models.user_functions import keyed_model
from fzero.offload import Nvme, ScratchTensor
from fzero.offload.buffer_need import disk_of
from fzero.optim.norm import Squared, widen
from fzero.optim.sharded_leaves import shards_of
from fzero.sharding import Plan
from fzero.sharding.error_feedback import ERRORS, ErrorFeedback
from fzero.sharding.pipelines import users_of
from fzero.sharding.prefetch import Coding, Group, Kept, ParamFetcher
from fzero.sharding.reduce import GradientReducer
from fzero.sharding.slices import is_stacked, iterate_blocks, shard_dim
from fzero.sharding.sums_at_rest import LayerSums, SumsAtRest
from fzero.train.codes import errors_coder, grads_coder, params_coding, rounded_params
from fzero.train.execution import Execution
from fzero.train.expert_slack import ExpertSlack
from fzero.train.loss import LossFn, PlainLoss, context_of, make_loss, sum_losses
from fzero.train.over_stages import gather_over_pp, scatter_over_pp, share_losses
from fzero.train.parts import parts_of
from fzero.train.row import Batches, Turn, run_row
from fzero.train.state import TrainState
from fzero.train.streamed import StreamedModel
from fzero.train.update.in_backward import EarlyUpdate
from fzero.train.update.in_memory import own
from fzero.train.update.speculation import SpeculativeUpdate


def make_backward(
    loss_fn: base.Model | LossFn, plan: Plan, how: Execution, nvme: Nvme | None = None
) -> Callable[..., list[base.Loss]]:
    """`(turns, batches, seed, ready=, update=) -> losses` of some micro-batches; on a mesh with pp of those whose last
    stage is this rank's.

    The gradient of the total * seed, as this rank has it before anything is summed over ranks, goes to the `sink.put`
    of its turn, as of a Reducer, part of the model by part. ready, update: see `run_row`.
    """
    disk_of(nvme, plan, how.prefetch)
    if isinstance(loss_fn, base.Model):
        loss_fn = keyed_model(loss_fn)
        ctx = context_of(plan, how)
        parts = parts_of(loss_fn, plan, how._layers)
        assert isinstance(how.remat, Remat)  # Execution parses a text
        known = {} if how._known is None else how._known
        options = (how.prefetch, how.reshard, nvme, known, how.resident, how.partition_activations)
        return partial(run_row, StreamedModel(loss_fn, parts, plan, ctx, how.remat, *options))

    call = PlainLoss(loss_fn, plan.policy)
    coding = params_coding(plan, context_of(plan, how).kernels)

    def plain(
        turns: Sequence[Turn], batches: Batches, seed: Tensor, ready: Any = None, update: Any = None
    ) -> list[base.Loss]:
        out, each = list[base.Loss](), len(batches.parts) // max(1, batches.updates)
        for j, (part, first) in enumerate(zip(batches.parts, batches.firsts)):
            params, sink = turns[j // each][:2]
            whole = whole_params(params, plan, seed.device, coding)
            grads, losses = functional(call, whole, plan, [part], [first], batches.drawn, seed)
            del whole
            out += losses
            put_whole(sink, grads, last=(j + 1) % each == 0)
            del grads, params, sink
            if batches.updates and (j + 1) % each == 0:
                update(out[-each:])
        return out

    return plain


def layer_draws(drawn: dict[str, Tensor], plan: Plan, how: Execution) -> dict[str, Any]:
    """The fields of the Ctx of a layered model in a step with these `draws_of`: with `keys` and `dropped`; {} for none.

    A compiled block makes its keys itself, within other kernels. A plan has all layers."""
    found: dict[str, Any] = {**drawn}
    if "key" in drawn and not how.compiled:
        depths = {name.split("/")[0]: leaf.shape[0] for name, leaf in plan.leaves.items() if is_stacked(name)}
        found["keys"] = block_keys(drawn["key"], sum(depths.values()))
    if "scales" in drawn and fake_device_of(drawn["scales"]) is None:
        found["dropped"] = frozenset(i for i, scale in enumerate(drawn["scales"].tolist()) if scale == 0)
    return found


class Found(NamedTuple):
    """What StepGradient finds."""

    sums: Tree  # of gradients, in the layout of plan.opt, in policy.accumulate
    loss: base.Loss  # the sums of losses
    squares: dict[str, Squared]  # of the leaves that the norm need not read
    errors: ErrorFeedback | None = None  # of what was sent in codes, until it is known whether the step is skipped
    recomputed: Tensor | tuple[()] = ()  # see Metrics


class StepGradient:
    """The gradient of the summed total * seed over all parts of all ranks, in the layout of plan.opt, in
    policy.accumulate.

    lasting: see SumsAtRest, rooms and narrow; the sums of two turns that are under way have rooms of their own.
    """

    def __init__(
        self,
        loss_fn: base.Model | LossFn,
        plan: Plan,
        how: Execution,
        nvme: Nvme | None = None,
        lasting: tuple[dict[Any, Tensor] | None, bool] = (None, False),
    ) -> None:
        self.plan, self.how, self.nvme = plan, how, nvme
        rooms, self.narrow = lasting
        self.rooms = rooms, None if rooms is None else dict[Any, Tensor]()
        self.slack, self.make_backward = ExpertSlack(plan), partial(make_backward, loss_fn, how=how, nvme=nvme)
        self.loss, self.backward, self.backward_plan = make_loss(loss_fn, plan, how), self.make_backward(plan), plan
        self.told: dict[Any, Any] = {} if how._known is None else how._known
        self.users, self.kernels = users_of(plan), context_of(plan, how).kernels
        self.square = shards_of(plan).square

    def firsts(self, parts: int, size: int) -> list[int]:
        """The number in the step's global batch of the first row of each of this rank's parts of `size` rows."""
        mesh = self.plan.mesh
        return [(j * mesh.data_size + mesh.data_rank) * size for j in range(parts)]

    def pure(self, params: Tree, parts: list[Any], firsts: list[int], drawn: Any, seed: Tensor) -> Found:
        """The same as `__call__` gives, by torch.func.grad: so that it may itself be transformed."""
        seen = rounded_params(params, self.plan, self.kernels)
        grads, losses = functional(self.loss, seen, self.plan, parts, firsts, drawn, seed)
        grads = pytree.map(lambda g: g.to(self.plan.policy.accumulate), grads)
        sums = own(self.plan, self.plan.whole(grads, params), linear=True)
        return Found(sums, sum_losses(losses, self.plan.mesh), {})

    def squares_of(self, leaf: Tensor) -> list[Tensor]:
        """What the norm is made of, of a leaf or a layer of one."""
        return [self.square(piece) for _, piece in widen(iterate_blocks(leaf, False))]

    def away(self, name: str, stream: str, depth: int | None) -> ScratchTensor:
        """The sum of a leaf that rests on a disk."""
        assert self.nvme is not None  # given with a plan whose gradients rest on a disk
        return ScratchTensor(self.nvme.scratch, ("grads", stream, name), depth, self.plan.policy.accumulate)

    def turn(
        self,
        params: Tree,
        parts: int,
        device: torch.device,
        shown: LayerSums | None = None,
        errors: ErrorFeedback | None = None,
        parity: int = 0,
        beside: Callable[[], None] | None = None,
    ) -> Turn:
        """The turn of so many micro-batches at these parameters (at rest). parity: of its number; beside: see
        GradientReducer."""
        coder = grads_coder(self.plan, self.kernels)
        rest = SumsAtRest(self.plan, parts, self.away, shown, self.rooms[parity], self.narrow, self.squares_of)
        sink = GradientReducer(self.plan, rest, coder, errors, beside)
        kept: Kept | None = {} if self.plan.codec is not None and self.plan.codec.hpz else None
        return Turn(gather_over_pp(params, self.plan, self.users, device), sink, kept)

    def collect(
        self,
        reducer: GradientReducer,
        losses: list[base.Loss],
        parts: int,
        device: torch.device,
        early: EarlyUpdate | SpeculativeUpdate | None = None,
    ) -> Found:
        """What a turn has found."""
        plan, over_pp = self.plan, None
        if plan.stages is not None:
            losses = share_losses(losses, parts, plan, self.told, device)
            over_pp = partial(scatter_over_pp, plan=plan, users=self.users, device=device)
        like = plan.trained(plan.like)
        if early is not None and not early.keeps:
            like = {name: leaf for name, leaf in pytree.named_leaves(like).items() if name not in early.stacked}
        sums, shapes = (
            reducer.sums(like, over_pp),
            {name: leaf.shape for name, leaf in pytree.named_leaves(plan.like).items()},
        )
        free_sources(device)
        squares = {
            name: Squared(found, shapes[name], plan.policy.accumulate) for name, found in reducer.rest.squares().items()
        }
        return Found(sums, sum_losses(losses, plan.mesh), squares)

    def __call__(
        self,
        state: TrainState,
        parts: list[Any],
        size: int,
        drawn: Any,
        seed: Tensor,
        early: EarlyUpdate | SpeculativeUpdate | None = None,
        known: Callable[[base.Loss], None] | None = None,
    ) -> Found:
        """What the parts give, which have `size` rows each. known: is called with the sum of losses before the last
        backward pass."""
        firsts, mesh, device = self.firsts(len(parts), size), self.plan.mesh, seed.device
        if transforms() or needs_grad(*pytree.leaves((state.params, parts))):
            return self.pure(state.params, parts, firsts, drawn, seed)
        fields = layer_draws(drawn, self.plan, self.how)
        so_far, found = list[base.Loss](), None

        def ready(loss: base.Loss) -> None:
            so_far.append(loss)
            if known is not None and len(so_far) == len(parts):  # after the last forward pass
                known(sum_losses(so_far, mesh))

        with contextlib.closing(self.slack.attempts(device)) as attempts:
            for plan, recomputed in attempts:
                if plan is not self.backward_plan:
                    self.backward_plan, self.backward = plan, self.make_backward(plan)
                found = None  # what an exchange that was cut left
                shown = LayerSums(early.take, early.keeps) if early is not None else None
                held = state.extra.get(ERRORS)
                kept = errors_coder(self.plan, self.kernels)
                errors = ErrorFeedback(self.plan, held, seed, state.step, kept) if held is not None else None
                turns = [self.turn(state.params, len(parts), device, shown, errors)]
                losses = self.backward(turns, Batches(parts, firsts, fields), seed, ready)
                reducer = turns.pop().sink
                found = self.collect(reducer, losses, len(parts), device, early)
                found = found._replace(errors=errors, recomputed=recomputed)
                del reducer, losses
        assert found is not None  # of the last attempt
        return found


def put_whole(reducer: GradientReducer, grads: Tree, last: bool) -> None:
    """Hand the gradients of whole leaves to `reducer`, a stacked leaf layer by layer."""
    for name, leaf in pytree.named_leaves(grads).items():
        for i, grad in enumerate(leaf) if shard_dim(name) else [(None, leaf)]:
            reducer.put(Group("all", (name,), i), (name,), [grad], last=last)


def whole_params(params: Tree, plan: Plan, device: torch.device, coding: Coding | None = None) -> Tree:
    """All parameters gathered over dp, for a plain loss function."""
    gather = ParamFetcher(params, plan, device, coding)

    def whole(name: str, leaf: Any) -> Tensor:
        if not gather.moves(name) and name not in gather.away:
            return leaf
        layers = range(leaf.shape[0]) if shard_dim(name) else [None]
        out = [gather.start(Group("all", (name,), i), "forward").wait()[0] for i in layers]
        return torch.stack(out) if shard_dim(name) else out[0]

    return pytree.map_named(whole, params)


Objective = Callable[..., base.Loss]  # (params, batch, drawn, first) -> Loss


def functional(
    loss: Objective, params: Tree, plan: Plan, parts: list[Any], firsts: list[Any], drawn: Any, seed: Tensor
) -> tuple[Tree, Any]:
    """(gradient in the layout at rest, losses of the parts) by torch.func.grad, so that it may itself be transformed.

    Canonical sums follow the binary tree over the micro-batches that GradientReducer's do, in policy.accumulate.
    """
    trained, plus = plan.trained(params), partial(pytree.map, torch.add)

    def objective(leaves: Tree, part: Any, first: Any) -> tuple[Tensor, base.Loss]:
        out = loss(plan.whole(leaves, params), part, drawn, first)
        return out.total * seed, out

    gradient = torch.func.grad(objective, has_aux=True)
    canonical, total = TreeSum(plus) if plan.reduce == "canonical" else None, None
    losses = []
    for part, first in zip(parts, firsts):
        grads, out = gradient(trained, part, first)
        grads = pytree.map(dense, grads)
        losses.append(out)
        if canonical is not None:
            canonical.add(pytree.map(lambda g: g.to(plan.policy.accumulate), grads))
        else:
            total = grads if total is None else plus(total, grads)
    return total if canonical is None else canonical.sum(), losses
