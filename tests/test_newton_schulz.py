"""Newton-Schulz iterations with symmetric products: every law of a kernel."""

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero import optim
from fzero.kernels import newton_schulz

BF16 = torch.bfloat16


@pytest.mark.parametrize("shape", [(1, 70, 33), (2, 65, 130), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_symmetric_product(shape, add):
    x, s = laws.draw(shape, (shape[0], shape[1], shape[1]))
    s = s + s.mT
    exact = 0.7 * x @ x.mT + (0.3 * s if add else 0.0)
    plain = torch.baddbmm(s.to(BF16), x.to(BF16), x.to(BF16).mT, beta=0.3 if add else 0.0, alpha=0.7)
    got = newton_schulz.symmetric_product(x.to(BF16), s.to(BF16) if add else None, 0.7, 0.3)
    laws.at_most_twice("product", got, plain, exact)
    assert torch.equal(got, got.mT)
    assert_same(got, newton_schulz.symmetric_product(x.to(BF16), s.to(BF16) if add else None, 0.7, 0.3))
    apart = torch.stack((x.to(BF16), x.to(BF16)), -1)[..., 0]
    assert_same(newton_schulz.symmetric_product(apart, s.to(BF16) if add else None, 0.7, 0.3), got)


def test_every_tile_of_the_triangle():
    """Blocks of 64: a triangle of five rows, by its number alone."""
    x = laws.draw((2, 300, 16), dtype=BF16)[0]
    exact = x.double() @ x.double().mT
    got = newton_schulz.symmetric_product(x, None, 1.0, 0.0).double()
    assert ((got - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("shape", [(20, 70), (70, 20), (2, 3, 33, 40)], ids=str)
def test_iterations(shape):
    x = laws.draw(shape)[0]
    exact, plain = (
        newton_schulz.newton_schulz(x, impl="reference"),
        newton_schulz.newton_schulz(x.to(BF16), impl="reference"),
    )
    got = newton_schulz.newton_schulz(x.to(BF16), impl="triton")
    assert (got.shape, got.dtype) == (x.shape, BF16)
    laws.at_most_twice("iterations", got, plain, exact)


def test_derivative():
    (x,) = laws.draw((17, 24))
    w = laws.draw((17, 24), seed=1)[0]
    grad = lambda x, impl: torch.func.grad(lambda x: (newton_schulz.newton_schulz(x, 2, impl=impl) * w.to(x)).sum())(x)  # noqa: E731
    laws.at_most_twice("gradient", grad(x.to(BF16), "triton"), grad(x.to(BF16), "reference"), grad(x, "reference"))
    with pytest.raises(ValueError, match="it is differentiated once at most"):
        torch.func.vmap(lambda x: newton_schulz.newton_schulz(x, impl="triton"))(x.to(BF16)[None])


def test_none_and_far_rows():
    assert newton_schulz.symmetric_product(
        torch.empty(0, 4, 8, dtype=BF16, device=laws.DEVICE), None, 1.0, 0.0
    ).shape == (0, 4, 4)
    assert newton_schulz.newton_schulz(torch.empty(0, 4, 8, dtype=BF16, device=laws.DEVICE), impl="triton").shape == (
        0,
        4,
        8,
    )


def test_muon_takes_it():
    params, grads = ({"w": x.float()} for x in laws.draw((20, 40), (20, 40)))
    found = {}
    for impl in ("reference", "triton"):
        tx = optim.muon(0.1, ns_dtype=BF16, impl=impl)
        found[impl] = tx.update(grads, tx.init(params), params)[0]["w"]
    assert not torch.equal(found["triton"], torch.zeros_like(found["triton"]))
    torch.testing.assert_close(
        found["triton"], found["reference"], rtol=0, atol=0.01 * float(found["reference"].abs().max())
    )


def test_what_it_refuses():
    with pytest.raises(
        ValueError, match=r"newton_schulz: impl='triton' does not serve this call: it iterates in torch.float32"
    ):
        newton_schulz.newton_schulz(torch.ones(4, 4, device=laws.DEVICE), impl="triton")
