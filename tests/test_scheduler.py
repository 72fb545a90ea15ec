"""The scheduler of generation, over random traces: a stand-in for the model computes from what its pages hold, so that
a wrong page, position or order gives other tokens than those of a sequence alone."""

import itertools
import pickle
import random
import re

import pytest

from fzero.generate import page_pool, scheduler
from fzero.generate.page_pool import PagePool, PersistentMap, empty_pool
from fzero.generate.requests import Arrivals, Request, StepLimits, expect_fits
from fzero.generate.scheduler import empty_state, schedule

VOCABULARY = 12  # token 0 ends a sequence


def value_of(root, token, previous):
    """What a page holds of a token: stands for its keys, values and logits, which depend on all before it."""
    return hash((0 if root is None else sum(root), token, *previous))


def alone(request):
    """(new tokens, log-probs of the prompt) of a sequence without pages."""
    values, tokens = [], []
    for token in request.ids:
        values.append(value_of(request.root, token, values))
    scores = {i: hash((values[i - 1], request.ids[i])) for i in range(1, len(request.ids))}
    while len(tokens) < request.new_tokens and 0 not in tokens:
        tokens.append(values[-1] % VOCABULARY)
        values.append(value_of(request.root, tokens[-1], values))
    return tuple(tokens), scores if request.scores else {}


