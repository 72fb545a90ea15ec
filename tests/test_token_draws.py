"""Draws of tokens: the distribution that is asked for, and the same bits alone and in any batch."""

import itertools
import math
from collections import Counter

import pytest
import torch
from close import assert_close, assert_same
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fzero.core import prng, prng_rows
from fzero.generate import draws
from fzero.generate.draws import draw, score
from fzero.generate.rows import DrawRow, draw_rows
from fzero.generate.sampling import Sampling, expect_vocabulary

F64 = torch.float64
PROMPT, TEXT = (3, 5, 5, 8), (5, 9, 9, 9, 1)
SAMPLINGS = {
    "plain": Sampling(),
    "likeliest": Sampling(0.0),
    "likeliest, penalized": Sampling(0.0, repetition=1.5, bias={4: 1.0}),
    "cold": Sampling(0.3),
    "top_k": Sampling(0.9, 7),
    "top_p": Sampling(1.3, top_p=0.8),
    "top_p of nearly all": Sampling(2.0, top_p=0.999),
    "min_p": Sampling(1.5, min_p=0.02),
    "all limits": Sampling(0.8, 50, 0.9, 0.01),
    "penalties": Sampling(0.7, repetition=1.3, presence=0.4, frequency=0.2, top_k=20),
    "bias": Sampling(bias={2: 5.0, 7: -math.inf, 11: -1.0}),
    "alternatives": Sampling(alternatives=4),
    "min_tokens": Sampling(min_tokens=9, stop_ids=(6,)),
}


def normal(*shape, seed=1, scale=3.0):
    return prng.normal(prng.key(seed), shape, 0.0, scale)


def row_of(sampling, number=0, **other):
    return DrawRow(sampling, 20 + number, number, number % 3, PROMPT, TEXT, sampling.stop_ids, **other)


def mixed(columns, count=3):
    """Rows of every kind, and their logits."""
    rows = [row_of(s, number) for number, s in enumerate(list(SAMPLINGS.values()) * count)]
    mask = torch.arange(columns - 3) % 3 > 0
    rows += [row_of(SAMPLINGS[name], 90, mask=mask) for name in ("plain", "top_p", "likeliest")]
    return rows, normal(len(rows), columns)


def same(a, b):
    for x, y in zip(a[:4], b[:4]):
        assert_same(x, y)


def drawn(logits, rows, **options):
    return draw(logits, draw_rows(rows), **options)


@pytest.fixture(params=["tensors", "C++"])
def form(request, monkeypatch):
    """Noise by tensor operations, and in C++."""
    monkeypatch.setattr(prng_rows, "_SOME_CALLS", -1 if request.param == "C++" else 1 << 62)


# ---- the same bits in any batch ----


@pytest.mark.parametrize("columns", [13, 61, 1003])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(columns, form):
    rows, logits = mixed(columns)
    together = drawn(logits, rows)
    order = prng.permutation(prng.key(4), len(rows), torch.arange(len(rows))).tolist()
    shuffled = drawn(logits[order], [rows[i] for i in order])
    same(shuffled, [x[order] for x in together[:4]])
    torch.set_num_threads(2)
    try:
        same(drawn(logits, rows), together)
    finally:
        torch.set_num_threads(1)
    for i, row in enumerate(rows):
        alone = drawn(logits[i : i + 1].clone(), [row])
        same(alone, [x[i : i + 1] for x in together[:4]])
        if count := row.sampling.alternatives:
            assert_same(alone.alternatives.ids, together.alternatives.ids[i : i + 1, :count])
            assert_same(alone.alternatives.log_probs, together.alternatives.log_probs[i : i + 1, :count])


def test_a_sum_whose_rounding_depends_on_the_batch_is_noticed():
    def by_batch(x):
        return (x - math.log(len(x))).logsumexp(-1) + math.log(len(x))

    rows, logits = mixed(1003)
    together = draw(logits, draw_rows(rows), log_sum_exp=by_batch)
    alone = [draw(logits[i : i + 1], draw_rows([row]), log_sum_exp=by_batch) for i, row in enumerate(rows)]
    with pytest.raises(AssertionError):
        same([torch.cat(x) for x in zip(*(one[:4] for one in alone))], together)


