"""Every optimizer through the same properties."""

import re

import pytest
import torch
from optim_cases import F64, OPTIMIZERS, assert_same, clone, run, step, tree
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import optim
from fzero.core import pytree
from fzero.optim import leafwise
from fzero.sharding import Spec

# `apply` runs PyTorch's fused Adam, or works layer by layer: another rounding. The others are bitwise.
FUSED = {"adam", "adamw", "lamb", "adafactor", "muon by label", "accumulate"}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


# ---- every optimizer ------------------------------------------------------------------------------------------------


@every_optimizer
def test_spec_is_the_layout_of_the_state(name):
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    # Each dim is sharded over an axis that is called by its size, so a spec says which dims the state has kept.
    specs = pytree.map_named(lambda n, p: Spec(tuple(f"{i}_{s}" for i, s in enumerate(p.shape))), params)
    layout = pytree.named_leaves(tx.spec(specs))
    state = tx.init(params)
    for moment in (state, tx.update(tree(1), state, params)[1], optim.apply_in_place(tx, tree(1), state, params)[1]):
        named = pytree.named_leaves(moment)
        assert list(named) == list(layout)
        for leaf, spec in layout.items():
            assert isinstance(spec, Spec), leaf
            sizes = tuple(int(axis.split("_")[1]) for (axis,) in spec.dims)
            assert sizes == tuple(named[leaf].shape), (leaf, spec, named[leaf].shape)
    replicated = tx.spec(pytree.map(lambda p: Spec(), params))
    assert pytree.names(replicated) == list(layout)
    assert set(pytree.leaves(replicated)) <= {Spec()}


@every_optimizer
def test_counts_are_int64_and_no_state_is_none(name):
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    _, state = run(tx, params, 3)
    named = pytree.named_leaves(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in named.values())
    counts = [leaf for n, leaf in named.items() if re.search(r"(^|/)count$", n)]
    assert counts and all(c.dtype == torch.int64 and c.dim() == 0 for c in counts)
    assert max(int(c) for c in counts) == (1 if name == "accumulate" else 3)


@every_optimizer
def test_update_leaves_its_inputs_as_they_were(name):
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    _, state = run(tx, params, 1)
    inputs = (tree(1), state, params)
    before = clone(inputs)
    tx.update(*inputs)
    assert_same(inputs, before)


@every_optimizer
@pytest.mark.parametrize("piece", [1 << 18, 5], ids=["whole", "pieces"])
@pytest.mark.parametrize("form", ["apply", "donate"])
def test_forms_that_reuse_buffers_equal_update(name, form, piece, monkeypatch):
    monkeypatch.setitem(leafwise._PIECE, "cpu", piece)
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    exact = name not in FUSED or (form == "donate" and name in ("adam", "adamw"))
    assert_same(run(tx, params, 5, form), run(tx, params, 5), 0.0 if exact else 1e-12)


