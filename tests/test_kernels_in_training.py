"""A training step takes its kernels from the registry: other forms, the same losses; here every Triton kernel that a
step has."""

import pytest
import torch
from kernel_laws import DEVICE

import fzero
from fzero import models, optim
from fzero.core import observe, pytree
from fzero.kernels import Kernels, registry

SIZES = {"vocab_size": 37, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24}
MODELS = {
    "gpt2": models.GPT2Config(**SIZES),
    "llama, dropout": models.LlamaConfig(**SIZES, n_kv_heads=1, dropout=0.25),
    "moe": models.MoEConfig(**SIZES, n_kv_heads=1, n_experts=4),
}


def run(config, kernels, steps):
    """(losses, parameters, the forms that were taken) of some steps."""
    mesh, model = fzero.one_process(), models.build(config)
    plan, tx = fzero.zero_plan(0, model, mesh), optim.sgd(0.3, 0.9)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(kernels=kernels))
    state, losses = fzero.init_state(model, tx, plan, seed=0, device=DEVICE), []
    with observe() as used:
        for i in range(steps):
            tokens = (torch.arange(2 * 8, device=DEVICE).reshape(2, 8) * (i + 3)) % 37
            state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
            losses.append(float(metrics.loss))
    return torch.tensor(losses), state.params, used


@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=[pytest.mark.slow] * (name == "moe"), id=name) for name, config in MODELS.items()],
)
def test_every_triton_kernel_of_a_step_gives_the_losses_of_the_references(config):
    expected, params, used = run(config, "reference", 2)
    assert set().union(*used.values()) == {"reference"}
    kernels = [name for name in used if any(form.name == "triton" for form in registry.op(name).forms)]
    losses, ours, forms = run(config, ",".join(f"{name}=triton" for name in kernels), 2)
    assert forms == {name: {"triton" if name in kernels else "reference"} for name in used} and len(kernels) >= 4, forms
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0.0)
    for name, leaf in pytree.named_leaves(params).items():
        # The exact gradient of a bias of all keys is 0, so what these become is rounding alone.
        size = max(float(leaf.abs().max()), 1e-2)
        torch.testing.assert_close(pytree.named_leaves(ours)[name], leaf, rtol=0.0, atol=2e-5 * size, msg=name)


def test_kernels_turned_off_change_no_loss_beyond_rounding():
    (losses, _, used), (expected, _, off) = (
        run(MODELS["llama, dropout"], kernels, 5) for kernels in ("auto", "reference")
    )
    assert set().union(*off.values()) == {"reference"} != set().union(*used.values())
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0.0)


def test_a_wrong_choice_is_refused_when_the_step_is_made():
    model, mesh = models.build(MODELS["llama, dropout"]), fzero.one_process()
    with pytest.raises(ValueError, match="there is no operation 'atention'"):
        fzero.make_train_step(
            model, optim.sgd(0.1), fzero.zero_plan(0, model, mesh), execution=fzero.Execution(kernels="atention=triton")
        )
    assert Kernels.parse("attention=triton")["attention"] == "triton"
