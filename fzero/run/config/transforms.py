"""What a run does to its rows before they are used: transforms of fzero/data/batches.py by config.

data.fim, data.span_corruption, data.token_weights, and the tokens that they name, as ids of a corpus.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero import data
from fzero.core.text_parsing import open_regular
from fzero.data.packing import Batch
from fzero.data.tokenizers import load_tokenizer
from fzero.data.tokens import read_meta


def token_ids(key: str, text: str, corpus: Path, form: str) -> list[int]:
    """The ids of the tokens in `text`, the value of `key`: texts of tokens, ids and ranges, with commas."""
    id_list, size = list[int](), read_meta(corpus)["vocab_size"]
    id_of: Callable[[str], int | None] | None = None
    for item in text.split(","):
        if ids := re.fullmatch(r"(\d+)(?:-(\d+))?", item, re.ASCII):
            first, last = int(ids[1]), int(ids[2] or ids[1])
            if not first <= last < size:
                raise ValueError(f"{key} is {text!r} and has {item}; ids of {corpus} are below {size}, in rising order")
            id_list += range(first, last + 1)
            continue
        id_of = id_of or known_tokens(corpus)
        if id_of is None:
            raise ValueError(f"{key} is {text!r}; of bytes give ids, such as 253,254,255, or leave it out")
        if (token_id := id_of(item)) is None:
            raise ValueError(f"{key} is {text!r} and the tokenizer of {corpus} has no token {item!r}; it is {form}")
        id_list.append(token_id)
    return id_list


def sentinel_ids(key: str, text: str, corpus: Path, form: str) -> list[int]:
    """The ids of tokens that stand for something else than text; raises ValueError for ends and repetitions."""
    ids, eos = token_ids(key, text, corpus, form), read_meta(corpus)["eos"]
    if eos in ids:
        raise ValueError(
            f"{key} is {text!r} and the tokenizer of {corpus} ends documents with one of them ({eos}); it is {form}"
        )
    if len(set(ids)) < len(ids):
        twice = next(token_id for token_id in ids if ids.count(token_id) > 1)
        raise ValueError(f"{key} is {text!r}, which has the token {twice} twice; it is {form}")
    return ids


def known_tokens(corpus: Path) -> Callable[[str], int | None] | None:
    """The function from the text of a token to its id or None; None if a corpus's tokens are bytes."""
    tokenizer = load_tokenizer(corpus)
    if not tokenizer.json:
        return None
    from tokenizers import Tokenizer as Library

    return Library.from_str(tokenizer.json).token_to_id


RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one by its checks

# The tokens before prefix, middle and suffix of vocabularies that have them: Qwen2.5-Coder, StarCoder, CodeLlama.
FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),
)
FIM_FORM = "PREFIX,MIDDLE,SUFFIX, the tokens that begin these parts, or their ids"


def expect_fim(c: RunConfig) -> None:
    """Raise ValueError for data.fim beside another objective than text, and for tokens that are not three."""
    d = c.data
    if not d.fim:
        if d.fim_tokens:
            raise ValueError(f"data.fim_tokens is {d.fim_tokens!r} and data.fim is 0; give the part of the documents")
        return
    if c.task.examples:
        raise ValueError(f"data.fim is {d.fim:g} and objective is {c.objective}; it rearranges documents of text")
    if d.fim_tokens and len(set(d.fim_tokens.split(","))) != 3:
        raise ValueError(f"data.fim_tokens is {d.fim_tokens!r}; it is {FIM_FORM}")


def make_fim(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, its first sample) to the batch with documents rearranged, by the run's seed."""
    if not c.data.fim:
        return lambda batch, first: batch
    sentinels, rate, seed = sentinels_of(c.data.fim_tokens, corpus), c.data.fim, c.train.seed
    return lambda batch, first: data.fill_in_middle(batch, first, seed, sentinels=sentinels, rate=rate)


