"""Completions are the draws of full forward passes, whatever runs beside them."""

import math
import random

import pytest
import ranks
import torch
from close import assert_close
from test_generate_step import CONFIGS

import fzero
from fzero import generate, models, one_process, optim, zero_plan
from fzero.core import prng
from fzero.generate import GenerateOptions, Prompt, Sampling, completions

NAMES = ("gpt2", "moe", "gemma", "deepseek", "mlp")
TIGHT = {"rows": 2, "tokens": 5, "page_tokens": 4, "pages": 12}  # chunks, waiting, preemption


def made(name):
    model = models.build(CONFIGS[name])
    return model, models.init_params(model, prng.key(1), torch.float64)


def ids(n, seed=3):
    return tuple(prng.permutation(prng.key(seed), 61, torch.arange(n)).tolist())


def prompts(**sampling):
    options = {"temperature": 0.8, "max_tokens": 9} | sampling
    texts = [ids(5), ids(17), ids(17)[:12] + ids(4, 9), ids(1, 5), ids(17)]
    return [Prompt(text, Sampling(**options, seed=i % 2), number=i, log_probs=i != 1) for i, text in enumerate(texts)]


def by_key(made_completions):
    return {(c.number, c.sample): c for c in made_completions}


def whole(model, params, text):
    """The log-probs [T, V] of a full forward pass, without pages."""
    logits = models.logits(model, params, {"tokens": torch.tensor([text])}, models.Ctx(dtype=torch.float64))[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_a_full_pass_and_greedy_is_its_largest(name):
    model, params = made(name)
    for completion in completions(model, params, prompts(temperature=0.0), options=GenerateOptions(**TIGHT)):
        prompt = prompts()[completion.number]
        text = [*prompt.ids, *completion.ids]
        full = whole(model, params, text)
        n = len(prompt.ids)
        assert list(completion.ids) == full[n - 1 : -1].argmax(-1).tolist()
        expected = full[:-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        assert_close(torch.tensor(completion.log_probs).double(), expected[n - 1 :], rtol=1e-6)
        if prompt.log_probs and n > 1:
            assert_close(torch.tensor(completion.prompt_log_probs).double(), expected[: n - 1], rtol=1e-6)
        assert completion.finish == "length" and len(completion.ids) == 9


@pytest.mark.parametrize(
    "name", ["mlp", "deepseek", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "moe", "gemma"))]
)
def test_what_is_drawn_depends_on_no_batch(name):
    model, params = made(name)
    wanted = prompts(n=2)
    expected = by_key(completions(model, params, wanted))
    assert len(expected) == 10 and len({c.ids for c in expected.values()}) > 5
    for options in ({"guesses": 3, **TIGHT}, {"prefixes": False, "rows": 1}):
        out = by_key(completions(model, params, wanted[::-1], options=GenerateOptions(**options)))
        assert {key: c.ids for key, c in out.items()} == {key: c.ids for key, c in expected.items()}
        for key, c in out.items():
            assert_close(torch.tensor(c.log_probs), torch.tensor(expected[key].log_probs), rtol=1e-6)
            assert_close(torch.tensor(c.prompt_log_probs), torch.tensor(expected[key].prompt_log_probs), rtol=1e-6)
    (alone,) = by_key(
        completions(model, params, [Prompt(wanted[2].ids, Sampling(0.8, max_tokens=9), number=2)])
    ).values()
    assert alone.ids == expected[2, 0].ids


