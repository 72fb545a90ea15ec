"""Canonical forms: the bits of a row depend on that row alone, whatever lies beside it, by any number of threads,
from any strides; and every law of a kernel."""

from typing import Any
from unittest import mock

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero.core import have_compiler
from fzero.kernels import (
    Kernels,
    glu,
    linear,
    linear_cross_entropy,
    moe,
    norm,
    quantize,
    registry,
    rope,
    rowwise,
)
from fzero.kernels.moe_routing import route
from fzero.kernels.quantized_linear import CODES, quantized_linear

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


NUMBERS = {
    "gelu": (rowwise.gelu, 1),
    "sigmoid": (rowwise.sigmoid, 1),
    "tanh": (rowwise.tanh, 1),
    "swiglu": (glu.swiglu, 2),
    "geglu": (glu.geglu, 2),
    "clamped_swiglu": (glu.clamped_swiglu, 2),
}
WIDTH = 37
ROWS = {
    "rms_norm": (lambda x, s, impl: norm.rms_norm(x, s, 1e-5, impl=impl), 1, 1),
    "add_rms_norm": (lambda x, r, s, impl: norm.add_rms_norm(x, r, s, 1e-5, impl=impl), 2, 1),
    "layer_norm": (lambda x, s, b, impl: norm.layer_norm(x, s, b, 1e-5, impl=impl), 1, 2),
    "add_layer_norm": (lambda x, r, s, b, impl: norm.add_layer_norm(x, r, s, b, 1e-5, impl=impl), 2, 2),
    "route": (lambda x, impl: route(x, 3, impl=impl)[1:], 1, 0),
    "route by bias": (lambda x, impl: route(x, 3, torch.linspace(-1, 1, WIDTH), impl=impl)[1:], 1, 0),
    "rope": (lambda x, impl: rope.rope(x.reshape(1, -1, 1, 36), FAR[: len(x)], ANGLES, impl=impl)[0, :, 0], 1, 0),
    "log_sum_exp": (lambda x, impl: rowwise.log_sum_exp(x.float(), impl=impl), 1, 0),
}
FAR = torch.arange(70) * 1777
ANGLES = rope.rope_frequencies(36, 10000.0, None)


@DTYPES
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_does_not_depend_on_its_place(name, dtype):
    op, count = NUMBERS[name]
    tensors = [6 * x for x in laws.draw(*[(40000,)] * count, dtype=dtype)]
    whole = op(*tensors, impl="canonical")
    for first, end in ((0, 1), (17, 30), (3, 39999), (39990, 40000)):
        assert_same(op(*(x[first:end] for x in tensors), impl="canonical"), whole[first:end])
    torch.set_num_threads(2)
    assert_same(op(*(x.expand(2, -1)[:, ::2] for x in tensors), impl="canonical")[1], whole[::2])
    ends = torch.tensor([-torch.inf, -1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4, torch.nan], dtype=dtype)
    found, exact = op(*[ends] * count, impl="canonical").double(), op(*[ends.double()] * count)
    torch.testing.assert_close(found[1:], exact[1:], rtol=1e-2, atol=1e-30, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("name", ROWS)
def test_a_row_depends_on_itself_alone(name, dtype):
    f, tensors, params = ROWS[name]
    width = 36 if name == "rope" else WIDTH
    inputs = laws.draw(*[(70, width)] * tensors, *[(width,)] * params, dtype=dtype)

    def of_rows(first, end):
        out = f(*(x[first:end] for x in inputs[:tensors]), *inputs[tensors:], impl="canonical")
        return list(laws.tuple_of(out))

    whole = of_rows(0, 70)
    torch.set_num_threads(2)
    assert_same(of_rows(0, 70), whole)
    for count in (1, 2, 7, 33):
        assert_same(of_rows(0, count), [x[:count] for x in whole])
        if name != "rope":  # whose rows are positions
            assert_same(of_rows(70 - count, 70), [x[70 - count :] for x in whole])


def test_the_functions_obey_every_law():
    forms: dict[str, Any] = {
        name: (lambda impl, *t, op=op: op(*t, impl=impl), [(3, 37)] * n) for name, (op, n) in NUMBERS.items()
    }
    for name, (f, tensors, params) in ROWS.items():
        width = 36 if name == "rope" else WIDTH
        shapes = [(5, width)] * tensors + [(width,)] * params
        forms[name] = (lambda impl, *t, f=f: f(*t, impl=impl), shapes)
    ids, ends = torch.arange(12) % 5, torch.tensor([4, 4, 9], dtype=torch.int32)
    forms["grouped_mm"] = lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), [(12, 20), (3, 20, 9)]
    forms["logits"] = lambda impl, x, w: linear.logits(x, w, 2.0, impl=impl), [(5, 20), (9, 20)]
    options = {"cap": 3.0, "z_loss": 1e-3, "smoothing": 0.1}
    forms["loss"] = (
        lambda impl, x, w: linear_cross_entropy.linear_cross_entropy(x, w, ids, impl=impl, **options),
        [(12, 20), (9, 20)],
    )
    for name, (f, shapes) in forms.items():
        tensors = laws.draw(*shapes)
        for dtype in (torch.float32, BF16):
            if (name, dtype) != ("loss", BF16):  # whose logits in bfloat16 are those of torch's products
                laws.numbers(f, tensors, dtype, impl="canonical")
        laws.repeats(f, tensors, impl="canonical")
        laws.adjoint(f, tensors, impl="canonical")
        laws.transforms(f, tensors, impl="canonical")
        if name not in ("rope", "route by bias", "grouped_mm", "loss"):  # whose numbers are no arguments here
            laws.traced(f, tensors, impl="canonical")


