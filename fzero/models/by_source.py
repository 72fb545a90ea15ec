"""The sums of a loss by the source of a row, of a batch that says which each is of."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.models.batch import SOURCES, Batch

KINDS = ("source_loss", "source_tokens")


def sums_by_source(batch: Batch, losses: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """{source_loss/I: the sum in nats, source_tokens/I: the tokens that count} of each source I, float64; {} for a
    batch without `sources`, bool [B, S].

    losses: of the tokens of the rows here, [B T], without a gradient. counts: [B T], whether a token counts, bool, or
    its weight, by which its loss is multiplied.

    >>> batch = {"targets": torch.ones(2, 1), "sources": torch.tensor([[True, False], [False, True]])}
    >>> found = sums_by_source(batch, torch.tensor([3.0, 5.0]), torch.tensor([True, True]))
    >>> {name: float(value) for name, value in found.items() if name.startswith("source_loss")}
    {'source_loss/0': 3.0, 'source_loss/1': 5.0}
    """
    if SOURCES not in batch:
        return {}
    of_rows = torch.stack((losses.double(), counts.double()), 1).unflatten(0, batch["targets"].shape).sum(1)  # [B, 2]
    sums = torch.where(batch[SOURCES][..., None], of_rows[:, None], 0.0).sum(0)  # [S, 2]
    return {f"{kind}/{i}": x for i, row in enumerate(sums) for kind, x in zip(KINDS, row)}
