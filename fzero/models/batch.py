"""The batches of a model of tokens: their entries, what is refused of them, and sums of a loss by source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.core.arguments import checked, expect_kind
from fzero.kernels.cross_entropy import check_targets, counted_tokens

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
FULL_ENTRIES = ("documents", SOURCES)  # that embedding and head see of whole sequences, whatever their shape
# bool scalar, which only embedding and head see: a token or target is outside of the vocabulary, or a weight is none.
WRONG = "wrong"


def has_tokens(config: Any) -> bool:
    """Whether the batches of a model of this config are of tokens, with the entries of Batch."""
    return hasattr(config, "max_len")


def check_batch(config: Any, batch: Batch, parts: int = 1) -> None:
    """Raise ValueError if a batch does not fit the model: an entry, a shape, or a length."""
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
    if not shape[-1]:
        raise ValueError(f"batch['tokens'] has shape {list(shape)}; a sequence has at least one token")
    if shape[-1] > config.max_len:
        raise ValueError(f"the sequences have {shape[-1]} tokens and the model takes {config.max_len} (max_len)")
    if shape[-1] % parts:
        raise ValueError(
            f"sequence parallelism: the sequences have {shape[-1]} tokens, not divisible by tp={parts}; use "
            f"{-(-shape[-1] // parts) * parts}"
        )


def select_tokens(batch: Batch, positions: Tensor, full_entries: Collection[str]) -> Batch:
    """The batch of the tokens at `positions`, int64 [N]; entries in `full_entries` stay whole."""
    shape = batch["tokens"].shape[:2]
    by_token = {name for name, entry in batch.items() if entry.shape[:2] == shape} - set(full_entries)
    return {name: entry.index_select(1, positions) if name in by_token else entry for name, entry in batch.items()}


def wrong_values(batch: Batch, vocab_size: int) -> dict[str, Tensor]:
    """Where tokens and targets are outside of the vocabulary, or weights are wrong: bool [B, T] each."""
    tokens, targets, mask = batch["tokens"], batch["targets"], batch.get("mask")
    counts = counted_tokens(targets, mask).bool()
    wrong = {"tokens": (tokens < 0) | (tokens >= vocab_size), "targets": counts & (targets >= vocab_size)}
    return wrong | ({"mask": ~((mask >= 0) & mask.isfinite())} if mask is not None and mask.is_floating_point() else {})


def mark_wrong(config: Any, batch: Batch) -> Batch:
    """The batch with the entry `WRONG`, and tokens that all are rows of the embedding; waits for nothing."""
    if not (hasattr(config, "vocab_size") and {"tokens", "targets"} <= batch.keys()):
        return batch
    wrong = wrong_values(batch, config.vocab_size)
    tokens = torch.where(wrong["tokens"], 0, batch["tokens"])
    return {**batch, "tokens": tokens, WRONG: torch.stack([mask.any() for mask in wrong.values()]).any()}


@checked()
def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise ValueError, naming the first position, if a token, or a target that counts, is not in the vocabulary, or
    the weight of one is below 0 or not finite.

    batch: tokens and targets int64 [B, T]; optional mask [B, T], bool or weights. Negative targets, such as the -100 of
    Hugging Face's collators, do not count. The first call of a train or evaluation step checks its batch so; in later
    ones, which do not wait for the device, such a batch makes the loss NaN, and a step makes no update: call it on the
    batches of a data loader that is in doubt.

    >>> tokens = torch.tensor([[3, 5], [1, 8]])
    >>> check_tokens({"tokens": tokens, "targets": tokens - 100}, vocab_size=8)
    Traceback (most recent call last):
    ValueError: tokens[1, 1] is 8; a token is in 0..7
    """
    limits = {"tokens": f"a token is in 0..{vocab_size - 1}", "mask": "the weight of a target is 0 or more, and finite"}
    wrong = wrong_values(batch, vocab_size)
    for name, limit in limits.items():
        if name in wrong and bool(wrong[name].any()):
            index = wrong[name].nonzero()[0].tolist()
            raise ValueError(f"{name}{index} is {batch[name][tuple(index)].item()}; {limit}")
    check_targets(batch["targets"], vocab_size, batch.get("mask"))


KINDS = ("source_loss", "source_tokens")


def sums_by_source(batch: Batch, losses: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """{source_loss/I: the sum in nats, source_tokens/I: the tokens that count} of each source I, float64.

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
