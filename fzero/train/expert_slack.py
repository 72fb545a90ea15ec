"""The slack of a step's exchanges of rows of experts, which grows when data need more of it.

Compiled blocks are programs of fixed sizes, so that an exchange has memory for `slack` times an even load. Data decide
how many rows come: where a rank is sent more, the exchange is cut, and the step, before it changes anything, computes
its gradient again with twice the slack, which later steps have from the start. Rows that are there have the same bits
for any slack, so that the numbers are those of a run that had it from its first step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.sharding import Plan


def with_expert_slack(plan: Plan, update: str) -> Plan:
    """The plan with the slack of a step that updates at this time: an update that begins before the gradient is whole
    cannot compute it again."""
    return plan if update == "end" else with_slack_for_all(plan)


def with_slack_for_all(plan: Plan) -> Plan:
    """The plan with exchanges that have memory for all rows that can be sent, as for what is no step."""
    return with_slack(plan, math.inf)


def with_slack(plan: Plan, slack: float) -> Plan:
    """The plan with this slack of its exchanges, if it has any."""
    if plan.experts is None or plan.experts.form != "exchange":
        return plan
    return replace(plan, experts=replace(plan.experts, slack=slack))


class ExpertSlack:
    """The slack that the exchanges of a step have so far, beginning with the plan's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.grows = self.limited

    @property
    def limited(self) -> bool:
        """Whether a rank can be sent more rows than it has memory for."""
        plan, ranks = self.plan, self.plan.sizes["ep"]
        if plan.experts is None or plan.routed is None or plan.experts.form != "exchange":
            return False
        return plan.routed.rows(plan.experts, ranks) < plan.routed.rows(replace(plan.experts, slack=math.inf), ranks)

    def attempts(self, device: torch.device) -> Generator[tuple[Plan, Tensor | tuple[()]], None, None]:
        """(a plan, the number of the plans before it: as Metrics.recomputed), until an exchange of one was not cut on
        any rank of the mesh.

        Communicates: where a rank can be sent too many rows, a psum of one number over each axis of the mesh.
        """
        for again in itertools.count():
            with self._cutting() as cut:
                yield self.plan, torch.full((), again, dtype=torch.int64, device=device) if self.grows else ()
            if not self.limited or not self._any_rank(bool(cut), device):
                return
            assert self.plan.experts is not None  # limited
            self.plan = with_slack(self.plan, 2 * self.plan.experts.slack)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[list[int]]:
        """A context in which exchanges over ep are cut to the rows that have memory, and note in the list that they
        were."""
        communicator = self.plan.mesh["ep"].communicator
        if communicator is None or not self.limited:
            yield []
            return
        communicator.cut = []
        try:
            yield communicator.cut
        finally:
            communicator.cut = None

    def _any_rank(self, cut: bool, device: torch.device) -> bool:
        """Whether an exchange was cut on any rank of the mesh; never in a plan, whose tensors have no numbers."""
        mark = torch.full((), float(cut), device=device)
        with self.plan.mesh.ledger.phase("metrics"):
            for axis in self.plan.mesh.axes:
                mark = psum(mark, axis, leaf="experts/cut")
        communicator = self.plan.mesh["ep"].communicator
        return communicator is not None and communicator.transport != "fake" and bool(mark)