class Engine:
    """A step over pages, and the log-probs that it stores beside them."""

    def __init__(self, limits):
        self.size = limits.page_tokens
        self.slots = {}  # (page, offset): value
        self.page_scores = {}  # page: log-probs of its tokens by offset
        self.scores, self.drawn = {}, {}  # by number

    def step(self, batch, requests):
        """The draws of the batch."""
        for number, _, pages in batch.admitted:
            if requests[number].scores and number not in self.drawn:
                stored = [(i, self.page_scores.get(page, {})) for i, page in enumerate(pages)]
                self.scores[number] = {i * self.size + j: s for i, table in stored for j, s in table.items()}
        return {row.number: tokens for row in batch.rows if (tokens := self.row(row, requests[row.number]))}

    def row(self, row, request):
        def slot(position):
            return row.pages[position // self.size], position % self.size

        values = [self.slots.get(slot(position)) for position in range(row.start)]
        for token in row.ids:
            self.slots[slot(len(values))] = value = value_of(request.root, token, values)
            values.append(value)
        if row.prefill and request.scores and row.number not in self.drawn:
            assert row.logit_count == len(row.ids), "scores: logits of a chunk are missing"
            scores = self.scores.setdefault(row.number, {})
            ids = (*request.ids, None)
            for position in range(row.start + 1, row.start + len(row.ids) + 1):
                scores[position] = hash((values[position - 1], ids[position]))
            for position in range(row.start, row.start + len(row.ids)):
                page, offset = slot(position)
                table = self.page_scores.setdefault(page, {})
                table[offset] = scores.get(position)
        if not row.draws:
            return ()
        tokens = []
        for value, guess in zip(values[-row.logit_count :] if not row.prefill else values[-1:], (*row.ids[1:], None)):
            tokens.append(value % VOCABULARY)
            if tokens[-1] != guess or not tokens[-1]:
                break
        self.drawn.setdefault(row.number, []).extend(tokens)
        return tuple(tokens)


def check_pool(state):
    """Counts, indices and lists of the pool agree with the page tables, counted anew."""
    pool = state.pool
    tables = [sequence.pages for sequence in state.running]
    counts = {page: sum(page in table for table in tables) for page in range(pool.size)}
    entries = {page: pool.entries.get(page) for page in counts}
    assert {page: entry.count for page, entry in entries.items() if entry and entry.count} == {
        page: count for page, count in counts.items() if count
    }, "pages: counts"
    assert pool.available == sum(not count for count in counts.values()), "pages: available"
    cached = {page: entry for page, entry in entries.items() if entry and entry.prefix}
    assert sorted(pool.index.values()) == sorted(cached), "pages: index"
    assert all(pool.index.get(entry.prefix.key) == page for page, entry in cached.items()), "pages: index"
    assert sorted(pool.idle.values()) == [page for page in cached if not counts[page]], "pages: idle"
    empty = [*pool.empty.values(), *range(pool.unused, pool.size)]
    assert sorted(empty) == [page for page in counts if not counts[page] and page not in cached], "pages: empty"


def check_batch(before, state, batch, limits, arrived):
    """What each batch must obey."""
    assert sum(len(row.ids) for row in batch.rows) <= limits.tokens, "budget: tokens"
    assert len(batch.rows) <= limits.rows, "budget: rows"
    assert all(row.ids and row.logit_count <= len(row.ids) for row in batch.rows), "budget: a row without tokens"
    tables = {sequence.request.number: sequence.pages for sequence in state.running}
    for row in batch.rows:
        assert row.pages == tables[row.number], "pages: another table"
        assert len(row.pages) * limits.page_tokens >= row.start + len(row.ids), "pages: too few"
        written = row.pages[row.start // limits.page_tokens : (row.start + len(row.ids) - 1) // limits.page_tokens + 1]
        others = {page for number, table in tables.items() if number != row.number for page in table}
        assert not others & {*written}, "writes: a page of two"
        assert not any(state.pool.entry(page).prefix for page in written), "writes: a cached page"
    drawing = [s.request.number for s in state.running if s.computed >= len(s.prompt)]
    assert [*batch.preempted] == sorted(batch.preempted, reverse=True), "order: preempted"
    # One whose page turned out to be cached by another may start again at once, on that page.
    stayed = tables.keys() - {admission.number for admission in batch.admitted}
    assert not batch.preempted or batch.preempted[-1] > max(stayed), "order: preempted"
    assert [row.number for row in batch.rows if not row.prefill] == drawing[: limits.rows], "order: decode first"
    chunks = [row.number for row in batch.rows if row.prefill]
    running = [n for n in chunks if n not in {a.number for a in batch.admitted}]
    prefilling = [s.request.number for s in state.running if s.request.number not in drawing]
    assert running == [n for n in prefilling if n not in {a.number for a in batch.admitted}][: len(running)], "order"
    for sequence in state.waiting.values():  # the later ones that start now share nothing, and it shares a page
        if any(a.number > sequence.request.number for a in batch.admitted):
            ids, root = sequence.prompt[: limits.page_tokens], sequence.request.root
            assert any((s.prompt[: limits.page_tokens], s.request.root) == (ids, root) for s in state.running), "order"


def random_case(rng):
    """(limits, requests by the step of their arrival, hash function)."""
    page_tokens, rows = rng.randint(1, 4), rng.randint(1, 6)
    limits = StepLimits(rows + rng.randint(0, 8), rows, rng.choice((3, 5, 7, 9, 12, 24)), page_tokens)
    stems = [tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 12))) for _ in range(3)]
    requests, step = [], 0
    for number in range(rng.randint(1, 12)):
        stem = rng.choice(stems)
        ids = stem[: rng.randint(1, len(stem))] if rng.random() < 0.3 else stem
        ids += tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.choice((0, 0, 1, 5))))
        request = Request(
            number, ids, rng.randint(0, 12), rng.choice((b"a", b"a", b"a", b"b", None)), rng.random() < 0.4
        )
        step += rng.choice((0, 0, 1, 4))
        if request.max_positions <= limits.pages * page_tokens:
            requests.append((step, request))
        else:
            with pytest.raises(ValueError, match=f"request {number}: its {len(ids)} tokens"):
                expect_fits(request, limits)
    hash_ids = (lambda parent, ids: (parent + sum(ids)) % 3) if rng.random() < 0.3 else page_pool.hash_ids
    return limits, requests, hash_ids


