"""Attention's canonical form: a query's bits depend on no other query or document, on no threads, strides or pages."""

import functools

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same
from test_canonical_forms import BF16, DTYPES, one_thread, pytestmark  # noqa: F401

from fzero.kernels import Pattern, attention, paged_attention
from fzero.kernels.attention import reference

T, H, G, K = 150, 4, 2, 24
EDGES = (0, 47, 94, 141, T)
PATTERNS = pytest.mark.parametrize(
    "pattern", [Pattern.parse(text) for text in ("full", "window:30", "local:16", "strided:5", "fixed:8:2")], ids=str
)
OPTIONS = {"plain": {}, "cap": {"cap": 3.0, "scale": 0.4}, "sinks": {"sinks": torch.tensor([-2.0, 0.5, 1.5, 4.0])}}


def given(dtype, k=K, v=K):
    return laws.draw((2, T, H, k), (2, T, G, k), (2, T, G, v), dtype=dtype)


def by_form(q, k, v, **options):
    return attention.attention(q, k, v, impl="canonical", **options)


def in_pages(tensors, rows, size=16):
    """(k_pages, v_pages, table) of these rows of a batch, in pages in any order; NaN where nothing lies."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = order[: len(rows) * 10].reshape(len(rows), 10)
    pages = [torch.full((40, size, *x.shape[2:]), float("nan"), dtype=x.dtype) for x in tensors]
    for row, of in enumerate(rows):
        for x, page in zip(tensors, pages):
            for s in range(T):
                page[table[row, s // size], s % size] = x[of, s]
    return *pages, table


@DTYPES
@PATTERNS
@pytest.mark.parametrize("name", OPTIONS)
def test_a_query_depends_on_its_own_keys_alone(pattern, name, dtype):
    q, k, v = given(dtype)
    options = {"pattern": pattern, **OPTIONS[name]}
    whole = by_form(q, k, v, **options)
    exact = reference(q.double(), k.double(), v.double(), **options)
    assert_close(whole.double(), exact, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    for t in (1, 2, 33, 70, 149):
        assert_same(by_form(q[:1, :t], k[:1, :t], v[:1, :t], **options), whole[:1, :t])  # a prefix, a row alone
        assert_same(by_form(q[:, -t:], k, v, **options), whole[:, -t:])  # the last queries
    torch.set_num_threads(2)
    assert_same(by_form(*(torch.cat((x, x), -1)[..., :K] for x in (q, k, v)), **options), whole)  # rows apart
    k_pages, v_pages, table = in_pages((k, v), (0, 1, 0))
    queries = torch.cat((q[0, 100:150], q[1, 149:150], q[0, 30:77], q[0, :2]))
    positions = torch.cat((torch.arange(100, 150), torch.tensor([149]), torch.arange(30, 77), torch.tensor([0, 0])))
    starts = torch.tensor([0, 50, 51, 98], dtype=torch.int32)
    out = paged_attention.paged_attention(queries, k_pages, v_pages, table, starts, positions, **options)
    assert_same(out[:98], torch.cat((whole[0, 100:150], whole[1, 149:150], whole[0, 30:77])))
    assert not out[98:].any()


@DTYPES
@pytest.mark.parametrize("pattern", [Pattern.parse(text) for text in ("full", "window:30")], ids=str)
def test_a_document_in_a_packed_row_has_the_bits_of_the_document_alone(pattern, dtype):
    q, k, v = given(dtype)
    documents = torch.bucketize(torch.arange(T), torch.tensor(EDGES[1:]), right=True).expand(2, -1)
    packed = by_form(q, k, v, pattern=pattern, documents=documents)
    exact = reference(q.double(), k.double(), v.double(), pattern=pattern, documents=documents)
    assert_close(packed.double(), exact, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    for first, end in zip(EDGES, EDGES[1:]):  # noqa: RUF007
        assert_same(by_form(*(x[:, first:end] for x in (q, k, v)), pattern=pattern), packed[:, first:end])
    scattered = documents % 2  # each document in two runs
    exact = reference(q.double(), k.double(), v.double(), pattern=pattern, documents=scattered)
    found = by_form(q, k, v, pattern=pattern, documents=scattered)
    assert_close(found.double(), exact, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)


def test_latents_are_keys_and_their_first_numbers_values():
    q, k, _ = given(torch.float32, k=40)
    pages, _, table = in_pages((k, k), (0,))
    starts, positions = torch.tensor([0, 3], dtype=torch.int32), torch.arange(147, 150)
    inputs = q[0, 147:], pages, pages[..., :33], table, starts, positions
    assert_close(paged_attention.paged_attention(*inputs), paged_attention.reference(*inputs), rtol=1e-5, atol=2e-6)
    assert_same(paged_attention.paged_attention(*inputs), by_form(q, k, k[..., :33])[0, 147:])


def test_another_order_of_keys_is_found():
    """Planted: the same keys in another order, whose sums differ in their last bits alone."""
    q, k, v = given(torch.float32)
    last, turned = by_form(q[:, -1:], k, v), by_form(q[:, -1:], k.flip(1), v.flip(1))
    assert_close(turned, last, rtol=1e-4, atol=1e-5)
    assert not torch.equal(turned, last)


@pytest.mark.parametrize("name", ["sinks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "cap"))])
def test_the_form_obeys_every_law(name):
    documents = torch.tensor([[0] * 5 + [1] * 6])
    sinks = OPTIONS[name].get("sinks", torch.zeros(0))

    def f(impl, q, k, v, *sinks, documents=documents):
        options = {**OPTIONS[name], **({"sinks": sinks[0]} if sinks else {})}
        return attention.attention(q, k, v, impl=impl, documents=documents, **options)

    tensors = [*laws.draw((1, 11, 4, 8), (1, 11, 2, 8), (1, 11, 2, 8)), *([sinks.double()] if len(sinks) else [])]
    for dtype in (torch.float32, BF16):
        laws.numbers(f, tensors, dtype, impl="canonical")
    for law in (laws.repeats, laws.adjoint, laws.transforms):
        law(f, tensors, impl="canonical")
    laws.traced(functools.partial(f, documents=None), tensors, impl="canonical")  # documents are no argument here


def test_what_it_does_not_serve_is_said():
    q, k, v = given(torch.float32)
    with pytest.raises(ValueError, match="the pattern is bigbird"):
        by_form(q, k, v, pattern=Pattern.parse("bigbird:16:2:1:1"))
    with pytest.raises(ValueError, match=r"the dtypes are torch\.float64"):
        by_form(q.double(), k.double(), v.double())
