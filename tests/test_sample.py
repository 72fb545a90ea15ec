"""Generation with a KV cache is the full forward pass, position by position."""

import continued
import pytest
import torch
from law_cases import config_of

from fzero import models
from fzero.core import prng
from fzero.generate import DrawRow, Sampling, draw, draw_rows

GPT2 = models.GPT2Config(vocab_size=61, max_len=24, d_model=16, n_layers=2, n_heads=2, d_ff=32, init_std=0.3)
LLAMA = models.LlamaConfig(61, 24, 16, 2, 4, 2, 24, init_std=0.3)
MOE = models.MoEConfig(61, 24, 16, 2, 4, 2, 24, init_std=0.3, n_experts=4, top_k=2)
PATTERNS = ("window:4", "local:4", "strided:3", "fixed:4:1", "bigbird:2:1:1:1:3")
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "moe": MOE,
    "mlp": models.MLPConfig(61, 24, 16, 2, 24),
    **{
        f"llama {pattern}": models.LlamaConfig(61, 24, 16, 2, 4, 2, 24, init_std=0.3, pattern=pattern)
        for pattern in PATTERNS
    },
    "gemma": config_of("gemma", vocab_size=61, max_len=24, dropout=0.0, tied=False),
    "gpt2 window:4": models.GPT2Config(61, 24, 16, 2, 2, 32, init_std=0.3, pattern="window:4"),
}


def made(name):
    model = models.build(CONFIGS[name])
    return model, models.init_params(model, prng.key(1), torch.float64)


def prompt(batch=2, length=5):
    return prng.permutation(prng.key(3), 61, torch.arange(batch * length)).reshape(batch, length)


def whole(model, params, tokens):
    """The logits of a full forward pass, without a cache."""
    return models.logits(model, params, {"tokens": tokens}, models.Ctx(dtype=torch.float64))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_generation_is_argmax_step_by_step(name):
    model, params = made(name)
    tokens = prompt()
    out = continued.whole(model, params, tokens, 12)
    expected = tokens
    for _ in range(12):
        expected = torch.cat((expected, whole(model, params, expected)[:, -1].argmax(-1)[:, None]), 1)
    assert torch.equal(out, expected)
    assert len(set(out[0, 5:].tolist())) > 1


def test_the_same_seed_writes_the_same_and_another_does_not():
    model, params = made("llama")
    draws = {"temperature": 1.0}
    first, again, other = (continued.whole(model, params, prompt(), 15, seed=seed, **draws) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    # A draw depends on its position and not on how many are asked for.
    assert torch.equal(continued.whole(model, params, prompt(), 7, **draws), first[:, :12])


def drawn(logits, **sampling):
    """The tokens of rows of logits, each of another request."""
    rows = [DrawRow(Sampling(**sampling), 0, request=i) for i in range(len(logits))]
    return draw(logits, draw_rows(rows, logits.device)).tokens


def test_top_k_and_top_p_draw_among_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(500, 4)

    def found(**cut):
        return set(drawn(logits, **cut).tolist())

    assert found() == {0, 1, 2, 3}
    assert found(top_k=2) == {0, 1} and found(top_k=9) == {0, 1, 2, 3}
    assert found(top_p=0.5) == {0} and found(top_p=0.6) == {0, 1} and found(top_p=0.9) == {0, 1, 2}


def test_ids_outside_the_tokenizer_are_not_drawn_and_eos_ends():
    model, params = made("mlp")
    tokens, hot = torch.zeros(1, 1, dtype=torch.int64), {"temperature": 50.0, "vocab_size": 3}
    (out,) = continued.rows(model, params, tokens, 20, **hot)
    assert set(out) == {0, 1, 2}
    (ended,) = continued.rows(model, params, tokens, 20, eos=[2], **hot)
    assert ended[-1] == 2 and 2 not in ended[:-1] and len(ended) < 21
    assert ended == out[: len(ended)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 20}, "5 tokens and 20 more do not fit max_len=24; ask for at most 19"),
        (
            {"tokens": torch.zeros(1, 30, dtype=torch.int64)},
            "30 tokens and 1 more do not fit max_len=24; shorten it",
        ),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, "prompt 0 has no tokens"),
        ({"tokens": torch.tensor([[61]])}, "prompt 0 has the token 61"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 0.0, "top_k": 5}, "top_k is 5 and temperature 0, which takes the likeliest"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p is 0.5 and temperature 0, which takes the likeliest"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, message):
    model, params = made("llama")
    with pytest.raises(ValueError, match=message):
        continued.rows(model, params, **{"tokens": prompt(), "n": 1, "temperature": 1.0, **change})