def test_how_many_tokens_are_looked_at_and_how_scores_are_computed_changes_nothing(monkeypatch):
    rows, logits = mixed(1003)
    expected = drawn(logits, rows)
    for name, value in (
        ("WIDTH", 2),
        ("WIDTH", 5000),
        ("CLOSE", math.inf),
        ("ELEMENTS", {"cpu": 1500}),
        ("CANDIDATES", 1),
        ("CANDIDATES", 900),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(draws, name, value)
            same(drawn(logits, rows), expected)


def test_noise_is_that_of_the_key_and_the_id(form):
    rows = [DrawRow(Sampling(t, seed=9 << 40 | i), 5 + i, 3, i) for i, t in enumerate((1.0, 0.4, 3.0) * 7)]
    logits = normal(len(rows), 503)
    tokens = drawn(logits, rows).tokens.tolist()
    for row, x, token in zip(rows, logits, tokens):
        key = prng.key(row.sampling.seed)
        for number in (row.request, row.sample, row.position):
            key = prng.fold_in(key, number)
        noise = -prng.log(-prng.log(prng.uniform(key, (503,), dtype=F64)))
        assert int(((x / row.sampling.temperature).double() + noise).argmax()) == token
    assert len(set(tokens)) > 5


def test_each_number_of_a_key_changes_the_draw():
    logits, base = torch.zeros(1, 1 << 20), DrawRow(Sampling(), 5, 3, 1)
    others = (base, base._replace(position=6), base._replace(request=4), base._replace(sample=2))
    seeded = base._replace(sampling=Sampling(seed=1 << 40))
    assert len({drawn(logits, [row]).tokens.item() for row in (*others, seeded)}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_of_noise_are_those_of_their_keys(form, dtype):
    keys, numbers = prng.split(prng.key(3), 5), torch.arange(5) << 40
    folded = prng_rows.fold_rows(keys, numbers)
    index = prng.bits(prng.key(8), (5, 2100))  # more than a tile
    rows = prng_rows.uniform_rows(keys, 2100, 1.0, 0.0, dtype=dtype)
    picked = prng_rows.uniform_rows(keys, 2100, dtype=dtype, index=index)
    for i, key in enumerate(keys):
        assert_same(folded[i], prng.fold_in(key, i << 40))
        assert_same(rows[i], prng.uniform(key, (2100,), 1.0, 0.0, dtype=dtype))
        assert_same(picked[i], prng.uniform(key, (2100,), dtype=dtype, index=index[i]))
    assert prng_rows.uniform_rows(keys[:0], 3).shape == (0, 3)


# ---- the distribution ----


def reference(x, row):
    """Probabilities of the next token, float64 [V], by plain sums."""
    s, x = row.sampling, x.double().clone()
    for token, value in s.bias.items():
        x[token] += value
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / s.repetition if x[token] > 0 else x[token] * s.repetition
    for token, count in Counter(row.output).items():
        x[token] -= s.frequency * count + s.presence
    if len(row.output) < s.min_tokens:
        x[list(row.ends)] = -math.inf
    p = (x / s.temperature).softmax(-1)
    p = torch.where(p >= s.min_p * p.max(), p, 0.0)
    if s.top_k:
        p = torch.where(p >= p.sort(descending=True).values[min(s.top_k, len(p)) - 1], p, 0.0)
    ordered, order = (p / p.sum()).sort(descending=True, stable=True)
    left = ordered.cumsum(-1) - ordered < s.top_p
    kept = torch.zeros_like(p).scatter(0, order, torch.where(left, ordered, 0.0))
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.6),
        Sampling(top_p=0.7),
        Sampling(1.4, top_k=2),
        Sampling(min_p=0.4),
        Sampling(0.8, repetition=1.4, presence=0.3, frequency=-0.2, top_p=0.95),
        Sampling(bias={0: 0.7, 2: -0.5}, min_tokens=2),
    ],
    ids=["plain", "cold", "top_p", "top_k", "min_p", "penalties", "bias"],
)
def test_texts_have_the_frequencies_of_an_enumeration(sampling):
    """Vocabulary 3, length 3: every text's count over 10,000 requests, by chi-square at 99.9%."""
    n, tables = 10_000, [normal(3**i, 3, seed=i, scale=1.0) for i in range(3)]
    prompt, ends = (1,), (2,) if sampling.min_tokens else ()
    expected = {}
    for text in itertools.product(range(3), repeat=3):
        expected[text] = 1.0
        for i in range(3):
            state = sum(token * 3**k for k, token in enumerate(text[:i]))
            row = DrawRow(sampling, 1 + i, 0, 0, prompt, text[:i], ends)
            expected[text] *= reference(tables[i][state], row)[text[i]].item()
    texts = [()] * n
    for i in range(3):
        states = [sum(token * 3**k for k, token in enumerate(text)) for text in texts]
        rows = [DrawRow(sampling, 1 + i, number, 0, prompt, text, ends) for number, text in enumerate(texts)]
        texts = [(*text, token) for text, token in zip(texts, drawn(tables[i][states], rows).tokens.tolist())]
    counts = Counter(texts)
    assert sum(expected.values()) == pytest.approx(1.0) and not [text for text in counts if not expected[text]]
    possible = {text: p for text, p in expected.items() if p}
    chi_square = sum((counts[text] - n * p) ** 2 / (n * p) for text, p in possible.items())
    degrees = len(possible) - 1
    # Wilson and Hilferty 1931: the quantile of the distribution.
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if "likeliest" not in name])
def test_log_probs_and_mass_are_those_of_the_plain_form(name):
    logits = normal(20, 301)
    rows = [row_of(SAMPLINGS[name], number) for number in range(20)]
    out = drawn(logits, rows)
    for i, row in enumerate(rows):
        p = reference(logits[i], row)
        token = out.tokens[i]
        free = reference(
            logits[i],
            row._replace(
                sampling=Sampling(**vars(row.sampling) | dict.fromkeys(("top_k", "min_p"), 0) | {"top_p": 1.0})
            ),
        )
        assert abs(out.drawn_log_probs[i].double() - p[token].log()) < 1e-5
        assert_close(out.mass[i].double(), free[p > 0].sum(), rtol=1e-5, atol=0)
        assert abs(out.log_probs[i].double() - logits[i].double().log_softmax(-1)[token]) < 3e-6


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_is_what_processors_of_transformers_leave(seed):
    """In the order that `Sampling` states."""
    sampling = Sampling(0.7, 40, 0.85, 0.01, repetition=1.2, bias={3: 2.0, 100: -4.0})
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], value] for token, value in sampling.bias.items()]),
            RepetitionPenaltyLogitsProcessor(sampling.repetition),
            TemperatureLogitsWarper(sampling.temperature),
            MinPLogitsWarper(sampling.min_p),
            TopKLogitsWarper(sampling.top_k),
            TopPLogitsWarper(sampling.top_p),
        ]
    )
    logits = normal(50, 700, seed=seed, scale=2.0)
    ids = torch.tensor([[*PROMPT, *TEXT]]).expand(50, -1)
    left = theirs(ids, logits.clone())
    counts = (left > -math.inf).sum(-1)
    assert counts.max() > 9 and len(set(counts.tolist())) > 5
    out = drawn(logits, [row_of(sampling, number) for number in range(50)])
    token = out.tokens[:, None]
    assert (out.drawn_log_probs - left.log_softmax(-1).gather(-1, token)[:, 0]).abs().max() < 1e-5
    whole = LogitsProcessorList(theirs[:3])(ids, logits.clone()).softmax(-1)
    assert_close(out.mass, torch.where(left > -math.inf, whole, 0.0).sum(-1), rtol=1e-5, atol=0)


