"""Attention by tiles on a CPU: against the reference, at the tiles' edges, in every dtype, with torch's products and
with plain loops."""

import functools

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same

from fzero.core import have_compiler
from fzero.kernels import FULL, Pattern, attention
from fzero.kernels import attention_tiled as module
from fzero.kernels.attention_tiled import blocked_attention, prefers, supports

pytestmark = pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler")
F64 = torch.float64
tiled_attention = functools.partial(attention.attend, "tiled")
PATTERNS = {
    "full": FULL,
    "window": Pattern("window", 7),
    "window that a tile touches": Pattern("window", 66),
    "wide window": Pattern("window", 150),
    "local": Pattern("local", 40),
    "local as wide as a tile": Pattern("local", 64),
    "strided": Pattern("strided", 9),
    "strided beyond a tile": Pattern("strided", 130),
    "fixed": Pattern("fixed", 16, 3),
    "fixed beyond a tile": Pattern("fixed", 70, 20),
    "bigbird": Pattern("bigbird", 16, global_count=1, near=1, random=1, seed=2**31 - 1),
    "bigbird beyond a tile": Pattern("bigbird", 70, global_count=0, near=2, random=2),
    "bigbird of single tokens": Pattern("bigbird", 1, global_count=2, near=3, random=3, seed=4),
}


def draw(b, t, h, g, k, dtype=F64, seed=0):
    return laws.draw((b, t, h, k), (b, t, g, k), (b, t, g, k), dtype=dtype, seed=seed, device="cpu")


