"""Documents of a run rearranged so that its model learns to fill in a middle: by data.fim, before a batch is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.data.packing import Batch
from fzero.data.tokens import read_meta
from fzero.data.transforms import Sentinels, fill_in_middle
from fzero.run.token_ids import known_tokens, sentinel_ids

RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one by its checks

# The tokens before prefix, middle and suffix of vocabularies that have them: Qwen2.5-Coder, StarCoder, CodeLlama.
USUAL = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),
)
OF_BYTES = Sentinels(prefix=253, middle=254, suffix=255)  # which UTF-8 never has
FORM = "PREFIX,MIDDLE,SUFFIX, the tokens that begin these parts, or their ids"


def validate_fim(c: RunConfig) -> None:
    """Raise ValueError for data.fim beside another objective than text, and for tokens that are not three."""
    d = c.data
    if not d.fim:
        if d.fim_tokens:
            raise ValueError(f"data.fim_tokens is {d.fim_tokens!r} and data.fim is 0; give the part of the documents")
        return
    if c.task.examples:
        raise ValueError(f"data.fim is {d.fim:g} and objective is {c.objective}; it rearranges documents of text")
    if d.fim_tokens and len(set(d.fim_tokens.split(","))) != 3:
        raise ValueError(f"data.fim_tokens is {d.fim_tokens!r}; it is {FORM}")


def make_fim(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, the number of its first sample in the run) to the batch with documents rearranged.

    The row of sample n is changed by (the run's seed, n) alone. Raises ValueError as `sentinels_of`.
    """
    if not c.data.fim:
        return lambda batch, first: batch
    sentinels, rate, seed = sentinels_of(c.data.fim_tokens, corpus), c.data.fim, c.train.seed
    return lambda batch, first: fill_in_middle(batch, first, seed, sentinels=sentinels, rate=rate)


def sentinels_of(text: str, corpus: Path) -> Sentinels:
    """The ids of the tokens that begin prefix, middle and suffix in a corpus; text: of data.fim_tokens, "": usual ones.

    Raises ValueError as `sentinel_ids`, and if the tokenizer has none of the usual ones.
    """
    if text:
        ids = sentinel_ids("data.fim_tokens", text, corpus, FORM)
        if len(ids) != 3:
            raise ValueError(f"data.fim_tokens is {text!r}, which are {len(ids)} tokens; it is {FORM}")
        return Sentinels(*ids)
    id_of, eos = known_tokens(corpus), read_meta(corpus)["eos"]
    if id_of is None:
        return OF_BYTES
    for names in USUAL:
        usual_ids = [token_id for name in names if (token_id := id_of(name)) is not None]
        if len(usual_ids) == 3 and eos not in usual_ids:
            return Sentinels(*usual_ids)
    usual = "; ".join(" ".join(names) for names in USUAL)
    raise ValueError(
        f"data.fim is given and the tokenizer of {corpus} has none of the usual tokens for it ({usual}); give "
        f"data.fim_tokens={FORM}"
    )
