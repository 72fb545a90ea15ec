"""What each piece of `fzero.optim` promises by itself: chains, labels, clipping, rules, accumulation, averages."""

import copy

import pytest
import torch
from optim_cases import F64, assert_same, clone, muon_for_matrices, run, tree

from fzero import optim
from fzero.core import pytree
from fzero.optim import Pass, apply_in_place, split_chain

# ---- chain, by_label ------------------------------------------------------------------------------------------------


def test_chain_feeds_updates_on_and_needs_the_strongest():
    params, grads = tree(0), tree(1)
    double = optim.scale_by_rules(((".*", 2.0),))
    tx = optim.chain(double, optim.sgd(0.5), double)
    updates, state = tx.update(grads, tx.init(params), params)
    assert_same(updates, pytree.map(lambda g: -2.0 * g, grads), 1e-15)
    assert isinstance(state, tuple) and len(state) == 3
    assert tx.needs == "elementwise"
    assert optim.chain(optim.sgd(0.1), optim.lamb(0.1)).needs == "matrix"
    assert optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(0.1)).needs == "tree"
    assert muon_for_matrices(0.1).needs == "matrix"


def test_chain_refuses_what_is_no_chain():
    with pytest.raises(ValueError, match="chain: takes one GradientTransformation or more"):
        optim.chain()
    with pytest.raises(ValueError, match="chain: takes one"):
        optim.chain(optim.sgd)
    tx = optim.chain(optim.sgd(0.1), optim.sgd(0.1))
    with pytest.raises(ValueError, match="chain: the state is not a tuple of 2 states"):
        tx.update(tree(1), optim.sgd(0.1).init(tree(0))[:1], tree(0))


def test_by_label_gives_each_leaf_to_one_transformation():
    params, grads = tree(0), tree(1)
    tx = optim.by_label({"a": optim.sgd(1.0), "b": optim.sgd(10.0)}, ((r"/b_in$", "b"), ("^blocks/", "a"), (".*", "b")))
    named = pytree.named_leaves(grads)
    updates = pytree.named_leaves(tx.update(grads, tx.init(params), params)[0])
    for name, g in named.items():
        rate = 1.0 if name.startswith("blocks/") and not name.endswith("b_in") else 10.0
        torch.testing.assert_close(updates[name], -rate * g, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("labels", "rules", "message"),
    [
        (["adamw"], ((".*", "adam"),), r"rule '\.\*' gives label 'adam', .*did you mean adamw"),
        (["a", "b"], ((".*", "a"),), "transformation 'b' has no leaf"),
        (["a"], (("^blocks/", "a"),), "no rule matches leaf 'embed/tokens'"),
        (["a"], ((".*", "a"), ("^blocks/", "a")), r"rule '\^blocks/' matches no leaf"),
        (["a", "b"], (("tokenz", "b"), (".*", "a")), "rule 'tokenz' matches no leaf.*embed/tokens"),
        (["a"], (("(", "a"),), "not a regular expression"),
    ],
)
def test_by_label_refuses_rules_that_do_not_fit(labels, rules, message):
    with pytest.raises(ValueError, match=message):
        optim.by_label({label: optim.sgd(0.1) for label in labels}, rules).init(tree(0))


# ---- clipping, rules, masks -----------------------------------------------------------------------------------------


def test_global_norm_counts_every_element_once_and_in_float32():
    t = tree(0)
    flat = torch.cat([x.reshape(-1) for x in pytree.leaves(t)])
    torch.testing.assert_close(optim.global_norm(t), flat.norm(), rtol=1e-14, atol=0)
    ones = {"a": torch.ones(100_000, dtype=torch.bfloat16), "b": torch.ones(200_000, dtype=torch.bfloat16)}
    norm = optim.global_norm(ones)
    assert norm.dtype == torch.float32 and abs(norm.item() - 300_000**0.5) < 1e-3
    assert optim.global_norm({}) == 0


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1e6])
def test_clip_by_global_norm(max_norm):
    grads = tree(1)
    norm = optim.global_norm(grads)
    clipped, _ = optim.clip_by_global_norm(max_norm).update(grads, (), grads)
    expected = pytree.map(lambda g: g * min(1.0, max_norm / norm.item()), grads)
    assert_same(clipped, expected, 1e-14)