@DTYPES
def test_rows_of_experts_and_losses_depend_on_themselves_alone(dtype):
    x, w, head = laws.draw((70, 40), (3, 40, 21), (50, 40), dtype=dtype)
    ids = torch.arange(70) % 50
    ends = torch.tensor([20, 33, 70], dtype=torch.int32)
    whole = moe.grouped_mm(x, w, ends, impl="canonical")
    one = moe.grouped_mm(x[25:26], w, torch.tensor([0, 1, 1], dtype=torch.int32), impl="canonical")
    assert_same(one[0], whole[25])
    assert not moe.grouped_mm(x, w, ends - 5, impl="canonical")[65:].any()

    def losses(first, end, chunk=1 << 26):
        with mock.patch.object(linear_cross_entropy, "CHUNK_BYTES", {"cpu": chunk, "cuda": chunk}):
            inputs = x[first:end], head, ids[first:end]
            options = {"impl": "canonical", "per_token": True, "cap": 5.0}
            return linear_cross_entropy.linear_cross_entropy(*inputs, **options)[1]

    assert_same(losses(0, 70, 1), losses(0, 70))
    for count in (1, 2, 7, 33):
        assert_same(losses(70 - count, 70), losses(0, 70)[70 - count :])
    logits = linear.logits(x[:3], head, 5.0, impl="canonical")
    at_target = logits.gather(1, ids[:3, None])[:, 0]
    assert_same(rowwise.log_sum_exp(logits, impl="canonical") - at_target, losses(0, 3))  # as a sampler has it


@DTYPES
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("k", "n", "block"), [(70, 96, 32), (33, 70, 14), (300, 256, 64)])
def test_codes_have_the_product_of_what_they_stand_for(k, n, block, kind, dtype):
    w, x = laws.draw((k, n), (70, k), dtype=torch.float32)
    codes, x = quantize.quantize(w, kind, block), x.to(dtype)

    def product(x, impl="canonical"):
        return quantized_linear(x, *codes, kind, block, impl=impl)

    dense = quantize.dequantize(codes, kind, block, torch.float32)
    assert_same(product(x), linear.linear_product(x.float(), dense).to(dtype))
    parts_are_alike(product, (x,))
    torch.testing.assert_close(product(x), product(x, "reference"), rtol=0.02, atol=0.1 if dtype == BF16 else 1e-3)
    few, all_rows = (registry.explain("quantized_linear", rows, *codes, kind, block).chosen for rows in (x[:2], x))
    assert (few, all_rows) == ("cpp", "reference")


def test_what_has_no_canonical_form_is_refused_by_name():
    kernels = Kernels.parse("canonical")
    assert str(kernels) == "canonical" and kernels.canonical and not Kernels.parse("auto").canonical
    assert kernels["linear"] == "canonical" and kernels["dropout_add"] == "auto"
    with pytest.raises(ValueError, match="kernels=canonical: float8_linear has no form"):
        kernels["float8_linear"]
    with pytest.raises(ValueError, match="linear: impl='canonical' does not serve this call: the dtypes are"):
        linear.linear(torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), impl="canonical")
    assert registry.explain("linear", torch.ones(2, 3), torch.ones(3, 2)).chosen == "reference"
