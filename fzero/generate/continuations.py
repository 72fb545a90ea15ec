"""The log-probabilities of texts that are there already, each behind a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.generate.draws import score
from fzero.generate.page_pool import Ids
from fzero.generate.pages import PAGE_TOKENS, dtype_of, page_spec, pages_for, text_sizes
from fzero.generate.sequences import expect_tokens
from fzero.generate.step import StepBatch, expect_generates, expect_params, make_step
from fzero.models import Model
from fzero.sharding import Plan, one_process, zero_plan


class Continuation(NamedTuple):
    """A text that is there already, behind a context.

    >>> Continuation((1, 2), (3,)).ids
    (3,)
    """

    context: tuple[int, ...]
    ids: tuple[int, ...]


class ContinuationScore(NamedTuple):
    """What a model says of a continuation."""

    log_probs: tuple[float, ...]  # natural, of each id, at temperature 1
    greedy: bool  # whether each id is the likeliest one


@checked("params")
def score_continuations(
    model: Model,
    params: Tree,
    continuations: Sequence[Continuation],
    *,
    plan: Plan | None = None,
    step_tokens: int = 512,
    kernels: str = "auto",
    device: str | torch.device = "cpu",
) -> list[ContinuationScore]:
    """The scores of continuations, in their order.

    step_tokens: of a step, whose logits [step_tokens, V] are the largest tensor. Raises ValueError for an empty context
    or continuation, an id outside of the vocabulary, more tokens than the model's max_len + 1, parameters of another
    model, and as `make_step`.

    >>> from fzero import models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> (value,) = score_continuations(model, params, [Continuation((1, 2), (3, 4, 5))])
    >>> len(value.log_probs)
    3
    """
    plan, (vocab, max_len) = plan or zero_plan(0, model, one_process()), text_sizes(model)
    expect_generates(model, plan)
    expect_params(params, plan)
    for number, (context, ids) in enumerate(continuations):
        if not context or not ids:
            raise ValueError(f"continuation {number} has no {'ids' if context else 'context'}; give at least one token")
        expect_tokens(f"continuation {number}", (*context, *ids), vocab)
        if len(context) + len(ids) > max_len + 1:
            raise ValueError(f"continuation {number}: {len(context)} + {len(ids)} tokens; max_len is {max_len}")
    dtype = dtype_of(params)
    lengths = [len(context) + len(ids) - 1 for context, ids in continuations]
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    groups = list(_groups(order, lengths, step_tokens))
    count = max((len(group) * pages_for(lengths[group[0]], PAGE_TOKENS) for group in groups), default=1)
    pages = page_spec(model, plan, count, page_tokens=PAGE_TOKENS, dtype=dtype).zeros(device)
    step = make_step(model, plan, kernels=kernels, dtype=dtype)
    scores: list[ContinuationScore] = [ContinuationScore((), True)] * len(continuations)
    for group in groups:
        per_row = pages_for(lengths[group[0]], PAGE_TOKENS)
        for start in range(0, lengths[group[0]], step_tokens):
            rows, logit_counts, targets = [], list[int](), list[int]()
            for row, number in enumerate(group):
                chunk, new_targets = _chunk(continuations[number], start, step_tokens)
                rows.append((chunk, start, range(row * per_row, (row + 1) * per_row)))
                logit_counts.append(len(new_targets))
                targets += new_targets
            batch = StepBatch.of_rows(rows, logit_counts, page_tokens=PAGE_TOKENS, device=device)
            logits, pages = step(params, pages, batch)
            tokens = torch.tensor(targets, dtype=torch.int64, device=logits.device)
            log_probs = score(logits, tokens)[0].tolist() if targets else []
            equal = (logits.argmax(-1) == tokens).tolist()
            for number, count in zip(group, logit_counts):
                previous = scores[number]
                new, hits = log_probs[:count], equal[:count]
                scores[number] = ContinuationScore((*previous.log_probs, *new), previous.greedy and all(hits))
                log_probs, equal = log_probs[count:], equal[count:]
    return scores


def _chunk(continuation: Continuation, start: int, size: int) -> tuple[Ids, Ids]:
    """(`size` tokens from `start` on, but the last of all; the ids of the continuation that follow on these)."""
    context, ids = continuation
    chunk = (*context, *ids[:-1])[start : start + size]
    first = max(start + 1 - len(context), 0)
    return chunk, ids[first : max(start + len(chunk) + 1 - len(context), 0)]


def _groups(order: Sequence[int], lengths: Sequence[int], step_tokens: int) -> Iterator[list[int]]:
    """Numbers that one step computes: rows whole, or a longer one alone, in chunks."""
    group, tokens = list[int](), 0
    for number in order:
        if group and tokens + lengths[number] > step_tokens:
            yield group
            group, tokens = [], 0
        group.append(number)
        tokens += lengths[number]
    if group:
        yield group
