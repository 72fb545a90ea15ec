"""Completions of prompts: the scheduler, the step and the draws, until every sequence has ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.core import pytree
from fzero.core.arguments import checked, expect_device, expect_fields
from fzero.core.config_tables import AtLeastOne, Count, check_choice
from fzero.core.copy_buckets import bring_together, read_scalars, start_fetch
from fzero.core.pytree import Tree
from fzero.generate.drafts import Draft, DraftPages, DraftRow, draft_spec, expect_draft
from fzero.generate.draws import Drawn, draw_by_row, log_sum_exp, score
from fzero.generate.grammar import Grammar, GrammarState, GrammarTokens, advance, grammar_mask, start_grammar
from fzero.generate.pages import CACHES, PAGE_TOKENS, PageSpec, dtype_of, page_spec, pages_for, text_sizes
from fzero.generate.prefixes import PrefixCache, expect_cache, root_of
from fzero.generate.requests import Arrivals, Batch, Request, Row, StepLimits
from fzero.generate.rows import DrawRow
from fzero.generate.sampling import Sampling, expect_vocabulary
from fzero.generate.scheduler import empty_state, schedule
from fzero.generate.step import StepBatch, expect_generates, hidden_step
from fzero.generate.stops import StopRules, StopState, feed, start_text, stop_rules
from fzero.kernels import rowwise
from fzero.kernels.registry import Kernels
from fzero.models import Model
from fzero.sharding import Plan, one_process, zero_plan

Guess = Callable[[Sequence[int], int], Sequence[int]]
Decode = Callable[[Sequence[int]], str]
OnToken = Callable[[int, int, int, str], None]
OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, how its tokens are drawn, and what is wanted beside them.

    >>> Prompt((1, 2), Sampling(0.0, max_tokens=3)).number
    0
    """

    ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    number: Count = 0  # of its draws' keys: the same number, seed and ids give the same tokens in any batch
    log_probs: bool = False  # whether those of its own tokens are wanted
    grammar: Grammar | None = None  # what its text must be; with GenerateOptions(grammar_tokens=...)
    skip: frozenset[int] = frozenset()  # the samples that are not made, as they are there already

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))


@dataclass(frozen=True)
class GenerateOptions:
    """What all prompts of a call share.

    >>> GenerateOptions(rows=4).page_tokens
    16
    """

    rows: AtLeastOne = 32  # sequences that run at a time
    tokens: AtLeastOne = 512  # of a step: those that draw, and chunks of prompts
    pages: AtLeastOne | None = None  # None: as many as the longest `rows` sequences need
    page_tokens: AtLeastOne = PAGE_TOKENS
    prefixes: bool = True  # whether prompts that begin alike share pages
    kernels: str = "auto"  # the form of each operation; "canonical": log-probs are the bits of training's
    cache: str = "auto"  # what keys and values are in: "int8" and "fp8" (e4m3) with a scale for each position and head
    vocab_size: AtLeastOne | None = None  # only ids below are drawn
    ends: tuple[int, ...] = ()  # the ids that end a text
    decode: Decode | None = None  # the text of ids, of the tokenizer: for stop texts, and the text of a completion
    grammar_tokens: GrammarTokens | None = None  # of the tokenizer, for prompts with a grammar
    guesses: Count = 0  # tokens of a sequence that one step may verify, see `lookup`
    guess: Guess | None = None  # (ids so far, most) -> ids that may follow; None: `lookup`
    draft: Draft | None = None  # a smaller model that guesses them
    device: str | None = None  # of the computation; None: that of the parameters, or cpu if none is in memory

    def __post_init__(self) -> None:
        expect_fields(self)
        check_choice("cache", self.cache, CACHES)
        if self.cache != "auto":
            Kernels.parse(self.kernels).refuse(f"a cache in {self.cache}")
        if self.draft is not None and self.guess is not None:
            raise ValueError("GenerateOptions: guess and draft are there; give one of them")
        if self.draft is not None and not self.guesses:
            raise ValueError(
                "GenerateOptions: guesses is 0, and draft guesses; give the tokens that a step verifies, as 4"
            )