@pytest.mark.parametrize("seed", [10, 25, 26])
def test_log_probs_of_prompts_are_right_where_their_pages_are_used_again(seed):
    """In few pages: those with numbers of other prompts beside them, and the first token of a page that was cached."""
    model, params = made("llama")
    rng, wanted = random.Random(seed), []
    for i in range(rng.randint(2, 7)):
        text = ids(12)[: rng.choice((4, 7, 8, 9, 12))] + ids(rng.choice((0, 0, 1, 5)), rng.randint(0, 3))
        sampling = Sampling(0.0, max_tokens=rng.randint(1, 4))
        wanted.append(Prompt(text, sampling, number=i, log_probs=rng.random() < 0.8))
    most = max(-(-(len(prompt.ids) + prompt.sampling.max_tokens) // 4) for prompt in wanted)
    sizes = {"rows": rng.choice((1, 2, 3)), "tokens": rng.choice((4, 8, 16)), "pages": most + rng.randint(0, 3)}
    for completion in completions(model, params, wanted, options=GenerateOptions(**sizes, page_tokens=4)):
        prompt = wanted[completion.number]
        if prompt.log_probs:
            expected = whole(model, params, prompt.ids)[:-1].gather(-1, torch.tensor(prompt.ids[1:])[:, None])[:, 0]
            assert_close(torch.tensor(completion.prompt_log_probs).double(), expected, rtol=1e-6)


def test_guesses_are_verified_many_at_a_time_and_change_no_text():
    model, params = made("llama")
    loop = Prompt((1, 2, 3, 4) * 4, Sampling(0.0, max_tokens=20))
    steps = []

    def perfect(text, most):
        return plain.ids[len(text) - 16 :][:most]

    (plain,) = completions(model, params, [loop])
    options = GenerateOptions(guesses=4, guess=perfect)
    (guessed,) = completions(model, params, [loop], options=options, on_token=lambda *token: steps.append(token))
    assert guessed.ids == plain.ids and len(steps) == 20
    (wrong,) = completions(
        model, params, [loop], options=GenerateOptions(guesses=4, guess=lambda text, most: [60] * most)
    )
    assert wrong.ids == plain.ids


def test_lookup_finds_what_followed_last():
    assert generate.lookup([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert generate.lookup([7, 1, 2, 7], 5) == [1, 2, 7]
    assert generate.lookup([1, 2, 3], 4) == [] and generate.lookup([], 4) == []


@pytest.mark.parametrize("page_tokens", [1, 2, 3])
def test_log_probs_of_shared_prompts_are_right_for_pages_of_any_size(page_tokens):
    model, params = made("llama")
    wanted = [Prompt(ids(6), Sampling(0.0, max_tokens=2), number=i, log_probs=True) for i in range(3)]
    for c in completions(model, params, wanted, options=GenerateOptions(page_tokens=page_tokens, rows=2)):
        expected = whole(model, params, ids(6))[:-1].gather(-1, torch.tensor(ids(6)[1:])[:, None])[:, 0]
        assert_close(torch.tensor(c.prompt_log_probs).double(), expected, rtol=1e-6)


def test_a_prompt_with_nothing_left_to_draw_is_named():
    model, params = made("mlp")
    nothing = Sampling(0.5, max_tokens=2, min_tokens=1, stop_ids=tuple(range(61)))
    wanted = [Prompt((1,), Sampling(max_tokens=2)), Prompt((2,), nothing, number=7)]
    with pytest.raises(ValueError, match=r"prompt 7, sample 0, token 0: its mask, bias and min_tokens leave no token"):
        list(completions(model, params, wanted))


def test_ids_that_end_a_text_end_it():
    model, params = made("llama")
    (plain,) = completions(model, params, [Prompt(ids(5), Sampling(max_tokens=12))])
    end = plain.ids[4]
    stop = plain.ids.index(end) + 1
    for sampling, options in (
        (Sampling(max_tokens=12, stop_ids=(end,)), GenerateOptions()),
        (Sampling(max_tokens=12), GenerateOptions(ends=(60 if end != 60 else 59, end))),
    ):
        (c,) = completions(model, params, [Prompt(ids(5), sampling)], options=options)
        assert c.ids == plain.ids[:stop] and c.finish == "stop id"
    (c,) = completions(
        model, params, [Prompt(ids(5), Sampling(max_tokens=12, ignore_eos=True))], options=GenerateOptions(ends=(end,))
    )
    assert c.ids == plain.ids and c.finish == "length"


def test_a_stop_text_ends_a_text_and_all_of_it_is_streamed():
    model, params = made("llama")

    def decode(text):
        return "".join(chr(65 + token) for token in text)

    (plain,) = completions(
        model, params, [Prompt(ids(5), Sampling(max_tokens=12))], options=GenerateOptions(decode=decode)
    )
    assert plain.text == decode(plain.ids)
    stop, pieces = plain.text[4:6], []
    (c,) = completions(
        model,
        params,
        [Prompt(ids(5), Sampling(max_tokens=12, stop=(stop, "never")))],
        options=GenerateOptions(decode=decode, guesses=2),
        on_token=lambda number, sample, token, text: pieces.append(text),
    )
    assert c.text == plain.text[: plain.text.index(stop)] == "".join(pieces) and c.finish == "stop text"
    assert len(c.ids) == plain.text.index(stop) + 2 == len(c.log_probs)
    with pytest.raises(ValueError, match="prompt 0 has stop texts, and nothing says what the text of ids is"):
        completions(model, params, [Prompt(ids(5), Sampling(stop=("x",)))])


def test_the_whole_room_of_the_model_is_used_without_a_limit():
    model, params = made("gpt2")
    (c,) = completions(model, params, [Prompt(ids(30))])
    assert len(c.ids) == 10 and c.finish == "length"


def test_experts_with_a_capacity_drop_nothing_while_generating():
    config = models.MoEConfig(61, 40, 16, 2, 4, 2, 24, init_std=0.3, n_experts=4, top_k=2, capacity_factor=0.5)
    model = models.build(config)
    params = models.init_params(model, prng.key(1), torch.float64)
    wanted = [Prompt(ids(9, i), Sampling(max_tokens=5), number=i) for i in range(4)]
    batched = by_key(completions(model, params, wanted))
    for prompt in wanted:
        (alone,) = completions(model, params, [prompt])
        assert alone.ids == batched[prompt.number, 0].ids


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (Prompt(()), {}, "prompt 0 has no tokens; give at least one"),
        (Prompt((61,)), {}, "prompt 0 has the token 61; the model has the ids 0 to 60"),
        (Prompt((5,)), {"vocab_size": 5}, "prompt 0 has the token 5; the model has the ids 0 to 4"),
        (Prompt((-1,)), {}, "prompt 0 has the token -1"),
        (
            Prompt((1,) * 30, Sampling(max_tokens=20)),
            {},
            "30 tokens and 20 more do not fit max_len=40; ask for at most 10",
        ),
        (Prompt((1,) * 40), {}, "40 tokens and 1 more do not fit max_len=40; shorten it"),
        (Prompt((1,) * 20, Sampling(max_tokens=20)), {"pages": 2}, "need 3 pages of 16; there are 2"),
        (Prompt((1,)), {"rows": 0}, "rows"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompt, options, message):
    model, params = made("llama")
    with pytest.raises(ValueError, match=message):
        list(completions(model, params, [prompt], options=GenerateOptions(**options)))


def test_two_prompts_of_a_number_are_refused():
    model, params = made("mlp")
    with pytest.raises(ValueError, match="two prompts have the number 0"):
        completions(model, params, [Prompt((1,)), Prompt((2,))])


def sharded(mesh, name, stage, **options):
    """The completions that a rank yields, from the parameters of a training state at rest."""
    model = models.build(CONFIGS[name])
    plan = zero_plan(stage, model, mesh)
    state = fzero.init_state(model, optim.sgd(0.1), plan, seed=0)
    out = completions(model, state.params, prompts(n=2), plan=plan, options=GenerateOptions(**TIGHT, **options))
    return {(c.number, c.sample): (c.ids, c.log_probs, c.prompt_log_probs) for c in out}


@pytest.mark.parametrize(
    ("sizes", "name", "stage"),
    [
        ({"dp": 2}, "llama", 3),
        pytest.param({"tp": 2}, "gemma", 1, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "deepseek", 3, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, "moe", 2, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "rp": 2}, "gpt2", 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_share_prompts_out_and_draw_what_one_process_does(sizes, name, stage):
    expected = sharded(one_process(), name, 0)
    by_rank = ranks.run(math.prod(sizes.values()), sharded, name, stage, mesh=sizes)
    assert sum(map(len, by_rank)) == len(expected) * sizes.get("tp", 1)
    for part in by_rank:
        for key, (drawn, *log_probs) in part.items():
            assert drawn == expected[key][0]
            for got, wanted in zip(log_probs, expected[key][1:]):
                assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4)


def test_canonical_log_probs_are_the_same_bits_on_ranks_of_dp():
    expected = exact(one_process(), 0)
    by_rank = ranks.run(2, exact, 3)
    assert len(by_rank[0]) == len(by_rank[1]) == 5 and {**by_rank[0], **by_rank[1]} == expected


def exact(mesh, stage):
    return sharded(mesh, "llama", stage, kernels="canonical")
