"""What must hold of every model, optimizer and policy on one process, each law stated once; test_laws.py applies them.

A law raises AssertionError where it does not hold. Mathematics is in float64. A law that compares two runs also checks
that they did something, and the mistakes that each law must catch are planted in test_teeth.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import written_out
from close import assert_close, assert_same
from law_cases import F64, FP64, MESH, OPTIMIZERS, ROWS, Case, D, L, T, V, batch_of, case_of, clone, make, run

import fzero
from fzero import optim
from fzero.core import precision, prng, pytree
from fzero.models import base, forward
from fzero.sharding import Spec

# ---- the step --------------------------------------------------------------------------------------------------------


def micro_batches(case: Case, tx: optim.GradientTransformation) -> None:
    """m micro-batches equal one (m = 2, 4), whatever the masks, dropout included: states and metrics after 3 steps
    within 1e-10."""
    whole, log = run(case, tx)
    for m in (2, 4):
        parts, parts_log = run(case, tx, micro_batches=m)
        assert_close(parts.params, whole.params, rtol=1e-10, atol=1e-12)
        assert_close([x.loss for x in parts_log], [x.loss for x in log], rtol=1e-10, atol=0.0)
        assert_close([x.grad_norm for x in parts_log], [x.grad_norm for x in log], rtol=1e-10, atol=0.0)
        assert [int(x.num_tokens) for x in parts_log] == [int(x.num_tokens) for x in log]
        assert int(parts.data_cursor) == int(whole.data_cursor) == 3 * ROWS


def one_normalisation(case: Case) -> None:
    """A step of SGD at rate r is params - r grad(total / num_tokens), both sums over the whole batch, however it is
    cut."""
    batch, rate = batch_of(0), 0.3
    for m in (1, 2, 4):
        step, state = make(case, optim.sgd(rate), micro_batches=m)

        ctx = base.Ctx(dtype=F64, key=prng.fold_in(prng.fold_in(state.key, "dropout"), 0))

        def mean(params: Any, ctx: base.Ctx = ctx) -> torch.Tensor:
            if isinstance(case.loss_fn, base.Model):
                out = forward.loss(case.loss_fn, params, batch, ctx)
            else:
                out = base.Loss(*case.loss_fn(params, batch))
            return out.total / int(batch["mask"].sum())

        # Under vmap every op and the stack of layers run by their definitions, here beside the fast forms of the step.
        lead = pytree.map(lambda p: p[None], state.params)
        gradient, loss = pytree.map(lambda x: x[0], torch.func.vmap(torch.func.grad_and_value(mean))(lead))
        expected = pytree.map(lambda p, g: p - rate * g, clone(state.params), gradient)
        expected = moved_by_rule(case.loss_fn, expected, batch, state.params, ctx)
        state, metrics = step(state, batch)
        assert_close(state.params, expected, rtol=1e-10, atol=1e-13)
        assert_close(metrics.loss, loss, rtol=1e-12, atol=0.0)
        assert_close(metrics.grad_norm, optim.global_norm(gradient), rtol=1e-10, atol=0.0)
        assert int(metrics.num_tokens) == int(batch["mask"].sum())


def moved_by_rule(loss_fn: Any, expected: Any, batch: Any, before: Any, ctx: base.Ctx) -> Any:
    """`expected` with the leaves that a rule of the model moves, by the counts of the whole batch."""
    rules = loss_fn.traits.leaf_rules if isinstance(loss_fn, base.Model) else {}
    if not rules:
        return expected
    tables, leaves = forward.loss(loss_fn, before, batch, ctx).tables, pytree.named_leaves(before)
    moved = {name: rule(leaves[name], tables) for name, rule in rules.items() if rule}
    return pytree.map_named(lambda name, leaf: moved.get(name, leaf), expected)


def weights_are_counts(scale: float) -> None:
    """A step does not change when all weights of a weighted loss are multiplied by one number, however small."""
    case, results = case_of("plain function"), []
    for by in (1.0, scale):
        step, state = make(case, optim.sgd(0.3), micro_batches=2)
        batch = batch_of(0)
        results.append(step(state, {**batch, "mask": by * batch["mask"].to(F64)}))
    (params, metrics), (scaled_params, scaled) = ((state.params, metrics) for state, metrics in results)
    assert_close(scaled_params, params, rtol=1e-10, atol=1e-12)
    assert_close(scaled.loss, metrics.loss, rtol=1e-10)


def evaluation(case: Case) -> None:
    """An evaluation is the sums of the loss without dropout, which add up over the parts of a batch; it changes
    nothing."""
    _, state = make(case, optim.sgd(0.3))
    plan = fzero.zero_plan(0, case.source, MESH, policy=FP64)
    evaluate, batch, before = fzero.make_eval_step(case.loss_fn, plan), batch_of(0), clone(state.params)
    whole = evaluate(state.params, batch)
    parts = [evaluate(state.params, pytree.map(lambda x, i=i: x[i : i + 2], batch)) for i in range(0, ROWS, 2)]
    assert_close(sum(part.total for part in parts), whole.total, rtol=1e-12)
    assert sum(int(part.num_tokens) for part in parts) == int(whole.num_tokens) == int(batch["mask"].sum())
    if isinstance(case.loss_fn, base.Model):
        defined = forward.loss(case.loss_fn, state.params, batch, base.Ctx(dtype=F64))
        assert_close(whole.total, defined.total, rtol=1e-12)
    assert_same(state.params, before)


def remat(case: Case) -> None:
    """Recomputation gives the bits of none; the selective policies run a traced program, equal among themselves and
    within 1e-10."""
    none, _ = run(case, optim.sgd(0.3), 2, remat="none")
    for policy in ("full", "every:2"):
        assert_same(run(case, optim.sgd(0.3), 2, remat=policy)[0], none)


def remat_selective(case: Case) -> None:
    """Selective recomputation gives the same bits whatever is kept, and those of none within 1e-10."""
    none, _ = run(case, optim.sgd(0.3), 1)
    most, least = (run(case, optim.sgd(0.3), 1, remat=f"selective:{kept}")[0] for kept in (0.9, 0.1))
    assert_same(least, most)
    assert_close(most.params, none.params, rtol=1e-10, atol=1e-12)


def compiled(case: Case, tolerance: float) -> None:
    """A compiled step equals the eager one: within 1e-10, and 1e-5 where RoPE's float32 angles go through another
    library's cosine."""
    eager, fast = (run(case, optim.sgd(0.3), 1, compiled=on)[0].params for on in (False, True))
    assert_close(fast, eager, rtol=tolerance, atol=tolerance * 1e-2)


