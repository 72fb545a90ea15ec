"""What torch.func does to a train step made with donate=False, to a model's loss, and to a plain loss function; in
float64."""

import pytest
import torch
from close import assert_close, assert_same
from law_cases import CASES, F64, FP64, MESH, MODELS, ROWS, batch_of, case_of, clone, make, plain_loss, plain_params

import fzero
from fzero import optim
from fzero.core import precision, prng, pytree
from fzero.models import base, forward
from fzero.train import step as train
from fzero.train.gradient import StepGradient

every_case = pytest.mark.parametrize("case", CASES)
every_model = pytest.mark.parametrize("model", MODELS)


BATCHES = [batch_of(i) for i in range(3)]  # drawn before any vmap, which refuses torch's own random numbers


def pick(tree, i):
    return pytree.map(lambda x: x[i], tree)


def steps(step, state, count=3):
    for batch in BATCHES[:count]:
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.each_value
@every_case
@pytest.mark.parametrize("remat", ["none", "full"])
def test_vmap_over_four_seeds_equals_four_runs(case, remat):
    case = case_of(case)
    tx = optim.with_average(optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.05, eps=1e-6)), 0.9)
    plan = fzero.zero_plan(0, case.source, MESH, policy=FP64)
    options = {"micro_batches": 2, "execution": fzero.Execution(remat=remat)}
    pure, donated = (
        fzero.make_train_step(case.loss_fn, tx, plan, donate=donate, **options) for donate in (False, True)
    )

    def init(key):
        source = case.source
        if not isinstance(source, base.Model):
            source = pytree.map_named(
                lambda n, p: p + prng.normal(prng.fold_in(key, n), p.shape, std=0.1, dtype=F64), source
            )
        return fzero.init_state(source, tx, plan, seed=key)

    keys = torch.stack([prng.key(seed) for seed in range(4)])
    together, metrics = steps(torch.func.vmap(pure, in_dims=(0, None)), torch.func.vmap(init)(keys))
    assert metrics.loss.shape == (4,) and len({round(float(x), 6) for x in metrics.loss}) == 4
    for i in range(4):
        alone, alone_metrics = steps(donated, init(keys[i]))
        assert_close(pick(together, i), alone, rtol=1e-9, atol=1e-10)
        assert_close(metrics.loss[i], alone_metrics.loss, rtol=1e-10)


def losses_by_rate(case, make_tx=optim.adamw, count=3):
    """loss(lr) after some steps, as a function that composes."""
    plan = fzero.zero_plan(0, case.source, MESH, policy=FP64)

    def train_with(lr):
        tx = make_tx(lr)
        step = fzero.make_train_step(case.loss_fn, tx, plan, donate=False, micro_batches=2)
        state = fzero.init_state(case.source, tx, plan, seed=3)
        return steps(step, state, count)[1].loss

    return train_with


@pytest.mark.slow
@every_case
def test_vmap_over_four_learning_rates_equals_four_runs(case):
    train_with, rates = losses_by_rate(case_of(case)), torch.tensor([1e-4, 1e-3, 1e-2, 1e-1], dtype=F64)
    together = torch.func.vmap(train_with)(rates)
    assert_close(together, torch.stack([train_with(lr) for lr in rates]), rtol=1e-10)
    assert len({round(float(x), 6) for x in together}) == 4


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * ("moe" in c)) for c in CASES])
def test_meta_gradient_of_the_learning_rate_through_three_adamw_steps(case):
    train_with, lr, h = (
        losses_by_rate(case_of(case), lambda lr: optim.adamw(lr, eps=1e-3)),
        torch.tensor(1e-2, dtype=F64),
        1e-7,
    )
    slope = torch.func.grad(train_with)(lr)
    assert abs(slope) > 1e-2
    assert_close(slope, (train_with(lr + h) - train_with(lr - h)) / (2 * h), rtol=1e-5)


@pytest.mark.parametrize("model", ["llama", "moe dropless"])
def test_meta_gradient_of_the_scale_of_the_initial_weights(model):
    case, h = case_of(model), 1e-6
    tx, plan = optim.adamw(1e-2, eps=1e-3), fzero.zero_plan(0, case.source, MESH, policy=FP64)
    step = fzero.make_train_step(case.loss_fn, tx, plan, donate=False)
    start = base.init_params(case.source, prng.key(0), F64)

    def after(scale):
        state = fzero.init_state(pytree.map(lambda p: p * scale, start), tx, plan, seed=0)
        return steps(step, state)[1].loss

    one = torch.tensor(1.0, dtype=F64)
    assert_close(torch.func.grad(after)(one), (after(one + h) - after(one - h)) / (2 * h), rtol=1e-5)


