"""Transforms of the rows of a batch: pure functions of a batch and a key for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.arguments import checked
from fzero.core.kinds import WrongKind
from fzero.data.stream import Batch

SHORTEST = 6  # tokens of a document's part that is rearranged: three that are added, one for each part


class Sentinels(NamedTuple):
    """The ids of the tokens that begin the parts of a rearranged text."""

    prefix: int
    middle: int
    suffix: int


@checked("sentinels")
def fill_in_middle(
    batch: Batch, first: int, seed: int, *, sentinels: Sentinels, rate: float = 0.5, spm: float = 0.5
) -> Batch:
    """Return the batch with documents rearranged so that a model learns to fill in a middle.

    batch: of a TokenStream or MixedStream, tokens, targets, documents, mask [B, T]. first: the number of its first
    sample in the run; the row of sample n is changed by (seed, n) alone, whatever the batches. A part of a document in
    a row (of at least 6 tokens) is changed with probability `rate`: it is cut in two places, and becomes

        prefix-token PREFIX suffix-token SUFFIX middle-token MIDDLE    or, with probability `spm` of these,
        prefix-token suffix-token SUFFIX middle-token PREFIX MIDDLE

    of the same length, as the suffix loses its last three tokens. The end-of-document token of a document that ends in
    the row stays at its end. Of one that goes on, the target after the middle does not count: it follows the suffix.

    Raises ValueError for rates outside of 0 to 1 and a batch without documents.

    >>> tokens = torch.arange(10, 22)[None]
    >>> batch = {"tokens": tokens, "targets": tokens + 1, "documents": tokens * 0, "mask": tokens > 0}
    >>> fill_in_middle(batch, 0, 2, sentinels=Sentinels(1, 2, 3), rate=1.0, spm=0.0)["tokens"].tolist()
    [[1, 10, 3, 17, 18, 2, 11, 12, 13, 14, 15, 16]]

    Ref: Bavarian et al. 2022, "Efficient training of language models to fill in the middle", arXiv:2207.14255, section
    3; SPM in its second form, section 3.1.
    """
    for name, value in (("rate", rate), ("spm", spm)):
        if not 0 <= value <= 1:
            raise ValueError(f"fill_in_middle: {name} is {value}; it must be from 0 to 1")
    if "documents" not in batch:
        raise ValueError("fill_in_middle: the batch has no 'documents'; give that of a TokenStream")
    if len(sentinels) != 3:
        raise WrongKind(f"fill_in_middle: sentinels is {sentinels}; it must be Sentinels(prefix, middle, suffix)")
    tokens, targets, mask = (batch[name].clone() for name in ("tokens", "targets", "mask"))
    root = prng.fold_in(prng.key(seed), "fill in the middle")
    for row in range(len(tokens)):
        bounds = torch.where(batch["documents"][row].diff() != 0)[0] + 1
        begins = [0, *bounds.tolist(), tokens.shape[1]]
        draws = prng.uniform(prng.fold_in(root, first + row), (len(begins) - 1, 4)).tolist()
        for begin, end, (chosen, form, one, other) in zip(begins, begins[1:], draws):
            # Where the next document begins in the row, or the target after the row does not count, this one ends.
            over = not bool(mask[row, end - 1])
            text = tokens[row, begin : end - over]
            if chosen >= rate or len(text) < SHORTEST or not bool(mask[row, begin:end].any()):
                continue
            low, high = sorted(min(int(u * (len(text) - 2)), len(text) - 3) for u in (one, other))
            new = rearranged(text, low, high, sentinels, form < spm)
            tokens[row, begin : end - over] = new
            targets[row, begin : begin + len(new) - 1] = new[1:]
            mask[row, end - 1] &= over
    return {**batch, "tokens": tokens, "targets": targets, "mask": mask}


def rearranged(text: Tensor, low: int, high: int, sentinels: Sentinels, spm: bool) -> Tensor:
    """The text [n] cut before `low` and before `high` <= n - 3, its parts rearranged, [n]."""
    prefix, middle, suffix = text[:low], text[low:high], text[high:-3]
    begin = [text.new_tensor([token]) for token in sentinels]
    if spm:
        return torch.cat([begin[0], begin[2], suffix, begin[1], prefix, middle])
    return torch.cat([begin[0], prefix, begin[2], suffix, begin[1], middle])
