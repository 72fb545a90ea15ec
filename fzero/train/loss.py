"""The loss of a micro-batch, of a Model or of a plain function, and the sum of losses over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero import core
from fzero.comm.axes import AXES, CP
from fzero.comm.collectives import psum
from fzero.comm.rank_tables import gather_rows, packed
from fzero.core import prng, pytree
from fzero.core.autodiff import Remat
from fzero.core.precision import Policy, tree_sum_rows
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.models import base, forward
from fzero.models.user_functions import has_key, keyed_model, loss_of, wide_sums
from fzero.sharding import Mesh, Plan
from fzero.sharding.prefetch import unshard_tree
from fzero.train.execution import Execution
from fzero.train.state import TrainState

LossFn = Callable[[Tree, Any], Any]


def make_loss(loss_fn: base.Model | LossFn, plan: Plan, execution: Execution) -> Callable[..., base.Loss]:
    """`loss(params, batch, drawn, first) -> Loss` of a Model or a plain function, over parameters at rest."""
    if isinstance(loss_fn, base.Model):
        loss_fn = keyed_model(loss_fn)
        ctx, remat = context_of(plan, execution), execution.remat
        assert isinstance(remat, Remat)  # Execution parses a text
        return lambda params, batch, draws, first: forward.loss(
            loss_fn, params, batch, base.with_draws(ctx, draws, first), plan, remat=remat
        )

    call = PlainLoss(loss_fn, plan.policy)

    def plain(params: Tree, batch: Any, draws: Any, first: Any) -> base.Loss:
        return call(params if plan.mesh.size == 1 else unshard_tree(params, plan), batch, draws, first)

    return plain


def context_of(plan: Plan, execution: Execution) -> base.Ctx:
    """The Ctx of a Model under a plan."""
    assert isinstance(execution.kernels, Kernels)  # Execution parses a text
    policy = plan.policy
    ctx = base.Ctx(dtype=policy.compute, matmul=policy.matmul, compiled=execution.compiled, kernels=execution.kernels)
    return forward.under_plan(ctx, plan)


class PlainLoss:
    """The Loss of a plain function, which draws by a step's key."""

    def __init__(self, loss_fn: LossFn, policy: Policy):
        self.loss_fn, self.policy, self.calls = loss_fn, policy, core.PureCalls()

    def __call__(self, params: Tree, batch: Any, draws: Mapping[str, Any], first: int | Tensor) -> base.Loss:
        """draws: as of `draws_of`; without a key nothing is dropped. first: the number of the batch's first row."""
        params = pytree.map(lambda x: x.to(self.policy.compute) if x.is_floating_point() else x, params)
        rows = next((x.shape[0] for x in pytree.leaves(batch) if isinstance(x, Tensor) and x.dim()), 0)
        inputs = {f"the parameter {name}": x for name, x in pytree.named_leaves(params).items()}
        inputs |= {f"the batch's {n}": x for n, x in pytree.named_leaves(batch).items() if isinstance(x, Tensor)}
        generator = core.Draws(draws.get("origin"), rows, first)

        def call() -> Any:
            with wide_sums(pytree.leaves(params)):
                return self.loss_fn(params, batch)

        return loss_of(self.calls(call, inputs, generator, partial(core.ClosureState.from_function, self.loss_fn)))


def draws_of(loss_fn: base.Model | LossFn, state: TrainState) -> dict[str, Any]:
    """What a step draws, as fields of a Ctx: `key`, and `scales` of its layers; {} for none."""

    def key(name: str) -> Tensor:
        return prng.fold_in(prng.fold_in(state.key, name), state.step)

    if not isinstance(loss_fn, base.Model):
        return {"origin": partial(key, "dropout")}
    fields = {"key": key("dropout")} if has_key(loss_fn) else {}
    drop = loss_fn.traits.drop
    return fields if drop is None else fields | {"scales": drop(key("layers"), state.step)}


def sum_losses(losses: Sequence[base.Loss], mesh: Mesh, axes: Sequence[str] | None = None) -> base.Loss:
    """The sums of micro-batch losses over the ranks along `axes`, by a balanced binary tree, in float64."""
    # In the order of their global numbers: on meshes of one cp the sums have the same bits. `tables`, whose counts have
    # one sum in any order, are added on each rank first.
    axes = AXES.by_tokens if axes is None else axes
    rows, layout = packed([loss._replace(tables={}) for loss in losses])
    with mesh.ledger.phase("metrics"):
        gathered = gather_rows(rows, mesh, leaf="loss", axes=axes)
        tables = sum_tables([loss.tables for loss in losses], mesh, axes) if losses[0].tables else {}
    rows = gathered.transpose(0, 1).flatten(0, 1)
    return with_counts(layout.unpack(tree_sum_rows(rows)), rows[:, 1].detach())._replace(tables=tables)


def with_counts(total: base.Loss, counts: Tensor) -> base.Loss:
    """The sums of losses that count `counts` tokens, float64 [N]; NaN totals where a count is impossible."""
    wrong = ~((counts >= 0) & counts.isfinite())
    worst = torch.where(wrong, counts, math.inf).amin()
    number = torch.where(wrong.any(), worst.to(total.num_tokens.dtype), total.num_tokens)
    none = wrong.any() | ((number == 0) & (total.total.detach() != 0))
    return total._replace(total=torch.where(none, math.nan, total.total), num_tokens=number)


def sum_tables(tables: Sequence[dict[str, Tensor]], mesh: Mesh, axes: Sequence[str]) -> dict[str, Tensor]:
    """The sums of `Loss.tables` over micro-batches and the ranks along `axes` but cp, which count the same."""
    rows, layout = packed(tables)
    sums = rows.sum(0)
    for axis in axes:
        if axis != CP:
            sums = psum(sums, mesh[axis], leaf="tables")
    return layout.unpack(sums)
