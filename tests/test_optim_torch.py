"""Optimizers against torch.optim, optax and the published equations: 20 steps in float64 within 1e-12."""

import math

import numpy as np
import pytest
import torch

from fzero import optim
from fzero.core import pytree

F64 = torch.float64
STEPS = 20
SHAPES = {"a": (5, 3), "b": (4,), "c": (2, 3, 4), "d": (3, 6), "s": ()}
MATRICES = {"tall": (8, 5), "wide": (5, 8), "square": (6, 6)}


def make_params(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}


def gradient(name, p, step):
    """Noise and a part that follows the param, so that an error in one step shows in the next."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return 0.3 * p + torch.randn(p.shape, generator=generator, dtype=F64)


def ours(tx, params, form="update"):
    params = {n: p.clone() for n, p in params.items()}
    state = tx.init(params)
    for step in range(STEPS):
        grads = {n: gradient(n, p, step) for n, p in params.items()}
        if form == "apply":
            params, state = optim.apply_in_place(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params


def torchs(make, params):
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    optimizer = make(list(leaves.values()))
    for step in range(STEPS):
        for n, p in leaves.items():
            p.grad = gradient(n, p.detach(), step)
        optimizer.step()
    return {n: p.detach() for n, p in leaves.items()}


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


both_forms = pytest.mark.parametrize("form", ["update", "apply"])


# ---- torch.optim ----------------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd(momentum, nesterov, weight_decay, form):
    options = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": weight_decay}
    params = make_params()
    expected = torchs(lambda p: torch.optim.SGD(p, lr=0.05, **options), params)
    assert_close(ours(optim.sgd(0.05, **options), params, form), expected)


@both_forms
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("tx", "reference"), [(optim.adam, torch.optim.Adam), (optim.adamw, torch.optim.AdamW)], ids=["adam", "adamw"]
)
def test_adam_and_adamw(tx, reference, weight_decay, form):
    params = make_params()
    options = {"lr": 0.03, "eps": 1e-6, "weight_decay": weight_decay}
    expected = torchs(lambda p: reference(p, betas=(0.8, 0.95), **options), params)
    assert_close(ours(tx(b1=0.8, b2=0.95, **options), params, form), expected)


@both_forms
@pytest.mark.parametrize("make", ["adam", "adamw", "sgd", "adafactor"])
def test_default_arguments_are_those_of_torch(make, form):
    params = make_params()
    reference = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}[make]
    arguments = (1e-3,) if make == "sgd" else ()
    expected = torchs(lambda p: getattr(torch.optim, reference)(p), params)
    assert_close(ours(getattr(optim, make)(*arguments), params, form), expected)


@both_forms
@pytest.mark.each_value
@pytest.mark.parametrize("lr", [0.5, 0.01])
@pytest.mark.parametrize(("eps1", "clip"), [(None, 1.0), (0.05, 1.0), (None, 1.5)])
def test_adafactor(lr, eps1, clip, form):
    """A learning rate above and below 1/√t; a leaf [E, D, F] is factored over its last two dims."""
    params = make_params()
    expected = torchs(
        lambda p: torch.optim.Adafactor(p, lr=lr, beta2_decay=-0.7, eps=(eps1, 1e-3), d=clip, weight_decay=0.1), params
    )
    tx = optim.adafactor(lr, beta2_decay=-0.7, eps1=eps1, clip=clip, weight_decay=0.1)
    assert_close(ours(tx, params, form), expected)


@both_forms
@pytest.mark.each_value
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_in_bfloat16(adjust, nesterov, form):
    """torch.optim.Muon iterates in bfloat16 whatever the params; asked for that dtype, ours gives the same bits."""
    params = make_params(MATRICES)
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    expected = torchs(lambda p: torch.optim.Muon(p, adjust_lr_fn=adjust, **options), params)
    tx = optim.muon(adjust=adjust, weights="out_in", ns_dtype=torch.bfloat16, **options)
    assert_close(ours(tx, params, form), expected)


def test_muon_of_weights_in_out_is_that_of_their_transposes():
    params = make_params({"tall": (8, 5), "wide": (5, 8)})
    turned = {n: p.mT.contiguous() for n, p in params.items()}
    for adjust in ("original", "match_rms_adamw"):
        there = optim.muon(0.02, weights="out_in", adjust=adjust, ns_dtype=F64)
        here = optim.muon(0.02, adjust=adjust, ns_dtype=F64)
        grads = {n: gradient(n, p, 0) for n, p in params.items()}
        expected, _ = there.update({n: g.mT for n, g in grads.items()}, there.init(turned), turned)
        got, _ = here.update(grads, here.init(params), params)
        assert_close(got, {n: u.mT for n, u in expected.items()})


@pytest.mark.parametrize("shape", [*MATRICES.values(), (3, 4, 6), (2, 3, 6, 4), (1, 5)])
def test_newton_schulz_is_its_polynomial_on_the_singular_values(shape):
    x = make_params({"x": shape})["x"]
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(optim.newton_schulz(x), u @ torch.diag_embed(s) @ vh, rtol=1e-11, atol=1e-12)
    assert s.min() > 0.6 and s.max() < 1.3


@both_forms
def test_muon_in_float64_is_its_equations(form):
    lr, mu, decay = 0.02, 0.95, 0.1
    params = make_params(MATRICES)
    expected = {n: p.clone() for n, p in params.items()}
    momentum = {n: torch.zeros_like(p) for n, p in params.items()}
    for step in range(STEPS):
        for n, p in expected.items():
            g = gradient(n, p, step)
            momentum[n] = mu * momentum[n] + (1 - mu) * g
            o = optim.newton_schulz((1 - mu) * g + mu * momentum[n])
            scale = max(1.0, p.shape[1] / p.shape[0]) ** 0.5
            expected[n] = p - lr * scale * o - lr * decay * p
    assert_close(ours(optim.muon(lr, mu, weight_decay=decay, ns_dtype=F64), params, form), expected)


@both_forms
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_stacked_leaf_is_one_parameter_of_torch_for_each_layer(name, form):
    shapes = {"blocks/w": (3, 4, 6)} | ({"blocks/b": (3, 4)} if name == "adafactor" else {})
    stacked = make_params(shapes)
    tree = {"blocks": {n.split("/")[1]: p for n, p in stacked.items()}}
    if name == "adafactor":
        tx, make = optim.adafactor(0.1), lambda p: torch.optim.Adafactor(p, lr=0.1)
    else:
        tx, make = optim.muon(0.1, weights="out_in", ns_dtype=torch.bfloat16), lambda p: torch.optim.Muon(p, lr=0.1)
    leaves = {n: [layer.clone().requires_grad_() for layer in p] for n, p in stacked.items()}
    optimizer = make([layer for layers in leaves.values() for layer in layers])
    state = tx.init(tree)
    for step in range(STEPS):
        grads = {"blocks": {n: gradient(n, p, step) for n, p in tree["blocks"].items()}}
        for n, layers in leaves.items():
            for layer, g in zip(layers, grads["blocks"][n.split("/")[1]]):
                layer.grad = g.clone()
        if form == "apply":
            tree, state = optim.apply_in_place(tx, grads, state, tree)
        else:
            updates, state = tx.update(grads, state, tree)
            tree = optim.apply_updates(tree, updates)
        optimizer.step()
    assert_close(pytree.named_leaves(tree), {n: torch.stack(layers).detach() for n, layers in leaves.items()})


# ---- published equations, and optax ---------------------------------------------------------------------------------


def by_equations(step_of, params):
    """20 steps of `step_of(g, p, memory, t) -> p` in NumPy, each leaf with its own `memory` dict."""
    arrays, memory = {n: p.numpy().copy() for n, p in params.items()}, {n: {} for n in params}
    for step in range(STEPS):
        for n, p in arrays.items():
            g = gradient(n, torch.tensor(p), step).numpy()
            arrays[n] = np.asarray(step_of(g, p, memory[n], step + 1))
    return {n: torch.tensor(p) for n, p in arrays.items()}


def by_optax(make, params):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    optax = pytest.importorskip("optax", reason="optax is not installed")
    with jax.enable_x64(True):
        tx = make(optax)
        arrays = {n: jax.numpy.asarray(p.numpy()) for n, p in params.items()}
        assert all(a.dtype == "float64" for a in arrays.values())
        state = tx.init(arrays)
        for step in range(STEPS):
            grads = {n: gradient(n, torch.tensor(np.asarray(p)), step).numpy() for n, p in arrays.items()}
            updates, state = tx.update(grads, state, arrays)
            arrays = optax.apply_updates(arrays, updates)
        return {n: torch.tensor(np.asarray(p)) for n, p in arrays.items()}


LR, B1, B2, EPS, DECAY = 0.02, 0.85, 0.97, 1e-6, 0.1


def lion_step(g, p, memory, t):
    m = memory.get("m", np.zeros_like(p))
    memory["m"] = B2 * m + (1 - B2) * g
    return p - LR * (np.sign(B1 * m + (1 - B1) * g) + DECAY * p)


def lamb_step(g, p, memory, t):
    memory["m"] = B1 * memory.get("m", 0.0) + (1 - B1) * g
    memory["v"] = B2 * memory.get("v", 0.0) + (1 - B2) * g**2
    m, v = memory["m"] / (1 - B1**t), memory["v"] / (1 - B2**t)
    r = m / (np.sqrt(v) + EPS) + DECAY * p
    return p - LR * math.sqrt((p**2).sum()) / math.sqrt((r**2).sum()) * r


def adamw_step(g, p, memory, t):
    memory["m"] = B1 * memory.get("m", 0.0) + (1 - B1) * g
    memory["v"] = B2 * memory.get("v", 0.0) + (1 - B2) * g**2
    m, v = memory["m"] / (1 - B1**t), memory["v"] / (1 - B2**t)
    return p - LR * (m / (np.sqrt(v) + EPS) + DECAY * p)


OURS = {
    "lion": lambda: optim.lion(LR, B1, B2, weight_decay=DECAY),
    "lamb": lambda: optim.lamb(LR, B1, B2, EPS, weight_decay=DECAY),
    "adamw": lambda: optim.adamw(LR, B1, B2, EPS, weight_decay=DECAY),
}


@both_forms
@pytest.mark.parametrize(("name", "step"), [("lion", lion_step), ("lamb", lamb_step), ("adamw", adamw_step)])
def test_published_equations(name, step, form):
    params = make_params()
    assert_close(ours(OURS[name](), params, form), by_equations(step, params))


@both_forms
def test_lamb_takes_the_norms_of_each_stacked_layer(form):
    params = {"blocks/w": make_params({"w": (3, 4, 5)})["w"] * torch.tensor([0.1, 1.0, 10.0], dtype=F64)[:, None, None]}

    def step(g, p, memory, t):
        return [lamb_step(g[i], p[i], memory.setdefault(i, {}), t) for i in range(3)]

    assert_close(ours(OURS["lamb"](), params, form), by_equations(step, params))


def test_lamb_of_zero_params_or_zero_direction_has_ratio_one():
    params = {"zero": torch.zeros(3, dtype=F64), "still": torch.ones(3, dtype=F64)}
    grads = {"zero": torch.tensor([1.0, -2.0, 3.0], dtype=F64), "still": torch.zeros(3, dtype=F64)}
    tx = optim.lamb(0.1, eps=0.0)
    updates, _ = tx.update({"zero": grads["zero"], "still": grads["still"]}, tx.init(params), params)
    torch.testing.assert_close(updates["zero"], -0.1 * grads["zero"].sign(), rtol=1e-12, atol=0)
    assert torch.isnan(updates["still"]).all()  # 0 / 0 with eps = 0
    updates, _ = optim.lamb(0.1).update(grads, tx.init(params), params)
    assert torch.equal(updates["still"], torch.zeros(3, dtype=F64))


@both_forms
@pytest.mark.parametrize("name", ["lion", "lamb", "adamw"])
def test_optax(name, form):
    params = make_params()
    options = {"b1": B1, "b2": B2, "weight_decay": DECAY} | ({} if name == "lion" else {"eps": EPS})
    expected = by_optax(lambda optax: getattr(optax, name)(LR, **options), params)
    assert_close(ours(OURS[name](), params, form), expected)


def test_a_recipe_with_clipping_and_a_schedule_against_optax():
    params = make_params()

    def make(optax):
        schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, 15, 0.001)
        wide = lambda count: schedule(count.astype("int64"))  # noqa: E731  (its int32 count would make the rate float32)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(wide, eps=1e-8, weight_decay=0.1))

    schedule = optim.warmup_cosine(0.05, 5, 15, 0.001)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, weight_decay=0.1))
    assert_close(ours(tx, params), by_optax(make, params))
