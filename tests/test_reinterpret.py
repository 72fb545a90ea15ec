"""The bits of a tensor as numbers of another dtype, under every transform; and all that is made of them."""

import pytest
import torch
from close import assert_same

from fzero.core import autodiff, prng
from fzero.kernels import KINDS, dequantize, quantize
from fzero.sharding import error_feedback

I32, U8, F32 = torch.int32, torch.uint8, torch.float32


def cut(x):
    """x rounded towards zero to bfloat16's numbers."""
    return autodiff.reinterpret(autodiff.reinterpret(x, I32) & -0x10000, F32)


def weighted(x):
    return (x * cut(x)).sum()


@pytest.fixture
def x():
    return torch.randn(3, 4, 2)


def test_without_a_transform_it_is_a_view(x):
    y = autodiff.reinterpret(x, I32)
    assert y.data_ptr() == x.data_ptr() and y.dtype == I32
    assert_same(autodiff.reinterpret(x, U8), x.view(U8))


def test_vmap_at_every_dim_and_twice(x):
    for dim in range(3):
        assert_same(torch.vmap(cut, dim, dim)(x), cut(x))
    assert_same(torch.vmap(torch.vmap(cut))(x), cut(x))
    assert_same(torch.vmap(torch.vmap(cut, 1, 1), 1, 1)(x), cut(x))
    assert_same(torch.vmap(lambda x, y: cut(y) + x, (0, None))(x[:, 0], x[0]), x[:, :1] + cut(x[:1]))


def test_sizes_that_differ(x):
    assert_same(torch.vmap(lambda x: autodiff.reinterpret(x, U8))(x), x.view(U8))
    assert_same(torch.vmap(lambda x: autodiff.reinterpret(x, U8), 1, 1)(x), x.view(U8))
    assert_same(torch.vmap(lambda x: autodiff.reinterpret(autodiff.reinterpret(x, U8), F32), 1, 1)(x), x)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda x: torch.vmap(torch.func.grad(weighted))(x),
        lambda x: torch.func.grad(lambda x: torch.vmap(weighted)(x).sum())(x),
        lambda x: torch.stack([torch.func.jacrev(weighted)(row) for row in x]),
        lambda x: torch.stack([torch.func.jacfwd(weighted)(row) for row in x]),
    ],
    ids=["vmap of grad", "grad of vmap", "jacrev", "jacfwd"],
)
def test_it_carries_no_derivative(x, transformed):
    assert_same(transformed(x), cut(x))


def test_derivatives_along_a_direction(x):
    ones, wanted = torch.ones_like(x), cut(x).sum((1, 2))
    assert_same(torch.func.jvp(torch.vmap(weighted), (x,), (ones,))[1], wanted)
    assert_same(torch.vmap(lambda x, t: torch.func.jvp(weighted, (x,), (t,))[1])(x, ones), wanted)
    assert not torch.func.hessian(weighted)(x[0]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_codes_under_vmap_equal_the_loop(kind, stochastic):
    if stochastic and KINDS[kind].levels:
        pytest.skip("nf4 goes to the nearest level")
    x, key = torch.randn(3, 4, 48), prng.key(1) if stochastic else None

    def there_and_back(x):
        q = quantize.quantize(x, kind, 16, key=key)
        return q.data.to(F32), q.scale, dequantize(q, kind, 16)

    assert_same(torch.vmap(there_and_back)(x), tuple(map(torch.stack, zip(*map(there_and_back, x)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_messages_of_signs_under_vmap_equal_the_loop(dtype):
    bits, scales = torch.randint(0, 256, (3, 5, 4, 2), dtype=U8), torch.randn(3, 5, 4).to(dtype)

    def there_and_back(bits, scales):
        message = error_feedback.to_message(bits, scales)
        return message, *error_feedback.from_message(message, 5, dtype)

    messages, *back = torch.vmap(there_and_back)(bits, scales)
    assert_same(messages, torch.stack([error_feedback.to_message(*one) for one in zip(bits, scales)]))
    assert_same(back, [bits, scales])
