"""LoRA: begins as the base model, has the gradient that the chain rule gives, and merges back into it."""

import copy
import math
import pickle
import re

import pytest
import torch
from law_cases import F64, batch_of, config_of

import fzero
from fzero import models
from fzero.core import prng, pytree
from fzero.models import base
from fzero.sharding import Spec, match_rules

CTX = base.Ctx(dtype=F64)
TARGETS = {"gpt2": r"/(attn|mlp)/w_", "llama": r"/(attn|mlp)/w_", "moe dropless": r"/attn/w_", "mlp": r"/w_"}
every_model = pytest.mark.parametrize("kind", TARGETS)


def pair(kind, rank=2, alpha=6.0, **changes):
    model = models.build(config_of(kind, **changes))
    return model, models.lora(model, rank, alpha, TARGETS[kind])


def params_of(model, seed=1):
    return models.init_params(model, prng.key(seed), F64)


def moved(params):
    """The same with factors b that are not zero."""
    draw = lambda name, p: 0.3 * prng.normal(prng.fold_in(prng.key(9), name), p.shape, dtype=F64)  # noqa: E731
    return pytree.map_named(lambda name, p: draw(name, p) if name.endswith("_lora_b") else p, params)


def loss(model, params):
    return models.loss(model, params, batch_of(0), CTX).total


@every_model
def test_it_begins_as_the_base_model(kind):
    model, with_lora = pair(kind)
    base_params, params = params_of(model), params_of(with_lora)
    _, kept = pytree.split(params, lambda name, p: re.search(models.LORA, name) is not None)
    assert list(kept) == pytree.names(base_params)
    assert all(torch.equal(kept[name], leaf) for name, leaf in pytree.named_leaves(base_params).items())
    assert torch.equal(loss(with_lora, params), loss(model, base_params))
    assert torch.equal(
        models.logits(with_lora, params, batch_of(0), CTX), models.logits(model, base_params, batch_of(0), CTX)
    )
    assert not torch.equal(loss(with_lora, moved(params)), loss(model, base_params))


@every_model
def test_factors_stand_beside_their_weights(kind):
    model, with_lora = pair(kind)
    shapes = {name: tuple(p.shape) for name, p in pytree.named_leaves(params_of(model)).items()}
    targets = [name for name in shapes if name.startswith("blocks/") and re.search(TARGETS[kind], name)]
    assert targets
    factors, _ = pytree.split(params_of(with_lora), lambda name, p: re.search(models.LORA, name) is not None)
    expected = {}
    for name in targets:
        layers, size_in, size_out = shapes[name]
        expected |= {f"{name}_lora_a": (layers, size_in, 2), f"{name}_lora_b": (layers, 2, size_out)}
    assert {name: tuple(p.shape) for name, p in factors.items()} == expected
    assert models.num_params(with_lora) - models.num_params(model) == sum(map(math.prod, expected.values()))


def test_initial_size_of_the_factors():
    model = models.lora(models.build(models.MLPConfig(d_model=64, n_layers=8, d_ff=128)), 16, targets="w_in")
    params = params_of(model)["blocks"]
    assert abs(params["w_in_lora_a"].std().item() * math.sqrt(64) - 1) < 0.02
    assert not params["w_in_lora_b"].any() and "w_out_lora_a" not in params


@every_model
def test_gradient_of_the_factors_is_that_of_the_chain_rule(kind):
    """With W = w + s a b:  dL/da = s dL/dW bᵀ,  dL/db = s aᵀ dL/dW,  dL/dw = dL/dW."""
    model, with_lora = pair(kind)
    params = moved(params_of(with_lora))
    grads = torch.func.grad(lambda p: loss(with_lora, p))(params)
    of_base = pytree.named_leaves(torch.func.grad(lambda p: loss(model, p))(models.merge(with_lora, params)))
    named, got = pytree.named_leaves(params), pytree.named_leaves(grads)
    checked = 0
    for name, d in of_base.items():
        torch.testing.assert_close(got[name], d, rtol=1e-12, atol=1e-12)
        if f"{name}_lora_a" in named:
            a, b = named[f"{name}_lora_a"], named[f"{name}_lora_b"]
            torch.testing.assert_close(got[f"{name}_lora_a"], 3.0 * d @ b.mT, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(got[f"{name}_lora_b"], 3.0 * a.mT @ d, rtol=1e-10, atol=1e-11)
            assert got[f"{name}_lora_a"].abs().max() > 1e-3 and got[f"{name}_lora_b"].abs().max() > 1e-3
            checked += 1
    assert len(got) == len(of_base) + 2 * checked and checked


@every_model
def test_merged_parameters_are_the_base_models(kind):
    model, with_lora = pair(kind)
    params = moved(params_of(with_lora))
    merged = models.merge(with_lora, params)
    assert pytree.names(merged) == pytree.names(params_of(model))
    torch.testing.assert_close(loss(model, merged), loss(with_lora, params), rtol=1e-13, atol=0)
    for name, w in pytree.named_leaves(merged).items():
        before = pytree.named_leaves(params)
        if f"{name}_lora_a" in before:
            expected = before[name] + 3.0 * torch.einsum(
                "lir,lro->lio", before[f"{name}_lora_a"], before[f"{name}_lora_b"]
            )
            torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-13)
        else:
            assert w is before[name]