def purity(case: Case, tx: optim.GradientTransformation) -> None:
    """Without donation the input state keeps its bits, and the same input gives the same output bits."""
    step, state = make(case, tx, donate=False, average=0.9, micro_batches=2)
    state, _ = step(state, batch_of(0))
    before = clone(state)
    first, second = step(state, batch_of(1)), step(state, batch_of(1))
    assert_same(state, before)
    assert_same(first, second)
    assert not torch.equal(pytree.leaves(first[0].params)[0], pytree.leaves(state.params)[0])


def donation(
    case: Case, tx: optim.GradientTransformation, policy: precision.Policy = FP64, tolerance: float = 1e-12
) -> None:
    """A donated step equals the pure one from the same state, average, master weights and micro-batches included."""
    options = {"policy": policy, "average": 0.9, "micro_batches": 2}
    pure, state = make(case, tx, donate=False, **options)
    donated, _ = make(case, tx, donate=True, **options)
    for i in range(3):
        (expected, metrics), (actual, same_metrics) = pure(state, batch_of(i)), donated(clone(state), batch_of(i))
        assert_same(same_metrics, metrics)
        assert pytree.names(actual) == pytree.names(expected)
        assert_same(actual.extra, expected.extra)
        for kept in ("params", "master", "opt_state"):
            a, b = (getattr(s, kept) for s in (actual, expected))
            rounded = policy.has_master and kept == "params"
            if b != ():
                assert_close(a, b, rtol=8e-3 if rounded else tolerance, atol=0.0 if rounded else tolerance * 1e-3)
        state = expected