def test_clip_of_zero_gradients_is_zero_and_has_a_gradient():
    clip = lambda x: optim.clip_by_global_norm(1.0).update({"w": x}, (), {})[0]["w"].sum()  # noqa: E731
    zero = torch.zeros(3, dtype=F64)
    assert clip(zero) == 0
    torch.testing.assert_close(torch.func.grad(clip)(zero), torch.ones(3, dtype=F64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clip_does_not_hide_a_bad_gradient(bad):
    grads = {"a": torch.tensor([bad, 1.0]), "b": torch.ones(2)}
    clipped, _ = optim.clip_by_global_norm(1.0).update(grads, (), {})
    assert clipped["a"][0].isnan()
    assert (
        optim.clip_by_value(1.0).update({"a": torch.tensor([float("nan"), -3.0])}, (), {})[0]["a"].tolist()[1] == -1.0
    )
    assert optim.clip_by_value(1.0).update({"a": torch.tensor([float("nan")])}, (), {})[0]["a"].isnan().all()


def test_scale_by_rules_scales_layers_apart():
    params, ones = tree(0), pytree.map(torch.ones_like, tree(0))
    rules = ((r"/b_in$", 0.0), (r"^blocks/", [0.5, 2.0]), (".*", 3))
    scaled = pytree.named_leaves(optim.scale_by_rules(rules).update(ones, (), params)[0])
    assert (scaled["blocks/moe/w_up"][0] == 0.5).all() and (scaled["blocks/moe/w_up"][1] == 2.0).all()
    assert (scaled["blocks/mlp/b_in"] == 0).all() and scaled["head/temperature"] == 3


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (((".*", [1.0, 2.0]),), r"embed/tokens has shape \(7, 4\) and is given 2 factors"),
        ((("^blocks/", 1.0),), "scale_by_rules: no rule matches leaf 'embed/tokens'"),
        (((".*", 1.0), ("^blocks/", 2.0)), "scale_by_rules: rule .* matches no leaf"),
    ],
)
def test_scale_by_rules_refuses_rules_that_do_not_fit(rules, message):
    with pytest.raises(ValueError, match=message):
        optim.scale_by_rules(rules).init(tree(0))


@pytest.mark.parametrize("mask", [r"w_in|tokens", lambda name, leaf: name in ("blocks/mlp/w_in", "embed/tokens")])
@pytest.mark.parametrize("make", [optim.adamw, optim.adam, optim.lion, optim.lamb, optim.adafactor])
@pytest.mark.parametrize("form", ["update", "apply"])
def test_mask_says_which_leaves_decay(make, mask, form):
    params = tree(0)
    with_decay, without = (run(make(0.1, weight_decay=w, mask=mask), params, 1, form)[0] for w in (0.5, 0.0))
    same = pytree.map(torch.equal, with_decay, without)
    assert {n for n, s in pytree.named_leaves(same).items() if not s} == {"blocks/mlp/w_in", "embed/tokens"}


def test_a_mask_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"adamw: mask 'embed/tokenz' matches no leaf \(did you mean embed/tokens\?\)"):
        optim.adamw(0.1, mask="embed/tokenz").init(tree(0))
    with pytest.raises(ValueError, match="adamw: mask '\\(' is not a regular expression"):
        optim.adamw(0.1, mask="(")


# ---- accumulation, moving average -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["update", "apply"])
def test_accumulate_is_a_step_on_the_mean(form):
    params, inner = tree(0), optim.adamw(optim.linear(0.1, 0.0, 4))
    tx = optim.accumulate(inner, 3)
    p, state, expected, expected_state = clone(params), tx.init(params), params, inner.init(params)
    for step in range(2):
        grads = [tree(10 * step + i) for i in range(3)]
        for i, g in enumerate(grads):
            before = clone(p)
            if form == "apply":
                p, state = optim.apply_in_place(tx, clone(g), state, p)
            else:
                u, state = tx.update(g, state, p)
                p = optim.apply_updates(p, u)
            if i < 2:
                assert_same(p, before)
                assert int(state.count) == i + 1
        mean = pytree.map(lambda a, b, c: (a + b + c) / 3, *grads)
        u, expected_state = inner.update(mean, expected_state, expected)
        expected = optim.apply_updates(expected, u)
        assert_same((p, state.inner), (expected, expected_state), 1e-12)
        assert int(state.count) == 0 and optim.global_norm(state.sum) == 0


