"""The loss of a micro-batch, its gradient, and the loss without dropout, for a Model and for a plain function.

A step's exchanges of rows of experts have slack. Compiled blocks have fixed sizes: memory for `slack` times an even
load. Where a rank is sent more, the exchange is cut, and the step computes its gradient again with twice the slack
before it changes anything; later steps keep it. Rows have the same bits for any slack.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero import offload
from fzero.comm.axes import AXES, CP
from fzero.comm.rank_tables import any_rank
from fzero.core import pytree
from fzero.core.arguments import STEP, checked
from fzero.core.autodiff import dense, needs_grad, transforms
from fzero.core.device import fake_device_of
from fzero.core.gpu_copies import Copied, free_sources
from fzero.core.precision import TreeSum
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.models.layers import block_keys
from fzero.models.user_functions import keyed_model
from fzero.offload import Nvme
from fzero.offload.nvme import disk_of
from fzero.optim.norm import Squared, widen
from fzero.optim.sharded_leaves import shards_of
from fzero.sharding import Plan
from fzero.sharding.error_feedback import ERRORS, ErrorFeedback
from fzero.sharding.gradient_sums import GradientReducer, LayerSums, SumsAtRest
from fzero.sharding.prefetch import Coding, LeafGroup, NodeShards, ParamFetcher
from fzero.sharding.slices import iterate_blocks, shard_dim
from fzero.train.checks import check_values, expect_program, refusing_jointly
from fzero.train.codes import coder_for, params_coding, rounded_params
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, PlainLoss, context_of, make_loss, sum_losses
from fzero.train.pipeline_executor import MicroBatches, Turn, evaluate_row, run_row
from fzero.train.split_check import check_user_split
from fzero.train.stage_exchange import StageSharing, segments_of
from fzero.train.state import TrainState, expect_alive, expect_shapes
from fzero.train.streamed_model import StreamedModel


class ExpertSlack:
    """The slack that the exchanges of a step have so far, beginning with the plan's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.grows = self.limited

    @property
    def limited(self) -> bool:
        """Whether a rank can be sent more rows than it has memory for."""
        plan, ranks, communicator = self.plan, self.plan.mesh.ep.size, self.plan.mesh.ep.communicator
        if plan.experts is None or plan.routed is None or plan.experts.form != "exchange":
            return False
        if communicator is None or communicator.transport == "fake":
            return False
        return plan.routed.rows(plan.experts, ranks) < plan.routed.rows(replace(plan.experts, slack=math.inf), ranks)

    def attempts(self, device: torch.device) -> Generator[tuple[Plan, Tensor | tuple[()]], None, None]:
        """(a plan, the number of plans before it), until an exchange of one was not cut on any rank."""
        for attempt in itertools.count():
            with self._cutting() as cut:
                yield self.plan, torch.full((), attempt, dtype=torch.int64, device=device) if self.grows else ()
            if not self.limited or not any_rank(bool(cut), self.plan.mesh):
                return
            assert self.plan.experts is not None  # limited
            self.plan = self.plan.with_slack(2 * self.plan.experts.slack)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[list[int]]:
        """A context in which exchanges over ep are cut to the rows that have memory, and note it in the list."""
        communicator = self.plan.mesh.ep.communicator
        if not self.limited or communicator is None:
            yield []
            return
        communicator.cut = []
        try:
            yield communicator.cut
        finally:
            communicator.cut = None


