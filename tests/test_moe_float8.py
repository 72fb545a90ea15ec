"""Grouped products in float8: each group is a float8 linear by itself, in every form, in both passes and over ep."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close
from test_experts_dispatch import LOADS, E, both_passes, check, given, own_part
from zero_cases import batch_for, model_of

import fzero
from fzero.core import pytree
from fzero.kernels import moe, moe_float8
from fzero.kernels.float8 import E4M3, float8_linear, quantise
from fzero.kernels.moe_float8 import float8_grouped_mm
from fzero.models import Ctx
from fzero.models import experts as block
from fzero.sharding import ActivationSplit, Experts

FORMS = ("reference", "emulated", "triton") if laws.DEVICE == "cpu" else ("reference", "triton")
ENDS = [(2, 2, 40, 70), (0, 0, 0, 75), (1, 33, 64, 75)]


def drawn(ends, dtype=torch.float32, d=67, f=66):
    x, w, g = (t.to(dtype) for t in laws.draw((75, d), (len(ends), d, f), (75, f)))
    return x, w, g, torch.tensor(ends, dtype=torch.int32, device=laws.DEVICE)


def passes(impl, x, w, g, ends):
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = float8_grouped_mm(*leaves, ends, impl=impl)
    y.backward(g)
    return y.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("ends", [ENDS[0], *(pytest.param(e, marks=pytest.mark.exhaustive) for e in ENDS[1:])], ids=str)
@pytest.mark.parametrize("impl", FORMS)
def test_each_group_is_a_float8_linear_by_itself(impl, ends):
    """Rowwise, as float8.py defines it; rows behind the last group are zero, and so is the weight of an empty group."""
    x, w, g, behind = drawn(ends)
    y, dx, dw = passes(impl, x, w, g, behind)
    first = 0
    for e, end in enumerate(ends):
        if end == first:
            assert not dw[e].any()
            continue
        own = [t.clone().requires_grad_() for t in (x[first:end], w[e])]
        want = float8_linear(*own, "rowwise", impl="reference")
        want.backward(g[first:end])
        for got, expected in ((y[first:end], want), (dx[first:end], own[0].grad), (dw[e], own[1].grad)):
            assert_close(got, expected.detach(), rtol=1e-5, atol=1e-4)
        first = end
    assert not y[first:].any() and not dx[first:].any()


def test_the_forms_round_alike():
    """Of the same numbers the sums differ by their order alone."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        given = drawn(ENDS[0], dtype)
        base = passes("reference", *given)
        for impl in FORMS[1:]:
            for got, want in zip(passes(impl, *given), base):
                assert got.dtype == dtype
                assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()) / 4)


def test_the_error_is_that_of_three_bits():
    """Each operand is within 2^-4 of itself, and errors add like independent ones."""
    x, w, _, ends = drawn(ENDS[0])
    exact, ours = moe.grouped_mm(x[:70], w, ends, impl="reference"), float8_grouped_mm(x, w, ends)[:70]
    error = float((ours - exact).norm() / exact.norm())
    assert 0.01 < error < 2**-4


@pytest.mark.parametrize("k", [64, 4096, 16384])
@pytest.mark.parametrize("product", ["rows", "weights"])
def test_the_error_of_a_sum_does_not_grow_with_its_length(product, k):
    """Beside the float64 product of the same numbers. Matrix units that keep 14 bits of 128 products are within 1e-3;
    of 16384 they would not be."""
    x, w = laws.draw((k, 4), (k, 16))
    ends = torch.tensor([k if product == "weights" else 4], dtype=torch.int32, device=laws.DEVICE)
    (qx, ix), (qw, iw) = (quantise(t, E4M3, 0, True) for t in (x, w))
    if product == "rows":
        numbers = qx.t().contiguous(), qw.t().contiguous().mT[None]
        found = moe_float8.grouped_float8(*numbers, ix[0], iw, ends, torch.float32)
    else:
        numbers = qx.t().contiguous(), qw.t().contiguous()
        found = moe_float8.grouped_float8_dw(*numbers, ix, iw, ends, torch.float32)[0]
    exact = (qx.double().t() @ qw.double()) * (ix[0][:, None] * iw[0]).double()
    assert float((found - exact).norm() / exact.norm()) < (1e-6 if laws.DEVICE == "cpu" else 1e-3)