@every_optimizer
def test_apply_writes_into_the_buffers_it_is_given(name):
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    state = tx.init(params)
    new_params, new_state = optim.apply_in_place(tx, tree(1), state, params)
    same = pytree.map(lambda a, b: a.data_ptr() == b.data_ptr(), (params, state), (new_params, new_state))
    assert all(kept or leaf.endswith("count") for leaf, kept in pytree.named_leaves(same).items())


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made in memory of its own."""

    def __init__(self, known):
        super().__init__()
        self.known, self.numel = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@every_optimizer
def test_apply_makes_no_temporary_larger_than_a_layer(name, monkeypatch):
    monkeypatch.setitem(leafwise._PIECE, "cpu", 30 * 20)
    shapes = {"embed": {"tokens": (30, 20)}, "blocks": {"mlp": {"w_in": (2, 20, 30)}}, "head": {"scale": (3,)}}
    tx, params, grads = OPTIMIZERS[name](0.1), tree(0, shapes), tree(1, shapes)
    state = tx.init(params)
    with Largest(pytree.leaves((params, grads, state))) as mode:
        for _ in range(2):
            params, state = optim.apply_in_place(tx, grads, state, params)
    assert 0 < mode.numel <= 30 * 20


@every_optimizer
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_vmap_over_states_equals_the_loop(name, dtype):
    """Of every optimizer and dtype of its state; those of 8 bits and rounded at random are in test_optim_lowbit.py."""
    tx, stacked, grads = OPTIMIZERS[name](0.1, dtype), tree(0, lead=(3,)), tree(1, lead=(3,))
    pick = lambda t, i: pytree.map(lambda x: x[i], t)  # noqa: E731
    state = torch.func.vmap(tx.init)(stacked)
    together = stacked
    for _ in range(3):
        updates, state = torch.func.vmap(tx.update)(grads, state, together)
        together = optim.apply_updates(together, updates)
    for i in range(3):
        params, one = pick(stacked, i), tx.init(pick(stacked, i))
        for _ in range(3):
            updates, one = tx.update(pick(grads, i), one, params)
            params = optim.apply_updates(params, updates)
        assert_same((pick(together, i), pick(state, i)), (params, one), 1e-12)


@every_optimizer
@pytest.mark.parametrize("scheduled", [False, True], ids=["rate", "schedule"])
def test_vmap_over_learning_rates_equals_the_loop(name, scheduled):
    params, rates = tree(0), torch.tensor([1e-3, 3e-2, 0.2, 0.0], dtype=F64)
    grads = [tree(100 + i) for i in range(3)]

    def train(lr):
        tx = OPTIMIZERS[name](optim.warmup_cosine(lr, 2, 5) if scheduled else lr)
        p, state = params, tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, p)
            p = optim.apply_updates(p, updates)
        return p

    together = torch.func.vmap(train)(rates)
    for i, lr in enumerate(rates.tolist()):
        assert_same(pytree.map(lambda x, i=i: x[i], together), train(lr), 1e-12)


# Accumulation counts steps on the mean: see test_accumulate_is_a_step_on_the_mean.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "accumulate"])
def test_schedule_is_read_at_the_count(name):
    rates, params = (0.3, 0.2, 0.1), tree(0)
    scheduled = run(OPTIMIZERS[name](optim.linear(0.3, 0.0, 3)), params, 3)
    p, s = params, OPTIMIZERS[name](0.3).init(params)
    for i, lr in enumerate(rates):
        updates, s = OPTIMIZERS[name](lr).update(tree(100 + i), s, p)
        p = optim.apply_updates(p, updates)
    assert_same(scheduled, (p, s), 1e-12)


@every_optimizer
@pytest.mark.parametrize("form", ["update", "apply", "donate"])
def test_bfloat16_params_with_float32_state(name, form):
    """The arithmetic is that of float32 params, rounded once when the update is added."""
    tx = OPTIMIZERS[name](0.1, torch.float32)
    params = tree(0, dtype=torch.bfloat16)
    state = tx.init(params)
    assert {x.dtype for x in pytree.leaves(state)} <= {torch.float32, torch.int64}
    grads = tree(1, dtype=torch.bfloat16)
    if name == "recipe":
        grads = tree(1, dtype=torch.float32)  # a clipped bfloat16 gradient would be rounded before the optimizer
    wide = (pytree.map(lambda g: g.float(), grads), clone(state), pytree.map(lambda p: p.float(), params))
    u, expected_state = tx.update(*wide)
    expected = pytree.map(lambda p, u: (p + u).to(torch.bfloat16), wide[2], u)
    if form == "apply":
        got, got_state = optim.apply_in_place(tx, grads, state, params)
    else:
        u, got_state = step(tx, form)(grads, state, params)
        got = optim.apply_updates(params, u)
    tolerance = 0.01 if name == "decayed sgd" else 0.0  # its updates are bfloat16 before sgd: one more rounding
    assert_same(got, expected, tolerance)
    assert_same(got_state, expected_state, 1e-6)


@every_optimizer
def test_state_dtype_is_kept(name):
    _, state = run(OPTIMIZERS[name](0.1, torch.bfloat16), tree(0, dtype=torch.float32), 2, dtype=torch.float32)
    assert {x.dtype for x in pytree.leaves(state)} <= {torch.bfloat16, torch.int64}


@every_optimizer
def test_gradient_through_three_steps_equals_finite_differences(name):
    """With respect to the learning rate; one element has a gradient of exactly zero at every step."""
    target, weight = tree(1), tree(2)
    weight = pytree.map(lambda w: w.abs() + 0.5, weight)
    weight["embed"]["tokens"][3] = 0.0

    def loss(p):
        return sum(pytree.leaves(pytree.map(lambda x, t, w: (w * (x - t) ** 2).sum(), p, target, weight)))

    def after(lr):
        tx, p = OPTIMIZERS[name](lr), tree(0)
        state = tx.init(p)
        for _ in range(3):
            updates, state = tx.update(torch.func.grad(loss)(p), state, p)
            p = optim.apply_updates(p, updates)
        return loss(p)

    lr, h = torch.tensor(0.01, dtype=F64), 1e-6
    torch.testing.assert_close(torch.func.grad(after)(lr), (after(lr + h) - after(lr - h)) / (2 * h), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["sgd", "sgd momentum", "adamw", "lion", "lamb", "adafactor", "muon by label"])
@pytest.mark.parametrize("form", ["update", "donate", "apply"])
def test_a_tree_that_does_not_match_is_refused_by_name(name, form):
    tx, params = OPTIMIZERS[name](0.1), tree(0)
    grads = tree(1)
    grads["head"]["temprature"] = grads["head"].pop("temperature")
    with pytest.raises(ValueError, match="temprature"):
        step(tx, form)(grads, tx.init(params), params)


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 1), (0, 4), (13, 7)])
@pytest.mark.parametrize("name", ["sgd momentum", "adam", "adamw", "lion", "lamb", "adafactor"])
def test_extreme_shapes(name, shape):
    params, grads = {"w": torch.ones(shape, dtype=F64)}, {"w": torch.full(shape, 2.0, dtype=F64)}
    tx = OPTIMIZERS[name](0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w"].shape == shape and torch.isfinite(updates["w"]).all()
    applied, _ = optim.apply_in_place(tx, grads, tx.init(params), clone(params))
    assert_same(applied, optim.apply_updates(params, updates), 1e-12)


# ---- traps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "lion", "recipe"])
@pytest.mark.parametrize("piece", [1 << 18, 5], ids=["whole", "pieces"])
def test_gradients_of_other_strides_are_not_mispaired(name, piece, monkeypatch):
    monkeypatch.setitem(leafwise._PIECE, "cpu", piece)
    tx, params, grads = OPTIMIZERS[name](0.1), tree(0), tree(1)
    strided = pytree.map(lambda g: g.mT.contiguous().mT if g.dim() > 1 else g, grads)
    assert not strided["embed"]["tokens"].is_contiguous()
    expected = optim.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    assert_same(optim.apply_in_place(tx, strided, tx.init(params), clone(params))[0], expected, 1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw", "recipe", "decayed sgd"])
def test_donation_of_a_gradient_that_two_leaves_share_or_that_is_expanded(name):
    shapes = {"embed": {"tokens": (4,)}, "blocks": {"w_a": (2, 3), "w_b": (2, 3)}, "head": {"w": (3,)}}
    params = tree(0, shapes)

    def loss(p):
        return (
            ((p["blocks"]["w_a"] + p["blocks"]["w_b"]) ** 2).sum() + p["embed"]["tokens"].sum() + p["head"]["w"].sum()
        )

    make = lambda: torch.func.grad(loss)(params)  # noqa: E731
    grads = make()
    assert grads["blocks"]["w_a"].data_ptr() == grads["blocks"]["w_b"].data_ptr()
    assert grads["head"]["w"].stride() == (0,)
    tx = OPTIMIZERS[name](0.1)
    expected = tx.update(make(), tx.init(params), params)[0]
    assert_same(step(tx, "donate")(make(), tx.init(params), params)[0], expected, 1e-14)
    applied = optim.apply_in_place(tx, make(), tx.init(params), clone(params))[0]
    assert_same(applied, optim.apply_updates(params, expected), 1e-12)


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_a_gradient_of_nan_shows_in_the_update(name):
    params = {"w_a": torch.ones(2, 3), "w_b": torch.ones(2, 3)}
    grads = {"w_a": torch.full((2, 3), float("nan")), "w_b": torch.ones(2, 3)}
    tx = OPTIMIZERS[name](0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w_a"].isnan().all() and not updates["w_b"].isnan().any()


# ---- stacks of layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lamb", "adafactor", "adamw", "lion"])
def test_a_stacked_leaf_equals_its_layers_apart(name):
    stack = {"blocks": {"w": (3, 4, 5), "b": (3, 4), "s": (3,), "e": (3, 2, 4, 5)}}
    apart = {f"layer_{i}": {k: s[1:] for k, s in stack["blocks"].items()} for i in range(3)}
    tx = OPTIMIZERS[name](0.1)

    def unstack(t):
        return {f"layer_{i}": {k: x[i] for k, x in t["blocks"].items()} for i in range(3)}

    params = tree(0, stack)
    single = unstack(params)
    assert pytree.names(single) == pytree.names(tree(0, apart))
    state, states = tx.init(params), tx.init(single)
    for i in range(4):
        grads = tree(10 + i, stack)
        u, state = tx.update(grads, state, params)
        us, states = tx.update(unstack(grads), states, single)
        params, single = optim.apply_updates(params, u), optim.apply_updates(single, us)
    assert_same(unstack(params), single, 1e-12)


def test_muon_on_a_stack_equals_separate_matrices():
    for shape in [(3, 4, 6), (3, 6, 4), (3, 2, 4, 6)]:
        params, tx = {"blocks": {"w": tree(0, {"w": shape})["w"]}}, optim.muon(0.1, ns_dtype=F64)
        single = {f"layer_{i}": params["blocks"]["w"][i] for i in range(3)}
        state, states = tx.init(params), tx.init(single)
        for i in range(3):
            g = tree(5 + i, {"w": shape})["w"]
            u, state = tx.update({"blocks": {"w": g}}, state, params)
            us, states = tx.update({f"layer_{j}": g[j] for j in range(3)}, states, single)
            params, single = optim.apply_updates(params, u), optim.apply_updates(single, us)
        assert_same(dict(single), {f"layer_{i}": params["blocks"]["w"][i] for i in range(3)}, 1e-12)


@pytest.mark.parametrize("shapes", [{"blocks": {"b": (2, 4)}}, {"bias": (4,)}, {"scalar": ()}])
def test_muon_refuses_what_is_no_matrix(shapes):
    leaf = pytree.names(tree(0, shapes))[0]
    with pytest.raises(ValueError, match=rf"muon: {leaf} of shape .* by_label"):
        optim.muon(0.1).init(tree(0, shapes))


def test_a_stacked_leaf_without_dims_is_refused():
    with pytest.raises(ValueError, match=r"lamb: blocks/scalar has no dim to count layers"):
        optim.lamb(0.1).init(tree(0, {"blocks": {"scalar": ()}}))
