"""Where the tokens of each rank of cp are in their sequences, for blocks that are chosen by the batch's documents.

Which blocks balance the work depends on where documents lie. So positions are data, an int64 tensor, and no shape or
number of a graph depends on them: one operator makes them of the batch on the host. All ranks of cp have the same
batch, and choose alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero.kernels.attention_pattern import Pattern, pairs_by_query
from fzero.kernels.op_function import operator
from fzero.models.layer_kinds import parse_layers
from fzero.sharding.balance import balanced, blocks_of, in_blocks


def patterns_of(config: Any) -> list[str]:
    """The attention patterns of a model's layers, of each period of them."""
    return [str(kind.pattern) for kind in parse_layers(getattr(config, "pattern", "full"))]


def _shape(tokens: Tensor, documents: Tensor | None, ranks: int, patterns: list[str]) -> Tensor:
    return tokens.new_empty((ranks, tokens.shape[-1] // ranks), dtype=torch.int64)


def _each_example(
    info: Any,
    in_dims: tuple[Any, ...],
    tokens: Tensor,
    documents: Tensor | None,
    ranks: int,
    patterns: list[str],
) -> tuple[Tensor, int | None]:
    """The rule of vmap: every example chooses by its own documents; without documents all choose alike."""
    of_tokens, of_documents = in_dims[:2]
    tokens = tokens if of_tokens is None else tokens.select(of_tokens, 0)  # which alone have no say
    if documents is None or of_documents is None:
        return balanced_positions(tokens, documents, ranks, patterns), None
    chosen = [balanced_positions(tokens, own, ranks, patterns) for own in documents.unbind(of_documents)]
    return torch.stack(chosen), 0


@operator(
    "balanced_positions(Tensor tokens, Tensor? documents, int ranks, str[] patterns) -> Tensor",
    _shape,
    batched=_each_example,
)
def balanced_positions(tokens: Tensor, documents: Tensor | None, ranks: int, patterns: list[str]) -> Tensor:
    """The positions of each rank's tokens, int64 [ranks, T / ranks], by `balanced` blocks of equal sizes.

    tokens [B, T], documents int [B, T] or None: the work is that of all rows, and of the layers that have the attention
    `patterns`.
    """
    count = tokens.shape[-1]
    rows = np.zeros((1, count), np.int64) if documents is None else documents.cpu().numpy()
    seen = sum(pairs_by_query(Pattern.parse(text), rows).sum(0) for text in patterns)
    blocks = blocks_of(count, ranks)
    pieces = balanced(in_blocks(np.asarray(seen), blocks), ranks)
    return torch.stack([pieces.positions(rank, count) for rank in range(ranks)]).to(tokens.device)
