"""Which tokens of which sequences the next step computes: a pure function (state, arrivals, limits) -> (state, batch).

Each sequence that draws gets its token first; what remains of the budget goes to chunks of prompts, in the order of
arrival. So a step has about the same size whether prompts are long or short, and no prompt stops those that draw.

- **Admission**: a sequence starts if the pages of its prompt and of one more token are available, beside a page for
  each running sequence that may need another. It has the pages of its prompt from then on.
- **Preemption**: if sequences that draw need more pages than are available, the last arrival gives its pages up, and
  waits again: its prompt is then what it had, the tokens drawn included. The first is never preempted and fits alone
  (`expect_fits`), so that every sequence ends.
- **Prefixes**: pages of a prompt that are cached are used again; the last token of a prompt is always computed. A
  sequence whose next page an earlier one is about to compute waits for it, and others may go ahead of it.
- **Log-probs of a prompt** are stored by the engine beside their page, those of its own tokens (of the first by the
  logits of the page before it). A sequence that wants them takes pages alone that have them; as its next token's need
  the logits of the last cached position, it computes the last cached page again, in a page of its own, beside which the
  first token's number is stored as `Admission.scored_pages` has it.

No clock, no randomness, no torch: the same arrivals give the same batches.

Ref: Holmes et al. 2024, "DeepSpeed-FastGen", arXiv:2401.08671, section 4 (Dynamic SplitFuse); Agrawal et al. 2024,
"Sarathi-Serve", arXiv:2403.02310, section 4; Kwon et al. 2023, arXiv:2309.06180, section 4.5 (recomputation).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from fzero.core.arguments import checked
from fzero.core.text_parsing import short
from fzero.generate.page_pool import GROUP_BITS, Ids, PagePool, PersistentMap, Prefix, empty_pool, hash_ids
from fzero.generate.requests import Admission, Arrivals, Batch, Request, Row, StepLimits, expect_fits, expect_ids


class SequenceState(NamedTuple):
    """A sequence that waits or runs. All its ids are those of `prefixes`, then `tail`, once it was looked at."""

    request: Request
    prompt: Ids  # what is computed before the next token is drawn: of a preempted one, the tokens drawn as well
    output_count: int = 0  # new tokens
    prefixes: tuple[Prefix, ...] = ()  # of its full pages
    tail: Ids = ()
    pages: Ids = ()
    computed: int = 0  # positions whose keys and values are in its pages

    @property
    def scoring(self) -> bool:
        """Whether the log-probs of its prompt are wanted still."""
        return self.request.scores and not self.output_count


class SchedulerState(NamedTuple):
    """Everything that the next step depends on."""

    pool: PagePool
    waiting: PersistentMap[SequenceState]  # by number
    running: tuple[SequenceState, ...] = ()  # in the order of their numbers
    rows: tuple[Row, ...] = ()  # of the last batch
    last: int = -1  # the highest number that arrived


def _number(sequence: SequenceState) -> int:
    """The key of the order of arrival."""
    return sequence.request.number


@checked()
def empty_state(limits: StepLimits, hash_ids: Callable[[int, Ids], int] = hash_ids) -> SchedulerState:
    """The state before anything arrived. hash_ids: from the key of a page and the tokens of the next, its key, in [0,
    2^64)."""
    return SchedulerState(empty_pool(limits.pages, limits.page_tokens, hash_ids), PersistentMap(GROUP_BITS))


@checked()
def schedule(state: SchedulerState, arrivals: Arrivals, limits: StepLimits) -> tuple[SchedulerState, Batch]:
    """The state after what happened, and the next step's batch.

    Raises ValueError for limits of another pool, a request whose number does not rise or that can never fit, a row of
    the last batch without its draw, and draws, guesses or ends of sequences that are not there.

    >>> limits = StepLimits(tokens=4, rows=2, pages=8, page_tokens=4)
    >>> state, batch = schedule(empty_state(limits), Arrivals((Request(0, (7, 8, 9, 7, 8), 2, b"model"),)), limits)
    >>> batch.rows
    (Row(number=0, start=0, ids=(7, 8, 9, 7), pages=(0, 1), logit_count=0, draws=False, prefill=True),)
    >>> state, batch = schedule(state, Arrivals(), limits)
    >>> batch.rows
    (Row(number=0, start=4, ids=(8,), pages=(0, 1), logit_count=1, draws=True, prefill=True),)
    >>> state, batch = schedule(state, Arrivals(draws={0: (9,)}), limits)
    >>> batch.rows
    (Row(number=0, start=5, ids=(9,), pages=(0, 1), logit_count=1, draws=True, prefill=False),)
    >>> state, batch = schedule(state, Arrivals(draws={0: (7,)}), limits)
    >>> batch.rows, state.pool.available
    ((), 8)
    """
    _expect_arrivals(state, arrivals, limits)
    ended = {*arrivals.ended}
    pool, running, finished = _after_step(state, arrivals.draws, ended)
    pool, decoding, preempted = _pages_to_draw(pool, running, limits)
    arrived = [SequenceState(request, request.ids) for request in arrivals.requests]
    waiting = state.waiting.edited({_number(s): s for s in (*arrived, *preempted)})
    waiting = waiting.edited(dict.fromkeys(ended))
    rows = [_decode_row(sequence) for sequence in decoding]
    budget = limits.tokens - len(rows)
    prefilling = [sequence for sequence in running if sequence.computed < len(sequence.prompt)]
    chunks = []
    for sequence in prefilling[: limits.rows - len(rows)]:
        if budget:
            chunks.append(_prefill_row(sequence, budget))
            budget -= len(chunks[-1].ids)
    pool, waiting, admitted, budget = _admit(pool, running, waiting, chunks, limits.rows, budget)
    if arrivals.guesses and budget:
        pool = _add_guesses(pool, running, rows, arrivals.guesses, budget)
    batch = Batch((*rows, *chunks), tuple(admitted), tuple(map(_number, preempted)), tuple(finished))
    last = arrivals.requests[-1].number if arrivals.requests else state.last
    return SchedulerState(pool, waiting, tuple(running), batch.rows, last), batch


def _expect_arrivals(state: SchedulerState, arrivals: Arrivals, limits: StepLimits) -> None:
    """Raise ValueError for arrivals that do not follow on the state."""
    pool, last = state.pool, state.last
    if (limits.pages, limits.page_tokens) != (pool.size, pool.page_tokens):
        text = f"{limits.pages} pages of {limits.page_tokens} tokens; the state has {pool.size} of {pool.page_tokens}"
        raise ValueError(f"schedule: the limits have {text}: give those of empty_state")
    for request in arrivals.requests:
        if request.number <= last:
            raise ValueError(
                f"request {request.number} arrives after {last}; numbers must rise, as nothing else orders"
            )
        last = request.number
        expect_fits(request, limits)
    expect_ids("schedule: draws", [*chain.from_iterable(arrivals.draws.values())])
    expect_ids("schedule: guesses", [*chain.from_iterable(arrivals.guesses.values())])
    drawing = {row.number for row in state.rows if row.draws}
    if wrong := arrivals.draws.keys() - drawing:
        raise ValueError(f"schedule: draws has sequence {min(wrong)}, which was to draw nothing in the last batch")
    if empty := [number for number, tokens in arrivals.draws.items() if not tokens]:
        raise ValueError(
            f"schedule: the draws of sequence {min(empty)} are empty; give at least 1 token, or leave it out"
        )
    if missing := drawing - arrivals.draws.keys() - {*arrivals.ended}:
        raise ValueError(f"schedule: draws has no token of sequence {min(missing)}, which was to draw one; give it")
    if arrivals.ended or arrivals.guesses:
        numbers = {*map(_number, state.running)}
        if wrong := arrivals.guesses.keys() - numbers:
            raise ValueError(f"schedule: guesses has sequence {min(wrong)}, which does not run")
        numbers |= {request.number for request in arrivals.requests}
        if wrong := {number for number in {*arrivals.ended} - numbers if state.waiting.get(number) is None}:
            raise ValueError(f"schedule: ended has sequence {min(wrong)}, which neither waits nor runs")


def _after_step(
    state: SchedulerState, draws: Mapping[int, Ids], ended: Collection[int]
) -> tuple[PagePool, list[SequenceState], list[int]]:
    """The pool and the sequences that run on, after the last batch was computed, and those that are complete."""
    pool, rows = state.pool, {row.number: row for row in state.rows}
    full: list[tuple[int, Prefix, bool]] = []  # pages that became full
    running, complete, tables = [], [], []
    for sequence in state.running:
        number = _number(sequence)
        if number in rows:
            sequence = _advance(pool, sequence, rows[number], draws.get(number, ()), full)
        if number in ended:
            tables.append(sequence.pages)
        elif sequence.output_count == sequence.request.new_tokens and sequence.computed >= len(sequence.prompt):
            tables.append(sequence.pages)
            complete.append(number)
        else:
            running.append(sequence)
    if full:
        pool = pool.register(full)
    for table in tables:
        pool = pool.release(table)
    return pool, running, complete


def _advance(
    pool: PagePool, sequence: SequenceState, row: Row, tokens: Ids, full: list[tuple[int, Prefix, bool]]
) -> SequenceState:
    """The sequence after its row was computed and its tokens were drawn; pages that became full are added to `full`."""
    request, prompt, output_count, prefixes, tail, pages, computed = sequence
    if len(tokens) > 1:
        _expect_draws(sequence, row, tokens)
    tail += tokens
    computed = row.start + (len(row.ids) if row.prefill else len(tokens) or 1)
    count, size = computed // pool.page_tokens, pool.page_tokens
    if len(prefixes) < count:
        ids = tail[: (count - len(prefixes)) * size]
        prefixes += pool.chain(prefixes[-1] if prefixes else pool.root_prefix(request.root or b""), ids)
        tail = tail[len(ids) :]
    if request.root is not None:
        scored = row.prefill and sequence.scoring
        full += [(pages[i], prefixes[i], scored) for i in range(row.start // size, count)]
    return SequenceState(request, prompt, output_count + len(tokens), prefixes, tail, pages, computed)


def _expect_draws(sequence: SequenceState, row: Row, tokens: Ids) -> None:
    """Raise ValueError for tokens that cannot be those of a row."""
    guesses = () if row.prefill else row.ids[1:]
    if len(tokens) > 1 + len(guesses) or tokens[:-1] != guesses[: len(tokens) - 1]:
        text = f"{short(tokens)}; the row allows the first of its guesses {short(guesses)}, and one more"
        raise ValueError(f"schedule: the draws of sequence {row.number} are {text}")
    assert sequence.output_count + len(tokens) <= sequence.request.new_tokens


def _pages_to_draw(
    pool: PagePool, running: list[SequenceState], limits: StepLimits
) -> tuple[PagePool, list[SequenceState], list[SequenceState]]:
    """The pool, the sequences that draw, each with a page for its token, and those that were preempted for it, as they
    wait: the last arrivals, which leave `running`."""
    preempted = []
    indices = [i for i, sequence in enumerate(running) if sequence.computed >= len(sequence.prompt)][: limits.rows]
    full = [i for i in indices if running[i].computed == len(running[i].pages) * pool.page_tokens]
    while len(full) > pool.available:
        victim = running.pop()
        pool = pool.release(victim.pages)
        preempted.append(_restarted(victim))
        indices, full = ([i for i in numbers if i < len(running)] for numbers in (indices, full))
    if full:
        pages, pool = pool.allocate(len(full))
        for i, page in zip(full, pages):
            running[i] = running[i]._replace(pages=(*running[i].pages, page))
    return pool, [running[i] for i in indices], preempted


def _restarted(sequence: SequenceState) -> SequenceState:
    """A preempted sequence as it waits: with all that it had as its prompt."""
    ids = (*chain.from_iterable(prefix.ids for prefix in sequence.prefixes), *sequence.tail)
    return sequence._replace(prompt=ids, pages=(), computed=0)


def _decode_row(sequence: SequenceState) -> Row:
    """The row of the token that was drawn last."""
    return Row(_number(sequence), sequence.computed, sequence.tail[-1:], sequence.pages, 1, True, False)


def _prefill_row(sequence: SequenceState, budget: int) -> Row:
    """The row of the next tokens of a prompt, `budget` at most."""
    start = sequence.computed
    ids = sequence.prompt[start : start + budget]
    draws = start + len(ids) == len(sequence.prompt) and sequence.request.new_tokens > 0
    logit_count = len(ids) if sequence.scoring else int(draws)
    return Row(_number(sequence), start, ids, sequence.pages, logit_count, draws, True)


def _pages_of(tokens: int, pool: PagePool) -> int:
    """The pages of so many tokens."""
    return -(-tokens // pool.page_tokens)


def _may_grow(pool: PagePool, sequence: SequenceState) -> bool:
    """Whether a sequence may need another page."""
    return len(sequence.pages) * pool.page_tokens < sequence.request.max_positions


def _spare(pool: PagePool, running: Iterable[SequenceState]) -> int:
    """The available pages, less one for each sequence that may need another."""
    return pool.available - sum(_may_grow(pool, sequence) for sequence in running)


def _admit(
    pool: PagePool,
    running: list[SequenceState],
    waiting: PersistentMap[SequenceState],
    chunks: list[Row],
    max_rows: int,
    budget: int,
) -> tuple[PagePool, PersistentMap[SequenceState], list[Admission], int]:
    """The pool, what waits on, the sequences that start, and the budget that remains. Changes both lists."""
    admitted, changes = [], dict[int, SequenceState | None]()
    delayed: list[SequenceState] = []  # which have a row each as well
    prefilling = [sequence for sequence in running if sequence.computed < len(sequence.prompt)]
    for sequence in waiting.values() if budget and len(running) < max_rows else ():
        if not budget or len(running) + len(delayed) >= max_rows:
            break
        if delayed and _is_alike(sequence, delayed[-1]):
            delayed.append(sequence._replace(prefixes=delayed[-1].prefixes, tail=delayed[-1].tail))
            changes[_number(sequence)] = delayed[-1]
            continue
        sequence = changes[_number(sequence)] = _chained(pool, sequence)
        matched = () if sequence.request.root is None else pool.match(sequence.prefixes, sequence.scoring)
        if _is_computed_soon(pool, sequence, len(matched), prefilling):
            delayed.append(sequence)
            continue
        # The logits of the last cached page's last token are of the next token's log-prob.
        shared = matched[:-1] if sequence.scoring else matched[: _usable_pages(pool, sequence)]
        tokens = min(len(sequence.prompt) + 1, sequence.request.max_positions)
        new_pages = _pages_of(tokens, pool) - len(shared)
        if new_pages > _spare(pool, running) - pool.idle_count(shared):
            break
        pages, pool = pool.share(shared).allocate(new_pages)
        computed = len(shared) * pool.page_tokens
        sequence = sequence._replace(pages=shared + pages, computed=computed)
        admitted.append(Admission(_number(sequence), computed, matched if sequence.scoring else ()))
        chunks.append(_prefill_row(sequence, budget))
        budget -= len(chunks[-1].ids)
        prefilling.append(sequence)
        insort(running, sequence, key=_number)
        changes[_number(sequence)] = None
    return pool, waiting.edited(changes), admitted, budget


def _chained(pool: PagePool, sequence: SequenceState) -> SequenceState:
    """A sequence that waits, with the prefixes of all full pages of its prompt: they are hashed once."""
    prompt, prefixes, size = sequence.prompt, sequence.prefixes, pool.page_tokens
    if len(prefixes) == len(prompt) // size:
        return sequence if prefixes else sequence._replace(tail=prompt)
    parent = prefixes[-1] if prefixes else pool.root_prefix(sequence.request.root or b"")
    prefixes += pool.chain(parent, prompt[len(prefixes) * size :])
    return sequence._replace(prefixes=prefixes, tail=prompt[len(prefixes) * size :])


def _usable_pages(pool: PagePool, sequence: SequenceState) -> int:
    """The pages of a prompt that may be used again: its last token is computed, but for log-probs with its page."""
    return (len(sequence.prompt) - (not sequence.scoring)) // pool.page_tokens


def _is_alike(a: SequenceState, b: SequenceState) -> bool:
    """Whether two sequences that wait use the same pages."""
    return (a.request.root, a.scoring, a.prompt) == (b.request.root, b.scoring, b.prompt)


def _is_computed_soon(
    pool: PagePool, sequence: SequenceState, matched: int, prefilling: Iterable[SequenceState]
) -> bool:
    """Whether a running sequence is about to compute the first page of this one that is not cached."""
    if sequence.request.root is None or matched >= _usable_pages(pool, sequence):
        return False
    return any(
        leader.request.root is not None
        and leader.computed < (matched + 1) * pool.page_tokens
        and (leader.scoring or not sequence.scoring)
        and matched < len(leader.prefixes)
        and leader.prefixes[matched] == sequence.prefixes[matched]
        for leader in prefilling
    )


def _add_guesses(
    pool: PagePool, running: list[SequenceState], rows: list[Row], guesses: Mapping[int, Ids], budget: int
) -> PagePool:
    """The pool after rows that draw were extended by guesses, in their order. Changes both lists."""
    indices = {_number(sequence): i for i, sequence in enumerate(running)}
    spare = _spare(pool, running)
    for i, row in enumerate(rows):
        if not guesses.get(row.number):
            continue
        sequence = running[indices[row.number]]
        spare += _may_grow(pool, sequence)  # a page is reserved for it
        positions = (len(row.pages) + max(spare, 0)) * pool.page_tokens - row.start - 1
        limit = min(budget, sequence.request.new_tokens - sequence.output_count - 1, positions)
        ids = row.ids + tuple(guesses[row.number][:limit])
        if (count := _pages_of(row.start + len(ids), pool) - len(row.pages)) > 0:
            pages, pool = pool.allocate(count)
            spare -= count
            sequence = running[indices[row.number]] = sequence._replace(pages=sequence.pages + pages)
        spare -= _may_grow(pool, sequence)
        rows[i] = row._replace(ids=ids, logit_count=len(ids), pages=sequence.pages)
        budget -= len(ids) - 1
    return pool
