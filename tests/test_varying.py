"""A first step refuses a sum of what is the same on all ranks by construction, and no sum of values that are equal."""

import itertools
import math

import pytest
import ranks
import torch
from torch.func import grad
from zero_cases import OPTIMIZERS, model_of

import fzero
from fzero import all_gather, psum, psum_scatter, pvary
from fzero.comm import own_slice
from fzero.core import Function, Varying, pytree

V, T = 16, 8


def batch_of(what, rows):
    """Tokens and targets [rows, T]; of all but "random" each row is alike."""
    g = torch.Generator().manual_seed(0)
    if what == "random":
        tokens = torch.randint(1, V, (rows, T), generator=g)
    else:
        tokens = torch.full((rows, T), 0 if what == "zeros" else 3)
    return {"tokens": tokens, "targets": tokens.flip(1)}


def first_steps(mesh, name, stage, options):
    """What the first step of each kind of values says, "" for nothing."""
    said = {}
    for what in ("rows", "zeros", "overflow", "nan", "zero leaves"):
        model, tx = model_of(name), OPTIMIZERS["sgd"]
        plan = fzero.zero_plan(stage, model, mesh, policy="fp32", **options)
        state = fzero.init_state(model, tx, plan, seed=0)
        scale = {"overflow": 1e30, "nan": math.nan, "zero leaves": 0.0}.get(what)
        if scale is not None:
            state = state._replace(params=pytree.map(lambda leaf, scale=scale: leaf * scale, state.params))
        try:
            step = fzero.make_train_step(model, tx, plan, donate=False)
            _, metrics = step(state, fzero.local_batch(batch_of(what, 4), mesh))
            said[what] = "" if what not in ("overflow", "nan") or bool(metrics.skipped) else "not skipped"
        except ValueError as error:
            said[what] = str(error)
    return said


AXES = {
    "tp": ({"tp": 2}, {"sequence": True}),
    "cp": ({"cp": 2}, {}),
    "dp": ({"dp": 2}, {}),
    "ep": ({"ep": 2}, {}),
}
MODELS = ("gpt2", "llama", "moe dropless", "deepseek", "gemma")
FEW = (("moe dropless", "cp", 0),)


def cases():
    """All of them; those that are not exhaustive have each pair of a model, an axis and a stage."""
    out = []
    for (i, name), (j, axis), (k, stage) in itertools.product(*map(enumerate, (MODELS, AXES, (0, 3)))):
        if axis != "ep" or name in ("moe dropless", "deepseek"):
            mark = pytest.mark.exhaustive if (i + j + k) % 2 == 0 else pytest.mark.slow
            marks = [] if (name, axis, stage) in FEW else [mark]
            out.append(pytest.param(name, axis, stage, marks=marks, id=f"{name} {axis} {stage}"))
    return out


@pytest.mark.parametrize("name, axis, stage", cases())
def test_values_that_are_equal_by_chance_are_no_wrong_sum(name, axis, stage):
    sizes, options = AXES[axis]
    for said in ranks.run(2, first_steps, name, stage, options, mesh=sizes):
        assert not any(said.values()), said


# ---- what is refused ---------------------------------------------------------------------------------------------


class Filled(Function):
    """A kernel: what it fills is out of sight of every mode."""

    @staticmethod
    def forward(x):
        out = torch.empty_like(x)
        out.numpy()[...] = 2.0 * x.numpy()
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return Filled.apply(grad)


def into_empty(x):
    out = torch.empty(2, *x.shape)
    out[0].copy_(x)
    out[1].zero_()
    return out.sum(0)


# By name: (a program of x, which may differ, y, the same on all ranks, and an axis; whether its last sum is right).
PROGRAMS = {
    "differs": (lambda x, y, dp: psum(x, dp), True),
    "same": (lambda x, y, dp: psum(y, dp), False),
    "both": (lambda x, y, dp: psum(y + x.mean(), dp), True),
    "summed": (lambda x, y, dp: psum(psum(x, dp) * 2.0, dp), False),
    "gathered": (lambda x, y, dp: psum(all_gather(x, dp), dp), False),
    "scattered": (lambda x, y, dp: psum(psum_scatter(y, dp), dp), True),
    "sliced": (lambda x, y, dp: psum(own_slice(y, dp), dp), True),
    "by a kernel": (lambda x, y, dp: psum(Filled.apply(x), dp), True),
    "the same by a kernel": (lambda x, y, dp: psum(Filled.apply(y), dp), False),
    "written": (lambda x, y, dp: psum(torch.zeros(4).copy_(x), dp), True),
    "written over": (lambda x, y, dp: psum(x.clone().copy_(y), dp), False),
    "written in part": (lambda x, y, dp: psum(into_empty(x), dp), True),
    "added in place": (lambda x, y, dp: psum(y.clone().add_(x), dp), True),
    "a gradient": (lambda x, y, dp: grad(lambda w: (pvary(w, dp) * x).sum())(y), True),
    "a gradient of the same": (lambda x, y, dp: grad(lambda w: (pvary(w, dp) * y).sum())(y), False),
    "a backward pass": (lambda x, y, dp: backward(lambda w: (pvary(w, dp) * x).sum(), y), True),
    "a map": (lambda x, y, dp: psum(torch.func.vmap(lambda v: v * 2.0)(x.view(2, 2)), dp), True),
    "a map of the same": (lambda x, y, dp: psum(torch.func.vmap(lambda v: v * 2.0)(y.view(2, 2)), dp), False),
}


def backward(f, y):
    w = y.clone().requires_grad_()
    f(w).backward()
    return w.grad


def sums(mesh):
    """By program, whether its sum is refused where all ranks have equal numbers."""
    found = {}
    for name, (f, _) in PROGRAMS.items():
        with mesh.checked(), Varying() as varying:
            x, y = torch.ones(4), torch.arange(1.0, 5.0)
            varying.mark(x, frozenset({"dp"}))
            try:
                f(x, y, mesh["dp"])
                found[name] = True
            except ValueError as error:
                assert "is the same on all 2 ranks already" in str(error)
                found[name] = False
    return found


def test_a_sum_is_judged_by_where_its_input_comes_from():
    for found in ranks.run(2, sums):
        assert found == {name: right for name, (_, right) in PROGRAMS.items()}
