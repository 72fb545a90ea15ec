"""SwiGLU, GeGLU and the clamped SwiGLU: every law of a kernel, at odd sizes, far rows and none."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close

from fzero.kernels import glu

OPS = {name: getattr(glu, name) for name in glu.KINDS}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def form(op):
    return lambda impl, a, b: op(a, b, impl=impl)


@every_op
@pytest.mark.parametrize("shape", [(3, 37), (1,), (1025,)], ids=str)
def test_every_law(op, shape):
    laws.every_law(form(op), laws.draw(shape, shape))


@every_op
def test_derivatives(op):
    laws.derivatives(form(op), laws.draw((2, 5), (2, 5)))


@every_op
def test_none(op):
    a, b = laws.draw((0, 4), (0, 4), dtype=torch.float32)
    assert op(a, b, impl="triton").shape == (0, 4)


@every_op
def test_half_precision(op):
    laws.numbers(form(op), laws.draw((5, 7), (5, 7)), torch.float16)


def test_large_arguments_saturate():
    a = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=laws.DEVICE)
    largest = {"swiglu": [100.0, 1e4], "geglu": [100.0, 1e4], "clamped_swiglu": [14.0, 14.0]}
    for name, op in OPS.items():
        expected = torch.tensor([0.0, 0.0, 0.0, *largest[name]], device=laws.DEVICE)
        assert_close(op(a, torch.ones_like(a), impl="triton"), expected, rtol=1e-4)


def test_the_clamped_form_is_its_formula_on_both_sides_of_its_limits():
    far = torch.tensor([-9.0, -7.0, -6.9, 0.3, 6.9, 7.0, 9.0], dtype=torch.float64, device=laws.DEVICE)
    a, b = (x.flatten().requires_grad_() for x in torch.meshgrid(far, far, indexing="ij"))
    low, near = torch.where(a > 7.0, 7.0, a), torch.where(b.abs() > 7.0, 7.0 * b.sign(), b)
    expected = (near + 1.0) * low / (1.0 + torch.exp(-1.702 * low))
    wanted = torch.autograd.grad(expected.sum(), (a, b))
    for impl, dtype, rtol in (("reference", torch.float64, 1e-13), ("triton", torch.float32, 1e-5)):
        x, y = (t.detach().to(dtype).requires_grad_() for t in (a, b))
        out = glu.clamped_swiglu(x, y, impl=impl)
        assert_close(out.double(), expected, rtol=rtol, atol=rtol)
        for got, want in zip(torch.autograd.grad(out.sum(), (x, y)), wanted):
            assert_close(got.double(), want, rtol=rtol, atol=rtol)


def test_what_it_refuses():
    a, b = laws.draw((2, 3), (2, 3), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"swiglu: impl='triton' does not serve this call: the dtypes are torch.float64"
    ):
        glu.swiglu(a, b, impl="triton")
    with pytest.raises(ValueError, match="they must agree"):
        glu.swiglu(a.float(), b.float()[:1], impl="triton")