def resume(case: Case, tx: optim.GradientTransformation) -> None:
    """The step is a function of (state, batch): a state rebuilt from its named tensors goes on with the same bits, in a
    new step."""
    step, state = make(case, tx, average=0.9)
    for i in range(2):
        state, _ = step(state, batch_of(i))
    named = {name: leaf.clone() for name, leaf in pytree.named_leaves(state).items()}
    fresh_step, fresh = make(case, tx, average=0.9)
    rebuilt = pytree.from_named(named, fresh)
    for i in range(2, 4):
        (state, a), (rebuilt, b) = step(state, batch_of(i)), fresh_step(rebuilt, batch_of(i))
        assert_same((rebuilt, b), (state, a))
    assert int(state.step) == 4 and int(state.data_cursor) == 4 * ROWS


# ---- transactions ----------------------------------------------------------------------------------------------------


def breakable(case: Case) -> Case:
    """The case as a plain loss function that divides by zero where a row of batch["bad"] is 1."""

    def loss(params: Any, batch: Any) -> base.Loss:
        rest = {name: leaf for name, leaf in batch.items() if name != "bad"}
        if isinstance(case.loss_fn, base.Model):
            out = forward.loss(case.loss_fn, params, rest, base.Ctx(dtype=F64))
        else:
            out = base.Loss(*case.loss_fn(params, rest))
        return out._replace(total=out.total / (1.0 - batch["bad"].max()))

    source = case.source
    if isinstance(source, base.Model):
        source = base.init_params(source, prng.key(3), F64)
    return Case(loss, source)


def transaction(case: Case, tx: optim.GradientTransformation, *, donate: bool) -> None:
    """A step whose gradient is not finite says so and changes nothing but step and cursor; the run goes on as if it had
    not been."""
    case = breakable(case)
    good = lambda i: {**batch_of(i), "bad": torch.zeros(ROWS, dtype=F64)}  # noqa: E731
    bad = {**batch_of(9), "bad": torch.eye(ROWS, dtype=F64)[ROWS - 1]}
    options = {"donate": donate, "average": 0.9, "micro_batches": 2}
    step, state = make(case, tx, **options)
    _, clean = make(case, tx, **options)
    for i in range(3):
        before = clone(state)
        state, metrics = step(state, bad)
        assert bool(metrics.skipped) and not torch.isfinite(metrics.grad_norm)
        kept = lambda s: (s.params, s.master, s.opt_state, s.extra, s.key)  # noqa: E731
        assert_same(kept(state), kept(before))
        assert int(state.step) == int(before.step) + 1 and int(state.data_cursor) == int(before.data_cursor) + ROWS
        (state, metrics), (clean, clean_metrics) = step(state, good(i)), step(clean, good(i))
        assert not bool(metrics.skipped)
        assert_same((kept(state), metrics), (kept(clean), clean_metrics))
    assert int(state.step) == 6 and int(clean.step) == 3


def overflow(case: Case, *, donate: bool) -> None:
    """A float16 step at too high a scale is skipped and lowers the scale by the rule until a step fits; then the
    parameters move."""
    config = precision.LossScale(init=2.0**40, factor=2.0**4, hysteresis=2, at_floor="hold")
    step, state = make(case, optim.adamw(0.01), policy=precision.fp16(config), donate=donate, average=0.9)
    expected, scales = precision.init_scaler(config), []
    for i in range(40):
        before = clone(state)
        state, metrics = step(state, batch_of(i))
        assert float(metrics.loss_scale) == float(before.scaler.scale)
        expected = precision.update_scaler(config, expected, metrics.skipped)
        assert_same(state.scaler, expected)
        moved = any(not torch.equal(a, b) for a, b in zip(pytree.leaves(before.master), pytree.leaves(state.master)))
        assert moved != bool(metrics.skipped)
        scales.append(float(state.scaler.scale))
        if moved:
            break
        assert_same(
            (state.params, state.master, state.opt_state, state.extra),
            (before.params, before.master, *before[3:4], before.extra),
        )
    assert len(scales) > 4 and scales[0] == 2.0**40 and scales[1] == 2.0**36, scales
    assert moved and torch.isfinite(metrics.loss) and 1.0 <= scales[-1] < 2.0**40