def documents_of(b, t):
    """Documents of different lengths in every row, one of a single token."""
    return torch.stack(
        [((torch.arange(t) + 5 * i) // max(2, t // 3)).add((torch.arange(t) == t - 1).int()) for i in range(b)]
    )


def chosen(impl, *tensors, **options):
    return (attention.reference if impl in ("reference", "auto") else tiled_attention)(*tensors, **options)


@pytest.fixture(params=("torch's products", "loops"))
def products(request):
    for dtype in module.DTYPES:
        module._library(dtype).use_loops(request.param == "loops")
    yield
    for dtype in module.DTYPES:
        module._library(dtype).use_loops(0)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_is_the_reference(pattern):
    for t in (1, 2, 63, 65, 129, 200, 331):
        tensors = draw(2, t, 4, 2, 6)
        two = torch.stack((torch.arange(t) >= 200, torch.arange(t) < 250)).int()
        for options in ({"cap": 0.3}, {"documents": documents_of(2, t), "scale": 0.2, "cap": 0.0}, {"documents": two}):
            expected = laws.both_passes(lambda *a, o=options: attention.reference(*a, pattern=pattern, **o), tensors)
            actual = laws.both_passes(lambda *a, o=options: tiled_attention(*a, pattern=pattern, **o), tensors)
            assert_close(list(actual), list(expected), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("b, t, h, g, k", ((1, 64, 1, 1, 1), (1, 128, 3, 3, 5), (3, 192, 6, 2, 4), (2, 257, 4, 1, 7)))
def test_grouped_heads_and_odd_dims(b, t, h, g, k):
    tensors = draw(b, t, h, g, k)
    assert_close(
        list(laws.both_passes(tiled_attention, tensors)),
        list(laws.both_passes(attention.reference, tensors)),
        rtol=1e-11,
        atol=1e-13,
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_error_is_at_most_twice_that_of_plain_torch(products, dtype):
    for b, t, h, g, k in ((2, 1, 2, 1, 4), (1, 67, 2, 2, 64), (2, 193, 4, 2, 6), (1, 130, 2, 1, 98)):
        documents = {"pattern": Pattern("window", 90), "documents": documents_of(b, t), "scale": 0.3, "cap": 2.0}
        for options in ({}, documents):
            laws.numbers(lambda impl, *a, o=options: chosen(impl, *a, **o), draw(b, t, h, g, k), dtype, impl="tiled")


@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_a_query_that_sees_one_key_has_no_gradient(products, dtype):
    """Its softmax is 1 whatever the score: the gradient is exactly 0, as plain torch's is, and not a difference of two
    sums in another order. Documents of one token, and the first token of longer ones."""
    for t, dim in ((1, 2), (130, 98), (81, 64)):
        tensors = draw(1, t, 2, 1, dim, dtype)
        for length, cap in ((1, 0.0), (1, 2.0), (7, 0.0)):
            documents = torch.arange(t)[None] // length
            f = functools.partial(tiled_attention, documents=documents, cap=cap)
            _, (dq, dk, _) = laws.both_passes(f, tensors)
            assert not dq[:, ::length].any(), (t, dim, length, cap)
            assert length > 1 or not dk.any(), (t, dim, cap)


def test_laws(products):
    def f(impl, *tensors):
        return chosen(impl, *tensors, pattern=Pattern("strided", 30))

    tensors = draw(2, 71, 4, 2, 6)
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.traced):
        law(f, tensors, impl="tiled")


def test_probabilities_are_rounded_to_nearest():
    """The probabilities of a query sum to 1, so dv for a cotangent of ones sums to the number of queries."""
    q, k, v = draw(1, 256, 1, 1, 2, torch.bfloat16)
    dv = torch.autograd.grad(tiled_attention(q, k, v.requires_grad_()).sum(), v)[0]
    assert abs(float(dv.double().sum()) / 512 - 1.0) < 4e-4


def test_gradcheck():
    leaves = [x.requires_grad_() for x in draw(1, 5, 2, 1, 2)]
    assert torch.autograd.gradcheck(
        lambda *a: tiled_attention(*a, documents=torch.tensor([[0, 0, 1, 1, 1]]), scale=0.7), leaves
    )


def test_torch_func_grad_is_backward():
    tensors = draw(1, 70, 2, 1, 4, torch.float32)
    weight = laws.draw(tensors[0].shape, dtype=torch.float32, seed=1, device="cpu")[0]
    grads = torch.func.grad(lambda *a: (tiled_attention(*a) * weight).sum(), argnums=(0, 1, 2))(*tensors)
    assert_same(list(grads), laws.both_passes(tiled_attention, tensors)[1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    tensors = draw(2, 200, 6, 3, 16, dtype)
    one = laws.both_passes(tiled_attention, tensors)
    torch.set_num_threads(3)
    try:
        assert_same(laws.both_passes(tiled_attention, tensors), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("pattern", (FULL, Pattern("window", 100), Pattern("fixed", 70, 20)), ids=str)
def test_what_a_query_does_not_see_changes_nothing(pattern):
    (q, k, v), other = draw(2, 150, 2, 1, 4, torch.float32), draw(2, 150, 2, 1, 4, torch.float32, seed=1)
    out = tiled_attention(q, k, v, pattern=pattern)
    for cut in (1, 63, 64, 128, 149):
        changed = [torch.cat((mine[:, :cut], theirs[:, cut:]), 1) for mine, theirs in zip((q, k, v), other)]
        assert_same(tiled_attention(*changed, pattern=pattern)[:, :cut], out[:, :cut])
    documents = torch.tensor([[0] * 60 + [1] * 90, [4] * 130 + [3] * 20])
    mine = (documents == torch.tensor([[0], [3]]))[..., None, None]

    def gradients(tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        return torch.autograd.grad(
            (tiled_attention(*leaves, pattern=pattern, documents=documents) * mine).sum(), leaves
        )

    base = gradients((q, k, v))
    assert all(float(torch.where(mine, 0.0, g).abs().max()) == 0.0 for g in base)
    assert_same(gradients([torch.where(mine, x, y) for x, y in zip((q, k, v), other)]), base)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_large_scores_stay_finite_and_nan_is_not_lost(dtype):
    q, k, v = draw(1, 131, 1, 1, 4, dtype)
    large = [300.0 * q, 300.0 * k, v]
    outs, grads = laws.both_passes(tiled_attention, large)
    assert all(bool(x.isfinite().all()) for x in (*outs, *grads))
    exact = attention.reference(*(x.double() for x in large))
    assert_close(outs[0].double(), exact, rtol=2e-2, atol=2e-2)
    for i in range(3):
        spoilt = [x.clone() for x in (q, k, v)]
        spoilt[i][0, 70, 0, 1] = float("nan")
        outs, grads = laws.both_passes(tiled_attention, spoilt)
        assert bool(outs[0][0, 70].isnan().all() if i < 2 else outs[0][0, 70, 0, 1].isnan())
        assert bool(outs[0][0, :64].isfinite().all())
        assert all(bool(g[0, 70].isnan().any()) for g in grads[:2])


@pytest.mark.parametrize(
    "pattern", [PATTERNS["full"], *(pytest.param(p, marks=pytest.mark.exhaustive) for p in PATTERNS.values())], ids=str
)
def test_queries_may_be_the_last_of_the_keys(pattern):
    """As those of a block of a rank of cp: what the whole sequence's attention gives of them."""
    for t, s in ((1, 5), (64, 129), (70, 331), (130, 131)):
        whole = draw(2, s, 4, 2, 6)
        tensors = whole[0][:, s - t :].contiguous(), *whole[1:]
        for options in ({"cap": 0.3}, {"documents": documents_of(2, s)}):
            expected = laws.both_passes(functools.partial(attention.reference, pattern=pattern, **options), tensors)
            for form in (tiled_attention, blocked_attention):
                actual = laws.both_passes(functools.partial(form, pattern=pattern, **options), tensors)
                assert_close(list(actual), list(expected), rtol=1e-11, atol=1e-13)


def test_empty():
    for b, t in ((0, 5), (2, 0)):
        outs, grads = laws.both_passes(tiled_attention, draw(b, t, 2, 1, 4, torch.float32))
        assert [x.shape for x in (*outs, *grads)] == [(b, t, 2, 4), (b, t, 2, 4), (b, t, 1, 4), (b, t, 1, 4)]


def test_what_it_does_not_serve():
    q, k, v = draw(1, 70, 2, 1, 5, torch.bfloat16)
    assert supports(q, k, v) == "the head dim is 5; in bfloat16 it must be even"
    q, k, v = draw(1, 70, 2, 1, 4, torch.float32)
    assert supports(q, k, v) == "" and supports(q, k, v, documents=torch.zeros(1, 70, dtype=torch.int64)) == ""
    assert "float16" in supports(q.half(), k.half(), v.half())
    assert supports(q[:, 1:], k, v) == "" and "at most as many queries as keys" in supports(q, k[:, 1:], v[:, 1:])
    assert supports(q, k, v, scale=-1.0) == "scale is -1.0; it must be above 0"
    assert supports(*(x.to("meta") for x in (q, k, v))) == "a tensor is not on the CPU"
    assert prefers(q[:, :63], k[:, :63], v[:, :63]) == "there are fewer than 64 queries"
    assert "float64" in prefers(q.double(), k.double(), v.double())


def test_where_torch_has_no_small_products_it_is_not_preferred(monkeypatch):
    q, k, v = draw(1, 70, 2, 1, 4, torch.float32)
    monkeypatch.setattr(module, "has_small_products", lambda dtype: False)
    assert prefers(q, k, v) == "torch has no small products in torch.float32 on this CPU"


@pytest.mark.parametrize("pattern", (FULL, Pattern("window", 700), Pattern("fixed", 500, 20)), ids=str)
def test_long_sequences_are_taken_a_block_of_queries_at_a_time(pattern):
    """Beyond BLOCK positions, with an edge of the last block, against the reference; and the room for sums of dk and dv
    is there only where they are wider than dk."""
    t = 1024 + 200
    tensors = draw(1, t, 2, 1, 6)
    documents = (torch.arange(t) // 900)[None]
    for options in ({"cap": 0.3}, {"documents": documents}):
        expected = laws.both_passes(lambda *a, o=options: attention.reference(*a, pattern=pattern, **o), tensors)
        actual = laws.both_passes(lambda *a, o=options: tiled_attention(*a, pattern=pattern, **o), tensors)
        assert_close(list(actual), list(expected), rtol=1e-11, atol=1e-13)
    rooms = [module._gradients(*(x.to(dtype) for x in tensors), False)[3] for dtype in module.DTYPES]
    assert [(room.dtype, room.numel()) for room in rooms] == [(torch.float32, 2 * t * 6), (torch.float32, 0), (F64, 0)]


def test_blocks_of_queries_have_the_error_of_the_dtype():
    laws.numbers(chosen, draw(1, 1100, 2, 1, 8), torch.bfloat16, impl="tiled")
