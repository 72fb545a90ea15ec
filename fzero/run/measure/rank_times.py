"""Find stragglers: the times of every rank, gathered at intervals in one small collective."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from fzero.comm.tables import device_of, gather_rows
from fzero.run.measure.timer import COMM, IO, Times
from fzero.sharding import Mesh

BEHIND = 1.05  # times the others' median: above it a rank is a straggler
COLUMNS = ("busy_s", "comm_s", "data_s", "io_s")


class RankTimes:
    """The summed times of this rank's steps since they were last gathered."""

    def __init__(self) -> None:
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)

    def add(self, times: Times) -> None:
        """Add the times of a step."""
        phases = times.phases
        self.steps += 1
        for i, value in enumerate((times.busy, phases[COMM], phases["data"], phases[IO])):
            self.sums[i] += value

    def gather(self, mesh: Mesh) -> dict[str, Any]:
        """The times of all ranks, as lists by rank, and the straggler; resets the sums. All ranks call it
        after the same step.

        Communicates: four float64 of each rank.
        """
        with mesh.ledger.phase("ranks"):
            row = torch.tensor(self.sums, dtype=torch.float64, device=device_of(mesh))
            rows = gather_rows(row, mesh, leaf="ranks").tolist()
        out = {"steps": self.steps, **{name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}}
        self.steps, self.sums = 0, [0.0] * len(COLUMNS)
        straggler, behind = find_straggler([row[0] + row[2] + row[3] for row in rows])
        return {**out, "straggler": straggler, "behind": behind}


def find_straggler(own_s: list[float]) -> tuple[int | None, float]:
    """(the rank that the others wait for, or None; by what factor its time is above the others' median).

    own_s: by rank, the time that does not depend on other ranks.
    """
    if len(own_s) < 2:
        return None, 1.0
    rank = max(range(len(own_s)), key=lambda i: own_s[i])
    others = statistics.median(own_s[:rank] + own_s[rank + 1 :])
    behind = own_s[rank] / others if others > 0 else 1.0
    return rank if behind > BEHIND else None, behind
