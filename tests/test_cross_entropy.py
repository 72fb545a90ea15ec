"""Linear cross entropy by chunks against its reference, and the reference against PyTorch."""

import pytest
import torch
from close import assert_at_most_twice_the_error, assert_close, assert_same

from fzero.kernels import linear_cross_entropy as ce

F64 = torch.float64
N, D, V = 23, 5, 11


def inputs(dtype=F64, n=N, d=D, v=V):
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in ((n, d), (v, d)))
    return x, w, torch.randint(0, v, (n,), generator=generator), torch.rand(n, generator=generator) < 0.7


def eager(*args):
    return ce.linear_cross_entropy(*args, compiled=False)


def value_and_grads(form, x, w, targets, mask, scale=1.7):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = form(x, w, targets, mask)
    (loss * scale).backward()
    return {"loss": loss.detach(), "dx": x.grad, "dw": w.grad}


@pytest.fixture(params=(V * 4, V * 100, 1), ids=("6 chunks", "1 chunk", "1 token a chunk"))
def chunks(request, monkeypatch):
    monkeypatch.setitem(ce.CHUNK_BYTES, "cpu", 8 * request.param)


def test_reference_is_torch_s_cross_entropy():
    x, w, targets, mask = inputs()

    def torch_s(x, w, targets, mask):
        return torch.nn.functional.cross_entropy(x @ w.T, torch.where(mask, targets, -100), reduction="sum")

    expected = value_and_grads(torch_s, x, w, targets, mask)
    assert_close(value_and_grads(ce.reference, x, w, targets, mask), expected, rtol=1e-12, atol=1e-14)
    assert_close(value_and_grads(eager, x, w, targets, mask), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("which", ("some", "all", "none", "first", "last"))
def test_chunked_is_the_reference_for_every_mask(chunks, which):
    x, w, targets, mask = inputs()
    position = torch.arange(N)
    mask = {
        "some": mask,
        "all": position >= 0,
        "none": position < 0,
        "first": position == 0,
        "last": position == N - 1,
    }[which]
    expected = value_and_grads(ce.reference, x, w, targets, mask)
    got = value_and_grads(eager, x, w, targets, mask)
    if which == "none":
        assert_same(got, {"loss": torch.zeros((), dtype=F64), "dx": torch.zeros_like(x), "dw": torch.zeros_like(w)})
    else:
        assert_close(got, expected, rtol=1e-12, atol=1e-14)
        assert float(got["dx"][~mask].abs().sum()) == 0.0
    assert_close(eager(x, w, targets, mask), ce.reference(x, w, targets, mask), rtol=1e-13)


def test_no_tokens():
    x, w, targets, mask = inputs(n=0)
    got = value_and_grads(eager, x, w, targets, mask)
    assert_same(got, {"loss": torch.zeros((), dtype=F64), "dx": x, "dw": torch.zeros_like(w)})


def test_gradients_of_one_argument_alone(chunks):
    x, w, targets, mask = inputs()
    both = value_and_grads(ce.reference, x, w, targets, mask, scale=1.0)
    assert_close(torch.func.grad(eager)(x, w, targets, mask), both["dx"], rtol=1e-12, atol=1e-14)
    assert_close(torch.func.grad(eager, argnums=1)(x, w, targets, mask), both["dw"], rtol=1e-12, atol=1e-14)
    assert_close(
        torch.func.grad(eager, argnums=(0, 1))(x, w, targets, mask), (both["dx"], both["dw"]), rtol=1e-12, atol=1e-14
    )
    for i in (0, 1):
        leaves = [x.clone(), w.clone()]
        leaves[i].requires_grad_()
        eager(*leaves, targets, mask).backward()
        assert_close(leaves[i].grad, both["dx" if i == 0 else "dw"], rtol=1e-12, atol=1e-14)
        assert leaves[1 - i].grad is None


def test_a_second_backward_pass_through_the_same_graph(chunks):
    x, w, targets, mask = inputs()
    expected = value_and_grads(ce.reference, x, w, targets, mask, scale=1.0)
    x, w = x.requires_grad_(), w.requires_grad_()
    loss = eager(x, w, targets, mask)
    for scale in (2.0, 3.0, 1.0):
        got = torch.autograd.grad(loss, (x, w), torch.tensor(scale, dtype=F64), retain_graph=True)
        assert_close(got, (scale * expected["dx"], scale * expected["dw"]), rtol=1e-12, atol=1e-14)
    _, vjp = torch.func.vjp(lambda x, w: eager(x, w, targets, mask), x.detach(), w.detach())
    for scale in (1.0, -0.5):
        assert_close(
            vjp(torch.tensor(scale, dtype=F64)),
            (scale * expected["dx"], scale * expected["dw"]),
            rtol=1e-12,
            atol=1e-14,
        )


def test_every_transform(chunks):
    x, w, targets, mask = inputs()

    def uses(form):
        grad = torch.func.grad(lambda x, w: form(x, w, targets, mask), argnums=(0, 1))
        xs = torch.stack((x, torch.sin(x)))
        return {
            "grad": grad(x, w),
            "vmap": torch.vmap(lambda x: form(x, w, targets, mask))(xs),
            "vmap of grad": torch.vmap(grad, (0, None))(xs, w),
            "per example": torch.vmap(
                torch.func.grad(lambda w, *row: form(row[0][None], w, row[1][None], row[2][None])), (None, 0, 0, 0)
            )(w, x, targets, mask),
            "grad of grad": torch.func.grad(lambda w: (grad(x, w)[0] ** 2).sum())(w),
            "hessian-vector": torch.func.jvp(grad, (x, w), (torch.cos(x), torch.cos(w)))[1],
            "jvp": torch.func.jvp(lambda x: form(x, w, targets, mask), (x,), (torch.cos(x),)),
        }

    assert_close(uses(eager), uses(ce.reference), rtol=1e-11, atol=1e-13)


def test_a_second_derivative_that_chunked_cannot_give_is_an_error():
    x, w, targets, mask = inputs()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(eager(x, w, targets, mask), x, create_graph=True)
    # The first derivative does not depend on the graph it came from; one through a loss of it does.
    assert dx.requires_grad
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.grad of grad"):
        dx.square().sum().backward()


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_error_is_at_most_twice_that_of_plain_torch(dtype, compiled, monkeypatch):
    x, w, targets, mask = inputs(dtype, 192, 32, 64)

    def form(*args):
        return ce.linear_cross_entropy(*args, compiled=compiled)

    exact = value_and_grads(ce.reference, x.to(F64), w.to(F64), targets, mask, scale=1.0)
    plain = value_and_grads(ce.reference, x, w, targets, mask, scale=1.0)
    gradients = [{n: t[n] for n in ("dx", "dw")} for t in (plain, exact)]
    for elements in (
        (64 * 64, 64 * 192) if compiled else (64 * 2, 64 * 64, 64 * 192)
    ):  # 2 tokens at a time: 96 partial sums
        monkeypatch.setitem(ce.CHUNK_BYTES, "cpu", elements * dtype.itemsize)
        got = value_and_grads(form, x, w, targets, mask, scale=1.0)
        assert_at_most_twice_the_error({n: got[n] for n in ("dx", "dw")}, *gradients)
        # A sum of some hundred terms may by luck come out nearly exact in one order: its bound is of the size of a
        # rounding.
        assert got["loss"].dtype == torch.float32
        assert_close(got["loss"], exact["loss"], rtol={torch.bfloat16: 2e-3, torch.float32: 2e-6}[dtype])


def test_weights_wider_than_activations():
    x, w, targets, mask = inputs(torch.float32)
    mixed = value_and_grads(eager, x.to(torch.bfloat16), w, targets, mask)
    expected = value_and_grads(ce.reference, x.to(torch.bfloat16), w, targets, mask)
    assert [t.dtype for t in mixed.values()] == [torch.float32, torch.bfloat16, torch.float32]
    assert_close(mixed, expected, rtol=2e-2, atol=2e-2)


def test_compiled_in_float64_with_many_chunks(monkeypatch):
    x, w, targets, mask = inputs()
    monkeypatch.setitem(ce.CHUNK_BYTES, "cpu", 8 * V * 10)
    form = ce.linear_cross_entropy
    assert_close(
        value_and_grads(form, x, w, targets, mask),
        value_and_grads(ce.reference, x, w, targets, mask),
        rtol=1e-11,
        atol=1e-13,
    )
    assert_close(form(x, w, targets, mask), ce.reference(x, w, targets, mask), rtol=1e-12)


def test_logits_of_any_size():
    x, w, targets, mask = inputs(torch.float32)
    got = value_and_grads(eager, 1000.0 * x, w, targets, mask)
    exact = value_and_grads(ce.reference, 1000.0 * x.double(), w.double(), targets, mask)
    assert all(bool(t.isfinite().all()) for t in got.values())
    assert_close(got["loss"], exact["loss"], rtol=1e-5)


def test_the_gradient_of_w_is_summed_over_chunks_wider_than_bfloat16(monkeypatch):
    n = 2000  # a bfloat16 sum of halves stops growing at 128
    monkeypatch.setitem(ce.CHUNK_BYTES, "cpu", 1)
    x, w = torch.ones(n, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    targets, mask = torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)
    dw = value_and_grads(eager, x, w, targets, mask, scale=1.0)["dw"]
    assert dw.flatten().tolist() == [-n / 2, n / 2]


def test_the_error_of_the_gradient_of_w_does_not_grow_with_the_chunks(monkeypatch):
    """Of one token each: the sum of 2,048 gradients in float32 is as near as one of 32."""
    monkeypatch.setitem(ce.CHUNK_BYTES, "cpu", 1)
    x, w, _, _ = inputs(torch.float32, 2048, 3, 5)
    targets, mask = torch.zeros(2048, dtype=torch.int64), torch.ones(2048, dtype=torch.bool)
    got = value_and_grads(eager, x.abs(), w, targets, mask)["dw"]
    want = value_and_grads(ce.reference, x.abs().double(), w.double(), targets, mask)["dw"]
    assert float((got.double() - want).norm() / want.norm()) < 2e-7
