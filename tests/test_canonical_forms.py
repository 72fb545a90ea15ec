"""Canonical forms: the bits of a row depend on that row alone, whatever lies beside it, by any number of threads,
from any strides; and every law of a kernel."""

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero.core import have_compiler
from fzero.kernels import Kernels, linear, registry

pytestmark = [
    pytest.mark.skipif(laws.DEVICE != "cpu", reason="they serve the CPU, and the laws draw for the GPU here"),
    pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler"),
]
BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 33)  # of rows: each tile of registers, w as it lies, w laid out


def parts_are_alike(f, tensors, rows=70):
    """f(first, end), of the rows [first, end) of all, has the bits of the whole, and 2 threads those of 1."""
    torch.set_num_threads(2)
    try:
        whole = f(*tensors)
    finally:
        torch.set_num_threads(1)
    assert_same(f(*tensors), whole)
    x, *others = tensors
    for count in COUNTS:
        for first in (0, rows - count):
            assert_same(f(x[first : first + count], *others), whole[first : first + count])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(100, 77), (300, 256), (7, 5), (600, 130)])
def test_a_row_of_a_product_depends_on_itself_alone(k, n, dtype):
    x, w = laws.draw((70, k), (k, n), dtype=dtype)
    parts_are_alike(linear.linear_product, (x, w))
    parts_are_alike(linear.logits_product, (x, w.T.contiguous()))
    apart = torch.cat((w, w), 1)[:, :n]
    for other in (apart, w.T.contiguous().T):  # rows apart; columns side by side
        assert_same(linear.linear_product(x, other), linear.linear_product(x, w))


@DTYPES
def test_the_order_of_a_product_is_that_of_its_definition(dtype):
    x, w = laws.draw((5, 90), (90, 40), dtype=dtype)
    chain = torch.zeros(5, 40)
    for k in range(90):  # a product of float32 is exact in float64, and so is all but the last bit of a sum
        chain = torch.addcmul(chain.double(), x[:, k, None].double(), w[k, None].double()).float()
    assert_same(linear.linear_product(x, w), chain.to(dtype))
    lanes = torch.zeros(5, 40, 16)
    for k in range(90):
        lane = lanes[..., k % 16]
        lanes[..., k % 16] = torch.addcmul(lane.double(), x[:, k, None].double(), w[k, None].double()).float()
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    assert_same(linear.logits_product(x, w.T.contiguous()), lanes[..., 0])
    backwards = linear.logits_product(x.flip(1), w.flip(0).T.contiguous())  # planted: another order of the same sum
    assert not torch.equal(backwards, lanes[..., 0])


def test_the_product_obeys_every_law():
    def f(impl, x, w):
        return linear.linear(x, w, impl=impl)

    for shapes in (((3, 37), (37, 20)), ((2, 2, 64), (64, 33)), ((70, 40), (40, 70))):
        for dtype in (torch.float32, BF16):
            laws.numbers(f, laws.draw(*shapes), dtype, impl="canonical")
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms, laws.traced):
        law(f, laws.draw((3, 37), (37, 20)), impl="canonical")


def test_what_has_no_canonical_form_is_refused_by_name():
    kernels = Kernels.parse("canonical")
    assert str(kernels) == "canonical" and kernels.canonical and not Kernels.parse("auto").canonical
    assert kernels["linear"] == "canonical" and kernels["dropout_add"] == "auto"
    with pytest.raises(ValueError, match="kernels=canonical: float8_linear has no form"):
        kernels["float8_linear"]
    with pytest.raises(ValueError, match="linear: impl='canonical' does not serve this call: the dtypes are"):
        linear.linear(torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), impl="canonical")
    assert registry.explain("linear", torch.ones(2, 3), torch.ones(3, 2)).chosen == "reference"