def test_meta_gradient_of_the_weights_of_the_data():
    params, h = plain_params(), 1e-5
    tx, plan = optim.adamw(1e-2, eps=1e-3), fzero.zero_plan(0, params, MESH, policy=FP64)
    step = fzero.make_train_step(plain_loss, tx, plan, donate=False)

    def after(weights):
        state = fzero.init_state(params, tx, plan, seed=0)
        for i in range(3):
            state, _ = step(state, {**batch_of(i), "mask": weights[:, None] * batch_of(i)["mask"]})
        return plain_loss(state.params, batch_of(9))[0]

    weights = torch.linspace(0.5, 1.5, ROWS, dtype=F64)
    gradient = torch.func.grad(after)(weights)
    differences = [(after(weights + h * e) - after(weights - h * e)) / (2 * h) for e in torch.eye(ROWS, dtype=F64)]
    assert_close(gradient, torch.stack(differences), rtol=1e-5, atol=1e-6)


def test_a_step_that_hides_its_gradient_would_be_seen(monkeypatch):
    """The mistake that the meta-gradient tests exist for: under no_grad the slope is 0 and nothing else shows it."""
    monkeypatch.setattr(train.contextlib, "nullcontext", torch.no_grad)
    with pytest.raises(AssertionError):
        test_meta_gradient_of_the_learning_rate_through_three_adamw_steps("mlp")


def total(model, params, batch):
    return forward.loss(model, params, batch, base.Ctx(dtype=F64)).total


@every_model
def test_gradients_per_example_and_their_norms_equal_the_loop(model):
    model = case_of(model).loss_fn
    params, batch = base.init_params(model, prng.key(0), F64), batch_of(0)
    row_gradient = torch.func.grad(lambda p, row: total(model, p, pytree.map(lambda x: x[None], row)))
    each = torch.func.vmap(row_gradient, in_dims=(None, 0))(params, batch)
    norms = torch.func.vmap(optim.global_norm)(each)
    for i in range(ROWS):
        alone = row_gradient(params, pick(batch, i))
        if bool(batch["mask"][i].any()):
            assert_close(pick(each, i), alone, rtol=1e-9, atol=1e-12)
            assert_close(norms[i], optim.global_norm(alone), rtol=1e-10)
        else:
            assert float(norms[i]) == float(optim.global_norm(alone)) == 0.0
    whole = torch.func.grad(lambda p: total(model, p, batch))(params)
    assert_close(pytree.map(lambda g: g.sum(0), each), whole, rtol=1e-9, atol=1e-12)