def test_equals_are_ordered_by_their_ids():
    rows = [DrawRow(Sampling(top_p=0.5, seed=seed), 0) for seed in range(200)]
    assert set(drawn(torch.zeros(200, 4), rows).tokens.tolist()) == {0, 1}
    assert drawn(torch.zeros(9, 500), [DrawRow(Sampling(0.0), i) for i in range(9)]).tokens.tolist() == [0] * 9
    tied = [DrawRow(Sampling(top_k=2, seed=seed), 0) for seed in range(200)]
    assert set(drawn(torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(200, 4), tied).tokens.tolist()) == {0, 1, 2}


def test_a_draw_without_limits_has_equal_log_probs_and_the_likeliest_its_probability_as_mass():
    logits = normal(3, 50)
    plain = drawn(logits, [DrawRow(Sampling(), i) for i in range(3)])
    assert_same(plain.log_probs, plain.drawn_log_probs)
    assert plain.mass.tolist() == [1.0] * 3
    best = drawn(logits, [DrawRow(Sampling(0.0), i) for i in range(3)])
    assert_same(best.tokens, logits.argmax(-1))
    assert best.drawn_log_probs.tolist() == [0.0] * 3
    assert_close(best.mass, best.log_probs.exp(), rtol=1e-6, atol=0)