def floor(case: Case) -> None:
    """An overflow at the floor raises, the state being as it was, or holds the floor and skips: as the policy says."""
    high = 2.0**60
    for at_floor in ("raise", "hold"):
        config = precision.LossScale(init=high, floor=high, hysteresis=1, at_floor=at_floor)
        step, state = make(case, optim.adamw(0.01), policy=precision.fp16(config))
        before = clone(state)
        if at_floor == "raise":
            with pytest.raises(FloatingPointError, match="floor"):
                step(state, batch_of(0))
            assert_same(state, before)
            continue
        for i in range(2):
            state, metrics = step(state, batch_of(i))
            assert bool(metrics.skipped) and float(state.scaler.scale) == high
        assert_same((state.params, state.master, state.opt_state), (before.params, before.master, before.opt_state))


def master_weights(policy: precision.Policy) -> None:
    """Updates below the resolution of the parameters add up in the master weights, of which the parameters are the
    rounding."""
    params, rate, steps = {"w": torch.ones(4)}, 2.0**-12, 20
    case = Case(lambda p, batch: (p["w"].float().sum() * batch["x"].sum(), batch["x"].sum()), params)
    for donate in (True, False):
        step, state = make(case, optim.sgd(rate), policy=policy, donate=donate)
        for _ in range(steps):
            state, metrics = step(state, {"x": torch.ones(2)})
            assert not bool(metrics.skipped)
        assert_close(state.master, {"w": torch.full((4,), 1.0 - steps * rate)}, rtol=1e-6, atol=0.0)
        assert_same(state.params, pytree.map(lambda m: m.to(policy.param), state.master))
        assert not torch.equal(state.params["w"], params["w"].to(policy.param))


# ---- layout and cost -------------------------------------------------------------------------------------------------


def state_layout(case: Case, tx: optim.GradientTransformation) -> None:
    """tx.spec has the structure of tx.init and names every dim, after init and after steps; a step keeps the state's
    whole layout."""
    plan = fzero.zero_plan(0, case.source, MESH)
    tx = optim.with_average(tx, 0.9)
    step, state = make(case, tx)
    layout = pytree.named_leaves(tx.spec(plan.trained(plan.opt)))
    shape = {name: (leaf.shape, leaf.dtype) for name, leaf in pytree.named_leaves(state).items()}
    for i in range(3):
        named = pytree.named_leaves(state.opt_state)
        assert list(named) == list(layout), f"{set(named) ^ set(layout)}"
        for name, spec in layout.items():
            assert isinstance(spec, Spec), name
            assert len(spec.dims) in (0, named[name].dim()), f"{name}: {spec} for shape {list(named[name].shape)}"
            if named[name].numel() > L * D * V:
                assert len(spec.dims) == named[name].dim(), f"{name}: a large leaf's spec says nothing"
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in pytree.named_leaves(state).items()} == shape
        state, _ = step(state, batch_of(i))


def cost(case: Case, name: str, policy: precision.Policy) -> None:
    """Bytes at rest are N (param + [master] + state x trees of the optimizer + [average]) and scalars; the optimizer is
    handed N gradients in policy.accumulate. So AdamW takes 16 bytes a parameter in fp32, its gradients included."""
    make_tx, trees = OPTIMIZERS[name]
    tx, seen = make_tx(0.01), []

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append(sum(g.numel() * g.element_size() for g in pytree.leaves(grads)))
        return tx.update(grads, state, params)

    spy = tx._replace(update=update, with_shards=None)
    for ema in (False, True):
        step, state = make(case, spy, policy=policy, donate=False, average=0.9 if ema else 0.0)
        state, _ = step(state, batch_of(0))
        count = sum(p.numel() for p in pytree.leaves(state.params))
        wide, narrow = policy.state.itemsize, policy.param.itemsize
        per_param = narrow + (wide if policy.has_master else 0) + trees * wide + (wide if ema else 0)
        # step, key, cursor, the optimizer's count, the loss's statistics, scaler
        scalars = 8 + 16 + 8 + 8 + 24 + (20 if policy.loss_scale else 0)
        held = sum(leaf.numel() * leaf.element_size() for leaf in pytree.leaves(state))
        assert held == count * per_param + scalars, f"{held} bytes at rest, {count} x {per_param} + {scalars} expected"
        assert seen.pop() == count * policy.accumulate.itemsize


