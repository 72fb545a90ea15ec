"""The update of a step while the next one computes: parameters are one gradient behind.

Step t computes its gradient with parameters that know the gradients up to t - 2, and meanwhile a thread updates them with that of t - 1. So
the disk and the host's optimizer work behind the computation, at the price of other numbers than without. The gradient that waits is in
`state.extra["pending"]`; no store and no checkpoint holds it, so a resumed run begins without the last one.
Ref: Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840, section 5.2 (one-step delayed parameter update).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fzero.core import pytree
from fzero.core.device import fake_device_of
from fzero.core.pytree import Tree
from fzero.sharding import Plan
from fzero.train.update.in_memory import Gradients
from fzero.train.update.offloaded import StreamedUpdate, Update

PENDING = "pending"


def expect_delayed(how: StreamedUpdate, plan: Plan, has_master: bool) -> None:
    """Raise ValueError where an update cannot run beside the computation of the next gradient."""
    why = ""
    if how.parts.body.unit != "row" or how.split:
        why = "the optimizer, or the sharding by stage 1 or 2, makes ranks communicate in the update"
    elif any(spec.memory == "nvme" for spec in pytree.leaves(plan.grads)):
        why = "gradients are on a disk, and one must wait until the next step; leave grads in memory"
    elif not has_master and any(spec.memory != "nvme" for spec in pytree.leaves(plan.trained(plan.params))):
        why = "parameters without master weights are updated where the computation reads them; use params=nvme, or bf16"
    elif how.nvme.slots < 2:
        why = "one slot is overwritten while the computation reads it; use two"
    if why:
        raise ValueError(f'update="delayed": {why}; or use update="end"')


class Delayed:
    """The update of the gradient that waits in a state, under way in a thread; `join` gives the state after it."""

    def __init__(self, how: StreamedUpdate, state: Tree, ema_decay: float) -> None:
        self.how, self.before, self.failure = how, state, None
        pending = state.extra.get(PENDING, ())
        self.thread = None
        if pending:
            self.update = Update(how, Gradients(pending["sums"], pending["factor"], pending["norm"]), state, ema_decay, defer=True)
            how.nvme.disk.shared = True
            if (
                fake_device_of(state.step) is not None
            ):  # fake tensors serve one thread; who watches this one sees nothing of the update, as in a run
                with _disable_current_modes():
                    self._run()
            self.thread = threading.Thread(target=self._run if fake_device_of(state.step) is None else _nothing, name="fzero-update")
            self.thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.after = self.update.all()
        except BaseException as error:
            self.failure = error

    def join(self) -> Tree:
        """The state after the update, which the parameters on the device get now."""
        if self.thread is None:
            return self.before
        self.thread.join()
        self.how.nvme.disk.shared = False
        if self.failure is not None:
            raise self.failure
        self.update.emit()
        return self.after


def _nothing() -> None:
    """The update of a planned step has been run already."""


def waiting(state: Tree, grads: Gradients, skipped: bool) -> Tree:
    """The state with a gradient to be applied by the next step, or without one."""
    pending: Any = () if skipped else {"sums": grads.sums, "factor": grads.factor, "norm": grads.norm}
    return state._replace(extra={**state.extra, PENDING: pending})


def settled(state: Tree) -> Tree:
    """The state without the gradient that waits: what is saved."""
    return state._replace(extra={name: value for name, value in state.extra.items() if name != PENDING})
