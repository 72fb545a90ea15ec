"""SwiGLU and GeGLU: every law of a kernel, at odd sizes, far rows and none."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close

from fzero.kernels import glu

OPS = {"swiglu": glu.swiglu, "geglu": glu.geglu}
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
    for op in OPS.values():
        assert_close(
            op(a, torch.ones_like(a), impl="triton"), torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4], device=laws.DEVICE)
        )


def test_what_it_refuses():
    a, b = laws.draw((2, 3), (2, 3), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"swiglu: impl='triton' does not serve this call: the dtypes are torch.float64"
    ):
        glu.swiglu(a, b, impl="triton")
    with pytest.raises(ValueError, match="they must agree"):
        glu.swiglu(a.float(), b.float()[:1], impl="triton")