def sentinels_of(text: str, corpus: Path) -> data.Sentinels:
    """The ids of the tokens that begin prefix, middle and suffix; text: of data.fim_tokens, "": usual ones."""
    if text:
        ids = sentinel_ids("data.fim_tokens", text, corpus, FIM_FORM)
        if len(ids) != 3:
            raise ValueError(f"data.fim_tokens is {text!r}, which are {len(ids)} tokens; it is {FIM_FORM}")
        return data.Sentinels(*ids)
    id_of, eos = known_tokens(corpus), read_meta(corpus)["eos"]
    if id_of is None:
        return data.Sentinels(prefix=253, middle=254, suffix=255)  # bytes which UTF-8 never has
    for names in FIM_TOKENS:
        usual_ids = [token_id for name in names if (token_id := id_of(name)) is not None]
        if len(usual_ids) == 3 and eos not in usual_ids:
            return data.Sentinels(*usual_ids)
    usual = "; ".join(" ".join(names) for names in FIM_TOKENS)
    raise ValueError(
        f"data.fim is given and the tokenizer of {corpus} has none of the usual tokens for it ({usual}); give "
        f"data.fim_tokens={FIM_FORM}"
    )


SENTINEL = "<extra_id_{}>"  # of T5's vocabularies, from 0 on
SENTINELS_OF_BYTES = (192, 193, *range(245, 256))  # which UTF-8 never has
SPANS_FORM = "the tokens that stand for the spans, in their order, or their ids, such as 32000-32099: two or more"
KEYS = {"noise_density": 0.15, "mean_noise_span_length": 3.0, "sentinel_tokens": ""}


def expect_spans(c: RunConfig) -> None:
    """Raise ValueError for data.span_corruption outside of 0 to 1, beside what it excludes, or its values alone."""
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
    """The function from (a batch, its first sample) to the batch with spans taken out, by the run's seed."""
    d, seed = c.data, c.train.seed
    if not d.span_corruption:
        return lambda batch, first: batch
    options = {"rate": d.span_corruption, "density": d.noise_density, "span": d.mean_noise_span_length}
    sentinels = span_sentinels(d.sentinel_tokens, corpus)
    return lambda batch, first: data.corrupt_spans(batch, first, seed, sentinels=sentinels, **options)


def span_sentinels(text: str, corpus: Path) -> list[int]:
    """The ids of the tokens that stand for spans; text: of data.sentinel_tokens, "": the usual ones."""
    if text:
        ids = sentinel_ids("data.sentinel_tokens", text, corpus, SPANS_FORM)
        if len(ids) < 2:
            raise ValueError(f"data.sentinel_tokens is {text!r}, which is one token; it is {SPANS_FORM}")
        return ids
    id_of, eos = known_tokens(corpus), read_meta(corpus)["eos"]
    if id_of is None:
        return list(SENTINELS_OF_BYTES)
    ids = list(
        itertools.takewhile(
            lambda token_id: token_id not in (None, eos), map(id_of, map(SENTINEL.format, itertools.count()))
        )
    )
    if len(ids) < 2:
        raise ValueError(
            f"data.span_corruption is given and the tokenizer of {corpus} has no {SENTINEL.format(0)}, "
            f"{SENTINEL.format(1)}, ...; give data.sentinel_tokens, {SPANS_FORM}"
        )
    return [token_id for token_id in ids if token_id is not None]


WEIGHTS_FORM = (
    "TOKEN=WEIGHT,..., tokens or their ids with weights of 0 or more, or a .npy file with a weight for each id"
)


def expect_target_weights(c: RunConfig) -> None:
    """Raise ValueError for data.token_weights beside an objective that is not of tokens, and a text that is none."""
    text = c.data.token_weights
    if not text:
        return
    if not c.task.of_tokens:
        raise ValueError(
            f"data.token_weights is {text!r} and the loss of objective={c.objective} is no mean of tokens; leave it out"
        )
    if split_file(text) is None:
        read_pairs(text)


