"""The batches of a model of tokens: their entries, and what is refused of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.core.arguments import checked, expect_kind
from fzero.kernels.cross_entropy import check_targets

# tokens, targets int64 [B, T]; optional mask [B, T], documents int [B, T], first int64 []. A token counts if its target
# is not negative and its mask, bool, is True; or as much as its mask, float, says: that multiplies its loss.
Batch = dict[str, Tensor]


# What other libraries call them: an entry of such a name would be passed over without a word.
OTHER_NAMES = {
    "input_ids": "tokens",
    "labels": "targets",
    "attention_mask": "mask",
    "loss_mask": "mask",
    "segment_ids": "documents",
}


EMPTY = torch.empty(0)
SOURCES = "sources"  # bool [B, S]: of which source of a mixture each row is
MASKS = (torch.bool, torch.float32, torch.float64)
BY_TOKEN = ("tokens", "targets", "mask")  # the entries [B, T] that embedding and head read


def has_tokens(config: Any) -> bool:
    """Whether the batches of a model of this config are of tokens, with the entries of Batch; those of others are their
    own."""
    return hasattr(config, "max_len")


def check_batch(config: Any, batch: Batch, parts: int = 1) -> None:
    """Raise ValueError if a batch does not fit the model: an entry is missing, shapes differ, or sequences are too long
    or not divisible by `parts`, among which sequence parallelism cuts them.

    config: of the model.
    """
    write = 'write {"tokens": rows[:, :-1], "targets": rows[:, 1:]}'
    expect_kind("the batch of a Model", batch, Mapping, write)
    if not has_tokens(config):
        return
    for name in sorted(OTHER_NAMES.keys() & batch.keys() - OTHER_NAMES.values()):
        raise ValueError(f"batch[{name!r}] is not read; call it {OTHER_NAMES[name]!r}, or leave it out")
    for name in ("tokens", "targets", "mask", "documents"):
        expect_kind(f"batch[{name!r}]", batch.get(name, EMPTY), Tensor, "use torch.as_tensor")
    for name in ("tokens", "targets"):
        if name not in batch:
            raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
        if batch[name].dtype not in (torch.int64, torch.int32):
            raise ValueError(f"batch[{name!r}] is {batch[name].dtype}; it must be int64: the numbers of tokens")
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise ValueError(f"batch['tokens'] has shape {list(shape)}; it must be [B, T], such as tokens[None] of one row")
    for name in ("tokens", "targets", "mask", "documents"):
        if name in batch and batch[name].shape != shape:
            raise ValueError(
                f"batch[{name!r}] has shape {list(batch[name].shape)} and tokens {list(shape)}; they must agree"
            )
    if "documents" in batch and (batch["documents"].is_floating_point() or batch["documents"].dtype == torch.bool):
        raise ValueError(
            f"batch['documents'] is {batch['documents'].dtype}; it must be int: a number for each document"
        )
    if "mask" in batch and batch["mask"].dtype not in MASKS:
        raise ValueError(
            f"batch['mask'] is {batch['mask'].dtype}; it must be bool, of the targets that count, or float32, their "
            "weights: give batch['mask'].bool() or batch['mask'].float()"
        )
    if shape[-1] > config.max_len:
        raise ValueError(f"the sequences have {shape[-1]} tokens and the model takes {config.max_len} (max_len)")
    if shape[-1] % parts:
        raise ValueError(
            f"sequence parallelism: the sequences have {shape[-1]} tokens, not divisible by tp={parts}; use "
            f"{-(-shape[-1] // parts) * parts}"
        )


@checked()
def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise ValueError, naming the first position, if a token, or a target that counts, is not in the vocabulary, or
    the weight of one is below 0 or not finite.

    batch: tokens and targets int64 [B, T]; optional mask [B, T], bool or weights. Negative targets, such as the -100 of
    Hugging Face's collators, do not count. The first call of a train or evaluation step checks its batch so; later ones
    do not, because it waits for the device: call it on the batches of a data loader that is in doubt.

    >>> tokens = torch.tensor([[3, 5], [1, 8]])
    >>> check_tokens({"tokens": tokens, "targets": tokens - 100}, vocab_size=8)
    Traceback (most recent call last):
    ValueError: tokens[1, 1] is 8; a token is in 0..7
    """
    tokens = batch["tokens"]
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"tokens{at} is {int(tokens[tuple(at)])}; a token is in 0..{vocab_size - 1}")
    mask = batch.get("mask")
    if mask is not None and mask.is_floating_point() and bool((wrong := ~((mask >= 0) & mask.isfinite())).any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"mask{at} is {float(mask[tuple(at)])}; the weight of a target is 0 or more, and finite")
    check_targets(batch["targets"], vocab_size, mask)
