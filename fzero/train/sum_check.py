"""The check of a first step's sums over ranks: a psum of what is the same on all of them is N times what was meant.

Equal bits are no proof: equal rows, zeros and overflows give them too. So a first step notes the psums whose input was
the same on all ranks, and only where there is one it computes its gradient a second time, following over which axes
each tensor may differ (core/varying.py). The second gradient is thrown away: operators that follow tensors may make
torch's formulas of gradients take another order, and a first step must have the bits of any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.comm.tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.varying import Varying
from fzero.sharding import Mesh, Plan


@contextlib.contextmanager
def noting_sums(mesh: Mesh) -> Iterator[None]:
    """A context of a checked step in which psums of what is the same on all ranks are noted, and not refused."""
    if mesh.agreement is None:
        yield
        return
    before, mesh.agreement.noted = mesh.agreement.noted, []
    try:
        yield
    finally:
        mesh.agreement.noted = before


def judge_sums(plan: Plan, params: Tree, parts: Any, compute: Callable[[], Any]) -> None:
    """Raise ValueError, on the ranks of its axis, for a noted psum of what is the same on all ranks by construction.

    params: at rest. parts: the micro-batches. compute: computes the gradient again.
    Communicates: in a step that notes, a flag over each axis; where one noted a psum, what `compute` does.
    """
    agreement = plan.mesh.agreement
    if agreement is None or agreement.noted is None:
        return
    flag = torch.tensor([len(agreement.noted)], device=device_of(plan.mesh))
    with plan.mesh.ledger.phase("check"):
        if not bool(gather_rows(flag, plan.mesh, leaf="sums").any()):
            return
    before, agreement.noted = agreement.noted, None
    try:
        with Varying() as followed:
            for name, leaf in pytree.named_leaves(params).items():
                if isinstance(leaf, Tensor):
                    followed.mark(leaf, frozenset(plan.leaves[name].params.axes))
            for leaf in pytree.leaves(parts):
                followed.mark(leaf, frozenset(("dp", "rp", "ep", "cp")))
            compute()
    finally:
        agreement.noted = before
