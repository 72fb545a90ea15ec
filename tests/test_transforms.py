"""torch.func under ZeRO-3 and pipelines on two ranks: each transform of a loss over sharded parameters equals the same
on one process."""

import contextlib
import functools
import itertools
import math

import pytest
import ranks
import torch
from close import assert_close
from law_cases import F64, FP64
from zero_cases import batch_for, model_of, packed_batch_for, whole_leaf

import fzero
from fzero import local_batch, optim, psum, pvary, state_specs
from fzero.core import prng, pytree
from fzero.models import base, forward
from fzero.sharding import Context
from fzero.train.loss import make_loss

ROWS = 4


def problem(mesh, stage, name="llama", pipeline=None, sequence=False):
    """(model, plan, this rank's params, the mean loss of what the ranks have of a batch, this rank's rows of one)."""
    model = model_of(name, dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, pipeline=pipeline, sequence=sequence)
    state = fzero.init_state(model, optim.sgd(0.1), plan, seed=3)
    ctx = base.Ctx(mesh=mesh, dtype=F64)

    def mean_loss(params, batch):
        out = forward.loss(model, params, batch, ctx, plan)
        total, count = (psum(psum(x, mesh["dp"]), mesh["cp"]) for x in (out.total, out.num_tokens))
        return total / count

    return model, plan, state.params, mean_loss, local_batch(batch_for(0, ROWS), mesh)


def put_together(tree, plan, mesh, lead=0):
    """The whole leaves of a tree like the parameters, with `lead` dims in front."""
    specs = pytree.named_leaves(plan.params)

    def whole(name, leaf):
        if lead and specs[name].rows:
            return torch.stack([whole_leaf(one, specs[name], mesh) for one in leaf])
        return whole_leaf(leaf, specs[name], mesh, lead)

    return pytree.map_named(whole, tree)


