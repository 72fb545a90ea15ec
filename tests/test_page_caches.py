"""Pages of keys and values: between calls, where what is found changes no bit and nothing is found of another model; in
codes, which attention reads as the numbers that they are."""

import pytest
import torch
from close import assert_close
from test_canonical_forms import pytestmark  # noqa: F401
from test_exact_generation import TIGHT, ids, trained
from test_generate_step import CONFIGS, texts, trees
from test_plan_generation import CPU

from fzero import generate, models, one_process, zero_plan
from fzero.core import prng, pytree
from fzero.generate import GenerateOptions, Prompt, Sampling, completions, make_step, page_spec, prefix_cache
from fzero.kernels import attention
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.paged_attention import paged_attention
from fzero.kernels.quantize import quantize
from fzero.planner import generation

SHARED = ids(19, 3)
PROMPTS = [
    Prompt(text, Sampling(0.9, max_tokens=6), number=i, log_probs=i != 2)
    for i, text in enumerate([SHARED + ids(5, 4), ids(9, 5), SHARED, SHARED + ids(9, 6), SHARED[:8]])
]
OPTIONS = GenerateOptions(rows=3, tokens=7, page_tokens=4, kernels="canonical", guesses=2)


def call(model, params, prompts, cache, options=OPTIONS):
    """(completions by number, the tokens that were computed, the cache behind them)."""
    computed = []
    out = completions(
        model, params, prompts, options=options, cache=cache, on_step=lambda tokens, pages: computed.append(tokens)
    )
    return {c.number: c for c in out}, sum(computed), out.cache if cache else None


@pytest.mark.parametrize(
    ("name", "order"),
    [("llama", 1), *(pytest.param(name, -1, marks=pytest.mark.slow) for name in ("llama", "deepseek"))],
)
def test_pages_of_an_earlier_call_are_used_and_change_no_bit(name, order):
    model, params = trained(name, "fp32")
    expected, alone, _ = call(model, params, PROMPTS, None, TIGHT)
    cache = prefix_cache(model, params, 40, options=OPTIONS)
    _, _, cache = call(model, params, PROMPTS[::order][:2], cache)  # of one order: those without log-probs first
    for turn in (order, -order):
        out, computed, cache = call(model, params, PROMPTS[::turn], cache)
        assert out == expected and computed < alone
    assert computed < 6 * len(PROMPTS) + 5 * 9  # all full pages of prompts were there
    assert cache is not None and cache.pool.available == 40


def test_nothing_is_found_of_other_weights_configs_and_kernels():
    model, params = trained("llama", "fp32")
    cache = prefix_cache(model, params, 40, options=OPTIONS)
    _, first, cache = call(model, params, PROMPTS[:1], cache)
    other = models.build(model.config.__class__(**{**vars(model.config), "rope_theta": 77.0}))
    changed = pytree.map(torch.clone, params)
    pytree.leaves(changed)[-1].data.view(-1)[0] += 0.125  # in place, behind autograd's count of versions
    fast = GenerateOptions(rows=3, tokens=7, page_tokens=4, guesses=2)
    for arguments in ((other, params, OPTIONS), (model, changed, OPTIONS), (model, params, fast)):
        expected, count, _ = call(*arguments[:2], PROMPTS[:1], None, arguments[2])
        out, computed, cache = call(*arguments[:2], PROMPTS[:1], cache, arguments[2])
        assert computed >= count and out[0].ids == expected[0].ids
        assert out == expected or arguments[2] is fast  # whose bits depend on what is guessed
    _, again, cache = call(model, params, PROMPTS[:1], cache)
    assert again < first


def test_a_call_that_is_ended_early_gives_its_pages_back_and_other_caches_are_refused():
    model, params = trained("llama", "fp32")
    cache = prefix_cache(model, params, 40, options=OPTIONS)
    out = completions(model, params, PROMPTS, options=OPTIONS, cache=cache)
    next(out)
    with pytest.raises(ValueError, match="these pages were given to a step or a call"):
        completions(model, params, PROMPTS, options=OPTIONS, cache=cache)
    cache = out.cache
    assert not list(out) and cache.pool.available == 40
    with pytest.raises(ValueError, match=r"the cache is of pages with page_tokens 4, and this call needs 16"):
        completions(model, params, PROMPTS, cache=cache)
    with pytest.raises(ValueError, match=r"pages with dtype torch.float32, and this call needs torch.float64"):
        completions(model, models.init_params(model, prng.key(1), torch.float64), PROMPTS, options=OPTIONS, cache=cache)
    with pytest.raises(ValueError, match="this call was given no cache"):
        _ = completions(model, params, PROMPTS).cache


KINDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
CODES = pytest.mark.parametrize("kind", KINDS)