def test_a_row_is_rounded_alike_whichever_rows_lie_beside_it():
    x, w, _, ends = drawn(ENDS[2])
    y = float8_grouped_mm(x, w, ends)
    alone = float8_grouped_mm(x[33:64], w[2:3], torch.tensor([31], dtype=torch.int32, device=laws.DEVICE))
    assert_close(y[33:64], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_derivatives_of_derivatives_are_float8_products():
    x, w, g, ends = drawn((3, 7), torch.float64, d=5, f=4)
    x, g = x[:8], g[:8]
    f = lambda x, w: float8_grouped_mm(x, w, ends, impl="reference")  # noqa: E731
    tx, tw = torch.ones_like(x), torch.ones_like(w)
    _, tangent = torch.func.jvp(f, (x, w), (tx, tw))
    assert_close(tangent, f(tx, w) + f(x, tw), rtol=1e-12, atol=1e-12)
    pulled = lambda g: torch.func.vjp(f, x, w)[1](g)[0]  # noqa: E731
    assert_close(torch.func.jvp(pulled, (g,), (g,))[1], pulled(g), rtol=1e-12, atol=1e-12)
    assert_close(torch.func.vmap(f, (0, None))(x[None], w)[0], f(x, w), rtol=1e-12, atol=1e-12)


def test_what_is_refused():
    x, w, _, ends = drawn(ENDS[0])
    with pytest.raises(ValueError, match="it takes two of bfloat16 or float32"):
        float8_grouped_mm(x.double(), w.double(), ends, impl="triton")
    with pytest.raises(ValueError, match="it reads the groups' sizes, on the CPU"):
        float8_grouped_mm(*(t.to("meta") for t in (x, w, ends)), impl="emulated")
    assert moe_float8.group_of(4, torch.tensor([1, 1, 3], dtype=torch.int32)).tolist() == [0, 2, 2, 3]


# ---- in a block ------------------------------------------------------------------------------------------------------


def dispatched(mesh, form, load):
    ep = mesh["ep"]
    p, x, ids, weights, g = given(load, ep.size)
    own = lambda t: t.chunk(ep.size)[ep.rank]  # noqa: E731
    split = ActivationSplit(experts=Experts.parse(form))
    ctx = Ctx(mesh=mesh, dtype=torch.float64, split=split, matmul="float8_tensorwise")
    f = lambda p, x, weights: block.mixture(p, x, own(ids), weights, ctx, block.ExpertMixture(E))  # noqa: E731
    return both_passes(f, pytree.map(lambda t: own_part(t, ep), p), own(x), own(weights), own(g)), []


def test_a_row_is_rounded_alike_on_any_number_of_ranks():
    def one_process(load, ep, capacity=0.0):
        p, x, ids, weights, g = given(load, ep)
        return both_passes(lambda *t: moe.dropless(t[0], t[1], ids, t[2], float8=True), p, x, weights, g)

    for form in ("gather", "exchange:8"):
        for load in LOADS[:2]:
            check(2, form, load, run=dispatched, want=one_process)


def test_a_policy_of_float8_has_its_experts_in_float8(monkeypatch):
    calls, real = [], moe.float8_grouped_mm
    monkeypatch.setattr(moe, "float8_grouped_mm", Noted(real, calls))
    model, tx = model_of("moe dropless", n_experts=4), fzero.optim.sgd(0.1)
    for policy in ("bf16", "bf16_float8", "bf16_float8_rowwise"):
        plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy)
        state = fzero.init_state(model, tx, plan, seed=3)
        _, metrics = fzero.make_train_step(model, tx, plan)(state, batch_for(0, 8))
        assert 0.0 < float(metrics.loss) < 10.0
        calls.append(policy)
    # Of each policy in float8 three products of each of two layers, traced once or more.
    first, second, third = (calls.index(policy) for policy in ("bf16", "bf16_float8", "bf16_float8_rowwise"))
    assert first == 0 and second > 3 and third - second > 3


class Noted:
    """An operation that notes its calls."""

    def __init__(self, op, calls):
        self.op, self.calls, self.name = op, calls, op.name

    def __call__(self, *args, **options):
        self.calls.append("call")
        return self.op(*args, **options)
