"""A cache of pages between calls: what is found there changes no bit, and nothing of another model is found."""

import pytest
import torch
from test_canonical_forms import pytestmark  # noqa: F401
from test_exact_generation import TIGHT, ids, trained

from fzero import models
from fzero.core import prng, pytree
from fzero.generate import GenerateOptions, Prompt, Sampling, completions, prefix_cache

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


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_pages_of_an_earlier_call_are_used_and_change_no_bit(name):
    model, params = trained(name, "fp32")
    expected, alone, _ = call(model, params, PROMPTS, None, TIGHT)
    for order in (1, -1):
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
