"""Weights of a run's targets by their tokens: by data.token_weights, before a batch is used."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero.core.text_parsing import open_regular
from fzero.data.packing import Batch
from fzero.data.tokens import read_meta
from fzero.data.transforms import weigh_targets
from fzero.run.token_ids import token_ids

RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one by its checks

FORM = "TOKEN=WEIGHT,..., tokens or their ids with weights of 0 or more, or a .npy file with a weight for each id"


def validate_weights(c: RunConfig) -> None:
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
    """The function from (a batch, the number of its first sample in the run) to the batch whose mask has the weight of
    each target. Raises ValueError as `weights_of`."""
    if not c.data.token_weights:
        return lambda batch, first: batch
    weights = weights_of(c.data.token_weights, corpus)
    return lambda batch, first: weigh_targets(batch, weights)


def weights_of(text: str, corpus: Path) -> Tensor:
    """The weight of each id of a corpus, float64 [V], as data.token_weights says; a token that it does not name has 1.

    Raises ValueError as `token_ids`; for a file that is missing, has not a number of 0 or more for each id, or is not
    the one that the run began with.
    """
    size, file = read_meta(corpus)["vocab_size"], split_file(text)
    if file is not None:
        return read_weights(*file, size)
    weights = torch.ones(size, dtype=torch.float64)
    for token, weight in read_pairs(text):
        weights[token_ids("data.token_weights", token, corpus, FORM)] = weight
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
            raise ValueError(f"data.token_weights is {text!r} and has {item!r}; it is {FORM}")
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
    """data.token_weights with the absolute path and the digest of its file, if it is one and has no digest yet."""
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