def test_the_count_of_accumulate_is_what_its_tensor_holds():
    tx, params = optim.accumulate(optim.sgd(1.0), 3), {"w": torch.zeros(1)}

    def counts(state, times=3):
        for _ in range(times):
            _, state = optim.apply_in_place(tx, {"w": torch.ones(1)}, state, params)
            yield int(state.count)

    _, state = optim.apply_in_place(tx, {"w": torch.ones(1)}, tx.init(params), params)
    assert list(counts(clone(state))) == list(counts(copy.deepcopy(state))) == list(counts(state)) == [2, 0, 1]
    state.count.fill_(2)  # as a restored state does
    assert list(counts(copy.deepcopy(state))) == list(counts(state)) == [0, 1, 2]
    with torch.inference_mode():  # whose tensors PyTorch does not count the changes of
        assert list(counts(tx.init(params), 4)) == [1, 2, 0, 1]
        assert list(counts(state)) == [0, 1, 2]


def test_the_average_follows_its_equation_and_is_a_copy():
    params = {"w": torch.tensor([1.0, 2.0])}
    tx = optim.with_average(optim.chain(optim.clip_by_value(8.0), optim.sgd(1.0)), 0.75)
    state, grads = tx.init(params), {"w": torch.tensor([-2.0, -9.0])}
    updates, new = tx.update(grads, state, params)
    assert updates["w"].tolist() == [2.0, 8.0] and new.average["w"].tolist() == [1.5, 4.0]
    assert state.average["w"].tolist() == [1.0, 2.0]  # pure, and a copy of the params
    moved, last = optim.apply_in_place(tx, grads, state, params)
    assert moved["w"].tolist() == [3.0, 10.0] and last.average["w"].tolist() == [1.5, 4.0]
    with pytest.raises(ValueError, match=r"with_average: decay is 1.0; it must be a number in \[0, 1\)"):
        optim.with_average(optim.sgd(1.0), 1.0)


def test_the_average_of_one_pass_stays_where_the_step_is_skipped():
    tx = optim.with_average(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 0.5)
    for skip in (False, True):
        params = {"w": torch.ones(4)}
        state, more = tx.init(params), Pass(torch.ones(()), torch.tensor(skip), norm=torch.ones(()))
        new, state = tx.in_place({"w": torch.ones(4)}, state, params, more)
        assert_same(state.average, pytree.map(lambda p: (1 + p) / 2, new))
        assert torch.equal(new["w"], torch.ones(4)) == skip