class Completion(NamedTuple):
    """What was drawn after a prompt.

    log_probs are of the model's whole distribution at temperature 1; drawn_log_probs of the one that was drawn from,
    behind penalties, temperature and limits; mass is what top_k, top_p and min_p left of it. All are natural
    logarithms, one for each drawn token. alternatives: the likeliest (id, log-prob) of each. prompt_log_probs: of the
    prompt's tokens but its first, if asked for.

    >>> Completion(0, 0, (7, 2), "a text", "stop id", (-1.5, -0.5), (-1.0, -0.25), (1.0, 0.9)).finish
    'stop id'
    """

    number: int  # of the prompt
    sample: int
    ids: tuple[int, ...]  # the one that ended the text too
    text: str  # without what ended it; "" without `decode`
    finish: str  # why it ended: "stop id", "stop text" or "length"
    log_probs: tuple[float, ...]
    drawn_log_probs: tuple[float, ...]
    mass: tuple[float, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_log_probs: tuple[float, ...] = ()


@dataclass
class _Sequence:
    """A sample of a prompt while it is made."""

    prompt: Prompt
    sample: int
    new_tokens: int
    rules: StopRules
    state: StopState
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    columns: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)  # of the prompt's tokens, by position
    grammar: GrammarState | None = None

    def draw_row(self, guessed: Sequence[int]) -> DrawRow:
        """The draw of the token behind the drawn ones and these guesses."""
        drawn = (*self.ids, *guessed)
        position = len(self.prompt.ids) + len(drawn)
        numbers = position, self.prompt.number, self.sample
        mask = None if self.grammar is None else grammar_mask(self.grammar)
        return DrawRow(self.prompt.sampling, *numbers, self.prompt.ids, drawn, tuple(self.rules.ids), mask)

    def add(self, token: int, numbers: Sequence[float], alternatives: tuple[tuple[int, float], ...]) -> None:
        """One more token."""
        self.ids.append(token)
        for column, number in zip(self.columns, numbers):
            column.append(number)
        if self.prompt.sampling.alternatives:
            self.alternatives.append(alternatives[: self.prompt.sampling.alternatives])
        self.state, text, _ = feed(self.rules, self.state, [token])
        self.texts.append(text)
        if self.grammar is not None and not self.state.reason:
            self.grammar = advance(self.grammar, token)

    def completion(self) -> Completion:
        """The value of an ended sequence."""
        log_probs, drawn_log_probs, mass = map(tuple, self.columns)
        scores = tuple(self.scores[i] for i in range(1, len(self.prompt.ids))) if self.prompt.log_probs else ()
        return Completion(
            number=self.prompt.number,
            sample=self.sample,
            ids=tuple(self.ids),
            text="".join(self.texts),
            finish=self.state.reason,
            log_probs=log_probs,
            drawn_log_probs=drawn_log_probs,
            mass=mass,
            alternatives=tuple(self.alternatives),
            prompt_log_probs=scores,
        )


def lookup(ids: Sequence[int], most: int, longest: int = 3) -> Sequence[int]:
    """The ids that followed the last time that the last ids occurred, `most` at most: the last 3, else 2, else 1.

    >>> lookup([5, 6, 7, 8, 5, 6], 2)
    [7, 8]

    Ref: Saxena 2023, "Prompt lookup decoding".
    """
    ids = list(ids)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        suffix = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == suffix:
                return ids[start + size : start + size + most]
    return []


