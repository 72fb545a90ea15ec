"""Documents of a run with spans taken out, so that its model learns to say them: by data.span_corruption, before a
batch is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.data.packing import Batch
from fzero.data.tokens import read_meta
from fzero.data.transforms import corrupt_spans
from fzero.run.token_ids import known_tokens, sentinel_ids

RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one by its checks

USUAL = "<extra_id_{}>"  # of T5's vocabularies, from 0 on
OF_BYTES = (192, 193, *range(245, 256))  # which UTF-8 never has
FORM = "the tokens that stand for the spans, in their order, or their ids, such as 32000-32099: two or more"
KEYS = {"noise_density": 0.15, "mean_noise_span_length": 3.0, "sentinel_tokens": ""}


def validate_spans(c: RunConfig) -> None:
    """Raise ValueError for data.span_corruption outside of 0 to 1, beside another objective than text and beside
    data.fim, and for its values without it."""
    d = c.data
    if not d.span_corruption:
        for key, value in KEYS.items():
            if getattr(d, key) != value:
                raise ValueError(
                    f"data.{key} is {getattr(d, key)!r} and data.span_corruption is 0; give the part of the documents"
                )
        return
    if c.task.examples or d.fim:
        reason = f"data.fim is {d.fim:g}, which rearranges them too" if d.fim else f"objective is {c.objective}"
        raise ValueError(
            f"data.span_corruption is {d.span_corruption:g} and {reason}; it takes spans out of documents of text: "
            "leave one of them out"
        )


def make_spans(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, the number of its first sample in the run) to the batch with spans taken out.

    The row of sample n is changed by (the run's seed, n) alone. Raises ValueError as `span_sentinels`.
    """
    d, seed = c.data, c.train.seed
    if not d.span_corruption:
        return lambda batch, first: batch
    options = {"rate": d.span_corruption, "density": d.noise_density, "span": d.mean_noise_span_length}
    sentinels = span_sentinels(d.sentinel_tokens, corpus)
    return lambda batch, first: corrupt_spans(batch, first, seed, sentinels=sentinels, **options)


def span_sentinels(text: str, corpus: Path) -> list[int]:
    """The ids of the tokens that stand for spans in a corpus; text: of data.sentinel_tokens, "": the usual ones.

    Raises ValueError as `sentinel_ids`, for fewer than two, and if the tokenizer has none of the usual ones.
    """
    if text:
        ids = sentinel_ids("data.sentinel_tokens", text, corpus, FORM)
        if len(ids) < 2:
            raise ValueError(f"data.sentinel_tokens is {text!r}, which is one token; it is {FORM}")
        return ids
    id_of, eos = known_tokens(corpus), read_meta(corpus)["eos"]
    if id_of is None:
        return list(OF_BYTES)
    ids = list(
        itertools.takewhile(
            lambda token_id: token_id not in (None, eos), map(id_of, map(USUAL.format, itertools.count()))
        )
    )
    if len(ids) < 2:
        raise ValueError(
            f"data.span_corruption is given and the tokenizer of {corpus} has no {USUAL.format(0)}, "
            f"{USUAL.format(1)}, ...; give data.sentinel_tokens, {FORM}"
        )
    return [token_id for token_id in ids if token_id is not None]
