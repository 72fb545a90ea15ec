"""torch.func under ZeRO-3 and pipelines on two ranks: each transform of a loss over sharded parameters equals the same
on one process."""

import contextlib
import math

import pytest
import ranks
import torch
from close import assert_close
from law_cases import F64, FP64
from zero_cases import batch_for, model_of, packed_batch_for, whole_leaf

import fzero
from fzero import optim
from fzero.comm.collectives import psum
from fzero.core import prng, pytree
from fzero.models import base, forward
from fzero.sharding.context import Context
from fzero.train.batch import local_batch
from fzero.train.state import state_specs

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("stage", (3, 1))
def test_equals_one_process(case, stage):
    expected = case(fzero.one_process(), 0)
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
    expected = case(fzero.one_process(), 0, which[0])
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