def test_a_chain_within_the_average_is_split_as_without():
    tx = optim.with_average(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 0.5)
    params = {"w": torch.ones(4)}
    parts, state = split_chain(tx), tx.init(params)
    assert len(parts.heads) == 1
    factor = parts.factor(torch.ones(()), torch.tensor(2.0))
    _, body = apply_in_place(parts.body, {"w": torch.ones(4) * factor}, parts.state(state), params)
    whole = parts.merge(state, body)
    other = {"w": torch.ones(4)}
    _, expected = apply_in_place(tx, {"w": torch.ones(4)}, tx.init(other), other)
    assert pytree.names(whole) == pytree.names(expected)
    assert_same(whole, expected)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.adamw(-0.1), "adamw: lr is -0.1"),
        (lambda: optim.adamw(float("nan")), "adamw: lr is nan"),
        (lambda: optim.adamw("0.1"), "adamw: lr is '0.1'"),
        (lambda: optim.adam(0.1, b1=1.0), r"adam: b1 is 1.0; it must be a number in \[0, 1\)"),
        (lambda: optim.adamw(0.1, b2=-0.5), "adamw: b2 is -0.5"),
        (lambda: optim.adamw(0.1, weight_decay=-1), "adamw: weight_decay is -1"),
        (lambda: optim.lion(0.1, b2=2.0), "lion: b2 is 2.0"),
        (lambda: optim.lamb(0.1, eps=-1.0), "lamb: eps is -1.0"),
        (lambda: optim.sgd(0.1, momentum=1.5), "sgd: momentum is 1.5"),
        (lambda: optim.sgd(0.1, nesterov=True), "sgd: nesterov=True needs a momentum"),
        (lambda: optim.adafactor(0.1, clip=0.5), "adafactor: clip is 0.5"),
        (lambda: optim.adafactor(0.1, beta2_decay=0.8), "adafactor: beta2_decay is 0.8"),
        (lambda: optim.muon(0.1, adjust="match"), "muon: adjust is 'match'"),
        (lambda: optim.muon(0.1, weights="io"), "muon: weights is 'io'"),
        (lambda: optim.muon(0.1, ns_steps=0), "muon: ns_steps is 0"),
        (lambda: optim.clip_by_global_norm(-1.0), "clip_by_global_norm: max_norm is -1.0"),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm is 0.0, which makes every update 0; give a number above 0"),
        (lambda: optim.clip_by_value(0), "max_value is 0, which makes every update 0; .* leave the clipping out"),
        (lambda: optim.clip_by_value(float("inf")), "clip_by_value: max_value is inf"),
        (lambda: optim.add_decayed_weights(-1.0), "add_decayed_weights: weight_decay is -1.0"),
        (lambda: optim.accumulate(optim.sgd(0.1), 0), "accumulate: every is 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [optim.sgd, optim.adamw, optim.lion, optim.lamb, optim.adafactor, optim.muon])
def test_leaves_without_elements_are_updated_too(make):
    tx, params = make(0.1), {"none": torch.empty(0, 4), "blocks": {"w": torch.empty(2, 3, 0)}, "w": torch.ones(2, 2)}
    grads = {**params, "w": torch.eye(2)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["none"].shape == (0, 4) and updates["blocks"]["w"].shape == (2, 3, 0)
    assert bool(updates["w"].isfinite().all())
    new, _ = optim.apply_in_place(tx, grads, tx.init(params), params)
    assert bool(new["w"].isfinite().all()) and new["none"].shape == (0, 4)


SCALED = {
    "adamw": lambda lr: optim.adamw(lr, weight_decay=0.1),
    "clipped lamb": lambda lr: optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(lr)),
    "accumulated sgd": lambda lr: optim.accumulate(optim.sgd(lr, 0.9), 2),
    "averaged lion": lambda lr: optim.with_average(optim.lion(lr), 0.5),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_rate_in_the_state_is_that_of_a_schedule(name):
    factors = [0.5, 2.0, 1.0]
    scheduled = SCALED[name](lambda count: 0.1 * torch.tensor(factors, dtype=F64)[count])
    scaled = optim.with_lr_scale(lambda scale: SCALED[name](lambda count: 0.1 * scale))
    expected, wanted = tree(0), scheduled.init(tree(0))
    pure, states = tree(0), [scaled.init(tree(0)) for _ in range(2)]
    applied = tree(0)
    for step, factor in enumerate(factors):
        # Of accumulated gradients a step is the second of two.
        number = torch.tensor(factors[step // 2 if "accumulated" in name else step], dtype=F64)
        updates, wanted = scheduled.update(tree(step + 1), wanted, expected)
        expected = optim.apply_updates(expected, updates)
        updates, states[0] = scaled.update(tree(step + 1), states[0]._replace(lr_scale=number), pure)
        pure = optim.apply_updates(pure, updates)
        states[1] = states[1]._replace(lr_scale=number.clone())
        applied, states[1] = apply_in_place(scaled, tree(step + 1), states[1], applied)
        assert_same(pure, expected, 1e-12)
        assert_same(applied, expected, 1e-12)
        assert factor and states[0].lr_scale == number
    assert (scaled.needs, scaled.unit, scaled.one_pass) == (scheduled.needs, scheduled.unit, scheduled.one_pass)