@contextlib.contextmanager
def by_rules_alone():
    """Under vmap an operator without a rule for it raises, in place of a loop over the examples and a warning."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)


def gradient(mesh, stage, *which):
    _, plan, params, loss, batch = problem(mesh, stage, *which)
    return put_together(torch.func.grad(loss)(params, batch), plan, mesh)


def per_example(mesh, stage, *which):
    """Gradients of every sequence of the global batch, and their norms."""
    model, plan, params, _, _ = problem(mesh, stage, *which)
    ctx, dp = base.Ctx(mesh=mesh, dtype=F64), mesh["dp"]
    batch = packed_batch_for(0, ROWS)
    mine = (torch.arange(ROWS) % dp.size == dp.rank).to(F64)

    def one(params, row, counts):
        return counts * forward.loss(model, params, pytree.map(lambda x: x[None], row), ctx, plan).total

    with by_rules_alone():
        grads = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(params, batch, mine)
    layout = optim.sharded(plan.params, mesh, like=plan.like)
    norms = torch.stack([layout.norm(pytree.map(lambda g, i=i: g[i], grads)) for i in range(ROWS)])
    return put_together(grads, plan, mesh, lead=1), norms


def hessian_vector(mesh, stage, *which):
    model, plan, params, loss, batch = problem(mesh, stage, *which)
    direction = fzero.init_state(model, optim.sgd(0.1), plan, seed=4).params
    gradient = torch.func.grad(lambda p: loss(p, batch))
    return put_together(torch.func.jvp(gradient, (params,), (direction,))[1], plan, mesh)


def seeds(mesh, stage, *which):
    """Gradients of models drawn from three seeds, all at once."""
    model, plan, _, loss, batch = problem(mesh, stage, *which)
    keys = torch.stack([prng.key(seed) for seed in range(3)])
    draw = lambda key: fzero.init_state(model, optim.sgd(0.1), plan, seed=key).params  # noqa: E731
    with by_rules_alone():
        params = torch.func.vmap(draw)(keys)
        return put_together(torch.func.vmap(torch.func.grad(loss), (0, None))(params, batch), plan, mesh, lead=1)


def double_backward(mesh, stage):
    """The gradient of the squared norm of the gradient."""
    _, plan, params, loss, batch = problem(mesh, stage)
    specs = pytree.named_leaves(plan.params)

    def squared_norm(params):
        grads = pytree.named_leaves(torch.func.grad(loss)(params, batch))
        zero = torch.zeros((), dtype=F64)
        cut = sum((g.square().sum() for name, g in grads.items() if "dp" in specs[name].axes), zero)
        return psum(cut, mesh["dp"]) + sum(
            (g.square().sum() for name, g in grads.items() if "dp" not in specs[name].axes), zero
        )

    return put_together(torch.func.grad(squared_norm)(params), plan, mesh)


CASES = (gradient, per_example, hessian_vector, seeds, double_backward)


@functools.cache
def of_one_process(case, *which):
    return case(fzero.one_process(), 0, *which)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("stage", (3, 1))
def test_equals_one_process(case, stage):
    expected = of_one_process(case)
    assert max(float(leaf.abs().max()) for leaf in pytree.leaves(expected)) > 1e-3
    for result in ranks.run(2, case, stage, mesh={"dp": 2}):
        assert_close(result, expected, rtol=1e-9, atol=1e-12)


def of_one_leaf(mesh, stage, *which):
    """The gradient, and a Hessian-vector product, by one leaf, which some ranks have no layer of."""
    _, plan, params, loss, batch = problem(mesh, stage, *which)
    named = pytree.named_leaves(params)
    name = next(name for name in named if name.startswith("blocks_encoder/"))

    def of_leaf(leaf):
        return loss(pytree.from_named({**named, name: leaf}, params), batch)

    out = torch.func.jvp(torch.func.grad(of_leaf), (named[name],), (torch.ones_like(named[name]),))
    return [whole_leaf(one, plan.leaves[name].params, mesh) for one in out]


def through_a_step(mesh, stage, *which):
    """The slope of the loss after two steps by the initial parameters."""
    model, plan, _, loss, batch = problem(mesh, stage, *which)
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.3))
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=2, donate=False)
    parts = local_batch(batch_for(0, ROWS), mesh, 2)

    def after(params):
        one, _ = step(state._replace(params=params), parts)
        two, metrics = step(one, parts)
        return loss(two.params, batch) + metrics.loss

    return put_together(torch.func.grad(after)(state.params), plan, mesh)


LAYOUT, INTERLEAVED = fzero.Pipeline(layout="1,2"), fzero.Pipeline("interleaved", chunks=2)
OVER_PP = {
    "gradient": (gradient, {"pp": 2}, 3, "gpt2", LAYOUT),
    "gradient, interleaved": (gradient, {"pp": 2}, 1, "gemma", INTERLEAVED),
    "gradient, several stacks": (gradient, {"pp": 2}, 0, "encoder and decoder", fzero.Pipeline(layout="2,4")),
    "gradient, experts": (gradient, {"pp": 2}, 0, "deepseek", LAYOUT),
    "one leaf": (of_one_leaf, {"pp": 2}, 3, "encoder and decoder", fzero.Pipeline(layout="3,3")),
    "examples": (per_example, {"pp": 2}, 1, "gpt2", LAYOUT),
    "hessian": (hessian_vector, {"pp": 2}, 3, "gemma", INTERLEAVED),
    "hessian, down and up": (hessian_vector, {"pp": 2}, 3, "gemma", fzero.Pipeline("zb-v", chunks=2)),
    "seeds": (seeds, {"pp": 2}, 3, "gpt2", LAYOUT),
    "steps": (through_a_step, {"pp": 2}, 3, "gpt2", LAYOUT),
    "with dp": (hessian_vector, {"pp": 2, "dp": 2}, 3, "gemma", INTERLEAVED),
    "with tp": (hessian_vector, {"pp": 2, "tp": 2}, 1, "gpt2", LAYOUT),
    "examples with dp": (per_example, {"pp": 2, "dp": 2}, 3, "gemma", INTERLEAVED),
}


SLOW = ("seeds", "with dp", "with tp", "examples with dp")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in OVER_PP])
def test_over_pp_equals_one_process(name):
    """Uneven layouts, several chunks, tied leaves, leaves of which a rank has no layer."""
    case, sizes, stage, *which = OVER_PP[name]
    expected = of_one_process(case, which[0])
    assert max(float(leaf.abs().max()) for leaf in pytree.leaves(expected)) > 1e-3
    for result in ranks.run(math.prod(sizes.values()), case, stage, *which, mesh=sizes):
        assert_close(result, expected, rtol=1e-10, atol=1e-12)


OVER_CP = {
    "examples": (per_example, {"cp": 2}, 3, "llama"),
    "hessian": (hessian_vector, {"cp": 2}, 3, "gpt2"),
    "seeds": (seeds, {"cp": 2}, 0, "moe dropless"),
    "hessian with dp": (hessian_vector, {"dp": 2, "cp": 2}, 3, "gemma"),
    "hessian, gathered": (hessian_vector, {"cp": 2}, 3, "gpt2", None, Context("gather")),
    "hessian, balanced": (hessian_vector, {"cp": 2}, 1, "llama", None, Context("gather", "balanced")),
    "examples, balanced": (per_example, {"cp": 2}, 3, "llama", None, Context("gather", "balanced")),
    "examples, exchanged": (per_example, {"cp": 2}, 0, "gemma", None, Context("ulysses", "zigzag")),
    "seeds, gathered": (seeds, {"dp": 2, "cp": 2}, 3, "gpt2", None, Context("gather", "contiguous")),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("examples", "hessian") else pytest.mark.exhaustive)
        for n in OVER_CP
    ],
)
def test_over_cp_equals_one_process(name):
    case, sizes, stage, *which = OVER_CP[name]
    expected = case(fzero.one_process(), 0, *which)
    assert max(float(leaf.abs().max()) for leaf in pytree.leaves(expected)) > 1e-3
    for result in ranks.run(math.prod(sizes.values()), case, stage, *which, mesh=sizes):
        assert_close(result, expected, rtol=1e-10, atol=1e-12)


def state_layout(mesh, stage):
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64)
    tx = optim.adam(0.1)
    state = fzero.init_state(model, tx, plan, seed=3)
    return pytree.names(state) == pytree.names(state_specs(plan, tx))


def test_specs_have_the_structure_of_the_state():
    assert state_layout(fzero.one_process(), 3)


# -- gradients through steps


def draw_normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# Leaves that two ranks can share and one that they cannot.
START = {name: draw_normal(i, *shape) for i, (name, shape) in enumerate({"w": (4, 3), "b": (3,), "v": (3, 2)}.items())}
DATA = {"x": draw_normal(3, 8, 4), "y": draw_normal(4, 8, 2), "weight": 0.5 + draw_normal(5, 8).square()}
RATE = torch.tensor(0.05, dtype=F64)


def squared_error(params, batch):
    y = torch.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]
    return ((y - batch["y"]).square().sum(-1) * batch["weight"]).sum(), batch["weight"].sum()


CLIPPED = lambda lr: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(lr, momentum=0.9))  # noqa: E731
OPTIMIZERS = {
    "clipped sgd": CLIPPED,
    "adamw": lambda lr: optim.adamw(lr, eps=1e-3, weight_decay=0.1),
    "lamb": lambda lr: optim.lamb(lr, eps=1e-3),
    "adafactor": optim.adafactor,
}


def after_two_steps(mesh, stage, optimizer):
    """(the function (rate, parameters or None, weights of the samples) -> loss and norm of the second step, and the
    loss of the parameters after it; the plan; the parameters at first)."""
    plan = fzero.zero_plan(stage, START, mesh, policy=FP64)
    loss = make_loss(squared_error, plan, fzero.Execution())

    def run(lr, params, weight):
        tx = OPTIMIZERS[optimizer](lr)
        step = fzero.make_train_step(squared_error, tx, plan, donate=False)
        state = fzero.init_state(START, tx, plan, seed=0)
        state = state if params is None else state._replace(params=params)
        for _ in range(2):
            state, metrics = step(state, local_batch({**DATA, "weight": weight}, mesh))
        out = loss(state.params, local_batch(DATA, mesh), {}, 0)
        total, count = (psum(psum(x, mesh["dp"]), mesh["rp"]) for x in (out.total, out.num_tokens))
        return metrics.loss + metrics.grad_norm + total / count

    return run, plan, fzero.init_state(START, CLIPPED(0.1), plan, seed=0).params


def by_what_a_step_uses(mesh, stage, optimizer):
    """The slopes by the rate in reverse and forward mode, the second one, and those by parameters and samples."""
    run, plan, params = after_two_steps(mesh, stage, optimizer)
    by_rate = lambda lr: run(lr, None, DATA["weight"])  # noqa: E731
    varied = lambda w: pvary(pvary(w, mesh["dp"]), mesh["rp"])  # noqa: E731  (each rank takes other rows)
    slope, one = torch.func.grad(by_rate), torch.ones((), dtype=F64)
    return {
        "rate": slope(RATE),
        "forward": torch.func.jvp(by_rate, (RATE,), (one,))[1],
        "second": torch.func.jvp(slope, (RATE,), (one,))[1],
        "params": put_together(torch.func.grad(lambda p: run(RATE, p, DATA["weight"]))(params), plan, mesh),
        "samples": torch.func.grad(lambda w: run(RATE, None, varied(w)))(DATA["weight"]),
    }


def of_stages(mesh, cases):
    return [by_what_a_step_uses(mesh, *case) for case in cases]


def expect_complete(sizes, cases):
    for found in ranks.run(math.prod(sizes.values()), of_stages, cases, mesh=sizes):
        for (_, optimizer), result in zip(cases, found):
            expected = of_one_process(by_what_a_step_uses, optimizer)
            assert all(float(leaf.abs().max()) > 1e-4 for leaf in pytree.leaves(expected))
            assert_close(result, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_gradients_through_steps_are_complete_at_every_stage(stages):
    expect_complete({"dp": 2}, [(stage, "clipped sgd") for stage in stages])


OTHERS = list(OPTIMIZERS)[1:]


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        pytest.param({"dp": 2}, list(itertools.product((0, 1, 3), OTHERS)), marks=pytest.mark.slow, id="dp"),
        pytest.param({"dp": 2, "rp": 2}, list(zip((0, 1, 3), OTHERS)), marks=pytest.mark.slow, id="rp, each pair"),
        pytest.param(
            {"dp": 2, "rp": 2}, list(itertools.product((0, 1, 3), OTHERS)), marks=pytest.mark.exhaustive, id="rp"
        ),
    ],
)
def test_gradients_through_steps_of_any_optimizer_are_complete(sizes, cases):
    expect_complete(sizes, cases)


def by_rate_and_parameters(mesh, stage, name, sequence):
    """Of a layered model, whose ctx says nothing of the mesh."""
    model = model_of(name, dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, sequence=sequence if mesh.size > 1 else False)

    def run(lr, params=None):
        tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(lr, eps=1e-3))
        state = fzero.init_state(model, tx, plan, seed=3)
        state = state if params is None else state._replace(params=params)
        batch = local_batch(batch_for(0, ROWS), mesh)
        state, metrics = fzero.make_train_step(model, tx, plan, donate=False)(state, batch)
        out = forward.loss(model, state.params, batch, base.Ctx(dtype=F64), plan)
        total, count = (psum(psum(x, mesh["dp"]), mesh["cp"]) for x in (out.total, out.num_tokens))
        return metrics.loss + metrics.grad_norm + total / count

    params = fzero.init_state(model, optim.sgd(0.1), plan, seed=3).params
    by_params = torch.func.grad(lambda p: run(RATE, p))(params)
    return torch.func.grad(run)(RATE), put_together(by_params, plan, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "stage", "sequence"),
    [
        ({"tp": 2}, 0, True),
        ({"dp": 2, "tp": 2}, 2, True),
        ({"cp": 2}, 1, Context("gather")),
        ({"cp": 2, "tp": 2}, 3, Context("gather", over_tp=True)),
    ],
    ids=str,
)
def test_gradients_through_a_step_of_a_model_are_complete(sizes, stage, sequence):
    expected = by_rate_and_parameters(fzero.one_process(), 0, "gpt2", False)
    for result in ranks.run(math.prod(sizes.values()), by_rate_and_parameters, stage, "gpt2", sequence, mesh=sizes):
        assert_close(result, expected, rtol=1e-9, atol=1e-11)


def under_a_bare_ctx(mesh, sequence):
    """The gradient, a Hessian-vector product and gradients per example where only the plan knows how activations are
    split."""
    model = model_of("gpt2", dropout=0.0)
    plan = fzero.zero_plan(0, model, mesh, policy=FP64, sequence=sequence if mesh.size > 1 else False)
    params, direction = (fzero.init_state(model, optim.sgd(0.1), plan, seed=seed).params for seed in (3, 4))
    batch = batch_for(0, ROWS)

    def total(params, batch):
        return psum(forward.loss(model, params, batch, base.Ctx(dtype=F64), plan).total, mesh["cp"])

    gradient = torch.func.grad(total)
    found, product = torch.func.jvp(lambda p: gradient(p, batch), (params,), (direction,))
    each = torch.func.vmap(lambda p, row: gradient(p, pytree.map(lambda x: x[None], row)), (None, 0))(params, batch)
    return [put_together(tree, plan, mesh, lead) for tree, lead in ((found, 0), (product, 0), (each, 1))]


@pytest.mark.parametrize(
    ("sizes", "sequence"),
    [
        ({"tp": 2}, True),
        pytest.param({"tp": 2}, False, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "tp": 2}, Context("gather", over_tp=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_says_how_activations_are_split(sizes, sequence):
    expected = under_a_bare_ctx(fzero.one_process(), False)
    for result in ranks.run(math.prod(sizes.values()), under_a_bare_ctx, sequence, mesh=sizes):
        assert_close(result, expected, rtol=1e-9, atol=1e-11)
