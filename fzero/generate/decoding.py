"""The loop over the sequences of a call: the scheduler, the step and the draws, until every one has ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.core import pytree
from fzero.core.arguments import expect_device
from fzero.core.copy_buckets import bring_together, read_scalars, start_fetch
from fzero.core.pytree import Tree
from fzero.generate.drafts import DraftPages, DraftRow, draft_spec
from fzero.generate.draws import TokenDraws, draw_by_row, log_sum_exp, score
from fzero.generate.pages import CACHES, PageSpec, dtype_of, page_spec, pages_for, text_sizes
from fzero.generate.prefixes import PrefixCache, expect_cache, root_of
from fzero.generate.prompts import Completion, GenerateOptions
from fzero.generate.requests import Arrivals, Batch, Request, Row, StepLimits
from fzero.generate.scheduler import empty_state, schedule
from fzero.generate.sequences import SampleText, expect_tokens
from fzero.generate.step import StepBatch, hidden_step
from fzero.kernels import rowwise
from fzero.kernels.registry import Kernels
from fzero.models import Model
from fzero.sharding import Plan

OnToken = Callable[[int, int, int, str], None]
OnStep = Callable[[int, int], None]


def lookup(ids: Sequence[int], count: int, longest: int = 3) -> Sequence[int]:
    """The ids that followed the last time that the last ids occurred, `count` at most: the last 3, else 2, else 1.

    >>> lookup([5, 6, 7, 8, 5, 6], 2)
    [7, 8]

    Ref: Saxena 2023, "Prompt lookup decoding".
    """
    ids = list(ids)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        suffix = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == suffix:
                return ids[start + size : start + size + count]
    return []


def device_of(params: Tree, options: GenerateOptions) -> torch.device:
    """The device of the computation."""
    device = next((x.device for x in pytree.leaves(params) if isinstance(x, Tensor)), torch.device("cpu"))
    return expect_device(options.device or device)


def page_specs(
    model: Model, params: Tree, plan: Plan, options: GenerateOptions, count: int
) -> tuple[PageSpec, PageSpec | None]:
    """The pages of a call, and those of its draft beside them."""
    dtype = CACHES[options.cache] or dtype_of(params)
    spec = page_spec(model, plan, count, page_tokens=options.page_tokens, dtype=dtype)
    return spec, options.draft and draft_spec(options.draft, spec, options.rows, options.guesses)


class Decoding:
    """The sequences of one call, and the pages they share."""

    def __init__(
        self,
        model: Model,
        params: Tree,
        plan: Plan,
        options: GenerateOptions,
        sequences: Sequence[SampleText],
        device: torch.device,
        cache: PrefixCache | None,
    ) -> None:
        self.params, self.plan, self.options, self.device = params, plan, options, device
        self.sequences, self.reused = dict(enumerate(sequences)), cache is not None
        self.vocab = text_sizes(model)[0]
        needed = sorted(pages_for(len(s.prompt.ids) + s.new_tokens, options.page_tokens) for s in sequences)
        count = cache.pages.spec.count if cache else options.pages or max(1, sum(needed[-options.rows :]))
        rows = min(options.rows, max(1, len(sequences)))
        self.limits = StepLimits(max(options.tokens, rows), rows, count, options.page_tokens)
        specs, self.root = page_specs(model, params, plan, options, count), b"" if options.prefixes else None
        if cache is None:
            cache = PrefixCache.zeros(*specs, device)
        else:
            expect_cache(cache, *specs, options.pages, device)
            if options.prefixes:
                self.root = root_of(model, params, plan, specs[0], options.kernels, device, options.draft)
        self.drafts: DraftPages | None = None
        if options.draft and cache.draft_pages:
            self.drafts = DraftPages(options.draft, cache.draft_pages, count, options.guesses, options.kernels)
        self.pages, self.state = cache.pages.donate(), empty_state(self.limits)._replace(pool=cache.pool)
        self.scores, self.verified, self.right = cache.scores, 0, 0
        self.hidden: Tensor | None = None  # the last activations of the last step
        self.step = hidden_step(model, plan, kernels=options.kernels, dtype=dtype_of(params))
        canonical = Kernels.parse(options.kernels).canonical
        self.log_sum_exp = functools.partial(rowwise.log_sum_exp, impl="canonical") if canonical else log_sum_exp

    def cache(self) -> PrefixCache:
        """The cache to go on with; what has not ended is given up."""
        if not self.reused:
            raise ValueError("this call was given no cache; give it cache=generate.prefix_cache(...)")
        pool = self.state.pool
        for sequence in self.state.running:
            pool = pool.release(sequence.pages)
        draft_pages = self.drafts.pages.donate() if self.drafts else None
        return PrefixCache(self.pages.donate(), pool, self.scores, draft_pages)

    def steps(self, on_token: OnToken, on_step: OnStep) -> Generator[Completion, None, None]:
        """The completions, as they end."""
        requests = tuple(
            Request(number, s.prompt.ids, s.new_tokens, self.root, s.prompt.log_probs)
            for number, s in self.sequences.items()
        )
        arrivals = Arrivals(requests)
        while True:
            self.state, batch = schedule(self.state, arrivals, self.limits)
            if not self.rows_remain(batch):
                return
            ended, draws = [], {}
            for number, tokens in self.advance(batch):
                sequence = self.sequences[number]
                for token, text in zip(tokens, sequence.texts[-len(tokens) :]):
                    on_token(sequence.prompt.number, sequence.sample, token, text)
                draws[number] = tokens
                if sequence.state.reason:
                    ended.append(number)
                    yield sequence.completion()
            on_step(sum(len(row.ids) for row in batch.rows), self.limits.pages - self.state.pool.available)
            arrivals = Arrivals((), draws, self.stopped_early(ended), self.guesses(batch, draws))

    def stopped_early(self, ended: Sequence[int]) -> list[int]:
        """Those that ended before they had all the tokens that were asked for; the scheduler knows the others."""
        return [n for n in ended if len(self.sequences[n].ids) < self.sequences[n].new_tokens]

    def guesses(self, batch: Batch, draws: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Ids that may follow on those drawn from a batch, by sequence."""
        options, counts = self.options, dict.fromkeys((row.number for row in batch.rows), 0)
        for number in draws if options.guesses else ():
            s = self.sequences[number]
            if not s.state.reason:
                counts[number] = min(options.guesses, s.new_tokens - len(s.ids) - 1)
        if self.drafts:
            rows = [(row, draws.get(row.number, ()), counts[row.number]) for row in batch.rows]
            drafted = [DraftRow(*row, self.sequences[row[0].number].draw_row) for row in rows]
            guesses = self.drafts.guess(drafted, self.hidden, options.vocab_size, self.device)
        else:
            pairs = [(number, count, self.sequences[number]) for number, count in counts.items() if count]
            guess = options.guess or lookup
            guesses = {n: tuple(guess([*s.prompt.ids, *s.ids], count))[:count] for n, count, s in pairs}
            for ids in guesses.values() if options.guess else ():
                expect_tokens("a guess", ids, self.vocab)
        allowed = {number: self.sequences[number].allowed(ids) for number, ids in guesses.items()}
        return {number: ids for number, ids in allowed.items() if ids}

    def rows_remain(self, batch: Batch) -> bool:
        """Whether a rank has rows to compute; all ranks make a step then."""
        mesh = self.plan.mesh
        if mesh.data_size == 1:
            return bool(batch.rows)
        (count,) = bring_together([torch.tensor([float(len(batch.rows))])], self.device)
        for axis in (mesh["dp"], mesh["rp"]):
            count = psum(count, axis, leaf="rows")
        return bool(read_scalars([count[0]])[0])

    def advance(self, batch: Batch) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Compute a batch, and draw: (sequence, its new tokens)."""
        size = self.limits.page_tokens
        for admission in batch.admitted:
            for i, page in enumerate(admission.scored_pages):
                lines = range(i == 0, size)  # nothing is before the first token
                scores = {i * size + line: self.scores[page * size + line] for line in lines}
                self.sequences[admission.number].scores |= scores
        rows = [(row.ids, row.start, row.pages) for row in batch.rows]
        padding = [] if rows else [([0], 0, [self.limits.pages])]
        step_batch = StepBatch.of_rows(
            rows or padding,
            [row.logit_count for row in batch.rows] or [0],
            page_tokens=size,
            device=self.device,
        )
        logits, self.hidden, self.pages = self.step(self.params, self.pages, step_batch, None)
        rows_logits = logits.split([row.logit_count for row in batch.rows]) if batch.rows else ()
        drawing: list[tuple[Row, Tensor]] = []
        for row, row_logits in zip(batch.rows, rows_logits):
            if row.prefill and row.logit_count == len(row.ids) and self.sequences[row.number].prompt.log_probs:
                self.store_scores(row, row_logits)
            if row.draws:
                drawing.append((row, row_logits[-1:] if row.prefill else row_logits))
        return self.draw_tokens(drawing)

    def store_scores(self, row: Row, logits: Tensor) -> None:
        """Store the log-probs of the prompt's tokens behind those of a row."""
        sequence = self.sequences[row.number]
        positions = range(row.start + 1, min(row.start + len(row.ids) + 1, len(sequence.prompt.ids)))
        if not positions:
            return
        tokens = torch.tensor([sequence.prompt.ids[i] for i in positions], device=logits.device)
        numbers = score(logits[: len(positions)], tokens, log_sum_exp=self.log_sum_exp)[0].tolist()
        for position, number in zip(positions, numbers):
            sequence.scores.setdefault(position, number)
        # All positions of a page are written before it is full, and found again. The number of the row's first token is
        # of the row before it, or, where the last cached page is computed again, was stored beside that page.
        for position in range(max(row.start, 1), positions.stop):
            page, line = divmod(position, self.limits.page_tokens)
            self.scores[row.pages[page] * self.limits.page_tokens + line] = sequence.scores[position]

    def draw_tokens(self, drawing: Sequence[tuple[Row, Tensor]]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Draw behind each row's last token, and behind its guesses as long as they are what is drawn."""
        draws = []
        for row, row_logits in drawing:
            guesses = row.ids[1:] if len(row_logits) > 1 else ()
            draws += [self.sequences[row.number].draw_row(guesses[:i]) for i in range(len(row_logits))]
        if not draws:
            return
        logits = torch.cat([row_logits for _, row_logits in drawing])
        out = draw_by_row(logits, draws, vocab_size=self.options.vocab_size, log_sum_exp=self.log_sum_exp)
        table, first = _table(out), 0
        for row, row_logits in drawing:
            sequence, tokens = self.sequences[row.number], []
            for i in range(len(row_logits)):
                token, numbers, alternatives = table[first + i]
                sequence.add(token, numbers, alternatives)
                tokens.append(token)
                if sequence.state.reason or (i + 1 < len(row_logits) and token != row.ids[i + 1]):
                    break
            first += len(row_logits)
            if not row.prefill:
                self.verified += len(row_logits) - 1
                self.right += sum(token == guess for token, guess in zip(tokens, row.ids[1:]))
            yield row.number, tuple(tokens)


def _table(out: TokenDraws) -> list[tuple[int, tuple[float, float, float], tuple[tuple[int, float], ...]]]:
    """(token, numbers, alternatives) of each draw, in the host's memory."""
    # By one copy and one wait.
    leaving = [out.tokens, out.log_probs, out.drawn_log_probs, out.mass, *(out.alternatives or ())]
    tokens, *numbers = (x.tolist() for x in start_fetch(leaving).wait())
    pairs = [tuple(zip(*row)) for row in zip(*numbers[3:])] or [()] * len(tokens)
    return list(zip(tokens, zip(*numbers[:3]), pairs))
