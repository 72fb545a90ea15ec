"""How a step's tokens are spread over the experts, assumed or as a run recorded them, and the plan's room.

Shapes in an exchange are the same whatever is chosen, so the spread changes no byte of memory: the rank with the
fullest experts computes longer, and the others wait for it in every layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from fzero.run.setup.run_folder import read_metrics
from fzero.sharding import Plan


class Loads(NamedTuple):
    """How a step's tokens are spread over the experts: a factor over the mean, or recorded shares.

    >>> Loads(1.2).imbalance(8), Loads(shares=((0.5, 0.1, 0.2, 0.2),)).imbalance(2)
    (1.2, 1.2)
    """

    factor: float = 1.0  # of every layer, the rows of the rank with the fullest experts over the mean of the ranks
    # of each layer the share of the choices that each expert gets, as a run records
    shares: tuple[tuple[float, ...], ...] = ()

    def imbalance(self, ep: int) -> float:
        """The rows of the fullest of ep ranks over the mean of them, on the average over the layers."""
        if ep == 1:
            return 1.0
        if not self.shares:
            return self.factor
        count = len(self.shares[0])
        if count % ep:
            raise ValueError(f"imbalance: ep={ep} does not divide the {count} experts of the shares; give a factor")
        per_rank = count // ep
        fullest = [
            max(sum(layer[i : i + per_rank]) for i in range(0, count, per_rank)) / sum(layer) for layer in self.shares
        ]
        return ep * sum(fullest) / len(fullest)

    @classmethod
    def parse(cls, text: str) -> Loads:
        """The Loads of a text: a factor from 1, such as "1.2", or the folder of a run with experts."""
        try:
            factor = float(text)
        except ValueError:
            return cls(shares=recorded(Path(text)))
        if not 1.0 <= factor < math.inf:
            raise ValueError(f"imbalance is {text}; the fullest rank over the mean is finite and at least 1")
        return cls(factor)


EVEN = Loads()


def recorded(folder: Path) -> tuple[tuple[float, ...], ...]:
    """The shares of all layers with experts in the last recorded step of a run."""
    if not folder.is_dir():
        raise ValueError(f"imbalance is {str(folder)!r}: no number and no folder of a run; write 1.2, for example")
    rows = [row["experts"] for row in read_metrics(folder) if row.get("experts")]
    if not rows:
        raise ValueError(f"{folder}: no step of this run has recorded experts; give a factor, such as 1.2")
    return tuple(tuple(layer) for stack in rows[-1].values() for layer in stack["load"])


def has_capacity(plan: Plan, loads: Loads) -> bool:
    """Whether a load has room in the exchange of a plan."""
    if plan.experts is None or plan.experts.form != "exchange":
        return True
    return loads.imbalance(plan.mesh.ep.size) <= plan.experts.slack


def check_capacity(plan: Plan, loads: Loads) -> None:
    """Raise ValueError for a load that has no room in the exchange of a plan."""
    if plan.experts is not None and not has_capacity(plan, loads):
        factor = loads.imbalance(plan.mesh.ep.size)
        raise ValueError(
            f"imbalance {factor:.3g}: the fullest rank of ep={plan.mesh.ep.size} is sent so many times what each "
            f"sends, and exchange:{plan.experts.slack:g} has no room for it, so that a run would "
            "take more memory than planned; plan a larger slack, or gather"
        )
