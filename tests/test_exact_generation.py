"""With kernels="canonical" the sampler's log-probs are the bits of the trainer's losses, whatever runs beside them."""

import dataclasses
import math

import pytest
import torch
from law_cases import config_of
from test_canonical_forms import pytestmark  # noqa: F401

from fzero import models
from fzero.core import prng
from fzero.generate import GenerateOptions, Prompt, Sampling, completions, mismatch
from fzero.kernels.registry import Kernels
from fzero.models import Ctx, forward

SIZES = {"vocab_size": 61, "max_len": 64, "dropout": 0.0}
CONFIGS = {
    "gpt2": models.GPT2Config(61, 64, 16, 2, 2, 32, init_std=0.3),
    "llama": models.LlamaConfig(61, 64, 32, 2, 4, 2, 40, init_std=0.3),
    "llama window:4 full": models.LlamaConfig(61, 64, 16, 2, 4, 2, 24, init_std=0.3, pattern="window:4"),
    "gemma": config_of("gemma", **SIZES, tied=False),
    "gpt-oss": dataclasses.replace(
        models.shorten(models.preset("gpt-oss-20b"), 2),
        **{"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 24, "n_experts": 4, "top_k": 2},
        **SIZES,
    ),
    "moe": models.MoEConfig(61, 64, 16, 2, 4, 2, 24, init_std=0.3, n_experts=4, top_k=2),
    "deepseek": config_of("deepseek", **SIZES, rope_scaling=models.RopeScaling(4.0, 1.0, 8.0, 16, "yarn")),
}
EXACT = GenerateOptions(kernels="canonical")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIGHT = GenerateOptions(rows=3, tokens=7, page_tokens=4, pages=14, kernels="canonical", guesses=2)


def ids(n, seed):
    return tuple(prng.permutation(prng.key(seed), 61, torch.arange(n)).tolist())


def trained(name, dtype):
    model = models.build(CONFIGS[name])
    return model, models.init_params(model, prng.key(1), DTYPES[dtype])


def trainer_losses(model, params, texts, dtype):
    """The loss of each token of texts packed as the documents of one row, by the trainer's forward pass."""
    row = [token for text in texts for token in text]
    documents = [i for i, text in enumerate(texts) for _ in text]
    targets = [token for text in texts for token in (*text[1:], 0)]
    batch = {"tokens": torch.tensor([row]), "documents": torch.tensor([documents]), "targets": torch.tensor([targets])}
    ctx = forward.prepare(model, batch, Ctx(dtype=DTYPES[dtype], kernels=Kernels.parse("canonical")))
    losses = []

    def per_token(*args, **options):
        out = original(*args, **{**options, "per_token": True})
        losses.append(out[1])
        return out[0]

    original, forward.linear_cross_entropy = forward.linear_cross_entropy, per_token
    try:
        x = forward.transform(model, params, batch, ctx)
        model.head(params, x, batch, ctx)
    finally:
        forward.linear_cross_entropy = original
    return [part[:-1].tolist() for part in losses[0].split([len(text) for text in texts])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_the_bits_of_the_trainers_losses(name, dtype):
    model, params = trained(name, dtype)
    shared = ids(11, 3)
    prompts = [
        Prompt(text, Sampling(0.9, max_tokens=6), number=i, log_probs=True)
        for i, text in enumerate([ids(23, 1), shared + ids(5, 4), ids(2, 5), shared + ids(9, 6), ids(33, 7)])
    ]
    made = {c.number: c for c in completions(model, params, prompts, options=TIGHT)}
    again = {
        c.number: c for c in completions(model, params, prompts[::-1], options=GenerateOptions(kernels="canonical"))
    }
    assert made == again
    texts = [(*prompt.ids, *made[prompt.number].ids) for prompt in prompts]
    for order in (texts, texts[::-1]):
        expected = dict(zip(order, trainer_losses(model, params, order, dtype)))
        for prompt, text in zip(prompts, texts):
            c = made[prompt.number]
            assert [-x for x in (*c.prompt_log_probs, *c.log_probs)] == expected[text]
    (alone,) = completions(model, params, prompts[3:4], options=EXACT)
    assert alone == made[3] and math.isfinite(sum(alone.log_probs))


@pytest.mark.parametrize("other", ["auto", "canonical,rms_norm=reference", "canonical,paged_attention=reference"])
def test_one_operation_of_another_form_is_found(other):
    """The comparison sees the last bit."""
    model, params = trained("llama", "fp32")
    prompts = [Prompt(ids(23, i), Sampling(0.9, max_tokens=9), number=i) for i in range(4)]
    exact, different = (
        list(completions(model, params, prompts, options=GenerateOptions(kernels=kernels)))
        for kernels in ("canonical", other)
    )
    assert [c.log_probs for c in exact] != [c.log_probs for c in different]


def test_the_mismatch_is_none_with_canonical_kernels_and_measured_without():
    model, params = trained("llama", "bf16")
    prompts = [Prompt(ids(9 + i, i), Sampling(0.9, max_tokens=8), number=i) for i in range(3)]
    exact = mismatch(model, params, prompts, completions(model, params, prompts, options=EXACT), kernels="canonical")
    assert exact == (24, 24, 0.0, 0.0, (1.0, 1.0))
    made = list(completions(model, params, prompts, options=EXACT))
    made[1] = made[1]._replace(log_probs=(made[1].log_probs[0] + 0.25, *made[1].log_probs[1:]))
    shifted = mismatch(model, params, prompts, made, kernels="canonical")
    assert (shifted.equal, shifted.largest, shifted.mean) == (23, 0.25, pytest.approx(0.25 / 24))
    assert shifted.ratios == (1.0, pytest.approx(math.exp(0.25)))
    fast = mismatch(model, params, prompts, completions(model, params, prompts))
    assert 0 < fast.largest < 0.2 and fast.equal < 24
    with pytest.raises(ValueError, match="there is a completion of prompt 2, which is not among the prompts"):
        mismatch(model, params, prompts[:2], made)