@checked("params")
def completions(
    model: Model,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    plan: Plan | None = None,
    options: GenerateOptions = GenerateOptions(),
    cache: PrefixCache | None = None,
    on_token: OnToken = lambda number, sample, token, text: None,
    on_step: OnStep = lambda tokens, pages: None,
) -> Completions:
    """Return an iterator over the Completion of each sample of each prompt, as soon as it has ended.

    What is drawn depends on a prompt's ids, sampling and number alone, not on what runs beside it; with
    kernels="canonical" to the last bit. No expert drops a token, whatever capacity it was trained with.
    plan: of `params`; None: they are whole here. On a mesh all ranks call it with the same prompts; those of dp and rp
    share them out, and each yields its own. cache: the pages
    to use, of `prefix_cache` or an earlier call, which are spent; the iterator's `cache` has those to go on with.
    on_token: called with (number, sample, token, text that is certain now) as
    tokens are drawn; on_step with (tokens that it computed, pages in use) behind each step.

    Raises ValueError for a prompt that is empty, has an id outside of the vocabulary, does not fit the model's max_len
    or the pages, two prompts of one number, a cache of other pages or that another call was given, a draft that cannot
    guess, and as `make_step`.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> prompt = generate.Prompt((1, 2, 3), generate.Sampling(0.0, max_tokens=4))
    >>> [len(completion.ids) for completion in generate.completions(model, params, [prompt])]
    [4]
    """
    plan = plan or zero_plan(0, model, one_process())
    device = _device_of(params, options)
    expect_generates(model, plan)
    mesh = plan.mesh
    sequences = sequences_of(model, prompts, options)
    if options.draft:
        longest = max((len(s.prompt.ids) + s.new_tokens for s in sequences), default=0)
        expect_draft(options.draft, model, plan, options.vocab_size, longest)
    sequences = sequences[mesh.data_rank :: mesh.data_size]
    made = _Sequences(model, params, plan, options, sequences, device, cache)
    return Completions(made.steps(on_token, on_step), made.cache, lambda: (made.verified, made.right))


class Completions(Iterator[Completion]):
    """The completions of a call of `completions`, as they end.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> out = generate.completions(model, params, [generate.Prompt((1, 2, 3), generate.Sampling(max_tokens=4))])
    >>> len(next(out).ids), list(out)
    (4, [])
    """

    def __init__(
        self,
        steps: Generator[Completion, None, None],
        cache: Callable[[], PrefixCache],
        guesses: Callable[[], tuple[int, int]],
    ) -> None:
        self._steps, self._cache, self._guesses = steps, cache, guesses

    def __next__(self) -> Completion:
        return next(self._steps)

    def close(self) -> None:
        """End them: those that have not ended are given up."""
        self._steps.close()

    @property
    def guesses(self) -> tuple[int, int]:
        """How many guesses steps have verified, and how many of these were what was drawn."""
        return self._guesses()

    @property
    def cache(self) -> PrefixCache:
        """The cache that the call was given, with what it computed; ends the completions. Raises ValueError if it was
        given none."""
        self.close()
        return self._cache()


@checked("params")
def prefix_cache(
    model: Model, params: Tree, count: int, *, plan: Plan | None = None, options: GenerateOptions = GenerateOptions()
) -> PrefixCache:
    """Return `count` empty pages for calls of `completions` with these arguments, which leave there what they compute.

    Prompts of a later call that begin alike take keys and values from there; their log-probs are those without, with
    kernels="canonical" to the last bit. After other weights, adapters or kernels nothing is found. Least recently used
    pages go first. Raises ValueError for a count below 1.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params, computed = models.init_params(model, random.key(0)), []
    >>> cache = generate.prefix_cache(model, params, 100)
    >>> calls = {"on_step": lambda tokens, pages: computed.append(tokens)}
    >>> for _ in range(2):
    ...     prompt = generate.Prompt((1, 2) * 20, generate.Sampling(max_tokens=1))
    ...     out = generate.completions(model, params, [prompt], cache=cache, **calls)
    ...     texts, cache = list(out), out.cache
    >>> computed  # of 40 tokens, 32 fill two pages
    [40, 8]

    Ref: Zheng et al. 2023, "SGLang", arXiv:2312.07104, section 3.
    """
    spec = _spec_of(model, params, plan or zero_plan(0, model, one_process()), options, count)
    return PrefixCache.zeros(spec, _draft_spec_of(spec, options), _device_of(params, options))


