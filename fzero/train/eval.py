"""The loss without dropout, as a function of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding import Plan
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, context_of, make_loss
from fzero.train.streamed import StreamedModel, parts_of


def make_eval_step(
    model: base.Model | LossFn,
    plan: Plan,
    *,
    execution: Execution = Execution(),  # noqa: B008
) -> Callable[[Tree, Any], base.Loss]:
    """The function `(params, batch) -> Loss` without dropout: this rank's sums, to be added up over batches and data ranks.

    model: a Model, or a function loss(params, batch) of whole parameters. plan: how the parameters rest, and the dtypes.
    execution: compiled, kernels and prefetch of it; there is no backward pass to compute anything again for.
    All ranks of the mesh must call the function together.
    """
    if isinstance(model, base.Model):
        ctx = context_of(plan, execution)
        loss = StreamedModel(model, parts_of(model, plan), plan, ctx, Remat(), execution.prefetch).forward
    else:
        loss = make_loss(model, plan, execution)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Any) -> base.Loss:
        with plan.mesh.ledger.phase("evaluate"):
            return loss(params, batch, (), 0)

    return eval_step
