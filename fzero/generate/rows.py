"""The rows from which tokens are drawn, as tensors: keys, parameters, and changes of single logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.copy_buckets import bring_together
from fzero.core.prng_rows import fold_rows
from fzero.generate.sampling import Sampling

Ids = Sequence[int] | np.ndarray


class DrawRow(NamedTuple):
    """A row of logits, from which a token is drawn.

    >>> DrawRow(Sampling(0.8, seed=3), position=5, request=2).sample
    0
    """

    sampling: Sampling
    position: int  # of the drawn token in its sequence, from 0
    request: int = 0  # the number of its request, from 0
    sample: int = 0  # the number of the sample of the request, from 0
    prompt: Ids = ()  # its ids, for a repetition penalty
    output: Ids = ()  # the ids drawn before it, for penalties and min_tokens
    ends: Sequence[int] = ()  # the ids that end the text, which are not drawn before min_tokens
    mask: Tensor | None = None  # bool [V]: the tokens that a grammar allows; an id beyond is not allowed


class Entries(NamedTuple):
    """Changes of single logits."""

    rows: Tensor  # int64 [n]
    ids: Tensor  # int64 [n], with the row in no order, each pair once
    values: Tensor  # float32 [n]


class Limits(NamedTuple):
    """What the tokens are limited by, of the rows in `DrawRows.limited` [R]."""

    top_k: Tensor  # int64 [R], 0: all
    top_p: Tensor  # float64 [R]
    min_p: Tensor  # float64 [R]: its logarithm
    largest_k: int  # the largest top_k
    smallest_k: int


class DrawRows(NamedTuple):
    """The rows of a batch as tensors; `draw_rows` makes them."""

    keys: Tensor  # int64 [M, 2]
    temperature: Tensor | None  # float32 [M], 1 for a row of the likeliest token; None: all are 1
    likeliest: Tensor  # int64: the numbers of rows that take the likeliest token,
    unlimited: Tensor  # of those that draw among all tokens,
    limited: Tensor  # and of those that draw among some
    limits: Limits | None
    bias: Entries | None  # added
    repetition: Entries | None  # by which the logits of tokens so far are divided if above 0, else multiplied
    penalty: Entries | None  # subtracted
    forbidden: Entries | None
    masks: tuple[tuple[int, Tensor], ...]  # (row, bool [V])
    alternatives: int  # the most of a row

    @property
    def edited(self) -> bool:
        """Whether a logit changes."""
        return bool(self.masks) or any(
            x is not None for x in (self.bias, self.repetition, self.penalty, self.forbidden)
        )


def draw_rows(rows: Sequence[DrawRow], device: torch.device | str = "cpu") -> DrawRows:
    """The rows as tensors on `device`, for `draw`. What no row uses is None, and costs nothing.

    >>> draw_rows([DrawRow(Sampling(0.0), 7), DrawRow(Sampling(0.8), 3, request=1)]).likeliest
    tensor([0])
    """
    samplings = [row.sampling for row in rows]
    temperatures = [s.temperature or 1.0 for s in samplings]
    limited = [i for i, s in enumerate(samplings) if s.limits]
    masks = tuple((i, row.mask) for i, row in enumerate(rows) if row.mask is not None)

    tensors = DrawRows(
        keys=_keys(rows),
        temperature=None if set(temperatures) <= {1.0} else torch.tensor(temperatures),
        likeliest=_integers(i for i, s in enumerate(samplings) if s.temperature == 0.0),
        unlimited=_integers(i for i, s in enumerate(samplings) if s.temperature and not s.limits),
        limited=_integers(limited),
        limits=_limits([samplings[i] for i in limited]),
        bias=_entries((i, [*s.bias], [*s.bias.values()]) for i, s in enumerate(samplings) if s.bias),
        repetition=_entries(
            (i, _unique(row.prompt, row.output)[0], row.sampling.repetition)
            for i, row in enumerate(rows)
            if row.sampling.repetition != 1.0
        ),
        penalty=_entries(
            _penalty(i, row) for i, row in enumerate(rows) if row.sampling.presence or row.sampling.frequency
        ),
        forbidden=_entries(
            (i, [*dict.fromkeys(row.ends)], -math.inf)
            for i, row in enumerate(rows)
            if len(row.output) < row.sampling.min_tokens
        ),
        masks=masks,
        alternatives=max((s.alternatives for s in samplings), default=0),
    )
    leaves, treedef = pytree.flatten(tensors)
    arrived = iter(bring_together([leaf for leaf in leaves if isinstance(leaf, Tensor)], device))
    return pytree.unflatten([next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in leaves], treedef)


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _entries(groups: Iterable[tuple[int, Ids, Any]]) -> Entries | None:
    """The changes of (row, ids, their values or one of all)."""
    groups = [(row, np.asarray(ids, np.int64), values) for row, ids, values in groups]
    groups = [group for group in groups if len(group[1])]
    if not groups:
        return None
    counts = [len(ids) for _, ids, _ in groups]
    ids = np.concatenate([ids for _, ids, _ in groups])
    values = np.concatenate([np.broadcast_to(np.float32(x), n) for (*_, x), n in zip(groups, counts)])
    numbers = np.repeat(np.array([row for row, _, _ in groups], np.int64), counts)
    return Entries(*(torch.from_numpy(x) for x in (numbers, ids, values)))


def _limits(samplings: Sequence[Sampling]) -> Limits | None:
    """The limits of rows that draw among some tokens."""
    if not samplings:
        return None
    logs = [math.log(s.min_p) if s.min_p else -math.inf for s in samplings]
    top_p, min_p = (torch.tensor(x, dtype=torch.float64) for x in ([s.top_p for s in samplings], logs))
    top_k = [s.top_k for s in samplings]
    return Limits(_integers(top_k), top_p, min_p, max(top_k), min(top_k))


def _keys(rows: Sequence[DrawRow]) -> Tensor:
    """The key of each row's token, int64 [M, 2]; zeros if none is drawn by chance."""
    if not any(row.sampling.temperature for row in rows):
        return torch.zeros(len(rows), 2, dtype=torch.int64)
    for row in rows:
        if min(row.request, row.sample, row.position) < 0:
            raise ValueError(
                f"a row has request {row.request}, sample {row.sample} and position {row.position}; each must be at "
                "least 0"
            )
    words = [
        (row.sampling.seed & 0xFFFFFFFF, row.sampling.seed >> 32, row.request, row.sample, row.position) for row in rows
    ]
    table = torch.tensor(words, dtype=torch.int64)
    keys = table[:, :2]
    for column in (2, 3, 4):
        keys = fold_rows(keys, table[:, column])
    return keys


def _unique(*ids: Ids) -> tuple[Any, Any]:
    """(each id once, how often it is there)."""
    return np.unique(np.concatenate([np.asarray(x, np.int64) for x in ids]), return_counts=True)


def _penalty(number: int, row: DrawRow) -> tuple[int, Any, Any]:
    """What is subtracted for the tokens of the text."""
    ids, counts = _unique(row.output)
    return number, ids, row.sampling.frequency * counts + row.sampling.presence
