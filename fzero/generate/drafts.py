"""Guesses of a smaller model, whose pages follow those of the model that verifies them.

The draft model has the page table of the verifying one, so that a page of a sequence, shared, freed or cached, holds
the entries of both. Behind each step it computes the rows of that step, as far as they stand, and the token that was
drawn from them, in one batch of all sequences; then one token of each guess after the other. Entries of guesses that
are beyond a sequence's pages are in pages of the draft alone, and computed again once they stand: nothing is to be
remembered of a sequence.

DeepSeek's second head is a draft too: of one layer, whose inputs are the last activations of the model and the token
that follows. Behind its first guess it goes on from its own activations. The entry of a page's last position depends on
the token behind it, so that a page that is shared may have one of another text: a worse guess, and no other text.

A guess is drawn as the token that it stands for: by the same sampling and with the same noise. Of two distributions
whose largest sums with equal noise are taken, a share of at least (1 - d) / (1 + d) is equal, d their total variation
distance; the likeliest token of the draft would be right as often as the model draws it.

Ref: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv:2412.19437, section 2.2; Leviathan et al. 2023, "Fast
inference from transformers via speculative decoding", arXiv:2211.17192; Daliri, Musco, Suresh 2024, "Coupling without
communication and drafter-invariant speculative decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fzero.generate.draws import draw_by_row
from fzero.generate.pages import Pages, PageSpec, dtype_of, page_spec, pages_for, recompute_reason, text_sizes
from fzero.generate.requests import Row
from fzero.generate.rows import DrawRow
from fzero.generate.step import StepBatch, expect_generates, expect_params, hidden_step
from fzero.models import Model
from fzero.sharding import Plan, one_process, zero_plan

if TYPE_CHECKING:
    from fzero.generate.page_pool import Ids


class Draft(NamedTuple):
    """A smaller model with the vocabulary of the one that generates, whose tokens are guesses of it.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> options = generate.GenerateOptions(guesses=3, draft=generate.Draft(model, params))
    >>> prompt = generate.Prompt((1, 2, 3), generate.Sampling(0.8, max_tokens=9))
    >>> out = generate.completions(model, params, [prompt], options=options)
    >>> len(list(out)[0].ids), out.guesses  # those of equal weights are right
    (9, (6, 6))
    """

    model: Model
    params: Any  # whole, on each rank
    mtp: bool = False  # whether the second head guesses, of the model that generates itself (DeepSeek with n_mtp=1)


class DraftRow(NamedTuple):
    """A row of the step before, and what is guessed behind it."""

    row: Row
    tokens: Ids  # those that were drawn from it
    guess_count: int
    draw_row: Callable[[Sequence[int]], DrawRow]  # of the token behind the drawn ones and these guesses


def draft_spec(draft: Draft, spec: PageSpec, rows: int, guesses: int) -> PageSpec:
    """The pages of a draft beside those of a spec, and behind them those of the guesses of `rows` sequences."""
    plan, size = zero_plan(0, draft.model, one_process()), spec.page_tokens
    count = spec.count + rows * pages_for(guesses, size)
    spec = page_spec(draft.model, plan, count, page_tokens=size, dtype=dtype_of(draft.params))
    return replace(spec, entries=spec.entries[:1]) if draft.mtp else spec


class DraftPages:
    """What a draft model computes beside the steps of a call. first: the number of its first page for guesses."""

    def __init__(self, draft: Draft, pages: Pages, first: int, guesses: int, kernels: str) -> None:
        self.params, self.pages, self.first, self.mtp = draft.params, pages.donate(), first, draft.mtp
        self.page_tokens = pages.spec.page_tokens
        self.per_row = pages_for(guesses, self.page_tokens)
        plan = zero_plan(0, draft.model, one_process())
        self.step = hidden_step(draft.model, plan, kernels=kernels, dtype=dtype_of(draft.params), mtp=draft.mtp)

    def guess(
        self, rows: Sequence[DraftRow], hidden: Tensor | None, vocab_size: int | None, device: torch.device
    ) -> dict[int, tuple[int, ...]]:
        """The guesses behind the rows of a step, by sequence; its pages have the entries of that step then."""
        beyond = [range(self.first + i * self.per_row, self.first + (i + 1) * self.per_row) for i in range(len(rows))]
        tables = [(*row.row.pages, *pages) for row, pages in zip(rows, beyond)]
        # A power of two, so that few shapes come often: graphs of a draft's few layers are made late.
        width = 1 << (max(map(len, tables), default=1) - 1).bit_length()
        tables = [table + (0,) * (width - len(table)) for table in tables]
        guesses: list[list[int]] = [[] for _ in rows]
        chunks = [(i, _standing(row, self.mtp), row.row.start) for i, row in enumerate(rows)]
        if self.mtp and hidden is not None:
            hidden = _first_lines(hidden, [(len(row.row.ids), len(ids)) for row, (_, ids, _) in zip(rows, chunks)])
        while chunks:
            drawing = [(i, start + len(ids)) for i, ids, start in chunks if rows[i].guess_count]
            batch = StepBatch.of_rows(
                [(ids, start, tables[i]) for i, ids, start in chunks],
                [int(rows[i].guess_count > 0) for i, _, _ in chunks],
                page_tokens=self.page_tokens,
                device=device,
            )
            last_lines = batch.logit_rows.tolist() if self.mtp else range(len(drawing))
            logits, hidden, self.pages = self.step(self.params, self.pages, batch, hidden if self.mtp else None)
            if not drawing:
                break
            draws, chunks = [rows[i].draw_row(guesses[i]) for i, _ in drawing], []
            out = draw_by_row(logits, draws, label="the draft model: ", vocab_size=vocab_size)
            lines = []
            for (i, start), token, draw, line in zip(drawing, out.tokens.tolist(), draws, last_lines):
                guesses[i].append(token)
                if len(guesses[i]) < rows[i].guess_count and token not in draw.ends:
                    chunks.append((i, (token,), start))
                    lines.append(line)
            hidden = hidden[lines] if self.mtp and hidden is not None else None
        return {row.row.number: tuple(ids) for row, ids in zip(rows, guesses) if ids}


def _first_lines(hidden: Tensor, lengths: Sequence[tuple[int, int]]) -> Tensor:
    """The first lines of each row. lengths: (all its lines, the first ones) of each."""
    rows = hidden.split([count for count, _ in lengths])
    return torch.cat([row[:first] for row, (_, first) in zip(rows, lengths)])


def _standing(row: DraftRow, following: bool) -> Ids:
    """The tokens of a row without guesses that were wrong, and the one behind which guesses come; or the tokens that
    follow those."""
    ids = row.row.ids if row.row.prefill else row.row.ids[: len(row.tokens)]
    if following:
        text = row.draw_row(())
        first, end = row.row.start + 1, row.row.start + len(ids) + 1
        behind = max(first - len(text.prompt), 0), max(end - len(text.prompt), 0)
        return (*text.prompt[first:end], *text.output[slice(*behind)])
    return (*ids, *row.tokens[-1:]) if row.guess_count else ids


def expect_draft(draft: Draft, model: Model, plan: Plan, vocab_size: int | None, longest: int) -> None:
    """Raise ValueError for a draft that cannot guess texts of up to `longest` tokens of a model."""
    if draft.mtp and (draft.model.config != model.config or not getattr(model.config, "n_mtp", 0)):
        raise ValueError(
            "the draft is a second head (mtp), which must be that of the model itself, whose n_mtp is "
            f"{getattr(model.config, 'n_mtp', 0)}; train a DeepSeek whose config has n_mtp=1, or give a smaller model"
        )
    if draft.mtp and plan.mesh.size > 1:
        raise ValueError(
            f"the draft has mtp=True, which is for one process, and here are {plan.mesh.size}; leave it out"
        )
    draft_plan = zero_plan(0, draft.model, one_process())
    expect_generates(draft.model, draft_plan)
    expect_params(draft.params, draft_plan, "the draft's parameters are")
    if reason := recompute_reason(draft.model, one_process()):
        raise ValueError(
            f"the draft model keeps no keys and values ({reason}), so that each guess would cost a whole pass; give "
            "one of fzero's own, as fzero import writes them"
        )
    draft_ids, model_ids = (min(x, vocab_size or x) for x, _ in map(text_sizes, (draft.model, model)))
    if draft_ids != model_ids:
        raise ValueError(
            f"the draft model has {draft_ids} ids and the model {model_ids}; give one of the same vocabulary"
        )
    if longest > (max_len := text_sizes(draft.model)[1]):
        raise ValueError(
            f"the draft model has max_len={max_len}, and the longest text may have {longest} tokens; ask for at most "
            f"{max_len}, or give another draft"
        )
