"""Random numbers of somebody's code: where it runs again it draws the same, and in a step by the state's key."""

import random
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F

import fzero
from fzero.core.autodiff import Remat

slow = pytest.mark.slow
F64 = torch.float64


class Ctx(NamedTuple):
    layer: object = ()


OWN = torch.Generator().manual_seed(7)
# Each is linear in w, so that <w, gradient> is the value if, and only if, both have the same random numbers.
LINEAR = {
    "F.dropout": lambda w: F.dropout(w, 0.5).sum(),
    "noise": lambda w: (torch.randn_like(w) * w).sum(),
    "a sample of rows": lambda w: w[torch.randperm(len(w))[:5]].sum(),
    "Python's": lambda w: (w * random.random()).sum(),
    "numpy's": lambda w: (w * numpy.random.rand()).sum(),
    "a generator of one's own": lambda w: (torch.rand(w.shape, generator=OWN, dtype=F64) * w).sum(),
    "remat within": lambda w: fzero.remat(lambda w: F.dropout(w, 0.3).sum())(w) + F.dropout(w, 0.3).sum(),
}


def linear_gradient(f, w):
    """(value, <w, gradient>) of a function that is linear in w; random numbers are drawn between the two passes."""
    w = w.detach().requires_grad_()
    value = f(w)
    random.random(), numpy.random.rand(), torch.rand(5, generator=OWN), torch.rand(3)
    value.backward()
    return float(value.detach()), float((w.detach() * w.grad).sum())


@pytest.mark.parametrize("name", LINEAR)
def test_remat_draws_the_same_again(name):
    value, product = linear_gradient(fzero.remat(LINEAR[name]), torch.linspace(1.0, 2.0, 30, dtype=F64))
    assert abs(value - product) < 1e-12


def test_remat_draws_the_same_again_under_transforms():
    f = fzero.remat(LINEAR["F.dropout"])
    w = torch.linspace(1.0, 2.0, 30, dtype=F64)
    value, tangent = torch.func.jvp(f, (w,), (w,))
    assert float(value) == pytest.approx(float(tangent), abs=1e-12)
    grads, values = torch.vmap(torch.func.grad_and_value(f), randomness="different")(w.expand(3, 30))
    assert (grads @ w - values).abs().max() < 1e-12 and len(set(values.tolist())) == 3
    cubed = fzero.remat(lambda w: (F.dropout(w, 0.5) ** 3).sum())
    torch.manual_seed(3)
    twice = torch.func.grad(lambda w: torch.func.grad(cubed)(w).sum())(w)
    kept = twice != 0
    torch.testing.assert_close(twice[kept], 6 * 8 * w[kept])  # of (2 w)^3, and not of two masks
    assert 5 < int(kept.sum()) < 25


def test_a_backward_pass_leaves_the_generators_as_they_are():
    drawn = []
    for wrap in (lambda f: f, fzero.remat):
        torch.manual_seed(0)
        linear_gradient(wrap(LINEAR["F.dropout"]), torch.ones(30, dtype=F64))
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)


def block(p, x, ctx):
    return F.dropout(x, 0.5) + F.dropout(p["w"], 0.3)


@pytest.mark.parametrize(
    "policy, compiled",
    [
        ("every:2", False),
        *(pytest.param("full", flag, marks=slow) for flag in (False, True)),
        *(pytest.param("every:3", flag, marks=slow) for flag in (False, True)),
        *(pytest.param(f"selective:{f}", flag, marks=slow) for f in (0.0, 0.5) for flag in (False, True)),
    ],
)
def test_a_stack_draws_the_same_again(policy, compiled):
    def f(w):
        return fzero.stack(
            block, {"w": w}, torch.zeros(16, dtype=F64), Ctx(), remat=Remat.parse(policy), compiled=compiled
        ).sum()

    value, product = linear_gradient(f, torch.linspace(1.0, 2.0, 80, dtype=F64).reshape(5, 16))
    assert abs(value - product) < 1e-12
    w = torch.ones(5, 16, dtype=F64, requires_grad=True)  # twice through one graph
    total = f(w)
    first, again = torch.autograd.grad(total, w, retain_graph=True)[0], torch.autograd.grad(total, w)[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("wrap", ["remat", "stack"])
def test_autocast_and_the_default_dtype_are_those_of_the_first_run(wrap):
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(2, 8, 8, generator=g), torch.randn(3, 8, generator=g)

    def layer(p, x, ctx):
        return (x @ p["w"]).float().tanh() * torch.ones(()).to(torch.float32) / torch.tensor(3.0).double().float()

    def run(w, policy):
        if wrap == "stack":
            return fzero.stack(layer, {"w": w}, x, Ctx(), remat=Remat.parse(policy)).sum()
        f = lambda w: layer({"w": w[1]}, layer({"w": w[0]}, x, None), None).sum()
        return fzero.remat(f)(w) if policy == "full" else f(w)

    grads = []
    for policy in ("none", "full"):
        w = w.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            total = run(w, policy)
        total.backward()
        grads.append(w.grad)
    assert torch.equal(*grads)


def test_what_a_graph_would_draw_anew_is_refused():
    w = torch.ones(30, dtype=F64)
    for f in (
        fzero.remat(LINEAR["F.dropout"]),
        lambda w: fzero.stack(block, {"w": w.reshape(2, 15)}, w[:15] * 0, Ctx(), remat=Remat(every=1)).sum(),
    ):
        with pytest.raises(ValueError, match=r"test_draws\.py:\d+ \(.*draws random numbers \(aten\..*hand them in"):
            fzero.jit(torch.func.grad(f))(w)