def _device_of(params: Tree, options: GenerateOptions) -> torch.device:
    """The device of the computation."""
    device = next((x.device for x in pytree.leaves(params) if isinstance(x, Tensor)), torch.device("cpu"))
    return expect_device(options.device or device)


def _spec_of(model: Model, params: Tree, plan: Plan, options: GenerateOptions, count: int) -> PageSpec:
    """The pages of a call."""
    dtype = CACHES[options.cache] or dtype_of(params)
    return page_spec(model, plan, count, page_tokens=options.page_tokens, dtype=dtype)


def _draft_spec_of(spec: PageSpec, options: GenerateOptions) -> PageSpec | None:
    """The pages of a draft beside those of a call."""
    return options.draft and draft_spec(options.draft, spec, options.rows, options.guesses)


def sequences_of(model: Model, prompts: Sequence[Prompt], options: GenerateOptions) -> list[_Sequence]:
    """The samples of all prompts; raises ValueError for a prompt that cannot be continued."""
    vocab, max_len = text_sizes(model)
    vocab = min(options.vocab_size or vocab, vocab)
    numbers = [prompt.number for prompt in prompts]
    if len({*numbers}) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"two prompts have the number {twice}, which their draws depend on; number them, 0, 1, ...")
    sequences = []
    for prompt in prompts:
        length, asked = len(prompt.ids), prompt.sampling.max_tokens
        if not length:
            raise ValueError(f"prompt {prompt.number} has no tokens; give at least one")
        wrong = [token for token in prompt.ids if type(token) is not int or not 0 <= token < vocab]
        if wrong:
            raise ValueError(
                f"prompt {prompt.number} has the token {wrong[0]!r}; the model has the ids 0 to {vocab - 1}"
            )
        remaining = max_len - length
        if remaining < (asked or 1):
            fix = f"ask for at most {remaining}, or shorten it" if remaining > 0 else "shorten it"
            raise ValueError(
                f"prompt {prompt.number}: {length} tokens and {asked or 1} more do not fit max_len={max_len}; {fix}"
            )
        expect_vocabulary(prompt.sampling, vocab)
        if prompt.sampling.stop and options.decode is None:
            raise ValueError(
                f"prompt {prompt.number} has stop texts, and nothing says what the text of ids is; give "
                "GenerateOptions(decode=tokenizer.decode)"
            )
        if prompt.grammar is not None and options.grammar_tokens is None:
            raise ValueError(
                f"prompt {prompt.number} has a grammar, and nothing says what its tokens are; give "
                "GenerateOptions(grammar_tokens=generate.grammar_tokens(tokenizer))"
            )
        rules = stop_rules(prompt.sampling, options.decode or (lambda ids: ""), eos=options.ends, longest=remaining)
        if prompt.grammar is not None and options.grammar_tokens is not None:  # behind a whole text nothing else comes
            rules = rules._replace(ids=rules.ids | {*options.grammar_tokens.ends})
        state = start_text(rules, prompt.ids)
        samples, new_tokens = {*range(prompt.sampling.n)} - prompt.skip, remaining if asked is None else asked
        tokens = options.grammar_tokens
        grammar = start_grammar(prompt.grammar, tokens) if prompt.grammar and tokens else None
        sequences += [_Sequence(prompt, i, new_tokens, rules, state, grammar=grammar) for i in sorted(samples)]
    return sequences


