"""What LoRA and QLoRA of a model of 8 billion parameters need: bytes by component are the formula's, and QLoRA fits
24 GB."""

import dataclasses

import pytest

from fzero import models, plan
from fzero.planner import closed_forms, device_for, resolve_for
from fzero.planner import plan as planning
from fzero.run import build
from fzero.run.measure import memory_check
from fzero.sharding import fake_mesh

RANK, BLOCK = 16, 64
SETTINGS = {"zero": 0, "train.batch": 1, "train.remat": "full", "precision.policy": "bf16", "data.seq_len": 2048}


def config_of(kind, gpu):
    device = device_for(gpu)
    config = resolve_for(planning.config_for("llama-8b", SETTINGS), device)
    base = models.build(config.model)
    model = models.lora(models.quantized(base, kind, BLOCK) if kind else base, RANK)
    return dataclasses.replace(config, model=model.config), device


def counted():
    """(all weights, those of attention and MLP, the elements of their factors) from the sizes alone."""
    c = models.preset("llama-8b")
    heads, kv = c.n_heads * c.key_dim, c.n_kv_heads * c.key_dim
    shapes = [(c.d_model, heads), *[(c.d_model, kv)] * 2, (heads, c.d_model)]
    shapes += [*[(c.d_model, c.d_ff)] * 2, (c.d_ff, c.d_model)]
    inside = c.n_layers * sum(a * b for a, b in shapes)
    outside = 2 * c.vocab_size * c.d_model + (2 * c.n_layers + 1) * c.d_model
    return inside + outside, inside, c.n_layers * RANK * sum(a + b for a, b in shapes)


@pytest.mark.parametrize("kind", ["", "nf4", "int8"])
def test_bytes_at_rest_are_the_formulas(kind):
    every, inside, factors = counted()
    assert every == 8_030_261_248
    bits = {"": 16, "nf4": 4 + 32 / BLOCK, "int8": 8 + 32 / BLOCK}[kind]
    state = closed_forms.first_estimate(config_of(kind, "h100")[0], {"dp": 1}, device_for("h100")).state_bytes
    assert state["params"] == inside * bits / 8 + 2 * (every - inside) + 2 * factors
    assert state["master"] == 4 * factors
    assert state["opt"] == 2 * 4 * factors + 8  # Adam's moments, and the count of steps
    assert state["grads"] == 2 * factors  # one micro-batch: nothing is summed in float32


@pytest.mark.slow
def test_qlora_of_8b_fits_a_card_of_24_gb():
    """2,048 tokens with recomputation; it needs less than LoRA, by nearly the bits of the weights."""
    _, inside, _ = counted()
    reports = {
        kind: plan(config, {"dp": 1}, gpu=device)
        for kind in ("nf4", "")
        for config, device in [config_of(kind, "4090")]
    }
    assert reports["nf4"].fits and reports["nf4"].capacity_bytes <= 24 * 2**30
    less = reports[""].peak_bytes_per_rank - reports["nf4"].peak_bytes_per_rank
    assert less == pytest.approx(inside * (2 - (0.5 + 4 / BLOCK)), rel=0.05)


def test_sums_of_gradients_are_those_of_the_factors():
    config = config_of("", "h100")[0]
    job = build.build(config, fake_mesh({"dp": 1}))
    assert memory_check.memory_needed(job).grads == 2 * counted()[2]  # of one micro-batch