def make_backward(
    loss_fn: base.Model | LossFn, plan: Plan, execution: Execution, nvme: Nvme | None = None
) -> Callable[..., list[base.Loss]]:
    """`(turns, batches, seed, ready=, update=) -> losses`; the gradients go to the `sink` of each turn."""
    disk_of(nvme, plan, execution.prefetch)
    ctx = context_of(plan, execution)
    if isinstance(loss_fn, base.Model):
        loss_fn = keyed_model(loss_fn)
        parts = segments_of(loss_fn, plan, execution._layers)
        shape_cache = {} if execution._known is None else execution._known
        return partial(run_row, StreamedModel(loss_fn, parts, plan, ctx, execution, nvme, shape_cache))

    call = PlainLoss(loss_fn, plan.policy)
    coding = params_coding(plan.codec, ctx.kernels)

    def plain(
        turns: Sequence[Turn], batches: MicroBatches, seed: Tensor, ready: Any = None, update: Any = None
    ) -> list[base.Loss]:
        out, per_update = list[base.Loss](), len(batches.parts) // max(1, batches.updates)
        for j, (micro_batch, first) in enumerate(zip(batches.parts, batches.firsts)):
            params, sink = turns[j // per_update][:2]
            full = gather_params(params, plan, seed.device, coding)
            grads, losses = functional(call, full, plan, [micro_batch], [first], batches.draws, seed)
            del full
            out += losses
            reduce_gradients(sink, grads, last=(j + 1) % per_update == 0)
            del grads, params, sink
            if batches.updates and (j + 1) % per_update == 0:
                update(out[-per_update:])
        return out

    return plain


def layer_draws(draws: dict[str, Tensor], layers: int, execution: Execution) -> dict[str, Any]:
    """The fields of a layered model's Ctx in a step with these `draws_of`; {} for none."""
    fields: dict[str, Any] = {**draws}
    if "key" in draws and not execution.compiled:
        fields["keys"] = block_keys(draws["key"], layers)
    if "scales" in draws and fake_device_of(draws["scales"]) is None:
        fields["dropped"] = frozenset(i for i, scale in enumerate(draws["scales"].tolist()) if scale == 0)
    return fields


class EarlySums(Protocol):
    """Who is given the reduced gradients of layers in the backward pass, leaf by leaf."""

    keeps: bool  # whether the sums of layers are kept to the end of the step
    stacked: set[str]  # the leaves with layers

    def receive(self, name: str, layer: int, value: Any, copied: Copied | None = None) -> None: ...


class GradientResult(NamedTuple):
    """What StepGradient finds."""

    sums: Tree  # of gradients, in the layout of plan.opt, in policy.accumulate
    loss: base.Loss  # the sums of losses
    squares: dict[str, Squared]  # of the leaves that the norm need not read
    errors: ErrorFeedback | None = None  # of what was sent in codes, until it is known whether the step is skipped
    recomputed: Tensor | tuple[()] = ()  # see Metrics


class StepGradient:
    """The gradient of the summed total * seed over all ranks, in the layout of plan.opt, in policy.accumulate."""

    def __init__(
        self,
        loss_fn: base.Model | LossFn,
        plan: Plan,
        execution: Execution,
        nvme: Nvme | None = None,
    ) -> None:
        self.plan, self.execution, self.nvme = plan, execution, nvme
        self.buffers = dict[Any, Tensor](), dict[Any, Tensor]()
        self.slack = ExpertSlack(plan)
        self.make_backward = partial(make_backward, loss_fn, execution=execution, nvme=nvme)
        self.loss, self.backward = make_loss(loss_fn, plan, execution), self.make_backward(plan)
        self.backward_plan = plan
        self.shape_cache: dict[Any, Any] = {} if execution._known is None else execution._known
        self.ctx = context_of(plan, execution)
        self.square = shards_of(plan).square

    def firsts(self, parts: int, size: int) -> list[int]:
        """The number in the global batch of each part's first row."""
        mesh = self.plan.mesh
        return [(j * mesh.data_size + mesh.data_rank) * size for j in range(parts)]

    def pure(self, params: Tree, parts: list[Any], firsts: list[int], draws: Any, seed: Tensor) -> GradientResult:
        """The same as `__call__` gives, by torch.func.grad: so that it may itself be transformed."""
        rounded = rounded_params(params, self.plan.codec, self.plan.coded, self.ctx.kernels)
        grads, losses = functional(self.loss, rounded, self.plan, parts, firsts, draws, seed)
        grads = pytree.map(lambda g: g.to(self.plan.policy.accumulate), grads)
        sums = self.plan.local_shards(self.plan.merge_trained(grads, params), linear=True)
        return GradientResult(sums, sum_losses(losses, self.plan.mesh), {})

    def squares_of(self, leaf: Tensor) -> list[Tensor]:
        """What the norm is made of, of a leaf or a layer of one."""
        return [self.square(piece) for _, piece in widen(iterate_blocks(leaf, False))]

    def open_disk_sum(self, name: str, stream: str, depth: int | None) -> offload.ScratchTensor:
        """The sum of a leaf that rests on a disk."""
        assert self.nvme is not None  # given with a plan whose gradients rest on a disk
        return offload.ScratchTensor(self.nvme.scratch, ("grads", stream, name), depth, self.plan.policy.accumulate)

    def turn(
        self,
        params: Tree,
        parts: int,
        device: torch.device,
        layer_sums: LayerSums | None = None,
        errors: ErrorFeedback | None = None,
        parity: int = 0,
        on_layer: Callable[[], None] | None = None,
    ) -> Turn:
        """The turn of so many micro-batches at these parameters (at rest); parity: of its number."""
        coder = coder_for(self.plan.codec, "grads", self.ctx.kernels)
        resting_sums = SumsAtRest(
            self.plan, parts, self.open_disk_sum, layer_sums, self.buffers[parity], self.plan.offloaded, self.squares_of
        )
        sink = GradientReducer(self.plan, resting_sums, coder, errors, on_layer)
        node_shards: NodeShards | None = {} if self.plan.codec is not None and self.plan.codec.hpz else None
        return Turn(StageSharing(self.plan, device).gather(params), sink, node_shards)

    def collect(
        self,
        reducer: GradientReducer,
        losses: list[base.Loss],
        parts: int,
        device: torch.device,
        early: EarlySums | None = None,
    ) -> GradientResult:
        """What a turn has found."""
        plan, over_pp = self.plan, None
        if plan.stages is not None:
            sharing = StageSharing(plan, device)
            losses, over_pp = sharing.losses(losses, parts, self.shape_cache), sharing.scatter
        like = plan.trained(plan.like)
        if early is not None and not early.keeps:
            like = {name: leaf for name, leaf in pytree.named_leaves(like).items() if name not in early.stacked}
        sums, shapes = (
            reducer.sums(like, over_pp),
            {name: leaf.shape for name, leaf in pytree.named_leaves(plan.like).items()},
        )
        free_sources(device)
        squares = {
            name: Squared(square, shapes[name], plan.policy.accumulate)
            for name, square in reducer.stored_sums.squares().items()
        }
        return GradientResult(sums, sum_losses(losses, plan.mesh), squares)

    def __call__(
        self,
        state: TrainState,
        parts: list[Any],
        size: int,
        draws: Any,
        seed: Tensor,
        early: EarlySums | None = None,
        on_loss: Callable[[base.Loss], None] | None = None,
    ) -> GradientResult:
        """What the parts, of `size` rows each, give; on_loss: called before the last backward pass."""
        firsts, mesh, device = self.firsts(len(parts), size), self.plan.mesh, seed.device
        if transforms() or needs_grad(*pytree.leaves((state.params, parts))):
            return self.pure(state.params, parts, firsts, draws, seed)
        fields = layer_draws(draws, self.plan.layers, self.execution)
        so_far, result = list[base.Loss](), None

        def ready(loss: base.Loss) -> None:
            so_far.append(loss)
            if on_loss is not None and len(so_far) == len(parts):  # after the last forward pass
                on_loss(sum_losses(so_far, mesh))

        with contextlib.closing(self.slack.attempts(device)) as attempts:
            for plan, recomputed in attempts:
                if plan is not self.backward_plan:
                    self.backward_plan, self.backward = plan, self.make_backward(plan)
                result = None  # what an exchange that was cut left
                layer_sums = LayerSums(early.receive, early.keeps) if early is not None else None
                saved_errors = state.extra.get(ERRORS)
                error_coder = coder_for(self.plan.codec, "errors", self.ctx.kernels)
                errors = (
                    ErrorFeedback(self.plan, saved_errors, seed, state.step, error_coder)
                    if saved_errors is not None
                    else None
                )
                turns = [self.turn(state.params, len(parts), device, layer_sums, errors)]
                losses = self.backward(turns, MicroBatches(parts, firsts, fields), seed, ready)
                reducer = turns.pop().sink
                result = self.collect(reducer, losses, len(parts), device, early)
                result = result._replace(errors=errors, recomputed=recomputed)
                del reducer, losses
        assert result is not None  # of the last attempt
        return result


def reduce_gradients(reducer: GradientReducer, grads: Tree, last: bool) -> None:
    """Hand the gradients of whole leaves to `reducer`, a stacked leaf layer by layer."""
    for name, leaf in pytree.named_leaves(grads).items():
        for i, grad in enumerate(leaf) if shard_dim(name) else [(None, leaf)]:
            reducer.reduce_group(LeafGroup("all", (name,), i), (name,), [grad], last=last)


def gather_params(params: Tree, plan: Plan, device: torch.device, coding: Coding | None = None) -> Tree:
    """All parameters gathered over dp, for a plain loss function."""
    gather = ParamFetcher(params, plan, device, coding)

    def gather_leaf(name: str, leaf: Any) -> Tensor:
        if not gather.moves(name) and name not in gather.offloaded:
            return leaf
        layers = range(leaf.shape[0]) if shard_dim(name) else [None]
        out = [gather.start(LeafGroup("all", (name,), i), "forward").wait()[0] for i in layers]
        return torch.stack(out) if shard_dim(name) else out[0]

    return pytree.map_named(gather_leaf, params)


Objective = Callable[..., base.Loss]  # (params, batch, drawn, first) -> Loss


def functional(
    loss: Objective, params: Tree, plan: Plan, parts: list[Any], firsts: list[Any], draws: Any, seed: Tensor
) -> tuple[Tree, Any]:
    """(gradient in the layout at rest, losses of the parts) by torch.func.grad, which may be transformed again."""
    # Canonical sums follow the binary tree over the micro-batches that GradientReducer's do, in policy.accumulate.
    trained, plus = plan.trained(params), partial(pytree.map, torch.add)

    def objective(leaves: Tree, micro_batch: Any, first: Any) -> tuple[Tensor, base.Loss]:
        out = loss(plan.merge_trained(leaves, params), micro_batch, draws, first)
        return out.total * seed, out

    gradient = torch.func.grad(objective, has_aux=True)
    canonical, total = TreeSum(plus) if plan.reduce == "canonical" else None, None
    losses = []
    for micro_batch, first in zip(parts, firsts):
        grads, out = gradient(trained, micro_batch, first)
        grads = pytree.map(dense, grads)
        losses.append(out)
        if canonical is not None:
            canonical.add(pytree.map(lambda g: g.to(plan.policy.accumulate), grads))
        else:
            total = grads if total is None else plus(total, grads)
    return total if canonical is None else canonical.sum(), losses


@checked(
    **STEP,
    model=expect_program,
    plan="plan is {}; write zero_plan(stage, model, mesh)",
    execution="execution is {}; write fzero.Execution(compiled=True)",
)
def make_eval_step(
    model: base.Model | LossFn,
    plan: Plan,
    *,
    execution: Execution = Execution(),  # noqa: B008
    reduce: bool = True,
) -> Callable[[Tree, Any], base.Loss]:
    """Return the function `(params, batch) -> Loss` without dropout, for the loss on a validation set.

    The Loss has the sums over all ranks, to be added up over batches. On a mesh the batch is this rank's rows.
    model: a Model, or a function loss(params, batch) of whole parameters. plan: how the parameters rest, and the
    dtypes. execution: compiled, kernels and prefetch of it; there is no backward pass to compute anything again for.
    reduce: False returns the sums of this rank's rows, which are then to be added up over the data ranks too.
    Communicates: what the model does, and an all_gather of a few float64 over each of dp, rp and cp.
    All ranks of the mesh must call the function together. It raises ValueError for parameters of another model.

    >>> def loss(params, batch):  # (sum, number of tokens)
    ...     return (batch["x"] @ params["w"]).square().sum(), batch["x"].shape[0]
    >>> params = {"w": torch.tensor([1.0, 3.0])}
    >>> eval_step = make_eval_step(loss, fzero.zero_plan(0, params, fzero.one_process()))
    >>> out = eval_step(params, {"x": torch.eye(2)})
    >>> out.total / out.num_tokens
    tensor(5.)
    """
    plan = plan.with_slack()
    ctx = context_of(plan, execution)
    unseen, program = [ctx], model
    if isinstance(model, base.Model):
        model = keyed_model(model)
        passes = Execution(prefetch=execution.prefetch)  # there is no backward pass
        streamed = StreamedModel(model, segments_of(model, plan), plan, ctx, passes, shape_cache={})
        loss = partial(evaluate_row, streamed)
    else:
        loss = partial(make_loss(model, plan, execution), draws={}, first=0)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Any) -> base.Loss:
        with refusing_jointly(plan.mesh, bool(unseen)):
            if isinstance(params, TrainState):
                raise TypeError("the parameters are a TrainState; write eval_step(state.params, batch)")
            expect_alive(params)
            expect_shapes(plan, params, shards=True)
            has_values = bool(unseen) and check_values(model, batch, unseen[0])
        if has_values:
            check_user_split(program, plan, params, batch, ctx)
            unseen.clear()
        with plan.mesh.ledger.phase("evaluate"):
            out, axes = loss(params, batch), AXES.by_tokens if reduce else (CP,)
            return sum_losses([out], plan.mesh, axes)

    return eval_step
