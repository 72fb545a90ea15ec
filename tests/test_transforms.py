"""torch.func under ZeRO-3 on two ranks: each transform of a loss over sharded parameters equals the same on one
process."""

import pytest
import ranks
import torch
from close import assert_close
from law_cases import F64, FP64
from zero_cases import batch_for, model_of, whole_leaf

import fzero
from fzero import optim
from fzero.comm.collectives import psum
from fzero.core import prng, pytree
from fzero.models import base
from fzero.train.batch import local_batch
from fzero.train.state import state_specs

ROWS = 4


def problem(mesh, stage):
    """(model, plan, this rank's params, the mean loss of what the ranks have of a batch, this rank's rows of one)."""
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64)
    state = fzero.init_state(model, optim.sgd(0.1), plan, seed=3)
    ctx = base.Ctx(mesh=mesh, dtype=F64)

    def mean_loss(params, batch):
        out = base.loss(model, params, batch, ctx, plan)
        return psum(out.total, mesh["dp"]) / psum(out.num_tokens, mesh["dp"])

    return model, plan, state.params, mean_loss, local_batch(batch_for(0, ROWS), mesh)


def put_together(tree, plan, mesh, lead=0):
    """The whole leaves of a tree like the parameters, with `lead` dims in front."""
    specs = pytree.named_leaves(plan.params)
    return pytree.map_named(lambda name, leaf: whole_leaf(leaf, specs[name], mesh, lead), tree)


def gradient(mesh, stage):
    _, plan, params, loss, batch = problem(mesh, stage)
    return put_together(torch.func.grad(loss)(params, batch), plan, mesh)


def per_example(mesh, stage):
    """Gradients of every sequence of the global batch, and their norms."""
    model, plan, params, _, _ = problem(mesh, stage)
    ctx, dp = base.Ctx(mesh=mesh, dtype=F64), mesh["dp"]
    batch = batch_for(0, ROWS)
    mine = (torch.arange(ROWS) % dp.size == dp.rank).to(F64)

    def one(params, tokens, targets, counts):
        return counts * base.loss(model, params, {"tokens": tokens[None], "targets": targets[None]}, ctx, plan).total

    grads = torch.func.vmap(torch.func.grad(one), (None, 0, 0, 0))(params, batch["tokens"], batch["targets"], mine)
    layout = optim.sharded(plan.params, mesh, like=plan.like)
    norms = torch.stack([layout.norm(pytree.map(lambda g, i=i: g[i], grads)) for i in range(ROWS)])
    return put_together(grads, plan, mesh, lead=1), norms


def hessian_vector(mesh, stage):
    model, plan, params, loss, batch = problem(mesh, stage)
    direction = fzero.init_state(model, optim.sgd(0.1), plan, seed=4).params
    gradient = torch.func.grad(lambda p: loss(p, batch))
    return put_together(torch.func.jvp(gradient, (params,), (direction,))[1], plan, mesh)


def seeds(mesh, stage):
    """Gradients of models drawn from three seeds, all at once."""
    model, plan, _, loss, batch = problem(mesh, stage)
    keys = torch.stack([prng.key(seed) for seed in range(3)])
    draw = lambda key: fzero.init_state(model, optim.sgd(0.1), plan, seed=key).params  # noqa: E731
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


def state_layout(mesh, stage):
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64)
    tx = optim.adam(0.1)
    state = fzero.init_state(model, tx, plan, seed=3)
    return pytree.names(state) == pytree.names(state_specs(plan, tx))


def test_specs_have_the_structure_of_the_state():
    assert state_layout(fzero.one_process(), 3)
