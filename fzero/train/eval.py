"""The loss without dropout, as a function of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fzero.comm.axes import AXES, CP
from fzero.core.arguments import STEP, checked
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.models.user_functions import keyed_model
from fzero.sharding import Plan
from fzero.train.checks import check_values, expect_program
from fzero.train.execution import Execution
from fzero.train.first_step import refusing_jointly
from fzero.train.loss import LossFn, context_of, make_loss, sum_losses
from fzero.train.pipeline_executor import evaluate_row
from fzero.train.split_check import check_user_split
from fzero.train.stage_exchange import segments_of
from fzero.train.state import TrainState, expect_alive
from fzero.train.streamed_model import StreamedModel


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
    All ranks of the mesh must call the function together.

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
            has_values = bool(unseen) and check_values(model, batch, unseen[0])
        if has_values:
            check_user_split(program, plan, params, batch, ctx)
            unseen.clear()
        with plan.mesh.ledger.phase("evaluate"):
            out, axes = loss(params, batch), AXES.by_tokens if reduce else (CP,)
            return sum_losses([out], plan.mesh, axes)

    return eval_step
