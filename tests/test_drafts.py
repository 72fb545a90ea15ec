"""Guesses of a draft model change no text, and are right where its weights are those of the model."""

import collections
import dataclasses
import inspect
import itertools
import math

import pytest
import torch
from test_completions import TIGHT, by_key, ids, made, prompts, whole
from test_generate_step import CONFIGS

from fzero import generate, models, one_process, zero_plan
from fzero.core import prng, pytree
from fzero.generate import GenerateOptions, Prompt, Sampling, completions
from fzero.generate.drafts import DraftPages


def draft_of(name="llama", seed=1, **fields):
    model = models.build(dataclasses.replace(CONFIGS[name], **fields))
    return generate.Draft(model, models.init_params(model, prng.key(seed), torch.float64))


@pytest.mark.parametrize(
    ("name", "options", "temperature"),
    [
        ("gpt2", {"rows": 3}, 0.8),
        ("llama", TIGHT, 0.0),
        pytest.param("llama", {**TIGHT, "prefixes": False}, 0.8, marks=pytest.mark.slow),
        pytest.param("gpt2", TIGHT, 0.8, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_without_and_equal_weights_are_always_right(name, options, temperature):
    """With chunks of prompts, preemption, and pages that are shared, freed and used again."""
    model, params = made("llama")
    wanted = prompts(n=2, temperature=temperature, min_tokens=3, repetition=1.2)
    expected = by_key(completions(model, params, wanted))
    out = completions(model, params, wanted, options=GenerateOptions(guesses=3, draft=draft_of(name), **options))
    assert {key: c.ids for key, c in by_key(out).items()} == {key: c.ids for key, c in expected.items()}
    verified, right = out.guesses
    assert verified > 25 and (right == verified) == (name == "llama")


def test_guesses_are_what_the_draft_says_of_the_whole_text(monkeypatch):
    """Of a draft that is right at times, so that wrong guesses are behind and ahead of right ones."""
    model, params = made("llama")
    noise = prng.key(9)
    near = pytree.map(lambda leaf: leaf + 0.03 * prng.normal(noise, leaf.shape, dtype=leaf.dtype), params)
    draft, guess, count = generate.Draft(model, near), DraftPages.guess, 0

    def checked(self, rows, *options):
        nonlocal count
        guesses = guess(self, rows, *options)
        for row in rows:
            drawn = row.draw_row(())
            text = [*drawn.prompt, *drawn.output]
            for token in guesses.get(row.row.number, ()):
                count += 1
                assert token == whole(model, near, text)[-1].argmax()
                text.append(token)
        return guesses

    monkeypatch.setattr(DraftPages, "guess", checked)
    options = GenerateOptions(guesses=3, draft=draft, rows=3, tokens=12, page_tokens=1, pages=60)
    out = completions(model, params, prompts(temperature=0.0), options=options)
    assert len(list(out)) == 5
    verified, right = out.guesses
    assert 3 < right < verified - 3 and count >= verified


def second_head(model, params, text, count):
    """What DeepSeek's second head says of a text, from a full pass without pages: one token, and those behind it."""
    ctx, tokens = models.Ctx(dtype=torch.float64), torch.tensor([text])
    state, number = model.embed(params, {"tokens": tokens[:, :-1]}, ctx), 0
    for name, depth in (("blocks_dense", model.config.n_dense), ("blocks_experts", model.config.n_layers)):
        while number < depth:
            first = 0 if name == "blocks_dense" else model.config.n_dense
            layer = pytree.map(lambda leaf, i=number - first: leaf[i], params[name])
            state = model.block[name](layer, state, ctx._replace(layer=torch.tensor(number)))
            number += 1
    out, head = [], {**params["head"], "norm": params["head"]["norm_mtp"]}
    x, layer = state["x"], pytree.map(lambda leaf: leaf[0], params["blocks_mtp"])
    for _ in range(count):
        behind = {**model.embed(params, {"tokens": tokens[:, 1:]}, ctx), "x": x}
        behind = model.join["blocks_mtp"](params, behind, {"tokens": tokens[:, 1:]}, ctx)
        behind = model.block["blocks_mtp"](layer, behind, ctx._replace(layer=torch.tensor(number)))
        logits = model.logits({**params, "head": head}, {"x": behind["x"]}, ctx)
        out.append(int(logits[0, -1].argmax()))
        x = torch.cat((x, behind["x"][:, -1:]), 1)
        tokens = torch.cat((tokens, torch.tensor([out[-1:]])), 1)
    return out


@pytest.mark.parametrize(
    "sizes",
    [
        {**TIGHT, "pages": 16},
        pytest.param({"rows": 3, "page_tokens": 2}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "wide"],
)
def test_deepseeks_second_head_guesses_as_in_training(sizes, monkeypatch):
    """In chunks of prompts, behind wrong guesses, after preemption."""
    model = models.build(dataclasses.replace(CONFIGS["deepseek"], n_mtp=1))
    params = models.init_params(model, prng.key(1), torch.float64)
    guess, count = DraftPages.guess, 0

    def checked(self, rows, *options):
        nonlocal count
        guesses = guess(self, rows, *options)
        for row in rows:
            if found := guesses.get(row.row.number, ()):
                drawn = row.draw_row(())
                count += 1
                assert list(found) == second_head(model, params, [*drawn.prompt, *drawn.output], len(found))
        return guesses

    wanted = prompts(temperature=0.0)
    expected = {key: c.ids for key, c in by_key(completions(model, params, wanted)).items()}
    monkeypatch.setattr(DraftPages, "guess", checked)
    options = GenerateOptions(guesses=2, draft=generate.Draft(model, params, mtp=True), prefixes=False, **sizes)
    out = completions(model, params, wanted, options=options)
    assert {key: c.ids for key, c in by_key(out).items()} == expected and out.guesses[0] > 9 < count


@pytest.mark.parametrize(("page_tokens", "pages"), [(1, 24), (5, 5), (16, 32)])  # as many as are needed, and more
def test_steps_are_as_few_as_guesses_allow(page_tokens, pages):
    model, params = made("llama")
    steps = []
    options = GenerateOptions(guesses=4, draft=draft_of(), page_tokens=page_tokens, pages=pages)
    calls = {"options": options, "on_step": lambda tokens, pages: steps.append(tokens)}
    (c,) = out = completions(model, params, [Prompt(ids(7), Sampling(max_tokens=18))], **calls)
    assert steps == [7, 5, 5, 5, 2] and out.guesses == (13, 13) and len(c.ids) == 18


@pytest.mark.slow
def test_texts_have_the_frequencies_of_an_enumeration():
    """All 27 texts of three tokens of three, by the probabilities of full passes."""
    model = models.build(dataclasses.replace(CONFIGS["llama"], vocab_size=3))
    params, draft = models.init_params(model, prng.key(1), torch.float64), draft_of("gpt2", vocab_size=3)
    options, count = GenerateOptions(guesses=2, draft=draft, rows=600, tokens=1800), 600
    out = completions(model, params, [Prompt((1,), Sampling(0.8, max_tokens=3, n=count))], options=options)
    frequencies = collections.Counter(c.ids for c in out)
    verified, right = out.guesses
    assert verified == count and 0.2 * verified < right < 0.8 * verified
    chi = 0.0
    for text in itertools.product(range(3), repeat=3):
        logits = models.logits(model, params, {"tokens": torch.tensor([[1, *text]])}, models.Ctx(dtype=torch.float64))
        probabilities = (logits[0, :3] / 0.8).softmax(-1)
        expected = count * math.prod(float(probabilities[i, token]) for i, token in enumerate(text))
        chi += (frequencies[text] - expected) ** 2 / expected
    assert chi < 54.1  # one in a thousand, of 26 degrees of freedom


def test_a_cache_of_another_draft_gives_none_of_its_prefixes():
    model, params = made("llama")
    sizes = {"guesses": 3, "page_tokens": 4}
    options = [GenerateOptions(**sizes, draft=draft) for draft in (draft_of(), draft_of("llama", 2))]
    prompt, computed, steps = Prompt(ids(22), Sampling(0.0, max_tokens=9)), [], []
    cache = generate.prefix_cache(model, params, 40, options=options[0])
    for option in (options[1], options[0], options[0]):
        first = len(steps)
        calls = {"options": option, "cache": cache, "on_step": lambda tokens, pages: steps.append(tokens)}
        out = completions(model, params, [prompt], **calls)
        assert len(list(out)) == 1
        cache, (verified, right) = out.cache, out.guesses
        computed.append((steps[first], verified == right))
    assert computed == [(22, False), (22, True), (2, True)]
    with pytest.raises(ValueError, match=r"the cache is of pages with a draft's pages .*, and this call needs None"):
        completions(model, params, [prompt], options=GenerateOptions(page_tokens=4), cache=cache)


def test_a_guess_that_ends_a_text_is_the_last():
    model, params = made("llama")
    (plain,) = completions(model, params, [Prompt(ids(5), Sampling(max_tokens=12))])
    steps, options = [], GenerateOptions(guesses=8, draft=draft_of(), ends=(plain.ids[3],))
    calls = {"options": options, "on_step": lambda tokens, pages: steps.append(tokens)}
    (c,) = out = completions(model, params, [Prompt(ids(5), Sampling(max_tokens=12))], **calls)
    assert c.ids == plain.ids[:4] and out.guesses == (3, 3) and steps == [5, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft": lambda: draft_of(vocab_size=60)},
            "the draft model has 60 ids and the model 61; give one of the same",
        ),
        ({"draft": lambda: draft_of(max_len=20)}, "the draft model has max_len=20, and the longest text may have 26"),
        ({"draft": draft_of, "guesses": 0}, "guesses is 0, and draft guesses"),
        ({"draft": lambda: draft_of()._replace(mtp=True)}, "the draft is a second head .mtp., which must be that"),
        ({"draft": draft_of, "guess": generate.lookup}, "guess and draft are there; give one of them"),
    ],
)
def test_a_draft_that_cannot_guess_is_refused(options, message):
    model, params = made("llama")
    with pytest.raises(ValueError, match=message):
        options = GenerateOptions(**{"guesses": 3, **options, "draft": options["draft"]()})
        completions(model, params, prompts(), options=options)


def test_a_draft_without_numbers_is_named():
    model, params = made("llama")
    draft = draft_of()
    draft.params["head"]["norm"]["scale"].fill_(torch.nan)
    with pytest.raises(ValueError, match="the draft model: prompt 0, sample 0, token 1: the model gives NaN"):
        list(completions(model, params, prompts(), options=GenerateOptions(guesses=3, draft=draft)))


def weights_of(name="llama", **fields):
    model = models.build(dataclasses.replace(CONFIGS[name], **fields))
    return models.init_params(model, prng.key(1), torch.float64)


def with_leaf(value):
    params = weights_of()
    params["head"]["norm"]["scale"] = value
    return params


OTHER_WEIGHTS = {
    "family": (lambda: weights_of("gpt2"), "missing blocks/norm_1/scale, "),
    "width": (lambda: weights_of(d_model=32), r"embed/tokens has shape \[61, 32\]; the plan's model has \[61, 16\]"),
    "depth": (lambda: weights_of(n_layers=3), r"blocks/norm_1/scale has shape \[3, 16\]; .* has \[2, 16\]"),
    "missing": (lambda: weights_of() | {"head": {"w": torch.zeros(61, 16)}}, "tree: missing head/norm/scale$"),
    "integers": (
        lambda: with_leaf(torch.ones(16, dtype=torch.int32)),
        "head/norm/scale is torch.int32; .* has torch",
    ),
    "no tensor": (lambda: with_leaf(3.0), "head/norm/scale is 3.0; it must be a tensor"),
}


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weights_of_another_model_are_refused_by_each_function_before_it_computes(name):
    model, make, message = models.build(CONFIGS["llama"]), *OTHER_WEIGHTS[name]
    params, plan, texts = make(), zero_plan(0, model, one_process()), prompts()
    arguments = {
        "completions": (texts,),
        "prefix_cache": (4,),
        "score_continuations": ([generate.Continuation((1,), (2,))],),
        "mismatch": (texts, ()),
    }
    functions = {n: f for n in generate.__all__ if inspect.isfunction(f := getattr(generate, n))}
    functions = {n: f for n, f in functions.items() if "params" in inspect.signature(f).parameters}
    calls = [lambda n=n, f=f: f(model, params, *arguments[n]) for n, f in functions.items()]
    assert functions.keys() == arguments.keys()
    options = GenerateOptions(guesses=3, draft=generate.Draft(model, params))
    calls += [lambda: completions(model, weights_of(), texts, options=options)]
    calls += [lambda: generate.make_step(model, plan)(params, generate.page_spec(model, plan, 1).zeros(), batch)]
    batch = generate.StepBatch.of_rows([([1], 0, [0])], [1], page_tokens=16)
    for call in calls:
        with pytest.raises(ValueError, match="parameters are of another model: .*" + message):
            call()
    with pytest.raises(ValueError, match=r"the plan is of another model: .* missing blocks/moe/router"):
        completions(model, params, texts, plan=zero_plan(0, models.build(CONFIGS["moe"]), one_process()))
