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

from fzero.comm.rank_tables import any_rank
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
        """Whether a rank can be sent more rows than it has memory for; never in a plan, where nothing is sent."""
        plan, ranks, communicator = self.plan, self.plan.mesh.ep.size, self.plan.mesh.ep.communicator
        if plan.experts is None or plan.routed is None or plan.experts.form != "exchange":
            return False
        if communicator is None or communicator.transport == "fake":
            return False
        return plan.routed.rows(plan.experts, ranks) < plan.routed.rows(replace(plan.experts, slack=math.inf), ranks)

    def attempts(self, device: torch.device) -> Generator[tuple[Plan, Tensor | tuple[()]], None, None]:
        """(a plan, the number of the plans before it: as Metrics.recomputed), until an exchange of one was not cut on
        any rank of the mesh.

        Communicates: where a rank can be sent too many rows, see any_rank.
        """
        for attempt in itertools.count():
            with self._cutting() as cut:
                yield self.plan, torch.full((), attempt, dtype=torch.int64, device=device) if self.grows else ()
            if not self.limited or not any_rank(bool(cut), self.plan.mesh):
                return
            assert self.plan.experts is not None  # limited
            self.plan = with_slack(self.plan, 2 * self.plan.experts.slack)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[list[int]]:
        """A context in which exchanges over ep are cut to the rows that have memory, and note in the list that they
        were."""
        communicator = self.plan.mesh.ep.communicator
        if not self.limited or communicator is None:
            yield []
            return
        communicator.cut = []
        try:
            yield communicator.cut
        finally:
            communicator.cut = None