@every_model
def test_hessian_vector_product_equals_finite_differences(model):
    model, h = case_of(model).loss_fn, 1e-7
    params, batch = base.init_params(model, prng.key(0), F64), batch_of(0)
    vector = pytree.map_named(lambda n, p: prng.normal(prng.fold_in(prng.key(1), n), p.shape, dtype=F64), params)
    gradient = torch.func.grad(lambda p: total(model, p, batch))
    forward_over_reverse = torch.func.jvp(gradient, (params,), (vector,))[1]
    inner = lambda p: sum((g * v).sum() for g, v in zip(pytree.leaves(gradient(p)), pytree.leaves(vector)))  # noqa: E731
    reverse_over_reverse = torch.func.grad(inner)(params)
    ahead, behind = (gradient(pytree.map(lambda p, v, s=s: p + s * v, params, vector)) for s in (h, -h))
    differences = pytree.map(lambda a, b: (a - b) / (2 * h), ahead, behind)
    assert_close(forward_over_reverse, differences, rtol=1e-5, atol=1e-5)
    assert_close(reverse_over_reverse, forward_over_reverse, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_pure_step_is_jitted_and_equal():
    step, state = make(case_of("mlp", n_layers=1), optim.sgd(0.05), donate=False)
    fast = fzero.jit(step)
    a, b = state, clone(state)
    for i in range(2):
        (a, metrics), (b, fast_metrics) = step(a, batch_of(i)), fast(b, batch_of(i))
    assert_close(b, a, rtol=1e-10, atol=1e-12)
    assert_close(fast_metrics.loss, metrics.loss, rtol=1e-12)


def test_under_a_transform_a_scale_that_raises_is_refused_and_one_that_holds_works():
    case = case_of("mlp")
    for at_floor in ("raise", "hold"):
        step, state = make(
            case, optim.sgd(0.05), donate=False, policy=precision.fp16(precision.LossScale(at_floor=at_floor))
        )
        four = pytree.map(lambda x: torch.stack([x] * 4), state)
        if at_floor == "raise":
            with pytest.raises(ValueError, match="hold"):
                torch.func.vmap(step, in_dims=(0, None))(four, batch_of(0))
            continue
        four, metrics = torch.func.vmap(step, in_dims=(0, None))(four, batch_of(0))
        assert metrics.skipped.tolist() == [False] * 4 and four.scaler.scale.tolist() == [2.0**16] * 4
        assert_close(pick(four.master, 2), step(state, batch_of(0))[0].master, rtol=2e-3, atol=2e-3)


def test_vmap_over_states_skips_only_the_one_that_overflows():
    step, state = make(case_of("mlp"), optim.adamw(0.05), donate=False)
    four = pytree.map(lambda x: torch.stack([x] * 4), state)
    four.params["head"]["w"][1] = float("nan")
    new, metrics = torch.func.vmap(step, in_dims=(0, None))(four, batch_of(0))
    assert metrics.skipped.tolist() == [False, True, False, False]
    assert new.opt_state.count.tolist() == [1, 0, 1, 1] and new.step.tolist() == [1] * 4
    assert torch.equal(new.params["embed"]["tokens"][1], four.params["embed"]["tokens"][1])
    assert not torch.equal(new.params["embed"]["tokens"][2], four.params["embed"]["tokens"][2])


@every_model
def test_jacobian_by_reverse_mode_equals_that_by_forward_mode(model):
    model, batch = case_of(model).loss_fn, batch_of(0)
    params = base.init_params(model, prng.key(0), F64)
    blocks = pytree.named_leaves(params["blocks"])
    name, leaf = next(
        (n, leaf) for n, leaf in blocks.items() if "scale" in n
    )  # small: a column of the Jacobian is a pass

    def logits_of(scale):
        changed = {**params, "blocks": pytree.from_named({**blocks, name: scale}, params["blocks"])}
        return forward.logits(model, changed, batch, base.Ctx(dtype=F64))[0, :2, :3]

    assert_close(torch.func.jacrev(logits_of)(leaf), torch.func.jacfwd(logits_of)(leaf), rtol=1e-8, atol=1e-10)


def gradients(reduce, count):
    """(the function of parameters that is the gradient of `count` micro-batches of two rows, the parameters),
    float32."""
    case = case_of("mlp")
    plan = fzero.zero_plan(0, case.source, MESH, reduce=reduce)
    state = fzero.init_state(case.source, optim.sgd(0.1), plan, seed=3)
    gradient, parts = StepGradient(case.loss_fn, plan, fzero.Execution()), [batch_of(i, 2) for i in range(count)]
    return lambda params: gradient(state._replace(params=params), parts, 2, {}, torch.ones(()))[0], state.params


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_canonical_sums_under_transforms_have_the_streamed_bits(count):
    canonical, params = gradients("canonical", count)
    streamed = canonical(params)
    # Parameters that need a gradient take the way that may be transformed.
    found = canonical(pytree.map(lambda leaf: leaf.clone().requires_grad_(), params))
    assert all(leaf.requires_grad for leaf in pytree.leaves(found))
    assert_same(pytree.map(torch.detach, found), streamed)
    batched = torch.func.vmap(canonical)(pytree.map(lambda leaf: torch.stack([leaf, leaf]), params))
    assert_close(pytree.map(lambda leaf: leaf[1], batched), streamed, rtol=1e-5, atol=1e-6)


def test_the_order_of_sums_can_be_seen_and_differentiated():
    canonical, params = gradients("canonical", 7)
    fast, _ = gradients("fast", 7)
    needing = pytree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    pairs = list(zip(pytree.leaves(canonical(needing)), pytree.leaves(fast(needing))))
    assert any(not torch.equal(a, b) for a, b in pairs)
    square = lambda f: lambda p: sum((leaf**2).sum() for leaf in pytree.leaves(f(p)))  # noqa: E731
    assert_close(
        torch.func.grad(square(canonical))(params), torch.func.grad(square(fast))(params), rtol=1e-4, atol=1e-5
    )
