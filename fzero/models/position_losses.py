"""The loss of a model by how much of a token's document stands before it."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.kernels.cross_entropy import counted_tokens, number_of
from fzero.models.base import Batch, Ctx, Loss, Model
from fzero.models.batch import sums_by_source
from fzero.models.preference import expect_losses, losses_by_token

RANGES = 8


@checked()
def by_position(model: Model) -> Model:
    """Return the model with its cross entropy as the loss, and with the sums of it over ranges of positions in `extra`:
    loss/E in nats and tokens/E for each end E of `position_ranges`, float64.

    The position of a token is the number of tokens of its document before it in its row: what attention sees. Without
    `documents` in the batch a row is one document. For evaluations: each token's loss is found by itself, which is no
    form that training has kernels for.

    Raises ValueError for a model that was made from a module.

    >>> from fzero import models, random
    >>> model = by_position(models.build(models.MLPConfig(vocab_size=8)))
    >>> batch = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "targets": torch.tensor([[1, 2, -100, 3]])}
    >>> extra = models.loss(model, models.init_params(model, random.key(0)), batch, models.Ctx()).extra
    >>> {name: int(value) for name, value in extra.items() if name.startswith("tokens")}
    {'tokens/1': 1, 'tokens/2': 1, 'tokens/4': 1}
    """
    expect_losses("by_position", model)

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
        losses = losses_by_token(model, params, x, batch, ctx).reshape(-1).double()
        counts, position = counted_tokens(targets, mask), document_offsets(batch["targets"], ctx)
        ends = position_ranges(position.shape[-1])
        # Of sequences split over cp a rank has the losses of some positions.
        position = position if isinstance(ctx.positions, tuple) else position.index_select(-1, ctx.positions)
        edges = torch.tensor(ends, device=losses.device)
        bucket = torch.bucketize(position, edges, right=True).expand(batch["targets"].shape).reshape(-1)
        extra = {}
        for i, end in enumerate(ends):
            in_bucket = bucket == i
            extra[f"loss/{end}"] = torch.where(in_bucket, losses, 0.0).sum()
            extra[f"tokens/{end}"] = torch.where(in_bucket, counts.double(), 0.0).sum()
        return Loss(losses.sum(), number_of(counts), extra | sums_by_source(batch, losses, counts))

    return model._replace(head=head)


def document_offsets(targets: Tensor, ctx: Ctx) -> Tensor:
    """The position in its document of each token of whole sequences, int64 [B, T] or, of one document each, [1, T].

    targets: of this rank's tokens [B, T / cp].
    """
    split = 1 if isinstance(ctx.positions, tuple) else ctx.mesh["cp"].size
    positions = torch.arange(targets.shape[-1] * split, device=targets.device)[None]
    if isinstance(ctx.documents, tuple):
        return positions
    first = torch.ones_like(ctx.documents, dtype=torch.bool)
    first[:, 1:] = ctx.documents[:, 1:] != ctx.documents[:, :-1]
    return positions - torch.where(first, positions, 0).cummax(-1).values


def position_ranges(seq_len: int) -> tuple[int, ...]:
    """The ends of at most RANGES ranges of positions, each from the end before it: powers of two, and T itself.

    >>> position_ranges(256), position_ranges(12)
    ((2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 12))
    """
    ends = [seq_len]
    end = 1 << (seq_len - 1).bit_length()
    while end > 1 and len(ends) < RANGES:
        end >>= 1
        ends.insert(0, end)
    return tuple(ends)
