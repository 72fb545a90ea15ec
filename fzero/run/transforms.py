"""What a run does to the rows that it reads before they are used: transforms of fzero/data/transforms.py by config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.data.packing import Batch
from fzero.run.fill_in_middle import make_fim, validate_fim
from fzero.run.span_corruption import make_spans, validate_spans
from fzero.run.token_weights import make_weights, validate_weights

RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one by its checks


def validate_transforms(c: RunConfig) -> None:
    """Raise ValueError for transforms that do not go with the rest of a config."""
    validate_fim(c)
    validate_spans(c)
    validate_weights(c)


def make_transforms(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, the number of its first sample in the run) to the batch as it is used.

    The row of sample n is changed by (the config, n) alone, so that it is the same on every mesh and after every
    resume. Raises ValueError for tokens that the corpus does not have.
    """
    transforms = [make(c, corpus) for make in (make_fim, make_spans, make_weights)]

    def transformed(batch: Batch, first: int) -> Batch:
        for transform in transforms:
            batch = transform(batch, first)
        return batch

    return transformed
