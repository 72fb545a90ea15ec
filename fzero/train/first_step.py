"""What the first step looks at: the values of its batch, and whether its loss can be that of these parameters.

That waits for the device, so later steps do not look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.comm.tables import Refusal, any_rank, failing_together, gather_rows, raise_together
from fzero.core import pytree
from fzero.core.autodiff import transforms
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.sharding import Mesh, Plan
from fzero.train.checks import check_values
from fzero.train.execution import Execution
from fzero.train.loss import LossFn, context_of, make_loss
from fzero.train.split_check import check_split
from fzero.train.state import TrainState
from fzero.train.sum_check import judge_sums
from fzero.train.user_split_check import check_user_split

PAIR = "return (losses.sum(), losses.numel()), or the sum of weighted losses and that of their weights"


def refusing_together(mesh: Mesh, first: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which a first step refuses what its caller gave on all ranks, if one of them does."""
    if not first or mesh.store is None or transforms():
        return contextlib.nullcontext()

    def agree(failure: Refusal | None) -> None:
        with mesh.checked():  # the first meeting of ranks that may run different programs
            raise_together(failure, mesh, "check")

    return failing_together(agree)


class FirstStep:
    """The looks of a step at its first batch, and at what it found of it; later ones pass over both. Where values
    cannot be looked at, as in a trace, the next call is the first one."""

    def __init__(self, loss_fn: base.Model | LossFn, plan: Plan, how: Execution) -> None:
        self.loss_fn, self.plan, self.how, self.seen, self.looks = loss_fn, plan, how, False, False

    def look(self, batch: Any) -> None:
        """Raise ValueError for values of the batch that are outside of a vocabulary."""
        self.looks = not self.seen and check_values(self.loss_fn, batch, context_of(self.plan, self.how))

    def check(self, params: Tree, part: Any) -> None:
        """Raise ValueError, on all ranks, for a split that changes a layer or a loss.

        params: at rest. part: the first micro-batch.
        """
        if self.looks:
            ctx = context_of(self.plan, self.how)
            check_split(self.loss_fn, self.plan, params, part, ctx)
            check_user_split(self.loss_fn, self.plan, params, part, ctx)

    def expect_loss(
        self, gradient: Callable[..., Any], state: TrainState, given: tuple[Any, ...], metrics: Any
    ) -> None:
        """Raise ValueError for a sum over ranks that is N times what was meant (see `judge_sums`), and, the same on all
        ranks, for a loss that cannot be that of the parameters (see `expect_loss`).

        gradient: of (state, *given), which are micro-batches, their rows, the draws and the seed. metrics: the step's.
        """
        parts, _, drawn, _ = given
        judge_sums(self.plan, state.params, parts, lambda: gradient(state, *given))
        if self.looks:
            loss = make_loss(self.loss_fn, self.plan, self.how)
            expect_loss(loss, self.plan, state.params, parts[0], drawn, metrics)
            self.seen = True  # a refused step is no first one


def expect_loss(
    loss: Callable[..., base.Loss], plan: Plan, params: Tree, part: Any, drawn: dict[str, Tensor], metrics: Any
) -> None:
    """Raise ValueError, the same on all ranks, for a loss with an impossible number of tokens, and one that no
    parameter reaches, from the Metrics of a step.

    params: at rest; those on a disk are not looked at. Communicates: an all_gather of three float64; if the gradient is
    0, what the loss does too, and a flag.
    """
    row = torch.stack([x.detach().to(torch.float64) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
    with plan.mesh.ledger.phase("check"):  # rank 0's, so that all go one way even if they found unlike ones
        mean, count, norm = gather_rows(row, plan.mesh, leaf="first step")[0].tolist()
    if not 0 <= count < float("inf"):
        raise ValueError(
            f"the loss of a micro-batch counts {count:g} samples; their number, or the sum of their weights, is 0 or "
            f"more, and finite: {PAIR}"
        )
    if count == 0 and mean != 0:
        raise ValueError(
            f"the loss counts no samples in the batch of the first step, and its sum is not 0: {PAIR}, of the same "
            "samples"
        )
    named = pytree.named_leaves(params)
    if norm == 0 and count and all(isinstance(leaf, Tensor) for leaf in named.values()):
        with plan.mesh.ledger.phase("check"):
            reached = any_rank(is_reached(loss, plan, params, part, drawn), plan.mesh)
        if not reached:
            raise ValueError(
                f"no parameter reaches the loss: it does not depend on the {len(plan.trained(named))} trained leaves "
                "that the loss function is given; compute it from `params`, as "
                "torch.func.functional_call(module, params, ...) does, without .detach(), .item() or torch.no_grad()"
            )


def is_reached(loss: Any, plan: Plan, params: Tree, part: Any, drawn: dict[str, Tensor]) -> bool:
    """Whether the loss of a micro-batch depends on a trained leaf of this rank, whatever its derivative is."""
    leaves = {name: leaf.detach() for name, leaf in pytree.named_leaves(params).items()}
    wanted = [leaf.requires_grad_() for name, leaf in leaves.items() if plan.leaves[name].trained]
    with torch.enable_grad():
        total = loss(pytree.from_named(leaves, params), part, drawn, 0).total
        if not total.requires_grad:
            return False
        return any(grad is not None for grad in torch.autograd.grad(total, wanted, allow_unused=True))