def init_depends_on_names(name: str) -> None:
    """A leaf's initial value depends on seed and name: not on the plan, the order of the leaves, or which others there
    are."""
    model = case_of(name).loss_fn
    whole = pytree.named_leaves(base.init_params(model, prng.key(3), F64))
    leaves: list[tuple] = []
    model.init(lambda *args: leaves.append((*args, 0.0)[:4]))

    def only(kept: list[tuple]) -> Callable:
        return lambda make_leaf: {args[0]: make_leaf(*args) for args in kept}

    for kept in (leaves[::-1], leaves[::2], leaves[1::3]):
        part = base.init_params(model._replace(init=only(kept)), prng.key(3), F64)
        assert_same(part, {args[0]: whole[args[0]] for args in kept})
    drawn = [leaf for leaf in whole.values() if leaf.std() > 0]
    assert len({float(leaf.flatten()[0]) for leaf in drawn}) == len(drawn), "two leaves are drawn alike"
    states = [
        fzero.init_state(model, optim.adamw(0.1), fzero.zero_plan(stage, model, MESH, policy=FP64), seed=3)
        for stage in range(4)
    ]
    for state in states[1:]:
        assert_same(state, states[0])
    other = fzero.init_state(model, optim.sgd(0.1), fzero.zero_plan(0, model, MESH, policy=FP64), seed=4)
    assert not torch.equal(other.params["embed"]["tokens"], states[0].params["embed"]["tokens"])


# ---- the models ------------------------------------------------------------------------------------------------------


def wide_params(model: base.Model) -> Any:
    """Parameters with no leaf at its initial constant, so that scales and biases count."""
    params = base.init_params(model, prng.key(5), F64)
    return pytree.map_named(
        lambda n, p: p + 0.3 * prng.normal(prng.fold_in(prng.key(6), n), p.shape, dtype=F64), params
    )


def as_written(name: str) -> None:
    """A model's loss and logits, in the fast form and in the reference form, are those of the model written out
    (written_out.py)."""
    model = case_of(name).loss_fn
    params, batch, ctx = wide_params(model), batch_of(0), base.Ctx(dtype=F64)
    total, num_tokens, logits = written_out.loss(model.config, params, batch)
    forms = (
        forward.loss,
        lambda *args: torch.func.vmap(lambda p: forward.loss(args[0], p, *args[2:]))(
            pytree.map(lambda x: x[None], args[1])
        ),
    )
    for form in forms:
        out = form(model, params, batch, ctx)
        assert_close(out.total.reshape(()), total, rtol=1e-5, atol=0.0)  # the angles of RoPE are float32
        assert int(out.num_tokens) == num_tokens
    assert_close(forward.logits(model, params, batch, ctx), logits, rtol=1e-4, atol=1e-5)


def causal(name: str) -> None:
    """The logits of a position do not depend on later tokens. (With a capacity they do: first choices go before second
    ones.)"""
    model = case_of(name).loss_fn
    params, batch, ctx = wide_params(model), batch_of(0), base.Ctx(dtype=F64)
    del batch["documents"]
    logits = forward.logits(model, params, batch, ctx)
    for t in range(1, T):
        changed = {**batch, "tokens": batch["tokens"].clone()}
        changed["tokens"][:, t:] = (changed["tokens"][:, t:] + 5) % V
        assert_close(forward.logits(model, params, changed, ctx)[:, :t], logits[:, :t], rtol=1e-10, atol=1e-12)


def documents(name: str) -> None:
    """A document's logits in a packed sequence are its logits alone."""
    model = case_of(name).loss_fn
    params, batch, ctx = wide_params(model), batch_of(0), base.Ctx(dtype=F64)
    logits, compared = forward.logits(model, params, batch, ctx), 0
    for row, numbers in enumerate(batch["documents"]):
        for number in numbers.unique():
            at = numbers == number
            tokens = batch["tokens"][row, at][None]
            alone = forward.logits(model, params, {"tokens": tokens, "targets": tokens}, ctx)[0]
            # RoPE is relative, but its float32 angles are not exactly.
            assert_close(logits[row, at], alone, rtol=1e-4, atol=1e-5)
            compared += int(number > 0)
    assert compared > 3
