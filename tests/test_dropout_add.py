"""Dropout with a residual sum: every law of a kernel, and the mask bit for bit that of random.bernoulli, wherever a
range begins."""

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero.core import prng
from fzero.kernels import dropout, registry
from fzero.kernels.dropout import dropout_add

RATE = 0.3
FIRSTS = (0, 5, (1 << 32) + 2, 4 * (1 << 32) - 7, (1 << 45) + 3)  # the last but one has blocks on both sides of 2^32


def key():
    return prng.key(1234567890123456789, laws.DEVICE)


def form(first=6, rate=RATE, row_stride=None):
    return lambda impl, x, residual: dropout_add(x, residual, rate, key(), first, row_stride, impl=impl)


def mask(impl, shape, first, row_stride=None, rate=RATE):
    x = torch.ones(shape, device=laws.DEVICE)
    first = torch.tensor(first, device=laws.DEVICE)
    return dropout_add(x, torch.zeros_like(x), rate, key(), first, row_stride, impl=impl) != 0


def bernoulli(first, rows, columns, row_stride, rate=RATE):
    index = first + torch.arange(rows)[:, None] * row_stride + torch.arange(columns)
    return prng.bernoulli(key(), 1.0 - rate, index.shape, index=index.to(laws.DEVICE))


@pytest.mark.parametrize("shape", [(3, 37), (1,), (2, 3, 5), (2049,)], ids=str)
def test_every_law(shape):
    laws.every_law(form(), laws.draw(shape, shape))


def test_laws_of_a_range_of_each_row():
    for law in (laws.strides, laws.adjoint, laws.repeats, laws.traced):
        law(form(row_stride=50), laws.draw((3, 2, 5), (3, 2, 5)))


def test_derivatives():
    laws.derivatives(form(), laws.draw((2, 5), (2, 5)))


@pytest.mark.each_value
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("first", FIRSTS)
def test_the_mask_is_bernoulli_s(impl, first):
    for row_stride in (None, 40, 43):
        assert_same(mask(impl, (5, 23), first, row_stride), bernoulli(first, 5, 23, row_stride or 23))


@pytest.mark.each_value
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("first", FIRSTS)
def test_a_part_has_the_mask_of_the_whole(impl, first):
    whole = mask("reference", (6, 4, 5), first)
    assert_same(mask(impl, (3, 4, 5), first + 2 * 20), whole[2:5])
    for part in (0, 1):
        assert_same(mask(impl, (6, 2, 5), first + part * 10, row_stride=20), whole[:, 2 * part : 2 * part + 2])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_more_elements_than_a_program_has(impl):
    assert_same(mask(impl, (3, 4099), 1), bernoulli(1, 3, 4099, 4099))
    assert_same(mask(impl, (2, 4099), 2, 8200), bernoulli(2, 2, 4099, 8200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9])
def test_the_reference_s_bits(dtype, rate):
    """And both are what is written out here."""
    x, residual = laws.draw((7, 33), (7, 33), dtype=dtype)
    keep = bernoulli(3, 7, 33, 33, rate)
    expected = residual + torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)
    for impl in ("auto", "reference", "triton"):
        assert_same(form(3, rate)(impl, x, residual), expected)


def test_far_rows():
    """About 2^30 elements apart, which fits in 32 bits, but not twice it; each tensor's others."""
    near, f = laws.draw((3, 19), (3, 19), dtype=torch.bfloat16), form(row_stride=50)
    expected = laws.both_passes(lambda *t: f("triton", *t), near)
    leaves = [
        laws.far_apart(3, 19, t.dtype, (1 << 30) + 8 * i).copy_(t).requires_grad_() for i, t in enumerate(near, 1)
    ]
    out = f("triton", *leaves)
    cotangent = laws.far_apart(3, 19, out.dtype, (1 << 30) + 24).copy_(laws.draw(out.shape, seed=1)[0])
    assert_same([[out], list(torch.autograd.grad(out, leaves, cotangent))], list(expected))


def test_other_keys_have_other_masks():
    ones = torch.ones(100, device=laws.DEVICE)
    low, high = (
        dropout_add(ones, ones, RATE, k.to(laws.DEVICE), 0, impl="triton")
        for k in (prng.key(1), prng.key(1 + (1 << 32)))
    )
    assert not torch.equal(low, high)


def test_a_batch_of_batches_goes_by_the_reference():
    x, residual = laws.draw((4, 2, 3), (4, 2, 3), dtype=torch.float32)
    firsts = torch.arange(4, device=laws.DEVICE) * 6

    def one(x, residual, first, impl="auto"):
        return dropout_add(x, residual, RATE, key(), first, impl=impl)

    expected = dropout_add(x.reshape(8, 3), residual.reshape(8, 3), RATE, key(), 0, impl="triton")
    assert_same(torch.vmap(one)(x, residual, firsts), expected.reshape(4, 2, 3))
    with pytest.raises(ValueError, match="not under vmap or jvp"):
        torch.vmap(lambda *t: one(*t, impl="triton"))(x, residual, firsts)


@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_none(impl):
    for shape in ((0, 4), (3, 0)):
        x, residual = laws.draw(shape, shape, dtype=torch.float32)
        assert dropout_add(x, residual, RATE, key(), 0, 7, impl=impl).shape == shape


def test_nothing_is_kept_but_the_key_and_the_index():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x, residual = (t.requires_grad_() for t in laws.draw((8, 64), (8, 64), dtype=torch.float32))
        form()("triton", x, residual)
    assert sorted(t.numel() for t in kept) == [1, 2]


def test_what_it_refuses():
    x, residual = laws.draw((2, 3), (2, 3), dtype=torch.float32)
    with pytest.raises(
        ValueError,
        match=r"dropout_add: impl='triton' does not serve this call: the dtypes are torch.float32 and torch.bf",
    ):
        form()("triton", x, residual.bfloat16())
    with pytest.raises(ValueError, match=r"the shapes are \[2, 3\] and \[1, 3\]; they must agree"):
        form()("triton", x, residual[:1])
    for impl in ("reference", "triton"):
        with pytest.raises(ValueError, match=r"rate is 1.0; it must be in \[0, 1\)"):
            form(rate=1.0)(impl, x, residual)
    assert "interpreted" in registry.explain("dropout_add", x, residual, RATE, key(), 0).reasons["triton"] or x.is_cuda
    assert "plain sum" in registry.explain("dropout_add", x, residual, 0.0, key(), 0).reasons["triton"]
    assert dropout.dropout(x, 0.0, key(), 0) is x
