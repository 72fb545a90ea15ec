"""A mixture of experts of a dense checkpoint: at first it computes what the dense model does."""

import pytest
import torch
from close import assert_close, assert_same

import fzero
from fzero import models, optim
from fzero.checkpoint import huggingface
from fzero.core import prng, pytree
from fzero.run import weights

CONFIGS = {
    "llama": models.LlamaConfig(61, 64, 16, 2, 2, 1, 24, init_std=0.3),
    "qwen3": models.LlamaConfig(61, 64, 16, 2, 2, 1, 24, head_dim=12, qk_norm=True, tied=True, init_std=0.3),
}
TOKENS = torch.arange(24).reshape(2, 12) % 61


def dense(name, folder, dtype=torch.float64):
    config = CONFIGS[name]
    params = models.init_params(models.build(config), prng.key(1), dtype)
    huggingface.save_hf(folder, config, params)
    return config, params


def logits(model, params):
    return models.logits(model, params, {"tokens": TOKENS}, models.Ctx(dtype=torch.float64))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_mixture_computes_what_the_dense_model_does(name, tmp_path, fz):
    config, params = dense(name, tmp_path / "dense")
    said = fz("import", tmp_path / "dense", "--out", tmp_path / "run", "--upcycle", "experts=4,top=2")
    assert said[0] == 0 and "made 4 experts of each layer, of which a token uses 2" in said[1], said
    made = weights.load(tmp_path / "run")
    assert (made.config.model.n_experts, made.config.model.top_k) == (4, 2)
    expected, got = logits(models.build(config), params), logits(made.model, made.params)
    assert_close(got, expected, rtol=1e-10, atol=1e-12)
    for leaf in ("w_gate", "w_up", "w_down"):
        for expert in range(4):
            assert_same(made.params["blocks"]["moe"][leaf][:, expert], params["blocks"]["mlp"][leaf])
    router = made.params["blocks"]["moe"]["router"]
    assert 0.2 < float(router.std()) < 0.4 and len(torch.unique(router)) == router.numel()
    # Trained, the experts part: each had other tokens.
    tx = optim.sgd(0.1)
    plan = fzero.zero_plan(0, made.model, fzero.one_process(), policy="fp32")
    state = fzero.init_state(pytree.map(lambda leaf: leaf.float(), made.params), tx, plan, seed=0)
    batch = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    state, metrics = fzero.make_train_step(made.model, tx, plan)(state, batch)
    down = state.params["blocks"]["moe"]["w_down"]
    assert torch.isfinite(metrics.loss) and not torch.equal(down[:, 0], down[:, 1])


BAD = {
    "experts=8": "it has to say both",
    "experts=8,top=9": "top is 9; it must be in [1, experts = 8]",
    "experts=1,top=1": "experts is 1; a mixture has 2 at least",
    "experts=8,tops=2": "'tops=2' is wrong; write experts=8,top=2",
    "experts=-8,top=2": "'experts=-8' is wrong",
    "": "'' is wrong",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_number_of_experts_is_one_line(text, tmp_path, fz):
    code, _, error = fz("import", tmp_path, "--out", tmp_path / "run", "--upcycle", text)
    assert code == 2 and error.count("\n") == 1 and BAD[text] in error, error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ("gpt2", "gemma"))
def test_a_model_that_no_mixture_is_made_of_is_one_line(name, tmp_path, fz):
    made = {
        "gpt2": models.GPT2Config(vocab_size=61, max_len=32, d_model=16, n_layers=2, n_heads=2, d_ff=32),
        "gemma": models.LlamaConfig(61, 64, 16, 2, 2, 1, 24, norms="out", qk_norm=True, wide_qk_norm=True),
    }
    said = {"gpt2": "the model is a GPT2Config", "gemma": "norms is 'out'; a model with experts has 'in' only"}
    huggingface.save_hf(tmp_path / "dense", made[name], models.init_params(models.build(made[name]), prng.key(0)))
    code, _, error = fz("import", tmp_path / "dense", "--out", tmp_path / "run", "--upcycle", "experts=4,top=2")
    assert code == 2 and error.count("\n") == 1 and said[name] in error, error
    assert not (tmp_path / "run").exists()
