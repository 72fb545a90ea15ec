"""The slack of a step's exchanges of rows of experts, which grows when data need more of it.

Compiled blocks have fixed sizes: memory for `slack` times an even load. Where a rank is sent more, the exchange is cut,
and the step computes its gradient again with twice the slack before it changes anything; later steps keep it. Rows have
the same bits for any slack.
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


class ExpertSlack:
    """The slack that the exchanges of a step have so far, beginning with the plan's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.grows = self.limited

    @property
    def limited(self) -> bool:
        """Whether a rank can be sent more rows than it has memory for."""
        plan, ranks, communicator = self.plan, self.plan.mesh.ep.size, self.plan.mesh.ep.communicator
        if plan.experts is None or plan.routed is None or plan.experts.form != "exchange":
            return False
        if communicator is None or communicator.transport == "fake":
            return False
        return plan.routed.rows(plan.experts, ranks) < plan.routed.rows(replace(plan.experts, slack=math.inf), ranks)

    def attempts(self, device: torch.device) -> Generator[tuple[Plan, Tensor | tuple[()]], None, None]:
        """(a plan, the number of plans before it), until an exchange of one was not cut on any rank."""
        for attempt in itertools.count():
            with self._cutting() as cut:
                yield self.plan, torch.full((), attempt, dtype=torch.int64, device=device) if self.grows else ()
            if not self.limited or not any_rank(bool(cut), self.plan.mesh):
                return
            assert self.plan.experts is not None  # limited
            self.plan = self.plan.with_slack(2 * self.plan.experts.slack)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[list[int]]:
        """A context in which exchanges over ep are cut to the rows that have memory, and note it in the list."""
        communicator = self.plan.mesh.ep.communicator
        if not self.limited or communicator is None:
            yield []
            return
        communicator.cut = []
        try:
            yield communicator.cut
        finally:
            communicator.cut = None