class _Sequences:
    """The sequences of one call, and the pages they share."""

    def __init__(
        self,
        model: Model,
        params: Tree,
        plan: Plan,
        options: GenerateOptions,
        sequences: Sequence[_Sequence],
        device: torch.device,
        cache: PrefixCache | None,
    ) -> None:
        self.params, self.plan, self.options, self.device = params, plan, options, device
        self.sequences, self.reused = dict(enumerate(sequences)), cache is not None
        needed = sorted(pages_for(len(s.prompt.ids) + s.new_tokens, options.page_tokens) for s in sequences)
        count = cache.pages.spec.count if cache else options.pages or max(1, sum(needed[-options.rows :]))
        rows = min(options.rows, max(1, len(sequences)))
        self.limits = StepLimits(max(options.tokens, rows), rows, count, options.page_tokens)
        spec, self.root = _spec_of(model, params, plan, options, count), b"" if options.prefixes else None
        spec_of_draft = _draft_spec_of(spec, options)
        if cache is None:
            cache = PrefixCache.zeros(spec, spec_of_draft, device)
        else:
            expect_cache(cache, spec, spec_of_draft, options.pages, device)
            if options.prefixes:
                self.root = root_of(model, params, plan, spec, options.kernels, device, options.draft)
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
            if not self.any_rows(batch):
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
        options, most = self.options, dict.fromkeys((row.number for row in batch.rows), 0)
        for number in draws if options.guesses else ():
            s = self.sequences[number]
            # The mask of a token behind a guess would need the grammar's state there.
            if not s.state.reason and s.grammar is None:
                most[number] = min(options.guesses, s.new_tokens - len(s.ids) - 1)
        if self.drafts:
            rows = [(row, draws.get(row.number, ()), most[row.number]) for row in batch.rows]
            drafted = [DraftRow(*row, self.sequences[row[0].number].draw_row) for row in rows]
            return self.drafts.guess(drafted, self.hidden, options.vocab_size, self.device)
        pairs = [(number, count, self.sequences[number]) for number, count in most.items() if count]
        guess = options.guess or lookup
        guesses = {n: tuple(guess([*s.prompt.ids, *s.ids], count))[:count] for n, count, s in pairs}
        return {number: ids for number, ids in guesses.items() if ids}

    def any_rows(self, batch: Batch) -> bool:
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
            [row.wanted for row in batch.rows] or [0],
            page_tokens=size,
            device=self.device,
        )
        logits, self.hidden, self.pages = self.step(self.params, self.pages, step_batch, None)
        parts = logits.split([row.wanted for row in batch.rows]) if batch.rows else ()
        drawing: list[tuple[Row, Tensor]] = []
        for row, part in zip(batch.rows, parts):
            if row.prefill and row.wanted == len(row.ids) and self.sequences[row.number].prompt.log_probs:
                self.keep_scores(row, part)
            if row.draws:
                drawing.append((row, part[-1:] if row.prefill else part))
        return self.drawn(drawing)

    def keep_scores(self, row: Row, logits: Tensor) -> None:
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

    def drawn(self, drawing: Sequence[tuple[Row, Tensor]]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Draw behind each row's last token, and behind its guesses as long as they are what is drawn."""
        draws = []
        for row, part in drawing:
            guesses = row.ids[1:] if len(part) > 1 else ()
            draws += [self.sequences[row.number].draw_row(guesses[:i]) for i in range(len(part))]
        if not draws:
            return
        logits = torch.cat([part for _, part in drawing])
        out = draw_by_row(logits, draws, vocab_size=self.options.vocab_size, log_sum_exp=self.log_sum_exp)
        table, first = _table(out), 0
        for row, part in drawing:
            sequence, tokens = self.sequences[row.number], []
            for i in range(len(part)):
                token, numbers, alternatives = table[first + i]
                sequence.add(token, numbers, alternatives)
                tokens.append(token)
                if sequence.state.reason or (i + 1 < len(part) and token != row.ids[i + 1]):
                    break
            first += len(part)
            if not row.prefill:
                self.verified += len(part) - 1
                self.right += sum(token == guess for token, guess in zip(tokens, row.ids[1:]))
            yield row.number, tuple(tokens)


def _table(out: Drawn) -> list[tuple[int, tuple[float, float, float], tuple[tuple[int, float], ...]]]:
    """(token, numbers, alternatives) of each draw, in the host's memory."""
    # By one copy and one wait.
    leaving = [out.tokens, out.log_probs, out.drawn_log_probs, out.mass, *(out.alternatives or ())]
    tokens, *numbers = (x.tolist() for x in start_fetch(leaving).wait())
    pairs = [tuple(zip(*row)) for row in zip(*numbers[3:])] or [()] * len(tokens)
    return list(zip(tokens, zip(*numbers[:3]), pairs))
