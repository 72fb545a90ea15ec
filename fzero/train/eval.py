"""The loss without dropout, as a function of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.core.autodiff import Remat
from fzero.core.precision import Policy, fp32
from fzero.core.pytree import Tree
from fzero.kernels.registry import AUTO, Kernels
from fzero.models import base
from fzero.sharding import Mesh, Plan
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, context_of, make_loss
from fzero.train.streamed import StreamedModel, parts_of


def make_eval_step(
    loss_fn: base.Model | LossFn,
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    policy: Policy = fp32(),  # noqa: B008
    compiled: bool = False,
    kernels: Kernels | str = AUTO,
    prefetch: int = 1,
    mlp_tiles: int = 1,
) -> Callable[[Tree, Any], base.Loss]:
    """The function `(params, batch) -> Loss` without dropout: this rank's sums, to be added up over batches and data ranks.

    plan: how the parameters rest (None: whole). All ranks of the mesh must call it together.
    """
    kernels = Kernels.parse(kernels) if isinstance(kernels, str) else kernels
    how = Execution(policy, Remat(), compiled, kernels, prefetch, mlp_tiles)
    if plan is None or not isinstance(loss_fn, base.Model):
        loss = make_loss(loss_fn, plan, mesh, how)
    else:
        ctx = context_of(plan, mesh, how)
        loss = StreamedModel(loss_fn, parts_of(loss_fn, plan), plan, mesh, ctx, how.remat, how.prefetch).forward

    @torch.no_grad()
    def eval_step(params: Tree, batch: Any) -> base.Loss:
        with mesh.ledger.phase("evaluate"):
            return loss(params, batch, (), 0)

    return eval_step