@CODES
def test_each_code_is_read_as_its_number(kind):
    """A query of one key gets that key's value."""
    codes = torch.arange(256, dtype=torch.uint8).view(KINDS[kind])
    codes = codes[~codes.float().isnan()]
    for width in (len(codes), 1):  # by vectors, and one by one
        pages = codes.reshape(-1, 1, 1, width)
        count = len(pages)
        table, starts = torch.arange(count)[:, None].int(), torch.arange(count + 1).int()
        scales = torch.full((count, 1, 1, 1), 0.25)
        rows = table, starts, torch.zeros(count, dtype=torch.int64)
        out = paged_attention(torch.ones(count, 1, width), pages, pages, *rows, scales=(scales, scales))
        assert torch.equal(out.flatten(), codes.float() * 0.25)


@CODES
@pytest.mark.parametrize("impl", ["canonical", "reference"])
def test_attention_reads_codes_and_their_scales(kind, impl):
    k, v = (
        prng.normal(prng.key(i), (40, 2, 83)) * torch.logspace(-3, 3, 40)[:, None, None] ** p
        for i, p in ((1, 0.1), (2, 1))
    )
    coded = [quantize(x, kind, 83) for x in (k, v)]
    exact = [(x.data.double() * x.scale.double())[None] for x in coded]
    table = torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32)
    order = table[0].argsort()
    pages = [x.unflatten(0, (5, 8))[order] for pair in zip(*coded) for x in pair]
    q = prng.normal(prng.key(3), (9, 4, 83))
    rows = table, torch.tensor([0, 9], dtype=torch.int32), torch.arange(31, 40)
    options = {"pattern": Pattern.parse("window:21"), "sinks": torch.ones(4), "cap": 9.0}
    out = paged_attention(q, *pages[:2], *rows, scales=(pages[2], pages[3]), impl=impl, **options)
    positions = attention.Positions(torch.arange(31, 40), torch.arange(40))
    expected = attention.reference(
        q.double()[None], *exact, positions=positions, **options | {"sinks": torch.ones(4).double()}
    )
    assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-3)  # of values up to 1,000


@CODES
@pytest.mark.parametrize("name", ["llama", "gemma", "deepseek", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_logits_are_near_those_without_codes(name, kind):
    model, plan, params = trees(CONFIGS[name])
    row, out = texts((33,))[0], []
    for dtype in (torch.float64, KINDS[kind]):
        spec, step = page_spec(model, plan, 9, page_tokens=4, dtype=dtype), make_step(model, plan, dtype=torch.float64)
        pages, parts = spec.zeros(), []
        assert sum(x.nbytes for layer in pages.layers for x in layer) == spec.bytes
        for first in range(0, 33, 11):
            batch = generate.StepBatch.of_rows(
                [(row[first : first + 11], first, [*range(8, -1, -1)])], [11], page_tokens=4
            )
            logits, pages = step(params, pages, batch)
            parts.append(logits)
        out.append(torch.cat(parts))
    errors = (out[1] - out[0]).norm(dim=1) / out[0].norm(dim=1)
    assert 1e-5 < errors.median() < (0.02 if kind == "int8" else 0.05)  # of a few rows other experts are chosen


def test_what_has_no_cache_in_codes_is_refused():
    with pytest.raises(ValueError, match=r"cache is 'int4'.*; it must be one of auto, int8, fp8"):
        GenerateOptions(cache="int4")
    with pytest.raises(ValueError, match="kernels=canonical: a cache in int8 has no form"):
        GenerateOptions(cache="int8", kernels="canonical")
    model, plan, params = trees(CONFIGS["llama"])
    step, batch = (
        make_step(model, plan, kernels="canonical"),
        generate.StepBatch.of_rows([([1], 0, [0])], [1], page_tokens=16),
    )
    with pytest.raises(ValueError, match=r"kernels=canonical: a cache in torch\.int8 has no form"):
        step(params, page_spec(model, plan, 1, dtype=torch.int8).zeros(), batch)
    mlp = models.build(CONFIGS["mlp"])
    with pytest.raises(
        ValueError, match=r"a cache in torch\.int8 is for keys and values of .*, and this model has none"
    ):
        page_spec(mlp, zero_plan(0, mlp, one_process()), 1, dtype=torch.int8)


@pytest.mark.slow
def test_completions_of_a_cache_in_codes_are_those_of_any_batch():
    model, _, params = trees(CONFIGS["llama"])
    prompts = [Prompt(tuple(text), Sampling(0.8, max_tokens=6), number=i) for i, text in enumerate(texts((9, 4, 17)))]
    out = [
        {
            c.number: c.ids
            for c in completions(model, params, prompts[::order], options=GenerateOptions(cache="int8", rows=rows))
        }
        for order, rows in ((1, 3), (-1, 1))
    ]
    assert out[0] == out[1] and len(out[0]) == 3


def test_a_plan_counts_codes_and_their_scales():
    model, plan, _ = trees(CONFIGS["llama"])
    work = generation.Workload(9, 4, 16, 4, "fp8")
    spec = generation.FreeMemory(model, plan, CPU, work, 10**9).spec
    # Two layers of keys and values of two heads of four numbers, and a float32 for each.
    assert spec.page_bytes == 4 * 2 * 2 * 2 * (4 + 4) and spec.position_bytes == (32, 32)
    with pytest.raises(ValueError, match="cache is 'fp4'"):
        generation.expect_workload(work._replace(cache="fp4"), 40)