def test_log_probs_have_the_bits_of_the_given_sum():
    logits = normal(5, 50)
    out = draw(
        logits,
        draw_rows([DrawRow(Sampling(alternatives=2), i) for i in range(5)]),
        log_sum_exp=lambda x: torch.logsumexp(x, -1),
    )
    at_token = logits.gather(-1, out.tokens[:, None])[:, 0]
    assert_same(out.log_probs, -(torch.logsumexp(logits, -1) - at_token))
    assert_same(score(logits, out.tokens, log_sum_exp=lambda x: torch.logsumexp(x, -1))[0], out.log_probs)
    top = (logits - torch.logsumexp(logits, -1, keepdim=True)).topk(2)
    assert_same(out.alternatives.log_probs, top.values)
    assert_same(out.alternatives.ids, top.indices)


# ---- what is not drawn ----


def test_ids_outside_of_the_tokenizer_masked_ids_and_early_ends_are_not_drawn():
    logits = torch.zeros(300, 6)
    few = [DrawRow(Sampling(seed=i), 0) for i in range(300)]
    assert set(drawn(logits, few, vocab_size=4).tokens.tolist()) == {0, 1, 2, 3}
    mask = torch.tensor([True, False, True])
    assert set(drawn(logits, [row._replace(mask=mask) for row in few]).tokens.tolist()) == {0, 2}
    early = [DrawRow(Sampling(seed=i, min_tokens=2), 1, output=(0,), ends=(5, 4, 5)) for i in range(300)]
    assert set(drawn(logits, early).tokens.tolist()) == {0, 1, 2, 3}
    late = [row._replace(output=(0, 0)) for row in early]
    assert set(drawn(logits, late).tokens.tolist()) == set(range(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be at least 0 and at most 1"),
        ({"temperature": 0.0, "min_p": 0.5}, "min_p is 0.5 and temperature 0, which takes the likeliest token; leave"),
        ({"repetition": 0.0}, "repetition is 0.0; it must be above 0"),
        ({"frequency": math.inf}, "frequency is inf; it must be a finite number"),
        ({"bias": {-1: 1.0}}, "bias has -1: 1.0; it must be a token's id and a number"),
        ({"stop": ("a", "")}, r"stop\[1\] is empty, which would end every text at once; leave it out"),
        ({"stop": "abc"}, "stop is 'abc'; it must be a tuple, each of it a text"),
        ({"stop_ids": (-4,)}, r"stop_ids\[0\] is -4; it must be at least 0"),
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4 and max_tokens 3; it must be at most that"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_bad_numbers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**change)


def test_what_leaves_nothing_to_draw_is_refused():
    rows = [DrawRow(Sampling(), 0), DrawRow(Sampling(min_tokens=1), 0, ends=(0, 1, 2))]
    with pytest.raises(
        ValueError, match="row 1 of the logits has no probabilities: its mask, bias and min_tokens leave no"
    ):
        drawn(torch.zeros(2, 3), rows)
    with pytest.raises(ValueError, match="row 0 of the logits has no probabilities: the model gives NaN or infinity"):
        drawn(torch.tensor([[0.0, math.nan]]), rows[:1])
    with pytest.raises(ValueError, match=r"logits are \[1, 3\]; they must be \[2, V\]"):
        drawn(torch.zeros(1, 3), rows)
    with pytest.raises(ValueError, match=r"logits are torch\.bfloat16; they must be float32"):
        drawn(torch.zeros(2, 3, dtype=torch.bfloat16), rows)
    with pytest.raises(ValueError, match="request -1, sample 0 and position 0; each must be at least 0"):
        draw_rows([DrawRow(Sampling(), 0, -1)])
    with pytest.raises(ValueError, match="bias has 7; the vocabulary has the ids 0 to 6"):
        expect_vocabulary(Sampling(bias={7: 1.0}), 7)