def guesses_of(rng, state, engine, requests):
    """Guesses for the sequences that draw next: right, wrong, right at first."""
    guesses = {}
    for row in state.rows:
        if row.draws and rng.random() < 0.5:
            right = alone(requests[row.number])[0][len(engine.drawn[row.number]) :]
            wrong = tuple(rng.randrange(VOCABULARY) for _ in range(4))
            cut = rng.randint(0, len(right))
            guesses[row.number] = (right[:cut] + wrong)[: rng.randint(0, 6)]
    return guesses


def run_trace(seed):
    """A random trace to its end, checked at every step; returns what happened, as counts."""
    rng = random.Random(seed)
    limits, incoming, hash_ids = random_case(rng)
    requests = {request.number: request for _, request in incoming}
    speculates, cancels, changes = rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.2
    engine, state = Engine(limits), empty_state(limits, hash_ids)
    log, states, batches, arrived, canceled, draws, finished = [], [state], [], {}, set(), {}, {}
    most_steps = 10 + 8 * 10 + 3 * sum(len(request.ids) + request.new_tokens for request in requests.values())
    for step in range(most_steps):
        alive = {s.request.number for s in (*state.running, *state.waiting.values())}
        ended = {n for n in alive & engine.drawn.keys() if 0 in engine.drawn[n] and n in draws}
        if cancels and alive and rng.random() < 0.1:
            canceled.add(rng.choice(sorted(alive)))
            ended |= canceled & alive
            if rng.random() < 0.5:  # before the step's tokens were drawn
                draws = {n: tokens for n, tokens in draws.items() if n not in canceled}
        new = tuple(request for when, request in incoming if when == step)
        arrived |= {request.number: step for request in new}
        guesses = guesses_of(rng, state, engine, requests) if speculates else {}
        used = limits
        if changes and rng.random() < 0.2:
            used = StepLimits(limits.tokens, rng.randint(1, limits.rows), limits.pages, limits.page_tokens)
        arrivals = Arrivals(new, draws, frozenset(ended), guesses)
        before, (state, batch) = state, schedule(state, arrivals, used)
        check_pool(state)
        check_batch(before, state, batch, used, arrived)
        log.append((arrivals, used))
        states.append(state)
        batches.append(batch)
        alive = {s.request.number for s in (*state.running, *state.waiting.values())}
        reported = {*batch.finished} | (ended & arrived.keys())
        assert reported == {n for n in arrived if n not in alive and n not in finished}, "finished"
        finished |= {n: step for n in arrived if n not in alive and n not in finished}
        draws = engine.step(batch, requests)
        if not alive and step >= max((when for when, _ in incoming), default=0):
            break
        assert batch.rows or not alive, "starves: nothing is computed"
    for number, request in requests.items():
        assert number in finished, f"starves: {number} of {most_steps} steps"
        crowd = [r for n, r in requests.items() if arrived[n] <= finished[number] and finished[n] >= arrived[number]]
        bound = 2 * sum(len(r.ids) + r.new_tokens + 1 for r in crowd)
        assert finished[number] - arrived[number] <= bound, f"starves: {number} for more than {bound} steps"
        tokens, scores = alone(request)
        drawn = tuple(engine.drawn.get(number, ()))
        assert drawn == tokens[: len(drawn)] and (number in canceled or drawn == tokens), "tokens: of another sequence"
        if number not in canceled:
            result = {i: engine.scores.get(number, {}).get(i) for i in scores}
            assert result == scores, "scores: of another prompt"
    assert state.pool.available == limits.pages and not state.running and not len(state.waiting), "pages: all come back"
    replay(log, states, batches, hash_ids, limits)
    return {
        "hits": sum(a.cached > 0 for b in batches for a in b.admitted),
        "scored hits": sum(len(a.scored_pages) > 1 for b in batches for a in b.admitted),
        "preempted": sum(len(batch.preempted) for batch in batches),
        "verified": sum(len(row.ids) > 1 for b in batches for row in b.rows if not row.prefill),
        "chunks": sum(not row.draws for b in batches for row in b.rows),
    }


