"""What the first step looks at: its batch's values, its loss, and its sums over ranks.

That waits for the device, so later steps do not look.

A psum of what is the same on all ranks is N times what was meant. Equal bits are no proof (equal rows, zeros,
overflows), so where a first step notes one it computes its gradient again, following over which axes each tensor may
differ (core/autodiff). The second gradient is thrown away: the operators that follow tensors may change the order
of torch's formulas, and so bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.comm.ledger import AXES
from fzero.comm.rank_tables import any_rank, device_of, gather_rows
from fzero.core import pytree
from fzero.core.autodiff import Varying
from fzero.core.pytree import Tree
from fzero.models import base
from fzero.train.checks import check_values
from fzero.train.gradient import StepGradient
from fzero.train.loss import LossFn
from fzero.train.split_check import check_split, check_user_split
from fzero.train.state import TrainState

PAIR = "return (losses.sum(), losses.numel()), or the sum of weighted losses and that of their weights"


class FirstStep:
    """A step's checks of its first batch and of the result; later steps pass over both."""

    def __init__(self, loss_fn: base.Model | LossFn, gradient: StepGradient) -> None:
        self.loss_fn, self.gradient, self.plan, self.is_checked, self.looks = (
            loss_fn,
            gradient,
            gradient.plan,
            False,
            False,
        )

    def look(self, batch: Any) -> None:
        """Raise ValueError for values of the batch that are outside of a vocabulary."""
        self.looks = not self.is_checked and check_values(self.loss_fn, batch, self.gradient.ctx)

    def check(self, params: Tree, micro_batch: Any) -> None:
        """Raise ValueError, on all ranks, for a split that changes a layer or a loss.

        params: at rest. micro_batch: the first micro-batch.
        """
        if self.looks:
            arguments = self.loss_fn, self.plan, params, micro_batch, self.gradient.ctx
            check_split(*arguments)
            check_user_split(*arguments)

    def judge(self, state: TrainState, inputs: tuple[Any, ...], metrics: Any) -> None:
        """Raise ValueError for a sum over ranks that is N times too large, or a loss that cannot be this one."""
        self.judge_sums(state, inputs)
        if self.looks:
            self.expect_loss(state.params, inputs[0][0], inputs[2], metrics)
            self.is_checked = True  # a refused step is no first one

    def judge_sums(self, state: TrainState, inputs: tuple[Any, ...]) -> None:
        """Raise ValueError, on the ranks of its axis, for a noted psum of what is the same on all of them."""
        mesh = self.plan.mesh
        agreement = mesh.agreement
        if agreement is None or agreement.noted is None:
            return
        flag = torch.tensor([len(agreement.noted)], device=device_of(mesh))
        with mesh.ledger.phase("check"):
            if not bool(gather_rows(flag, mesh, leaf="sums").any()):
                return
        previous, agreement.noted = agreement.noted, None
        try:
            with Varying() as followed:
                for name, leaf in pytree.named_leaves(state.params).items():
                    if isinstance(leaf, Tensor):
                        followed.mark(leaf, frozenset(self.plan.leaves[name].params.axes))
                for leaf in pytree.leaves(inputs[0]):
                    followed.mark(leaf, frozenset(AXES.by_tokens))
                self.gradient(state, *inputs)
        finally:
            agreement.noted = previous

    def expect_loss(self, params: Tree, micro_batch: Any, draws: dict[str, Tensor], metrics: Any) -> None:
        """Raise ValueError on all ranks for an impossible number of tokens, or a loss that no parameter reaches."""
        mesh = self.plan.mesh
        row = torch.stack([x.detach().to(torch.float64) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
        with mesh.ledger.phase("check"):  # rank 0's, so that all go one way even if they found unlike ones
            mean, count, norm = gather_rows(row, mesh, leaf="first step")[0].tolist()
        if not 0 <= count < float("inf"):
            raise ValueError(
                f"the loss of a micro-batch counts {count:g} samples; their number, or the sum of their weights, is 0 "
                f"or more, and finite: {PAIR}"
            )
        if count == 0 and mean != 0:
            raise ValueError(
                f"the loss counts no samples in the batch of the first step, and its sum is not 0: {PAIR}, of the same "
                "samples"
            )
        named = pytree.named_leaves(params)
        if norm == 0 and count and all(isinstance(leaf, Tensor) for leaf in named.values()):
            with mesh.ledger.phase("check"):
                reached = any_rank(self.is_reached(params, micro_batch, draws), mesh)
            if not reached:
                raise ValueError(
                    f"no parameter reaches the loss: it does not depend on the {len(self.plan.trained(named))} trained "
                    "leaves that the loss function is given; compute it from `params`, as "
                    "torch.func.functional_call(module, params, ...) does, without .detach(), .item() or "
                    "torch.no_grad()"
                )

    def is_reached(self, params: Tree, micro_batch: Any, draws: dict[str, Tensor]) -> bool:
        """Whether the loss of a micro-batch depends on a trained leaf of this rank, whatever its derivative is."""
        leaves = {name: leaf.detach() for name, leaf in pytree.named_leaves(params).items()}
        trained_leaves = [leaf.requires_grad_() for name, leaf in leaves.items() if self.plan.leaves[name].trained]
        with torch.enable_grad():
            total = self.gradient.loss(pytree.from_named(leaves, params), micro_batch, draws, 0).total
            if not total.requires_grad:
                return False
            return any(grad is not None for grad in torch.autograd.grad(total, trained_leaves, allow_unused=True))