def make_weights(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, its first sample) to the batch whose mask has the weight of each target."""
    if not c.data.token_weights:
        return lambda batch, first: batch
    weights = weights_of(c.data.token_weights, corpus)
    return lambda batch, first: data.weigh_targets(batch, weights)


def weights_of(text: str, corpus: Path) -> Tensor:
    """The weight of each id of a corpus, float64 [V], as data.token_weights says; 1 for tokens without one."""
    size, file = read_meta(corpus)["vocab_size"], split_file(text)
    if file is not None:
        return read_weights(*file, size)
    weights = torch.ones(size, dtype=torch.float64)
    for token, weight in read_pairs(text):
        weights[token_ids("data.token_weights", token, corpus, WEIGHTS_FORM)] = weight
    return weights


def read_pairs(text: str) -> list[tuple[str, float]]:
    """The tokens of a text with their weights; raises ValueError.

    >>> read_pairs("<tool>=0,10=0.25")
    [('<tool>', 0.0), ('10', 0.25)]
    """
    pairs = list[tuple[str, float]]()
    for item in text.split(","):
        token, equals, weight = item.rpartition("=")
        if not token or not equals or not re.fullmatch(r"\d{1,9}|\d{0,9}\.\d+", weight):
            raise ValueError(f"data.token_weights is {text!r} and has {item!r}; it is {WEIGHTS_FORM}")
        pairs.append((token, float(weight)))
    return pairs


def split_file(text: str) -> tuple[Path, str] | None:
    """(the file, its digest or "") of data.token_weights; None if it names tokens.

    >>> split_file("/a/weights.npy@0123456789abcdef")
    (PosixPath('/a/weights.npy'), '0123456789abcdef')
    """
    match = re.fullmatch(r"(.+\.npy)(?:@([0-9a-f]{16}))?", text)
    return None if match is None else (Path(match[1]), match[2] or "")


def read_weights(path: Path, digest: str, size: int) -> Tensor:
    """The weights in a file, float64 [size]. digest: of the file, "" for any."""
    content = content_of(path)
    if digest and digest != digest_of(content):
        raise ValueError(
            f"data.token_weights is {path}@{digest} and the file is {digest_of(content)} by now; put the other one "
            "back, or start a new run"
        )
    try:
        weights = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as a .npy file of numbers ({error})") from None
    fits = isinstance(weights, np.ndarray) and weights.shape == (size,) and weights.dtype.kind in "fiub"
    if not fits or not bool((np.isfinite(weights) & (weights >= 0)).all()):
        shape_text = f"{weights.dtype} {list(weights.shape)}" if isinstance(weights, np.ndarray) else "several arrays"
        raise ValueError(
            f"{path}: is {shape_text}; data.token_weights of this corpus is a vector of {size} numbers of 0 or more"
        )
    return torch.from_numpy(weights.astype(np.float64))


def with_digest(text: str) -> str:
    """data.token_weights with the path and the digest of its file, if it is one."""
    file = split_file(text)
    if file is None or file[1]:
        return text
    return f"{file[0].absolute()}@{digest_of(content_of(file[0]))}"


def content_of(path: Path) -> bytes:
    """The bytes of a file of weights; raises ValueError if they cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise ValueError(f"data.token_weights: {path} cannot be read ({reason})") from None


def digest_of(content: bytes) -> str:
    """16 hexadecimal digits that identify a content."""
    return hashlib.sha256(content).hexdigest()[:16]


def expect_transforms(c: RunConfig) -> None:
    """Raise ValueError for transforms that do not go with the rest of a config."""
    expect_fim(c)
    expect_spans(c)
    expect_target_weights(c)


def make_transforms(c: RunConfig, corpus: Path) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, its first sample) to the batch as it is used, the same on every mesh."""
    transforms = [make(c, corpus) for make in (make_fim, make_spans, make_weights)]

    def transformed(batch: Batch, first: int) -> Batch:
        for transform in transforms:
            batch = transform(batch, first)
        return batch

    return transformed