def replay(log, states, batches, hash_ids, limits):
    """The log gives the states and batches again, from the start and from every state of before."""
    assert pickle.loads(pickle.dumps(log)) == log
    state = empty_state(limits, hash_ids)
    for i, (arrivals, used) in enumerate(log):
        assert schedule(states[i], arrivals, used) == (states[i + 1], batches[i]), "replay: from a state"
        state, batch = schedule(state, arrivals, used)
        assert (state, batch) == (states[i + 1], batches[i]), "replay: from the start"


SEEDS = [
    range(300),
    *(pytest.param(range(i, i + 950), marks=pytest.mark.slow) for i in (500, 1450)),
    pytest.param(range(300, 500), marks=pytest.mark.exhaustive),
    *(pytest.param(range(i, i + 950), marks=pytest.mark.exhaustive) for i in range(2400, 10_000, 950)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_traces_obey_every_property(seeds):
    totals = {}
    for seed in seeds:
        try:
            counts = run_trace(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        totals = {name: totals.get(name, 0) + count for name, count in counts.items()}
    assert min(totals.values()) > len(seeds) / 20, totals  # they contain what they are to test


# ---- mistakes that the properties must find ----


def replacing(target, name, wrapper):
    """The mistake: wrapper(the right function, arguments...) in its place."""
    right = getattr(target, name)
    return target, name, lambda *args: wrapper(right, *args)


def edit_in_place(right, mapping, changes):
    mapping._groups = right(mapping, changes)._groups
    return mapping


def match_keys_alone(right, pool, prefixes, scored):
    pages = []
    for page in (pool.index.get(prefix.key) for prefix in prefixes):
        if page is None or page in pages or (scored and not pool.entry(page).scored):
            break
        pages.append(page)
    return tuple(pages)


def preempt_first(right, pool, running, limits):
    running.reverse()
    pool, drawing, preempted = right(pool, running, limits)
    running.reverse()
    return pool, drawing[::-1], preempted


def keep_rejected(right, pool, sequence, row, *rest):
    result = right(pool, sequence, row, *rest)
    rejected = not row.prefill and result.computed < row.start + len(row.ids)
    return result._replace(computed=result.computed + rejected)


MISTAKES = {
    "a page is not released": ("pages", PagePool, "release", lambda right, pool, pages: right(pool, pages[1:])),
    "a shared page is not counted": ("pages", PagePool, "share", lambda right, pool, pages: pool),
    "a page is given twice": (
        "(pages|writes)",
        PagePool,
        "allocate",
        lambda right, pool, count: ((0,) * count, right(pool, count)[1]),
    ),
    "ids are not compared": ("(tokens|scores)", PagePool, "match", match_keys_alone),
    "the root is left out": ("(tokens|scores)", PagePool, "root_prefix", lambda right, pool, root: right(pool, b"")),
    "pages that are not scored are hits": (
        "scores",
        PagePool,
        "match",
        lambda right, pool, prefixes, scored: right(pool, prefixes, False),
    ),
    "the last token is not computed": (
        "budget: a row without",
        scheduler,
        "_usable_pages",
        lambda right, pool, sequence: len(sequence.prompt) // pool.page_tokens,
    ),
    "a chunk is too long": (
        "budget: tokens",
        scheduler,
        "_prefill_row",
        lambda right, sequence, budget: right(sequence, budget + 1),
    ),
    "drawn tokens are lost": (
        "tokens",
        scheduler,
        "_restarted",
        lambda right, s: right(s._replace(tail=s.tail[:-1], output_count=max(s.output_count - 1, 0))),
    ),
    "a rejected guess stays": ("(tokens|pages|budget)", scheduler, "_advance", keep_rejected),
    "odd ones wait": (
        "order",
        scheduler,
        "_is_computed_soon",
        lambda right, pool, sequence, *rest: sequence.request.number % 2 == 1 and bool(rest[1]),
    ),
    "nothing starts": ("starves", scheduler, "_is_computed_soon", lambda right, *args: True),
    "the first is preempted": ("order", scheduler, "_pages_to_draw", preempt_first),
    "a map changes in place": ("(replay|pages)", PersistentMap, "edited", edit_in_place),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, monkeypatch):
    found, target, name, wrapper = MISTAKES[mistake]
    monkeypatch.setattr(*replacing(target, name, wrapper))
    for seed in range(500):
        try:
            run_trace(seed)
        except AssertionError as error:
            assert re.match(found, str(error)), error
            return
    raise AssertionError(f"500 traces do not find that {mistake}")


# ---- the pool and the cache ----


LIMITS = StepLimits(tokens=16, rows=4, pages=8, page_tokens=4)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def serve(requests, limits=LIMITS, together=False, hash_ids=page_pool.hash_ids):
    """(log-probs of the prompts, new tokens, tokens that were found cached, by number), together or in turn."""
    engine, state, cached = Engine(limits), empty_state(limits, hash_ids), {}
    by_number = {request.number: request for request in requests}
    for group in [requests] if together else [[request] for request in requests]:
        arrivals = Arrivals(tuple(group))
        while True:
            state, batch = schedule(state, arrivals, limits)
            cached |= {a.number: a.cached for a in batch.admitted}
            if not batch.rows:
                break
            draws = engine.step(batch, by_number)
            arrivals = Arrivals(draws=draws, ended={n for n in draws if 0 in engine.drawn[n]})
    return engine.scores, {n: tuple(tokens) for n, tokens in engine.drawn.items()}, cached


@pytest.mark.parametrize("together", [False, True])
def test_log_probs_of_a_prompt_are_those_without_a_cache_in_every_order(together):
    prompts = [(PROMPT, True), (PROMPT, False), (PROMPT[:8], True), ((*PROMPT[:4], 9, 9, 9, 9), True), (PROMPT, True)]
    hits = 0
    for order in itertools.permutations(prompts):
        requests = [Request(i, ids, 2, b"model", scores) for i, (ids, scores) in enumerate(order)]
        scores, tokens, cached = serve(requests, together=together)
        hits += sum(cached.values())
        for request in requests:
            expected_tokens, expected = alone(request)
            assert tokens[request.number] == expected_tokens
            assert {i: scores.get(request.number, {}).get(i) for i in expected} == expected
    assert hits > 500


@pytest.mark.parametrize(
    ("length", "cached", "scored"),
    [(9, 8, 4), (8, 4, 4), (5, 4, 0), (4, 0, 0)],
)
def test_the_last_token_is_computed_and_for_log_probs_the_last_cached_page(length, cached, scored):
    ids = PROMPT[:length]
    for scores, tokens in ((False, cached), (True, scored)):
        requests = [Request(i, ids, 1, b"model", scores) for i in range(2)]
        assert serve(requests)[2] == {0: 0, 1: tokens}
    assert serve([Request(0, ids, 1, b"model"), Request(1, ids, 1, b"model", True)])[2] == {0: 0, 1: 0}
    assert serve([Request(0, ids, 1, b"model", True), Request(1, ids, 1, b"model")])[2] == {0: 0, 1: cached}
    for roots in ((b"model", b"other"), (b"model", None), (None, b"model"), (None, None)):
        assert serve([Request(i, ids, 1, root) for i, root in enumerate(roots)])[2] == {0: 0, 1: 0}


def test_samples_of_a_prompt_share_its_full_pages():
    """Those that arrive with the first wait for its pages, so that eight fit where two would without."""
    limits = StepLimits(tokens=16, rows=8, pages=18, page_tokens=4)
    ids = tuple(range(1, 34))
    state, batch = schedule(empty_state(limits), Arrivals(tuple(Request(i, ids, 2, b"m") for i in range(8))), limits)
    assert [row.number for row in batch.rows] == [0]
    state, batch = schedule(state, Arrivals(), limits)
    assert [(row.number, row.start) for row in batch.rows] == [(0, 16)]
    state, batch = schedule(state, Arrivals(), limits)
    assert [(row.number, row.start, len(row.ids)) for row in batch.rows] == [(i, 32, 1) for i in range(8)]
    assert {row.pages[:8] for row in batch.rows} == {batch.rows[0].pages[:8]}
    assert len({row.pages[8] for row in batch.rows}) == 8 and state.pool.available == 2


def test_a_collision_is_no_hit():
    """Also of a prefix whose page was used again since, under a key that another has."""
    requests = [Request(i, ids, 1, b"m") for i, ids in enumerate([(1, 2, 3, 4, 5), (4, 3, 2, 1, 5), (1, 2, 3, 4, 5)])]
    *_, cached = serve(requests, hash_ids=lambda parent, ids: 7)
    assert cached == {0: 0, 1: 0, 2: 4}
    pool = empty_pool(3, 1, lambda parent, ids: sum(ids) if len(ids) == 1 else 0)
    root = pool.root_prefix(b"ab")
    first, second = pool.chain(root, (1, 2))
    pages, pool = pool.allocate(2)
    pool = pool.register([(pages[0], first, False), (pages[1], second, False)]).release(pages[:1])
    _, pool = pool.allocate(2)  # the page of (1), so that (1, 2) alone is cached
    assert pool.match((first, second), False) == () and pool.index.get(second.key) == pages[1]
    other = pool.chain(pool.root_prefix(b"ba"), (1, 2))
    pool = pool.register([(2, other[0], False)])
    assert pool.match(other, False) == (2,) and pool.match((first, second), False) == ()


def test_the_least_recently_used_page_goes_first_and_of_a_prefix_the_last():
    pool = empty_pool(4, 1)
    chains = [pool.chain(pool.root_prefix(b"m"), ids) for ids in ((1, 2), (3, 4))]
    tables = []
    for prefixes in chains:
        pages, pool = pool.allocate(2)
        pool = pool.register([(page, prefix, False) for page, prefix in zip(pages, prefixes)]).release(pages)
        tables.append(pages)
    pool = pool.share(pool.match(chains[0], False)).release(tables[0])  # used again
    order = []
    for _ in range(4):
        pages, pool = pool.allocate(1)
        order += pages
    assert order == [*tables[1][::-1], *tables[0][::-1]]


@pytest.mark.parametrize("size", [1, 3, 700])
def test_a_map_is_a_dict_whose_old_copies_stay(size):
    rng, shared, plain, old = random.Random(size), PersistentMap(3), {}, []
    for _ in range(200):
        changes = {rng.randrange(size): rng.choice((None, rng.random())) for _ in range(rng.randint(0, 9))}
        old.append((shared, dict(plain)))
        shared = shared.edited(changes)
        plain = {key: value for key, value in (plain | changes).items() if value is not None}
    for mapping, table in [*old, (shared, plain)]:
        assert {i: mapping.get(i) for i in range(size) if mapping.get(i) is not None} == table
        assert [*mapping.values()] == [table[key] for key in sorted(table)] and len(mapping) == len(table)


def test_states_share_what_did_not_change():
    """A step of sequences that draw changes no page entry, and a table stays the same object until it grows."""
    limits = StepLimits(tokens=64, rows=4, pages=64, page_tokens=16)
    arrivals = Arrivals(tuple(Request(i, (i + 1,) * 14, 9, b"m") for i in range(4)))
    before, _ = schedule(empty_state(limits), arrivals, limits)
    after, batch = schedule(before, Arrivals(draws=dict.fromkeys(range(4), (1,))), limits)
    assert after.pool is before.pool
    assert all(row.pages is sequence.pages for row, sequence in zip(batch.rows, before.running))


# ---- what is refused ----


def first_step():
    return schedule(
        empty_state(LIMITS), Arrivals((Request(0, (1, 2), 3, b"m"), Request(1, (1,) * 20, 1, b"m"))), LIMITS
    )


def guessed():
    state, _ = schedule(first_step()[0], Arrivals(draws={0: (4,)}, guesses={0: (5, 6)}), LIMITS)
    return state


REFUSED = {
    "an empty prompt": (lambda: Request(3, (), 1, b""), "request 3: the prompt is empty; give at least 1 token"),
    "a token below 0": (
        lambda: Request(3, (1, -1), 1, b""),
        r"request 3: ids has -1; they must be whole numbers of at",
    ),
    "a token of another kind": (lambda: Request(3, [1, 2.5], 1, b""), r"request 3: ids has 2\.5; they must be whole"),
    "new tokens below 0": (
        lambda: Request(3, (1,), -1, b""),
        "Request: new_tokens is -1; it must be a whole number of at least 0",
    ),
    "a root of text": (lambda: Request(3, (1,), 1, "model"), "Request: root is 'model'; it must be a bytes or None"),
    "a budget below the rows": (lambda: StepLimits(3, 4, 8, 4), "StepLimits: tokens is 3; it must be at least rows, 4"),
    "no pages": (lambda: StepLimits(3, 3, 0, 4), "StepLimits: pages is 0; it must be a whole number of at least 1"),
    "a request that can never fit": (
        lambda: schedule(empty_state(LIMITS), Arrivals((Request(0, (1,) * 30, 4, b""),)), LIMITS),
        "request 0: its 30 tokens and up to 4 new ones need 9 pages of 4; there are 8: give a shorter prompt, ",
    ),
    "a number that does not rise": (
        lambda: schedule(first_step()[0], Arrivals((Request(1, (1,), 1, b""),), {0: (3,)}), LIMITS),
        "request 1 arrives after 1; numbers must rise",
    ),
    "limits of another pool": (
        lambda: schedule(empty_state(LIMITS), Arrivals(), StepLimits(16, 4, 9, 4)),
        "the limits have 9 pages of 4 tokens; the state has 8 of 4: give those of empty_state",
    ),
    "no draw": (
        lambda: schedule(first_step()[0], Arrivals(), LIMITS),
        "draws has no token of sequence 0, which was to",
    ),
    "a draw of a chunk": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: (1,), 1: (1,)}), LIMITS),
        "draws has sequence 1, which was to draw nothing in the last batch",
    ),
    "an empty draw": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: ()}), LIMITS),
        "draws of sequence 0 are empty",
    ),
    "two draws": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: (1, 2)}), LIMITS),
        r"the draws of sequence 0 are \(1, 2\); the row allows the first of its guesses \(\), and one more",
    ),
    "draws that are not the guesses": (
        lambda: schedule(guessed(), Arrivals(draws={0: (6, 1), 1: (1,)}), LIMITS),
        r"the draws of sequence 0 are \(6, 1\); the row allows the first of its guesses \(5,\), and one more",
    ),
    "a draw that is no token": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: (1.0,)}), LIMITS),
        r"schedule: draws has 1\.0; they must be whole numbers",
    ),
    "the end of nobody": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: (1,)}, ended=(7,)), LIMITS),
        "ended has sequence 7, which neither waits nor runs",
    ),
    "guesses of nobody": (
        lambda: schedule(first_step()[0], Arrivals(draws={0: (1,)}, guesses={7: (1,)}), LIMITS),
        "guesses has sequence 7, which does not run",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_refused(mistake):
    call, words = REFUSED[mistake]
    with pytest.raises(ValueError, match=words):
        call()