def test_merge_rounds_once_to_the_dtype_of_the_weight():
    _, model = pair("mlp")
    params = pytree.map(lambda p: p.to(torch.bfloat16), moved(params_of(model)))
    merged = models.merge(model, params)
    exact = models.merge(model, pytree.map(lambda p: p.float(), params))
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(pytree.leaves(merged), pytree.leaves(exact)))


def test_training_the_factors_alone_lowers_the_loss():
    _, model = pair("llama", dropout=0.0)
    params = params_of(model)
    factors, rest = pytree.split(params, lambda name, p: re.search(models.LORA, name) is not None)
    tx = fzero.optim.adamw(0.02)
    state, first = tx.init(factors), loss(model, params)
    value_and_grad = torch.func.grad_and_value(lambda f: loss(model, pytree.merge(f, rest, params)))
    for _ in range(10):
        grads, value = value_and_grad(factors)
        updates, state = tx.update(grads, state, factors)
        factors = fzero.optim.apply_updates(factors, updates)
    assert value < 0.9 * first


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "a", "b"),
    [
        ("llama", "blocks/attn/w_q", "[L/pp, D, R] +tp", "[L/pp, R, H/tp]"),
        ("llama", "blocks/attn/w_k", "[L/pp, D, R] +tp", "[L/pp, R, G] +tp"),  # one key/value head for two ranks
        ("llama", "blocks/attn/w_o", "[L/pp, H/tp, R]", "[L/pp, R, D] +tp"),
        ("llama", "blocks/mlp/w_gate", "[L/pp, D, R] +tp", "[L/pp, R, F/tp]"),
        ("llama", "blocks/mlp/w_down", "[L/pp, F/tp, R]", "[L/pp, R, D] +tp"),
        ("gpt2", "blocks/attn/w_v", "[L/pp, D, R] +tp", "[L/pp, R, H/tp]"),
        ("gpt2", "blocks/mlp/w_out", "[L/pp, F/tp, R]", "[L/pp, R, D] +tp"),
        ("mlp", "blocks/w_in", "[L/pp, D, R] +tp", "[L/pp, R, F/tp]"),
    ],
)
def test_specs_of_the_factors(kind, name, a, b):
    _, model = pair(kind, **({} if kind == "mlp" else {"n_heads": 2}), vocab_size=16)
    mesh = fzero.sharding.fake_mesh({"tp": 2})
    names = pytree.names(params_of(model))
    specs = {leaf: Spec.parse(text) for leaf, text in match_rules(model.rules(mesh), names).items()}
    assert specs[f"{name}_lora_a"] == Spec.parse(a) and specs[f"{name}_lora_b"] == Spec.parse(b)
    plan = fzero.zero_plan(3, model, mesh, frozen=rf"^(?!.*{models.LORA})")
    assert plan.trained(pytree.map(lambda x: 0, plan.like)).keys() == {n for n in names if re.search(models.LORA, n)}


@pytest.mark.parametrize("text", ["[L/pp, D, H/tp]", "[L/pp, H/tp, D]"])
def test_a_ranks_part_of_the_product_is_that_of_its_factors(text):
    """What a rank of tp adds to its part of w, from its parts of a and b, is its part of what is added on one
    process."""
    from fzero.models.lora import _factor_specs

    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 8, 2, generator=g, dtype=F64), torch.randn(3, 2, 6, generator=g, dtype=F64)
    specs = {"w": Spec.parse(text), **{n: Spec.parse(t) for n, t in zip("ab", _factor_specs(text))}}
    for rank in range(2):
        mesh = fzero.sharding.fake_mesh({"tp": 2}, rank=rank)
        own = fzero.optim.sharded(specs, mesh, like={"w": a @ b, "a": a, "b": b}).local
        torch.testing.assert_close(own("a", a) @ own("b", b), own("w", a @ b), rtol=1e-12, atol=1e-13)


# ---- arguments, configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": "/atn/"}, r"lora: targets '/atn/' matches no leaf of the blocks.*blocks/attn/w_q"),
        ({"targets": "embed/tokens"}, "lora: targets 'embed/tokens' matches no leaf of the blocks"),
        ({"targets": "/b_"}, r"lora: blocks/attn/b_q of shape \(3, 8\) is no weight \[L, in, out\]"),
        ({"targets": "("}, "lora: targets '\\(' is not a regular expression"),
        (
            {"rank": 0},
            r"lora: rank is 0; for blocks/attn/w_q of shape \(3, 8, 8\) it must be a whole number in \[1, 8\]",
        ),
        ({"rank": 9}, "lora: rank is 9"),
        ({"rank": 2.0}, r"lora: rank is 2\.0"),
        ({"alpha": 0.0}, r"lora: alpha is 0\.0; it must be a positive number"),
        ({"alpha": "16"}, "lora: alpha is '16'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.lora(models.build(config_of("gpt2")), **{"rank": 2, **arguments})


def test_merge_refuses_a_model_without_lora():
    model = models.build(config_of("mlp"))
    with pytest.raises(ValueError, match="merge: the model has no LoRA \\(its config is a MLPConfig\\)"):
        models.merge(model, params_of(model))


def test_configuration_reads_as_the_base_models():
    model, with_lora = pair("llama")
    config = with_lora.config
    assert (config.rank, config.alpha, config.targets, config.base) == (2, 6.0, TARGETS["llama"], model.config)
    assert (config.max_len, config.n_heads, config.key_dim) == (16, 2, 4)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config and hash(config) == hash(
        copy.copy(config)
    )
    with pytest.raises(AttributeError, match="heads"):
        _ = config.heads
